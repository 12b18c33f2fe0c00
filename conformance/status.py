"""How a backend serves a cell: native, fallback(reason) or refused(reason). What it has no member for is refused in its
name; of everything else it is asked.
"""

from __future__ import annotations

from typing import NamedTuple

from sacts.matrices.axes import Execution, Phase
from sacts.matrices.cell import Cell
from sacts.reference.spec import FallbackReason

from .adapter import NATIVE, Backend, Support, refused
from .build import Problem
from .contract import AdapterRaised
from .launch import Launcher
from .probes.inputs import RANDOM


class Status(NamedTuple):
    """`asked`: whether the backend said so itself, and must keep to it."""

    support: Support
    asked: bool


def status_of(launcher: Launcher, problem: Problem) -> Status:
    """The status of a cell; the backend has been converted to its problem. Raises AdapterRaised."""
    for missing in (
        _phase(launcher.backend, problem.cell),
        _execution(launcher, problem.cell),
        _fallback(launcher.backend, problem.cell),
    ):
        if missing != NATIVE:
            return Status(missing, asked=False)
    launcher = forced(launcher, problem.cell)
    said = launcher.support(problem.spec, problem.branches)
    if (
        said.status != "refused"
        and problem.cell.exec == Execution.SMALL_WORKSPACE
        and not _workspace(launcher, problem)
    ):
        return Status(refused("small_workspace: the backend asks for none"), asked=False)
    return Status(said, asked=True)


def forced(launcher: Launcher, cell: Cell) -> Launcher:
    """The launcher of a cell: the backend is told to leave its sparse path where the cell says why."""
    return launcher if cell.fallback == "none" else launcher.forced(FallbackReason(cell.fallback))


def _fallback(backend: Backend, cell: Cell) -> Support:
    if cell.fallback != "none" and not backend.falls_back:
        return refused("fallback: the backend cannot be told to leave its sparse path")
    return NATIVE


def _phase(backend: Backend, cell: Cell) -> Support:
    if cell.phase == Phase.TRAIN and not backend.has_backward:
        return refused("train: the backend has no backward")
    if cell.phase == Phase.INDEX and not backend.normalizes:
        return refused("index: the backend has no normalize")
    return NATIVE


def _execution(launcher: Launcher, cell: Cell) -> Support:
    backend = launcher.backend
    if cell.exec == Execution.SMALL_PLAN and not backend.plans:
        return refused("small_plan: the backend does not plan")
    if cell.exec not in (Execution.GRAPH, Execution.DOUBLE_BUFFER):
        return NATIVE
    if not backend.capabilities.graph:
        return refused("graph: the backend does not declare it")
    if not launcher.device.startswith("cuda"):
        return refused("graph: needs a CUDA device")
    if backend.plans and backend.capabilities.plan_keeps is None:
        return refused("graph: plan_keeps does not say what a plan keeps")
    return NATIVE


def _workspace(launcher: Launcher, problem: Problem) -> int:
    """Bytes that the backend asks for. Raises AdapterRaised."""
    case = launcher.case(problem, RANDOM.inputs(problem))
    try:
        return launcher.backend.workspace_bytes(case)
    except Exception as error:  # whatever an adapter raises is its own verdict
        raise AdapterRaised("workspace_bytes(case)") from error
