"""Groups: a problem cut into batches of rows that share keys, so that BLAS does the work.

Dense: all rows of one (request, KV head) over one range of keys, unattended ones masked. Gathered: each row over its
own keys. `DENSE_KEYS` and `DENSE_SHARE` decide, as measured (docs/semantics-numbers.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .candidates import ValidatedCandidates
from .edges import Edges, attended
from .paging import PagedCache, PageTable
from .spec import AttentionSpec, CandidateKind

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

DENSE_KEYS = 256  # up to this many keys dense costs less than gathering, however sparse
DENSE_SHARE = 0.25  # from this share of edges on dense costs less than gathering
MAX_LOGITS = 2**20  # of one group
MAX_GATHERED = 2**19  # elements of K and V together in one gathered group


class Inputs(NamedTuple):
    """The values of a problem: q [num_tokens, num_qo_heads, head_dim_qk], the paged K and V, and the gate of the
    epilogue [num_tokens, num_qo_heads, head_dim_vo or 1] where the spec has one.
    """

    q: Array
    k: PagedCache
    v: PagedCache
    gate: Array | None = None


@dataclass(frozen=True)
class Group:
    """b batches of r rows of g query heads over S keys; a gathered group has r = 1 and pads short rows by count 0.

    All of one request. rows [b, r]: candidate rows; qo_heads [b, g]; t and key_position [b, S]: logical position, and
    what position-dependent terms use; query_position [b, r]: theirs for the query; q [b, r, g, d_qk], k [b, S, d_qk]
    (both turned by RoPE), v [b, S, d_vo], zero where no row of the batch attends; counts [b, r, S]: 0 where (row, key)
    is no edge after all masks; logits [b, r, g, S] with -inf there and + ln(count) elsewhere; slots [b, r]: slots that
    the candidate entries name.
    """

    request: int
    rows: Ints
    qo_heads: Ints
    t: Ints
    key_position: Ints
    query_position: Ints
    q: Array
    k: Array
    v: Array
    counts: Ints
    logits: Array
    slots: Ints


class _Batch(NamedTuple):
    """rows [b, r]; t and key_position [b, S]; counts [b, r, S]."""

    rows: Ints
    t: Ints
    key_position: Ints
    counts: Ints


def groups(spec: AttentionSpec, inputs: Inputs, table: PageTable, candidates: ValidatedCandidates) -> Iterator[Group]:
    """Cut a problem into groups; rows without an edge may be left out.

    Raises LookupError for an attended page without data, ValueError for an attended value that is not finite.
    """
    edges = attended(spec, candidates)
    if not len(edges.row):
        return
    q = inputs.q.reshape(spec.num_rows, -1, spec.head_dim_qk)
    flat = [cache.data.reshape(-1, cache.data.shape[-1]) for cache in (inputs.k, inputs.v)]
    ends = np.searchsorted(edges.row, np.asarray(spec.qo_indptr) * _row_heads(spec))
    for request in range(spec.num_requests):
        mine = slice(int(ends[request]), int(ends[request + 1]))
        if mine.start == mine.stop:
            continue
        slots = [_slots(cache, table, request, edges.t[mine]) for cache in (inputs.k, inputs.v)]
        for batch in _batches(spec, request, edges, mine):
            kv_head = batch.rows[:, :1] % _row_heads(spec) * spec.num_kv_heads // _row_heads(spec)
            k, v = (
                x.take(slot[batch.t] * spec.num_kv_heads + kv_head, axis=0) for x, slot in zip(flat, slots, strict=True)
            )
            yield _group(spec, request, batch, edges, q[batch.rows], k, v)


def _row_heads(spec: AttentionSpec) -> int:
    """Candidate rows of one token."""
    return spec.num_rows // max(spec.num_tokens, 1)


def _slots(cache: PagedCache, table: PageTable, request: int, t: Ints) -> Ints:
    """Index of each logical position among the slots of `cache.data`; pages that no `t` needs may have none."""
    pages = np.zeros(int(t.max()) // table.page_size + 1, bool)
    pages[t // table.page_size] = True
    physical = table.table[request, : len(pages)]
    at = np.minimum(np.searchsorted(cache.pages, physical), len(cache.pages) - 1)
    missing = pages & ((at < 0) | (cache.pages[at] != physical) if len(cache.pages) else pages)
    if missing.any():
        page = int(np.argmax(missing))
        raise LookupError(
            f"request {request}, position {page * table.page_size}: physical page {physical[page]} holds no data"
        )
    return (at[:, None] * table.page_size + np.arange(table.page_size)).ravel()


def _batches(spec: AttentionSpec, request: int, edges: Edges, mine: slice) -> Iterator[_Batch]:
    t = edges.t[mine]
    low, keys = int(t.min()), int(t.max() - t.min()) + 1
    rows = spec.qo_lens[request] * _row_heads(spec)
    dense = keys <= DENSE_KEYS or (len(t) >= DENSE_SHARE * keys * rows and spec.qo_lens[request] > 1)
    if dense and spec.candidate_kind is not CandidateKind.SEQUENCE:
        return _dense(spec, request, edges, mine, low, keys)
    return _gathered(spec, request, edges, mine)


def _dense(spec: AttentionSpec, request: int, edges: Edges, mine: slice, low: int, keys: int) -> Iterator[_Batch]:
    heads, queries, first = _row_heads(spec), spec.qo_lens[request], spec.qo_indptr[request]
    per_row = keys * spec.num_qo_heads // heads
    head_step = max(1, min(heads, MAX_LOGITS // (per_row * queries)))
    query_step = max(1, MAX_LOGITS // (per_row * head_step))
    t = low + np.arange(keys)
    rows = (first * heads + np.arange(queries * heads)).reshape(queries, heads)
    starts = np.searchsorted(edges.row[mine], rows[::query_step, 0]) + mine.start
    for query, start, stop in zip(range(0, queries, query_step), starts, [*starts[1:], mine.stop], strict=True):
        chosen = rows[query : query + query_step]
        counts = np.zeros((*chosen.shape, keys), np.int64)
        counts.reshape(-1, keys)[edges.row[start:stop] - chosen[0, 0], edges.t[start:stop] - low] = edges.multiplicity[
            start:stop
        ]
        for head in range(0, heads, head_step):
            part = slice(head, head + head_step)
            shared = np.broadcast_to(t, (len(chosen[0, part]), keys))
            yield _Batch(chosen[:, part].T, shared, shared, counts[:, part].swapaxes(0, 1))


def _gathered(spec: AttentionSpec, request: int, edges: Edges, mine: slice) -> Iterator[_Batch]:
    """Rows of similar length together, each padded to the longest by its last key, with count 0."""
    rows, starts, lengths = np.unique(edges.row[mine], return_index=True, return_counts=True)
    order = np.argsort(-lengths, kind="stable")
    rows, starts, lengths = rows[order], starts[order] + mine.start, lengths[order]
    at = 0
    while at < len(rows):
        width = int(lengths[at])
        step = max(1, MAX_GATHERED // (width * (spec.head_dim_qk + spec.head_dim_vo)))
        part = slice(at, at + step)
        slot = np.arange(width)
        edge = starts[part, None] + np.minimum(slot, lengths[part, None] - 1)
        counts = np.where(slot < lengths[part, None], edges.multiplicity[edge], 0)
        yield _Batch(rows[part, None], edges.t[edge], edges.key_position[edge], counts[:, None])
        at += step


def _group(spec: AttentionSpec, request: int, batch: _Batch, edges: Edges, q: Array, k: Array, v: Array) -> Group:
    row_heads = _row_heads(spec)
    group_size = spec.num_qo_heads // row_heads
    edge = batch.counts > 0
    unused = ~edge.any(axis=1)
    if unused.any():  # what stands there is junk
        k[unused], v[unused] = 0.0, 0.0
    qo_heads = batch.rows[:, :1] % row_heads * group_size + np.arange(group_size)
    query_position = edges.query_position[batch.rows]
    if spec.rope:
        q = scores.rotate(q, query_position[..., None], spec.rope)
        k = scores.rotate(k, batch.key_position, spec.rope)
    with np.errstate(over="ignore", invalid="ignore"):
        z = scores.logits(q, k, spec.sm_scale)
        _check_finite(spec, request, batch, edge, z, v)
    if spec.logits_soft_cap:
        z = scores.soft_cap(z, spec.logits_soft_cap)
    if spec.alibi_slopes or spec.buckets:
        z += scores.bias(spec, query_position[..., None] - batch.key_position[:, None], qo_heads)
    if spec.candidate_kind is CandidateKind.MULTISET:
        z += np.log(np.maximum(batch.counts, 1))[:, :, None]
    if not edge.all():
        np.copyto(z, -np.inf, where=~edge[:, :, None])
    return Group(
        request,
        batch.rows,
        qo_heads,
        batch.t,
        batch.key_position,
        query_position,
        q,
        k,
        v,
        batch.counts,
        z,
        edges.named[batch.rows],
    )


def _check_finite(spec: AttentionSpec, request: int, batch: _Batch, edge: Bools, z: Array, v: Array) -> None:
    """Attended values must be finite: a NaN would look like an empty row."""
    if np.isfinite(z.sum()) and np.isfinite(v.sum()):
        return
    bad = (edge & ~np.isfinite(z).all(axis=2)).any(axis=1) | (edge.any(axis=1) & ~np.isfinite(v).all(axis=-1))
    if bad.any():
        at = tuple(np.argwhere(bad)[0])
        head = spec.row(int(batch.rows[at[0], 0])).kv_head
        raise ValueError(
            f"request {request}, KV head {head}: token {batch.t[at]} is attended, but its logit or V is not finite"
        )
