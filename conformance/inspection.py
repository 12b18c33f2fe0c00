"""What a backend says about a case beside its outputs: the lists that it makes, and its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sacts.reference.forward import Inputs
from sacts.reference.spec import Hints
from sacts.reports.records import Finding

from .adapter import Case, Normalized, Trace
from .build import Problem
from .contract import AdapterRaised, ContractBroken
from .conventions import spec_for
from .gates.index import judge_index
from .launch import Launcher
from .localise.traces import judge_trace, read_trace

Said = TypeVar("Said")


def normalized(launcher: Launcher, problem: Problem, inputs: Inputs) -> Finding | None:
    """The index gate, of a backend that has `normalize`. Raises AdapterRaised, ContractBroken."""
    case = launcher.case(problem, inputs)
    return judge_index(problem, _said("normalize", launcher.backend.normalize, case, Normalized))


def traced(launcher: Launcher, problem: Problem, inputs: Inputs, hints: Hints) -> Finding | None:
    """The first layer and tile that is wrong, of a backend that has `trace`. The problem has no branches. Raises
    AdapterRaised, ContractBroken.
    """
    case = launcher.case(problem, inputs, hints)
    trace = _said("trace", launcher.backend.trace, case, Trace)
    numerics = launcher.backend.numerics(problem.spec.dtype, hints)
    spec = spec_for(problem.spec, launcher.backend.capabilities)
    return judge_trace(spec, inputs, problem.table, problem.candidates, read_trace(spec, trace), numerics)


def _said(name: str, ask: Callable[[Case], Said], case: Case, kind: type[Said]) -> Said:
    try:
        said = ask(case)
    except Exception as error:  # whatever an adapter raises is its own verdict
        raise AdapterRaised(f"{name}(case)") from error
    if not isinstance(said, kind):
        raise ContractBroken(f"{name} must return {kind.__name__}, got {type(said).__name__}")
    return said
