"""`sacts adapter check`: the contract on three tiny cells, and which wrongly declared convention would explain a
failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacts.reference.spec import DType
from sacts.reports.records import Record, Verdict

from .conventions import alternatives
from .messages import OPTIONAL_MEMBERS
from .worker import Worker

CELLS = (
    "prefill/{dtype}/kv:20+0+9/q:3+1+2/block:16/pattern:all/causal:bottom_right",
    "decode/{dtype}/kv:37/pattern:duplicates",
    "decode/{dtype}/kv:40/cache:strided/splits:2/tile:16",
)
UNLOCKS = {
    "capabilities": "conventions (lse base, layouts, padding ...) that the suite converts to, and your numerics",
    "support": "honest refusals and fallbacks: cells that you do not serve are counted apart instead of failing",
    "workspace_bytes": "a guarded workspace, poisoned between launches",
    "plan": "work done once before `run`, handed to it",
    "normalize": "the gate index: the lists that you make, item by item, before anything is launched",
    "trace": "after a failure, the first logit or tile state that is wrong, named exactly",
    "backward": "gradients, judged element by element, located and measured",
}


@dataclass(frozen=True)
class Check:
    """What the contract cells said. `observed`: (convention, declared, observed) where another declaration makes them
    pass.
    """

    records: tuple[Record, ...]
    conventions: dict[str, str]
    members: tuple[str, ...]
    observed: tuple[str, str, str] | None
    error: str = ""

    @property
    def accepted(self) -> bool:
        """Whether all contract cells were accepted."""
        return not self.error and all(record.accepted for record in self.records)

    @property
    def missing(self) -> tuple[str, ...]:
        """Optional members that the adapter lacks."""
        return tuple(name for name in OPTIONAL_MEMBERS if name not in self.members)


def check(worker: Worker) -> Check:
    """Judge the contract cells in the first dtype that the adapter serves; on a failure try every other declaration."""
    told = worker.describe()
    if told.error:
        return Check((), {}, (), None, told.error)
    records: tuple[Record, ...] = ()
    for dtype in (DType.BF16, DType.FP16, DType.FP32):
        records = _judge(worker, [cell.format(dtype=dtype) for cell in CELLS])
        if any(record.verdict is not Verdict.REFUSED for record in records):
            break
    observed = None
    if not all(record.accepted for record in records):
        observed = _explain(worker, [record.cell for record in records], told.conventions)
    return Check(records, told.conventions, tuple(told.members), observed)


def _judge(worker: Worker, cells: Sequence[str], declare: dict[str, str] | None = None) -> tuple[Record, ...]:
    return tuple(worker.judge(cell, declare=declare) for cell in cells)


def _explain(worker: Worker, cells: Sequence[str], declared: dict[str, str]) -> tuple[str, str, str] | None:
    """The first other declaration under which every contract cell is accepted."""
    for field, value in alternatives(declared):
        if all(worker.judge(cell, declare={field: value}).accepted for cell in cells):
            return field, declared[field], value
    return None
