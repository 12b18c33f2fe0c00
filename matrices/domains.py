"""Levels by number, and what is open of each axis while a row is made: the constraint tables are kept consistent after
each choice, on sets of their combinations as the bits of integers (Demeulenaere et al., Compact-Table, 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

from . import shards
from .cell import Cell, CellError
from .levels import Table, cell_of, levels_of

Levels = Mapping[str, Sequence[str]]
Domains = tuple[tuple[int, ...], ...]  # of each axis, by number, the codes of the levels that are open


class Support(NamedTuple):
    """A table: its `axes` by number, of each code the set of the combinations that have it, and the set of all."""

    axes: tuple[int, ...]
    having: Mapping[int, int]
    every: int


class Model:
    """Codes of the levels, axis by axis; `tables` over axes that the levels name. A combination of a table with a level
    that `levels` lacks does not count.
    """

    def __init__(self, levels: Levels, tables: Iterable[Table]) -> None:
        self.levels = levels
        self.names = tuple((axis, level) for axis, names in levels.items() for level in names)
        self.codes = {name: code for code, name in enumerate(self.names)}
        self.axis_of = tuple(number for number, names in enumerate(levels.values()) for _ in names)
        self.whole: Domains = tuple(
            tuple(code for code, of in enumerate(self.axis_of) if of == number) for number in range(len(levels))
        )
        self.supports = tuple(self.support(table.axes, table.allowed) for table in tables)
        self._cells: dict[tuple[str, ...], dict[tuple[str, ...], Cell]] = {}

    def support(self, axes: Sequence[str], allowed: Iterable[tuple[str, ...]]) -> Support:
        """A table by code, whatever the order of `allowed`."""
        having = {self.codes[axis, level]: 0 for axis in axes for level in self.levels[axis]}
        known = [
            names for names in sorted(allowed) if all(pair in self.codes for pair in zip(axes, names, strict=True))
        ]
        for row, names in enumerate(known):
            for pair in zip(axes, names, strict=True):
                having[self.codes[pair]] |= 1 << row
        numbers = tuple(list(self.levels).index(axis) for axis in axes)
        return Support(numbers, having, (1 << len(known)) - 1)

    def cells(self, axes: Sequence[str]) -> dict[tuple[str, ...], Cell]:
        """Of each combination of levels of some axes that makes one a cell, all else at first levels; made once."""
        key = tuple(axes)
        if key not in self._cells:
            self._cells[key] = self._made(key)
        return self._cells[key]

    def _made(self, axes: tuple[str, ...]) -> dict[tuple[str, ...], Cell]:
        first = {axis: names[0] for axis, names in self.levels.items()}
        found = {}
        for names in product(*(self.levels[axis] for axis in axes)):
            try:
                found[names] = cell_of(first | dict(zip(axes, names, strict=True)))
            except CellError:
                continue
        return found

    @cached_property
    def costs(self) -> dict[tuple[str, ...], float]:
        """Iterations of a run of each combination of levels of `shards.COST_AXES`."""
        return {names: shards.of_a_run(cell) for names, cell in self.cells(shards.COST_AXES).items()}

    @cached_property
    def runs(self) -> dict[tuple[str, ...], int]:
        """How many runs a launch costs, of each combination of levels of `shards.RUNS_AXES`."""
        return {names: shards.runs_of(cell) for names, cell in self.cells(shards.RUNS_AXES).items()}

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """Of each code the mean cost of what has it; 0 where no cost depends on the axis."""
        having: dict[tuple[str, str], list[float]] = {}
        for names, cost in self.costs.items():
            for pair in zip(shards.COST_AXES, names, strict=True):
                having.setdefault(pair, []).append(cost)
        return tuple(sum(found) / len(found) if (found := having.get(name)) else 0.0 for name in self.names)

    def codes_of(self, cell: Cell) -> list[int]:
        """The codes of all levels that a cell has; none where a value of it is no level, as it then covers nothing."""
        levels = levels_of(cell)
        found = [self.codes[axis, name] for axis in levels for name in levels[axis] if (axis, name) in self.codes]
        return found if {self.axis_of[code] for code in found} == set(range(len(self.whole))) else []


class Narrowing:
    """What choices leave open, of cells of at most `cap` iterations a run and `runs` runs a launch."""

    def __init__(self, model: Model, cap: float, runs: int) -> None:
        cheap = [names for names, cost in model.costs.items() if cost <= cap]
        few = [names for names, times in model.runs.items() if times <= runs]
        costs = model.support(shards.COST_AXES, cheap), model.support(shards.RUNS_AXES, few)
        self.model = model
        self.supports = (*model.supports, *costs)
        self.of_axis = [[n for n, s in enumerate(self.supports) if axis in s.axes] for axis in range(len(model.whole))]
        self.open = self._narrowed(list(model.whole), range(len(model.whole)))

    def having(self, domains: Domains | None, codes: Iterable[int]) -> Domains | None:
        """What is open once these codes are chosen; None where some table has nothing left. That something is left of
        each table alone does not mean that a whole row is.
        """
        if domains is None:
            return None
        left, changed = list(domains), []
        for code in codes:
            axis = self.model.axis_of[code]
            if code not in left[axis]:
                return None
            left[axis] = (code,)
            changed.append(axis)
        return self._narrowed(left, changed)

    def _narrowed(self, left: list[tuple[int, ...]], changed: Iterable[int]) -> Domains | None:
        queue = dict.fromkeys(number for axis in changed for number in self.of_axis[axis])
        while queue:
            number, _ = queue.popitem()
            axes, having, alive = self.supports[number]
            for axis in axes:
                union = 0
                for code in left[axis]:
                    union |= having[code]
                alive &= union
            if not alive:
                return None
            for axis in axes:
                kept = tuple(code for code in left[axis] if having[code] & alive)
                if len(kept) < len(left[axis]):
                    left[axis] = kept
                    queue |= dict.fromkeys(other for other in self.of_axis[axis] if other != number)
        return tuple(left)
