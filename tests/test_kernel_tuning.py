"""The dispatch rule: what is taken where a case leaves tiles and splits to the bundled kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernel_tasks import case_of

from sacts.conformance.adapter import Backend
from sacts.conformance.build import build
from sacts.kernels_under_test.paged import adapter, tuning
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.paged.limits import k_late, v_late
from sacts.kernels_under_test.paged.tuning import (
    ANYWHERE,
    LEAST_PART,
    MEASURED,
    MOST_PARTS,
    Work,
    chosen,
    splits_of,
    tile_for,
)
from sacts.matrices.cell import parse
from sacts.reference.spec import AttentionSpec, CandidateKind, DType, Hints, Route

HERE = MEASURED[0].architecture, MEASURED[0].compiler
PLAIN = "decode/bf16/kv:60+40/dim:128"


def spec_of(cell: str) -> AttentionSpec:
    return build(parse(cell)).spec


@pytest.mark.parametrize(
    ("cell", "work"),
    [
        (PLAIN, Work.DECODE),
        ("prefill/bf16/kv:60+40/q:3+2/dim:128", Work.PREFILL),
        ("decode/bf16/kv:60+40/dim:128/kcodec:int8/vcodec:int8/scales:page", Work.CODES),
        ("decode/bf16/kv:60+40/dim:128/kcodec:fp8_e4m3fn/vcodec:fp8_e4m3fn/scales:head", Work.CODES),
    ],
)
def test_what_was_measured_is_taken_there_and_nowhere_else(cell: str, work: Work) -> None:
    spec = spec_of(cell)
    assert tile_for(spec, *HERE) is MEASURED[0].tiles[work]
    for architecture, compiler in (((8, 0), HERE[1]), (None, HERE[1]), (HERE[0], "3.7")):
        assert tile_for(spec, architecture, compiler) is ANYWHERE


@pytest.mark.parametrize(
    "cell",
    [
        "decode/fp32/kv:60+40/dim:128",
        "decode/bf16/kv:60+40",
        "decode/bf16/kv:60+40/dim:192/vdim:128",
        "decode/bf16/kv:60+40/dim:128/pos:rope",
        "decode/bf16/kv:60+40/dim:128/kcodec:int8/vcodec:int8/scales:page_channel",
        "decode/bf16/kv:60+40/dim:128/kcodec:int4/vcodec:int4/scales:page/zeros:on",
        "decode/fp16/kv:60+40/dim:128/vcodec:fp8_e4m3fn/scales:page",
        "decode/bf16/kv:60+40/dim:128/kcodec:int4/vcodec:int4/scales:page",
        "decode/bf16/kv:60+40/dim:128/kcodec:int8/scales:page",
        "decode/bf16/kv:60+40/dim:128/kcodec:int8/vcodec:fp8_e4m3fn/scales:page",
        "decode/bf16/kv:60+40/dim:128/kcodec:fp8_e5m2/vcodec:fp8_e5m2/scales:page",
        "decode/bf16/kv:60+40/dim:81/kcodec:int8/vcodec:int8/scales:page",
    ],
)
def test_what_was_not_measured_gets_the_default(monkeypatch: pytest.MonkeyPatch, cell: str) -> None:
    monkeypatch.setattr(tuning, "here", lambda device: HERE)
    assert chosen(case_of(cell, Hints(kv_tile=0))).tile is ANYWHERE


def test_codes_that_cannot_be_read_as_words_get_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "here", lambda device: HERE)
    case = case_of("decode/bf16/kv:60+40/dim:128/kcodec:int8/vcodec:int8/scales:page", Hints(kv_tile=0))
    assert chosen(case).tile is MEASURED[0].tiles[Work.CODES]
    apart = torch.zeros(*case.v_cache.shape[:3], 129, dtype=torch.int8)[..., 1:]
    assert chosen(replace(case, v_cache=apart)).tile is ANYWHERE


@pytest.mark.parametrize(
    ("cell", "together", "apart"),
    [
        ("prefill/bf16/kv:200+40/q:3+2/dim:128/page:256/block:128", Work.COPIED, Work.COPIED_APART),
        ("prefill/bf16/kv:200+40/q:3+2/dim:128/page:256/block:64", Work.PREFILL, Work.COPIED_APART),
        ("prefill/bf16/kv:200+40/q:3+2/dim:128/page:256/block:32", Work.PREFILL, Work.PREFILL),
        ("prefill/bf16/kv:200+40/q:3+2/dim:128/page:128/block:128", Work.PREFILL, Work.PREFILL),
        ("decode/bf16/kv:2000+40/dim:128/page:2048/block:128/pattern:all", Work.DECODE, Work.DECODE),
    ],
)
def test_values_in_one_piece_get_the_tiles_of_copies(
    monkeypatch: pytest.MonkeyPatch, cell: str, together: Work, apart: Work
) -> None:
    monkeypatch.setattr(tuning, "here", lambda device: HERE)
    monkeypatch.setattr(tuning, "processors", lambda device: 1)
    monkeypatch.setattr(tuning, "copies", lambda device: True)
    case, tiles = case_of(cell, Hints(kv_tile=0)), MEASURED[0].tiles
    choice = chosen(case)
    assert [choice.tile_of(q_tile) for q_tile in (2, 1)] == [tiles[together], tiles[apart]]
    odd = torch.zeros(case.k_cache.numel() + 1, dtype=case.k_cache.dtype)[1:].view(case.k_cache.shape)
    loaded = tiles[Work.DECODE if together is Work.DECODE else Work.PREFILL]
    choice = chosen(replace(case, k_cache=odd))
    assert [choice.tile_of(q_tile) for q_tile in (2, 1)] == [loaded, loaded]
    monkeypatch.setattr(tuning, "copies", lambda device: False)
    assert chosen(case).tile_of(2) == loaded


@pytest.mark.parametrize(("pattern", "work"), [("all", Work.COPIED), ("scattered", Work.COPIED_APART)])
def test_rows_are_cut_and_launched_for_the_queries_that_share_them(
    monkeypatch: pytest.MonkeyPatch, pattern: str, work: Work
) -> None:
    monkeypatch.setattr(tuning, "here", lambda device: HERE)
    monkeypatch.setattr(tuning, "copies", lambda device: True)
    cell = f"prefill/bf16/kv:2000/q:8/dim:128/page:2048/block:128/pattern:{pattern}"
    case, tile = case_of(cell.replace("/pattern:scattered", ""), Hints(kv_tile=0, q_tile=0)), MEASURED[0].tiles[work]
    plan, given = Adapter().plan(case), {}
    assert (plan.tasks.tile, plan.tasks.q_tile > 1) == (tile.kv_tile, pattern == "all")
    monkeypatch.setattr(adapter, "launch_with", lambda memory, kernel, grid, *rest, **named: given.update(named))
    space = torch.empty(Adapter().workspace_bytes(case), dtype=torch.uint8)
    Adapter().run(replace(case, workspace=space), plan)
    assert tile.options.items() <= given.items()


def test_programs_that_have_a_processor_each_take_larger_tiles() -> None:
    spec, codes = spec_of(PLAIN), spec_of("decode/bf16/kv:60+40/dim:128/kcodec:int8/vcodec:int8/scales:page")
    assert tile_for(spec, *HERE, alone=True) is MEASURED[0].tiles[Work.ALONE]
    assert tile_for(codes, *HERE, alone=True) is MEASURED[0].tiles[Work.CODES]


@pytest.mark.parametrize(("num_splits", "alone"), [(1, True), (2, True), (3, False)])
def test_how_many_programs_there_are_follows_from_lists_and_splits(
    monkeypatch: pytest.MonkeyPatch, num_splits: int, alone: bool
) -> None:
    case = case_of("decode/bf16/kv:300+9/dim:128/pattern:all", Hints(num_splits=num_splits, kv_tile=0))
    monkeypatch.setattr(tuning, "processors", lambda device: 2 * case.spec.num_lists)
    monkeypatch.setattr(tuning, "here", lambda device: HERE)
    assert chosen(case).tile is MEASURED[0].tiles[Work.ALONE if alone else Work.DECODE]


@pytest.mark.parametrize(("route", "work"), [(Route.DIRECT, Work.ALONE), (Route.GATHER_HEADS, Work.DECODE)])
def test_programs_that_share_a_task_are_counted(monkeypatch: pytest.MonkeyPatch, route: Route, work: Work) -> None:
    case = case_of("decode/bf16/kv:300+9/dim:128/pattern:all", Hints(kv_tile=0, route=route))
    monkeypatch.setattr(tuning, "processors", lambda device: case.spec.num_lists)
    monkeypatch.setattr(tuning, "here", lambda device: HERE)
    assert chosen(case).tile is MEASURED[0].tiles[work]


def test_parts_count_as_far_as_slots_fill_them() -> None:
    spec = spec_with((65536,))
    splits, part = splits_of(spec, spec.num_lists * 264, programs=396)
    assert part == LEAST_PART and splits > 264 * 16 // LEAST_PART
    tasks = tuning.most_tasks(spec, spec.num_lists * 264, splits, part)
    assert spec.num_lists * -(-264 * 16 // LEAST_PART) <= tasks < spec.num_lists * 15


def test_a_decode_of_more_heads_than_were_measured_gets_the_default() -> None:
    spec = replace(spec_of(PLAIN), num_qo_heads=17, num_kv_heads=1)
    assert tile_for(spec, *HERE) is ANYWHERE
    assert tile_for(replace(spec, num_qo_heads=16), *HERE) is MEASURED[0].tiles[Work.DECODE]


@pytest.mark.parametrize(
    ("cell", "k", "v"),
    [
        ("decode/bf16/kv:60/kcodec:int8/vcodec:int8/scales:page", True, True),
        ("decode/fp16/kv:60/kcodec:int8/vcodec:int8/scales:page", True, False),  # P times a small scale
        ("decode/fp16/kv:60/pos:rope/kcodec:fp8_e5m2/vcodec:fp8_e5m2", False, False),  # the sum of two codes
        ("decode/bf16/kv:60/kcodec:int8/vcodec:int8/scales:channel", False, False),
        ("decode/bf16/kv:60/kcodec:int4/vcodec:int4/scales:page/zeros:on", False, False),
        ("decode/bf16/kv:60", False, False),
    ],
)
def test_codes_are_scaled_behind_the_product_where_its_operands_hold_them(cell: str, k: bool, v: bool) -> None:
    spec = spec_of(cell)
    assert (k_late(spec), v_late(spec)) == (k, v)


def spec_with(seq_lens: tuple[int, ...], queries: int = 1, block_size: int = 16) -> AttentionSpec:
    spec = spec_of(PLAIN)
    return replace(spec, seq_lens=seq_lens, qo_lens=(queries,) * len(seq_lens), block_size=block_size)


def test_few_rows_are_split_and_many_are_not() -> None:
    one, many = spec_with((65536,)), spec_with((65536,) * 512)
    heads = one.list_heads
    splits, part = splits_of(one, heads * 264, programs=396)
    assert part == LEAST_PART and splits == -(-heads * 264 * 16 // LEAST_PART) < MOST_PARTS
    assert splits_of(one, heads * 4096, programs=396) == (MOST_PARTS, heads * 65536 // 396)
    splits, part = splits_of(many, 512 * heads * 264, programs=396)
    assert part > 264 * 16


def test_a_row_of_many_times_the_mean_is_split_however_many_rows_there_are() -> None:
    spec = spec_with((65536,) + (8192,) * 511)
    entries = spec.list_heads * (800 * 4 + 511 * 32 * 4)
    splits, part = splits_of(spec, entries, programs=396)
    mean = entries * 16 / spec.num_lists
    assert mean < part <= 2 * mean and splits >= 800 * 64 // part


def test_a_sequence_has_no_more_parts_than_its_context_holds() -> None:
    """However many entries the lists of all rows have: no list names an entry twice."""
    spec = replace(spec_with((4096,) * 512, block_size=1), candidate_kind=CandidateKind.SEQUENCE)
    splits, part = splits_of(spec, spec.num_lists * 512, programs=396)
    assert splits == -(-4096 // part)


def test_rows_of_many_queries_are_not_split() -> None:
    assert splits_of(spec_with((16384,), queries=16384), 16384 * 2 * 128, programs=396) == (1, 1)


def test_hints_stand_where_they_are_given() -> None:
    hints = Hints(num_splits=3, kv_tile=32, q_tile=2)
    choice = chosen(case_of("prefill/bf16/kv:60+40/q:3+2/dim:128", hints))
    assert (choice.num_splits, choice.tile.kv_tile, choice.q_tile, choice.asked) == (3, 32, 2, True)
    assert choice.tile.options == {}


def test_the_workspace_of_a_choice_is_that_of_the_hints_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_PART", 16)
    cell = "decode/bf16/kv:300+9/pattern:all"
    case = case_of(cell, Hints(num_splits=0, kv_tile=0, q_tile=0))
    splits = chosen(case).num_splits
    assert splits > 1
    assert Adapter().workspace_bytes(case) == Adapter().workspace_bytes(case_of(cell, Hints(num_splits=splits)))
    plan = Adapter().plan(case)
    assert 1 < int(plan.tasks.parts.max()) <= splits
    assert torch.equal(plan.tasks.columns.row.unique(), torch.arange(case.spec.num_lists))


@pytest.mark.parametrize(("num_splits", "splits"), [(0, True), (1, False), (2, True)])
def test_a_backend_that_may_choose_splits_is_judged_as_one_that_splits(num_splits: int, splits: bool) -> None:
    assert Backend(Adapter()).numerics(DType.BF16, Hints(num_splits=num_splits)).splits is splits
