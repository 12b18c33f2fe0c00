"""Tiers made by a greedy search: rows of levels, one after another, until every combination of levels of t axes that a
row can have stands in one.

A row starts from a combination that is not covered and grows by the density rule (Bryce and Colbourn, A density-based
greedy algorithm for higher strength covering arrays, 2009): each choice takes the level that covers most new
combinations on average over what is still open. A choice that leaves nothing is taken back. Sums are of integers, so
every machine makes the same rows. `coverage` counts the result by a search of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import shards, tiers
from .cell import Cell
from .domains import Domains, Levels, Model, Narrowing
from .levels import LEVELS, TABLES, Table, cell_of

Floats = npt.NDArray[np.float32]  # of integers below 2^24, so exact in any order

VERSION = 2  # of the search: another one makes other rows
FEW_RUNS = 2  # of a launch, beside which a run may cost all of the cap; half as much beside twice as many
WHOLE = 2520  # weight of a level that is alone; its shares are whole numbers for up to 10 levels


class Recipe(NamedTuple):
    """How a tier is made: `strength`, axes of a combination, 2 or more; `starts`, rows tried for each that is kept;
    `cap`, iterations that a run of a cell may cost where a launch is two runs, half as many where it is four, and so
    on. What no cheaper cell has is covered under the first of 2, 4, 8 ... caps that lets it be.
    """

    strength: int
    starts: int
    cap: float


# An iteration takes about 4 ms in the interpreter, where pr is run: 80 are a third of a second a run.
RECIPES = {"pr": Recipe(2, 64, 80.0), "nightly": Recipe(3, 16, 160.0)}


def generated(
    recipe: Recipe, must: Sequence[Cell] = (), levels: Levels = LEVELS, tables: Iterable[Table] = TABLES
) -> list[Cell]:
    """`must`, then cells that cover what these leave of all combinations that some row of `levels` can have."""
    model = Model(levels, tables)
    left: Floats = np.ones((len(model.names),) * recipe.strength, np.float32)
    cells = list(must)
    for cell in must:
        _cross_out(left, model.codes_of(cell))
    for cap, runs in _caps(model, recipe.cap):
        search = _Search(model, Narrowing(model, cap, runs), left)
        while (row := search.best_row(recipe.starts)) is not None:
            cells.append(cell_of(dict(model.names[code] for code in row)))
            for wanted in (left, search.wanted):
                _cross_out(wanted, model.codes_of(cells[-1]))
    return list(dict.fromkeys(cells))


def _caps(model: Model, cap: float) -> Iterator[tuple[float, int]]:
    """Iterations of a run, and runs of a launch: many of these first beside cheap runs only."""
    dearest, most = max(model.costs.values()), max(model.runs.values())
    while cap < dearest:
        share, runs = cap, FEW_RUNS
        yield share, runs
        while runs < most and share / 2 >= min(model.costs.values()):
            share, runs = share / 2, runs * 2
            yield share, runs
        cap *= 2
    yield dearest, most


def _cross_out(wanted: Floats, codes: Sequence[int]) -> None:
    wanted[np.ix_(*[codes] * wanted.ndim)] = 0


class _Search:
    """Rows below a cost; `wanted` is 1 at each combination, by codes in any order, that is to be covered."""

    def __init__(self, model: Model, narrowing: Narrowing, left: Floats) -> None:
        self.model, self.narrowing = model, narrowing
        self.wanted: Floats = np.zeros_like(left)
        for codes, domains in self._consistent((), self.narrowing.open, left.ndim - 1):
            for axis, found in enumerate(domains):
                if all(self.model.axis_of[code] != axis for code in codes):
                    self.wanted[codes][list(found)] = 1
        for order in permutations(range(left.ndim)):
            self.wanted = np.minimum(self.wanted, self.wanted.transpose(order))
        self.wanted *= left

    def _consistent(
        self, codes: tuple[int, ...], domains: Domains | None, more: int
    ) -> Iterator[tuple[tuple[int, ...], Domains]]:
        if domains is None:
            return
        if not more:
            yield codes, domains
            return
        used = {self.model.axis_of[code] for code in codes}
        for axis, found in enumerate(domains):
            for code in found if axis not in used else ():
                yield from self._consistent((*codes, code), self.narrowing.having(domains, (code,)), more - 1)

    def best_row(self, starts: int) -> tuple[int, ...] | None:
        """Of the rows grown from so many combinations, evenly spread over what is wanted, the one that covers most of
        it; None once nothing is wanted that a row below the cost can have.
        """
        while (places := np.flatnonzero(self.wanted)).size:
            best, most = None, 0.0
            for place in dict.fromkeys(np.linspace(0, places.size - 1, starts).astype(int).tolist()):
                start = tuple(map(int, np.unravel_index(places[place], self.wanted.shape)))
                row = self._row_from(start)
                if row is None:
                    for order in permutations(start):
                        self.wanted[order] = 0
                elif (covers := float(self.wanted[np.ix_(*[row] * self.wanted.ndim)].sum())) > most:
                    best, most = row, covers
            if best is not None:
                return best
        return None

    def _row_from(self, start: tuple[int, ...]) -> tuple[int, ...] | None:
        domains = self.narrowing.having(self.narrowing.open, start)
        if domains is None:
            return None
        weights = np.zeros(len(self.model.names), np.float32)
        for axis, codes in enumerate(domains):
            weights[self._span(axis)] = self._shares(axis, codes)
        return self._grown(domains, weights, np.tensordot(weights, self.wanted, 1))

    def _grown(self, domains: Domains, weights: Floats, partial: Floats) -> tuple[int, ...] | None:
        """A whole row within `domains`; `weights` by code: the share of what is open, `partial`: weights x wanted."""
        undecided = [axis for axis, codes in enumerate(domains) if len(codes) > 1]
        if not undecided:
            return tuple(code for codes in domains for code in codes)
        density = partial.astype(np.float64)
        while density.ndim > 1:
            density = density @ weights.astype(np.float64)
        worth, prices = density.tolist(), self.model.prices
        axis = max(undecided, key=lambda axis: max(worth[code] for code in domains[axis]))
        for code in sorted(domains[axis], key=lambda code: (-worth[code], prices[code], code)):
            narrower = self.narrowing.having(domains, (code,))
            if narrower is not None and (
                row := self._grown(narrower, *self._moved(domains, narrower, weights, partial))
            ):
                return row
        return None

    def _moved(self, old: Domains, new: Domains, weights: Floats, partial: Floats) -> tuple[Floats, Floats]:
        weights, partial = weights.copy(), partial.copy()
        for axis, codes in enumerate(new):
            if len(codes) < len(old[axis]):
                span, shares = self._span(axis), self._shares(axis, codes)
                partial += np.tensordot(shares - weights[span], self.wanted[span], 1)
                weights[span] = shares
        return weights, partial

    def _span(self, axis: int) -> slice:
        codes = self.model.whole[axis]
        return slice(codes[0], codes[-1] + 1)

    def _shares(self, axis: int, codes: Sequence[int]) -> Floats:
        return np.array([WHOLE // len(codes) if code in codes else 0 for code in self.model.whole[axis]], np.float32)


def must_pass() -> list[Cell]:
    """The cells that stand first in every tier, by clause; none as long as there is no list."""
    path = tiers.TIERS / "must-pass.cells"
    return tiers.load(path) if path.is_file() else []


def inputs_digest(recipe: Recipe, must: Sequence[Cell] = ()) -> str:
    """A hash of all that a tier is made from: levels, lengths, tables, costs, what must pass, and the search."""
    model = Model(LEVELS, TABLES)
    cells = [cell.id for axes in (shards.COST_AXES, shards.RUNS_AXES) for cell in model.cells(axes).values()]
    tables = [(table.name, table.axes, sorted(table.allowed)) for table in TABLES]
    passing = [cell.id for cell in must]
    parts = (VERSION, WHOLE, recipe, model.names, tables, cells, [*model.costs.values(), *model.runs.values()], passing)
    return blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def file_text(tier: str, cells: Sequence[Cell], must: Sequence[Cell], counted: str) -> str:
    """A tier file: how it was made, the hash of its inputs, `counted`, and the cells."""
    cost = [shards.predicted(cell) for cell in cells]
    head = (
        f"# Made by: sacts matrix generate {tier}",
        f"# inputs: {inputs_digest(RECIPES[tier], must)}",
        f"# {len(cells)} cells, {len(must)} of them must-pass; {counted}",
        f"# predicted: {sum(cost):.0f} iterations a launch of each cell, the dearest {max(cost):.0f}",
    )
    return "\n".join([*head, *(cell.id for cell in cells), ""])


def digest_of(path: Path) -> str:
    """The hash in a tier's file; empty where it has none."""
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# inputs: ")]
    return found[0].removeprefix("# inputs: ") if found else ""
