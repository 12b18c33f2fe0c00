"""Forward of the modelled kernel: splits of tiles with an online softmax, a merge, the sink, the epilogue."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sacts.reference.spec import AttentionSpec

from .arithmetic import LOG2E, Arithmetic, cast, exp2, product
from .terms import Rows, epilogue, keep_factor, logits


class State(NamedTuple):
    """m in octaves and l [R, g], o [R, g, d_vo] un-normalised."""

    m: Tensor
    l: Tensor
    o: Tensor


def forward(
    spec: AttentionSpec, rows: Rows, arithmetic: Arithmetic, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [R, g, d_vo] rounded to the output format and lse [R, g], both kept as FP32."""
    state = attended(spec, rows, arithmetic)
    out, lse = normalised(state)
    return cast(epilogue(spec, out, gate), arithmetic.out), lse


def added(spec: AttentionSpec, parts: list[Tensor], gates: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Branches [..., heads, d_vo], each stored as a partial output, times their gates [..., heads, branches]; rounded
    to the output format, kept as FP32.
    """
    out = torch.zeros_like(parts[0])
    for branch, part in enumerate(parts):
        out = out + gates[..., branch, None] * cast(part, arithmetic.partial)
    return cast(epilogue(spec, out, None), arithmetic.out)


def attended(spec: AttentionSpec, rows: Rows, arithmetic: Arithmetic) -> State:
    """All splits of each row, merged, with the sink."""
    z = logits(spec, rows, arithmetic).z * LOG2E
    kept = keep_factor(spec, rows)
    states = [
        split_state(z[..., part], rows.v[:, part], None if kept is None else kept[..., part], arithmetic)
        for part in parts_of(z.shape[-1], arithmetic)
    ]
    state = _merged(states, arithmetic) if len(states) > 1 else states[0]
    if spec.sink_logits:
        state = _with_sink(state, torch.tensor(spec.sink_logits, dtype=torch.float32)[rows.qo_head] * LOG2E, arithmetic)
    return state


def normalised(state: State) -> tuple[Tensor, Tensor]:
    """out [R, g, d_vo] before the epilogue and lse [R, g], FP32."""
    some = state.l > 0
    l = torch.where(some, state.l, 1.0)
    out = torch.where(some[..., None], state.o / l[..., None], 0.0)
    lse = torch.where(some, (state.m + torch.log2(l)) / LOG2E, -torch.inf)
    return out, lse


def parts_of(slots: int, arithmetic: Arithmetic) -> list[slice]:
    """The slots of each split: whole tiles."""
    tiles = -(-slots // arithmetic.tile)
    length = max(1, -(-tiles // arithmetic.splits)) * arithmetic.tile
    return [slice(start, start + length) for start in range(0, max(slots, 1), length)]


def split_state(
    z: Tensor, v: Tensor, kept: Tensor | None, arithmetic: Arithmetic, seen: list[State] | None = None
) -> State:
    """Online softmax over the tiles of one split; a tile without an edge is skipped, row by row. `seen` takes the
    running state after each tile.
    """
    m = torch.full(z.shape[:-1], -torch.inf)
    l, o = torch.zeros_like(m), torch.zeros((*m.shape, v.shape[-1]))
    for tile in tiles_of(z.shape[-1], arithmetic):
        part = z[..., tile]
        top = part.amax(dim=-1)
        raised = torch.where(top > m + arithmetic.lag, top, m)
        base = torch.where(raised > -torch.inf, raised, 0.0)
        p = exp2(part - base[..., None], arithmetic.exp2).masked_fill(part == -torch.inf, 0.0)
        scale = torch.where(m > -torch.inf, exp2(m - base, arithmetic.exp2), 0.0)
        weights = _raised(p if kept is None else p * kept[..., tile], arithmetic)
        l = scale * l + (_raised(p, arithmetic) if arithmetic.l_sums_cast_p else p).sum(dim=-1)
        o = scale[..., None] * o + product(weights, v[:, tile], arithmetic)
        m = raised
        if seen is not None:
            seen.append(State(m, l, o))
    return State(m, l, o)


def _raised(p: Tensor, arithmetic: Arithmetic) -> Tensor:
    """P as it enters P V: raised by its offset, cast, and lowered again."""
    factor = 2.0**arithmetic.p_offset
    return cast(p * factor, arithmetic.p) / factor


def tiles_of(slots: int, arithmetic: Arithmetic) -> list[slice]:
    """The tiles of a split, in the order in which it visits them."""
    starts = list(range(0, slots, arithmetic.tile))
    if arithmetic.order:
        order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(arithmetic.order))
        starts = [starts[i] for i in order.tolist()]
    return [slice(start, start + arithmetic.tile) for start in starts]


def _merged(states: list[State], arithmetic: Arithmetic) -> State:
    """Split partials, stored in their format, brought to one maximum and added."""
    if arithmetic.merge_outputs:
        states = [_as_output(state, arithmetic) for state in states]
    states = [state._replace(o=cast(state.o, arithmetic.partial)) for state in states]
    m = torch.stack([state.m for state in states]).amax(dim=0)
    base = torch.where(m > -torch.inf, m, 0.0)
    scales = [torch.where(state.l > 0, exp2(state.m - base, arithmetic.exp2), 0.0) for state in states]
    l = sum((scale * state.l for scale, state in zip(scales, states, strict=True)), torch.zeros_like(m))
    o = sum((scale[..., None] * s.o for scale, s in zip(scales, states, strict=True)), torch.zeros_like(states[0].o))
    return State(m, l, o)


def _as_output(state: State, arithmetic: Arithmetic) -> State:
    """A split as its normalised output with its lse for a maximum, and mass 1."""
    some = state.l > 0
    l = torch.where(some, state.l, 1.0)
    m = torch.where(some, state.m + torch.log2(l), -torch.inf)
    return State(m, some.float(), state.o / l[..., None])


def _with_sink(state: State, sink: Tensor, arithmetic: Arithmetic) -> State:
    """The learned logit joins once, after the merge; it has no value."""
    m = torch.maximum(torch.where(state.l > 0, state.m, -torch.inf), sink)
    scale = torch.where(state.l > 0, exp2(state.m - m, arithmetic.exp2), 0.0)
    return State(m, scale * state.l + exp2(sink - m, arithmetic.exp2), scale[..., None] * state.o)
