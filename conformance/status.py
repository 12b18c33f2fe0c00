"""How a backend serves a cell: native, fallback(reason) or refused(reason). What it has no member for is refused in its
name; of everything else it is asked.
"""

from __future__ import annotations

from typing import NamedTuple

from sacts.matrices.axes import Execution, Phase
from sacts.matrices.cell import Cell
from sacts.reference.spec import AttentionSpec

from .adapter import NATIVE, Backend, Support, refused
from .launch import Launcher


class Status(NamedTuple):
    """`asked`: whether the backend said so itself, and must keep to it."""

    support: Support
    asked: bool


def status_of(launcher: Launcher, cell: Cell, spec: AttentionSpec) -> Status:
    """The status of a cell, whose spec the backend has been converted to. Raises AdapterRaised."""
    for missing in (_phase(launcher.backend, cell), _execution(launcher.backend, launcher.device, cell)):
        if missing != NATIVE:
            return Status(missing, asked=False)
    return Status(launcher.support(spec), asked=True)


def _phase(backend: Backend, cell: Cell) -> Support:
    if cell.phase == Phase.TRAIN and not backend.has_backward:
        return refused("train: the backend has no backward")
    if cell.phase == Phase.INDEX and not backend.normalizes:
        return refused("index: the backend has no normalize")
    return NATIVE


def _execution(backend: Backend, device: str, cell: Cell) -> Support:
    if cell.exec != Execution.GRAPH:
        return NATIVE
    if not backend.capabilities.graph:
        return refused("graph: the backend does not declare it")
    if not device.startswith("cuda"):
        return refused("graph: needs a CUDA device")
    if backend.plans and backend.capabilities.plan_keeps is None:
        return refused("graph: plan_keeps does not say what a plan keeps")
    return NATIVE
