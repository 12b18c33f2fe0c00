"""Worked numbers 1, 2, 3 and 7 of WORKED_NUMBERS.md against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sacts.reference.candidates import CandidateLists, blocks_of, normalize, validate
from sacts.reference.forward import Forward, Inputs, forward
from sacts.reference.paging import PagedCache, PageTable, Strides, address
from sacts.reference.softmax import State, finish, merge, tile_state
from sacts.reference.spec import AttentionSpec, CandidateKind, DType

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


def state(m: float, l: float, o: float) -> State:  # noqa: E741
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
