"""Input families: the values of q, K and V for a problem, and what each family proves.

K and V are [L, page_size, num_kv_heads, d] over the live pages, decoys and tails included; every value is exact in
the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sacts.reference.bounds import GENERIC, Exactness
from sacts.reference.formats import FORMATS, round_to
from sacts.reference.forward import Inputs, edges
from sacts.reference.spec import DType
from sacts.reports.records import PROVES

from ..branches import tokens_of
from ..build import Problem
from ..contract import STALE_VALUE
from ..draw import Array, Draw
from . import dither
from .applicability import keeps_meaning

SHIFT, WITNESS_SHIFT = 96.0, 1024.0  # sizes of the shifting channel of q and K, exact in every dtype
HUGE = 10.0  # times q and K
HUGE_ROUNDED = {DType.BF16: 2.5}  # where 16 bits may round K on its way, so that the logits' errors stay below a half
OTHER_HUGE_ROUNDED = 4.0  # in the other dtypes
HUGE_TURNED = 1.75  # in BF16 where K may be rounded twice, from codes and by RoPE, at head dimension 128
HOT_KEY = 8.0  # and STALE_VALUE: stale data in slots that belong to no committed token


@dataclass(frozen=True)
class Probe:
    """A family: `proves` is the sentence that reports print."""

    name: str
    proves: str
    exactness: Callable[[Problem], Exactness]
    inputs: Callable[[Problem], Inputs]


def _shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    spec = problem.spec
    slots = (*problem.slot_request.shape, spec.num_kv_heads)
    return (
        (spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk),
        (*slots, spec.head_dim_qk),
        (*slots, spec.head_dim_vo),
    )


def _uncommitted(problem: Problem) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Slots of tails and of decoy pages: [L, page_size]."""
    seq_lens = np.asarray(problem.spec.seq_lens, np.int64)
    owner = problem.slot_request
    return (owner < 0) | (problem.slot_token >= np.where(owner < 0, 0, seq_lens[owner]))


def _random(problem: Problem) -> Inputs:
    draw = problem.draw("random")
    q, k, v = (draw.normal(shape) for shape in _shapes(problem))
    q, k, v = _VALUES[problem.cell.values](problem, q, k, v)
    for branch in range(1, problem.branches):  # branches that are added have one query
        q[tokens_of(problem.spec, problem.branches, branch)] = q[tokens_of(problem.spec, problem.branches, 0)]
    stale = _uncommitted(problem)
    k[stale] = HOT_KEY * draw.signs(k[stale].shape)
    v[stale] = STALE_VALUE
    return problem.inputs(*(round_to(x, problem.spec.dtype) for x in (q, k, v)))


def _equal_keys(q: Array, k: Array) -> tuple[Array, Array]:
    return q, np.broadcast_to(k[:1, :1, :1], k.shape).copy()


def _shift(q: Array, k: Array, size: float) -> tuple[Array, Array]:
    """Every logit moves by -sm_scale * size^2: by -864 and -98304 at head dimension 64."""
    q, k = q.copy(), k.copy()
    q[..., 0], k[..., 0] = size, -size
    return q, k


def _at_edges(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """K and V at the edges of their codes; q so small that logits stay ordinary ones."""
    draw = problem.draw("edges")
    k, v = (
        x if scales is None else scales.at_edges(x, draw)
        for x, scales in ((k, problem.k_scales), (v, problem.v_scales))
    )
    size = float(np.sqrt(np.mean(k * k)))
    return q * 2.0 ** -max(0, math.ceil(math.log2(size))), k, v


def _huge(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    spec = problem.spec
    size = HUGE_ROUNDED.get(spec.dtype, OTHER_HUGE_ROUNDED) if spec.rope or spec.k_codec else HUGE
    if spec.rope and spec.k_codec:  # errors of logits grow like u size^2 and the root of the dimension
        finer = FORMATS[DType.BF16].u / FORMATS[spec.dtype].u
        size = min(size, HUGE_TURNED * finer**0.5 * (128 / spec.head_dim_qk) ** 0.25)
    return size * q, size * k, v


def _heavy(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Cubes of normal numbers; where BF16 may round K on its way, q shrinks as the sums of products grow."""
    spec = problem.spec
    rounded = spec.dtype is DType.BF16 and (spec.rope or spec.k_codec)
    size = min(1.0, (128 / spec.head_dim_qk) ** 0.5) if rounded else 1.0
    return size * q**3, k**3, v**3


_VALUES: dict[str, Callable[[Problem, Array, Array, Array], tuple[Array, Array, Array]]] = {
    "gaussian": lambda problem, q, k, v: (q, k, v),
    "huge": _huge,
    "shifted": lambda problem, q, k, v: (*_shift(q, k, SHIFT), v),
    "equal": lambda problem, q, k, v: (*_equal_keys(q, k), v),
    "scale_edges": _at_edges,
    "heavy": _heavy,
}


def _count(problem: Problem) -> Inputs:
    draw = problem.draw("count")
    q_shape, k_shape, v_shape = _shapes(problem)
    k = round_to(draw.normal(k_shape), problem.spec.dtype)
    q = np.zeros(q_shape)
    if problem.cell.values == "shifted":
        q, k = _shift(q, k, WITNESS_SHIFT)
    v = _paired_codes(problem, draw, v_shape)
    chosen = dithered(problem)
    if chosen.any():
        v[..., chosen] = _dither(problem, draw, int(chosen.sum()))
    return problem.inputs(q, k, v)


def dithered(problem: Problem) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Channels of the count probe that hold the values of `dither` instead of codes: every other one, or none where
    dither has no meaning. [d_vo].
    """
    odd: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = np.arange(problem.spec.head_dim_vo) % 2 == 1
    return odd & keeps_meaning("dither", problem.spec)


def _dither(problem: Problem, draw: Draw, channels: int) -> Array:
    """[L, page_size, num_kv_heads, channels]: placed for the last row of each request and KV head. Where several rows
    of it read one KV head, or several branches do, each has its share of the channels, in turn.
    """
    spec = problem.spec
    v = np.full((*problem.slot_request.shape, spec.num_kv_heads, channels), dither.UNATTENDED)
    v[problem.needed] = 1.0
    rows, t, _ = edges(spec, problem.candidates)
    longest = int(np.bincount(rows).max(initial=1))
    for request, length in enumerate(spec.qo_lens):
        for head in range(spec.list_heads) if length else ():
            row = (spec.qo_indptr[request + 1] - 1) * spec.list_heads + head
            page, offset = np.divmod(t[rows == row], spec.page_size)
            live = np.searchsorted(problem.pages, problem.table.table[request, page])
            turn = head % spec.lists_per_kv_head + spec.lists_per_kv_head * (request % problem.branches)
            own = np.arange(turn, channels, spec.lists_per_kv_head * problem.branches)
            at = live[:, None], offset[:, None], head // spec.lists_per_kv_head, own
            v[at] = dither.values(len(page), longest, len(own), spec.dtype, draw)
    return v


def _count_exactness(problem: Problem) -> Exactness:
    shifted = problem.cell.values == "shifted"
    stored = problem.spec.v_codec
    dyadic = stored is None or stored.power_of_two
    return Exactness(equal_logits=True, zero_logits=not shifted, exact_sums=not shifted and dyadic)


def _paired_codes(problem: Problem, draw: Draw, shape: tuple[int, ...]) -> Array:
    """+-1 codes; attended slots of a request and KV head are paired at random, across pages, with opposite codes, all
    but one or two: a row that attends them all sums to almost zero, so that one lost or doubled candidate moves
    the output far beyond its rounding, yet not to zero in every channel, so that a backend that returns zeros, or
    another head's mean, is found too.
    """
    v = draw.signs(shape)
    for request in range(problem.spec.num_requests):
        mine = problem.needed & (problem.slot_request == request)[..., None]
        for head in range(problem.spec.num_kv_heads):
            page, offset = np.nonzero(mine[..., head])
            order = draw.permutation(len(page))
            half = (len(order) - 1) // 2
            a, b = order[:half], order[half : 2 * half]
            v[page[b], offset[b], head] = -v[page[a], offset[a], head]
    return v


RANDOM = Probe(
    "random",
    PROVES["random"],
    lambda problem: GENERIC,
    _random,
)
COUNT = Probe(
    "count",
    PROVES["count"],
    _count_exactness,
    _count,
)
