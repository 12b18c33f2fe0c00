"""Which rows are judged where a case has too many for all: a stratified sample, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sacts.reference.forward import edges
from sacts.reference.spec import AttentionSpec
from sacts.reports.records import Sample

from .build import Problem
from .draw import Ints

ALWAYS = 4  # rows that every sample holds: the first, the last, the longest and the shortest


def row_lengths(problem: Problem) -> Ints:
    """Edges of each candidate row: [num_rows]."""
    rows, _, _ = edges(problem.spec, problem.candidates)
    return np.bincount(rows, minlength=problem.spec.num_rows)


def by_priority(problem: Problem, lengths: Ints) -> Ints:
    """All candidate rows with an edge, the most telling first: the first and the last, the longest and the shortest;
    the last and the first query of each request, by KV head; one row for each length beside or on a multiple of the
    page or the tile; then the others in random order.
    """
    real = np.flatnonzero(lengths)
    if not len(real):
        return real
    longest, shortest = real[lengths[real].argmax()], real[lengths[real].argmin()]
    order = [real[0], real[-1], longest, shortest, *_ends(problem.spec), *_boundaries(problem, lengths)]
    order += real[problem.draw("sample").permutation(len(real))].tolist()
    return np.array([row for row in dict.fromkeys(map(int, order)) if lengths[row]], np.int64)


def _ends(spec: AttentionSpec) -> Iterator[int]:
    for place in (-1, 0):
        for request, length in enumerate(spec.qo_lens):
            token = spec.qo_indptr[request] + place % length if length else 0
            yield from range(token * spec.num_kv_heads, (token + 1) * spec.num_kv_heads) if length else ()


def _boundaries(problem: Problem, lengths: Ints) -> Ints:
    near = np.zeros(len(lengths), bool)
    for size in {problem.spec.page_size, problem.hints.kv_tile} - {1}:
        near |= (lengths + 1) % size <= 2
    rows = np.flatnonzero(near)
    _, first = np.unique(lengths[rows], return_index=True)
    return rows[first]


def affordable(order: Ints, cost: Ints, limit: int) -> Ints:
    """As many rows of `order` as together cost at most `limit`, and the first ALWAYS of them; `cost` by row. Sorted."""
    taken = np.cumsum(cost[order]) <= limit
    taken[:ALWAYS] = True
    return np.sort(order[taken])


def told(rows: Ints, of: int) -> Sample:
    """The sample as a record holds it."""
    return Sample(rows=rows.tolist(), of=of)
