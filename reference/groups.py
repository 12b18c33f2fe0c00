"""Groups: a problem cut into batches of rows that share keys, so that BLAS does the work.

Dense: all rows of one (request, head that has lists) over every key that the request attends, masked. Gathered: each
row over its own keys. `SMALL` and `DENSE_SHARE` decide, as measured (docs/semantics-numbers.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .candidates import ValidatedCandidates
from .edges import Edges, attended, row_kv_heads
from .keys import SMALL, KeyStore, norm, store_of
from .paging import PagedCache, PageTable
from .runs import runs
from .spec import AttentionSpec, CandidateKind

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

DENSE_SHARE = 0.125  # from this share of edges on dense costs less than gathering
MAX_LOGITS = 2**20  # of one dense group
LEAST_SCALE = 1e-140  # a bound with a smaller scale would underflow before its terms do
MAX_GATHERED = 2**19  # elements of K and V together in one gathered group


class Inputs(NamedTuple):
    """The values of a problem: q [num_tokens, num_qo_heads, head_dim_qk], the paged K and V, and where the epilogue is
    a gate, that: [num_tokens, num_qo_heads, head_dim_vo or 1].
    """

    q: Array
    k: PagedCache
    v: PagedCache
    gate: Array | None = None


@dataclass(frozen=True)
class Group:
    """b batches of r rows of g query heads over S keys; a gathered group has r = 1 and pads short rows by count 0.

    All of one request. rows [b, r]: candidate rows; qo_heads [b, g]; t [b, S]: logical positions of the keys;
    key_position [b, S] and query_position [b, r]: what position-dependent terms use, t or the ordinal; q [b, r, g,
    d_qk], k [b, S, d_qk] (both turned by RoPE), v [b, S, d_vo]; K and V are zero where no row attends; counts [b, r,
    S]: 0 where (row, key) is no edge after all masks (a byte each where the kind repeats no edge); z [b, r, g, S]:
    logits with + ln(count) but without masks, junk where there is no edge; slots [b, r]: slots that the candidate
    entries name. product_bound [b, r, g]: at least |sm_scale| sum_c |q_c k_jc| of each edge j; largest_v [b, d_vo]: at
    least |v_j| of each.
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
    z: Array
    slots: Ints
    product_bound: Array
    largest_v: Array

    @cached_property
    def edge(self) -> Bools:
        """[b, r, S]: where (row, key) is an edge after all masks."""
        return self.counts > 0

    @cached_property
    def logits(self) -> Array:
        """[b, r, g, S]: -inf where there is no edge."""
        return np.where(self.edge[:, :, None], self.z, -np.inf)


class _Batch(NamedTuple):
    """rows [b, r]; key [b, S]: places in the store, None for all of it; key_position [b, S]; counts [b, r, S];
    longest [b, r]: the largest norm of an attended key, where it is known already.
    """

    rows: Ints
    key: Ints | None
    key_position: Ints
    counts: Ints
    longest: Array | None = None


def groups(
    spec: AttentionSpec,
    inputs: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    edges: Edges | None = None,
) -> Iterator[Group]:
    """Cut a problem into groups; rows without an edge may be left out. `edges`: what `attended` says, where known.

    Raises LookupError for an attended page without data, ValueError for an attended value that is not finite.
    """
    edges = attended(spec, candidates) if edges is None else edges
    if not len(edges.row):
        return
    q = inputs.q.reshape(spec.num_rows, spec.heads_per_list, spec.head_dim_qk)
    ends = np.searchsorted(edges.row, np.asarray(spec.qo_indptr) * spec.list_heads)
    for request in range(spec.num_requests):
        mine = edges.part(int(ends[request]), int(ends[request + 1]))
        if not len(mine.row):
            continue
        store = store_of(spec, inputs.k, inputs.v, table, request, mine)
        batches = _dense if _dense_pays(spec, request, mine, store) else _gathered
        for batch in batches(spec, request, mine, store):
            yield _group(spec, request, batch, mine, q[batch.rows], store)


def _dense_pays(spec: AttentionSpec, request: int, edges: Edges, store: KeyStore) -> bool:
    """Dense needs the same place of a key for all rows (no ordinals), and its keys in one piece."""
    pairs = len(store.t) * spec.qo_lens[request] * spec.list_heads
    small = len(store.t) <= SMALL or len(edges.t) >= DENSE_SHARE * pairs
    return small and store.compact and spec.candidate_kind is not CandidateKind.SEQUENCE


def _dense(spec: AttentionSpec, request: int, edges: Edges, store: KeyStore) -> Iterator[_Batch]:
    heads, queries, keys = spec.list_heads, spec.qo_lens[request], len(store.t)
    per_row = keys * spec.heads_per_list
    head_step = max(1, min(heads, MAX_LOGITS // (per_row * queries)))
    query_step = max(1, MAX_LOGITS // (per_row * head_step))
    rows = (spec.qo_indptr[request] * heads + np.arange(queries * heads)).reshape(queries, heads)
    starts = np.searchsorted(edges.row, rows[::query_step, 0])
    for query, start, stop in zip(range(0, queries, query_step), starts, [*starts[1:], len(edges.row)], strict=True):
        chosen, part = rows[query : query + query_step], edges.part(int(start), int(stop))
        row, place = part.row - chosen[0, 0], store.place[part.t]
        counts = np.zeros((*chosen.shape, keys), _count_type(spec))
        counts.reshape(-1, keys)[row, place] = part.multiplicity
        longest = _largest_by_row(row, store.norm_k[place * store.heads + row_kv_heads(spec, part.row)], chosen.size)
        longest = longest.reshape(chosen.shape)
        for head in range(0, heads, head_step):
            some = slice(head, head + head_step)
            t = np.broadcast_to(store.t, (len(chosen[0, some]), keys))
            yield _Batch(chosen[:, some].T, None, t, counts[:, some].swapaxes(0, 1), longest[:, some].T)


def _count_type(spec: AttentionSpec) -> type[np.integer]:
    """Counts are the largest array but the logits; where none exceeds 1, a byte each will do."""
    return np.int64 if spec.candidate_kind is CandidateKind.MULTISET else np.int8


def _largest_by_row(row: Ints, values: Array, rows: int) -> Array:
    """The largest of the values of each row, 0 for a row without any; `row` is sorted."""
    result = np.zeros(rows)
    start, _ = runs(row)
    if len(start):
        result[row[start]] = np.maximum.reduceat(values, start)
    return result


def _gathered(spec: AttentionSpec, request: int, edges: Edges, store: KeyStore) -> Iterator[_Batch]:
    """Rows of similar length together, each padded to the longest by its last key, with count 0."""
    rows, starts, lengths = np.unique(edges.row, return_index=True, return_counts=True)
    order = np.argsort(-lengths, kind="stable")
    rows, starts, lengths = rows[order], starts[order], lengths[order]
    at = 0
    while at < len(rows):
        width = int(lengths[at])
        step = max(1, MAX_GATHERED // (width * (spec.head_dim_qk + spec.head_dim_vo)))
        length, slot = lengths[at : at + step, None], np.arange(width)
        edge = starts[at : at + step, None] + np.minimum(slot, length - 1)
        counts = np.where(slot < length, edges.multiplicity[edge], 0)[:, None].astype(_count_type(spec))
        yield _Batch(rows[at : at + step, None], store.place[edges.t[edge]], edges.key_position[edge], counts)
        at += step


def _group(spec: AttentionSpec, request: int, batch: _Batch, edges: Edges, q: Array, store: KeyStore) -> Group:
    kv_heads = row_kv_heads(spec, batch.rows[:, 0])
    first_head = batch.rows[:, :1] % spec.list_heads * spec.heads_per_list
    qo_heads = first_head + np.arange(spec.heads_per_list)
    keys = store.all(kv_heads) if batch.key is None else store.some(batch.key, kv_heads)
    edge = batch.counts > 0
    t = np.broadcast_to(store.t, edge[:, 0].shape) if batch.key is None else store.t[batch.key]
    with np.errstate(over="ignore", invalid="ignore"):
        longest = (edge * keys.norm_k[:, None]).max(axis=-1) if batch.longest is None else batch.longest
        product_bound = max(abs(spec.sm_scale), LEAST_SCALE) * norm(q) * longest[..., None]
    query_position = edges.query_position[batch.rows]
    k = keys.k
    if spec.rope:
        q = scores.rotate(q, query_position[..., None], spec.rope)
        k = k if store.turned else scores.rotate(k, batch.key_position, spec.rope)
    z = _logits(spec, q, k, query_position, batch, qo_heads)
    if not (np.isfinite(product_bound).all() and np.isfinite(keys.largest_v).all()):
        z = np.where(edge[:, :, None], z, 0.0)
        _check_finite(
            request,
            kv_heads,
            t,
            edge,
            scores.logits(q, k, spec.sm_scale),
            keys.v,
        )
    return Group(
        request,
        batch.rows,
        qo_heads,
        t,
        batch.key_position,
        query_position,
        q,
        k,
        keys.v,
        batch.counts,
        z,
        edges.named[batch.rows],
        product_bound,
        keys.largest_v,
    )


def _logits(spec: AttentionSpec, q: Array, k: Array, query_position: Ints, batch: _Batch, qo_heads: Ints) -> Array:
    """All terms of the logit but the mask: [b, r, g, S]."""
    with np.errstate(over="ignore", invalid="ignore"):
        z = scores.logits(q, k, spec.sm_scale)
    if spec.logits_soft_cap:
        z = scores.soft_cap(z, spec.logits_soft_cap)
    if spec.alibi_slopes or spec.buckets:
        z += scores.bias(spec, query_position[..., None] - batch.key_position[:, None], qo_heads)
    if spec.candidate_kind is CandidateKind.MULTISET:
        z += np.log(np.maximum(batch.counts, 1))[:, :, None]
    return z


def _check_finite(request: int, kv_heads: Ints, t: Ints, edge: Bools, z: Array, v: Array) -> None:
    """Attended values must be finite: a NaN would look like an empty row."""
    bad = (edge & ~np.isfinite(z).all(axis=2)).any(axis=1) | (edge.any(axis=1) & ~np.isfinite(v).all(axis=-1))
    if bad.any():
        batch, key = np.argwhere(bad)[0]
        raise ValueError(
            f"request {request}, KV head {kv_heads[batch]}: token {t[batch, key]} is attended, "
            "but its logit or V is not finite"
        )
