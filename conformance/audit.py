"""Audit: do the gates work? Every seeded fault runs through the tier like any backend; its kill, its gate and its
place are compared with the catalogue.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rich.console import Console

from sacts.reports.records import Record, Verdict

from .session import Selection, judge_all


class SeededFault(Protocol):
    """What the audit reads of a catalogue entry."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def adapter(self) -> str:
        """How it is loaded."""

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates that may be named."""

    @property
    def place(self) -> str:
        """A pattern that one sentence must match."""

    @property
    def verdict(self) -> str:
        """`fail`, or `crash` where the process may end."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells that it is audited on; empty: a tier."""


@dataclass(frozen=True)
class Outcome:
    """What the tier said about one fault. `shown`: the record that names the place, else the first failure."""

    fault: SeededFault
    cells: int
    kills: int
    misnamed: tuple[Record, ...]
    shown: Record | None
    placed: bool

    @property
    def caught(self) -> bool:
        """Killed, by gates that the catalogue names only, and its place named."""
        return bool(self.kills) and self.placed and not self.misnamed


def judged(faults: Sequence[SeededFault], selection: Selection, console: Console) -> list[Record]:
    """Judge each faulty backend on the cells of `selection`, or on those that the fault names, whatever it selects.
    Raises SelectionError.
    """
    plain = [fault.adapter for fault in faults if not fault.cells]
    records = judge_all(replace(selection, adapters=plain), console) if plain else []
    return records + _on_own_cells([fault for fault in faults if fault.cells], selection, console)


def _on_own_cells(faults: Sequence[SeededFault], selection: Selection, console: Console) -> list[Record]:
    """In one session, since each starts processes: what its expression selects beside what is wanted, as a name that
    holds another, is left out.
    """
    if not faults:
        return []
    wanted = {(fault.adapter, cell) for fault in faults for cell in fault.cells}
    expression = " or ".join(f"({fault.adapter} and ({' or '.join(fault.cells)}))" for fault in faults)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.cells"
        path.write_text("\n".join(dict.fromkeys(cell for _, cell in sorted(wanted))) + "\n", encoding="utf-8")
        adapters = list(dict.fromkeys(fault.adapter for fault in faults))
        chosen = replace(selection, path=path, adapters=adapters, expression=expression)
        return [record for record in judge_all(chosen, console) if (record.adapter, record.cell) in wanted]


def audit(faults: Iterable[SeededFault], records: Sequence[Record]) -> list[Outcome]:
    """Compare the records of faulty backends with their catalogue entries."""
    return [_outcome(fault, [r for r in records if r.adapter == fault.adapter]) for fault in faults]


def _outcome(fault: SeededFault, records: Sequence[Record]) -> Outcome:
    failed = [r for r in records if not r.accepted]
    named = [r for r in failed if _as_catalogued(fault, r)]
    placed = [r for r in named if re.search(fault.place, r.sentence)]
    return Outcome(
        fault=fault,
        cells=len(records),
        kills=len(named),
        misnamed=tuple(r for r in failed if r not in named),
        shown=next(iter(placed or failed), None),
        placed=bool(placed),
    )


def _as_catalogued(fault: SeededFault, record: Record) -> bool:
    if record.verdict is Verdict.CRASH:
        return fault.verdict == "crash"
    return record.verdict is Verdict.FAIL and record.finding is not None and record.finding.gate in fault.gates
