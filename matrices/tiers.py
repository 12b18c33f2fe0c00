"""Tiers: checked-in lists of cells, one id a line, or `include TIER` for those of another; `#` starts a comment."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from .cell import Cell, CellError, parse

INCLUDE = "include "
TIERS = Path(__file__).parent / "cells"


class TierError(ValueError):
    """A tier that does not exist or a line in it that names no cell."""


def names() -> list[str]:
    """The tiers that ship with the suite."""
    return sorted(path.stem for path in TIERS.glob("*.cells"))


def path_of(tier: str) -> Path:
    """The file of a tier: a shipped name, or the path of a `.cells` file. Raises TierError with the nearest name."""
    shipped, own = TIERS / f"{tier}.cells", Path(tier)
    if shipped.is_file():
        return shipped
    if own.suffix == ".cells" and own.is_file():
        return own
    near = get_close_matches(tier, names(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise TierError(f"no tier {tier!r}; {hint}tiers: {', '.join(names())}, or the path of a .cells file")


def load(path: Path) -> list[Cell]:
    """The cells of a tier file, in its order, each once. Raises TierError naming the line that is wrong."""
    cells = list(dict.fromkeys(_cells(path, ())))
    if not cells:
        raise TierError(f"{path.name} names no cell")
    return cells


def _cells(path: Path, within: tuple[Path, ...]) -> Iterator[Cell]:
    """`within`: the files that include this one."""
    own: dict[Cell, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path.name} line {number}"
        if text.startswith(INCLUDE):
            yield from _included(text.removeprefix(INCLUDE).strip(), where, (*within, path))
            continue
        try:
            cell = parse(text)
        except CellError as error:
            raise TierError(f"{where}: {error}") from None
        if cell in own:
            raise TierError(f"{where}: {text} stands already in line {own[cell]}")
        own[cell] = number
        yield cell


def _included(tier: str, where: str, within: tuple[Path, ...]) -> Iterator[Cell]:
    try:
        path = path_of(tier)
    except TierError as error:
        raise TierError(f"{where}: {error}") from None
    if path in within:
        raise TierError(f"{where}: {tier} includes itself")
    yield from _cells(path, within)
