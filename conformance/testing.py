"""One line for a vendor's own pytest: `run_conformance("my_kernel.py")`."""

from __future__ import annotations

import inspect
from types import ModuleType

from sacts.matrices import tiers
from sacts.reports.records import Record, Verdict, describe

from .worker import Limits, Worker


def adapter_name(adapter: str | type | ModuleType) -> str:
    """How a child process loads this adapter: a name stays, a class or module is found by its file."""
    if isinstance(adapter, str):
        return adapter
    path = inspect.getfile(adapter)
    return path if isinstance(adapter, ModuleType) else f"{path}:{adapter.__qualname__}"


def run_conformance(
    adapter: str | type | ModuleType,
    *,
    tier: str = "smoke",
    device: str = "cpu",
    contains: str = "",
    limits: Limits | None = None,
) -> list[Record]:
    """Judge every cell of a tier whose id contains `contains`; each runs isolated in a child process.

    Returns the records. Raises AssertionError, with one sentence and one reproducing line per cell, where a cell is not
    accepted; ValueError where the tier does not exist or no cell matches.
    """
    cells = [cell.id for cell in tiers.load(tiers.path_of(tier)) if contains in cell.id]
    if not cells:
        raise ValueError(f"no cell of {tier} contains {contains!r}")
    with Worker(adapter_name(adapter), device, limits) as worker:
        records = [worker.judge(cell) for cell in cells]
    bad = [f"{record.cell}\n  {describe(record)}" for record in records if not record.accepted]
    assert not bad, f"{len(bad)} of {len(records)} cells were not accepted:\n" + "\n".join(bad)
    assert any(record.verdict is not Verdict.REFUSED for record in records), (
        "every cell was refused: nothing was judged"
    )
    return records
