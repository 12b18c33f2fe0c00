"""Task tables and capacity tiers: stable row identities, and the choice of tiers against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.candidates import CandidateLists
from sacts.reference.tasks import TaskTable, from_tasks, task_indptr, to_tasks
from sacts.reference.tiers import best_tiers, expected_cost, from_tiers, smallest_tier, to_tiers

Rows = list[list[int]]
fast = settings(max_examples=100, deadline=None, derandomize=True)
sets = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=9), max_size=7)


def lists(rows: Rows) -> CandidateLists:
    return CandidateLists(np.cumsum([0, *map(len, rows)]), np.array([x for row in rows for x in row], np.int64))


def rows_of(found: CandidateLists) -> Rows:
    return [found.indices[a:b].tolist() for a, b in pairwise(found.indptr.tolist())]


@fast
@given(sets, st.integers(1, 5))
def test_shuffled_tasks_still_name_every_entry_of_every_row_once(rows: Rows, per_task: int) -> None:
    raw = lists(rows)
    tasks = to_tasks(raw, per_task)
    expected = [
        (row, entries[i : i + per_task], i // per_task)
        for row, entries in enumerate(rows)
        for i in range(0, len(entries), per_task)
    ]
    parts = zip(tasks.row.tolist(), tasks.start.tolist(), tasks.end.tolist(), tasks.split.tolist(), strict=True)
    assert [(row, raw.indices[start:end].tolist(), split) for row, start, end, split in parts] == expected
    shuffled = tasks.ordered(np.random.default_rng(per_task).permutation(len(tasks.row)))
    assert rows_of(from_tasks(shuffled, raw.indices)) == rows
    by_length = tasks.ordered(np.argsort(tasks.start - tasks.end, kind="stable"))
    assert rows_of(from_tasks(by_length, raw.indices)) == rows
    assert task_indptr([len(row) for row in rows], per_task).tolist() == [
        sum(-(-len(row) // per_task) for row in rows[:i]) for i in range(len(rows) + 1)
    ]


def table(*tasks: tuple[int, int, int, int]) -> TaskTable:
    row, start, end, split = np.array(tasks).T
    return TaskTable(row, start, end, split, 2)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (table((0, 0, 2, 0), (0, 1, 3, 1), (1, 3, 5, 0)), r"row 0, split 1: \[1, 3\) does not continue at 2"),
        (table((0, 0, 2, 0), (1, 3, 5, 0)), r"row 1, split 0: \[3, 5\) does not continue at 2"),
        (table((0, 1, 5, 0)), r"row 0, split 0: \[1, 5\) does not continue at 0"),
        (table((0, 0, 2, 0), (2, 2, 5, 0)), r"row 2, split 0: \[2, 5\) .* within 2 rows"),
        (table((0, 0, 2, 1), (0, 2, 5, 0)), r"row 0, split 0: \[2, 5\) does not continue at 0"),
        (table((0, 0, 2, 0), (1, 2, 4, 0)), "the tasks end at entry 4 of 5"),
    ],
)
def test_tasks_that_overlap_leave_out_or_swap_entries_are_named(tasks: TaskTable, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_tasks(tasks, np.arange(5))


def test_no_entries_make_no_tasks() -> None:
    tasks = to_tasks(lists([[], []]), 4)
    assert len(tasks.row) == 0
    assert rows_of(from_tasks(tasks, np.zeros(0, np.int64))) == [[], []]
    with pytest.raises(ValueError, match="at least 1 entry, got 0"):
        to_tasks(lists([[]]), 0)


# --- tiers


@fast
@given(sets, st.lists(st.integers(0, 12), unique=True, max_size=3))
def test_tiers_give_back_the_lists_by_row_identity(rows: Rows, sizes: list[int]) -> None:
    capacities = sorted({*sizes, 9})
    tiers = to_tiers(lists(rows), capacities, -1, 31)
    for tier in tiers:
        assert tier.lists.entries.shape == (len(tier.rows), tier.capacity)
    assert rows_of(from_tiers(tiers)) == rows
    assert rows_of(from_tiers(tiers[::-1])) == rows
    expected = [min(c for c in capacities if c >= len(row)) for row in rows]
    assert smallest_tier([len(row) for row in rows], capacities).tolist() == expected


@pytest.mark.parametrize(
    ("lengths", "capacities", "words"),
    [
        ([3, 9], (4, 8), "row 1 has 9 entries, more than the largest tier 8"),
        ([3], (8, 8), "must ascend"),
        ([3], (), "must ascend"),
    ],
)
def test_rows_that_fit_no_tier_are_never_cut(lengths: list[int], capacities: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        smallest_tier(lengths, capacities)


def test_a_lost_row_is_noticed() -> None:
    tiers = to_tiers(lists([[1], [2, 3]]), (1, 2), -1, 9)
    with pytest.raises(ValueError, match=r"each of 1 rows once, got rows \[1\]"):
        from_tiers(tiers[1:])


COSTS = {"slots": lambda c: c, "launch": lambda c: 5 + c, "waves": lambda c: np.ceil(c / 8), "odd": lambda c: c % 5 + 1}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.lists(st.integers(1, 30), unique=True, max_size=6),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.5, 3.0)),
    st.sampled_from(sorted(COSTS)),
)
def test_the_choice_of_tiers_is_the_cheapest_of_all_choices(
    lengths: list[int], sizes: list[int], max_tiers: int, penalty: float, name: str
) -> None:
    menu = sorted({*sizes, 30})
    expected = min(
        np.mean([COSTS[name](min(c for c in tiers if c >= k)) for k in lengths]) + penalty * m
        for m in range(1, max_tiers + 1)
        for tiers in combinations(menu, m)
        if tiers[-1] >= max(lengths)
    )
    found = best_tiers(lengths, menu, max_tiers, penalty=penalty, cost=COSTS[name])
    assert found.cost == pytest.approx(expected, rel=1e-12)
    assert set(found.capacities) <= set(menu)
    own = expected_cost(lengths, found.capacities, penalty=penalty, cost=COSTS[name])
    assert own == pytest.approx(found.cost, rel=1e-12)


def test_the_cost_of_a_choice_is_the_mean_over_the_rows_plus_the_price_of_its_tiers() -> None:
    assert expected_cost([64, 65, 129, 1], (64, 128, 256)) == (64 + 128 + 256 + 64) / 4
    assert expected_cost([3, 9], (4, 16), penalty=2.0, cost=lambda c: 10 * c) == (40 + 160) / 2 + 4
    assert expected_cost([3, 9], (16,), penalty=2.0, cost=lambda c: 10 * c) == 160 + 2


def test_a_choice_out_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="leave no choice"):
        best_tiers([31], (8, 30), 2)
    with pytest.raises(ValueError, match="leave no choice"):
        best_tiers([], (8, 30), 2)


def test_a_price_per_tier_buys_fewer_tiers() -> None:
    lengths = [60] * 10 + [120] * 3 + [250]
    assert best_tiers(lengths, (64, 128, 256), 3).capacities == (64, 128, 256)
    assert best_tiers(lengths, (64, 128, 256), 3, penalty=40.0).capacities == (64, 256)
    assert best_tiers(lengths, (64, 128, 256), 3, penalty=1e3).capacities == (256,)
