"""What every row must satisfy, told from sizes alone: rows that are too many to be evaluated are held to this.

A row's logits lie within S = |sm_scale| |q| max |k|, its values within the least and the largest of its request's
keys. From these follow an interval for out and for lse, with the error terms of docs/bounds.md section 1, each taken at
its largest. With q = 0 the interval of lse is ln k, as sharp as the row's own bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bounds import FLUSH, MAX_RHO, log_error
from .formats import FORMATS, round_to
from .logit_bounds import U32, accumulation, gamma, weight_rounding
from .numerics import Numerics

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Sizes(NamedTuple):
    """Of n rows with an edge: `edges` [n], `slots` [n] that the lists name, `logits` [n]: S, the most that the size of
    a logit can be, `low` and `high` [n, d_vo]: what V of their keys lies between. head_dim_qk: d.
    """

    edges: Ints
    slots: Ints
    logits: Array
    low: Array
    high: Array
    head_dim_qk: int


class Within(NamedTuple):
    """Closed intervals of out [n, d_vo] and of lse [n]: the middle and half the width; infinite bounds stand as the
    largest finite number, so that what is not finite lies outside.
    """

    out_lo: Array
    out_hi: Array
    lse: Array
    lse_bound: Array


def within(sizes: Sizes, numerics: Numerics) -> Within:
    """What a plain row (sm_scale q.k and nothing else) must lie in."""
    k, s = sizes.edges, sizes.logits
    p, part = weight_rounding(numerics), FORMATS[numerics.partial]
    lse = np.log(k)
    tiles = np.where(s > 0, np.minimum(k, -(-sizes.slots // numerics.min_tile)), 0)  # equal logits raise no maximum
    eta = (accumulation(sizes.head_dim_qk, numerics) + 2 * numerics.u_operand + 16 * U32) * s + numerics.u_exp
    eta = eta + tiles * (numerics.u_exp + 2 * U32)
    if numerics.splits:
        eta = eta + numerics.u_exp + 8 * U32 * (lse + s) + 4 * U32
    cast = (p.u + p.a * k) * numerics.l_sums_cast_p
    rho = eta + gamma(k) + cast
    bounded = rho < MAX_RHO
    rho = np.where(bounded, rho, 0.0)
    u_part, a_part = (part.u, part.a) if numerics.splits else (0.0, 0.0)
    products = (accumulation(k, numerics) + tiles * U32) * (1 + p.u) + 2 * numerics.u_operand
    share = 2 * eta + p.u + p.a * k + products + gamma(k) + 4 * U32 + cast + u_part
    largest = np.maximum(np.abs(sizes.low), np.abs(sizes.high)).max(axis=-1)
    width = ((share + FLUSH * k) * largest + a_part + 2 * FLUSH) / (1 - rho)
    end = FORMATS[numerics.out].max
    low, high = (
        np.where(bounded[:, None], np.clip(round_to(x, numerics.out), -end, end), sign * end)
        for x, sign in ((sizes.low - width[:, None], -1), (sizes.high + width[:, None], 1))
    )
    allowed = s + rho / (1 - rho) + log_error(1.0, lse + s, s) + 8 * U32 * lse
    return Within(low, high, lse, np.where(bounded, allowed, np.finfo(np.float32).max))
