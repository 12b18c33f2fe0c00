"""Which queries share the tasks of the bundled kernels: those of one request and branch with one list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_kernel_tasks import case_of

from sacts.conformance.build import build
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.paged.tasks import Rows, tasks_of
from sacts.matrices.cell import parse
from sacts.reference.spec import CausalRule, Schedule


def lists_of(draw: np.random.Generator, tokens: int, heads: int) -> list[list[list[int]]]:
    """Random lists [tokens][heads], often those of the token before."""
    lists: list[list[list[int]]] = []
    for token in range(tokens):
        lists.append([])
        for head in range(heads):
            if token and draw.random() < 0.7:
                lists[-1].append(lists[-2][head])
            else:
                lists[-1].append(sorted(draw.choice(20, draw.integers(0, 5), replace=False).tolist()))
    return lists


@pytest.mark.parametrize("q_tile", [1, 2, 4])
def test_rows_of_one_list_share_their_tasks(q_tile: int) -> None:
    """The tiles, written as a loop over tokens."""
    for seed in range(30):
        draw = np.random.default_rng(seed)
        tokens, heads = 9, int(draw.integers(1, 4))
        lists = lists_of(draw, tokens, heads)
        lengths = torch.tensor([len(one) for token in lists for one in token])
        repeats = [bool(t) and lists[t][h] == lists[t - 1][h] for t in range(tokens) for h in range(heads)]
        rows = Rows(lengths.cumsum(0) - lengths, lengths, 1, torch.zeros(len(lengths)), torch.tensor(repeats), heads)
        tasks = tasks_of(rows, 2, 2, schedule=Schedule.STATIC, q_tile=q_tile)
        found = {int(row): int(count) for row, count in zip(tasks.columns.row, tasks.columns.queries, strict=True)}
        wanted = {}
        for head in range(heads):
            begin = 0
            for token in range(1, tokens + 1):
                if token == tokens or not repeats[token * heads + head] or token - begin == q_tile:
                    wanted[begin * heads + head] = token - begin
                    begin = token
        assert found == wanted
        assert tasks.split_rows.tolist() == [row for row, length in enumerate(lengths.tolist()) if length > 2]


@pytest.mark.parametrize(
    ("cell", "queries"),
    [
        ("prefill/bf16/kv:60/q:8/qtile:4/format:fixed_k/qblock:4", [4, 4, 4, 4]),
        ("prefill/bf16/kv:60/q:8/block:16/pattern:all/causal:bottom_right/qtile:4", [4, 4, 4, 4]),
        ("prefill/bf16/kv:90/q:3/qtile:4/format:fixed_k", [1] * 6),
        ("prefill/bf16/kv:60+60/q:3+2/block:64/pattern:all/qtile:4", [3, 3, 2, 2]),
        ("prefill/bf16/kv:60/q:3/block:64/pattern:all/qtile:4/branches:2", [3, 3, 3, 3]),
        ("prefill/bf16/kv:9/q:3/pattern:empty/empty:force_self/qtile:4", [1] * 6),
        ("prefill/bf16/kv:9/q:3/pattern:empty/qtile:4", [3, 3]),
    ],
)
def test_queries_share_a_tile_where_request_branch_and_list_are_one(cell: str, queries: list[int]) -> None:
    plan = Adapter().plan(case_of(cell))
    assert plan.tasks.columns.queries.tolist() == queries


@pytest.mark.parametrize(
    ("positions", "window", "queries"),
    [
        ((5, 50, 6, 51), 3, [1, 1, 1, 1]),
        ((5, 9, 13, 18), 3, [3, 1]),  # keys 2 to 13 without a gap, then 15 to 18
        ((18, 13, 9, 5), 3, [1, 3]),
        ((5, 50, 6, 51), -1, [4]),
    ],
)
def test_queries_share_a_tile_where_their_windows_leave_no_gap(
    positions: tuple[int, ...], window: int, queries: list[int]
) -> None:
    case = case_of("prefill/bf16/kv:60/q:4/heads:2-1/block:64/pattern:all/qtile:4")
    spec = replace(case.spec, causal=CausalRule.ABSOLUTE, query_positions=positions, window_left=window)
    assert Adapter().plan(replace(case, spec=spec)).tasks.columns.queries.tolist() == queries


def test_where_the_backend_chooses_few_equal_lists_make_no_tiles_of_queries() -> None:
    together, apart = "prefill/bf16/kv:60/q:8/qblock:4", "prefill/bf16/kv:90/q:8"
    any_tile = replace(build(parse(together)).hints, q_tile=0)
    assert Adapter().plan(case_of(together, any_tile)).tasks.q_tile > 1
    assert Adapter().plan(case_of(apart, any_tile)).tasks.q_tile == 1
