"""What the attention kernel stores on its way under TRACE: logits, and the running state after each tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sacts.conformance.adapter import Trace
from sacts.reference.spec import AttentionSpec

from .tasks import Tasks

LN2 = math.log(2.0)


@dataclass(frozen=True)
class Recording:
    """The tensors of a trace, by row (of branches branch behind branch) padded to n tiles of the longest: int32
    `tokens` [rows, n * tile], -1 where no edge is; FP32 `logits` [rows, g, n * tile], `m`, `l` [rows, g, n], `o`
    [rows, g, n, head_dim_vo], in units of log2.
    """

    tokens: Tensor
    logits: Tensor
    m: Tensor
    l: Tensor
    o: Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the attention kernel."""
        return {
            **{f"trace_{name}_ptr": tensor for name, tensor in vars(self).items()},
            "trace_tiles": self.m.shape[-1],
            "TRACE": True,
        }


NOTHING: dict[str, Any] = {
    **{f"trace_{name}_ptr": None for name in Recording.__dataclass_fields__},
    "trace_tiles": 0,
    "TRACE": False,
}


def recording_of(spec: AttentionSpec, tasks: Tasks) -> Recording:
    """Tensors for a trace of these tasks."""
    device, tiles = tasks.table.device, max(1, tasks.longest)
    rows = spec.num_lists, spec.heads_per_list
    return Recording(
        tokens=torch.full((spec.num_lists, tiles * tasks.tile), -1, dtype=torch.int32, device=device),
        logits=torch.zeros(*rows, tiles * tasks.tile, device=device),
        m=torch.zeros(*rows, tiles, device=device),
        l=torch.zeros(*rows, tiles, device=device),
        o=torch.zeros(*rows, tiles, spec.head_dim_vo, device=device),
    )


def trace_of(spec: AttentionSpec, tasks: Tasks, recorded: Recording) -> Trace:
    """The trace; maxima and logits become natural in FP64, so that this rounds nothing."""
    slots = recorded.tokens.shape[1]
    tiles = torch.arange(slots, device=recorded.tokens.device) // tasks.tile
    return Trace(
        tokens=recorded.tokens,
        tiles=tiles.expand(recorded.tokens.shape),
        splits=splits_of(tasks, spec.list_heads, *recorded.m.shape[::2]),
        logits=recorded.logits.double() * LN2,
        m=recorded.m.double() * LN2,
        l=recorded.l,
        o=recorded.o,
    )


def splits_of(tasks: Tasks, list_heads: int, num_rows: int, tiles: int) -> Tensor:
    """The split of each tile of each row, -1 behind its last: [num_rows, tiles]; `list_heads`: rows of a token."""
    columns = tasks.columns
    task, member = _ranges(columns.queries)
    row = columns.row[task] + member * list_heads
    first, behind = columns.start // tasks.tile, (columns.end + tasks.tile - 1) // tasks.tile
    of_row, within = _ranges((behind - first)[task])
    found = torch.full((num_rows, tiles), -1, dtype=torch.long, device=row.device)
    found[row[of_row], first[task][of_row] + within] = columns.split[task][of_row]
    return found


def _ranges(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For `counts` [n], number i counts[i] times, and the place of each among its like."""
    number = torch.repeat_interleave(counts)
    return number, torch.arange(len(number), device=counts.device) - (counts.cumsum(0) - counts)[number]
