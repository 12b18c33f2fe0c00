"""The must-pass list: its cells are its tier, its tests exist, what waits is open, and bad entries are named."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sacts.conformance.cli import app
from sacts.conformance.worker import Worker
from sacts.matrices import must_pass, tiers
from sacts.matrices.cell import Cell, parse
from sacts.matrices.must_pass import Demand, MustPassError
from sacts.matrices.shards import predicted
from sacts.reports.records import Gate, Verdict

ROOT = Path(__file__).parent.parent
ADAPTERS = Path(__file__).parent / "adapters"
DEMANDS = must_pass.load()
TIER = tiers.load(tiers.path_of("must-pass"))


def test_the_tier_is_what_the_list_makes() -> None:
    assert tiers.path_of("must-pass").read_text(encoding="utf-8") == must_pass.tier_text(DEMANDS)
    assert set(TIER) == {cell for each in DEMANDS for cell in each.cells}


def test_every_test_that_meets_a_demand_is_collected() -> None:
    named = sorted({test for each in DEMANDS for test in each.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    collected = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == set(named)


def test_every_section_with_demands_is_there_and_they_stand_in_its_order() -> None:
    clauses = [each.clause for each in DEMANDS]
    assert {"1.2", "3.2", "5.2", "6.1", "7.1", "7.2", "7.3", "7.4"} <= set(clauses)
    assert clauses == sorted(clauses)


def test_no_cell_is_dear() -> None:
    assert max(predicted(cell) for cell in TIER) <= 60


# What the issue and section 6.1 name, each stated as a property of a cell rather than by its id.
def having(name: str, value: object) -> Callable[[Cell], bool]:
    return lambda cell: value in (getattr(cell, name), getattr(cell, name.replace("kcodec", "vcodec")))


NAMED: dict[str, Callable[[Cell], bool]] = {
    "index normalisation on random tables with partial tails": lambda c: (
        c.pattern == "duplicates" and c.map == "random" and any(t % c.page for t in c.kv)
    ),
    "rows of one query tile with different valid sets": lambda c: (
        max(c.qo_lens) > 1 and c.block > 1 and c.causal == "bottom_right" and c.window > 0
    ),
    "W and window_left together": lambda c: c.pattern == "union" and c.window >= 0,
    "unequal rows, split": lambda c: c.splits > 1 and len(set(c.kv)) > 2,
    "8 splits with keys in each": lambda c: (
        c.pattern == "all" and c.splits == 8 and -(-c.kv[0] // c.tile) % 8 == 0 and len(c.kv) == 1
    ),
    "an empty split": lambda c: c.pattern == "all" and c.splits > -(-max(c.kv) // c.tile),
    "odd base offsets": having("cache", "strided"),
    "more queries than keys": lambda c: any(q > t for q, t in zip(c.qo_lens, c.kv, strict=True)),
    "many queries on one block": lambda c: max(c.qo_lens) >= 16 and c.block == 16 and c.kv == (16,),
    **{f"N = {t}": having("kv", (t,)) for t in (1, 15, 16, 17)},
    **{f"{n} splits": having("splits", n) for n in (1, 2, 4, 8)},
    **{f"codec {name}": having("kcodec", name) for name in ("int8", "int4", "fp8_e4m3fn", "fp8_e5m2")},
    **{f"values {name}": having("values", name) for name in ("huge", "equal", "shifted")},
    **{f"map {name}": having("map", name) for name in ("identity", "random", "shared", "high")},
    **{f"pos {name}": having("pos", name) for name in ("rope", "alibi", "buckets")},
    **{f"kind {name}": having("kind", name) for name in ("set", "multiset", "sequence")},
    **{f"empty {name}": having("empty", name) for name in ("zero", "force_self", "force_sink_token")},
}


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_asked_for_by_name_is_a_cell(name: str) -> None:
    assert any(NAMED[name](cell) for cell in TIER)


FAULTS = "sacts.kernels_under_test.faults:"


@pytest.mark.parametrize(
    ("adapter", "cell", "gate"),
    [
        (f"{FAULTS}duplicate_counted_twice", "decode/fp32/kv:77/page:32/pattern:duplicates", Gate.INDEX),
        (f"{FAULTS}causal_top_left", "prefill/fp16/kv:50/q:6/heads:4-1/block:16/causal:bottom_right", Gate.COUNT),
        (
            f"{FAULTS}window_off_by_one",
            "prefill/fp16/kv:60/q:3/heads:4-1/pattern:union/causal:bottom_right/window:10",
            Gate.COUNT,
        ),
        (
            str(ADAPTERS / "unwritten_maximum.py"),
            "decode/fp32/kv:40/heads:4-1/pattern:all/splits:8/tile:16",
            Gate.MERGE,
        ),
        (f"{FAULTS}strides_from_shape", "decode/fp16/kv:50+20/cache:strided", Gate.ADDRESS),
    ],
)
def test_a_cell_catches_what_it_was_asked_for(adapter: str, cell: str, gate: Gate) -> None:
    assert parse(cell) in TIER
    with Worker(adapter) as worker:
        record = worker.judge(cell)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is gate, record.sentence


def test_what_waits_is_open_and_nothing_else_is() -> None:
    for each in DEMANDS:
        assert each.open == (not each.cells and not each.tests)


def test_nothing_waits_for_what_is_there() -> None:
    assert [each.demand for each in DEMANDS if each.stale] == []


@pytest.mark.parametrize(
    ("waits_for", "stale"),
    [("map=shared", True), ("map=mirrored", False), ("splits=9", True), ("exec_=graph", False), ("sacts bench", False)],
)
def test_an_entry_that_waits_for_a_value_is_stale_once_the_axis_has_it(waits_for: str, stale: bool) -> None:
    assert Demand("6.1", "One.", waits_for=waits_for).stale is stale


# --- reading


def read(fields: str, head: str = 'clause = "6.1"\ndemand = "One."\n') -> tuple[Demand, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.toml"
        path.write_text(f"[[demand]]\n{head}{fields}\n", encoding="utf-8")
        return must_pass.load(path)


def test_an_entry_is_what_it_says() -> None:
    (demand,) = read('cells = ["decode/fp16/kv:17"]')
    assert (demand.clause, demand.demand, [cell.id for cell in demand.cells]) == ("6.1", "One.", ["decode/fp16/kv:17"])
    assert not demand.open
    assert read('waits_for = "an axis"')[0].open


ANOTHER = '[[demand]]\nclause = "6.1"\ndemand = "One."\nwaits_for = "x"'


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("", "needs one of cells, tests, waits_for, has none"),
        ('cells = []\nwaits_for = ""', "has none"),
        ('cells = ["decode/fp16/kv:17"]\nwaits_for = "x"', "has cells and waits_for"),
        ('cells = ["decode/fp16/kv:17/pge:1"]', "demand 1: 'pge:1' in 'decode/fp16/kv:17/pge:1' names no axis"),
        ('cells = "decode/fp16/kv:17"', "cells must be a list of texts"),
        ('cells = ["decode/fp16/kv:17", "decode/fp16/kv:17"]', "cells names something twice"),
        ('waits_for = ["x"]', "waits_for must be text"),
        ('wait_for = "x"', "no field 'wait_for'; valid: clause, demand, cells, tests, waits_for"),
        (f'waits_for = "x"\n{ANOTHER}', "demand 2: 'One.' stands there already"),
        ('waits_for = "x"\n[other]', "holds [[demand]] entries and nothing else"),
        ("waits_for = x", "own.toml: "),
    ],
)
def test_a_bad_entry_is_named(fields: str, words: str) -> None:
    with pytest.raises(MustPassError) as caught:
        read(fields)
    assert "own.toml" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ('demand = "One."\n', "clause must be a section such as 6.1, got ''"),
        ('clause = 6.1\ndemand = "One."\n', "clause must be a section such as 6.1, got 6.1"),
        ('clause = "6.1"\ndemand = "One"\n', "demand must be a sentence, got 'One'"),
    ],
)
def test_an_entry_without_section_or_sentence_is_named(head: str, words: str) -> None:
    with pytest.raises(MustPassError) as caught:
        read('waits_for = "x"', head)
    assert words in str(caught.value)


def test_a_cell_of_two_demands_stands_in_the_tier_once() -> None:
    (one,) = read('cells = ["decode/fp16/kv:17", "decode/fp16/kv:18"]')
    (two,) = read('cells = ["decode/fp16/kv:18", "decode/fp16/kv:19"]', 'clause = "7.1"\ndemand = "Two."\n')
    lines = must_pass.tier_text([one, two]).splitlines()
    assert lines[-5:] == [
        "# 6.1 One.", "decode/fp16/kv:17", "decode/fp16/kv:18", "# 7.1 Two.", "decode/fp16/kv:19",
    ]  # fmt: skip


# --- the command


def sacts(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["matrix", "must-pass", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_prints_every_demand_and_counts_what_is_open() -> None:
    said = " ".join(sacts().split())
    kinds = [sum(bool(getattr(each, name)) for each in DEMANDS) for name in must_pass.MEANS]
    assert sum(kinds) == len(DEMANDS)
    count = f"{len(DEMANDS)} demands: {kinds[0]} met by {len(TIER)} cells, {kinds[1]} by tests"
    assert f"{count} of the suite, {kinds[2]} open" in said
    assert said.count("open: waits for") == kinds[2]
    document = " ".join((ROOT / "docs" / "matrix.md").read_text(encoding="utf-8").split())
    assert f"{count}, {kinds[2]} open" in document


def test_it_prints_the_tier_and_json() -> None:
    assert sacts("--cells") == must_pass.tier_text(DEMANDS)
    listed = json.loads(sacts("--json"))
    assert [each["demand"] for each in listed] == [each.demand for each in DEMANDS]
    assert listed[0]["cells"] == [cell.id for cell in DEMANDS[0].cells]
