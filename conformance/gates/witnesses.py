"""Gates of the witness probes: each judges the elements of out that its probe was made for, and says in the field's
words what a wrong one means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sacts.reports.records import Finding, Gate

from ..contract import place_of
from ..launch import Observed
from ..probes.applicability import terms_of
from ..probes.copies import Copy
from .intervals import lse_use, out_use

Array = NDArray[np.float64]


class Worst(NamedTuple):
    """The element of a probe that lies farthest out: where, and use."""

    token: int
    head: int
    channel: int
    use: float
    outside: int


def used(copy: Copy, observed: Observed, probe: str) -> float:
    """The largest observed / allowed of one probe; 0 where the copy does not carry it."""
    worst = worst_of(copy, observed, probe)
    return worst.use if worst else 0.0


def worst_of(copy: Copy, observed: Observed, probe: str) -> Worst | None:
    """Where the probe is farthest from what is allowed; None where nothing is judged."""
    if probe not in copy.judged or not copy.judged[probe].any():
        return None
    use = np.where(copy.judged[probe], out_use(copy.expected, observed, copy.problem.spec.dtype), -1.0)
    token, head, channel = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
    return Worst(token, head, channel, float(use[token, head, channel]), int((use > 1).sum()))


def judge_explained(
    gate: Gate,
    explain: Callable[[Copy, Observed, Worst], str],
    otherwise: str,
    copies: Sequence[Copy],
    observed: Sequence[Observed],
    *,
    explained: bool,
) -> Finding | None:
    """The worst element of the probe that is named as its gate, in the first copy where it is outside and `explain`
    says by which mistake. A copy without such words is passed over, unless `explained` is False.
    """
    for copy, seen in zip(copies, observed, strict=True):
        worst = worst_of(copy, seen, gate)
        if worst is None or worst.use <= 1:
            continue
        words = explain(copy, seen, worst)
        if not words and explained:
            continue
        at = worst.token, worst.head, worst.channel
        place = place_of(copy.problem.spec, worst.token, worst.head)
        sentence = (
            f"{place}, channel {worst.channel}: out {seen.out[at]:.7g}, allowed {copy.expected.out_lo[at]:.7g} to "
            f"{copy.expected.out_hi[at]:.7g} ({gate}): {words or otherwise}"
        )
        return Finding(gate, place, sentence, use=worst.use)
    return None


def renamed(copy: Copy, words: str) -> str:
    """Words about a copy in the cell's own names; a witness copy is of the last query of one request."""
    if copy.witness is None:
        return words
    return words.replace("(request 0, query 0,", f"(request {copy.request}, last query,")


def judge_address(copies: Sequence[Copy], observed: Sequence[Observed]) -> Finding | None:
    """Requirement: where one key carries all the mass, out is the value at that key's address, to the last bit.

    What is not is a matter of addresses where lse is wrong too (another K) or out is another key's value (another V);
    else it is left to the later gates, and to `judge_selected` after them.
    """
    return _first(_find(Gate.ADDRESS, "select", copies, observed, _selected, _misplaced))


def judge_selected(copies: Sequence[Copy], observed: Sequence[Observed]) -> Finding | None:
    """Requirement: as `judge_address`, whatever the reason."""
    return _first(_find(Gate.ADDRESS, "select", copies, observed, _selected))


def judge_mass(copies: Sequence[Copy], observed: Sequence[Observed]) -> Finding | None:
    """Requirement: out = o / l with o and l from the same weights: no gain, to 1e-5."""
    return _first(_find(Gate.MASS, "dither", copies, observed, _gain))


def judge_rescale(copies: Sequence[Copy], observed: Sequence[Observed]) -> Finding | None:
    """Requirement: when the running maximum rises by n octaves, l and the accumulator both shrink by 2^-n, once."""
    found = [_find(Gate.RESCALE, probe, copies, observed, _rise) for probe in ("cliff", "stair")]
    return _first(finding for each in found for finding in each)


def judge_pairing(copies: Sequence[Copy], observed: Sequence[Observed]) -> Finding | None:
    """Requirement: each weight multiplies the V of its own key, however small it is."""
    return _first(_find(Gate.PAIRING, "comb", copies, observed, _teeth))


def _first(findings: Iterator[Finding]) -> Finding | None:
    return next(findings, None)


def _find(
    gate: Gate,
    probe: str,
    copies: Sequence[Copy],
    observed: Sequence[Observed],
    explain: Callable[[Copy, Observed, Worst], str],
    guilty: Callable[[Copy, Observed, Worst], bool] = lambda copy, observed, worst: True,
) -> Iterator[Finding]:
    for copy, seen in zip(copies, observed, strict=True):
        worst = worst_of(copy, seen, probe)
        if worst is None or worst.use <= 1 or not guilty(copy, seen, worst):
            continue
        where = renamed(copy, place_of(copy.problem.spec, worst.token, worst.head))
        at = worst.token, worst.head, worst.channel
        words = (
            f"{where}, channel {worst.channel}: out {seen.out[at]:.7g}, allowed {copy.expected.out_lo[at]:.7g} to "
            f"{copy.expected.out_hi[at]:.7g} ({probe}): {explain(copy, seen, worst)}"
        )
        yield Finding(gate, where, words, use=worst.use)


def _key(copy: Copy, worst: Worst, index: int) -> str:
    """A key of the witness row: token, logical and physical page."""
    assert copy.witness is not None
    lane = copy.witness.lanes[worst.head]
    row, spec = copy.witness.rows[lane.row], copy.problem.spec
    token = int(row.t[index])
    physical = int(copy.problem.pages[row.page[index]])
    return (
        f"token {token} (logical page {token // spec.page_size} -> physical page {physical} offset "
        f"{token % spec.page_size}, KV head {lane.kv_head})"
    )


def _looks_like(copy: Copy, observed: Observed, worst: Worst) -> int | None:
    """The key, by its place in the row, whose value out is; None where it is no other key's."""
    assert copy.witness is not None
    lane = copy.witness.lanes[worst.head]
    values, out = copy.witness.values[lane.row], observed.out[worst.token, worst.head]
    if not np.isfinite(out).all():
        return None
    far = np.abs(values - out).max(axis=-1)
    nearest = int(far.argmin())
    return nearest if nearest != lane.target and far[nearest] < 0.25 else None


def _misplaced(copy: Copy, observed: Observed, worst: Worst) -> bool:
    """Another key's K or V: where nothing but q.k makes the logit, a wrong lse tells that too."""
    if _looks_like(copy, observed, worst) is not None or observed.lse is None:
        return True
    lse_wrong = lse_use(copy.expected, observed)[worst.token, worst.head] > 1
    return bool(lse_wrong) and not terms_of(copy.problem.spec) - {"sequence", "empty_row"}


def _selected(copy: Copy, observed: Observed, worst: Worst) -> str:
    """Which key's value out looks like."""
    assert copy.witness is not None
    lane = copy.witness.lanes[worst.head]
    values, out = copy.witness.values[lane.row], observed.out[worst.token, worst.head]
    right = f"{_key(copy, worst, lane.target)} carries all the mass"
    if not np.isfinite(out).all():
        return f"{right}, out is not finite"
    other = _looks_like(copy, observed, worst)
    if other is not None:
        return f"{right}, out is the value of {_key(copy, worst, other)}"
    share = float(out @ values[lane.target] / (values[lane.target] @ values[lane.target]))
    return f"{right}, out holds {share:.5g} of its value"


def _gain(copy: Copy, observed: Observed, worst: Worst) -> str:
    k = int(copy.expected.edges[worst.token, worst.head])
    return f"the numerator does not weigh what the denominator counts, {k} equal edges"


def _rise(copy: Copy, observed: Observed, worst: Worst) -> str:
    """The rise whose missing rescale explains out best."""
    assert copy.witness is not None
    lane = copy.witness.lanes[worst.head]
    levels = (copy.witness.cliffs if lane.probe == "cliff" else copy.witness.stairs)[lane.row]
    assert levels is not None
    row, values = copy.witness.rows[lane.row], copy.witness.values[lane.row]
    weights = 2.0**-levels.level
    weights /= weights.sum()
    error = observed.out[worst.token, worst.head] - copy.expected.out[worst.token, worst.head]
    best, at = -1.0, 0
    for tile in np.unique(row.tile[levels.rise > 0]):
        pattern = weights[row.tile < tile] @ values[row.tile < tile]
        size = float(np.linalg.norm(pattern) * np.linalg.norm(error))
        likeness = abs(float(pattern @ error)) / size if size and np.isfinite(size) else 0.0
        if likeness > best:
            best, at = likeness, int(tile)
    index = int(np.flatnonzero(row.tile == at)[0])
    rise = int(levels.rise[index])
    return f"the maximum rises {rise} octave{'s' * (rise > 1)} at tile {at}, from {_key(copy, worst, index)} on"


def _teeth(copy: Copy, observed: Observed, worst: Worst) -> str:
    """The keys whose weights the channel shows."""
    assert copy.witness is not None
    lane = copy.witness.lanes[worst.head]
    keys = np.flatnonzero(copy.witness.values[lane.row][:, worst.channel])
    if not len(keys):
        return "no key has a value in this channel"
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"the channel shows the weight of {_key(copy, worst, int(keys[0]))}{more}"
