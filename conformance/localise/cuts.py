"""Smaller problems out of one: some of the requests, or a part of each row's list. Pages and their values stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.candidates import CandidateLists, lists_of, rows_of, validate
from sacts.reference.paging import PageTable

from ..adapter import PADDING
from ..build import Problem
from .launches import Family

Bools = NDArray[np.bool_]


def some_entries(problem: Problem, keep: Bools) -> Problem:
    """Only these validated entries [nnz]; raw lists keep their repeats of them, and their padding."""
    rows, lists, raw = rows_of(problem.candidates.indptr), problem.candidates, problem.raw
    raw_rows = rows_of(raw.indptr)
    kept = np.isin(_keys(raw_rows, raw.indices), _keys(rows[keep], lists.indices[keep]))
    kept |= raw.indices == PADDING
    cut = lists_of(raw_rows[kept], raw.indices[kept], problem.spec.num_rows)
    return replace(problem, raw=cut, candidates=validate(problem.spec, cut, problem.table, sentinels=(PADDING,)))


def _keys(rows: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    return (rows << 32) + values


def tile_range(family: Family, first: int, last: int) -> Family:
    """Each row's tiles [first, last) only, in the order of `slots.walk`. Blocks are cut whole: where one is larger
    than a tile, the range grows to its end.
    """
    lists, block, tile = family.problem.candidates, family.problem.spec.block_size, family.hints.kv_tile
    ordinal = np.arange(len(lists.indices)) - lists.indptr[rows_of(lists.indptr)]
    keep = (ordinal * block >= first * tile) & (ordinal * block < last * tile)
    return replace(family, problem=some_entries(family.problem, keep))


def some_requests(family: Family, requests: Sequence[int]) -> Family:
    """Only these requests, in this order; the pages of the others hold their data but belong to nobody."""
    problem, spec = family.problem, family.problem.spec
    tokens = [np.arange(spec.qo_indptr[n], spec.qo_indptr[n + 1]) for n in requests]
    token = np.concatenate([np.zeros(0, np.int64), *tokens])
    row = (token[:, None] * spec.num_kv_heads + np.arange(spec.num_kv_heads)).ravel()
    dropout = spec.dropout
    if dropout:
        uids = dropout.request_uids or tuple(range(spec.num_requests))
        dropout = replace(dropout, request_uids=tuple(uids[n] for n in requests))
    smaller = replace(
        spec,
        seq_lens=tuple(spec.seq_lens[n] for n in requests),
        qo_lens=tuple(spec.qo_lens[n] for n in requests),
        query_positions=tuple(spec.query_positions[i] for i in token) if spec.query_positions else (),
        query_ordinals=tuple(spec.query_ordinals[i] for i in row) if spec.query_ordinals else (),
        dropout=dropout,
    )
    old = problem.table
    table = PageTable(old.table[list(requests)], old.page_size, old.num_pages, tuple(old.owned[n] for n in requests))
    starts = problem.raw.indptr
    lists = [problem.raw.indices[starts[r] : starts[r + 1]] for r in row]
    raw = CandidateLists(np.cumsum([0, *map(len, lists)]), np.concatenate([np.zeros(0, np.int64), *lists]))
    renumbered = np.full(spec.num_requests + 1, -1, np.int64)  # the last stands for -1
    renumbered[list(requests)] = np.arange(len(requests))
    cut = replace(
        problem,
        spec=smaller,
        table=table,
        raw=raw,
        candidates=validate(smaller, raw, table, sentinels=(PADDING,)),
        slot_request=renumbered[problem.slot_request],
    )
    return replace(family, problem=cut, inputs=family.inputs._replace(q=family.inputs.q[token]))
