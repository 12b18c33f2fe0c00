"""The 29 worked numbers of WORKED_NUMBERS.md against the reference, from real lists wherever lists decide them."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from sacts.reference import costs
from sacts.reference.candidates import (
    CandidateLists,
    ValidatedCandidates,
    blocks_of,
    expand,
    local_window,
    normalize,
    unite,
    validate,
)
from sacts.reference.forward import Forward, Inputs, forward
from sacts.reference.layouts import eta_blk, from_fixed
from sacts.reference.paging import PagedCache, PageTable, Strides, address
from sacts.reference.softmax import State, finish, merge, merge_all, tile_state
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, DType, Hints, ScaleGranularity
from sacts.reference.tasks import task_indptr, to_tasks
from sacts.reference.tiers import smallest_tier, to_tiers

SIX = (1, 2, 63, 64, 65, 127)
SIX_TABLE = PageTable(np.array([[41, 7]]), 64, 48, (frozenset({41, 7}),))

X = 55  # table[4] of worked number 2, which the text leaves open
FIRST_PAGES = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11)
TEN_PAGES = (41, 7, 83, 19, X, 60, 61, 62, 63, 64)
BATCH_TABLE = PageTable(np.array([FIRST_PAGES, TEN_PAGES]), 16, 100, (frozenset(FIRST_PAGES), frozenset(TEN_PAGES)))


def spec_of(**changes: object) -> AttentionSpec:
    fields: dict[str, object] = {
        "num_qo_heads": 1,
        "num_kv_heads": 1,
        "head_dim_qk": 4,
        "head_dim_vo": 3,
        "page_size": 64,
        "seq_lens": (128,),
        "qo_lens": (1,),
        "dtype": DType.FP32,
        "sm_scale": 0.5,
    }
    return AttentionSpec(**(fields | changes))  # type: ignore[arg-type]


# --- 1: six candidates in two pages


def test_1_six_candidates_are_two_blocks_with_six_of_128_slots_attended() -> None:
    blocks, mask = blocks_of(SIX, 64)
    assert blocks.tolist() == [0, 1]
    assert [np.flatnonzero(row).tolist() for row in mask] == [[1, 2, 63], [0, 1, 63]]
    assert (mask.sum(), mask.size) == (6, 128)


def test_1_blocks_do_not_depend_on_the_order_of_the_candidates_or_on_repeats() -> None:
    blocks, mask = blocks_of(SIX, 64)
    shuffled, shuffled_mask = blocks_of((127, 64, 1, 65, 63, 2, 64), 64)
    assert shuffled.tolist() == blocks.tolist()
    assert (shuffled_mask == mask).all()


def test_1_the_block_list_has_indptr_0_2() -> None:
    raw = CandidateLists(np.array([0, 6]), np.array([t // 64 for t in reversed(SIX)]))
    validated = validate(spec_of(block_size=64), raw, SIX_TABLE)
    assert validated.indptr.tolist() == [0, 2]
    assert validated.indices.tolist() == [0, 1]
    assert validated.duplicates == 4


def test_1_the_candidates_lie_in_pages_41_and_7() -> None:
    page, offset, physical = SIX_TABLE.locate(0, SIX)
    assert page.tolist() == [0, 0, 0, 1, 1, 1]
    assert offset.tolist() == [1, 2, 63, 0, 1, 63]
    assert physical.tolist() == [41, 41, 41, 7, 7, 7]


def test_1_normalisation_gives_the_six_triples_whatever_branch_named_them() -> None:
    triples = normalize((65, 2, 1), (63, 64, 65, 127, 128), (1, -1), 128, SIX_TABLE, 0)
    assert [t for t, _, _ in triples] == list(SIX)
    assert [logical for _, logical, _ in triples] == [(0, 1), (0, 2), (0, 63), (1, 0), (1, 1), (1, 63)]
    assert [physical for _, _, physical in triples] == [(41, 1), (41, 2), (41, 63), (7, 0), (7, 1), (7, 63)]


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_1_the_address_of_every_candidate_is_where_a_contiguous_pool_holds_it(order: str) -> None:
    pages, tokens, heads, dim = 48, 64, 2, 4
    shape = (pages, tokens, heads, dim) if order == "NHD" else (pages, heads, tokens, dim)
    strides = Strides(tokens * heads * dim, heads * dim, dim) if order == "NHD" else Strides(512, dim, tokens * dim)
    _, offset, physical = SIX_TABLE.locate(0, SIX)
    for head in range(heads):
        inner = (offset, head) if order == "NHD" else (head, offset)
        expected = np.ravel_multi_index((physical, *inner, 0), shape)
        assert address(physical, offset, head, strides).tolist() == expected.tolist()


def test_1_addresses_beyond_31_bits_are_right_for_32_bit_page_ids() -> None:
    strides = Strides(64 * 8 * 128, 8 * 128, 128)
    found = address(np.array([40_000], np.int32), np.array([63], np.int32), np.array([7], np.int32), strides)
    assert found.tolist() == [40_000 * 65_536 + 63 * 1024 + 7 * 128]


# --- 2: the second request of a batch


def test_2_the_second_request_reads_its_own_row_of_the_table() -> None:
    tokens = (18, 23, 70, 71, 72)
    page, offset, physical = BATCH_TABLE.locate(1, tokens)
    assert page.tolist() == [1, 1, 4, 4, 4]
    assert offset.tolist() == [2, 7, 6, 7, 8]
    assert physical.tolist() == [7, 7, X, X, X]
    triples = normalize(tokens, (), (), 160, BATCH_TABLE, 1)
    assert [physical for _, _, physical in triples] == [(7, 2), (7, 7), (X, 6), (X, 7), (X, 8)]


def test_2_forward_reads_the_pages_of_the_second_request() -> None:
    tokens = (18, 23, 70, 71, 72)
    spec = spec_of(page_size=16, seq_lens=(160, 160), qo_lens=(1, 1))
    data = np.zeros((100, 16, 1, 3))
    data[7, [2, 7], 0, 0] = 1.0
    data[X, 6:9, 0, 1] = 1.0
    inputs = Inputs(
        np.zeros((2, 1, 4)), PagedCache(np.arange(100), np.zeros((100, 16, 1, 4))), PagedCache(np.arange(100), data)
    )
    raw = CandidateLists(np.array([0, 0, 5]), np.array(tokens))
    out, lse = forward(spec, inputs, BATCH_TABLE, validate(spec, raw, BATCH_TABLE))
    np.testing.assert_allclose(out[1, 0], [2 / 5, 3 / 5, 0], rtol=1e-15)
    np.testing.assert_allclose(lse[1, 0], math.log(5), rtol=1e-15)
    assert lse[0, 0] == -math.inf


# --- 3: one key present twice

TABLE_OF_3 = PageTable(np.array([[5]]), 64, 6, (frozenset({5}),))


def three_keys(entries: tuple[int, ...], kind: CandidateKind) -> Forward:
    random = np.random.default_rng(3)
    spec = spec_of(seq_lens=(3,), candidate_kind=kind)
    page = np.array([5])
    inputs = Inputs(
        random.normal(size=(1, 1, 4)),
        PagedCache(page, random.normal(size=(1, 64, 1, 4))),
        PagedCache(page, random.normal(size=(1, 64, 1, 3))),
    )
    raw = CandidateLists(np.array([0, len(entries)]), np.array(entries))
    return forward(spec, inputs, TABLE_OF_3, validate(spec, raw, TABLE_OF_3))


def test_3_in_a_set_a_repeated_key_changes_nothing() -> None:
    once, twice = (three_keys(entries, CandidateKind.SET) for entries in ((0, 1, 2), (0, 1, 2, 1)))
    assert (twice.out == once.out).all()
    assert (twice.lse == once.lse).all()


def test_3_in_a_multiset_a_repeated_key_has_its_logit_plus_ln_2() -> None:
    random = np.random.default_rng(3)
    q, k, v = (random.normal(size=shape) for shape in ((4,), (64, 4), (64, 3)))
    z = 0.5 * k[:3] @ q + np.array([0.0, math.log(2), 0.0])
    weights = np.exp(z)
    out, lse = three_keys((0, 1, 2, 1), CandidateKind.MULTISET)
    np.testing.assert_allclose(lse[0, 0], math.log(weights.sum()), rtol=1e-14)
    np.testing.assert_allclose(out[0, 0], weights @ v[:3] / weights.sum(), rtol=1e-13)


def test_3_a_multiset_without_repeats_is_a_set() -> None:
    for found, expected in zip(
        three_keys((2, 0, 1), CandidateKind.MULTISET), three_keys((0, 1, 2), CandidateKind.SET), strict=True
    ):
        assert (found == expected).all()


# --- 7: the merge of two splits


def state(m: float, l: float, o: float) -> State:
    return State(np.array(m), np.array(l), np.array([o]))


@pytest.mark.parametrize(("second_o", "expected_out"), [(8.0, 2.0), (20.0, 2.9873)])
def test_7_splits_merge_unnormalised(second_o: float, expected_out: float) -> None:
    merged = merge(state(2, 3, 6), state(1, 4, second_o))
    assert merged.m == 2
    assert float(merged.l) == pytest.approx(3 + 4 / math.e, rel=1e-15)
    assert float(merged.l) == pytest.approx(4.4715, abs=5e-5)
    assert float(merged.o[0]) == pytest.approx(6 + second_o / math.e, rel=1e-15)
    out, lse = finish(merged)
    assert float(out[0]) == pytest.approx(expected_out, abs=5e-5)
    assert float(lse) == pytest.approx(2 + math.log(3 + 4 / math.e), rel=1e-15)


def test_7_the_order_of_the_splits_does_not_matter() -> None:
    forth, back = merge(state(2, 3, 6), state(1, 4, 20)), merge(state(1, 4, 20), state(2, 3, 6))
    assert [float(x) for x in (forth.m, forth.l, forth.o[0])] == [float(x) for x in (back.m, back.l, back.o[0])]


def test_7_tiles_that_are_the_two_splits_give_their_states_and_the_merged_one() -> None:
    logits = np.array([2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    v = np.array([2.0, 2.0, 2.0, 5.0, 5.0, 5.0, 5.0])[:, None]
    first, second = tile_state(logits[:3], v[:3]), tile_state(logits[3:], v[3:])
    assert [float(x) for x in (first.m, first.l, first.o[0])] == [2, 3, 6]
    assert [float(x) for x in (second.m, second.l, second.o[0])] == [1, 4, 20]
    for found, expected in zip(merge(first, second), tile_state(logits, v), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-15)


# --- 4, 5, 6: memory

MIB = 2**20


def test_4_a_gather_moves_twice_the_candidates_beyond_the_first_read() -> None:
    kv = costs.kv_bytes(2048, 128, 128)
    assert costs.gather_extra_bytes(kv) == 2 * 2048 * 512


@pytest.mark.parametrize(("uses", "direct", "gather"), [(8, 0.08, 0.019), (1, 0.010, 0.012)])
def test_5_a_gather_pays_from_the_second_use_on(uses: int, direct: float, gather: float) -> None:
    kv = 3.0
    assert costs.direct_time(kv, uses, 100) == pytest.approx(direct * kv, rel=1e-12)
    assert costs.gather_time(kv, uses, 100, 1000, 1000) == pytest.approx(gather * kv, rel=1e-12)
    assert costs.break_even_uses(kv, direct=100, source=100, write=1000, read=1000) == 2


def test_6_32_scattered_scalars_use_a_64th_of_what_is_moved() -> None:
    lines = np.random.default_rng(6).permutation(10_000)[:32]
    scattered = lines * 128 + 2 * np.random.default_rng(7).integers(0, 64, 32)
    assert costs.transaction_bytes(scattered, 2) == 4096
    assert costs.transaction_efficiency(scattered, 2) == 64 / 4096 == 0.015625
    assert costs.transaction_bytes(np.arange(32) * 2, 2) == 128


# --- 8 to 11: roofline and totals


def test_8_whole_blocks_cost_a_quarter_more_flops() -> None:
    # 40 blocks of 64 hold 2048 candidates: 24 are full, 16 half full.
    tokens = [64 * block + slot for block in range(40) for slot in range(64 if block < 24 else 32)]
    tiles = costs.kv_tiles(CandidateLists(np.array([0, len(tokens)]), np.array(tokens)), 1, 64)
    assert (tiles.filled.sum(), tiles.slots) == (2048, 2560)
    assert costs.flops(2048, 128, 128) == 1_048_576
    assert costs.flops(tiles.slots, 128, 128) == 1_310_720
    assert tiles.efficiency == 0.8


def test_9_2048_tokens_take_a_third_of_a_microsecond_at_full_bandwidth() -> None:
    assert costs.kv_bytes(1, 128, 128) == 512
    moved = costs.kv_bytes(2048, 128, 128)
    assert moved == MIB
    assert costs.memory_time(moved, 3e12) == pytest.approx(0.35e-6, abs=5e-9)
    assert costs.memory_time(moved, 3e12, share=0.2) == pytest.approx(1.75e-6, abs=5e-9)


@pytest.mark.parametrize("item", [2, 4])
def test_10_decode_does_2_flops_per_element_byte(item: int) -> None:
    found = costs.intensity(costs.flops(777, 128, 128), costs.kv_bytes(777, 128, 128, item, item))
    assert found == 2 / item


def test_11_a_kernel_four_times_faster_is_a_call_one_and_a_half_times_faster() -> None:
    stages = costs.StageTimes(route=12, topk=10, index=8, attention=25, reduce=5, launch=6)
    assert stages.total == 66
    assert stages.speedup(100) == pytest.approx(1.52, abs=5e-3)


# --- 12 and 13: workspace


def test_12_an_index_list_of_1024_rows_takes_half_a_mebibyte() -> None:
    assert costs.index_bytes(1024 * 128) == 512 * 1024


def test_13_partial_outputs_of_8_splits_take_128_mebibytes() -> None:
    assert costs.partial_bytes(1024, 8, 32, 128) == (128 * MIB, 2 * MIB)


# --- 14 to 20 and 27: a context of 65536 tokens

LONG = AttentionSpec(
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim_qk=128,
    head_dim_vo=128,
    page_size=16,
    seq_lens=(65_536,),
    qo_lens=(1,),
    dtype=DType.BF16,
    sm_scale=128**-0.5,
    block_size=16,
    causal=CausalRule.BOTTOM_RIGHT,
)
LONG_TABLE = PageTable(np.random.default_rng(14).permutation(5000)[None, :4096], 16, 5000, (frozenset(range(5000)),))


@cache
def long_lists() -> ValidatedCandidates:
    """In each KV head 256 dynamic pages: 32 whole tiles of 4 pages, 40 tiles of two, 40 of one, 8 pages that the
    window of 16 pages names too.
    """
    dynamic = []
    for head in range(8):
        random = np.random.default_rng(head)
        tiles = random.permutation(1020)[:112]
        pages = [4 * tiles[:32, None] + np.arange(4)]
        pages += [4 * tiles[32 + i] + random.permutation(4)[: 2 if i < 40 else 1] for i in range(80)]
        pages += [4080 + random.permutation(16)[:8]]
        dynamic.append(random.permutation(np.concatenate([page.ravel() for page in pages])))
    assert [len(pages) for pages in dynamic] == [256] * 8
    raw = CandidateLists(np.arange(9) * 256, np.concatenate(dynamic))
    nothing = CandidateLists(np.zeros(9, np.int64), np.zeros(0, np.int64))
    return validate(LONG, unite(LONG, raw, local_window(LONG, 16), nothing), LONG_TABLE)


def long_tiles(kv_tile: int) -> costs.Tiles:
    lists = long_lists()
    return costs.kv_tiles(CandidateLists(lists.indptr, lists.indices), 16, kv_tile)


def test_14_65536_tokens_are_4096_pages() -> None:
    assert costs.num_pages(65_536, 16) == 4096
    assert costs.num_pages(65_537, 16) == 4097


def test_15_selection_and_window_are_264_pages_and_4224_tokens() -> None:
    lists = long_lists()
    assert np.diff(lists.indptr).tolist() == [264] * 8
    assert lists.duplicates == 8 * 8
    row, t, _ = expand(LONG, lists)
    assert np.bincount(row).tolist() == [4224] * 8
    assert len(np.unique(row * 65_536 + t)) == 8 * 4224


def test_16_the_pages_fill_116_tiles_to_57_percent() -> None:
    tiles = long_tiles(64)
    assert np.diff(tiles.indptr).tolist() == [116] * 8
    assert np.unique(tiles.filled[:116], return_counts=True)[1].tolist() == [40, 40, 36]
    assert (tiles.indices[:116] >= 1020).sum() == 4
    assert tiles.slots == 8 * 7424
    assert tiles.efficiency == 4224 / 7424
    assert round(100 * tiles.efficiency, 2) == 56.90


def test_17_bytes_of_k_and_v() -> None:
    found = costs.work(LONG, Hints(num_splits=4, kv_tile=64), long_lists())
    assert found.kv / 8 == 2_162_688 == 2.0625 * MIB
    assert (found.kv, found.tile_kv, found.dense_kv) == (16.5 * MIB, 29 * MIB, 256 * MIB)
    assert found.dense_kv / found.kv == pytest.approx(15.5, abs=0.05)
    assert found.dense_kv / found.tile_kv == pytest.approx(8.83, abs=0.005)


def test_18_bytes_of_the_index() -> None:
    assert costs.work(LONG, Hints(), long_lists()).indices == 264 * 8 * 4 == 8448


def test_19_flops_of_32_query_heads() -> None:
    found = costs.work(LONG, Hints(kv_tile=64), long_lists())
    assert found.flops / 32 == 2_162_688
    assert found.flops == pytest.approx(69.2e6, rel=1e-3)
    assert found.tile_flops == pytest.approx(121.6e6, rel=1e-3)


def test_20_partials_of_4_splits() -> None:
    assert costs.work(LONG, Hints(num_splits=4), long_lists()).partials == (65_536, 1024)
    assert sum(costs.partial_bytes(64, 4, 32, 128)) == 4.0625 * MIB


def test_27_four_splits_of_29_tiles_or_264_tiles_of_one_page() -> None:
    tiles, small = long_tiles(64), long_tiles(16)
    tasks = to_tasks(CandidateLists(tiles.indptr, tiles.indices), -(-116 // 4))
    assert (tasks.end - tasks.start).tolist() == [29] * 32
    assert tasks.row.tolist() == [row for row in range(8) for _ in range(4)]
    assert np.diff(small.indptr).tolist() == [264] * 8
    assert (small.slots, small.efficiency) == (8 * 4224, 1.0)


# --- 21: a merge of four splits


def test_21_four_splits_merge_to_17_846() -> None:
    merged = merge_all(state(m, l, 1.0) for m, l in zip((8, 7, 9, 6), (12, 18, 10, 20), strict=True))
    assert float(merged.m) == 9
    assert float(merged.l) == pytest.approx(17.846, abs=5e-4)
    assert float(merged.l) == pytest.approx(12 / math.e + 18 / math.e**2 + 10 + 20 / math.e**3, rel=1e-14)


# --- 22: the crossover


def test_22_the_fastest_block_size_changes_with_the_candidate_rate() -> None:
    table = costs.Crossover(
        rates=(0.031, 0.0625, 0.125, 0.25, 0.5),
        block_sizes=(16, 32, 64),
        sparse=((42, 35, 38), (55, 46, 44), (78, 66, 59), (126, 101, 88), (214, 162, 133)),
        dense=(118,) * 5,
    )
    assert table.choices() == (32, 64, 64, 64, None)


# --- 23 and 24: conflicts of the backward pass


@cache
def training_lists() -> CandidateLists:
    """4096 queries in tiles of 64; each tile selects 16 hot pages and 248 of its own, a quarter of them per query."""
    lists = []
    for tile in range(64):
        own = 16 + np.random.default_rng(tile).permutation(4080)[:248]
        pages = np.concatenate((np.arange(16), own))
        lists += [pages[query % 4 :: 4] for query in range(64)]
    return CandidateLists(np.arange(4097) * 66, np.concatenate(lists))


def test_23_a_hot_page_receives_131072_additions() -> None:
    reuse = costs.page_reuse(training_lists(), 64)
    cold, hot = costs.hot_pages(reuse, 64)
    assert hot.pages.tolist() == list(range(16))
    assert set(costs.atomic_updates(hot, 16, 128).tolist()) == {64 * 2048} == {131_072}
    assert cold.tiles.max() < 64
    assert cold.tiles.sum() == 64 * 248


def test_24_storing_every_partial_gradient_takes_264_mebibytes_a_head() -> None:
    reuse = costs.page_reuse(training_lists(), 64)
    assert costs.partial_gradient_bytes(reuse, 16, 128, 128) == 264 * MIB


# --- 25, 26, 28, 29: layouts


def test_25_129_entries_waste_127_slots_of_a_tier_of_256() -> None:
    assert smallest_tier([129], (64, 128, 256)).tolist() == [256]
    lists = CandidateLists(np.array([0, 129]), np.arange(129)[::-1])
    tiers = to_tiers(lists, (64, 128, 256), -1, 1000)
    assert [len(tier.rows) for tier in tiers] == [0, 0, 1]
    assert (tiers[2].lists.entries == -1).sum() == 127
    assert from_fixed(tiers[2].lists).indices.tolist() == list(range(128, -1, -1))


def test_26_block_efficiency_of_scattered_and_of_clustered_tokens() -> None:
    scattered, clustered = np.arange(0, 6400, 64), np.arange(128)
    assert eta_blk(scattered, 64) == 100 / (100 * 64)
    assert eta_blk(clustered, 64) == 1.0
    assert eta_blk(SIX, 64) == 6 / 128
    for tokens in (scattered, clustered, np.array(SIX)):
        tiles = costs.kv_tiles(CandidateLists(np.array([0, len(tokens)]), tokens), 1, 64)
        assert len(tiles.indices) <= len(tokens)
        assert tiles.slots <= len(tokens) * 64
        assert tiles.efficiency == eta_blk(tokens, 64)


def test_28_the_prefix_sum_of_the_task_counts_numbers_the_tasks() -> None:
    lengths = (32, 0, 800, 33, 1)
    assert task_indptr(lengths, 32).tolist() == [0, 1, 1, 26, 28, 29]
    tasks = to_tasks(CandidateLists(np.cumsum((0, *lengths)), np.arange(866)), 32)
    assert np.bincount(tasks.row, minlength=5).tolist() == [math.ceil(k / 32) for k in lengths]


def test_29_scales_per_page_and_channel_add_an_eighth() -> None:
    scales = costs.scale_bytes(ScaleGranularity.PAGE_CHANNEL, pages=264, page_size=16, heads=8, head_dim=128)
    assert scales / costs.kv_bytes(264 * 16 * 8, 128, 0, k_item=1) == 0.125
