"""What a tier covers: of all combinations of levels of t axes that some cell can have, those that a cell of it has.

Counted exactly, apart from whatever makes a tier: a combination is feasible where a search finds a full row of
levels around it that breaks no constraint; first defaults are tried, then everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain, combinations, product, starmap
from typing import NamedTuple

from .cell import Cell
from .levels import LEVELS, TABLES, Row, Table, levels_of

Tuple = tuple[tuple[str, str], ...]  # (axis, level) of t axes, in the order of the axes

_OF_AXIS: dict[str, tuple[Table, ...]] = {
    axis: tuple(table for table in TABLES if axis in table.axes) for axis in LEVELS
}
_TIED = tuple(axis for axis in LEVELS if _OF_AXIS[axis])
_PAIRS = tuple(tuple((axis, level) for level in levels) for axis, levels in LEVELS.items())  # shared by all tuples


class Coverage(NamedTuple):
    """Of one strength: the feasible tuples, and those of them that are covered."""

    strength: int
    feasible: frozenset[Tuple]
    covered: frozenset[Tuple]

    @property
    def missing(self) -> list[Tuple]:
        """Feasible and not covered, sorted."""
        return sorted(self.feasible - self.covered)


def completed(row: Row) -> dict[str, str] | None:
    """A full row of levels with those of `row`; None where there is none. Defaults are tried first, as they are and for
    a prefill; then everything, the axis with the fewest levels left before others.
    """
    return _beside(row, _BASES) or _searched(row)


def _beside(row: Row, bases: Iterable[dict[str, str]]) -> dict[str, str] | None:
    """One of some full rows that break no constraint, with what `row` changes, if that breaks none."""
    near = _near(tuple(row))
    for base in bases if all(table.permits(row) for table in near) else ():
        whole = {**base, **row}
        if all(table.allows(whole) for table in near):
            return whole
    return None


@cache
def _near(axes: tuple[str, ...]) -> tuple[Table, ...]:
    """The tables that any of these axes decides."""
    return tuple(dict.fromkeys(table for axis in axes for table in _OF_AXIS[axis]))


def _searched(row: Row) -> dict[str, str] | None:
    found = dict(row)
    if not all(table.permits(found) for table in TABLES):
        return None
    left = {axis: [level for level in LEVELS[axis] if _fits(found, axis, level)] for axis in _TIED if axis not in row}
    return {**_BASES[0], **found} if _fill(found, left) else None


_BASES = tuple(
    {axis: levels[0] for axis, levels in LEVELS.items()} | changes for changes in ({}, {"phase": "prefill", "q": "one"})
)


def _fits(row: dict[str, str], axis: str, level: str) -> bool:
    whole = {**row, axis: level}
    return all(table.permits(whole) for table in _OF_AXIS[axis])


def _fill(row: dict[str, str], left: dict[str, list[str]]) -> bool:
    """Give each axis in `left` one of its levels; False, and `row` as it was, where none will do."""
    if not left:
        return True
    axis = min(left, key=lambda name: len(left[name]))
    near = {other for table in _OF_AXIS[axis] for other in table.axes if other in left} - {axis}
    for level in left[axis]:
        row[axis] = level
        rest = {name: levels for name, levels in left.items() if name != axis}
        rest |= {name: [other for other in left[name] if _fits(row, name, other)] for name in near}
        if all(rest.values()) and _fill(row, rest):
            return True
    row.pop(axis, None)
    return False


def _completes(row: Row, bases: list[dict[str, str]]) -> bool:
    """Whether there is a full row with those of `row`. The base that last did for one stands first, as it does for the
    next most often; a row that only the search finds becomes one.
    """
    for n, base in enumerate(bases):
        if _beside(row, (base,)) is not None:
            bases.insert(0, bases.pop(n))
            return True
    if (whole := _searched(row)) is None:
        return False
    bases.insert(0, whole)
    return True


def feasible(strength: int) -> frozenset[Tuple]:
    """Every combination of levels of so many axes that some cell can have."""
    known: dict[Tuple, bool] = {}  # what is not tied by any constraint decides nothing
    bases = list(_BASES)  # and the rows that only the search found: each completes many others
    found = []
    for axes in combinations(_PAIRS, strength):
        for pairs in product(*axes):
            tied = tuple(pair for pair in pairs if _OF_AXIS[pair[0]])
            if tied not in known:
                known[tied] = _completes(dict(tied), bases)
            if known[tied]:
                found.append(pairs)
    return frozenset(found)


def covered(cells: Iterable[Cell], strength: int) -> frozenset[Tuple]:
    """The combinations of levels that these cells have; a cell with a value that is no level (an empty pattern, a
    request without keys) hides what stands beside it and covers nothing.
    """
    found = set[Tuple]()
    for cell in cells:
        levels = levels_of(cell)
        if all(levels.values()):
            own = [[pair for pair in pairs if pair[1] in levels[pair[0]]] for pairs in _PAIRS]
            found.update(chain.from_iterable(starmap(product, combinations(own, strength))))
    return frozenset(found)


def coverage(cells: Iterable[Cell], strength: int) -> Coverage:
    """What these cells cover of what is feasible."""
    possible = feasible(strength)
    return Coverage(strength, possible, covered(cells, strength) & possible)
