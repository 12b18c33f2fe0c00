"""The task table: ranges of rows as the kernels take them, made in the plan. Seed 5.1 and 7.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sacts.reference.spec import Schedule


class Columns(NamedTuple):
    """The columns of a task table, int32: slots `start` to `end` of the row are its part number `split` of `parts`.
    `queries` rows, `row` and those of as many tokens behind it, have this list, which begins at `entry` of kv_indices.
    `request`: theirs.
    """

    row: Tensor
    start: Tensor
    end: Tensor
    split: Tensor
    parts: Tensor
    queries: Tensor
    entry: Tensor
    request: Tensor


@dataclass(frozen=True)
class Tasks:
    """`table` int32 [num_tasks, 8]: `Columns`, in the order of the schedule; `row` says where a result belongs. int32
    [split rows]: `split_rows`, the rows in several parts, which the merge finishes, and `parts`, how many each has.
    `tile`: slots; parts begin at multiples of it. `q_tile`: rows that share tasks, at most. `longest`: tiles of the
    longest row.
    """

    table: Tensor
    split_rows: Tensor
    parts: Tensor
    tile: int
    q_tile: int
    longest: int

    @property
    def num_tasks(self) -> int:
        """Tasks of all rows; at least one of each."""
        return self.table.shape[0]

    @property
    def columns(self) -> Columns:
        """The table by columns, int64."""
        return Columns(*self.table.long().unbind(1))


@dataclass(frozen=True)
class Rows:
    """The candidate rows of a plan, [num_lists] each: `starts` and `lengths` of their lists in kv_indices, entries of
    `block_size` tokens; `request`. `repeats`, bool: the row has the list of the row before it with the same head, which
    is of the same request; None where that is not asked for. `list_heads`: rows of a token.
    """

    starts: Tensor
    lengths: Tensor
    block_size: int
    request: Tensor
    repeats: Tensor | None = None
    list_heads: int = 1


def tasks_of(
    rows: Rows, num_splits: int, tile: int, *, schedule: Schedule, q_tile: int = 1, least_part: int = 1
) -> Tasks:
    """Cut rows into at most `num_splits` parts of whole tiles, of `least_part` slots at least, of equal length but for
    the last. How a row is cut depends on its length and on these numbers alone. At most `q_tile` rows that repeat one
    list share their tasks. A row without entries has one task of no slots, so that its output is written.
    """
    slots = rows.lengths.long() * rows.block_size
    tiles = (slots + tile - 1) // tile
    per_part = ((tiles + num_splits - 1) // num_splits).clamp(min=-(-least_part // tile))
    parts = ((tiles + per_part - 1) // per_part).clamp(min=1)
    first, queries = shared(rows, q_tile)
    own = parts[first]
    row = torch.repeat_interleave(first, own)
    split = torch.arange(len(row), device=row.device) - torch.repeat_interleave(own.cumsum(0) - own, own)
    start = split * per_part[row] * tile
    end = torch.minimum(start + per_part[row] * tile, slots[row])
    columns = Columns(row, start, end, split, parts[row], queries[row], rows.starts[row], rows.request[row])
    table = torch.stack([column.to(torch.int32) for column in columns], dim=1)
    if schedule is Schedule.SHUFFLED:
        table = table[shuffled(len(table), table.device)]
    several = (parts > 1).nonzero()[:, 0]
    longest = int(tiles.max()) if len(tiles) else 0
    return Tasks(table, several.to(torch.int32), parts[several].to(torch.int32), tile, q_tile, longest)


def shared(rows: Rows, q_tile: int) -> tuple[Tensor, Tensor]:
    """The first of every `q_tile` rows of one list, in order, and of each row how many there are from it on."""
    count = len(rows.request)
    if rows.repeats is None or q_tile == 1:
        return torch.arange(count, device=rows.request.device), torch.ones_like(rows.request)
    repeats = rows.repeats.view(-1, rows.list_heads)
    token = torch.arange(len(repeats), device=repeats.device)[:, None].expand(repeats.shape)
    run = torch.where(repeats, 0, token).cummax(0).values
    begins = (token - run) % q_tile == 0
    following = torch.where(begins, token, len(repeats)).flip(0).cummin(0).values.flip(0)
    behind = torch.cat((following[1:], following.new_full((1, rows.list_heads), len(repeats))))
    return begins.flatten().nonzero()[:, 0], (behind - token).flatten()


def shuffled(n: int, device: torch.device) -> Tensor:
    """A permutation of n tasks that depends on n alone: sorted by a hash of their numbers."""
    number = torch.arange(n, device=device)
    for odd in (0x9E3779B1, 0x85EBCA6B):
        number = (number * odd) & 0xFFFFFFFF
        number = number ^ (number >> 15)
    return number.argsort(stable=True)
