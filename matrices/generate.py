"""Tiers made by covertable: rows of levels that cover every feasible combination of t axes. Run by hand, its result is
checked in; `coverage` counts it without this module.
"""

from __future__ import annotations

import inspect
from hashlib import blake2b
from pathlib import Path

from . import axes, cell, constraints, levels
from .cell import Cell
from .coverage import completed, coverage
from .levels import LEVELS, TABLES, Table, cell_of


def rows(strength: int) -> list[Cell]:
    """Cells that cover all feasible combinations of so many levels; the same on every machine."""
    import covertable  # of the development extra: only who makes tiers needs it

    made = covertable.make(dict(LEVELS), strength=strength, constraints=[_condition(table) for table in TABLES])
    cells = list(dict.fromkeys(cell_of({axis: row[axis] for axis in LEVELS}) for row in made))
    for missing in coverage(cells, strength).missing:
        row = completed(dict(missing))
        assert row is not None
        cells.append(cell_of(row))
    return list(dict.fromkeys(cells))


def inputs_digest() -> str:
    """A hash of all that a tier is made from: a test compares it with what the tier's file says."""
    text = "".join(inspect.getsource(module) for module in (axes, cell, constraints, levels))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def file_text(strength: int, cells: list[Cell]) -> str:
    """A tier file."""
    what = {2: "pairs", 3: "triples"}.get(strength, f"combinations of {strength}")
    return "\n".join(
        [
            f"# All feasible {what} of levels (matrices/levels.py): sacts matrix generate --strength {strength}",
            f"# inputs: {inputs_digest()}",
            *(each.id for each in cells),
            "",
        ]
    )


def digest_of(path: Path) -> str:
    """The hash in a tier's file, empty where it was not made."""
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# inputs: ")]
    return found[0].removeprefix("# inputs: ") if found else ""


def _condition(table: Table) -> dict[str, object]:
    def holds(row: object) -> bool:
        levels = row if isinstance(row, dict) else vars(row)
        return table.permits({axis: levels[axis] for axis in table.axes})

    return {"operator": "fn", "requires": list(table.axes), "evaluate": holds}
