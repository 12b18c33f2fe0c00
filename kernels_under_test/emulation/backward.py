"""Backward of the modelled kernel, from saved candidates, out and lse: P again, delta, dS, and three products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sacts.reference.spec import AttentionSpec, Reduction

from .arithmetic import LOG2E, Arithmetic, cast, exp2, product
from .terms import Rows, keep_factor, logits, turned

TILE_ROWS = 4  # rows whose gradients of a slot a KV-centric program adds first
HOT = 4  # rows that add to a slot, beyond which a hybrid reduction is KV-centric


class Saved(NamedTuple):
    """What forward left: out [R, g, d_vo] before the epilogue, lse [R, g]."""

    out: Tensor
    lse: Tensor


class RowGradients(NamedTuple):
    """d_q [R, g, d_qk]; d_k [R, K, d_qk] and d_v [R, K, d_vo]: what each row adds to its keys; d_sink [R, g]."""

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_sink: Tensor


def backward(
    spec: AttentionSpec,
    rows: Rows,
    saved: Saved,
    d_out: Tensor,
    d_lse: Tensor,
    arithmetic: Arithmetic,
) -> RowGradients:
    """Gradients of every row, FP32: d_out [R, g, d_vo], d_lse [R, g]."""
    scores = logits(spec, rows, arithmetic)
    lse = torch.where(saved.lse > -torch.inf, saved.lse, 0.0)
    p = exp2((scores.z - lse[..., None]) * LOG2E, arithmetic.exp2).masked_fill(~rows.edge[:, None], 0.0)
    kept = keep_factor(spec, rows)
    d_p = product(d_out, rows.v.transpose(-1, -2), arithmetic)
    weights = p
    if kept is not None:
        d_p, weights = d_p * kept, p * kept
    delta = (d_out * saved.out).sum(dim=-1)
    if arithmetic.delta_from_p:
        delta = (p * d_p).sum(dim=-1)
    d_z = p * (d_p - delta[..., None] + d_lse[..., None])
    if scores.capped is not None:
        d_z = d_z * (1.0 - scores.capped * scores.capped)
    before, scale = (spec.sm_scale, 1.0) if arithmetic.scaled_d_s else (1.0, spec.sm_scale)
    d_z = d_z * before
    d_z = cast(d_z, arithmetic.p_backward)
    d_q = product(d_z, scores.k, arithmetic) * scale
    d_k = product(d_z.transpose(-1, -2), scores.q, arithmetic) * scale
    d_v = product(cast(weights, arithmetic.p_backward).transpose(-1, -2), d_out, arithmetic)
    if spec.rope:
        d_q = turned(d_q, rows.query_position[:, None], spec.rope, -1)
        d_k = turned(d_k, rows.key_position, spec.rope, -1)
    d_sink = torch.zeros_like(delta)
    if spec.sink_logits:
        sink = torch.tensor(spec.sink_logits, dtype=torch.float32)[rows.qo_head]
        d_sink = exp2((sink - lse) * LOG2E, arithmetic.exp2) * (d_lse - delta)
    return RowGradients(d_q, d_k, d_v, d_sink)


def scattered(d: Tensor, slot: Tensor, slots: int, order: int = 0, reduction: Reduction = Reduction.ATOMIC) -> Tensor:
    """Sum of what rows add to each physical slot, [slots, d]: d [R, K, d], slot [R, K]. One row after another, as
    atomics in some order do; KV-centric: the rows of a tile first, tile after tile; hybrid: so where more than HOT rows
    add.
    """
    if reduction is Reduction.ATOMIC:
        return _one_by_one(d, slot, slots, order)
    by_tile = _by_tile(d, slot, slots)
    if reduction is Reduction.KV_CENTRIC:
        return by_tile
    hot = torch.bincount(slot[d.abs().amax(dim=-1) > 0], minlength=slots) > HOT
    return torch.where(hot[:, None], by_tile, _one_by_one(d, slot, slots, order))


def _one_by_one(d: Tensor, slot: Tensor, slots: int, order: int) -> Tensor:
    total = torch.zeros(slots, d.shape[-1])
    shuffled = torch.randperm(len(d), generator=torch.Generator().manual_seed(order)).tolist()
    for row in shuffled if order else range(len(d)):
        total.index_add_(0, slot[row], d[row])
    return total


def _by_tile(d: Tensor, slot: Tensor, slots: int) -> Tensor:
    total = torch.zeros(slots, d.shape[-1])
    for first in range(0, len(d), TILE_ROWS):
        tile = slice(first, first + TILE_ROWS)
        total += torch.zeros_like(total).index_add_(0, slot[tile].flatten(), d[tile].flatten(0, 1))
    return total
