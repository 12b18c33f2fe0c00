"""Scores: scaled dot products, the terms on them, and the masks, all by position; DESIGN section 4 "One row".

The order is sm_scale * q.k (q and k rotated by RoPE) -> soft cap -> bias -> (multiset: + ln count) -> mask. Positions
are logical, but for the terms of a sequence, which use ordinals. Shapes: q [..., r, g, d] are r queries of g heads
that share the keys k [..., S, d]; logits are [..., r, g, S].
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .spec import AttentionSpec, CausalRule, RelativeBuckets, RoPE, RopeLayout

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def logits(q: Array, k: Array, sm_scale: float) -> Array:
    """z = sm_scale * q.k: q [..., r, g, d] and the k [..., S, d] that these share -> [..., r, g, S]; equation (4)."""
    *lead, r, g, d = q.shape
    products: Array = (sm_scale * q).reshape(*lead, r * g, d) @ k.swapaxes(-1, -2)
    return products.reshape(*lead, r, g, k.shape[-2])


def pairs(rope: RoPE) -> tuple[slice, slice]:
    """The first and the second channel of each pair, in the order of the pairs."""
    half = rope.rotary_dim // 2
    if rope.layout is RopeLayout.INTERLEAVED:
        return slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    return slice(0, half), slice(half, rope.rotary_dim)


def rotate(x: Array, positions: ArrayLike, rope: RoPE) -> Array:
    """RoPE: x [..., d] turned by its positions [...]; channels from rotary_dim on are left as they are."""
    angle = np.asarray(positions, np.float64)[..., None] * frequencies(rope)
    first, second = pairs(rope)
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.array(np.broadcast_to(x, np.broadcast_shapes(x.shape, (*angle.shape[:-1], 1))))
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def frequencies(rope: RoPE) -> Array:
    """Angle of each pair per unit of position: [rotary_dim / 2]."""
    frequency: Array = rope.base ** (-2 * np.arange(rope.rotary_dim // 2) / rope.rotary_dim)
    return frequency


def rotate_back(x: Array, positions: ArrayLike, rope: RoPE) -> Array:
    """The inverse of `rotate`, which is its transpose: what a gradient of rotated q or k takes on the way back."""
    return rotate(x, -np.asarray(positions, np.float64), rope)


def soft_cap(z: Array, cap: float) -> Array:
    """c * tanh(z / c)."""
    capped: Array = cap * np.tanh(z / cap)
    return capped


def soft_cap_slope(z: Array, cap: float) -> Array:
    """The derivative of `soft_cap`, 1 - tanh^2(z / c) = 4 e / (1 + e)^2 with e = exp(-2 |z| / c): without cancellation,
    so that a saturated logit keeps its small gradient.
    """
    e = np.exp(-2 * np.abs(z / cap))
    slope: Array = 4 * e / ((1 + e) * (1 + e))
    return slope


def bias(spec: AttentionSpec, distance: Ints, qo_heads: Ints) -> Array:
    """What ALiBi (-slope * |distance|) and the buckets add: distance = pos_q - t [b, r, S], query heads [b, g] ->
    [b, r, g, S].
    """
    total = np.zeros((1, 1, 1, 1))
    if spec.alibi_slopes:
        slopes = np.asarray(spec.alibi_slopes)[qo_heads]
        total = total - slopes[:, None, :, None] * np.abs(distance)[:, :, None]
    if spec.buckets:
        table = np.asarray(spec.buckets.bias)
        total = total + table[qo_heads[:, None, :, None], bucket(spec.buckets, distance)[:, :, None]]
    return total


def bucket(buckets: RelativeBuckets, distance: Ints) -> Ints:
    """The bucket of each distance pos_q - t."""
    size = np.abs(distance) if buckets.bidirectional else np.maximum(distance, 0)
    index = np.searchsorted(buckets.first, size, side="right") - 1
    return index + len(buckets.first) * (distance < 0) if buckets.bidirectional else index


def t5_buckets(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """`RelativeBuckets.first` as in T5: half of the buckets hold one distance each, the others grow geometrically and
    the last starts at the latest at `max_distance`.

    A distance n has bucket exact + floor(ln(n / exact) / ln(max_distance / exact) * (num_buckets - exact)); compared
    in integers, so no logarithm decides at a boundary. `num_buckets` counts one direction.
    """
    exact = num_buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(f"need 2 buckets and max_distance > num_buckets // 2, got {num_buckets} and {max_distance}")
    wide = num_buckets - exact
    grown = (
        bisect_left(range(max_distance), max_distance**step * exact**wide, key=lambda n: n**wide * exact**step)
        for step in range(wide)
    )
    return (*range(exact), *grown)


def visible(spec: AttentionSpec, positions: NDArray[np.int64], t: NDArray[np.int64]) -> Bools:
    """Which keys `t` the masks leave to queries at `positions` (broadcast), in tokens: a causal rule hides t >
    position; window_left hides t < position - window_left, so the key at that distance is still seen.
    """
    allowed = np.ones(np.broadcast_shapes(positions.shape, t.shape), bool)
    if spec.causal is not CausalRule.NONE:
        allowed &= t <= positions
    if spec.window_left >= 0:
        allowed &= t >= positions - spec.window_left
    return allowed
