"""Scores: scaled dot products and the masks on them, all by logical position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .spec import AttentionSpec, CausalRule

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]


def logits(q: Array, k: Array, sm_scale: float) -> Array:
    """z = sm_scale * q.k: q [queries, heads, d] and the k [T, d] that these heads share -> [queries, heads, T]."""
    products: Array = np.einsum("qhd,td->qht", q, k, optimize=True)
    return sm_scale * products


def visible(spec: AttentionSpec, positions: NDArray[np.int64], t: NDArray[np.int64]) -> Bools:
    """Which keys `t` the masks leave to queries at `positions` (broadcast): causal rule and window, t in tokens."""
    allowed = np.ones(np.broadcast_shapes(positions.shape, t.shape), bool)
    if spec.causal is CausalRule.BOTTOM_RIGHT:
        allowed &= t <= positions
    if spec.window_left >= 0:
        allowed &= t >= positions - spec.window_left
    return allowed
