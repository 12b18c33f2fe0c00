"""Problems for the benchmarks: random inputs in shuffled pages."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.forward import Inputs
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, DType

Problem = tuple[AttentionSpec, Inputs, PageTable, ValidatedCandidates]


def problem_of(
    batch: int,
    qo_heads: int,
    kv_heads: int,
    dim: int,
    qo_len: int,
    seq_len: int,
    entries: int,
    page: int,
    block: int = 1,
) -> Problem:
    """`entries` random candidates (tokens, or blocks of `block`) in each row."""
    spec = AttentionSpec(
        qo_heads, kv_heads, dim, dim, page, (seq_len,) * batch, (qo_len,) * batch, DType.FP32, dim**-0.5, block
    )
    random = np.random.default_rng(0)
    pages = -(-seq_len // page)
    order = random.permutation(batch * pages).reshape(batch, pages)
    table = PageTable(order, page, batch * pages, tuple(frozenset(row.tolist()) for row in order))
    shape = (batch * pages, page, kv_heads, dim)
    live = np.arange(batch * pages)
    inputs = Inputs(
        random.standard_normal((spec.num_tokens, qo_heads, dim)),
        PagedCache(live, random.standard_normal(shape)),
        PagedCache(live, random.standard_normal(shape)),
    )
    chosen = np.stack([random.permutation(seq_len // block)[:entries] for _ in range(spec.num_rows)])
    raw = CandidateLists(np.arange(spec.num_rows + 1) * entries, chosen.ravel())
    return spec, inputs, table, validate(spec, raw, table)


def dense_tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [batch, heads, queries, d], K and V [batch, kv heads, T, d] and the mask [batch, heads, queries, T]."""
    spec, inputs, table, candidates = problem
    q = torch.from_numpy(inputs.q).reshape(spec.num_requests, -1, spec.num_qo_heads, spec.head_dim_qk).transpose(1, 2)
    k, v = (
        torch.from_numpy(np.stack([_gathered(cache, table, n, spec.seq_lens[0]) for n in range(spec.num_requests)]))
        for cache in (inputs.k, inputs.v)
    )
    mask = np.zeros((spec.num_rows, spec.seq_lens[0]), bool)
    mask[np.repeat(np.arange(spec.num_rows), np.diff(candidates.indptr)), candidates.indices] = True
    by_head = torch.from_numpy(mask).reshape(spec.num_requests, -1, spec.num_kv_heads, spec.seq_lens[0])
    return q.contiguous(), k, v, by_head.transpose(1, 2).repeat_interleave(spec.group_size, 1).contiguous()


def _gathered(cache: PagedCache, table: PageTable, request: int, seq_len: int) -> NDArray[np.float64]:
    return np.ascontiguousarray(cache.gather(table, request, seq_len).swapaxes(0, 1))
