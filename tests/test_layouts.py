"""Every layout gives back the lists that it was made of; what it could not give back it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from sacts.reference.candidates import CandidateLists, ValidatedCandidates, blocks_of, validate
from sacts.reference.forward import Inputs, forward
from sacts.reference.layouts import (
    BlockLists,
    FixedLists,
    PageLists,
    eta_blk,
    eta_idx,
    from_blocks,
    from_deltas,
    from_fixed,
    from_flex,
    from_mask,
    from_page_lists,
    loaded,
    repeated,
    to_blocks,
    to_deltas,
    to_fixed,
    to_flex,
    to_mask,
    to_page_lists,
)
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, DType

Rows = list[list[int]]
WIDTH = 21


def lists(rows: Rows) -> CandidateLists:
    return CandidateLists(np.cumsum([0, *map(len, rows)]), np.array([x for row in rows for x in row], np.int64))


def rows_of(found: CandidateLists) -> Rows:
    assert found.indptr[0] == 0
    assert found.indptr[-1] == len(found.indices)
    return [found.indices[a:b].tolist() for a, b in pairwise(found.indptr.tolist())]


sets = st.lists(st.lists(st.integers(0, WIDTH - 1), unique=True, max_size=WIDTH), max_size=7)
fast = settings(max_examples=100, deadline=None, derandomize=True)


def as_sets(rows: Rows) -> Rows:
    return [sorted(row) for row in rows]


# --- round trips


@fast
@given(sets, st.integers(1, 8), st.integers(1, 4))
def test_blocks_with_masks_give_back_the_set(rows: Rows, block_size: int, block_rows: int) -> None:
    blocks = to_blocks(lists(rows), block_size, block_rows)
    assert rows_of(from_blocks(blocks)) == as_sets(rows)
    expected = [
        sorted({t // block_size for row in rows[i : i + block_rows] for t in row})
        for i in range(0, len(rows), block_rows)
    ]
    assert rows_of(CandidateLists(blocks.indptr, blocks.indices)) == expected
    assert blocks.mask.sum() == sum(map(len, rows))


@fast
@given(sets, st.integers(1, 8))
def test_the_loaded_set_holds_whole_blocks_up_to_t_and_the_attended_set_stays(rows: Rows, block_size: int) -> None:
    blocks = to_blocks(lists(rows), block_size)
    u = rows_of(loaded(blocks, WIDTH))
    for row, tokens in zip(rows, u, strict=True):
        assert tokens == [t for t in range(WIDTH) if t // block_size in {s // block_size for s in row}]
    for row, (a, b) in zip(rows, pairwise(blocks.indptr.tolist()), strict=True):
        ids, mask = blocks_of(row, block_size)
        assert (blocks.indices[a:b] == ids).all()
        assert (blocks.mask[a:b, 0] == mask).all()


def test_slots_that_are_loaded_but_not_attended_carry_no_mass() -> None:
    """Worked by hand: all slots of U get a logit, those outside S are set to -inf before the exponential."""
    random = np.random.default_rng(8)
    tokens, t = [3, 1, 17, 5], 19
    spec = AttentionSpec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=4, head_dim_vo=3, page_size=4, seq_lens=(t,), qo_lens=(1,),
        dtype=DType.FP32, sm_scale=0.6,
    )  # fmt: skip
    table = PageTable(np.array([[4, 0, 3, 1, 2]]), 4, 5, (frozenset(range(5)),))
    inputs = Inputs(
        random.normal(size=(1, 1, 4)),
        PagedCache(np.arange(5), random.normal(size=(5, 4, 1, 4))),
        PagedCache(np.arange(5), random.normal(size=(5, 4, 1, 3))),
    )
    blocks = to_blocks(lists([tokens]), 8)
    u = loaded(blocks, t).indices
    assert u.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18]
    k, v = (cache.read(table, 0, u)[:, 0] for cache in (inputs.k, inputs.v))
    z = np.where(blocks.mask.ravel()[: len(u)], 0.6 * k @ inputs.q[0, 0], -np.inf)
    weights = np.exp(z)
    found = forward(spec, inputs, table, validate(spec, from_blocks(blocks), table))
    np.testing.assert_allclose(found.out[0, 0], weights @ v / weights.sum(), rtol=1e-13)
    np.testing.assert_allclose(found.lse[0, 0], np.log(weights.sum()), rtol=1e-14)
    whole = replace(spec, block_size=8)
    other = forward(whole, inputs, table, validate(whole, CandidateLists(blocks.indptr, blocks.indices), table))
    assert abs(other.lse[0, 0] - found.lse[0, 0]) > 0.1


@fast
@given(sets, st.integers(0, 5), st.sampled_from((-1, WIDTH, 2**31 - 1, -7)))
def test_fixed_k_gives_back_the_list_in_its_order_wherever_the_padding_stands(
    rows: Rows, spare: int, sentinel: int
) -> None:
    capacity = max(map(len, rows), default=0) + spare
    fixed = to_fixed(lists(rows), capacity, sentinel, WIDTH)
    assert fixed.entries.shape == (len(rows), capacity)
    assert rows_of(from_fixed(fixed)) == rows
    assert (fixed.entries == sentinel).sum() == len(rows) * capacity - sum(map(len, rows))
    moved = np.roll(fixed.entries, spare, axis=1)
    assert as_sets(rows_of(from_fixed(FixedLists(moved, fixed.sentinel)))) == as_sets(rows)


def test_t_of_each_row_is_a_sentinel_too() -> None:
    fixed = to_fixed(lists([[2, 0], [4]]), 3, (3, 5), (3, 5))
    assert fixed.entries.tolist() == [[2, 0, 3], [4, 5, 5]]
    assert rows_of(from_fixed(fixed)) == [[2, 0], [4]]


@fast
@given(sets)
def test_a_dense_mask_gives_back_the_set(rows: Rows) -> None:
    mask = to_mask(lists(rows), WIDTH)
    assert mask.tolist() == [[t in row for t in range(WIDTH)] for row in rows]
    assert rows_of(from_mask(mask)) == as_sets(rows)


@fast
@given(sets, st.integers(1, 4), st.sampled_from((1, 2, 7, 8, 32)))
def test_flex_block_lists_give_back_the_set_whatever_stands_behind_the_counts(
    rows: Rows, q_block: int, kv_block: int
) -> None:
    flex = to_flex(lists(rows), WIDTH, q_block, kv_block)
    assert rows_of(from_flex(flex)) == as_sets(rows)
    behind = np.arange(flex.kv_indices.shape[1])
    junk = flex._replace(
        kv_indices=np.where(behind < flex.kv_num_blocks[:, None], flex.kv_indices, 999),
        full_kv_indices=np.where(behind < flex.full_kv_num_blocks[:, None], flex.full_kv_indices, -999),
    )
    assert rows_of(from_flex(junk)) == as_sets(rows)


@fast
@given(st.lists(st.lists(st.integers(0, 10**12), max_size=9).map(sorted), max_size=7))
def test_gaps_give_back_sorted_lists_and_repeats(rows: Rows) -> None:
    coded = to_deltas(lists(rows))
    assert rows_of(from_deltas(coded)) == rows
    assert (coded.deltas >= 0).all()
    assert coded.deltas.tolist() == [b - a for row in rows for a, b in zip([0, *row], row, strict=False)]


@fast
@given(st.lists(st.integers(0, 17), min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 3))
def test_page_lists_give_back_the_committed_part_of_a_table(seq_lens: list[int], page_size: int, stale: int) -> None:
    columns = max(-(-t // page_size) for t in seq_lens) + stale
    table = np.random.default_rng(page_size).integers(0, 1000, (len(seq_lens), columns))
    pages = to_page_lists(PageTable(table, page_size, 1000, (frozenset(),) * len(seq_lens)), seq_lens)
    back, lengths = from_page_lists(pages, page_size, columns, -5)
    assert lengths == tuple(seq_lens)
    committed = np.arange(columns) * page_size < np.array(seq_lens)[:, None]
    assert (back == np.where(committed, table, -5)).all()


@fast
@given(st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 3), max_size=4), max_size=4))
def test_a_multiset_is_spelled_out_for_layouts_without_counts(rows: list[dict[int, int]]) -> None:
    rows = [dict(sorted(row.items())) for row in rows]
    keys = lists([list(row) for row in rows])
    counts = np.array([c for row in rows for c in row.values()], np.int64)
    found = repeated(ValidatedCandidates(keys.indptr, keys.indices, counts, 0))
    assert rows_of(found) == [[t for t, c in row.items() for _ in range(c)] for row in rows]


# --- against FlexAttention itself


def test_flex_block_lists_are_those_of_torch() -> None:
    random = np.random.default_rng(4)
    for rows, width, q_block, kv_block in ((7, WIDTH, 2, 8), (8, 24, 4, 8), (1, 5, 4, 16), (6, 16, 3, 4)):
        mask = random.random((rows, width)) < 0.6
        mask[:q_block, :kv_block] = True
        tensor = torch.from_numpy(mask)
        expected = flex_attention.create_block_mask(
            lambda b, h, q, kv, tensor=tensor: tensor[q, kv],
            1, 1, rows, width, device="cpu", BLOCK_SIZE=(q_block, kv_block),
        )  # fmt: skip
        found = to_flex(from_mask(mask), width, q_block, kv_block)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name)[0, 0].numpy(), name)


# --- refusals


@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (lambda: to_fixed(lists([[1], [3, 5]]), 2, 4, 6), r"row 0: the sentinel 4 is a legal entry \(below 6\)"),
        (lambda: to_fixed(lists([[1], [3]]), 2, (4, 0), (4, 4)), "row 1: the sentinel 0 is a legal entry"),
        (lambda: to_fixed(lists([[1], [3, 5, 2]]), 2, -1, 6), "row 1 has 3 entries, more than the capacity 2"),
        (lambda: to_fixed(lists([[1], [3, 9]]), 2, 9, 9), "row 1, entry 1: 9 is no legal entry"),
        (lambda: to_blocks(lists([[1], [3, 5, 3]]), 4), "row 1, entry 2: 3 repeats an entry"),
        (lambda: to_blocks(lists([[1], [3, -5]]), 4), "row 1, entry 1: -5 is negative"),
        (lambda: to_mask(lists([[1], [3, 5, 3]]), 6), "row 1, entry 2: 3 repeats an entry"),
        (lambda: to_mask(lists([[], [3, 6]]), 6), "row 1, entry 1: 6 is no legal entry"),
        (lambda: to_flex(lists([[], [3, 6]]), 6, 2, 4), "row 1, entry 1: 6 is no legal entry"),
        (lambda: to_deltas(lists([[9], [3, 5, 4]])), "row 1, entry 2: 4 is smaller than the entry before it"),
        (
            lambda: to_page_lists(PageTable(np.zeros((2, 2), np.int64), 4, 9, (frozenset(),) * 2), (8, 9)),
            "request 1 has 3 pages, the table 2 columns",
        ),
        (
            lambda: from_page_lists(PageLists(np.array([0, 1, 4]), np.arange(4), np.array([2, 2])), 4, 2, -1),
            "request 1 has 3 pages, the table 2 columns",
        ),
        (
            lambda: from_page_lists(PageLists(np.array([0, 1, 1]), np.arange(1), np.array([5, 0])), 4, 2, -1),
            "request 0: 5 tokens in the last of 1 pages of 4",
        ),
        (
            lambda: from_page_lists(PageLists(np.array([0, 1, 1]), np.arange(1), np.array([4, 1])), 4, 2, -1),
            "request 1: 1 tokens in the last of 0 pages of 4",
        ),
        (
            lambda: from_blocks(BlockLists(np.array([0, 1]), np.array([0]), np.ones((1, 2, 4), bool), 1)),
            "the mask attends in row 1, but there are 1 rows",
        ),
        (lambda: eta_blk([], 4), "touches no block"),
        (lambda: eta_idx([], 4), "0 rows of capacity 4"),
    ],
)
def test_what_a_layout_could_not_give_back_is_refused(convert: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert()


# --- efficiency


@fast
@given(st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=12), st.integers(1, 16))
def test_block_efficiency_lies_between_scattered_and_full(tokens: list[int], block_size: int) -> None:
    touched = len({t // block_size for t in tokens})
    assert eta_blk(tokens, block_size) == len(tokens) / (touched * block_size)
    assert 1 / block_size <= eta_blk(tokens, block_size) <= 1
    assert touched <= len(tokens)


def test_index_efficiency_counts_what_is_no_padding() -> None:
    rows = [[1, 2], [], [3]]
    fixed = to_fixed(lists(rows), 4, -1, 9)
    assert eta_idx([len(row) for row in rows], 4) == (fixed.entries >= 0).mean() == 3 / 12
