"""Sharper bounds for inputs that are drawn independently: gates B, C and D of GATES.md section 2, docs/bounds.md 11.

They hold but for a share ALPHA of CHECKS judged elements where the rounding errors of different candidates are
independent: for Gaussian inputs that the suite draws itself, never for a vendor's. What candidates share (equal
logits, conversions of codes, truncation) is taken in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .bounds import FLUSH, MAX_RHO, log_error, rescales
from .candidates import ValidatedCandidates
from .formats import FORMATS, round_to
from .forward import Inputs, Rows, evaluate, groups, kept
from .groups import Group
from .logit_bounds import U32, gamma, logit_error, reconstruction, weight_error, weight_rounding
from .numerics import Accumulator, Numerics
from .paging import PageTable
from .spec import AttentionSpec, DType

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

CHECKS, ALPHA = 1e9, 1e-6
TINY = 1e-300
STEP = 8  # products that tensor cores add at once
FINEST_PHASE = 1e-9  # logits whose fractions of an octave differ by less round alike


def confidence(checks: float) -> float:
    """lambda: sums of independent errors stay within lambda roots of their squared ranges but in a share ALPHA of so
    many checks (Hoeffding).
    """
    return math.sqrt(2 * math.log(2 * checks / ALPHA))


@dataclass(frozen=True)
class GenericRow:
    """The bounds of one output row with k edges.

    out [d], lse: the reference's; t [k]: its keys; v [k, d]; mass [k]: w_j a_j / (1 - p); weights [k]: w_j. `chi` [k]:
    range of the independent relative error of each weight. half_width [d]: B before the output rounding, `systematic`
    the part of it that does not average out; the same of lse. `trusted`: False where there is no bound.
    """

    numerics: Numerics
    token: int
    head: int
    out: Array
    lse: float
    t: Ints
    v: Array
    mass: Array
    weights: Array
    chi: Array
    half_width: Array
    systematic: Array
    lse_bound: float
    lse_systematic: float
    trusted: bool

    @cached_property
    def interval(self) -> tuple[Array, Array]:
        """Gate B: what a right out lies in, [d] each."""
        low, high = (round_to(self.out + sign * self.half_width, self.numerics.out) for sign in (-1, 1))
        return low, high

    def inside(self, out: Array, lse: float | None) -> bool:
        """Gate B of out, and of lse where there is one."""
        low, high = self.interval
        right = bool(((low <= out) & (out <= high)).all())
        return right and (lse is None or abs(lse - self.lse) <= self.lse_bound)

    def filtered(self, out: Array) -> Filtered:
        """What the error of `out` [d] has in the direction in which each candidate's loss would move it."""
        independent = (self.mass * self.chi) ** 2
        direction = (self.v.T * independent) @ self.v + self._cast * np.outer(self.out, self.out)
        scale, rounding, systematic = self._sizes
        filters = np.concatenate(((self.v - self.out) / scale, (self.out / scale)[None]))
        variance = np.einsum("ij,ij->i", filters @ direction, filters) + filters**2 @ rounding
        return Filtered(filters @ (out - self.out), variance, np.abs(filters) @ systematic)

    def gained(self, out: Array) -> Filtered:
        """The last filter of `filtered` alone [1], which costs k d instead of k d^2."""
        scale, rounding, systematic = self._sizes
        own = self.out / scale
        variance = ((self.mass * self.chi) ** 2) @ (self.v @ own) ** 2
        variance += self._cast * (self.out @ own) ** 2 + own**2 @ rounding
        return Filtered(np.array([own @ (out - self.out)]), np.array([variance]), np.array([np.abs(own) @ systematic]))

    @property
    def _cast(self) -> float:
        """Squared range of the denominator's independent error where it sums the cast P."""
        return float((self.weights**2).sum()) * weight_rounding(self.numerics).u ** 2 * self.numerics.l_sums_cast_p

    @cached_property
    def _sizes(self) -> tuple[Array, Array, Array]:
        """Per channel [d]: squared size of the error, of its rounding to the output, and its systematic part."""
        form = FORMATS[self.numerics.out]
        rounding = (form.u * np.abs(self.out)) ** 2
        systematic = self.systematic + form.u * self.half_width + form.a
        independent = ((self.mass * self.chi) ** 2) @ self.v**2 + self._cast * self.out**2
        return independent + rounding + systematic**2 + TINY, rounding, systematic


class Filtered(NamedTuple):
    """Matched filters [k + 1], of each candidate and last of a common gain: value, squared range of its independent
    part, and its systematic part.
    """

    value: Array
    variance: Array
    systematic: Array

    def ratios(self, checks: float = CHECKS) -> Array:
        """Gate C: |value| over what is allowed, [k + 1]; above 1 is a fault."""
        allowed = confidence(checks * len(self.value)) * np.sqrt(self.variance) + self.systematic
        ratio: Array = np.abs(self.value) / (allowed + TINY)
        return ratio


def aggregated(rows: Iterable[Filtered], checks: float = CHECKS) -> Array:
    """Gate D: the filters of rows whose lists name the same keys in the same order, summed, as a ratio to what is
    allowed [k + 1]: a small defect of one key, or a gain, in every row.
    """
    total = np.zeros(())
    for row in rows:
        unit = np.sqrt(np.maximum(row.variance, TINY))
        total = total + np.array([row.value / unit, row.variance / unit**2, row.systematic / unit])
    value, variance, systematic = total
    ratio: Array = np.abs(value) / (confidence(checks * len(value)) * np.sqrt(variance) + systematic + TINY)
    return ratio


def bias(rows: Iterable[tuple[GenericRow, float]]) -> float:
    """Gate D of lse: |mean error| over what is allowed; the independent part shrinks with the root of the rows."""
    errors, systematic, independent = np.array(
        [(lse - row.lse, row.lse_systematic, row.lse_bound - row.lse_systematic) for row, lse in rows]
    ).T
    return float(np.abs(errors.mean()) / (systematic.mean() + math.sqrt((independent**2).sum()) / len(errors)))


def generic_rows(
    spec: AttentionSpec,
    inputs: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    numerics: Numerics,
    chosen: NDArray[np.bool_] | None = None,
) -> Iterator[GenericRow]:
    """The bounds of every output row that has an edge, before the epilogue; of those of the candidate rows `chosen`
    [num_rows], where given. None for a spec with a sink logit, nor for FP8 tensor cores, whose truncation is no
    independent error.
    """
    if spec.sink_logits or numerics.accumulator is not Accumulator.FP32:
        return
    lam = confidence(CHECKS)
    for group in groups(spec, inputs, table, candidates):
        if chosen is not None and not chosen[group.rows].any():
            continue
        rows, factors = evaluate(spec, group), kept(spec, group)
        errors = _errors(spec, group, rows, numerics)
        tiles = rescales(spec, group, numerics)
        for at in np.ndindex(*rows.lse.shape):
            b, r, g = at
            edge = np.flatnonzero(group.edge[b, r])
            if not len(edge) or (chosen is not None and not chosen[group.rows[b, r]]):
                continue
            a = np.ones(len(edge)) if factors is None else factors[at][edge]
            row = _Row(group.z[at][edge], a, group.v[b, edge], rows, at, int(tiles[b, r, 0]), group.counts[b, r, edge])
            token = int(group.rows[b, r]) // spec.list_heads
            names = token, int(group.qo_heads[b, g]), group.t[b, edge]
            yield _bounded(spec, row, _Errors(*(x[at][edge] for x in errors)), names, numerics, lam)


class _Errors(NamedTuple):
    """Relative errors of weights [b, r, g, S], or of one row [k]: what candidates share, what is independent, and all
    as gate A has it.
    """

    shared: Array
    independent: Array
    full: Array


def _errors(spec: AttentionSpec, group: Group, rows: Rows, numerics: Numerics) -> _Errors:
    """The independent part is the rounding of the sums in q.k; rounding towards zero has a bias, which is shared."""
    some = rows.state.l > 0
    lse, top = np.where(some, rows.lse, 0.0), np.where(some, rows.state.m, 0.0)
    s = np.where(group.edge[:, :, None], group.z, 0.0)
    depth, scale = group.q.shape[-1], abs(spec.sm_scale)
    error = logit_error(spec, group, numerics)
    products = scores.logits(np.abs(group.q), np.abs(group.k), scale)
    independent = np.minimum(error, gamma(depth) * products + 2 * U32 * np.abs(s))
    spread = scale * np.sqrt(scores.logits(group.q**2, group.k**2, 1.0))
    steps = math.ceil(depth / STEP) + 1
    truncation = steps * 2 * U32 * (np.abs(s) + 4 * spread) + 2 * U32 * np.abs(s)
    shared = np.minimum(error, error - independent + truncation)
    tiles = rescales(spec, group, numerics)
    few = np.minimum(tiles, 4 * np.log(tiles + 1.0) + 20)  # tiles that raise the maximum where the order is random
    dropout = 2 * U32 if spec.dropout else 0.0
    rest = weight_error(s, np.zeros_like(error), top, lse, few, numerics) + dropout
    return _Errors(shared + rest, independent, weight_error(s, error, top, lse, tiles, numerics))


class _Row(NamedTuple):
    """s and a / (1 - p) [k], V [k, d] of one row, where it stands among `rows`, its tiles and its counts [k]."""

    s: Array
    a: Array
    v: Array
    rows: Rows
    at: tuple[int, ...]
    tiles: int
    counts: Ints


class _Ties(NamedTuple):
    """Candidates whose logits have (nearly) the same fraction of an octave share one rounding error: sizes are added
    within such a group, squares across groups.
    """

    group: Ints
    alone: bool

    @classmethod
    def of(cls, s: Array, errors: _Errors) -> _Ties:
        """Logits that differ by less than a few of their errors count as equal."""
        step = max(4 * float(np.median(errors.independent)), FINEST_PHASE)
        _, group = np.unique(np.floor(np.mod(s * math.log2(math.e), 1.0) / step), return_inverse=True)
        return cls(group, int(group.max(initial=-1)) + 1 == len(s))

    def norm(self, x: Array) -> Array:
        """Of x [k] or [k, d], none negative: [] or [d]."""
        if not self.alone:
            total = np.zeros((int(self.group.max()) + 1, *x.shape[1:]))
            np.add.at(total, self.group, x)
            x = total
        norm: Array = np.sqrt((x * x).sum(axis=0))
        return norm


def _bounded(
    spec: AttentionSpec, row: _Row, errors: _Errors, names: tuple[int, int, Ints], numerics: Numerics, lam: float
) -> GenericRow:
    """B of one row: docs/bounds.md section 11."""
    out, lse, l, top = row.rows.out[row.at], *(float(x[row.at]) for x in (row.rows.lse, *row.rows.state[1::-1]))
    p, part, ties = weight_rounding(numerics), FORMATS[numerics.partial], _Ties.of(row.s, errors)
    weights, abs_v, abs_out = np.exp(row.s - lse), np.abs(row.v), np.abs(out)
    terms = int(row.counts.sum())  # of a kernel that visits repeats one by one
    mass, sums = weights * row.a, float(gamma(terms))
    tied = float(ties.norm(weights * errors.independent))
    chi = np.sqrt(p.u**2 + errors.independent**2)
    size, cast_size = mass @ abs_v, (row.a * row.counts) @ abs_v  # A, and what P in subnormals loses
    independent = np.minimum(
        p.u * size + (mass * errors.independent) @ abs_v,
        lam * (ties.norm((mass * chi)[:, None] * abs_v) + tied * abs_out),
    )
    cast = min(p.u, lam * p.u * float(ties.norm(weights))) + p.a * terms / l if numerics.l_sums_cast_p else 0.0
    partial_sums = np.minimum(size, abs_out + lam * np.sqrt(mass**2 @ row.v**2))
    v = reconstruction(spec.v_codec, numerics)
    u_part, a_part = (part.u, part.a) if numerics.splits else (0.0, 0.0)
    rho = min(float(weights @ errors.full) + sums + (p.u + p.a * terms / l) * numerics.l_sums_cast_p, MAX_RHO)
    systematic = (
        (mass * errors.shared) @ abs_v
        + abs_out * float(weights @ errors.shared)
        + (0.7 * sums + row.tiles * U32) * (1 + p.u) * partial_sums
        + (min(sums, lam * math.sqrt(terms) * 2 * U32) + 4 * U32 + cast) * abs_out
        + (v.u + u_part + 2 * numerics.u_operand) * size
        + a_part
        + v.a * mass.sum()
        + (p.a / l) * cast_size
        + FLUSH * (2 + cast_size / min(l, 1.0))
    ) / (1 - rho)
    if numerics.branched and numerics.partial is not DType.FP32:  # stored before it is gated
        systematic = systematic + part.u * (abs_out + systematic + independent / (1 - rho)) + part.a
    own = row.rows.own_error
    log_systematic = float(weights @ errors.shared) + cast
    log_independent = lam * tied + min(sums, lam * math.sqrt(terms) * U32)
    shrunk = 1 - min(log_systematic + log_independent, MAX_RHO)
    log_systematic = (
        log_systematic / shrunk + float(log_error(l, np.array(lse), np.array(top))) + float(own.lse[row.at])
    )
    systematic = systematic + own.out[row.at]
    return GenericRow(
        numerics=numerics,
        token=names[0],
        head=names[1],
        out=out,
        lse=lse,
        t=names[2],
        v=row.v,
        mass=mass,
        weights=weights,
        chi=chi,
        half_width=systematic + independent / (1 - rho),
        systematic=systematic,
        lse_bound=log_systematic + log_independent / shrunk,
        lse_systematic=log_systematic,
        trusted=rho < MAX_RHO and bool(own.in_range[row.at]),
    )
