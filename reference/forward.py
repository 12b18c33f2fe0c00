"""Paged sparse attention, forward, DESIGN section 4: one dense FP64 evaluation per (request, KV head), unattended
keys masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores, softmax
from .candidates import ValidatedCandidates, expand
from .paging import PagedCache, PageTable
from .spec import AttentionSpec

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Inputs(NamedTuple):
    """The values of a problem: q [num_tokens, num_qo_heads, head_dim_qk], and the paged K and V."""

    q: Array
    k: PagedCache
    v: PagedCache


class Forward(NamedTuple):
    """out [num_tokens, num_qo_heads, head_dim_vo] and lse [num_tokens, num_qo_heads] (natural log)."""

    out: Array
    lse: Array


@dataclass(frozen=True)
class Group:
    """All rows of one (request, KV head): n queries of g query heads over T keys.

    q [n, g, d_qk], k [T, d_qk], v [T, d_vo]; counts [n, T]: 0 where (query, key) is no edge after all masks;
    logits [n, g, T] with -inf there and + ln(count) elsewhere; slots [n]: slots that the candidate entries name.
    """

    tokens: slice
    heads: slice
    q: Array
    k: Array
    v: Array
    counts: Ints
    logits: Array
    slots: Ints


def edges(spec: AttentionSpec, candidates: ValidatedCandidates) -> tuple[Ints, Ints, Ints]:
    """All edges after all masks: row index, logical position of the key, multiplicity."""
    rows, t, count = expand(spec, candidates)
    positions = np.asarray(spec.token_position, np.int64)[rows // spec.num_kv_heads]
    seen = scores.visible(spec, positions, t)
    return rows[seen], t[seen], count[seen]


def groups(spec: AttentionSpec, inputs: Inputs, table: PageTable, candidates: ValidatedCandidates) -> Iterator[Group]:
    """Cut a problem into groups; requests without queries are left out."""
    rows, t, count = edges(spec, candidates)
    entries = np.diff(candidates.indptr).reshape(spec.num_tokens, spec.num_kv_heads)
    token, kv_head = np.divmod(rows, spec.num_kv_heads)
    for request, (seq_len, qo_len) in enumerate(zip(spec.seq_lens, spec.qo_lens, strict=True)):
        if not qo_len:
            continue
        start = spec.qo_indptr[request]
        tokens = slice(start, start + qo_len)
        mine = (token >= tokens.start) & (token < tokens.stop)
        counts = np.zeros((qo_len, spec.num_kv_heads, seq_len), np.int64)
        counts[token[mine] - start, kv_head[mine], t[mine]] = count[mine]
        k, v = (cache.gather(table, request, seq_len) for cache in (inputs.k, inputs.v))
        for head in range(spec.num_kv_heads):
            heads = slice(head * spec.group_size, (head + 1) * spec.group_size)
            q = inputs.q[tokens, heads]
            edge = (counts[:, head] > 0)[:, None]
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # what stands in other slots is junk
                weighted = scores.logits(q, k[:, head], spec.sm_scale) + np.log(counts[:, head])[:, None]
            _check_finite(request, head, edge[:, 0], weighted, v[:, head])
            z = np.where(edge, weighted, -np.inf)
            slots = entries[tokens, head] * spec.block_size
            yield Group(tokens, heads, q, k[:, head], v[:, head], counts[:, head], z, slots)


def _check_finite(request: int, head: int, edge: NDArray[np.bool_], logits: Array, v: Array) -> None:
    """Attended values must be finite: a NaN would look like an empty row."""
    bad = (edge & ~np.isfinite(logits).all(axis=1)).any(axis=0) | (edge.any(axis=0) & ~np.isfinite(v).all(axis=1))
    if bad.any():
        t = int(np.argmax(bad))
        raise ValueError(f"request {request}, KV head {head}: token {t} is attended, but its logit or V is not finite")


def forward(spec: AttentionSpec, inputs: Inputs, table: PageTable, candidates: ValidatedCandidates) -> Forward:
    """The function that a backend must compute. Raises LookupError where a table leads to a page without data."""
    result = empty_result(spec)
    for group in groups(spec, inputs, table, candidates):
        at = group.tokens, group.heads
        result.out[at], result.lse[at] = softmax.finish(softmax.tile_state(group.logits, group.v))
    return result


def empty_result(spec: AttentionSpec) -> Forward:
    """What a call without any edge yields: out 0, lse -inf."""
    return Forward(
        np.zeros((spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo)),
        np.full((spec.num_tokens, spec.num_qo_heads), -np.inf),
    )
