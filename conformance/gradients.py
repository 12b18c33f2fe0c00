"""The layer of gradients: one launch of backward on the random copy and all witnesses; where one leaves its bounds, the
first bad element and the edge that made it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sacts.reference.gradient_bounds import FedErrors
from sacts.reference.spec import Epilogue
from sacts.reports.records import Finding, Gate, ProbeResult

from .backward_launch import Call, ObservedGradients, launch_backward
from .batch import join, join_inputs, live_pages
from .build import Problem
from .contract import WHOLE, ContractBroken
from .gates.gradients import unbounded, uses
from .gates.layout import poison, poisoned, surroundings
from .launch import Launcher
from .localise.gradient_names import element_name
from .localise.gradients import locate_gradient
from .messages import BUDGET
from .probes.gradients import PROBES, GradientCopy, copies

SEPARATE = "span"  # caches of such strides are so large that each copy is launched by itself
ALWAYS = ("gradients",)  # also of rows without an edge, whose gradients must be exactly 0
PASS, FAIL, NOT_OFFERED, UNTRUSTED, NOT_APPLICABLE = "pass", "fail", "not offered", "untrusted", "not applicable"


@dataclass(frozen=True)
class GradientVerdict:
    """What the layer said: `pass`, `fail`, `not offered` or `untrusted` (no element has a bound that rejects zeros);
    the finding of a failure; the largest observed / allowed; what each probe did; launches spent on naming the edge.
    """

    said: str
    finding: Finding | None = None
    use: float | None = None
    probes: dict[str, ProbeResult] = field(default_factory=dict)
    launches: int = 0


def judge_gradients(launcher: Launcher, problem: Problem, *, budget: int = BUDGET) -> GradientVerdict:
    """Requirement: every element of d_q, d_k, d_v and d_sink lies in its interval, whatever stands where no row
    attends; slots that no row attends have gradient exactly 0. An epilogue is no part of backward: the spec of the
    call has none. Raises what a launch raises.
    """
    if not launcher.backend.has_backward:
        return GradientVerdict(NOT_OFFERED)
    if problem.branches > 1:
        return GradientVerdict(NOT_APPLICABLE)
    problem = replace(problem, spec=replace(problem.spec, epilogue=Epilogue()))  # backward starts before it
    made = copies(problem, launcher.backend)
    seen = _launched(launcher, made)
    use = [uses(copy.bounds, each) for copy, each in zip(made, seen, strict=True)]
    largest = max(float(each.max(initial=0.0)) for of in use for each in of.values())
    probes = {name: _told(name, made, use) for name in PROBES}
    suspects = [copy for copy, of in zip(made, use, strict=True) if any((each > 1).any() for each in of.values())]
    if suspects:
        finding, launches = _diagnosed(launcher, suspects, made, budget)
        return GradientVerdict(FAIL, finding, finding.use, probes, launches)
    weak = len(made[0].margin["gradients"]) and not (made[0].margin["gradients"] > 1).any()
    return GradientVerdict(UNTRUSTED if weak else PASS, None, largest, probes)


def _told(probe: str, made: Sequence[GradientCopy], use: Sequence[dict[str, np.ndarray]]) -> ProbeResult:
    """Whether a probe is carried, and whether it could fail in its edges; of the random one, what has no bound."""
    for copy, of in zip(made, use, strict=True):
        if probe not in copy.judged or not (len(copy.margin[probe]) or probe in ALWAYS):
            continue
        largest = max(float(of[name].max(initial=0.0)) for name in copy.judged[probe] if name in of)
        if probe == "gradients":
            without, total = unbounded(copy.bounds)
            idle = len(copy.margin[probe]) and not (copy.margin[probe] > 1).any()
            rows = f"{without} of {total} elements have no bound" if without else ""
            return ProbeResult(UNTRUSTED if idle or without else "judged", rows, largest)
        weak, total = int((copy.margin[probe] <= 1).sum()), len(copy.margin[probe])
        return ProbeResult(UNTRUSTED if weak else "judged", f"{weak} of {total}" if weak else "", largest)
    return ProbeResult(NOT_APPLICABLE)


def _launched(launcher: Launcher, made: Sequence[GradientCopy]) -> list[ObservedGradients]:
    """All copies, poisoned wherever nothing may matter, in one launch where the caches allow it."""
    if made[0].problem.cell.cache == SEPARATE:
        return [_poisoned(launcher, copy.problem, [copy])[0] for copy in made]
    try:
        return _poisoned(launcher, join([copy.problem for copy in made]), made)
    except ContractBroken:
        launch_backward(launcher, made[0].problem, made[0].inputs, made[0].call)  # its place is plainer
        raise


def _poisoned(launcher: Launcher, whole: Problem, made: Sequence[GradientCopy]) -> list[ObservedGradients]:
    inputs = join_inputs(whole, [(copy.problem, copy.inputs) for copy in made])
    values = poisoned(inputs, poison(whole, 0), whole.spec.dtype)
    found = launch_backward(launcher, whole, values, _joined(made), surroundings=surroundings(whole, 0))
    ends = np.cumsum([copy.problem.spec.num_tokens for copy in made]).tolist()
    pages = live_pages(whole, [copy.problem for copy in made])
    return [
        replace(found, d_q=found.d_q[end - copy.problem.spec.num_tokens : end], d_k=found.d_k[at], d_v=found.d_v[at])
        for copy, end, at in zip(made, ends, pages, strict=True)
    ]


def _joined(made: Sequence[GradientCopy]) -> Call:
    """The calls of all copies as one. A spec with sinks has one copy only: d_sink would be the sum over all."""
    parts = [copy.call for copy in made]
    d_out, d_lse, out, lse = (np.concatenate([getattr(p, n) for p in parts]) for n in ("d_out", "d_lse", "out", "lse"))
    errors = FedErrors(*(np.concatenate(each) for each in zip(*(p.errors for p in parts), strict=True)))
    return Call(d_out, d_lse, out, lse, errors)


def _diagnosed(
    launcher: Launcher, suspects: Sequence[GradientCopy], made: Sequence[GradientCopy], budget: int
) -> tuple[Finding, int]:
    """Each suspect alone: clean, then poisoned; what fails in neither fails in company only. And how many launches were
    spent on the edge.
    """
    for copy in suspects:
        alone = launch_backward(launcher, copy.problem, copy.inputs, copy.call)
        if located := locate_gradient(launcher, copy, alone, budget=budget):
            return located.finding, located.launches
    for copy in suspects:
        if finding := _worst(copy, _poisoned(launcher, copy.problem, [copy])[0]):
            words = f"{finding.sentence}, only where poison stands in slots that no row attends"
            return Finding(Gate.GRADIENTS, finding.place, words, use=finding.use), 0
    words = (
        f"gradients leave their bounds only in the company of {sum(c.problem.spec.num_requests for c in made)} requests"
    )
    return Finding(Gate.GRADIENTS, WHOLE, words), 0


def _worst(copy: GradientCopy, observed: ObservedGradients) -> Finding | None:
    """The worst element of the first output outside its bounds."""
    for name, use in uses(copy.bounds, observed).items():
        if (use > 1).any():
            at = tuple(int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
            of, seen = copy.bounds.allowed[name], float(getattr(observed, name)[at])
            place = f"{name} ({element_name(copy, name, at)})"
            words = f"{place} is {seen:.6g}, allowed {of.low[at]:.6g} to {of.high[at]:.6g}"
            return Finding(Gate.GRADIENTS, place, words, use=float(use[at]))
    return None
