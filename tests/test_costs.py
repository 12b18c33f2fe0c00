"""Costs against counting one by one; the worked numbers are in test_worked_numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference import costs
from sacts.reference.candidates import CandidateLists, expand, validate
from sacts.reference.costs import PageReuse
from sacts.reference.paging import PageTable
from sacts.reference.spec import (
    AttentionSpec,
    Codec,
    CodecFormat,
    DType,
    EmptyRowRule,
    Hints,
    Route,
    ScaleGranularity,
)

Rows = list[list[int]]
fast = settings(max_examples=100, deadline=None, derandomize=True)
rows_of_entries = st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=5)


def lists(rows: Rows) -> CandidateLists:
    return CandidateLists(np.cumsum([0, *map(len, rows)]), np.array([x for row in rows for x in row], np.int64))


@fast
@given(rows_of_entries, st.integers(1, 9), st.integers(1, 9), st.integers(0, 60))
def test_tiles_are_counted_as_sets_of_tokens_count_them(rows: Rows, entry: int, kv_tile: int, limit: int) -> None:
    tiles = costs.kv_tiles(lists(rows), entry, kv_tile, limit)
    filled = []
    for row in rows:
        tokens = {e * entry + i for e in row for i in range(entry) if e * entry + i < limit}
        filled.append({tile: sum(t // kv_tile == tile for t in tokens) for tile in {t // kv_tile for t in tokens}})
    found = [
        dict(zip(tiles.indices[a:b].tolist(), tiles.filled[a:b].tolist(), strict=True))
        for a, b in pairwise(tiles.indptr.tolist())
    ]
    assert found == filled
    assert tiles.slots == kv_tile * sum(map(len, filled))
    assert 0 < tiles.efficiency <= 1


SPEC = AttentionSpec(
    num_qo_heads=6,
    num_kv_heads=2,
    head_dim_qk=24,
    head_dim_vo=16,
    page_size=4,
    seq_lens=(11, 0, 5),
    qo_lens=(1, 0, 2),
    dtype=DType.FP32,
    sm_scale=1.0,
    block_size=4,
)
TABLE = PageTable(
    np.array([[0, 1, 2], [9, 9, 9], [3, 4, 9]]), 4, 9, (frozenset({0, 1, 2}), frozenset(), frozenset({3, 4}))
)


def test_the_work_of_a_call_is_the_sum_over_its_rows() -> None:
    candidates = validate(SPEC, lists([[2, 0], [1], [], [1, 0], [1], [0]]), TABLE)
    found = costs.work(SPEC, Hints(num_splits=3, kv_tile=8), candidates)
    row, _, _ = expand(SPEC, candidates)
    assert found.attended == len(row) == (4 + 3) + 4 + 0 + 5 + 1 + 4
    assert found.slots == 8 * (2 + 1 + 0 + 1 + 1 + 1)
    per_token = (24 + 16) * 4
    assert (found.kv, found.tile_kv) == (21 * per_token, 48 * per_token)
    assert found.dense_kv == (11 + 5 + 5) * 2 * per_token
    assert (found.flops, found.tile_flops) == (21 * 2 * 40 * 3, 48 * 2 * 40 * 3)
    assert found.indices == 7 * 4
    assert found.partials == (3 * 3 * 6 * 16 * 4, 3 * 3 * 6 * 2 * 4)
    assert found.efficiency == 21 / 48
    half = costs.work(replace(SPEC, dtype=DType.BF16), Hints(kv_tile=8), candidates)
    assert half.kv == found.kv / 2
    coded = replace(SPEC, k_codec=Codec(CodecFormat.INT4), v_codec=Codec(CodecFormat.FP8_E5M2))
    assert costs.work(coded, Hints(kv_tile=8), candidates).kv == 21 * (24 / 2 + 16)


@pytest.mark.parametrize("name", ["kv_tile", "num_splits"])
def test_what_is_left_to_a_backend_has_no_cost(name: str) -> None:
    hints = Hints(**{name: 0})
    candidates = validate(SPEC, lists([[2, 0], [1], [], [1, 0], [1], [0]]), TABLE)
    with pytest.raises(ValueError, match=f"hint {name} is 0, which leaves it to the backend"):
        costs.work(SPEC, hints, candidates)
    if name == "num_splits":
        with pytest.raises(ValueError, match="hint num_splits is 0"):
            costs.workspace_bytes(SPEC, hints, 7)


def test_a_workspace_holds_partial_states_and_scratch() -> None:
    direct, shared, heads = Route.DIRECT, Route.GATHER, Route.GATHER_HEADS
    assert costs.workspace_bytes(SPEC, Hints(num_splits=1), 7) == 0
    partials = sum(1 for _ in range(3 * 6 * 2) for _ in range(16 + 1 + 1)) * 4  # token x head x split, of o, m and l
    assert costs.workspace_bytes(SPEC, Hints(num_splits=2, route=direct), 7) == partials
    slots = 7 * 4
    k, v = slots * 24 * 4, slots * 16 * 4
    assert costs.workspace_bytes(SPEC, Hints(route=shared), 7) == k + v
    assert costs.workspace_bytes(SPEC, Hints(num_splits=2, route=heads), 7) == partials + 3 * (k + v)
    forced = replace(SPEC, empty_row=EmptyRowRule.FORCE_SELF)
    assert costs.workspace_bytes(forced, Hints(route=shared), 7) == (7 + 3 * 2) * 4 * (24 + 16) * 4
    three = replace(SPEC, num_branches=3)
    rows = 3 * 3 * 6  # branch x token x head, each with out and lse
    assert costs.workspace_bytes(three, Hints(), 7) == rows * (16 + 1) * 4
    assert costs.workspace_bytes(three, Hints(num_splits=2, route=shared), 7) == rows * 17 * 4 + 3 * partials + k + v
    several = replace(forced, num_branches=3)
    assert costs.workspace_bytes(several, Hints(route=shared), 7) == rows * 17 * 4 + (7 + 3 * 3 * 2) * 4 * (24 + 16) * 4
    odd = replace(SPEC, head_dim_qk=5, head_dim_vo=5, k_codec=Codec(CodecFormat.INT4), v_codec=Codec(CodecFormat.INT8))
    assert costs.workspace_bytes(odd, Hints(route=shared), 7) == 96 + 144  # 28 x 3 and 28 x 5 bytes, to multiples of 16


def test_a_call_that_loads_nothing_wastes_nothing() -> None:
    found = costs.work(SPEC, Hints(), validate(SPEC, lists([[]] * 6), TABLE))
    assert (found.attended, found.slots, found.kv, found.efficiency) == (0, 0, 0, 1.0)


@fast
@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=40),
    st.sampled_from((1, 2, 16, 48, 200)),
    st.sampled_from((32, 128)),
)
def test_lines_are_counted_as_sets_of_bytes_count_them(addresses: list[int], item: int, line: int) -> None:
    touched = {(a + i) // line for a in addresses for i in range(item)}
    assert costs.transaction_bytes(addresses, item, line) == len(touched) * line
    assert costs.transaction_efficiency(addresses, item, line) == len(set(addresses)) * item / (len(touched) * line)


@fast
@given(*[st.integers(1, 50)] * 4, st.integers(0, 5))
def test_break_even_is_the_first_use_at_which_a_gather_is_faster(
    direct: int, write: int, read: int, kv: int, launch: int
) -> None:
    found = costs.break_even_uses(kv, direct=direct, source=direct, write=write, read=read, launch=launch)

    def faster(uses: int) -> float:
        return costs.direct_time(kv, uses, direct) - costs.gather_time(kv, uses, direct, write, read, launch)

    if found is None:
        assert read <= direct
        assert faster(10**6) <= 0
    else:
        assert found >= 1
        assert faster(found) > -1e-9
        assert found == 1 or faster(found - 1) <= 1e-9


def test_a_roof_is_the_longer_of_computing_and_moving() -> None:
    assert costs.roofline_time(1e12, 1e9, 686e12, 4.27e12) == 1e12 / 686e12
    assert costs.roofline_time(1e9, 1e9, 686e12, 4.27e12) == 1e9 / 4.27e12


def test_a_crossover_table_prefers_dense_and_then_the_first_on_ties_and_refuses_gaps() -> None:
    table = costs.Crossover((0.1, 0.2, 0.3), (16, 32), ((5, 5), (5, 4), (9, 5)), (6, 6, 5))
    assert table.choices() == (16, 32, None)
    with pytest.raises(ValueError, match=r"2 rates x 2 block sizes"):
        table._replace(rates=(0.1, 0.2)).choices()
    with pytest.raises(ValueError, match="zip"):
        table._replace(dense=(6, 6)).choices()


@pytest.mark.parametrize(
    ("granularity", "count"),
    [
        (ScaleGranularity.TENSOR, 1),
        (ScaleGranularity.HEAD, 3),
        (ScaleGranularity.CHANNEL, 3 * 8),
        (ScaleGranularity.PAGE, 5),
        (ScaleGranularity.PAGE_HEAD, 5 * 3),
        (ScaleGranularity.TOKEN_HEAD, 5 * 4 * 3),
        (ScaleGranularity.PAGE_CHANNEL, 5 * 3 * 8),
    ],
)
def test_scales_are_one_per_what_shares_them(granularity: ScaleGranularity, count: int) -> None:
    assert costs.scale_bytes(granularity, pages=5, page_size=4, heads=3, head_dim=8, item=4) == count * 4


def test_every_granularity_has_a_scale_count() -> None:
    for granularity in ScaleGranularity:
        assert costs.scale_bytes(granularity, pages=1, page_size=1, heads=1, head_dim=1, item=2) == 2


@fast
@given(rows_of_entries, st.integers(1, 3), st.integers(1, 4))
def test_page_reuse_counts_query_tiles_not_queries(rows: Rows, query_tile: int, threshold: int) -> None:
    tiles = [{p for row in rows[i : i + query_tile] for p in row} for i in range(0, len(rows), query_tile)]
    pages = sorted(set().union(*tiles)) if tiles else []
    expected = [sum(page in tile for tile in tiles) for page in pages]
    reuse = costs.page_reuse(lists(rows), query_tile)
    assert (reuse.pages.tolist(), reuse.tiles.tolist()) == (pages, expected)
    assert costs.partial_gradient_bytes(reuse, 4, 8, 6) == sum(map(len, tiles)) * 4 * (8 + 6) * 4
    cold, hot = costs.hot_pages(reuse, threshold)
    assert cold.pages.tolist() == [p for p, n in zip(pages, expected, strict=True) if n < threshold]
    assert sorted([*cold.pages.tolist(), *hot.pages.tolist()]) == pages


def test_atomic_updates_are_one_per_tile_and_element() -> None:
    reuse = PageReuse(np.array([3, 9]), np.array([1, 5]))
    assert costs.atomic_updates(reuse, 4, 8).tolist() == [32, 160]
