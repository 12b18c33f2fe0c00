"""Judge one cell: build it, launch the backend on each probe, run the gates in the order of blame, and say what came
out.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version

from sacts.matrices.cell import Cell
from sacts.reference.bounds import Expected, expected
from sacts.reference.forward import Inputs
from sacts.reference.spec import Hints
from sacts.reports.records import Finding, Gate, Record, Verdict

from . import conventions
from .adapter import Refused, Scale, Support
from .build import Problem, build
from .gates import intervals
from .gates.count import judge_count, sensitive
from .gates.layout import judge_layout
from .launch import AdapterRaised, ContractBroken, Launcher, Observed
from .probes.inputs import COUNT, RANDOM, Probe

NOT_OFFERED, NOT_REACHED, NOT_APPLICABLE = "not offered", "not reached", "not applicable"


@dataclass(frozen=True)
class Stage:
    """One probe launched on one problem, with what it must give."""

    problem: Problem
    inputs: Inputs
    expected: Expected
    observed: Observed
    hints: Hints


@dataclass
class _Sheet:
    """What has been found so far; becomes a record."""

    record: Record
    gates: dict[str, str]
    use: dict[str, float]

    def close(self, verdict: Verdict, sentence: str = "", finding: Finding | None = None) -> Record:
        gates = {gate: self.gates.get(gate, NOT_REACHED) for gate in Gate}
        return _with(self.record, verdict=verdict, sentence=sentence, finding=finding, gates=gates, use=dict(self.use))


def _with(record: Record, **changes: object) -> Record:
    return Record(**{name: getattr(record, name) for name in record.__struct_fields__} | changes)


def blank(adapter: str, device: str, cell_id: str, replicate: int, verdict: Verdict, sentence: str = "") -> Record:
    """A record of a cell about which nothing but the verdict is known."""
    return Record(
        suite=version("sacts"),
        adapter=adapter,
        device=device,
        cell=cell_id,
        replicate=replicate,
        verdict=verdict,
        sentence=sentence,
    )


def judge(launcher: Launcher, adapter: str, cell: Cell, replicate: int = 0) -> Record:
    """The record of one cell. Exceptions of the adapter become verdicts; anything else that escapes is the suite's
    fault.
    """
    sheet = _Sheet(blank(adapter, launcher.device, cell.id, replicate, Verdict.NOT_RUN), {}, {})
    try:
        capabilities = launcher.backend.capabilities
        own_scale = capabilities.scale is Scale.DEFAULT
        problem = build(cell, replicate, default_scale=own_scale, causal_rule=capabilities.causal)
        support = launcher.support(problem.spec)
        lost = conventions.converted(problem, capabilities)
        sheet.record = _with(sheet.record, status=str(support), converted=lost)
        return _judge(launcher, problem, support, sheet)
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
    count = _stage(launcher, problem, COUNT)
    random = _stage(launcher, problem, RANDOM)
    sheet.gates[Gate.CONTRACT] = "pass"
    for gate, finding in _findings(launcher, count, random, sheet):
        if finding is not None:
            finding = _blame_merge(launcher, count, random, finding)
            sheet.gates[finding.gate] = "fail"
            return sheet.close(Verdict.FAIL, finding.sentence, finding)
        sheet.gates.setdefault(gate, "pass")
    split = problem.hints.num_splits > 1 and support.status == "native"  # a fallback need not split at all
    sheet.gates[Gate.MERGE] = "pass" if split else NOT_APPLICABLE
    if not (intervals.could_have_failed(random.expected) and sensitive(count.expected)):
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


def _stage(launcher: Launcher, problem: Problem, probe: Probe) -> Stage:
    inputs = probe.inputs(problem)
    numerics = launcher.backend.capabilities.numerics_of(problem.spec.dtype)
    numerics = replace(numerics, splits=numerics.splits or problem.hints.num_splits > 1)
    right = expected(problem.spec, inputs, problem.table, problem.candidates, numerics, probe.exactness(problem))
    return Stage(problem, inputs, right, launcher(problem, inputs), problem.hints)


def _findings(launcher: Launcher, count: Stage, random: Stage, sheet: _Sheet) -> Iterator[tuple[Gate, Finding | None]]:
    """Each gate's finding, lazily, in the order of blame."""
    spec = random.problem.spec
    sheet.use["count"] = intervals.largest(intervals.out_use(count.expected, count.observed, spec.dtype))
    yield Gate.COUNT, _count(launcher, count)
    yield Gate.LAYOUT, judge_layout(launcher, random.problem, random.inputs, random.observed)
    for stage in (count, random):
        use = intervals.largest(intervals.lse_use(stage.expected, stage.observed))
        sheet.use["lse"] = max(sheet.use.get("lse", 0.0), use)
        if stage.observed.lse is None:
            sheet.gates[Gate.LSE] = NOT_OFFERED
        yield Gate.LSE, intervals.judge_lse(spec, stage.expected, stage.observed)
    sheet.use["out"] = intervals.largest(intervals.out_use(random.expected, random.observed, spec.dtype))
    yield Gate.OUT, intervals.judge_out(spec, random.expected, random.observed)


def _count(launcher: Launcher, stage: Stage) -> Finding | None:
    return judge_count(launcher, stage.problem, stage.inputs, stage.expected, stage.observed, stage.hints)


def _blame_merge(launcher: Launcher, count: Stage, random: Stage, finding: Finding) -> Finding:
    """Requirement: splits merge un-normalised states. What fails with several splits and not with one is the merge's
    fault.
    """
    hints = random.hints
    if hints.num_splits == 1 or finding.gate is Gate.LAYOUT:
        return finding
    single = replace(hints, num_splits=1)
    for stage in (count, random):
        observed = launcher(stage.problem, stage.inputs, hints=single)
        out_use = intervals.out_use(stage.expected, observed, stage.problem.spec.dtype)
        if max(intervals.largest(out_use), intervals.largest(intervals.lse_use(stage.expected, observed))) > 1:
            return finding
    sentence = f"right with 1 split, wrong with {hints.num_splits}: {finding.sentence}"
    return Finding(Gate.MERGE, finding.place, sentence, use=finding.use)


def _last_line(error: BaseException | None) -> str:
    """An exception in one line, with the innermost place."""
    if error is None:
        return "nothing"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}"
