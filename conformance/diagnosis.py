"""After a failure: the gates in the order of blame, on clean launches of the copies that looked wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from sacts.reference.bounds import Expected
from sacts.reference.forward import Inputs
from sacts.reference.spec import EpilogueKind, Hints
from sacts.reports.records import Finding, Gate

from .batch import cut, join, join_inputs
from .build import Problem
from .contract import WHOLE
from .gates import generic, intervals, witnesses
from .gates.count import judge_count
from .gates.determinism import judge_repeats
from .gates.dropout import judge_dropout
from .gates.layout import changed, judge_layout, launch_poisoned
from .gates.scale import judge_scale
from .gates.terms import judge_terms
from .launch import Launcher, Observed
from .probes.copies import Copy
from .probes.inputs import dithered

GATE_OF = {
    "count": Gate.COUNT,
    "select": Gate.ADDRESS,
    "dither": Gate.MASS,
    "cliff": Gate.RESCALE,
    "stair": Gate.RESCALE,
    "comb": Gate.PAIRING,
    "dropout": Gate.DROPOUT,
    "scale": Gate.SCALE,
    "random": Gate.OUT,
}
REPEATS = 3  # of a launch whose bits may vary
SEPARATE = "span"  # caches of such strides are so large that each copy is launched by itself


@dataclass(frozen=True)
class Batch:
    """Copies that share a launch."""

    copies: list[Copy]

    @cached_property
    def problem(self) -> Problem:
        """All copies as one problem."""
        return join([copy.problem for copy in self.copies])

    @cached_property
    def inputs(self) -> Inputs:
        """The values of all copies."""
        return join_inputs(self.problem, [(copy.problem, copy.inputs) for copy in self.copies])

    def cut(self, observed: Observed) -> list[Observed]:
        """What came back, by copy."""
        return list(cut(observed, [copy.problem for copy in self.copies]))

    def launch_poisoned(self, launcher: Launcher, launch: int) -> list[Observed]:
        """One of two launches with poison everywhere that must not matter, by copy."""
        return self.cut(launch_poisoned(launcher, self.problem, self.inputs, launch))


def batches(made: Sequence[Copy]) -> list[Batch]:
    """The copies of a cell by launch; a witness copy is of one branch."""
    if made[0].problem.cell.cache == SEPARATE:
        return [Batch([copy]) for copy in made]
    together = {
        copy.problem.branches: [each for each in made if each.problem.branches == copy.problem.branches]
        for copy in made
    }
    return [Batch(each) for each in together.values()]


def use_of(copy: Copy, observed: Observed) -> float:
    """The largest observed / allowed of anything that the copy judges."""
    out = max((witnesses.used(copy, observed, probe) for probe in copy.judged), default=0.0)
    return max(out, intervals.largest(intervals.lse_use(copy.expected, observed)))


def diagnose_bits(
    launcher: Launcher, differing: Sequence[tuple[Batch, set[int]]], seen: Sequence[tuple[Copy, Observed, Observed]]
) -> Finding | None:
    """Bits that differ between two launches with other poison, both within their bounds: does the same call vary by
    itself, which only a promise forbids, or does the poison matter?
    """
    promise = next((finding for each in seen if (finding := judge_repeats(launcher, each[0], each[1:]))), None)
    if any(_varies(launcher, batch) for batch, _ in differing):
        return promise
    finding = diagnose(launcher, differing)
    return promise if finding.gate is Gate.DETERMINISM else finding


def _varies(launcher: Launcher, batch: Batch) -> bool:
    """Whether a launch without poison gives other bits when it is repeated."""
    first = launcher(batch.problem, batch.inputs)
    return any(changed(first, launcher(batch.problem, batch.inputs)) for _ in range(REPEATS))


def diagnose(launcher: Launcher, suspected: Sequence[tuple[Batch, set[int]]]) -> Finding:
    """The first gate that fails: on the suspected copies one by one, then among all that shared a launch."""
    alone = _Clean(launcher, [batch.copies[n] for batch, suspects in suspected for n in sorted(suspects)])
    for finding in alone.findings():
        if finding is not None:
            return alone.blame_merge(finding)
    for batch, _ in suspected:
        together = _Together(launcher, batch)
        for finding in together.findings():
            if finding is not None:
                words = f"{finding.sentence} (only in the company of {batch.problem.spec.num_requests} requests)"
                return replace_sentence(together.blame_merge(finding), words)
    words = "it differed from launch to launch, and not when that was repeated: the backend is not deterministic"
    return Finding(Gate.DETERMINISM, WHOLE, words)


def diagnose_drawn(launcher: Launcher, copy: Copy, bounds: generic.Bounds, together: Finding) -> Finding:
    """A finding of gates B to D in a launch of all copies: is it there alone, and with one split?"""
    alone = bounds.first(launcher(copy.problem, copy.inputs))
    if alone is None:
        return replace_sentence(together, f"{together.sentence} (only in the company of other requests)")
    splits = copy.problem.hints.num_splits
    single = replace(copy.problem.hints, num_splits=1)
    if splits == 1 or bounds.first(launcher(copy.problem, copy.inputs, hints=single)):
        return alone
    sentence = f"right with 1 split, wrong with {splits}: {alone.sentence}"
    return Finding(Gate.MERGE, alone.place, sentence, use=alone.use)


def replace_sentence(finding: Finding, sentence: str) -> Finding:
    """The same finding in other words."""
    return Finding(finding.gate, finding.place, sentence, use=finding.use, strip=finding.strip)


def _only(copies: Sequence[Copy], n: int) -> Expected:
    """What the whole launch must give, without a bound for any copy but one."""
    parts = [copy.expected if i == n else _unbounded(copy.expected) for i, copy in enumerate(copies)]
    return Expected(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Expected)})


def _unbounded(expected: Expected) -> Expected:
    return replace(expected, trusted=np.zeros_like(expected.trusted))


class _Clean:
    """Copies launched by themselves, without poison."""

    def __init__(self, launcher: Launcher, copies: Sequence[Copy]) -> None:
        self.launcher = launcher
        self.copies = copies

    @cached_property
    def observed(self) -> list[Observed]:
        """What comes back."""
        return [self.launch(n, None) for n in range(len(self.copies))]

    def launch(self, n: int, hints: Hints | None) -> Observed:
        """One copy."""
        return self.launcher(self.copies[n].problem, self.copies[n].inputs, hints=hints)

    def findings(self) -> Iterator[Finding | None]:
        """Each gate's finding, lazily, in the order of blame."""
        yield self._judged(judge_terms)
        yield self._judged(judge_dropout)
        yield from (self.count(n) for n in self._carrying("count"))
        yield self._judged(witnesses.judge_address)
        yield judge_scale(self.copies, self.observed)
        yield from self.layout()
        yield from (self.lse(n) for n in self._in_turn("count", "random"))
        for judge in (witnesses.judge_mass, witnesses.judge_rescale, witnesses.judge_pairing):
            yield self._judged(judge)
        yield from (self.out(n) for n in self._carrying("random"))
        yield self._judged(witnesses.judge_selected)
        yield judge_scale(self.copies, self.observed, explained=False)
        yield judge_dropout(self.copies, self.observed, explained=False)
        yield from (self.count(n, whatever=True) for n in self._carrying("count"))

    def _carrying(self, probe: str) -> list[int]:
        return [n for n, copy in enumerate(self.copies) if probe in copy.judged]

    def _in_turn(self, *first: str) -> list[int]:
        """All copies, those that carry these probes first."""
        order = [n for probe in first for n in self._carrying(probe)]
        return list(dict.fromkeys([*order, *range(len(self.copies))]))

    def _judged(self, judge: Callable[[Sequence[Copy], Sequence[Observed]], Finding | None]) -> Finding | None:
        return judge(self.copies, self.observed)

    def count(self, n: int, *, whatever: bool = False) -> Finding | None:
        """Gate count. Where V is in codes or out behind an epilogue, rows whose lse is right count right: their out is
        left to the gates behind, unless `whatever`.
        """
        copy = self.copies[n]
        counted = intervals.largest(intervals.lse_use(copy.expected, self.observed[n])) <= 1
        bent = copy.problem.v_scales or copy.problem.spec.epilogue.kind is not EpilogueKind.NONE
        if bent and not whatever and self.observed[n].lse is not None and counted:
            return None
        hints, codes = copy.problem.hints, ~dithered(copy.problem)
        values = copy.problem, copy.inputs, copy.expected
        return judge_count(self.launcher, *values, self.observed[n], hints, codes)

    def layout(self) -> Iterator[Finding | None]:
        """Gate layout, in the random copy first: its rows are the cell's."""
        for n in self._in_turn("random"):
            copy = self.copies[n]
            yield self._named(copy, judge_layout(self.launcher, copy.problem, copy.inputs, self.observed[n]))

    def lse(self, n: int) -> Finding | None:
        """Gate lse."""
        copy = self.copies[n]
        return self._named(copy, intervals.judge_lse(copy.problem.spec, copy.expected, self.observed[n]))

    def out(self, n: int) -> Finding | None:
        """Gate out."""
        copy = self.copies[n]
        return intervals.judge_out(copy.problem.spec, copy.expected, self.observed[n])

    def _named(self, copy: Copy, finding: Finding | None) -> Finding | None:
        """In the cell's own names where the copy is a witness."""
        if finding is None or copy.witness is None:
            return finding
        words = witnesses.renamed(copy, finding.sentence)
        return Finding(finding.gate, witnesses.renamed(copy, finding.place), words, use=finding.use)

    def blame_merge(self, finding: Finding) -> Finding:
        """Requirement: splits merge un-normalised states. What fails with several splits and not with one is the
        merge's fault, but for a keep mask that is drawn by the place in a split.
        """
        hints = self.copies[0].problem.hints
        if hints.num_splits == 1 or finding.gate is Gate.LAYOUT:
            return finding
        single = replace(hints, num_splits=1)
        if any(use_of(copy, self.launch(n, single)) > 1 for n, copy in enumerate(self.copies)):
            return finding
        sentence = f"right with 1 split, wrong with {hints.num_splits}: {finding.sentence}"
        gate = Gate.DROPOUT if finding.gate is Gate.DROPOUT else Gate.MERGE
        return Finding(gate, finding.place, sentence, use=finding.use)


class _Together(_Clean):
    """All copies in one launch, without poison."""

    def __init__(self, launcher: Launcher, batch: Batch) -> None:
        super().__init__(launcher, batch.copies)
        self.batch = batch
        self._by_hints: dict[Hints | None, list[Observed]] = {}

    def launch(self, n: int, hints: Hints | None) -> Observed:
        """One copy among all."""
        if hints not in self._by_hints:
            whole = self.launcher(self.batch.problem, self.batch.inputs, hints=hints)
            self._by_hints[hints] = self.batch.cut(whole)
        return self._by_hints[hints][n]

    def count(self, n: int, *, whatever: bool = False) -> Finding | None:
        """Gate count, decoded among all: its row is named by its place in the launch."""
        copy, problem = self.copies[n], self.batch.problem
        if use_of(copy, self.observed[n]) <= 1:
            return None
        whole = self.launcher(problem, self.batch.inputs)
        return judge_count(
            self.launcher,
            problem,
            self.batch.inputs,
            _only(self.batch.copies, n),
            whole,
            problem.hints,
            ~dithered(problem),
        )

    def layout(self) -> Iterator[Finding | None]:
        """Gate layout of the whole launch."""
        clean = self.launcher(self.batch.problem, self.batch.inputs)
        yield judge_layout(self.launcher, self.batch.problem, self.batch.inputs, clean)
