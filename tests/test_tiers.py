"""Tiers that are made: they cover all that is feasible, by the exact checker and by counting everything; the same rows
come out of every process; a file that its inputs have left behind is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import typer

from sacts.conformance.cli import matrix
from sacts.matrices import generate, shards, tiers
from sacts.matrices.axes import AXES
from sacts.matrices.cell import Cell, CellError, parse, value_text
from sacts.matrices.constraints import CONSTRAINTS, Constraint
from sacts.matrices.coverage import coverage, covered, feasible
from sacts.matrices.generate import RECIPES, Recipe, digest_of, generated, inputs_digest, must_pass
from sacts.matrices.levels import LEVELS, MODEL_CONSTRAINTS, TABLES, Table, cell_of, levels_of
from sacts.reports import records

MADE = list(RECIPES)
CAP = RECIPES["pr"].cap


@cache
def cells_of(tier: str) -> tuple[Cell, ...]:
    return tuple(tiers.load(tiers.path_of(tier)))


# --- what ships


@pytest.mark.parametrize("tier", MADE)
def test_a_tier_is_made_from_what_the_matrix_is_today(tier: str) -> None:
    said = digest_of(tiers.path_of(tier))
    assert said == inputs_digest(RECIPES[tier], must_pass()), f"stale tier: run sacts matrix generate {tier}"


@pytest.mark.parametrize("tier", MADE)
def test_a_tier_covers_all_feasible_combinations(tier: str) -> None:
    found = coverage(cells_of(tier), RECIPES[tier].strength)
    assert found.missing[:5] == []
    assert f"{len(found.covered)} of {len(found.feasible)} feasible" in tiers.path_of(tier).read_text()


@pytest.mark.parametrize("tier", MADE)
def test_the_cells_of_a_tier_break_no_constraint_and_have_a_level_of_each_axis(tier: str) -> None:
    must = set(must_pass())
    made = [cell for cell in cells_of(tier) if cell not in must]
    for constraint in (*CONSTRAINTS, *MODEL_CONSTRAINTS):
        assert [cell.id for cell in made if not constraint.holds(cell)] == [], constraint.name
    assert [cell.id for cell in made if not all(levels_of(cell).values())] == []


@pytest.mark.parametrize("tier", MADE)
def test_a_tier_reaches_every_level(tier: str) -> None:
    assert covered(cells_of(tier), 1) == feasible(1)


def test_the_shipped_tiers_reach_every_value_of_every_axis() -> None:
    shipped = [cell for tier in tiers.names() for cell in cells_of(tier)]
    for axis in AXES:
        reached = {value_text(cell, axis.name) for cell in shipped}
        assert set(axis.values or ()) - reached == set(), axis.name
    assert covered(shipped, 1) == feasible(1)  # of axes of integers the levels


def test_the_must_pass_cells_stand_first() -> None:
    for tier in MADE:
        assert list(cells_of(tier)[: len(must_pass())]) == must_pass()


def test_the_pr_tier_is_small() -> None:
    made = cells_of("pr")[len(must_pass()) :]
    assert len(made) <= 150
    assert sum(map(shards.of_a_run, made)) < len(made) * CAP


def rows_of_costs() -> Iterable[tuple[dict[str, str], float]]:
    plain = {axis: names[0] for axis, names in LEVELS.items()}
    for names in product(*(LEVELS[axis] for axis in shards.COST_AXES)):
        row = dict(zip(shards.COST_AXES, names, strict=True))
        try:
            yield row, shards.of_a_run(cell_of(plain | row))
        except CellError:
            continue


def test_a_cell_of_the_pr_tier_is_dear_only_where_a_pair_of_its_levels_is() -> None:
    dear = [cell for cell in cells_of("pr")[len(must_pass()) :] if shards.of_a_run(cell) > CAP]
    cheapest: dict[tuple[tuple[str, str], ...], float] = {}
    for row, cost in rows_of_costs():
        for pair in combinations(row.items(), 2):
            cheapest[pair] = min(cost, cheapest.get(pair, cost))
    for cell in dear:
        names = levels_of(cell)
        own = product(*([(axis, name) for name in names[axis]] for axis in shards.COST_AXES))
        assert max(cheapest[pair] for row in own for pair in combinations(row, 2)) > CAP, cell.id


def test_costs_depend_on_the_axes_that_say_so() -> None:
    """Else add the axis to `shards.COST_AXES`: what a row of levels costs is looked up by them."""
    for cell in [cell for cell in cells_of("pr") if all(levels_of(cell).values())][:30]:
        for axis in AXES:
            if axis.name in shards.COST_AXES:
                continue
            for level in LEVELS[axis.name]:
                try:
                    other = cell_of({name: names[-1] for name, names in levels_of(cell).items()} | {axis.name: level})
                except CellError:
                    continue
                assert shards.of_a_run(other) == shards.of_a_run(cell), axis.name


# --- the search, on models small enough to count everything


def small(**levels: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {axis: levels.get(axis, names[:1]) for axis, names in LEVELS.items()}


TIED = small(
    phase=("decode", "prefill"), q=("none", "two"), kv=("one", "alone"), map=LEVELS["map"], cache=LEVELS["cache"],
    kind=LEVELS["kind"], pattern=("scattered", "duplicates"), block=("1", "16"),
)  # fmt: skip


def whole_space(levels: dict[str, tuple[str, ...]], tables: Iterable[Table] = ()) -> list[Cell]:
    found = []
    for names in product(*levels.values()):
        row = dict(zip(levels, names, strict=True))
        try:
            cell = cell_of(row)
        except CellError:
            continue
        if all(table.permits(row) for table in tables):
            found.append(cell)
    return found


def combinations_in(cells: Iterable[Cell], levels: dict[str, tuple[str, ...]], strength: int) -> set[object]:
    """By the names in `levels`, of the axes that vary."""
    found = set()
    for names in map(levels_of, cells):
        row = [(axis, name) for axis, own in levels.items() if len(own) > 1 for name in own if name in names[axis]]
        found |= set(combinations(row, strength))
    return found


@pytest.mark.parametrize("strength", [2, 3])
def test_all_combinations_that_any_cell_has_are_covered(strength: int) -> None:
    every = whole_space(TIED)
    made = generated(Recipe(strength, 4, CAP), levels=TIED)
    assert combinations_in(made, TIED, strength) == combinations_in(every, TIED, strength)
    assert len(made) < len(every) / 3


def test_a_choice_that_only_a_search_finds_impossible_is_taken_back() -> None:
    """With RoPE three switches must differ pairwise: no table alone forbids it, all three do."""
    switches: dict[str, Callable[[Cell], bool]] = {
        "cap": lambda c: c.cap > 0,
        "sink": lambda c: c.sink == "on",
        "dropout": lambda c: c.dropout > 0,
    }

    def differing(a: str, b: str) -> Table:
        return Table(
            Constraint(
                a + b, ("pos", a, b), lambda c: c.pos == "none" or switches[a](c) != switches[b](c), "they differ"
            )
        )

    differ = [differing(a, b) for a, b in combinations(switches, 2)]
    levels = small(pos=("rope", "none"), epilogue=LEVELS["epilogue"], **{axis: LEVELS[axis] for axis in switches})
    made = generated(Recipe(2, 4, CAP), levels=levels, tables=(*TABLES, *differ))
    assert {cell.pos for cell in made} == {"none"}
    assert combinations_in(made, levels, 2) == combinations_in(whole_space(levels, differ), levels, 2)


def test_what_must_pass_stands_first_and_is_not_covered_again() -> None:
    every = whole_space(TIED)
    alone = generated(Recipe(2, 4, CAP), levels=TIED)
    no_level = parse("decode/fp16/kv:33+0+5")  # so it covers nothing
    must = [no_level, *alone[: len(alone) // 2]]
    made = generated(Recipe(2, 4, CAP), must, TIED)
    assert made[: len(must)] == must
    assert combinations_in(made[1:], TIED, 2) == combinations_in(every, TIED, 2)
    assert len(made) <= len(alone) + 3
    assert generated(Recipe(2, 4, CAP), every, TIED) == every


def test_a_level_that_only_dear_cells_have_is_covered_by_the_cheapest_of_them() -> None:
    levels = small(
        phase=("prefill",), q=("seventeen", "one"), kv=("ragged", "alone"), heads=("4-4", "7-1"), tile=("16", "128")
    )
    every = whole_space(levels)

    def cheapest(chosen: object) -> float:
        return min(shards.of_a_run(cell) for cell in every if chosen in combinations_in([cell], levels, 2))

    needed = max(cheapest(chosen) for chosen in combinations_in(every, levels, 2))
    made = [shards.of_a_run(cell) for cell in generated(Recipe(2, 4, CAP), levels=levels)]
    assert CAP < needed <= max(made) < 2 * needed
    assert max(map(shards.of_a_run, every)) > 4 * max(made)


PROGRAM = """
from sacts.matrices.generate import Recipe, generated
from sacts.matrices.levels import LEVELS
levels = {axis: names[:2] for axis, names in LEVELS.items()}
print("\\n".join(cell.id for cell in generated(Recipe(2, 4, 80.0), levels=levels)))
"""


def test_the_same_rows_come_out_of_every_process() -> None:
    texts = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "2"))
    ]
    assert texts[0].count("\n") > 5
    assert texts[0] == texts[1]


# --- files and the command


def test_a_digest_follows_what_a_tier_is_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["pr"]
    monkeypatch.setattr(generate, "LEVELS", small())
    monkeypatch.setattr(generate, "TABLES", ())
    digests = [inputs_digest(recipe), inputs_digest(recipe._replace(cap=1.0)), inputs_digest(recipe, cells_of("smoke"))]
    monkeypatch.setattr(generate, "TABLES", TABLES[:1])
    digests.append(inputs_digest(recipe))
    monkeypatch.setattr(generate, "LEVELS", small(sink=("off", "on")))
    digests.append(inputs_digest(recipe))
    assert len(set(digests)) == 5
    assert inputs_digest(recipe) == digests[-1]


def test_a_tier_is_made_by_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "pr", Recipe(2, 1, CAP))
    path = tmp_path / "own.cells"
    matrix.generate("pr", path)
    assert covered(tiers.load(path), 2) == feasible(2)
    assert digest_of(path) == inputs_digest(Recipe(2, 1, CAP), must_pass())
    said = capsys.readouterr().out
    assert f"{len(feasible(2))} of {len(feasible(2))} feasible combinations of 2 levels" in said
    assert "iterations a launch" in said
    assert " seconds" in said
    assert list(tmp_path.iterdir()) == [path]


def test_a_tier_that_lacks_a_combination_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "pr", Recipe(2, 1, CAP))
    monkeypatch.setattr(generate, "generated", lambda recipe, must: [replace(cells_of("pr")[0], dropout=0)])
    with pytest.raises(typer.Exit) as caught:
        matrix.generate("pr", tmp_path / "own.cells")
    assert caught.value.exit_code == records.EXIT_FAILURES
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_is_written_by_hand_is_not_made() -> None:
    with pytest.raises(typer.BadParameter, match="no tier 'smoke' is generated; valid: pr, nightly"):
        matrix.generate("smoke")
