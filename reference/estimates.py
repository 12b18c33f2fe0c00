"""The reference's own error: how far its FP64 result may be from the exact one, a running bound per row.

Derived, for any order of the sums, from |fl(x op y) - x op y| <= u |x op y| with u = 2^-53 and from elementary
functions within `LIBM` u; docs/semantics-numbers.md has the derivation. Sums of products |q_c k_jc| are bounded by
norms (Cauchy-Schwarz), sums w_j |v_ji| by the largest |v_ji|, so the estimate costs less than the result and is wide
by small factors, which FP64 can afford.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .groups import Group
from .spec import AttentionSpec, RoPE

Array = NDArray[np.float64]

U = 2.0**-53
LIBM = 8  # exp, log, tanh, sin, cos, pow: error in u; 4 ulp, the limit of NumPy's vector loops
TINY = 2.0**-1074  # the least subnormal: what an underflow may lose
LOST = 2.0**-1018  # times u: more than underflow may take from one term of out
SLACK = 1.01  # for terms of second order and the rounding of the estimate itself
MAX_LOGIT = 1e7
MAX_RELATIVE = 2.0**-20  # of a weight; beyond it the bound is no longer small


class Estimate(NamedTuple):
    """|computed - exact| of out [b, r, g, d_vo] and lse [b, r, g]; in_range [b, r, g]: False where FP64 is too short
    (a logit may exceed 1e7, or a weight be wrong by 2^-20), so that nothing may be judged by the row.
    """

    out: Array
    lse: Array
    in_range: NDArray[np.bool_]


def estimate(spec: AttentionSpec, group: Group, out: Array, lse: Array) -> Estimate:
    """The running bound of one group, for its out and lse before the epilogue."""
    logit, size = _logit_error(spec, group)
    keys = group.k.shape[-2]
    exponent = 2 * size * U + LIBM * U
    if spec.sink_logits:
        sink = np.abs(np.asarray(spec.sink_logits)[group.qo_heads])[:, None]
        size = np.maximum(size, sink)
        exponent = exponent + 2 * (2 * size * U + LIBM * U)
    some = np.broadcast_to(group.counts.max(axis=-1, initial=0)[..., None] > 0, lse.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        weight = np.expm1(logit + exponent) + (keys + 4) * U
        relative = SLACK * weight / np.maximum(1 - weight, 0.0)
        in_range = ~some | ((size <= MAX_LOGIT) & (relative <= MAX_RELATIVE))
        lse_error = relative + 4 * U * np.abs(lse) + 2 * LIBM * U * (np.log(keys + 1.0) + size)
        factor = np.where(some, np.where(in_range, 2 * relative + 4 * U, np.inf), 0.0)
        largest = group.largest_v[:, None, None]
        if spec.dropout:
            largest = largest * ((1 + 4 * U) / (1 - spec.dropout.p))
        out_error = factor[..., None] * (largest + keys * LOST)
    return Estimate(out_error, np.where(some, np.where(in_range, lse_error, np.inf), 0.0), in_range)


def _logit_error(spec: AttentionSpec, group: Group) -> tuple[Array, Array]:
    """Absolute error of any attended logit, and a bound of |logit|: [b, r, g] each."""
    d = group.q.shape[-1]
    products = group.product_bound
    error = (d + 8) * U * products + TINY * d
    size = products
    if spec.rope:
        turn = angle_error(spec.rope)
        farthest = np.abs(group.key_position).max(axis=-1, initial=0)[:, None] + np.abs(group.query_position)
        error = error + products * (turn * farthest + 4 * (LIBM + 4) * U)[..., None]
    if spec.logits_soft_cap:
        error = error + (LIBM + 4) * U * products
        size = np.minimum(size, spec.logits_soft_cap)
    added = _added(spec, group)
    size = size + added
    error = SLACK * (error + 6 * U * size + LIBM * U * added)
    return error, size


def angle_error(rope: RoPE) -> float:
    """Error of the worst angle per unit of position; pair 0 turns by the position itself, without error."""
    exponent = 2 * np.arange(rope.rotary_dim // 2) / rope.rotary_dim
    relative = np.where(exponent > 0, exponent * np.log(rope.base) + LIBM + 2, 0.0) * U
    return float((rope.base**-exponent * relative).max())


def _added(spec: AttentionSpec, group: Group) -> Array:
    """A bound of |bias| + ln(count): [b, r, g]."""
    added: Array = np.log(np.maximum(group.counts.max(axis=-1, initial=1), 1.0))[..., None]
    if spec.alibi_slopes:
        distance = np.abs(group.query_position) + np.abs(group.key_position).max(axis=-1, initial=0)[:, None]
        added = added + np.abs(np.asarray(spec.alibi_slopes))[group.qo_heads][:, None] * distance[..., None]
    if spec.buckets:
        added = added + np.abs(np.asarray(spec.buckets.bias)).max(axis=-1)[group.qo_heads][:, None]
    return added
