"""`sacts run --rung`: the cells of a ladder, and how far each adapter came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from sacts.matrices.ladder import Rung, up_to
from sacts.reports.records import Record, Verdict

from .common import out, usage

LADDER = Path("ladder.cells")  # how the tier of a ladder is called
HELD = frozenset((Verdict.PASS, Verdict.FALLBACK))


def rungs_of(number: int) -> tuple[Rung, ...]:
    """The rungs up to a number, or a usage error."""
    try:
        return up_to(number)
    except ValueError as error:
        usage(error)


def first_missed(rungs: Sequence[Rung], records: Sequence[Record]) -> Rung | None:
    """The lowest rung that has a cell that was not judged, or not right."""
    held = {cell for cell, said in _verdicts(records).items() if said <= HELD}
    return next((rung for rung in rungs if any(cell.id not in held for cell in rung.cells)), None)


def told(adapter: str, rungs: Sequence[Rung], records: Sequence[Record]) -> str:
    """How far an adapter came, in a sentence. What it refuses it does not hold."""
    missed = first_missed(rungs, records)
    if missed is None:
        return f"{adapter} holds all {len(rungs)} rungs"
    said = _verdicts(records)
    if all(said.get(cell.id, set()) <= {*HELD, Verdict.REFUSED} for cell in missed.cells):
        return f"{adapter} stands below rung {missed.number}, {missed.name}: a cell of it is refused, so not judged"
    return f"{adapter} misses rung {missed.number}, {missed.name}: mend it first, the later ones build on it"


def _verdicts(records: Sequence[Record]) -> dict[str, set[Verdict]]:
    found: dict[str, set[Verdict]] = {}
    for record in records:
        found.setdefault(record.cell, set()).add(record.verdict)
    return found


def show(rungs: Sequence[Rung], records: Sequence[Record]) -> None:
    """Print of each adapter which rungs it holds, and what to mend first."""
    for adapter in dict.fromkeys(record.adapter for record in records):
        mine = [record for record in records if record.adapter == adapter]
        missed = first_missed(rungs, mine)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("rung", "adds", "verdicts"):
            table.add_column(column, overflow="fold")
        for rung in rungs:
            verdicts = [record.verdict for cell in rung.cells for record in mine if record.cell == cell.id]
            reached = missed is None or rung.number < missed.number
            table.add_row(
                Text(f"{rung.number} {rung.name}", "green" if reached else "yellow"),
                rung.adds,
                ", ".join(verdicts) or "not run",
            )
        out.print(table, Text(told(adapter, rungs, mine)))
