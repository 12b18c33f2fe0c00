"""Filters on axes: what they let through, against the same expression in Python; what cannot be read is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import sacts
from hypothesis import given
from hypothesis import strategies as st

from sacts.matrices import tiers
from sacts.matrices.filters import FilterError, parse
from sacts.reports import records

SMOKE, TERMS = (tiers.load(tiers.path_of(tier)) for tier in ("smoke", "terms"))
CELLS = SMOKE + TERMS

# Each comparison as a filter, and the same in Python.
COMPARISONS = {
    "phase=decode": "c.phase == 'decode'",
    "dtype != bf16": "c.dtype != 'bf16'",
    "splits>1": "c.splits > 1",
    "kv >= 100": "max(c.kv) >= 100",
    "q<3": "max(c.q, default=0) < 3",
    "heads=4-2": "c.heads == (4, 2)",
    "kv=90+50": "c.kv == (90, 50)",
    "window<=-1": "c.window <= -1",
    "pos=rope-interleaved": "c.pos == 'rope-interleaved'",
}
LEAVES = st.sampled_from(sorted(COMPARISONS)).map(lambda text: (text, f"({COMPARISONS[text]})"))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda x: (f"({x[0][0]}) {x[1]} ({x[2][0]})", f"({x[0][1]} {x[1]} {x[2][1]})")
        ),
        inner.map(lambda x: (f"not ({x[0]})", f"(not {x[1]})")),
    ),
    max_leaves=6,
)


@given(TREES)
def test_a_filter_is_the_same_expression_in_python(tree: tuple[str, str]) -> None:
    keep = parse(tree[0])
    assert [keep(c) for c in CELLS] == [eval(tree[1], {"c": c, "max": max}) for c in CELLS]


def test_and_binds_closer_than_or_and_not_closest() -> None:
    keep = parse("dtype=fp16 or dtype=bf16 and not splits>1")
    assert [keep(c) for c in CELLS] == [c.dtype == "fp16" or (c.dtype == "bf16" and c.splits <= 1) for c in CELLS]
    assert all(map(parse(""), CELLS))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("splts>1", "'splts' in 'splts>1' is no axis; did you mean 'splits'?"),
        ("pattern=al", "axis pattern has no value 'al'; did you mean 'all'?"),
        ("pattern>all", "axis pattern has no order: compare it by = or !="),
        ("splits>many", "axis splits is compared with a number, got 'many'"),
        ("splits>", "axis splits is compared with a number, got 'nothing'"),
        ("splits", "expected =, !=, <, <=, > or >= after splits in 'splits', got 'the end'"),
        ("(splits>1", "expected ) before the end"),
        ("splits>1 dtype=fp16", "'dtype' is left over"),
        ("splits>1 & dtype=fp16", "cannot read '& dtype=fp16'"),
        ("not", "'' in 'not' is no axis"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, words: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_the_matrix_is_looked_at_through_filters(tmp_path: Path) -> None:
    listed = sacts(tmp_path, "matrix", "list", "--where", "splits=8 and dtype=bf16").stdout.split()
    assert listed == [c.id for c in SMOKE if c.splits == 8 and c.dtype == "bf16"]
    counted = sacts(tmp_path, "matrix", "count", "--where", "splits=8").stdout
    assert counted.startswith(f"{sum(c.splits == 8 for c in SMOKE)} cells\n")
    shown = json.loads(sacts(tmp_path, "matrix", "show", listed[0], "--json").stdout)
    assert (shown["dtype"], shown["splits"], shown["heads"]) == ("bf16", "8", "4-2")
    (tmp_path / "few.cells").write_text("\n".join(listed) + "\n")
    (tmp_path / "more.cells").write_text("\n".join([*listed[1:], "decode/fp16/kv:3"]) + "\n")
    same = sacts(tmp_path, "matrix", "diff", "few.cells", "few.cells")
    assert (same.returncode, same.stdout) == (records.EXIT_ACCEPTED, "the same cells\n")
    other = sacts(tmp_path, "matrix", "diff", "few.cells", "more.cells")
    assert (other.returncode, other.stdout) == (records.EXIT_FAILURES, f"- {listed[0]}\n+ decode/fp16/kv:3\n")


def test_the_status_of_each_cell_is_what_support_says(tmp_path: Path) -> None:
    said = json.loads(sacts(tmp_path, "matrix", "status", "-a", "sdpa", "-t", "terms", "--json").stdout)
    assert list(said) == [c.id for c in TERMS]
    assert all(status.startswith("refused(not yet") or status == "fallback(dense)" for status in said.values())
    rope = [status for cell, status in said.items() if "pos:rope" in cell]
    assert "refused(not yet: rope)" in rope
    assert all(status.startswith("refused(not yet: ") for status in rope)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--where", "splits>99"], "no cell of smoke.cells matches --where 'splits>99'"),
        (["run", "decode/fp16/kv:3", "--where", "splits>1"], "--where and --model narrow a tier"),
        (["matrix", "list", "--where", "splits"], "expected =, !="),
        (["matrix", "status", "-a", "nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_bad_usage_exits_2_and_says_what_is_valid(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = sacts(tmp_path, *arguments)
    assert done.returncode == records.EXIT_USAGE
    assert words in done.stderr


def test_where_narrows_a_run_and_its_shards(tmp_path: Path) -> None:
    where = ["--where", "dtype=fp16 and splits=1 and kv<20", "-a", "sdpa", "-n", "1"]
    wanted = {c.id for c in SMOKE if c.dtype == "fp16" and c.splits == 1 and max(c.kv) < 20}
    for n in (1, 2):
        done = sacts(tmp_path, "run", *where, "--shard", f"{n}/2", "--report", f"p{n}")
        assert done.returncode == 0, done.stderr
    done = sacts(tmp_path, "report", "merge", "p1", "p2", "--report", "whole")
    assert done.returncode == 0, done.stderr
    assert {record.cell for record in records.read(tmp_path / "whole" / "records.jsonl")} == wanted
