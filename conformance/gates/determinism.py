"""Gate determinism: what a backend promises of its bits, held in the launches that a cell needs anyway and one or two
small ones more. Levels that take many launches are measured by `sacts determinism`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from sacts.reference.spec import CandidateKind, Hints, Route, Schedule
from sacts.reports.records import Finding, Gate

from ..adapter import Determinism
from ..determinism import measured, outputs, widths
from ..launch import Launcher, Observed
from ..messages import Measurement
from ..probes.copies import Copy
from ..relations import Variant, chosen, relabelled, repeated, shuffled

HELD = (
    Determinism.RUN_TO_RUN,
    Determinism.BATCH_INVARIANT,
    Determinism.SCHEDULE,
    Determinism.PLACEMENT_INVARIANT,
)
MEANS = {
    Determinism.RUN_TO_RUN: "in another launch of the same call",
    Determinism.BATCH_INVARIANT: "whatever else is in the batch",
    Determinism.SCHEDULE: "under other splits and tiles",
    Determinism.PLACEMENT_INVARIANT: "wherever its pages lie and however its set is ordered",
}


def promised(launcher: Launcher, output: str) -> frozenset[Determinism]:
    """The levels that the backend promises for an output and that a cell can hold it to."""
    levels = launcher.backend.capabilities.determinism.get(output, frozenset())
    return frozenset(levels) & frozenset(HELD)


def repeats(launcher: Launcher, copy: Copy, seen: Sequence[Observed]) -> list[Measurement]:
    """Several launches of one call, by output."""
    runs = [(each, repeated(copy.problem, copy.inputs)) for each in seen[1:]]
    return [
        measured(launcher.backend, copy.problem, widths(copy.expected), Determinism.RUN_TO_RUN, name, seen[0], runs)
        for name in outputs(seen[0])
    ]


def judge_repeats(launcher: Launcher, copy: Copy, seen: Sequence[Observed]) -> Finding | None:
    """Requirement: where the backend promises it of an output, the same call gives the same bits."""
    return next((broken(each) for each in repeats(launcher, copy, seen) if each.promised and each.distinct > 1), None)


class Bits:
    """The copy whose inputs are drawn, and what came back for it beside the other copies."""

    def __init__(self, launcher: Launcher, copy: Copy, together: Observed) -> None:
        self.launcher, self.copy, self.together = launcher, copy, together
        self._runs: dict[tuple[bool, tuple[Determinism, ...]], tuple[Observed, Variant]] = {}

    def finding(self) -> Finding | None:
        """Requirement: bits that are promised stay, output by output, level by level. All levels are varied at once,
        and one by one where that changes a bit.
        """
        for name in outputs(self.together):
            levels = tuple(level for level in HELD[1:] if level in promised(self.launcher, name))
            if not levels or not self.copy.problem.spec.num_tokens or self._measured(name, levels).distinct == 1:
                continue
            parts = [self._measured(name, levels, [level]) for level in levels]
            return broken(next((each for each in parts if each.distinct > 1), self._measured(name, levels)))
        return None

    def _measured(
        self, output: str, levels: tuple[Determinism, ...], varied: Sequence[Determinism] = ()
    ) -> Measurement:
        """What some of the promised levels, or all, make of an output."""
        batch = Determinism.BATCH_INVARIANT in levels
        first = self.together if batch else self._alone
        run = self._run(batch, tuple(varied or levels))
        last = (varied or levels)[-1]
        width = widths(self.copy.expected)
        return measured(self.launcher.backend, self.copy.problem, width, last, output, first, [run])

    def _run(self, batch: bool, levels: tuple[Determinism, ...]) -> tuple[Observed, Variant]:
        """One launch for all outputs: of the busiest request alone where the batch must not matter, else of the whole
        copy; with other hints and at other places as far as these levels say that they do not matter.
        """
        if (batch, levels) in self._runs:
            return self._runs[batch, levels]
        variant = self._busiest if batch else repeated(self.copy.problem, self.copy.inputs)
        problem, inputs, hints = variant.problem, variant.inputs, variant.hints
        if Determinism.SCHEDULE in levels:
            hints = _other(hints)
        if Determinism.PLACEMENT_INVARIANT in levels:
            moved = relabelled(problem, inputs, self.copy.problem.replicate)
            problem, inputs = moved.problem, moved.inputs
            if problem.spec.candidate_kind is not CandidateKind.SEQUENCE:
                problem = shuffled(problem, inputs, self.copy.problem.replicate).problem
        self._runs[batch, levels] = self.launcher(problem, inputs, hints=hints), variant
        return self._runs[batch, levels]

    @cached_property
    def _alone(self) -> Observed:
        return self.launcher(self.copy.problem, self.copy.inputs)

    @cached_property
    def _busiest(self) -> Variant:
        problem = self.copy.problem
        entries = np.diff(problem.raw.indptr).reshape(problem.spec.num_tokens, -1).sum(axis=-1)
        busiest = problem.spec.token_request[int(entries.argmax())] // problem.branches
        return chosen(problem, self.copy.inputs, [busiest])


def _other(hints: Hints) -> Hints:
    """Other splits, another tile, another order of tasks, another route."""
    return replace(
        hints,
        num_splits=3 if hints.num_splits == 1 else 1,
        kv_tile=32 if hints.kv_tile != 32 else 64,
        schedule=Schedule.SHUFFLED if hints.schedule is not Schedule.SHUFFLED else Schedule.STATIC,
        route=Route.GATHER if hints.route is Route.DIRECT else Route.DIRECT,
    )


def broken(measurement: Measurement) -> Finding:
    """A promise that did not hold, in words."""
    level = Determinism(measurement.level)
    words = (
        f"{measurement.place}: {measurement.output} has {measurement.distinct} distinct results in "
        f"{measurement.launches} launches, up to {measurement.range_use:.2g} of its bound apart; the backend promises "
        f"{level}: the same bits {MEANS[level]}"
    )
    return Finding(Gate.DETERMINISM, measurement.place, words, use=measurement.range_use)
