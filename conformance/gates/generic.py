"""Gates B, C and D: sharper than gate A, for inputs that the suite drew independently (docs/bounds.md section 11).

`sharp` (B) holds each element to an interval whose independent errors add up like a root; `candidate` (C) looks into
the error of a row for the direction in which one lost or repeated candidate would move it; `common` (D) adds rows up:
a gain, a bias of lse, a defect of one key that is too small to show in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sacts.reference.formats import half_spacing, round_to
from sacts.reference.forward import Inputs
from sacts.reference.generic_bounds import Filtered, GenericRow, aggregated, bias, generic_rows
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, EpilogueKind
from sacts.reports.records import Finding, Gate, Sample

from .. import sample
from ..build import Problem
from ..contract import place_of
from ..draw import Array, Ints
from ..launch import Observed
from .intervals import use_within

DRAWN = frozenset({"gaussian", "huge"})  # families whose q, K and V are independent from element to element
BOUNDED_ROWS = 256  # output rows that gate B judges
FILTER_WORK = 2**26  # k d_vo^2 of all rows that gate C judges: what the filters of a row cost
GATES = (Gate.SHARP, Gate.CANDIDATE, Gate.COMMON)


def drawn(problem: Problem) -> bool:
    """Whether the random probe's inputs are independent, and nothing ties rows together or bends out."""
    spec = problem.spec
    bent = spec.sink_logits or spec.logits_soft_cap or spec.epilogue.kind is not EpilogueKind.NONE
    return problem.cell.values in DRAWN and not bent


class Seen(NamedTuple):
    """What one gate says: its largest observed / allowed, and the finding where that exceeds 1."""

    use: float
    finding: Finding | None


@dataclass(frozen=True)
class Bounds:
    """The sharper bounds of a sample of rows with an edge; `filtered`: those whose error gate C looks into, by their
    place in `rows`. `samples`: the candidate rows of both, where they are not all.
    """

    spec: AttentionSpec
    rows: Sequence[GenericRow]
    filtered: Sequence[int]
    samples: Mapping[str, Sample] = field(default_factory=dict)

    def first(self, observed: Observed) -> Finding | None:
        """The finding of the first gate that has one."""
        return next((seen.finding for seen in self.judge(observed).values() if seen.finding), None)

    def judge(self, observed: Observed) -> dict[Gate, Seen]:
        """What each of the gates says, in the order of blame."""
        if not self.rows:
            return {}
        filters = [(self.rows[n], self.rows[n].filtered(_out(observed, self.rows[n]))) for n in self.filtered]
        sharp, candidate = _sharp(self.spec, self.rows, observed), _candidate(self.spec, filters)
        return {
            Gate.SHARP: _with_candidate(sharp, candidate),
            Gate.CANDIDATE: candidate,
            Gate.COMMON: _common(self.spec, self.rows, filters, observed),
        }


def bounds(problem: Problem, inputs: Inputs, numerics: Numerics, rows: Ints | None = None) -> Bounds | None:
    """Of the random probe's inputs, of these candidate rows only; None where they are not drawn independently."""
    if not drawn(problem):
        return None
    spec, lengths = problem.spec, sample.row_lengths(problem)
    order = sample.by_priority(problem, lengths)
    order = order if rows is None else order[np.isin(order, rows)]
    cost = np.full(spec.num_rows, spec.heads_per_list)
    bounded = sample.affordable(order, cost, BOUNDED_ROWS)
    cost = spec.heads_per_list * lengths * spec.head_dim_vo**2
    filtered = sample.affordable(order[np.isin(order, bounded)], cost, FILTER_WORK)
    chosen = np.zeros(spec.num_rows, bool)
    chosen[bounded] = True
    where = inputs, problem.table, problem.candidates
    made = [row for row in generic_rows(spec, *where, numerics, chosen) if row.trusted]
    places = np.array([spec.row_of(row.token, row.head) for row in made], np.int64)
    samples = {
        str(gate): sample.told(some, len(order))
        for gate, some in ((Gate.SHARP, bounded), (Gate.CANDIDATE, filtered))
        if len(some) < len(order)
    }
    return Bounds(spec, made, np.flatnonzero(np.isin(places, filtered)).tolist(), samples)


def _out(observed: Observed, row: GenericRow) -> Array:
    out: Array = observed.out[row.token, row.head]
    return out


def _sharp(spec: AttentionSpec, rows: Sequence[GenericRow], observed: Observed) -> Seen:
    """Requirement (gate B): RN(o - B) <= out <= RN(o + B), and lse within its bound, B with independent errors."""
    out, right, width = (
        np.array(x) for x in zip(*((_out(observed, r), r.out, r.half_width) for r in rows), strict=True)
    )
    form = rows[0].numerics.out
    low, high = (round_to(right + sign * width, form) for sign in (-1, 1))
    use = use_within(out, right, width, half_spacing(out, form), (low <= out) & (out <= high))
    n, channel = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
    best = float(use[n, channel])
    words = (
        f", channel {channel}: out {out[n, channel]:.7g}, allowed {low[n, channel]:.7g} to {high[n, channel]:.7g} "
        "where the errors of different candidates are independent"
    )
    if observed.lse is not None:
        lse, expected, allowed = np.array(
            [(observed.lse[r.token, r.head], r.lse, r.lse_bound) for r in rows], np.float64
        ).T
        log_use = use_within(lse, expected, allowed, 0.0, np.abs(lse - expected) <= allowed)
        at = int(log_use.argmax())
        if log_use[at] > best:
            n, best = at, float(log_use[at])
            words = f": lse {lse[n]:.9g}, expected {expected[n]:.9g} +- {allowed[n]:.2g} where errors are independent"
    return _seen(Gate.SHARP, best, place_of(spec, rows[n].token, rows[n].head), words)


def _with_candidate(sharp: Seen, candidate: Seen) -> Seen:
    """What is outside, and the candidate that speaks louder still."""
    if sharp.finding is None or candidate.finding is None or candidate.use < sharp.use:
        return sharp
    words = f"{sharp.finding.sentence}; {candidate.finding.sentence}"
    return Seen(sharp.use, Finding(Gate.SHARP, sharp.finding.place, words, use=sharp.use))


def _candidate(spec: AttentionSpec, filters: Sequence[tuple[GenericRow, Filtered]]) -> Seen:
    """Requirement (gate C): the error of a row has no more of any one candidate in it than rounding can put there."""
    ratios = [filtered.ratios() for _, filtered in filters]
    n = int(np.argmax([each.max() for each in ratios]))
    (row, filtered), j = filters[n], int(ratios[n].argmax())
    place = place_of(spec, row.token, row.head)
    if j == len(row.t):
        words = f": out is too {'large' if filtered.value[j] > 0 else 'small'} in all its channels: a gain"
    else:
        more = "more" if filtered.value[j] > 0 else "less"
        words = f": out holds {more} of {_key(spec, int(row.t[j]))} (weight {row.mass[j]:.3g}) than rounding explains"
    return _seen(Gate.CANDIDATE, float(ratios[n][j]), place, words)


def _common(
    spec: AttentionSpec,
    rows: Sequence[GenericRow],
    filters: Sequence[tuple[GenericRow, Filtered]],
    observed: Observed,
) -> Seen:
    """Requirement (gate D): summed over rows, errors hold no gain, no bias of lse, no loss of one key."""
    best = float(aggregated(row.gained(_out(observed, row)) for row in rows)[0])
    words = f"a gain in {len(rows)} output rows"
    for t, some in _same_lists(filters):
        ratios = aggregated(some)[:-1]  # the last is the gain, which is summed over all rows
        j = int(ratios.argmax())
        if ratios[j] > best:
            best = float(ratios[j])
            words = f"{len(some)} output rows of one list hold too much or too little of {_key(spec, int(t[j]))}"
    if observed.lse is not None:
        log_bias = bias((row, float(observed.lse[row.token, row.head])) for row in rows)
        if log_bias > best:
            mean = np.mean([observed.lse[row.token, row.head] - row.lse for row in rows])
            best, words = log_bias, f"lse is off by {mean:+.2g} in the mean of {len(rows)} output rows"
    return _seen(Gate.COMMON, best, "all rows together", f": {words}, more than rounding explains")


def _same_lists(filters: Sequence[tuple[GenericRow, Filtered]]) -> Iterator[tuple[Ints, list[Filtered]]]:
    """Rows whose lists name the same keys in the same order, two or more."""
    groups: dict[bytes, tuple[Ints, list[Filtered]]] = {}
    for row, filtered in filters:
        groups.setdefault(row.t.tobytes(), (row.t, []))[1].append(filtered)
    yield from (group for group in groups.values() if len(group[1]) > 1)


def _key(spec: AttentionSpec, token: int) -> str:
    return f"token {token} (logical page {token // spec.page_size})"


def _seen(gate: Gate, use: float, place: str, words: str) -> Seen:
    return Seen(use, Finding(gate, place, f"{place}{words}", use=use) if use > 1 else None)
