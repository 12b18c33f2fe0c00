"""The count witness and its decoding step: a missing or doubled candidate is named by row and token, without a look
inside.

Detection takes one launch: logits are all equal, V holds +-1 codes, so out is the mean code and lse is ln k, almost
to the bit. Decoding makes V one-hot over physical slots, so that out *is* the probability row (GATES.md section 7,
tomography).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.bounds import Expected
from sacts.reference.formats import FORMATS
from sacts.reference.forward import Inputs, edges
from sacts.reference.spec import Hints
from sacts.reports.records import Finding, Gate, Strip

from ..build import Problem
from ..launch import Launcher, Observed, place_of
from .intervals import largest, out_use

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_SLOTS = 4096  # physical (slot, KV head) pairs that one decoding looks at
STRIP_BINS = 128  # ranges of a probability strip
NAMED = 4  # tokens named in a sentence


@dataclass(frozen=True)
class Slots:
    """Physical (live page, offset, KV head) triples in the order in which they are probed."""

    page: Ints
    offset: Ints
    head: Ints

    def __len__(self) -> int:
        return len(self.page)

    def take(self, part: slice) -> Slots:
        """A part of them."""
        return Slots(self.page[part], self.offset[part], self.head[part])


def judge_count(
    launcher: Launcher,
    problem: Problem,
    inputs: Inputs,
    expected: Expected,
    observed: Observed,
    hints: Hints,
    codes: NDArray[np.bool_],
) -> Finding | None:
    """Requirement: each row attends exactly its candidates, each once (set), and its denominator counts the same
    edges. `codes` [d_vo]: the channels that hold codes.
    """
    use = np.where(codes, out_use(expected, observed, problem.spec.dtype), 0.0)
    if largest(use) <= 1:
        return None
    token, head, channel = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
    place = place_of(problem.spec, token, head)
    k = int(expected.edges[token, head])
    seen = float(observed.out[token, head, channel])
    gate, strip = Gate.COUNT, None
    if not k or not np.isfinite(seen):
        words = f"channel {channel} is {seen:.7g}, " + (
            "must be finite" if k else "but the row has no edge: out must be 0"
        )
    else:
        slots, weights, lse = _probability_row(launcher, problem, inputs, token, head, k, hints)
        gate, words = _explain(problem, slots, weights, (lse, float(expected.lse[token, head])), token, head, k)
        strip = _strip(problem, slots, weights, token, head, k)
    if not words:
        gate = Gate.MASS
        low, high = (float(x[token, head, channel]) for x in (expected.out_lo, expected.out_hi))
        words = (
            f"channel {channel} of the mean code is {seen:.7g}, allowed {low:.7g} to {high:.7g}, "
            "yet the decoded membership is right: the numerator does not weigh what the denominator counts"
        )
    rows = int((use > 1).any(axis=-1).sum())
    more = f" ({rows} of {use.shape[0] * use.shape[1]} output rows are wrong)" if rows > 1 else ""
    return Finding(gate, place, f"{place}: {words}{more}", use=float(use[token, head, channel]), strip=strip)


def _probed(problem: Problem, token: int, qo_head: int) -> tuple[Slots, int]:
    """All slots, those that the row may legally reach first, and how many these are."""
    spec = problem.spec
    page, offset, head = np.nonzero(np.ones_like(problem.needed))
    position = problem.position_in(spec.token_request[token])
    own = (position[page, offset] >= 0) & (head == qo_head // spec.group_size)
    order = np.argsort(~own, kind="stable")[:MAX_SLOTS]
    return Slots(page[order], offset[order], head[order]), int(own.sum())


def _probability_row(
    launcher: Launcher, problem: Problem, inputs: Inputs, token: int, qo_head: int, k: int, hints: Hints
) -> tuple[Slots, Array, float]:
    """The weight of each slot in one output row, and its lse (NaN where the backend has none).

    One launch shows d_v slots. Once the row's own slots explain the whole mass, the others are not looked at.
    """
    slots, own = _probed(problem, token, qo_head)
    channels = problem.spec.head_dim_vo
    weights, lse = np.zeros(0), np.nan
    while len(weights) < len(slots):
        if len(weights) >= own and weights.sum() > 1 - 0.5 / k:
            break
        part = slots.take(slice(len(weights), len(weights) + channels))
        v = np.zeros_like(inputs.v.data)
        v[part.page, part.offset, part.head, np.arange(len(part))] = 1.0
        observed = launcher(problem, inputs._replace(v=replace(inputs.v, data=v)), hints=hints)
        weights = np.concatenate((weights, observed.out[token, qo_head, : len(part)]))
        lse = lse if observed.lse is None else float(observed.lse[token, qo_head])
    return slots.take(slice(len(weights))), weights, lse


def _explain(
    problem: Problem, slots: Slots, weights: Array, lse: tuple[float, float], token: int, qo_head: int, k: int
) -> tuple[Gate, str]:
    """Compare the decoded row with the candidate list, in words; an empty text where nothing differs.

    `lse`: observed and expected of the row. Weights that all vanish under too large an lse are the denominator's fault.
    """
    expected = _expected_counts(problem, slots, token, qo_head)
    if not np.isfinite(weights).all():
        return Gate.COUNT, "its weights are not finite"
    if not weights.any() and lse[0] > lse[1] + 1:
        return Gate.LSE, (
            f"its {k} weights vanish under an lse of {lse[0]:.7g}, expected {lse[1]:.7g}: "
            f"the denominator counts more edges, the numerator {k}"
        )
    inside = weights[expected > 0]
    unit = float(np.median(inside[inside > 0])) if (inside > 0).any() else float(weights.max(initial=0.0)) or 1.0
    times = weights / unit
    counts = np.rint(times)
    if (np.abs(times - counts) > 0.2).any():
        worst = int(np.abs(weights - expected / max(k, 1)).argmax())
        return Gate.COUNT, (
            f"{_name(problem, slots, worst, token)} has weight {weights[worst]:.6g}, expected {expected[worst]:.0f}/{k}"
        )
    total = weights.sum()
    parts = [
        f"{verb} {names}"
        for verb, chosen in (
            ("missing", (expected > 0) & (counts == 0)),
            ("counted more than once:", (expected > 0) & (counts > 1)),
            ("attended without being a candidate:", (expected == 0) & (counts > 0)),
        )
        if (names := _names(problem, slots, np.flatnonzero(chosen), token, weights, k))
    ]
    if parts:
        return Gate.COUNT, "; ".join(parts)
    if k and abs(total - 1) > 0.25 / k + 2 * FORMATS[problem.spec.dtype].u:
        with np.errstate(over="ignore"):
            counted = f"; e^lse is {np.exp(lse[0]):.5g}" if np.isfinite(lse[0]) else ""
        return Gate.LSE, (
            f"its {k} weights are equal but sum to {total:.5g}: the denominator counts {k / total:.4g} edges, "
            f"the numerator {k}{counted}"
        )
    return Gate.COUNT, ""


def _expected_counts(problem: Problem, slots: Slots, token: int, qo_head: int) -> Array:
    spec = problem.spec
    rows, t, count = edges(spec, problem.candidates)
    kv_head = qo_head // spec.group_size
    mine = rows == token * spec.num_kv_heads + kv_head
    times = dict(zip(t[mine].tolist(), count[mine].tolist(), strict=True))
    positions = problem.position_in(spec.token_request[token])[slots.page, slots.offset]
    own = slots.head == kv_head
    return np.array([times.get(int(p), 0) if o else 0 for p, o in zip(positions, own, strict=True)], np.float64)


def _strip(problem: Problem, slots: Slots, weights: Array, token: int, qo_head: int, k: int) -> Strip:
    """The decoded row by the request's own positions, tails included, in at most STRIP_BINS ranges."""
    position = problem.position_in(problem.spec.token_request[token])[slots.page, slots.offset]
    own = (position >= 0) & (slots.head == qo_head // problem.spec.group_size)
    step = max(1, -(-(int(position[own].max(initial=0)) + 1) // STRIP_BINS))
    bins = position[own] // step
    expected = _expected_counts(problem, slots, token, qo_head) / k
    finite = np.nan_to_num(weights)
    observed, right = (np.bincount(bins, x[own]) for x in (finite, expected))
    first = (np.arange(len(observed)) * step).tolist()
    return Strip(first, step, observed.tolist(), right.tolist(), float(finite[~own].sum()))


def _names(problem: Problem, slots: Slots, chosen: Ints, token: int, weights: Array, k: int) -> str:
    """The first of the chosen slots in full, the next ones by position."""
    if not len(chosen):
        return ""
    first = f"{_name(problem, slots, int(chosen[0]), token)}, weight {weights[chosen[0]]:.6g} where an edge has 1/{k}"
    rest = [_short(problem, slots, int(i), token) for i in chosen[1:NAMED]]
    more = f" and {len(chosen) - NAMED} more" if len(chosen) > NAMED else ""
    return first + (f"; also {', '.join(rest)}{more}" if rest else "")


def _short(problem: Problem, slots: Slots, i: int, token: int) -> str:
    """Its position in the row's request, or in the request that owns it."""
    own = int(problem.position_in(problem.spec.token_request[token])[slots.page[i], slots.offset[i]])
    return str(own if own >= 0 else problem.slot_token[slots.page[i], slots.offset[i]])


def _name(problem: Problem, slots: Slots, i: int, token: int) -> str:
    """A slot as seen from a row: its own token, another request's, or nobody's."""
    spec = problem.spec
    page, offset, head = int(slots.page[i]), int(slots.offset[i]), int(slots.head[i])
    physical = int(problem.pages[page])
    request = spec.token_request[token]
    where = f"physical page {physical} offset {offset}, KV head {head}"
    position = int(problem.position_in(request)[page, offset])
    owner = request if position >= 0 else int(problem.slot_request[page, offset])
    if owner < 0:
        return f"a slot of no request ({where})"
    if owner != request:
        position = int(problem.slot_token[page, offset])
        return f"token {position} of request {owner} ({where})"
    tail = f" beyond T = {spec.seq_lens[request]}" if position >= spec.seq_lens[request] else ""
    return f"token {position}{tail} (logical page {position // spec.page_size} -> {where})"
