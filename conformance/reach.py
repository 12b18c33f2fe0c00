"""What a run really covered: of the feasible pairs of levels, those of cells that a backend was judged on natively."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sacts.matrices.cell import Cell, CellError, parse
from sacts.matrices.coverage import covered, feasible
from sacts.matrices.levels import LEVELS, levels_of
from sacts.reports.records import Reach, Record, Verdict

STRENGTH = 2
JUDGED = frozenset({Verdict.PASS, Verdict.FAIL})


def reaches(records: Sequence[Record]) -> list[Reach]:
    """One for each adapter and device, sorted. A cell that was refused, served by a fallback, untrusted or lost counts
    for nothing.
    """
    possible = feasible(STRENGTH)
    found = []
    for adapter, device in sorted({(r.adapter, r.device) for r in records}):
        mine = list(natively_judged([r for r in records if (r.adapter, r.device) == (adapter, device)]))
        here = covered(mine, STRENGTH)
        met = _met(mine)
        never = {axis: [level for level in levels if level not in met[axis]] for axis, levels in LEVELS.items()}
        never = {axis: levels for axis, levels in never.items() if levels}
        found.append(Reach(adapter, device, STRENGTH, len(here & possible), len(possible), never))
    return found


def _met(cells: Sequence[Cell]) -> dict[str, set[str]]:
    """Levels by axis, each for itself, also beside values that are no levels. An empty pattern hides all of a cell."""
    met: dict[str, set[str]] = {axis: set() for axis in LEVELS}
    for found in map(levels_of, cells):
        for axis, levels in found.items() if found["pattern"] else ():
            met[axis].update(levels)
    return met


def natively_judged(records: Sequence[Record]) -> Iterator[Cell]:
    """The cells of records that count."""
    for record in records:
        if record.status == "native" and record.verdict in JUDGED:
            try:
                yield parse(record.cell)
            except CellError:  # of a record that another version wrote
                continue
