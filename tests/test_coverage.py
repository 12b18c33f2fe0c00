"""Levels and their coverage: what is feasible is counted exactly, and apart from what makes cells."""

from __future__ import annotations

import random

import pytest

from sacts.matrices import tiers
from sacts.matrices.axes import AXES
from sacts.matrices.cell import Cell, CellError, parse
from sacts.matrices.coverage import completed, coverage, covered, feasible
from sacts.matrices.levels import LEVELS, cell_of, levels_of


def drawn(seed: int) -> Cell | None:
    """A row of levels drawn at random, the axes that constraints tie at their defaults more often than not."""
    choose = random.Random(seed)
    row = {axis: levels[0] if choose.random() < 0.5 else choose.choice(levels) for axis, levels in LEVELS.items()}
    if row["phase"] == "decode":
        row["q"] = "none"
    elif row["q"] == "none":
        row["q"] = "two"
    try:
        return cell_of(row)
    except CellError:
        return None


CELLS = [cell for cell in map(drawn, range(3500)) if cell is not None]


def test_every_axis_has_levels_and_their_first_is_the_default() -> None:
    assert list(LEVELS) == [axis.name for axis in AXES]
    assert all(LEVELS.values())
    plain = cell_of({axis: levels[0] for axis, levels in LEVELS.items()})
    assert plain == parse(f"{plain.phase}/{plain.dtype}/kv:1+40")


def test_a_cell_has_the_levels_that_it_was_made_of() -> None:
    assert len(CELLS) > 300
    for cell in CELLS:
        names = levels_of(cell)
        assert all(names.values())
        assert cell_of({axis: levels[-1] for axis, levels in names.items()}) == cell


def test_no_cell_has_a_pair_that_is_counted_as_infeasible() -> None:
    """The search against cells drawn at random, which know nothing of it."""
    possible = feasible(2)
    assert covered(CELLS, 2) <= possible
    assert len(covered(CELLS, 2)) > 0.9 * len(possible)


def test_every_level_is_feasible() -> None:
    assert feasible(1) == {((axis, level),) for axis, levels in LEVELS.items() for level in levels}


@pytest.mark.parametrize(
    "row",
    [
        {"phase": "decode", "q": "two"},
        {"cache": "strided", "map": "high"},
        {"kind": "sequence", "pattern": "duplicates"},
        {"kv": "page-1", "page": "1"},
        {"kcodec": "none", "vcodec": "none", "scales": "page"},
        {"map": "shared", "kv": "alone"},
        {"empty": "force_self", "kv": "one", "q": "seventeen"},
    ],
)
def test_what_excludes_itself_is_infeasible(row: dict[str, str]) -> None:
    assert completed(row) is None


def test_what_needs_other_axes_is_completed() -> None:
    for row in ({"q": "ragged"}, {"scales": "page_channel"}, {"zeros": "on", "vcodec": "fp8_e5m2"}, {"map": "shared"}):
        whole = completed(row)
        assert whole is not None
        assert row.items() <= whole.items()
        assert all(levels for levels in levels_of(cell_of(whole)).values())


def test_values_that_are_no_levels_cover_nothing() -> None:
    for text in ("decode/fp16/kv:33+0+5", "decode/fp16/kv:40+21/pattern:empty", "decode/fp16/kv:17"):
        assert covered([parse(text)], 1) == frozenset()


def test_a_tier_is_counted_and_what_it_lacks_is_named() -> None:
    smoke = tiers.load(tiers.path_of("smoke"))
    found = coverage(smoke, 2)
    assert 0 < len(found.covered) < len(found.feasible)
    assert len(found.covered) + len(found.missing) == len(found.feasible)
    more = coverage([*smoke, *CELLS], 2)
    assert found.covered < more.covered <= more.feasible
    assert len(found.feasible) > 5000
