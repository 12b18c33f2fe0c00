"""How far a gradient may be off since RoPE turns what enters its products, and turns it back: docs/bounds.md, 10."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import scores
from .groups import Group
from .logit_bounds import Rounding, angle_errors
from .numerics import Numerics
from .spec import RoPE

Array = NDArray[np.float64]


def by_key(x: Array) -> Array:
    """[b, r, g, S] -> [b, S, r g]."""
    return x.reshape(len(x), -1, x.shape[-1]).swapaxes(1, 2)


def converted(x: Array, cast: Rounding) -> Array:
    """The largest norm of a pair that is rounded to a format."""
    return x * (1 + cast.u) + 2 * cast.a


def turned(rope: RoPE, x: Array, position: NDArray[np.int64]) -> Array:
    """A bound of each channel [..., d] after a turn by the positions [...]."""
    first, second = scores.pairs(rope)
    angle = position[..., None] * scores.frequencies(rope)
    cos, sin = np.abs(np.cos(angle)), np.abs(np.sin(angle))
    back = np.array(x)
    back[..., first] = cos * x[..., first] + sin * x[..., second]
    back[..., second] = cos * x[..., second] + sin * x[..., first]
    return back


def with_pairs(rope: RoPE, x: Array, by_pair: Array) -> Array:
    """x [..., d] + what each pair of channels may be off by [..., rotary_dim / 2]."""
    for channels in scores.pairs(rope):
        x[..., channels] += by_pair
    return x


def turn_errors(rope: RoPE, group: Group, numerics: Numerics, reach: Array, norm: Array, *, of_key: bool) -> Array:
    """How far the pairs of a gradient may be off since angles are: of d_q [b, r, g, pairs] by the keys, or (of_key) of
    d_k [b, S, pairs] by the queries; `norm` of the other operand's pairs. As for a logit, a wrong frequency counts by
    the distance only.
    """
    wrong = angle_errors(rope, group, numerics)
    total = np.zeros(())
    for weights, by_pair in (
        (reach * wrong.distance, wrong.frequency),
        (reach * wrong.farthest, wrong.rounding),
        (2 * wrong.sine * reach, np.ones_like(wrong.frequency)),
    ):
        total = total + (by_key(weights) @ norm if of_key else weights @ norm[:, None]) * by_pair
    return total * (1 + float(wrong.second_order.max(initial=0.0)))
