"""Could a probe have failed? The smallest change of out that its target fault would cause, as a multiple of the
smallest change that is noticed, row by row; 1 or less: untrusted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sacts.reference.bounds import Expected
from sacts.reference.formats import half_spacing
from sacts.reference.forward import Inputs
from sacts.reference.spec import DType

from ..build import Problem
from ..draw import Array
from . import dither, stairs
from .inputs import dithered
from .weights import RowWeights, finished, row_weights
from .witness import Lane, Witness

Bools = NDArray[np.bool_]

CERTAIN = 1e30  # stands for infinity


def noticed(expected: Expected, dtype: DType) -> Array:
    """The change of out, before it is rounded, that leaves the interval on either side: [tokens, heads, d_vo]."""
    up = expected.out_hi + half_spacing(expected.out_hi, dtype) - expected.out
    down = expected.out - expected.out_lo + half_spacing(expected.out_lo, dtype)
    return np.where(expected.trusted[..., None], np.maximum(up, down), np.inf)


def of_random(expected: Expected) -> Array:
    """A result of zeros in the rows with an edge; exact zeros are demanded of the others."""
    zero_fails = ((expected.out_lo > 0) | (expected.out_hi < 0)).any(axis=-1)
    return np.where(zero_fails & expected.trusted, CERTAIN, 0.0)[expected.edges > 0]


class Loss(NamedTuple):
    """The loss of any one candidate, where it shows least, in rows of two or more: in out, and in lse."""

    out: Array
    lse: Array


def of_count(expected: Expected, codes: Bools) -> Loss:
    """With opposite codes the mean moves by about 1/k in some channel, and lse by ln(1 - 1/k)."""
    rows = expected.edges > 1
    moved = (1 - np.abs(expected.out)) / np.maximum(expected.edges - 1, 1)[..., None]
    width = np.maximum(expected.out_hi - expected.out, expected.out - expected.out_lo)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(codes, np.where(width > 0, moved / width, np.where(moved > 0, CERTAIN, 0.0)), 0.0)
        lost = -np.log1p(-1 / np.maximum(expected.edges, 2)) / expected.lse_bound
    trusted, lost = (np.where(expected.trusted, x, 0.0)[rows] for x in (times.max(axis=-1), lost))
    return Loss(np.minimum(trusted, CERTAIN), lost)


def of_weights(problem: Problem, inputs: Inputs, expected: Expected) -> Loss:
    """As `of_count`, whatever the weights: the loss of one occurrence of a key."""
    needed, hair, found = noticed(expected, problem.spec.dtype), dithered(problem), []
    for row in row_weights(problem, inputs):
        if len(row.t) < 2:
            continue
        at = row.token, row.qo_head
        moved = np.abs(finished(problem, inputs, row.without_one(), row) - finished(problem, inputs, row.out, row))
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(moved > 0, moved / needed[at], 0.0)
            lost = -np.log1p(-np.minimum(row.w, 1.0)) / expected.lse_bound[at] * expected.trusted[at]
        shown = np.where(hair, 0.0, times).max(axis=-1)
        found.append((min(float(shown.min()), CERTAIN), min(float(lost.min()), CERTAIN)))
    return Loss(*np.array(found).reshape(-1, 2).T)


def of_dither(problem: Problem, expected: Expected, hair: Bools) -> Array:
    """A gain of 1 + GAIN in the rows that the values were placed for: the last of each request."""
    spec = problem.spec
    last = np.array([spec.qo_indptr[n + 1] - 1 for n, length in enumerate(spec.qo_lens) if length], np.int64)
    rows = expected.edges[last] >= dither.LEAST_KEYS
    gains = []
    for low, high in ((expected.out, expected.out_hi), (expected.out_lo, expected.out)):
        needed = high - low + half_spacing(high if low is expected.out else low, spec.dtype)
        times = np.where(hair & expected.trusted[..., None], dither.GAIN * np.abs(expected.out) / needed, 0.0)
        gains.append(times.max(axis=-1)[last])
    smallest: Array = np.minimum(gains[0], gains[1])[rows]
    return smallest


def of_witness(made: Witness, expected: Expected) -> dict[str, Array]:
    """The margins of each probe by query head."""
    needed = noticed(expected, made.problem.spec.dtype)[-1]
    weights = row_weights(made.problem, made.inputs, made.problem.spec.num_tokens - 1)
    by_head, found = {row.qo_head: row for row in weights}, dict[str, list[float]]()
    for qo_head, lane in made.lanes.items():
        with np.errstate(divide="ignore"):
            margin = _MARGINS[lane.probe](made, lane, by_head[qo_head], needed[qo_head])
        found.setdefault(lane.probe, []).append(margin)
    return {name: np.array(each) for name, each in found.items()}


def _of_select(made: Witness, lane: Lane, row: RowWeights, needed: Array) -> float:
    """Another key's value in place of the selected one's, as far as that has the mass."""
    values = made.values[lane.row]
    mass = (row.w * row.repeats).max(initial=0.0)
    moved = mass * np.abs(np.delete(values, lane.target, axis=0) - values[lane.target])
    return float((moved / needed).max(axis=-1).min(initial=CERTAIN))


def _of_stair(made: Witness, lane: Lane, row: RowWeights, needed: Array) -> float:
    """One rescale left out of the accumulator."""
    levels = (made.stairs if lane.probe == "stair" else made.cliffs)[lane.row]
    assert levels is not None
    quarter = made.problem.spec.head_dim_vo // 4
    start = made.problem.spec.head_dim_vo // 2 + (0 if lane.probe == "stair" else quarter)
    moved = stairs.unscaled(levels, made.rows[lane.row])
    return float((moved / needed[start : start + moved.shape[1]]).max(axis=-1).min(initial=CERTAIN))


def _of_comb(made: Witness, lane: Lane, row: RowWeights, needed: Array) -> float:
    """The loss of a key's value: half of the keys that are not dropped show it so clearly or better."""
    moved = (row.w * row.repeats * row.factor)[:, None] * row.v
    moved = moved[row.factor > 0]
    return float(np.median((np.abs(moved) / needed).max(axis=-1)))


_MARGINS = {"select": _of_select, "cliff": _of_stair, "stair": _of_stair, "comb": _of_comb}
