"""Which rows are judged where a case has too many for all: a stratified sample, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sacts.reference.bounds import Expected
from sacts.reference.candidates import ValidatedCandidates, lists_of, rows_of
from sacts.reference.edges import row_kv_heads
from sacts.reference.formats import FORMATS
from sacts.reference.forward import Inputs, edges
from sacts.reference.invariants import Sizes, within
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec
from sacts.reports.records import Sample

from .build import Problem
from .draw import Array, Ints

EXACT_EDGES = 2**22  # edges times query heads of one copy that are evaluated: about a second
ALWAYS = 4  # rows that every sample holds: the first, the last, the longest and the shortest


def exact_rows(problem: Problem, limit: int | None = None) -> Ints | None:
    """The candidate rows that are judged exactly, sorted; None where all of them are. `limit`: EXACT_EDGES."""
    limit, lengths = EXACT_EDGES if limit is None else limit, row_lengths(problem)
    cost = lengths * problem.spec.heads_per_list
    if cost.sum() <= limit or problem.spec.empty_row.forces:
        return None
    return affordable(by_priority(problem, lengths), cost, limit)


def row_lengths(problem: Problem) -> Ints:
    """Edges of each candidate row: [num_rows]."""
    rows, _, _ = edges(problem.spec, problem.candidates)
    return np.bincount(rows, minlength=problem.spec.num_rows)


def by_priority(problem: Problem, lengths: Ints) -> Ints:
    """All candidate rows with an edge, the most telling first: the first and the last, the longest and the shortest;
    the last and the first query of each request, by head; one row for each length beside or on a multiple of the
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
            yield from range(token * spec.list_heads, (token + 1) * spec.list_heads) if length else ()


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


def only(problem: Problem, rows: Ints) -> Problem:
    """The problem with the lists of these candidate rows, and empty ones elsewhere."""
    lists = problem.candidates
    row = rows_of(lists.indptr)
    kept = np.isin(row, rows)
    some = lists_of(row[kept], lists.indices[kept], problem.spec.num_rows)
    return replace(
        problem, candidates=ValidatedCandidates(some.indptr, some.indices, lists.counts[kept], lists.duplicates)
    )


def with_invariants(
    problem: Problem, inputs: Inputs, numerics: Numerics, rows: Ints, expected: Expected, plain: bool
) -> Expected:
    """What is expected of `rows`, completed by what all other rows with an edge must satisfy: out and lse are finite,
    out lies between its request's values, lse is ln k but for the logits' size. Of rows that are not plain: finite.
    """
    spec, lengths = problem.spec, row_lengths(problem)
    others = np.setdiff1d(np.flatnonzero(lengths), rows)
    slots = np.diff(problem.candidates.indptr) * spec.block_size
    low, high, longest = _reach(problem, inputs)
    request = np.asarray(spec.token_request, np.int64)[others // spec.list_heads]
    head = row_kv_heads(spec, others)
    by_row = (spec.num_rows, spec.heads_per_list)
    norms = np.linalg.norm(inputs.q, axis=-1).reshape(by_row)
    whole = replace(expected, **{name: getattr(expected, name).copy() for name in _FILLED})
    end, most = FORMATS[numerics.out].max, float(np.finfo(np.float32).max)
    for lane in range(spec.heads_per_list):
        size = abs(spec.sm_scale) * norms[others, lane] * longest[request, head]
        part = Sizes(lengths[others], slots[others], size, low[request, head], high[request, head], spec.head_dim_qk)
        found = within(part, numerics)
        for name, value in (
            ("out_lo", found.out_lo if plain else -end),
            ("out_hi", found.out_hi if plain else end),
            ("half_width", np.inf),
            ("out", (found.out_lo + found.out_hi) / 2 if plain else 0.0),
            ("lse", found.lse if plain else 0.0),
            ("lse_bound", found.lse_bound if plain else most),
            ("edges", lengths[others]),
            ("trusted", True),
        ):
            view = getattr(whole, name)
            view.reshape(*by_row, *view.shape[2:])[others, lane] = value
    return whole


_FILLED = ("out_lo", "out_hi", "half_width", "out", "lse", "lse_bound", "edges", "trusted")


def _reach(problem: Problem, inputs: Inputs) -> tuple[Array, Array, Array]:
    """Of the attended keys of each request and KV head: the least and the largest V [requests, heads, d_vo], and the
    longest K [requests, heads].
    """
    spec = problem.spec
    shape = (spec.num_requests, spec.num_kv_heads)
    low, high = np.zeros((*shape, spec.head_dim_vo)), np.zeros((*shape, spec.head_dim_vo))
    longest = np.zeros(shape)
    norms = np.linalg.norm(inputs.k.data, axis=-1)
    for request in range(spec.num_requests):
        mine = problem.position_in(request) >= 0
        for head in range(spec.num_kv_heads):
            seen = mine & problem.needed[..., head]
            if seen.any():
                v = inputs.v.data[seen, head]
                low[request, head], high[request, head] = v.min(axis=0), v.max(axis=0)
                longest[request, head] = norms[seen, head].max()
    return low, high, longest
