"""Branch and GQA merges against dictionaries: which score travels, and that S is the union whatever the rule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.branches import (
    BranchMerge,
    GqaMerge,
    ScoredLists,
    group_union,
    merge_branches,
    merge_heads,
    select,
    with_private_lists,
)
from sacts.reference.candidates import validate
from sacts.reference.forward import Inputs, forward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, DType

Row = dict[int, float]


def scored(rows: list[Row]) -> ScoredLists:
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([t for row in rows for t in row], np.int64)
    return ScoredLists(indptr, indices, np.array([score for row in rows for score in row.values()], np.float64))


def rows_of(lists: ScoredLists) -> list[Row]:
    pairs = list(zip(lists.indices.tolist(), lists.scores.tolist(), strict=True))
    return [dict(pairs[a:b]) for a, b in pairwise(lists.indptr.tolist())]


row = st.dictionaries(st.integers(0, 12), st.integers(-8, 8).map(float), max_size=6)
branches = st.integers(1, 3).flatmap(
    lambda rows: st.lists(st.lists(row, min_size=rows, max_size=rows), min_size=1, max_size=4)
)

D = scored([{5: 1.0, 2: 3.0}])
W = scored([{2: 7.0, 9: 0.5}])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (BranchMerge.KEEP, {2: 3.0, 5: 1.0, 9: 0.5}),
        (BranchMerge.MAX_SCORE, {2: 7.0, 5: 1.0, 9: 0.5}),
        (BranchMerge.SUM_GATE, {2: 10.0, 5: 1.0, 9: 0.5}),
    ],
)
def test_a_token_of_two_branches_carries_the_score_of_the_rule(rule: BranchMerge, expected: Row) -> None:
    (found,) = rows_of(merge_branches((D, W), rule))
    assert found == expected
    assert list(found) == sorted(expected)


def test_gates_weight_the_branches() -> None:
    assert rows_of(merge_branches((D, W), BranchMerge.SUM_GATE, (0.25, 2.0))) == [{2: 14.75, 5: 0.25, 9: 1.0}]
    two_rows = [scored([{1: 1.0}, {1: 1.0}])] * 2
    assert rows_of(merge_branches(two_rows, BranchMerge.SUM_GATE, [[0.5, 4.0], [0.25, 8.0]])) == [{1: 0.75}, {1: 12.0}]


def test_the_rule_decides_what_is_selected_next() -> None:
    both = scored([{1: 2.0, 2: 5.0}]), scored([{1: 6.0, 2: 2.0}])
    assert [select(merge_branches(both, rule), 1).indices.tolist() for rule in BranchMerge] == [[2], [1], [1]]
    gated = merge_branches(both, BranchMerge.SUM_GATE, (2.0, 0.25))
    assert select(gated, 1).indices.tolist() == [2]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(branches)
def test_merged_branches_are_the_union_with_the_score_of_the_rule(parts: list[list[Row]]) -> None:
    rules: dict[BranchMerge, Callable[[list[float]], float]] = {
        BranchMerge.KEEP: lambda x: x[0],
        BranchMerge.MAX_SCORE: max,
        BranchMerge.SUM_GATE: sum,
    }
    for rule, reduce in rules.items():
        found = rows_of(merge_branches([scored(rows) for rows in parts], rule))
        for row, merged in enumerate(found):
            names = sorted(set().union(*(rows[row] for rows in parts)))
            assert list(merged) == names
            assert merged == {t: reduce([rows[row][t] for rows in parts if t in rows[row]]) for t in names}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(row, min_size=8, max_size=8))
def test_heads_merge_within_their_group_only(rows: list[Row]) -> None:
    heads = scored(rows)
    rules: dict[GqaMerge, Callable[[list[float]], float]] = {GqaMerge.MAX: max, GqaMerge.SUM: sum}
    for rule, reduce in rules.items():
        found = rows_of(merge_heads(heads, 4, 2, rule))
        for group, merged in enumerate(found):
            members = rows[2 * group : 2 * group + 2]
            assert merged == {
                t: reduce([member[t] for member in members if t in member]) for t in set().union(*members)
            }
    assert merge_heads(heads, 4, 2, GqaMerge.PRIVATE) is heads
    union = group_union(heads.lists(), 2)
    assert union.indices.tolist() == merge_heads(heads, 4, 2, GqaMerge.MAX).indices.tolist()
    assert union.indptr.tolist() == merge_heads(heads, 4, 2, GqaMerge.MAX).indptr.tolist()


def test_private_lists_let_each_query_head_attend_to_its_own_keys_of_its_group() -> None:
    random = np.random.default_rng(9)
    spec = AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim_qk=4, head_dim_vo=3, page_size=4, seq_lens=(10,), qo_lens=(1,),
        dtype=DType.FP32, sm_scale=0.6,
    )  # fmt: skip
    table = PageTable(np.array([[2, 0, 1]]), 4, 3, (frozenset(range(3)),))
    q, k, v = (random.normal(size=shape) for shape in ((1, 4, 4), (3, 4, 2, 4), (3, 4, 2, 3)))
    pages = np.arange(3)
    own = [[0, 7], [9], [], [7, 3, 1]]
    heads = merge_heads(scored([dict.fromkeys(tokens, 1.0) for tokens in own]), 4, 2, GqaMerge.PRIVATE)
    private, inputs = with_private_lists(spec, Inputs(q, PagedCache(pages, k), PagedCache(pages, v)))
    found = forward(private, inputs, table, validate(private, heads.lists(), table))
    order = np.array([2, 0, 1])
    for head, tokens in enumerate(own):
        keys, values = (x[order].reshape(12, 2, -1)[tokens, head // 2] for x in (k, v))
        weights = np.exp(0.6 * keys @ q[0, head])
        expected = weights @ values / weights.sum() if tokens else np.zeros(3)
        np.testing.assert_allclose(found.out[0, head], expected, rtol=1e-13)
    assert found.lse[0, 2] == -np.inf


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(row, max_size=4), st.integers(0, 7))
def test_a_selection_is_the_head_of_the_sorted_row(rows: list[Row], k: int) -> None:
    found = rows_of(select(scored(rows), k))
    assert found == [dict(sorted(sorted(r.items(), key=lambda item: (-item[1], item[0]))[:k])) for r in rows]
    assert all(list(r) == sorted(r) for r in found)


@pytest.mark.parametrize(
    ("indptr", "indices", "scores", "words"),
    [
        ([0, 1, 3], [4, 4, 4], [1, 1, 1], "row 1, entry 1: 4 repeats another"),
        ([0, 1, 3], [4, 4, 5], [1, 1, np.nan], "row 1, entry 1: 5 has no finite score"),
        ([0, 1, 3], [4, 4, 5], [1, 1], "3 indices and 2 scores"),
    ],
)
def test_scored_lists_that_are_none_are_refused(
    indptr: list[int], indices: list[int], scores: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ScoredLists(np.array(indptr), np.array(indices), np.array(scores, np.float64))


def test_merges_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same rows, got \[1, 2\]"):
        merge_branches((D, scored([{}, {}])), BranchMerge.KEEP)
    with pytest.raises(ValueError, match="gates mean nothing with the rule keep"):
        merge_branches((D, W), BranchMerge.KEEP, (1.0, 1.0))
    with pytest.raises(ValueError, match="3 rows do not divide into 2 query heads"):
        merge_heads(scored([{}, {}, {}]), 2, 1, GqaMerge.MAX)
    with pytest.raises(ValueError, match="k must not be negative, got -1"):
        select(D, -1)
