"""What the modelled kernel computes on its way: logits, and the running state after each tile of each split."""

from __future__ import annotations

import torch

from sacts.conformance.adapter import Trace
from sacts.reference.spec import AttentionSpec

from .arithmetic import LOG2E, Arithmetic
from .forward import State, parts_of, split_state, tiles_of
from .terms import Rows, keep_factor, logits


def trace(spec: AttentionSpec, rows: Rows, arithmetic: Arithmetic) -> Trace:
    """The trace of all rows."""
    natural, kept = logits(spec, rows, arithmetic).z, keep_factor(spec, rows)
    order: list[torch.Tensor] = []
    splits: list[int] = []
    states: list[State] = []
    for split, part in enumerate(parts_of(natural.shape[-1], arithmetic)):
        z = natural[..., part] * LOG2E
        split_state(z, rows.v[:, part], None if kept is None else kept[..., part], arithmetic, states)
        slots = torch.arange(natural.shape[-1])[part]
        tiles = [slots[tile] for tile in tiles_of(z.shape[-1], arithmetic)]
        order += tiles
        splits += [split] * len(tiles)
    visited = torch.cat(order)
    tile = torch.repeat_interleave(torch.arange(len(order)), torch.tensor([len(slots) for slots in order]))
    return Trace(
        tokens=torch.where(rows.edge, rows.token, -1)[:, visited],
        tiles=tile.expand(spec.num_rows, -1),
        splits=torch.tensor(splits).expand(spec.num_rows, -1),
        logits=natural[..., visited],
        m=torch.stack([state.m for state in states], dim=-1) / LOG2E,
        l=torch.stack([state.l for state in states], dim=-1),
        o=torch.stack([state.o for state in states], dim=-2),
    )
