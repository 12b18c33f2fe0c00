"""Cells and their ids, tier files, and what the smoke tier must contain."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings

from sacts.conformance.build import build
from sacts.conformance.tensors import SPANNED
from sacts.kernels_under_test.paged.limits import programs_of
from sacts.matrices import tiers
from sacts.matrices.axes import AXES
from sacts.matrices.cell import Cell, CellError, parse
from sacts.matrices.strategies import cells
from sacts.reference.spec import DType, Route

ANY = cells(cost=math.inf, stretch=3000)  # of any size
SMOKE = tiers.load(tiers.path_of("smoke"))
ALPHABET = re.compile(r"[A-Za-z0-9_:+./-]+")


def is_id_of(cell: Cell) -> bool:
    return parse(cell.id) == cell and ALPHABET.fullmatch(cell.id) is not None


@pytest.mark.parametrize("cell", SMOKE, ids=lambda cell: cell.id)
def test_a_smoke_cell_is_what_its_id_says(cell: Cell) -> None:
    assert is_id_of(cell)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ANY)
def test_any_cell_is_what_its_id_says(cell: Cell) -> None:
    assert is_id_of(cell)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ANY, ANY)
def test_two_cells_never_share_an_id(a: Cell, b: Cell) -> None:
    assume(a != b)
    assert a.id != b.id


def test_every_axis_shows_in_the_id() -> None:
    base = parse("prefill/fp16/kv:40/q:3")
    coded = replace(base, kcodec="fp8_e5m2", vcodec="int4")
    changes: dict[str, object] = {
        "phase": "decode", "dtype": "bf16", "kv": (41,), "q": (4,), "heads": (8, 2), "dim": 128, "vdim": 128, "page": 1,
        "block": 2,
        "pattern": "all", "map": "high", "cache": "span", "causal": "bottom_right", "window": 0, "splits": 2,
        "tile": 16, "values": "huge", "pos": "rope", "cap": 30, "sink": "on", "dropout": 25, "kind": "multiset",
        "empty": "force_self", "kcodec": "int8", "vcodec": "int8", "scales": "page", "steps": "power_of_two",
        "zeros": "on", "epilogue": "cast", "exec": "reuse", "qtile": 4, "schedule": "persistent", "route": "gather",
        "format": "tiers", "qblock": 4, "fallback": "dense", "reduction": "hybrid",
        "lists": "query_head", "branches": 3,
    }  # fmt: skip
    assert list(changes) == [axis.name for axis in AXES]
    decode = Cell(str(changes.pop("phase")), "fp16", (40,))
    train = replace(base, phase="train")
    bases = {**dict.fromkeys(("scales", "steps", "zeros"), coded), "reduction": train}
    changed = [
        replace(bases.get(name, base), **{name: value})  # type: ignore[arg-type]
        for name, value in changes.items()
    ]
    assert len({cell.id for cell in (base, decode, *changed)}) == len(AXES) + 1


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("decode/fp16/kv:17/page:16", "decode/fp16/kv:17"),
        ("decode/fp16/tile:32/kv:17", "decode/fp16/kv:17/tile:32"),
        ("decode/fp16/kv:017", "decode/fp16/kv:17"),
        ("decode/fp16/kv: 17", "decode/fp16/kv:17"),
        ("decode/fp16/kv:1_7", "decode/fp16/kv:17"),
        ("decode/fp16/kv:17/window:-1", "decode/fp16/kv:17"),
        ("decode/fp16/kv:17/pattern:scattered", "decode/fp16/kv:17"),
        ("decode/fp16/kv:١٧", "decode/fp16/kv:17"),
    ],
)
def test_a_text_that_is_not_canonical_is_refused_with_the_one_that_is(text: str, canonical: str) -> None:
    with pytest.raises(CellError) as caught:
        parse(text)
    assert str(caught.value).endswith(f"write {canonical}")
    assert parse(canonical).id == canonical


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decod/fp16/kv:17", ("axis phase", "'decode'", "prefill")),
        ("decode/pf16/kv:17", ("axis dtype", "'fp16'", "bf16", "fp32")),
        ("decode/fp16/kv:17/patern:all", ("'patern:all'", "'pattern'")),
        ("decode/fp16/kv:17/pattern:scatered", ("axis pattern", "'scattered'", "clustered")),
        ("decode/fp16/kv:17/map:hi", ("axis map", "'high'", "random")),
        ("prefill/fp16/kv:17/q:2/causal:bottom-right", ("axis causal", "'bottom_right'")),
        ("decode/fp16/kv:17/values:hug", ("axis values", "'huge'")),
        ("decode/fp16/kv:17/window:x", ("axis window", "integers", "'x'")),
        ("decode/fp16/kv:17/window:-2", ("axis window", "from -1", "-2")),
        ("decode/fp16/kv:17/splits:0", ("axis splits", "from 1", "got 0")),
        ("decode/fp16/kv:-1", ("axis kv", "from 0")),
        ("decode/fp16/kv:17/map:high/cache:span", ("map:high needs cache:contiguous",)),
        ("decode/fp16/kv:17/map:shared", ("map:shared needs two requests",)),
        ("decode/fp16/kv:1700/pattern:case64k", ("pattern:case64k needs page:16 and block:16",)),
        ("decode/fp16/kv:17+", ("axis kv", "'17+'")),
        ("decode/fp16/kv:17/heads:4", ("axis heads", "got 4")),
        ("decode/fp16/kv:17/tile:32/tile:32", ("axis tile", "twice")),
        ("decode/fp16/page:64", ("axis kv",)),
        ("decode/fp16/kv", ("'kv'", "no axis", "kv")),
        ("smoke", ("no cell id", "decode/fp16/kv:17")),
        ("decode/fp16/kv:17/q:1", ("axis q", "prefill")),
        ("prefill/fp16/kv:17", ("axis q", "as many requests")),
        ("prefill/fp16/kv:17/q:1+2", ("axis q", "as many requests")),
        ("decode/fp16/kv:128/pattern:example", ("map:example",)),
        ("decode/fp16/kv:128/map:example", ("page:64",)),
    ],
)
def test_a_text_that_names_no_cell_says_what_is_wrong_and_what_is_near(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(CellError) as caught:
        parse(text)
    assert [word for word in words if word not in str(caught.value)] == []


def test_heads_that_do_not_divide_name_no_cell() -> None:
    with pytest.raises(CellError, match="heads"):
        parse("decode/fp16/kv:17/heads:3-2")


# --- tier files


def written(folder: Path, text: str) -> Path:
    path = folder / "own.cells"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_tier_file_keeps_its_order_and_ignores_comments_and_blank_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "# head\n\ndecode/fp16/kv:17  # why\n  decode/bf16/kv:1\n")
    assert [cell.id for cell in tiers.load(path)] == ["decode/fp16/kv:17", "decode/bf16/kv:1"]
    assert tiers.path_of(str(path)) == path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# head\ndecode/fp16/kv:1\n\ndecode/fp16/kv:1\n", ("own.cells line 4", "kv:1", "already in line 2")),
        ("decode/fp16/kv:1\ndecode/fp16/kv:1/pge:16\n", ("own.cells line 2", "'pge:16'", "'page'")),
        ("decode/fp16/kv:1\n\ndecode/fp16/kv:2/page:16\n", ("own.cells line 3", "write decode/fp16/kv:2")),
        ("decode/fp16/kv:1 decode/fp16/kv:2\n", ("own.cells line 1",)),
        ("decode/fp16/kv:1\ninclude smok\n", ("own.cells line 2", "no tier 'smok'", "'smoke'")),
        ("include OWN\n", ("own.cells line 1", "includes itself")),
        ("include BROKEN\n", ("broken.cells line 1", "'dcode'")),
        ("# nothing\n", ("own.cells names no cell",)),
    ],
)
def test_a_bad_tier_file_names_the_line(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    broken = tmp_path / "broken.cells"
    broken.write_text("dcode/fp16/kv:1\n")
    text = text.replace("BROKEN", str(broken)).replace("OWN", str(tmp_path / "own.cells"))
    with pytest.raises(tiers.TierError) as caught:
        tiers.load(written(tmp_path, text))
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_tier_includes_another_and_has_each_cell_once(tmp_path: Path) -> None:
    text = f"{SMOKE[3].id}\ninclude smoke\ndecode/fp16/kv:3\n"
    rest = [cell for cell in SMOKE if cell != SMOKE[3]]
    assert tiers.load(written(tmp_path, text)) == [SMOKE[3], *rest, parse("decode/fp16/kv:3")]


def test_the_release_tier_holds_nightly_and_the_64k_case_with_and_without_splits() -> None:
    release, nightly, long = (set(tiers.load(tiers.path_of(name))) for name in ("release", "nightly", "long"))
    assert nightly | long < release
    whole = [cell for cell in release if cell.pattern == "case64k" and max(cell.kv) == 65536]
    assert {cell.splits for cell in whole} == {1, 4}


def test_the_release_tier_has_long_rows_and_caches_that_press_on_memory() -> None:
    release = tiers.load(tiers.path_of("release"))
    rows = {cell.schedule for cell in release if max(cell.kv) >= 16384 and cell.pattern in ("all", "scattered")}
    assert {"static", "shuffled", "persistent"} <= rows
    spans = [2 * SPANNED * (4 if cell.dtype == "fp32" else 2) for cell in release if cell.cache == "span"]
    assert max(spans) >= 32 * 2**30, "bytes of K and V"


@pytest.mark.parametrize("processors", [108, 132, 148, 160, 304])
def test_the_release_tier_has_more_tasks_than_processors_and_some_left_over(processors: int) -> None:
    stay = [cell for cell in tiers.load(tiers.path_of("release")) if cell.schedule == "persistent"]
    tasks = max(sum(cell.q) * cell.heads[1] for cell in stay)
    assert tasks > 2 * processors
    assert tasks % processors, "left over"


def test_the_release_tier_has_lists_of_more_heads_than_one_program_serves() -> None:
    cells = [cell for cell in tiers.load(tiers.path_of("release")) if cell.heads == (128, 1)]
    specs = [build(cell).spec for cell in cells if cell.dim == 576]
    assert {spec.dtype for spec in specs} == {DType.BF16, DType.FP32}
    assert all(programs_of(spec, Route.DIRECT) > 1 for spec in specs)


@pytest.mark.parametrize("name", ["smok", "smoek", "Smoke"])
def test_an_unknown_tier_suggests_the_nearest(name: str) -> None:
    with pytest.raises(tiers.TierError, match=f"no tier '{name}'; did you mean 'smoke'"):
        tiers.path_of(name)


def test_a_tier_that_is_like_no_other_lists_them_all() -> None:
    with pytest.raises(tiers.TierError, match=r"no tier 'zzz'; tiers: .*smoke") as caught:
        tiers.path_of("zzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", tiers.names())
def test_every_shipped_tier_loads(name: str) -> None:
    assert tiers.load(tiers.path_of(name))


# --- the smoke tier


def having(**axes: object) -> Callable[[Cell], bool]:
    return lambda cell: all(getattr(cell, name) == value for name, value in axes.items())


DEMANDED: dict[str, Callable[[Cell], bool]] = {
    **{f"T = {t} at page 16": having(kv=(t,), page=16) for t in (1, 15, 16, 17)},
    **{f"pattern {name}": having(pattern=name) for name in ("empty", "one", "all", "duplicates", "union")},
    "a scattered block list": lambda c: c.block > 1 and c.pattern == "scattered",
    "a clustered block list": lambda c: c.block > 1 and c.pattern == "clustered",
    "a block that is not the page": lambda c: c.block > 1 and c.block != c.page,
    "a partial tail block": lambda c: c.block > 1 and any(t % c.block for t in c.kv),
    "random pages over several": lambda c: c.map == "random" and max(c.kv) > 4 * c.page,
    "high pages": having(map="high"),
    "one long and two short requests": lambda c: len(c.kv) == 3 and sorted(c.kv)[2] > 10 * sorted(c.kv)[1] > 0,
    "a request without KV": lambda c: 0 in c.kv,
    "GQA 4": having(heads=(8, 2)),
    "causal prefill of several queries": lambda c: c.causal == "bottom_right" and max(c.qo_lens) > 1,
    "more queries than keys": lambda c: any(q > t for q, t in zip(c.qo_lens, c.kv, strict=True)),
    "a window": lambda c: 0 <= c.window < max(c.kv),
    "one split over several tiles": lambda c: c.splits == 1 and c.pattern == "all" and max(c.kv) > c.tile,
    "8 splits": having(splits=8),
    "huge logits": having(values="huge"),
    "equal logits": having(values="equal"),
    **{f"dtype {dtype}": having(dtype=dtype.value) for dtype in DType},
    "a run on other contents before": having(exec="reuse"),
    "the example of six candidates": having(pattern="example"),
}


@pytest.mark.parametrize("demand", DEMANDED)
def test_the_smoke_tier_contains(demand: str) -> None:
    assert any(DEMANDED[demand](cell) for cell in SMOKE)


def test_the_smoke_tier_has_at_least_12_cells() -> None:
    assert len(SMOKE) >= 12
