"""The must-pass list: every test that the source article asks for, and what meets it. The list is `must_pass.toml`;
the tier `must-pass` is made of its cells.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .axes import AXES
from .cell import Cell, CellError, parse

LIST = Path(__file__).parent / "must_pass.toml"
MEANS = ("cells", "tests", "waits_for")
HEAD = (
    "# must-pass: every test that the source article asks for and a cell can express. Made of must_pass.toml:\n"
    "# sacts matrix must-pass --cells > matrices/cells/must-pass.cells\n"
)


class MustPassError(ValueError):
    """A list that cannot be read, or an entry in it that says nothing or too much."""


@dataclass(frozen=True)
class Demand:
    """One thing that is asked for. `clause`: the section of the article. It is met by `cells` or by `tests` (node ids
    of the suite), or is open and `waits_for` what is missing, `axis=value` or a topic: one of the three, never two.
    """

    clause: str
    demand: str
    cells: tuple[Cell, ...] = ()
    tests: tuple[str, ...] = ()
    waits_for: str = ""

    @property
    def stale(self) -> bool:
        """Whether it waits for an axis value, `exec=graph`, that is there by now: a cell can test it."""
        named = re.match(r"(\w+)=(\w+)", self.waits_for)
        return named is not None and any(
            axis.name == named[1] and (axis.values is None or named[2] in axis.values) for axis in AXES
        )

    @property
    def open(self) -> bool:
        """Whether nothing meets it yet."""
        return bool(self.waits_for)


def load(path: Path = LIST) -> tuple[Demand, ...]:
    """The demands of a list, in its order. Raises MustPassError naming the entry, from 1."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise MustPassError(f"{path.name}: {error}") from None
    if found.keys() != {"demand"} or not isinstance(found["demand"], list):
        raise MustPassError(
            f"{path.name} holds [[demand]] entries and nothing else, got {', '.join(found) or 'nothing'}"
        )
    demands: list[Demand] = []
    for number, entry in enumerate(found["demand"], start=1):
        demand = _demand(entry, f"{path.name} demand {number}")
        if demand.demand in (each.demand for each in demands):
            raise MustPassError(f"{path.name} demand {number}: {demand.demand!r} stands there already")
        demands.append(demand)
    return tuple(demands)


def _demand(entry: Mapping[str, Any], where: str) -> Demand:
    unknown = entry.keys() - {"clause", "demand", *MEANS}
    if unknown:
        raise MustPassError(f"{where}: no field {sorted(unknown)[0]!r}; valid: clause, demand, {', '.join(MEANS)}")
    clause, words = entry.get("clause", ""), entry.get("demand", "")
    if not isinstance(clause, str) or not re.fullmatch(r"\d\.\d", clause):
        raise MustPassError(f"{where}: clause must be a section such as 6.1, got {clause!r}")
    if not isinstance(words, str) or not words.endswith("."):
        raise MustPassError(f"{where}: demand must be a sentence, got {words!r}")
    means = [name for name in MEANS if entry.get(name)]
    if len(means) != 1:
        raise MustPassError(f"{where}: needs one of {', '.join(MEANS)}, has {' and '.join(means) or 'none'}")
    waits_for = entry.get("waits_for", "")
    if not isinstance(waits_for, str):
        raise MustPassError(f"{where}: waits_for must be text, got {waits_for!r}")
    cells = tuple(_cell(text, where) for text in _texts(entry, "cells", where))
    return Demand(clause, words, cells, _texts(entry, "tests", where), waits_for)


def _texts(entry: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    found = entry.get(name, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise MustPassError(f"{where}: {name} must be a list of texts, got {found!r}")
    if len(set(found)) < len(found):
        raise MustPassError(f"{where}: {name} names something twice")
    return tuple(found)


def _cell(text: str, where: str) -> Cell:
    try:
        return parse(text)
    except CellError as error:
        raise MustPassError(f"{where}: {error}") from None


def tier_text(demands: Sequence[Demand]) -> str:
    """The tier file of the cells of all demands, each cell once, where it is demanded first."""
    seen: set[Cell] = set()
    lines = [HEAD]
    for demand in demands:
        new = [cell for cell in demand.cells if cell not in seen]
        seen.update(new)
        if new:
            lines.append(f"# {demand.clause} {demand.demand}")
            lines += [cell.id for cell in new]
    return "\n".join(lines) + "\n"
