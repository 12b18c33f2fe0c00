"""Smaller problems out of one: some of the requests, or a part of each row's list. Pages and their values stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.candidates import lists_of, rows_of, validate

from ..adapter import PADDING
from ..build import Problem
from ..relations import chosen
from .launches import Family

Bools = NDArray[np.bool_]


def some_entries(problem: Problem, keep: Bools) -> Problem:
    """Only these validated entries [nnz]; raw lists keep their repeats of them, and their padding."""
    rows, lists, raw = rows_of(problem.candidates.indptr), problem.candidates, problem.raw
    raw_rows = rows_of(raw.indptr)
    kept = np.isin(_keys(raw_rows, raw.indices), _keys(rows[keep], lists.indices[keep]))
    kept |= raw.indices == PADDING
    cut = lists_of(raw_rows[kept], raw.indices[kept], problem.spec.num_rows)
    problem = problem.lenient  # a cut may leave rows empty
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
    variant = chosen(family.problem, family.inputs, requests)
    return replace(family, problem=variant.problem, inputs=variant.inputs)
