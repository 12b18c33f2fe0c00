"""The one strategy of cells: deterministic, valid, fair to every axis value, and true to the filter and the cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.matrices import filters, shards, strategies, tiers
from sacts.matrices.axes import AXES
from sacts.matrices.cell import Cell, parse, value_text
from sacts.matrices.constraints import CONSTRAINTS
from sacts.matrices.levels import LEVELS, levels_of

DRAWS = 1000
MANY = tuple(islice(strategies.drawn(0), DRAWS))
FILTERS = (
    "phase=train and splits>4 and kcodec=int4 and page=48",
    "phase=decode and (splits>1 or dtype=bf16) and not cache=span",
    "pattern=example",
    "pattern=case64k and map=shared",
    "kv>500",
    "dim>300 and vdim!=0 or window>150",
    "not (kind=set or values=gaussian)",
    "scales=page_channel and zeros=on and exec=reuse",
    "heads=12-3 and q=3+2",
    "dropout>=95 and cap<0 or sink=on and empty=force_self",
)


def ids(seed: int, where: str = "", number: int = 40) -> list[str]:
    return [cell.id for cell in islice(strategies.drawn(seed, where), number)]


@pytest.mark.parametrize("hashes", ["0", "4711"])
def test_every_process_draws_the_same_cells_in_the_same_order(hashes: str) -> None:
    code = "from itertools import islice\nfrom sacts.matrices.strategies import drawn\n"
    code += "print(*(cell.id for cell in islice(drawn(5, 'splits>1'), 40)), sep='\\n')"
    environment = os.environ | {"PYTHONHASHSEED": hashes}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ids(5, "splits>1")


def test_other_seeds_draw_other_cells_and_no_cell_twice() -> None:
    assert len({*ids(0), *ids(1), *ids(2)}) == 120
    assert len({*MANY}) == DRAWS


def test_every_cell_is_what_its_id_says_and_breaks_no_constraint() -> None:
    for cell in MANY:
        assert parse(cell.id) == cell
        assert all(constraint.holds(cell) for constraint in CONSTRAINTS)


def test_no_cell_costs_more_than_it_may() -> None:
    assert max(shards.predicted(cell) for cell in MANY) <= strategies.COST
    cheap = list(islice(strategies.drawn(0, cost=8.0), 60))
    assert max(shards.predicted(cell) for cell in cheap) <= 8
    for cell in MANY:
        slots = sum(-(-t // cell.page) for t in cell.kv) * cell.page * cell.heads[1]
        assert slots * (cell.dim + (cell.vdim or cell.dim)) <= strategies.ELEMENTS, cell.id


@pytest.mark.parametrize("cell", [*MANY[:150], *tiers.load(tiers.path_of("smoke"))], ids=lambda cell: cell.id)
def test_the_cost_of_a_beginning_is_at_most_that_of_the_cell(cell: Cell) -> None:
    row: dict[str, object] = {}
    for axis in strategies.ORDER:
        row[axis.name] = getattr(cell, axis.name)
        assert strategies.least_cost(row) <= shards.predicted(cell) or not any(cell.qo_lens)
    assert strategies.least_cost(row) == shards.predicted(cell)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_every_value_of_an_axis_is_reached_with_a_fair_share(axis: object) -> None:
    name = axis.name  # type: ignore[attr-defined]
    values = Counter(value_text(cell, name) for cell in MANY)
    levels = Counter(level for cell in MANY for level in levels_of(cell)[name])
    assert [value for value in axis.values or () if values[value] < DRAWS // 150] == []  # type: ignore[attr-defined]
    assert [level for level in LEVELS[name] if levels[level] < DRAWS // 150] == []


def test_numbers_between_the_levels_are_reached() -> None:
    for name in (*strategies.BETWEEN, "kv", "q", "heads"):
        between = {value_text(cell, name) for cell in MANY if not levels_of(cell)[name]}
        assert len(between) >= 10, name
    assert any(0 in cell.kv for cell in MANY)
    assert any(0 in cell.q for cell in MANY)
    assert {len(cell.kv) for cell in MANY} == {1, 2, 3, 4}


def test_many_cells_are_made_of_levels_alone_and_many_leave_most_axes_at_their_default() -> None:
    assert sum(all(levels_of(cell).values()) for cell in MANY) > DRAWS // 5
    plain = [sum(getattr(cell, axis.name) != axis.default for axis in AXES[4:]) for cell in MANY]
    assert sum(n <= 6 for n in plain) > DRAWS // 5
    assert sum(n >= 10 for n in plain) > DRAWS // 5


@pytest.mark.parametrize("where", FILTERS)
def test_a_filter_is_honoured_by_what_is_drawn(where: str) -> None:
    found, holds = list(islice(strategies.drawn(3, where), 30)), filters.parse(where)
    assert len(found) == 30
    assert all(holds(cell) for cell in found)


def test_a_filter_that_names_one_cell_draws_it_and_ends() -> None:
    for cell in [cell for cell in MANY if cell.q][:2]:
        where = " and ".join(f"{axis.name}={value_text(cell, axis.name)}" for axis in AXES)
        assert list(strategies.drawn(0, where)) == [cell]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("page=64 and pattern=case64k", ("page=64 and pattern=case64k", "no value of page is left", "pattern:case64k")),
        ("kv>90000 and phase=decode", ("at most 80 iterations", "no value of kv is left")),
    ],
)
def test_where_nothing_can_be_drawn_it_says_where_drawing_ended(where: str, words: tuple[str, ...]) -> None:
    with pytest.raises(strategies.NothingDrawn) as caught:
        next(strategies.drawn(0, where))
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_unreadable_filter_is_refused_before_anything_is_drawn() -> None:
    with pytest.raises(filters.FilterError, match="no axis"):
        next(strategies.drawn(0, "pge=3"))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(FILTERS), strategies.cells(), st.sets(st.sampled_from([axis.name for axis in AXES])))
def test_a_filter_says_of_a_beginning_only_what_holds_of_every_cell_that_begins_so(
    where: str, cell: Cell, known: set[str]
) -> None:
    holds = filters.parse(where)
    begun = SimpleNamespace(**{name: getattr(cell, name) for name in known})
    assert holds(begun) in (None, holds(cell))  # type: ignore[arg-type]  # a cell that lacks axes


def test_a_filter_is_decided_as_soon_as_it_can_be() -> None:
    def said(where: str, **axes: object) -> bool | None:
        return filters.parse(where)(SimpleNamespace(**axes))  # type: ignore[arg-type]  # a cell that lacks axes

    assert said("page=16 and dim>64", page=32) is False
    assert said("page=16 or dim>64", page=16) is True
    assert said("not (page=16 or dim>64)", dim=65) is False
    assert said("page=16 and dim>64", page=16) is None
    assert [(axis.name, sign, value) for axis, sign, value in filters.compared("page=16 or not dim>64")] == [
        ("page", "=", "16"),
        ("dim", ">", "64"),
    ]
