"""The task table: ranges of rows as the kernels take them, made in the plan. Seed 5.1 and 7.4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sacts.reference.spec import Hints, Schedule


@dataclass(frozen=True)
class Tasks:
    """`table` int32 [num_tasks, 4]: (row, start, end, split), slots start to end of a row as its part number split;
    the order is the schedule's, and `row` says where the result belongs. int32 [split rows]: `split_rows`, the rows in
    several parts, which the merge finishes, and `parts`, how many each has. `tile`: slots; parts begin at multiples of
    it. `longest`: tiles of the longest row.
    """

    table: Tensor
    split_rows: Tensor
    parts: Tensor
    tile: int
    longest: int

    @property
    def num_tasks(self) -> int:
        """Tasks of all rows; at least one of each."""
        return self.table.shape[0]


def tasks_of(kv_indptr: Tensor, block_size: int, hints: Hints, tile: int) -> Tasks:
    """Cut rows of `kv_indptr` [num_rows + 1] entries into at most `num_splits` parts of whole tiles, of equal length
    but for the last, and no more than they have tiles. How a row is cut depends on it and on the hints alone. A row
    without entries has one task of no slots, so that its output is written.
    """
    slots = kv_indptr.diff().long() * block_size
    tiles = (slots + tile - 1) // tile
    per_part = ((tiles + hints.num_splits - 1) // hints.num_splits).clamp(min=1)
    parts = ((tiles + per_part - 1) // per_part).clamp(min=1)
    row = torch.repeat_interleave(parts)
    split = torch.arange(len(row), device=row.device) - (parts.cumsum(0) - parts)[row]
    start = split * per_part[row] * tile
    end = torch.minimum(start + per_part[row] * tile, slots[row])
    table = torch.stack((row, start, end, split), dim=1).to(torch.int32)
    if hints.schedule is Schedule.SHUFFLED:
        table = table[shuffled(len(table), table.device)]
    several = (parts > 1).nonzero()[:, 0]
    longest = int(tiles.max()) if len(tiles) else 0
    return Tasks(table, several.to(torch.int32), parts[several].to(torch.int32), tile, longest)


def shuffled(n: int, device: torch.device) -> Tensor:
    """A permutation of n tasks that depends on n alone: sorted by a hash of their numbers."""
    number = torch.arange(n, device=device)
    for odd in (0x9E3779B1, 0x85EBCA6B):
        number = (number * odd) & 0xFFFFFFFF
        number = number ^ (number >> 15)
    return number.argsort(stable=True)
