"""The reference's own error in a gradient: how far an FP64 result may be from the exact one, by row and by key.

As in `estimates`: u = 2^-53, any order of the sums, norms and maxima in place of sums, so that the estimate costs less
than the result; docs/semantics-gradients.md has the derivation. A bound is infinite where FP64 is too short.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .estimates import LIBM, LOST, SLACK, TINY, U, angle_error, estimate
from .groups import Group
from .keys import largest
from .spec import AttentionSpec, RoPE

Array = NDArray[np.float64]

FLOOR = 64 * TINY  # what the underflows of one product of four factors may lose
STEEPEST = 1600  # at a larger |z| / c the slope of the soft cap is below the least subnormal


class Estimated(NamedTuple):
    """A gradient and, shaped as it is, a bound of its distance to the exact one: infinite where FP64 is too short for
    the element, so that nothing may be judged by it.
    """

    value: Array
    error: Array


def judge(value: Array, error: Array) -> None:
    """Make infinite, in place, each error that is not finite or belongs to a value that is not."""
    error[~(np.isfinite(value) & np.isfinite(error))] = np.inf


class RowBounds(NamedTuple):
    """Bounds by row and head, [b, r, g] each. `p`: relative error of P. `size`: of |dP_j - D + d_lse|, with
    |dS_j| <= P_j size. `d_lse_less_d`: of |d_lse - D|, and `d` the error of D. `d_s`, `d_z`: the errors of dS_j and of
    dZ_j (behind the soft cap) in units of P_j. `largest_kept`: the largest factor of dropout.
    """

    p: Array
    size: Array
    d_lse_less_d: Array
    d: Array
    d_s: Array
    d_z: Array
    largest_kept: float


def row_bounds(
    spec: AttentionSpec, group: Group, lse: Array, d_out: Array, d_out_error: Array, d_lse: Array
) -> RowBounds:
    """The bounds of one group: lse, d_lse [b, r, g], d_out and its error [b, r, g, d_vo]."""
    own, keys = estimate(spec, group, d_out, lse), group.k.shape[-2]
    kept = (1 + 4 * U) / (1 - spec.dropout.p) if spec.dropout else 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.where(own.in_range, 2 * own.lse + 4 * U, np.inf)
        largest_v = kept * group.largest_v[:, None, None]
        d_p_size = SLACK * (np.abs(d_out) * largest_v).sum(-1) + LOST
        size = 2 * d_p_size + np.abs(d_lse)
        d_p = (group.v.shape[-1] + 6) * U * d_p_size + SLACK * (d_out_error * largest_v).sum(-1)
        d = SLACK * (p * d_p_size + d_p + (keys + 2) * U * d_p_size)
        d_s = SLACK * (p * size + d_p + d + 4 * U * size)
        d_z = d_s
        if spec.logits_soft_cap:
            exponent = np.minimum(4 * group.product_bound / spec.logits_soft_cap, STEEPEST) + 2 * LIBM + 8
            slope = np.expm1(2 * own.lse / spec.logits_soft_cap) + exponent * U
            d_z = SLACK * (d_s + (size + d_s) * slope)
    p, d, d_s, d_z = (_or_infinite(x) for x in (p, d, d_s, d_z))
    return RowBounds(p, size, d_p_size + np.abs(d_lse), d, d_s, d_z, kept)


def query_error(spec: AttentionSpec, group: Group, bounds: RowBounds) -> Array:
    """The error of d_q [b, r, g, d_qk]: sum_j P_j |k_jc| is at most the largest |k_jc|."""
    keys, scale = group.k.shape[-2], abs(spec.sm_scale)
    channel = _paired(spec.rope, _paired(spec.rope, largest(group.k)))[:, None, None]
    with np.errstate(over="ignore", invalid="ignore"):
        by_row = bounds.d_z + bounds.size * ((keys + 4) * U + _turns(spec, group)) + keys * FLOOR
        error = SLACK * scale * by_row[..., None] * (channel + LOST) + (scale + 1) * keys * FLOOR
    return np.where(np.asarray(group.edge.any(-1))[..., None, None], _or_infinite(error), 0.0)


class Columns(NamedTuple):
    """A bound (P_ij row_i + floor_i) channel_c of the error that row i adds to channel c of key j: row, floor (for what
    underflows however small P is) [b, r, g], channel [b, d].
    """

    row: Array
    floor: Array
    channel: Array


def key_columns(spec: AttentionSpec, group: Group, bounds: RowBounds, terms: int) -> Columns:
    """The error of d_k; `terms`: products that may be added up for one key."""
    with np.errstate(over="ignore", invalid="ignore"):
        by_row = bounds.d_z + bounds.size * ((terms + 4) * U + _turns(spec, group))
        sizes = _paired(spec.rope, _paired(spec.rope, np.abs(group.q) + LOST))
        return _columns(sizes, SLACK * by_row, abs(spec.sm_scale) + LOST)


def value_columns(spec: AttentionSpec, bounds: RowBounds, d_out: Array, d_out_error: Array, terms: int) -> Columns:
    """The error of d_v; `terms` as in `key_columns`."""
    with np.errstate(over="ignore", invalid="ignore"):
        relative = (bounds.p + (terms + 6) * U)[..., None]
        sizes = np.where(np.isfinite(relative), relative, 1.0) * np.abs(d_out) + d_out_error
        return _columns(sizes, np.where(np.isfinite(bounds.p), SLACK, np.inf), bounds.largest_kept)


def _columns(sizes: Array, by_row: Array, factor: float) -> Columns:
    """factor by_row_i sizes_ic: rows of unlike sizes [b, r, g, d] each on their own scale, then the largest of each
    channel.
    """
    scale = sizes.max(axis=-1)
    finite = np.isfinite(scale)
    share = np.where(finite[..., None], sizes / np.where(finite & (scale > 0), scale, 1.0)[..., None], 1.0)
    scale = factor * (scale + LOST)
    return Columns(_or_infinite(by_row * scale), FLOOR * scale, share.max(axis=(1, 2)) + LOST)


def _turns(spec: AttentionSpec, group: Group) -> Array:
    """Relative error that turning q and k, and their gradients back, adds: [b, r, 1] (or 0)."""
    if spec.rope is None:
        return np.zeros(1)
    farthest = np.abs(group.key_position).max(axis=-1, initial=0)[:, None] + np.abs(group.query_position)
    turns: Array = 2 * angle_error(spec.rope) * farthest + 8 * (LIBM + 4) * U
    return turns[..., None]


def _paired(rope: RoPE | None, x: Array) -> Array:
    """Bounds |x_c| [..., d] that hold under any rotation of the pairs: |x_a| + |x_b| for both channels of a pair."""
    if rope is None:
        return x
    paired: Array = x.copy()
    first, second = scores.pairs(rope)
    paired[..., first] += x[..., second]
    paired[..., second] += x[..., first]
    return paired


def _or_infinite(x: Array) -> Array:
    bound: Array = np.where(np.isnan(x), np.inf, x)
    return bound
