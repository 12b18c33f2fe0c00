"""D, W and A together: windows, sinks, shared lists, and what repeats over the three mean in each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.candidates import (
    CandidateError,
    CandidateLists,
    Severity,
    blocks_of,
    distinct,
    fixed_sinks,
    local_window,
    normalize,
    serve_rows,
    unite,
    validate,
)
from sacts.reference.forward import Forward, Inputs, edges, forward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, DType

SPEC = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=4,
    head_dim_vo=3,
    page_size=4,
    seq_lens=(11, 3),
    qo_lens=(2, 4),
    dtype=DType.FP32,
    sm_scale=0.7,
    causal=CausalRule.BOTTOM_RIGHT,
)
TABLE = PageTable(np.array([[5, 2, 7], [1, 9, 9]]), 4, 8, (frozenset({5, 2, 7}), frozenset({1})))
KINDS = (CandidateKind.SET, CandidateKind.MULTISET)
Lists = list[list[int]]


def lists(rows: Lists) -> CandidateLists:
    return CandidateLists(np.cumsum([0, *map(len, rows)]), np.array([x for row in rows for x in row], np.int64))


def rows(found: CandidateLists) -> Lists:
    return [found.indices[a:b].tolist() for a, b in pairwise(found.indptr.tolist())]


def inputs(spec: AttentionSpec) -> Inputs:
    random = np.random.default_rng(5)
    q = random.normal(size=(spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk))
    k, v = (random.normal(size=(8, 4, spec.num_kv_heads, dim)) for dim in (spec.head_dim_qk, spec.head_dim_vo))
    return Inputs(q, PagedCache(np.arange(8), k), PagedCache(np.arange(8), v))


@st.composite
def branches(draw: st.DrawFn) -> tuple[Lists, Lists, Lists]:
    """Legal lists of D, W and A for every row of SPEC."""
    legal = [position for position in SPEC.token_position for _ in range(SPEC.num_kv_heads)]

    def branch(most: int) -> Lists:
        return [draw(st.lists(st.integers(0, last), max_size=most)) if last >= 0 else [] for last in legal]

    return branch(6), branch(3), branch(2)


def attended(spec: AttentionSpec, *parts: Lists) -> Forward:
    raw = unite(spec, *(lists(part) for part in parts))
    return forward(spec, inputs(spec), TABLE, validate(spec, raw, TABLE))


# --- repeats over D, W and A


@settings(max_examples=60, deadline=None, derandomize=True)
@given(branches())
def test_repeats_over_the_three_branches_count_in_a_multiset_only(parts: tuple[Lists, Lists, Lists]) -> None:
    for kind in KINDS:
        spec = replace(SPEC, candidate_kind=kind)
        validated = validate(spec, unite(spec, *(lists(part) for part in parts)), TABLE)
        expected = [Counter(d + w + a) for d, w, a in zip(*parts, strict=True)]
        found = [
            dict(zip(validated.indices[a:b].tolist(), validated.counts[a:b].tolist(), strict=True))
            for a, b in pairwise(validated.indptr.tolist())
        ]
        assert found == [c if kind is CandidateKind.MULTISET else dict.fromkeys(c, 1) for c in expected]
        assert validated.duplicates == sum(c.total() - len(c) for c in expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(branches(), st.randoms(use_true_random=False))
def test_permuting_entries_and_moving_them_between_branches_changes_no_bit(
    parts: tuple[Lists, Lists, Lists], random: Random
) -> None:
    d, w, a = parts
    moved = [x + y + z for x, y, z in zip(a, w, d, strict=True)]
    for row in moved:
        random.shuffle(row)
    for kind in KINDS:
        spec = replace(SPEC, candidate_kind=kind)
        nothing: Lists = [[]] * SPEC.num_rows
        for found, expected in zip(attended(spec, moved, nothing, nothing), attended(spec, d, w, a), strict=True):
            assert (found == expected).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(branches())
def test_naming_everything_twice_changes_a_set_by_nothing_and_a_multiset_by_ln_2(
    parts: tuple[Lists, Lists, Lists],
) -> None:
    d, w, a = parts
    twice = [x + x for x in d], [x + x for x in w], [x + x for x in a]
    for kind, shift in ((CandidateKind.SET, 0.0), (CandidateKind.MULTISET, np.log(2))):
        spec = replace(SPEC, candidate_kind=kind)
        once, doubled = attended(spec, *parts), attended(spec, *twice)
        np.testing.assert_allclose(doubled.lse, once.lse + shift, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(doubled.out, once.out, rtol=1e-12, atol=1e-13)
    sequence = replace(SPEC, candidate_kind=CandidateKind.SEQUENCE)
    repeated = sum(len(row) - len(set(row)) for row in twice[0])
    if repeated:
        with pytest.raises(CandidateError) as caught:
            validate(sequence, lists(twice[0]), TABLE)
        assert [e.severity for e in caught.value.entries] == [Severity.DUPLICATE] * repeated


@pytest.mark.parametrize(("window", "sinks", "words"), [([2], [], "window"), ([], [0], "sinks")])
def test_a_sequence_refuses_a_window_and_sinks(window: list[int], sinks: list[int], words: str) -> None:
    spec = replace(SPEC, candidate_kind=CandidateKind.SEQUENCE)
    empty: Lists = [[]] * spec.num_rows
    dynamic = lists([[3, 1], *empty[1:]])
    assert rows(unite(spec, dynamic, lists(empty), lists(empty)))[0] == [3, 1]
    parts = [[*empty[:2], part, *empty[3:]] for part in (window, sinks)]
    with pytest.raises(ValueError, match=rf"row \(request 0, query 1, KV head 0\).*{words}"):
        unite(spec, dynamic, *(lists(part) for part in parts))


def test_a_branch_that_is_no_csr_of_the_rows_is_named() -> None:
    good, short = lists([[]] * SPEC.num_rows), lists([[]] * (SPEC.num_rows - 1))
    with pytest.raises(ValueError, match="sinks: indptr must have 13 entries"):
        unite(SPEC, good, good, short)


# --- windows and sinks


@pytest.mark.parametrize("causal", [CausalRule.NONE, CausalRule.BOTTOM_RIGHT])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, 3, 20])
def test_window_and_sinks_are_the_last_and_the_first_entries_that_a_query_may_name(
    causal: CausalRule, block_size: int, size: int
) -> None:
    spec = replace(SPEC, causal=causal, block_size=block_size)
    window, sinks = rows(local_window(spec, size)), rows(fixed_sinks(spec, size))
    for row in range(spec.num_rows):
        token = row // spec.num_kv_heads
        seq_len, position = spec.seq_lens[spec.token_request[token]], spec.token_position[token]
        seen = [b for b in range(-(-seq_len // block_size)) if b * block_size <= position]
        allowed = seen if causal is not CausalRule.NONE else list(range(-(-seq_len // block_size)))
        assert window[row] == (seen[-size:] if size else [])
        assert sinks[row] == allowed[:size]
    validate(spec, unite(spec, lists([[]] * spec.num_rows), *map(lists, (window, sinks))), TABLE)


def test_a_query_beyond_the_committed_keys_has_a_window_of_the_last_committed_ones() -> None:
    class Ahead(AttentionSpec):
        token_position = (9, 15, -7, -1, 0, 2)

    spec = Ahead(**{field.name: getattr(SPEC, field.name) for field in fields(SPEC)})
    assert rows(local_window(spec, 2))[::2] == [[8, 9], [9, 10], [], [], [0], [1, 2]]
    assert rows(fixed_sinks(spec, 2))[::2] == [[0, 1], [0, 1], [], [], [0], [0, 1]]


def test_a_window_adds_what_window_left_then_removes() -> None:
    spec = replace(SPEC, window_left=1)
    nothing = lists([[]] * spec.num_rows)
    validated = validate(spec, unite(spec, nothing, local_window(spec, 4), fixed_sinks(spec, 1)), TABLE)
    assert validated.indices[:5].tolist() == [0, 6, 7, 8, 9]
    row, t, _ = edges(spec, validated)
    assert t[row == 0].tolist() == [8, 9]


@pytest.mark.parametrize(("rule", "words"), [(local_window, "local window"), (fixed_sinks, "sink count")])
def test_a_negative_size_is_refused(rule: Callable[[AttentionSpec, int], object], words: str) -> None:
    with pytest.raises(ValueError, match=f"{words} must not be negative, got -2"):
        rule(SPEC, -2)


# --- lists that serve several rows


def test_a_list_that_serves_a_query_block_is_masked_where_one_row_may_not_see() -> None:
    shared = lists([[9, 10, 1], [0], [2, 0], [], [1, 2], [2]])
    found = rows(serve_rows(SPEC, shared, 3))
    # Request 0 (positions 9, 10) has one block of queries, request 1 (positions -1, 0, 1, 2) has two.
    assert found == [[9, 1], [0], [9, 10, 1], [0], [], [], [0], [], [0], [], [1, 2], [2]]
    validate(SPEC, serve_rows(SPEC, shared, 3), TABLE)


def test_a_shared_list_keeps_what_is_illegal_for_every_row() -> None:
    shared = lists([[11, 9], [-4], [], []])
    with pytest.raises(CandidateError) as caught:
        validate(SPEC, serve_rows(SPEC, shared, 4), TABLE)
    assert {(e.severity, e.value) for e in caught.value.entries} == {
        (Severity.UNCOMMITTED, 11),
        (Severity.OUT_OF_RANGE, -4),
    }


def test_shared_blocks_are_left_to_the_mask_and_wrong_counts_are_named() -> None:
    spec = replace(SPEC, block_size=4)
    assert rows(serve_rows(spec, lists([[2], [0], [0], []]), 4))[:4] == [[2], [0], [2], [0]]
    with pytest.raises(ValueError, match="3 blocks of 3 queries x 2 KV heads need as many lists, got 4"):
        serve_rows(spec, lists([[2], [0], [0], []]), 3)


# --- N


@settings(max_examples=100, deadline=None, derandomize=True)
@given(*[st.lists(st.integers(-3, 14), max_size=8)] * 3, st.integers(0, 11))
def test_normalisation_is_idempotent(d: list[int], w: list[int], a: list[int], seq_len: int) -> None:
    once = normalize(d, w, a, seq_len, TABLE, 0)
    t = [triple.t for triple in once]
    assert normalize(t, (), (), seq_len, TABLE, 0) == once
    assert normalize(t[::-1], t, t[:2], seq_len, TABLE, 0) == once


@settings(max_examples=60, deadline=None, derandomize=True)
@given(branches())
def test_validation_is_idempotent(parts: tuple[Lists, Lists, Lists]) -> None:
    once = validate(SPEC, unite(SPEC, *(lists(part) for part in parts)), TABLE)
    again = validate(SPEC, CandidateLists(once.indptr, once.indices), TABLE)
    assert again.duplicates == 0
    assert (again.indptr == once.indptr).all()
    assert (again.indices == once.indices).all()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 5)), max_size=20))
def test_repeats_are_found_as_dictionaries_find_them(entries: list[tuple[int, int]]) -> None:
    pairs = distinct(*np.array(entries, np.int64).reshape(-1, 2).T)
    expected = Counter(entries)
    order = sorted(expected)
    assert pairs.first.tolist() == [entries.index(pair) for pair in order]
    assert pairs.counts.tolist() == [expected[pair] for pair in order]
    assert pairs.inverse.tolist() == [order.index(pair) for pair in entries]


def test_no_tokens_touch_no_blocks() -> None:
    blocks, mask = blocks_of([], 16)
    assert blocks.shape == (0,)
    assert mask.shape == (0, 16)
