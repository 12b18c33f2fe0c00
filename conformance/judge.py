"""Judge one cell: build it, launch the backend on all its probes at once, run the gates, and say what came out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sacts.matrices.axes import Execution, Phase
from sacts.matrices.cell import Cell
from sacts.reports.records import PROVES, Finding, Gate, ProbeResult, Record, Sample, Verdict, blank

from . import conventions, inspection, sample
from .adapter import Refused, Support
from .batch import join
from .branches import renamed, told
from .build import Problem
from .contract import AdapterRaised, ContractBroken
from .determinism import outputs
from .diagnosis import GATE_OF, Batch, batches, diagnose, diagnose_bits, diagnose_drawn, use_of
from .gates import determinism, generic, intervals
from .gates.branches import judge_gated
from .gates.layout import changed
from .gates.witnesses import used
from .gradients import judge_gradients
from .launch import Launcher, Observed
from .probes.applicability import terms_of
from .probes.copies import Copy, copies
from .probes.inputs import RANDOM
from .status import forced, status_of

ALWAYS = ("random", "count")  # also of rows without an edge, which must be exactly empty
BEHIND = {
    Execution.REUSE: "behind a run on other lists, pages and data in the same memory",
    Execution.OVERWRITTEN: "behind other runs, with its contents overwritten behind it in stream order",
    Execution.SMALL_PLAN: "under a plan for shorter lists, or behind its refusal",
    Execution.SMALL_WORKSPACE: "in a workspace of one byte less, or behind its refusal",
    Execution.GRAPH: "as the replay of a graph that was recorded on other lists, pages and data",
    Execution.DOUBLE_BUFFER: "as the replay of one of two graphs while the buffer of the other is written",
}
EXACT = "exact"  # the sample of rows that gates A and count judge
NOT_OFFERED, NOT_REACHED, NOT_APPLICABLE = "not offered", "not reached", "not applicable"


@dataclass
class _Sheet:
    """What has been found so far; becomes a record."""

    record: Record
    gates: dict[str, str] = field(default_factory=dict)
    use: dict[str, float] = field(default_factory=dict)
    probes: dict[str, ProbeResult] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)
    branches: int = 1

    def reach(self, failed: Gate | None) -> None:
        """Set what each gate said: all before the one that failed passed. A failure blamed on the merge showed at
        another gate, and what lies before that is not told.
        """
        silent = {gate for gate in GATE_OF.values() if all(self._absent(p) for p, g in GATE_OF.items() if g is gate)}
        for gate in Gate:
            if gate is failed or (failed is Gate.MERGE and gate is not Gate.CONTRACT):
                break
            self.gates.setdefault(gate, NOT_APPLICABLE if gate in silent else "pass")
        if failed is not None:
            self.gates[failed] = "fail"

    def _absent(self, probe: str) -> bool:
        return probe in self.probes and self.probes[probe].said == NOT_APPLICABLE

    def close(self, verdict: Verdict, sentence: str = "", finding: Finding | None = None) -> Record:
        sentence, finding = renamed(sentence, self.branches), told(finding, self.branches)
        gates = {gate: self.gates.get(gate, NOT_REACHED) for gate in Gate}
        return _with(
            self.record,
            verdict=verdict,
            sentence=sentence,
            finding=finding,
            gates=gates,
            use=dict(self.use),
            probes=dict(self.probes),
            samples=dict(self.samples),
        )


def _with(record: Record, **changes: object) -> Record:
    return Record(**{name: getattr(record, name) for name in record.__struct_fields__} | changes)


def judge(launcher: Launcher, adapter: str, cell: Cell, replicate: int = 0) -> Record:
    """The record of one cell. Exceptions of the adapter become verdicts; anything else that escapes is the suite's
    fault.
    """
    sheet = _Sheet(blank(adapter, launcher.device, cell.id, replicate, Verdict.NOT_RUN))
    try:
        capabilities = launcher.backend.capabilities
        problem = conventions.problem_for(cell, replicate, capabilities)
        sheet.branches = problem.branches
        status = status_of(launcher, problem)
        lost = conventions.converted(problem, capabilities)
        sheet.record = _with(sheet.record, status=str(status.support), converted=lost)
        if not status.asked:
            return sheet.close(Verdict.REFUSED, status.support.reason)
        return _judge(forced(launcher, cell).executing(Execution(cell.exec)), problem, status.support, sheet)
    except ContractBroken as broken:
        sheet.gates[Gate.CONTRACT] = "fail"
        return sheet.close(Verdict.FAIL, broken.finding.sentence, broken.finding)
    except AdapterRaised as raised:
        return sheet.close(Verdict.ERROR, f"{raised} raised {_last_line(raised.__cause__)}")
    except Refused as refusal:
        sentence = f"run refused ({refusal}), but support declared {sheet.record.status}"
        return sheet.close(Verdict.FAIL, sentence, Finding(Gate.CONTRACT, "support", sentence))


def _judge(launcher: Launcher, problem: Problem, support: Support, sheet: _Sheet) -> Record:
    if support.status == "refused":
        return _judge_refusal(launcher, problem, support, sheet)
    if problem.forbidden:
        return _judge_forbidden(launcher, problem, sheet)
    if launcher.backend.normalizes:
        listed = inspection.normalized(launcher, problem, RANDOM.inputs(problem))
        if listed is not None:
            sheet.reach(listed.gate)
            return sheet.close(Verdict.FAIL, listed.sentence, listed)
    else:
        sheet.gates[Gate.INDEX] = NOT_OFFERED
    if problem.cell.phase == Phase.INDEX:
        sheet.gates |= {gate: "pass" if gate is Gate.INDEX else NOT_APPLICABLE for gate in Gate}
        return sheet.close(Verdict.PASS)
    eager = launcher.executing(Execution.EAGER)
    if launcher is eager:
        sheet.gates[Gate.REUSE] = NOT_APPLICABLE
    if not terms_of(problem.spec):
        sheet.gates[Gate.TERMS] = NOT_APPLICABLE
    sheet.gates[Gate.LOGITS] = NOT_APPLICABLE  # of a trace, which only a failure asks for
    made = copies(problem, launcher.backend.numerics(problem.spec.dtype, problem.hints, problem.branches))
    sheet.probes.update(_told(made))
    sheet.samples.update(_sampled(made[0]))
    finding = _executed(
        launcher, lambda each: _finding(each, made, sheet), lambda: _finding(eager, [*made, made[0]], sheet)
    )
    if finding is None or finding.gate is Gate.DETERMINISM:  # gradients are blamed before promises of bits
        merged = problem.hints.num_splits > 1 and support.status == "native"  # a fallback need not split at all
        if not merged and problem.branches == 1:
            sheet.gates[Gate.MERGE] = NOT_APPLICABLE
        finding = (
            _executed(
                launcher,
                lambda each: _of_gradients(each, problem, sheet),
                lambda: _of_gradients(eager, join([problem, problem]), sheet),
            )
            or finding
        )
    if finding is not None:
        sheet.reach(finding.gate)
        if finding.use is not None:
            sheet.use[finding.gate] = finding.use
        return sheet.close(Verdict.FAIL, finding.sentence, finding)
    sheet.reach(None)
    if sheet.gates[Gate.GRADIENTS] == Verdict.UNTRUSTED:
        return sheet.close(Verdict.UNTRUSTED, "no gradient of this case has a bound that would reject zeros")
    if not _could_have_failed(made, sheet.gates[Gate.LSE] != NOT_OFFERED):
        return sheet.close(Verdict.UNTRUSTED, "this case could not have failed: its bounds are wider than its faults")
    return sheet.close(Verdict.FALLBACK if support.status == "fallback" else Verdict.PASS)


def _judge_refusal(launcher: Launcher, problem: Problem, support: Support, sheet: _Sheet) -> Record:
    """Requirement: a backend that declares `refused` raises Refused; it neither computes nor fails otherwise."""
    try:
        launcher(problem, RANDOM.inputs(problem))
    except Refused:
        sheet.gates[Gate.CONTRACT] = "pass"
        return sheet.close(Verdict.REFUSED, support.reason)
    raise ContractBroken(f"support declared {support}, but run returned numbers", "support")


def _judge_forbidden(launcher: Launcher, problem: Problem, sheet: _Sheet) -> Record:
    """Requirement: where the spec forbids rows without an edge, a call with one is refused, and nothing is computed."""
    row = problem.forbidden[0]
    try:
        launcher(problem, RANDOM.inputs(problem.lenient))
    except Refused:
        sheet.gates |= {gate: "pass" if gate is Gate.CONTRACT else NOT_APPLICABLE for gate in Gate}
        return sheet.close(Verdict.PASS)
    raise ContractBroken(f"{row} has no edge, which the spec forbids, but run returned numbers", str(row))


def _executed(
    launcher: Launcher, find: Callable[[Launcher], Finding | None], alone: Callable[[], Finding | None]
) -> Finding | None:
    """What is wrong; what is right `alone`, without a run before, is blamed on the gate `reuse`. Alone has other
    shapes, so that what a backend remembers by shape does not come back.
    """
    if launcher.execution is Execution.EAGER:
        return find(launcher)
    try:
        finding = find(launcher)
    except ContractBroken as broken:
        finding = broken.finding
    if finding is None:
        return None
    by_itself = alone()
    if by_itself and (by_itself.gate is not Gate.DETERMINISM or finding.gate is Gate.DETERMINISM):
        return by_itself
    words = f"right by itself, wrong {BEHIND[launcher.execution]}: {finding.sentence}"
    return msgspec.structs.replace(finding, gate=Gate.REUSE, sentence=words)


def _finding(launcher: Launcher, made: Sequence[Copy], sheet: _Sheet) -> Finding | None:
    """Two launches of all copies, poisoned in complementary ways. Where both lie within their bounds and agree to the
    bit, nothing that must not matter did, and only promises of equal bits cost another launch. Every copy is seen
    before one is blamed.
    """
    groups = batches(made)
    try:
        first = [batch.launch_poisoned(launcher, 0) for batch in groups]
    except ContractBroken:
        launcher(made[0].problem, made[0].inputs)  # the same breach without company has a plainer place
        raise
    suspected = []
    for batch, seen in zip(groups, first, strict=True):
        suspects = {n for n, copy in enumerate(batch.copies) if use_of(copy, seen[n]) > 1}
        suspected.append((batch, suspects))
        if not suspects:
            _note(sheet, batch.copies, seen)
    suspected = [(batch, suspects) for batch, suspects in suspected if suspects]
    if suspected:
        return diagnose(launcher, suspected)
    second = [batch.launch_poisoned(launcher, 1) for batch in groups]
    return (
        _differing(launcher, groups, first, second, sheet)
        or _drawn(launcher, *_random(groups, first), sheet)
        or _gated(launcher, _random(groups, first)[0], sheet)
        or _promises(launcher, *_random(groups, first), sheet)
    )


def _random(groups: Sequence[Batch], seen: Sequence[Sequence[Observed]]) -> tuple[Copy, Observed]:
    """The copy whose inputs are drawn, and what came back for it."""
    pairs = [pair for batch, some in zip(groups, seen, strict=True) for pair in zip(batch.copies, some, strict=True)]
    return next((copy, each) for copy, each in pairs if "random" in copy.judged)


def _differing(
    launcher: Launcher,
    groups: Sequence[Batch],
    first: Sequence[Sequence[Observed]],
    second: Sequence[Sequence[Observed]],
    sheet: _Sheet,
) -> Finding | None:
    """Bits that two launches with other poison do not share, and how far apart they lie. The second is held to the
    bounds as the first was: bits of a backend that varies by itself say nothing about the poison.
    """
    differing, seen, outside = [], [], []
    for batch, one, other in zip(groups, first, second, strict=True):
        places = {n for n in range(len(batch.copies)) if changed(one[n], other[n])}
        seen += [(batch.copies[n], one[n], other[n]) for n in sorted(places)]
        differing += [(batch, places)] if places else []
        suspects = {n for n in places if use_of(batch.copies[n], other[n]) > 1}
        outside += [(batch, suspects)] if suspects else []
    if outside:
        return diagnose(launcher, outside)
    for copy, *pair in seen:
        apart = max(each.range_use for each in determinism.repeats(launcher, copy, pair))
        sheet.use[Gate.DETERMINISM] = max(sheet.use.get(Gate.DETERMINISM, 0.0), apart)
    return diagnose_bits(launcher, differing, seen) if differing else None


def _drawn(launcher: Launcher, copy: Copy, observed: Observed, sheet: _Sheet) -> Finding | None:
    """Gates B, C and D of the copy whose inputs are drawn, where gate A has passed."""
    problem = copy.problem
    numerics = launcher.backend.numerics(problem.spec.dtype, problem.hints, problem.branches)
    bounds = generic.bounds(problem, copy.inputs, numerics, copy.rows)
    said = bounds.judge(observed) if bounds else {}
    sheet.gates.update((gate, NOT_APPLICABLE) for gate in generic.GATES if gate not in said)
    if bounds is None or not said:
        return None
    sheet.samples.update(bounds.samples)
    sheet.use.update((gate, each.use) for gate, each in said.items())
    finding = next((each.finding for each in said.values() if each.finding), None)
    return diagnose_drawn(launcher, copy, bounds, finding) if finding else None


def _gated(launcher: Launcher, copy: Copy, sheet: _Sheet) -> Finding | None:
    """Gate merge, of branches."""
    if copy.problem.branches == 1:
        return None
    judged = judge_gated(launcher, copy.problem, copy.inputs, copy.rows)
    sheet.use[Gate.MERGE] = max(sheet.use.get(Gate.MERGE, 0.0), judged.use)
    return judged.finding


def _promises(launcher: Launcher, copy: Copy, observed: Observed, sheet: _Sheet) -> Finding | None:
    """Gate determinism, where the backend promises anything that a cell can hold it to."""
    if not any(determinism.promised(launcher, name) for name in outputs(observed)):
        sheet.gates[Gate.DETERMINISM] = NOT_APPLICABLE
        return None
    sheet.use.setdefault(Gate.DETERMINISM, 0.0)
    return determinism.Bits(launcher, copy, observed).finding()


def _of_gradients(launcher: Launcher, problem: Problem, sheet: _Sheet) -> Finding | None:
    """The layer behind all others: what backward says, where the backend has one."""
    try:
        found = judge_gradients(launcher, problem)
    except Refused as refusal:
        words = f"backward refused ({refusal}), but support declared {sheet.record.status}"
        raise ContractBroken(words, "support") from refusal
    sheet.gates[Gate.GRADIENTS] = found.said
    sheet.probes.update(found.probes)
    if found.use is not None:
        sheet.use[Gate.GRADIENTS] = found.use
    return found.finding


def _note(sheet: _Sheet, made: Sequence[Copy], observed: Sequence[Observed]) -> None:
    """The largest observed / allowed by gate and by probe."""
    for copy, seen in zip(made, observed, strict=True):
        if seen.lse is None:
            sheet.gates[Gate.LSE] = NOT_OFFERED
        lse = intervals.largest(intervals.lse_use(copy.expected, seen))
        sheet.use[Gate.LSE] = max(sheet.use.get(Gate.LSE, 0.0), lse)
        for probe in copy.judged:
            use, gate = used(copy, seen, probe), GATE_OF[probe]
            sheet.use[gate] = max(sheet.use.get(gate, 0.0), use)
            told = sheet.probes[probe]
            sheet.probes[probe] = ProbeResult(told.said, told.rows, max(told.use, use))


def _told(made: Sequence[Copy]) -> dict[str, ProbeResult]:
    """Of each probe whether it is carried, and whether it could fail in its rows."""
    told = {}
    for probe in PROVES:
        margins = [copy.margin[probe] for copy in made if probe in copy.margin]
        margin = np.concatenate(margins) if margins else np.zeros(0)
        weak = int((margin <= 1).sum())
        idle = not len(margin) and probe not in ALWAYS
        said = NOT_APPLICABLE if idle else "untrusted" if weak else "judged"
        told[probe] = ProbeResult(said, f"{weak} of {len(margin)}" if weak else "")
    return told


def _sampled(random: Copy) -> dict[str, Sample]:
    """The rows that are judged exactly, where not all are; the others are held to invariants."""
    if random.rows is None:
        return {}
    return {EXACT: sample.told(random.rows, int(np.count_nonzero(sample.row_lengths(random.problem))))}


def _could_have_failed(made: Sequence[Copy], has_lse: bool) -> bool:
    """Whether zeros would be rejected in some row, and the loss of any one candidate would show in each: in out, or in
    lse where the backend has one.
    """
    random = next(copy.margin["random"] for copy in made if "random" in copy.margin)
    count = next(copy for copy in made if "count" in copy.margin)
    loss = count.margin["count"]
    if has_lse and count.lse_margin is not None:
        loss = np.maximum(loss, count.lse_margin)
    return (not len(random) or bool((random > 1).any())) and bool((loss > 1).all())


def _last_line(error: BaseException | None) -> str:
    """An exception in one line, with the innermost place."""
    if error is None:
        return "nothing"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}"
