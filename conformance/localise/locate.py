"""Locate: two launches show whether anything is wrong, the tools that fit what failed say where, under a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from sacts.reference.forward import Inputs
from sacts.reference.spec import Hints
from sacts.reports.records import Finding, Gate, Strip

from ..adapter import Refused
from ..build import Problem
from ..contract import CLEAN, WHOLE, AdapterRaised, ContractBroken, Surroundings, place_of
from ..gates import generic
from ..gates.branches import judge_gated
from ..gates.intervals import judge_lse
from ..gates.layout import LAUNCHES, judge_layout
from ..inspection import normalized, traced
from ..launch import Launcher, Observed
from ..messages import BUDGET
from ..probes.inputs import COUNT, RANDOM, Probe
from .bisection import first_bad_tile, partners, try_split
from .channels import few_channels, misplaced, wrong_channels
from .clues import Clue, Kind, Reading, read
from .count import read_count
from .launches import BudgetSpent, Family, Meter, Seen, reference_numerics
from .slots import name, owner_of, walk
from .tomography import decode


@dataclass(frozen=True)
class Location:
    """Where a backend is wrong. `row`: (token, query head), None where the layout gate names it; `clues`: what was
    found, the telling one first; `launches`: extra ones, beyond the two that showed the failure.
    """

    finding: Finding
    row: tuple[int, int] | None
    clues: tuple[Clue, ...]
    launches: int


def locate(launcher: Launcher, problem: Problem, *, budget: int = BUDGET) -> Location | None:
    """Look at the lists that the backend makes, where it shows them; launch the count and the random family; where one
    leaves its bounds, say where. Where both are right, poison what must not matter (gate layout), and say which slot
    does; then the sharper gates of drawn inputs, and the gated sum of branches. None where nothing is wrong.

    Raises AdapterRaised, ContractBroken or Refused where the first two launches do.
    """
    if budget < 0:
        raise ValueError(f"budget must be at least 0 launches, got {budget}")
    if launcher.backend.normalizes and (listed := normalized(launcher, problem, RANDOM.inputs(problem))):
        return Location(listed, None, (Clue(Kind.INDEX, listed.sentence, Gate.INDEX),), 0)
    first = Meter(launcher, 2)
    count, random = (_family(problem, probe) for probe in (COUNT, RANDOM))
    seen = first(count), first(random)
    if not (seen[0].bad.any() or seen[1].bad.any()):
        return (
            _layout(launcher, random, seen[1], budget) or _drawn(launcher, random, seen[1]) or _gated(launcher, random)
        )
    found = _Search(Meter(launcher, budget), count, random, *seen).run()
    traces = launcher.backend.traces and problem.branches == 1  # of several there is no trace yet
    return _by_trace(launcher, random, found) if traces else found


def _by_trace(launcher: Launcher, family: Family, found: Location) -> Location:
    """What the backend's own trace says, before what its outputs say: where it is right, the fault comes after it."""
    try:
        finding = traced(launcher, family.problem, family.inputs, family.hints)
    except (AdapterRaised, ContractBroken) as broken:
        words = f"{found.finding.sentence}; its trace could not be read: {broken}"
        return replace(found, finding=structs.replace(found.finding, sentence=words))
    if finding is None:
        words = f"{found.finding.sentence}; its trace is right in every tile: the fault comes after the last"
        return replace(found, finding=structs.replace(found.finding, sentence=words))
    clue = Clue(Kind.TILE, finding.sentence, finding.gate)
    words = f"{finding.sentence}. From its outputs alone: {found.finding.sentence}"
    told = structs.replace(finding, sentence=words, use=found.finding.use, strip=found.finding.strip)
    return Location(told, found.row, (clue, *found.clues), found.launches + 1)


class _Counted(Launcher):
    """The same launcher, counting, under a budget."""

    def __init__(self, inner: Launcher, budget: int) -> None:
        super().__init__(inner.backend, inner.device)
        self._inner, self._budget = inner, budget
        self.launches = 0

    def __call__(
        self,
        problem: Problem,
        inputs: Inputs,
        *,
        hints: Hints | None = None,
        surroundings: Surroundings = CLEAN,
        between: Callable[[], object] = lambda: None,
    ) -> Observed:
        """One launch. Raises BudgetSpent, and what a launcher raises."""
        if self.launches >= self._budget:
            raise BudgetSpent(f"all {self._budget} launches are used")
        self.launches += 1
        return self._inner(problem, inputs, hints=hints, surroundings=surroundings, between=between)


def _layout(launcher: Launcher, family: Family, seen: Seen, budget: int) -> Location | None:
    """Poison, and the halving of the gate; beyond the launches that find nothing wrong, under the budget."""
    counted = _Counted(launcher, budget + LAUNCHES)
    try:
        finding = judge_layout(counted, family.problem, family.inputs, seen.observed)
    except BudgetSpent as spent:
        words = f"some output bits change with what stands in slots that no row attends; {spent}"
        finding = Finding(Gate.LAYOUT, WHOLE, words)
    if finding is None:
        return None
    clue = Clue(Kind.LAYOUT, finding.sentence, Gate.LAYOUT)
    return Location(finding, None, (clue,), max(0, counted.launches - 1))


def _drawn(launcher: Launcher, family: Family, seen: Seen) -> Location | None:
    """What gates B, C and D say of a row, a candidate, or all rows together."""
    bounds = generic.bounds(family.problem, family.inputs, reference_numerics(launcher, family))
    finding = bounds.first(seen.observed) if bounds else None
    return Location(finding, None, (Clue(Kind.WEIGHT, finding.sentence, finding.gate),), 0) if finding else None


def _gated(launcher: Launcher, family: Family) -> Location | None:
    """What the gated sum of branches says, where each is right by itself."""
    if family.problem.branches == 1:
        return None
    finding = judge_gated(launcher, family.problem, family.inputs).finding
    return Location(finding, None, (Clue(Kind.WEIGHT, finding.sentence, finding.gate),), 1) if finding else None


def _family(problem: Problem, probe: Probe) -> Family:
    return Family(problem, probe.inputs(problem), probe.exactness(problem), problem.hints)


def worst_row(seen: Seen) -> tuple[int, int]:
    """The output row (token, query head) that is furthest outside its bounds."""
    use = np.maximum(seen.out_use.max(axis=-1), seen.lse_use)
    token, head = np.unravel_index(int(use.argmax()), use.shape)
    return int(token), int(head)


class _Search:
    """One localisation: the two families as they were seen, the clues so far."""

    def __init__(self, meter: Meter, count: Family, random: Family, seen_count: Seen, seen_random: Seen) -> None:
        self.meter = meter
        self.count, self.random = count, random
        self.seen_count, self.seen_random = seen_count, seen_random
        self.by_count = bool(seen_count.bad.any())
        self.family = count if self.by_count else random
        self.seen = seen_count if self.by_count else seen_random
        self.row = worst_row(self.seen)
        self.strip: Strip | None = None
        self.split_only = False

    def run(self) -> Location:
        clues: list[Clue] = []
        end = ""
        try:
            clues.extend(self._clues())
        except BudgetSpent as spent:
            end = f"; {spent}"
        except (ContractBroken, AdapterRaised, Refused) as broken:
            end = f"; a smaller problem then failed otherwise: {broken}"
        if not clues:
            clues = [self._values()]
        return self._location(clues, end)

    def _clues(self) -> Iterator[Clue]:
        """The tools in the order in which they say most for least."""
        if found := misplaced(self.random, self.seen_random):
            self.row, clue = found
            self.family, self.seen = self.random, self.seen_random
            yield clue
            return
        if self.family.hints.num_splits > 1:
            single = self.family.with_splits(1)
            self.split_only = not self.meter(single).bad[self.row]
            self.family = self.family if self.split_only else single
        yield from self._of_row()
        yield from self._of_batch()

    def _of_row(self) -> Iterator[Clue]:
        if not int(self.seen.expected.edges[self.row]):
            values = self._values()
            must = "" if values.kind is Kind.LSE else "out must be 0: "
            yield Clue(Kind.EMPTY, f"the row has no edge: {must}{values.words}", values.gate)
            return
        if not self.family.shows_v:
            yield self._values()
            yield from self._of_tile(Reading())
            return
        if few_channels(self.seen) and (clue := wrong_channels(self.meter, self.family, *self.row)):
            yield clue
            return
        reading = self._decoded()
        self.strip = reading.strip
        yield from reading.clues or (self._values(),)
        if self.split_only:
            yield from self._of_split(reading)
        elif not reading.clues or reading.clues[0].kind in (Kind.TILE, Kind.DENOMINATOR, Kind.LSE, Kind.WEIGHT):
            yield from self._of_tile(reading)

    def _decoded(self) -> Reading:
        """Tomography, unless only the lse is wrong."""
        if not (self.seen.out_use[self.row] > 1).any() and not self._weights_may_tell():
            return Reading()
        if self.by_count and np.isfinite(self.seen.observed.out[self.row]).all():
            return read_count(self.meter, self.family, self.seen.expected, self.seen.observed, self.row)
        return read(self.family, decode(self.meter, self.family, *self.row), *self.row)

    def _weights_may_tell(self) -> bool:
        """A wrong lse of one row may be a wrong logit; of rows whose out is right everywhere, it is its own fault."""
        return bool((self.seen.out_use > 1).any())

    def _of_tile(self, reading: Reading) -> Iterator[Clue]:
        """The first tile with which the running state is wrong, where that says more than the clues."""
        named = reading.clues[0] if reading.clues else None
        if named is not None and named.kind is Kind.WEIGHT and len(named.tokens) == 1:
            return
        problem, mine = self.family.problem, walk(self.family.problem, *self.row, self.family.hints)
        if mine.num_tiles < 2:
            return
        tile = first_bad_tile(self.meter, self.family, *self.row)
        if not tile:  # where one tile is already wrong, tiles say nothing
            return
        edges = np.flatnonzero(mine.tile == tile)
        span = ""
        if len(edges):
            ends = [owner_of(problem, mine.slots, int(i), self.row[0]) for i in edges[[0, -1]]]
            span = ": " + " to ".join(name(problem, end, self.row[0]) for end in ends)
        from_tile = f"the running state is wrong from tile {tile} of {mine.num_tiles} on{span}"
        words = f"tiles 0 to {tile - 1} alone are right, {from_tile}"
        yield Clue(Kind.TILE, words, self._gate(), tiles=(tile,))

    def _of_split(self, reading: Reading) -> Iterator[Clue]:
        """Right with one split: is it a split's own range, or the merge?"""
        wrong = next((clue.splits for clue in reading.clues if clue.kind is Kind.SPLIT), ())
        if not wrong:
            return
        trial = try_split(self.meter, self.family, wrong[0], *self.row)
        words = f"split {wrong[0]}'s range alone is " + ("wrong" if trial.alone_fails else "right: the merge")
        if trial.pair_fails:
            words += f", already of splits {trial.pair[0]} and {trial.pair[1]}"
        yield Clue(Kind.SPLIT, words, Gate.MERGE, splits=wrong)

    def _of_batch(self) -> Iterator[Clue]:
        """Whether the request is wrong by itself."""
        if self.family.problem.num_calls < 2:
            return
        beside = partners(self.meter, self.family, *self.row)
        if beside is not None:
            names = " and ".join(map(str, beside))
            request = self.family.problem.spec.token_request[self.row[0]] // self.family.problem.branches
            words = f"request {request} is right in a batch of its own, wrong beside request {names}"
            yield Clue(Kind.BATCH, words, self._gate(), requests=beside)

    def _gate(self) -> Gate:
        if self.by_count and (self.seen.out_use[self.row] > 1).any():
            return Gate.COUNT
        return Gate.OUT if (self.seen.out_use[self.row] > 1).any() else Gate.LSE

    def _values(self) -> Clue:
        """The numbers themselves, where no tool says more."""
        right, observed = self.seen.expected, self.seen.observed
        if (self.seen.out_use[self.row] > 1).any():
            at = (*self.row, int(self.seen.out_use[self.row].argmax()))
            words = (
                f"channel {at[2]}: out {observed.out[at]:.7g}, allowed {right.out_lo[at]:.7g} to {right.out_hi[at]:.7g}"
            )
            return Clue(Kind.WEIGHT, words, self._gate())
        finding = judge_lse(self.family.problem.spec, right, observed)
        assert finding is not None
        return Clue(Kind.LSE, finding.sentence.removeprefix(f"{finding.place}: "), Gate.LSE)

    def _location(self, clues: list[Clue], end: str) -> Location:
        spec = self.family.problem.spec
        place = place_of(spec, *self.row)
        words = "; ".join(clue.words for clue in clues)
        gate = Gate.MERGE if self.split_only else clues[0].gate
        splits = f"right with 1 split, wrong with {self.family.hints.num_splits}: " if self.split_only else ""
        sentence = f"{splits}{place}: {words}{self._extent()}{end}"
        use = float(max(self.seen.out_use[self.row].max(), self.seen.lse_use[self.row]))
        finding = Finding(gate, place, sentence, use=use, strip=self.strip)
        return Location(finding, self.row, tuple(clues), self.meter.launches)

    def _extent(self) -> str:
        """How many rows are wrong, and what they share."""
        bad = self.seen.bad
        count, total = int(bad.sum()), bad.size
        if count < 2:
            return ""
        heads, requests = np.flatnonzero(bad.any(axis=0)), np.flatnonzero(bad.any(axis=1))
        request = {self.family.problem.spec.token_request[t] for t in requests.tolist()}
        shared = ""
        if len(heads) == 1 and bad.shape[1] > 1:
            shared = f", all of query head {heads[0]}"
        elif len(request) == 1 and self.family.problem.spec.num_requests > 1:
            shared = f", all of request {request.pop()}"
        return f" ({count} of {total} output rows are wrong{shared})"
