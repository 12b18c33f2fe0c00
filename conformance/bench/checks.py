"""The outputs of timed runs, judged: a sample of rows by the reference's own bounds.

Each sampled candidate row becomes a request of its own with one KV head, over just the pages that its list names. Its
first query head is zero, so that its weights are equal and its sums exact: there a single lost candidate shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.reference.bounds import GENERIC, Exactness, Expected, expected
from sacts.reference.candidates import ValidatedCandidates
from sacts.reference.forward import Inputs
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, CausalRule, Codec, Hints
from sacts.reports.records import Finding

from ..adapter import Backend, Case, KVLayout, LseBase, Outputs
from ..gates.intervals import judge_lse, judge_out
from ..launch import Observed
from .inputs import seed_of

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

SAMPLED = 6  # rows of each rotation, the first and the last among them
COUNTED = Exactness(equal_logits=True, zero_logits=True, exact_sums=True)


@dataclass(frozen=True)
class Sample:
    """One row as a problem: `token`, `head` of the call, and the query heads that the row serves."""

    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    candidates: ValidatedCandidates
    token: int
    head: int
    qo_heads: slice


def rows_of(spec: AttentionSpec, *words: object) -> list[int]:
    """The sampled rows of a call: the first, the last, and others that depend on `words` alone."""
    drawn = torch.randint(spec.num_rows, (SAMPLED - 2,), generator=torch.Generator().manual_seed(seed_of(*words)))
    return sorted({0, spec.num_rows - 1, *drawn.tolist()})


def check(backend: Backend, case: Case, result: Outputs, rows: Iterable[int]) -> str:
    """What is wrong with these rows of a result, empty where nothing is."""
    spec = case.spec
    shape = (spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo)
    if tuple(result.out.shape) != shape or result.out.dtype != case.q.dtype:
        return f"out is {result.out.dtype} {tuple(result.out.shape)}, expected {case.q.dtype} {shape}"
    for row in rows:
        sample = sample_of(backend, case, row)
        if found := judge(backend, case.hints, sample, _observed(backend, result, sample)):
            head = f"query token {sample.token}, KV head {sample.head}"
            return f"{head}: {found.gate} {found.sentence.partition(': ')[2]}"
    return ""


def judge(backend: Backend, hints: Hints, sample: Sample, observed: Observed) -> Finding | None:
    """The first finding: of the head that counts under its own exact bounds, then of all under the generic ones."""
    numerics = backend.numerics(sample.spec.dtype, hints)
    for exactness in (COUNTED, GENERIC):
        allowed = expected(sample.spec, sample.inputs, sample.table, sample.candidates, numerics, exactness)
        if exactness is COUNTED:
            allowed = _first_head(allowed)
        for gate in (judge_lse, judge_out):
            if found := gate(sample.spec, allowed, observed):
                return found
    return None


def _first_head(allowed: Expected) -> Expected:
    """The same, without a judgement of other heads."""
    trusted = allowed.trusted.copy()
    trusted[:, 1:] = False
    return replace(allowed, trusted=trusted)


def _observed(backend: Backend, result: Outputs, sample: Sample) -> Observed:
    def taken(tensor: torch.Tensor) -> Array:
        return tensor[sample.token, sample.qo_heads].double().cpu().numpy()[None]

    lse = None
    if result.lse is not None:
        base = np.log(2.0) if backend.capabilities.lse_base is LseBase.TWO else 1.0
        lse = taken(result.lse) * base
    bits: Ints = np.zeros(0, np.int64)
    return Observed(taken(result.out), lse, bits, None)


def sample_of(backend: Backend, case: Case, row: int) -> Sample:
    """One candidate row of a case as a problem of its own."""
    spec = case.spec
    token, head = divmod(row, spec.list_heads)
    request = spec.token_request[token]
    heads = slice(head * spec.heads_per_list, (head + 1) * spec.heads_per_list)
    first, last = case.kv_indptr[row : row + 2].tolist()
    entries: Ints = case.kv_indices[first:last].cpu().numpy().astype(np.int64)
    own = replace(
        spec,
        num_qo_heads=spec.heads_per_list,
        num_kv_heads=1,
        seq_lens=(spec.seq_lens[request],),
        qo_lens=(1,),
        causal=spec.causal if spec.causal is CausalRule.NONE else CausalRule.ABSOLUTE,
        query_positions=(spec.token_position[token],),
    )
    table = case.page_table[request].cpu().numpy().astype(np.int64)[None]
    logical = _pages_of(own, entries)
    pages, kv_head = np.sort(table[0, logical]), head // spec.lists_per_kv_head
    held = [_read(backend, case, name, codec, pages, kv_head) for name, codec in _caches(spec)]
    q = case.q[token, heads].double().cpu().numpy()[None]
    owned = (frozenset(map(int, pages)),)
    return Sample(
        own,
        Inputs(q, PagedCache(pages, held[0]), PagedCache(pages, held[1])),
        PageTable(table, spec.page_size, int(case.k_cache.shape[0]), owned),
        ValidatedCandidates(np.array([0, len(entries)]), entries, np.ones(len(entries), np.int64), 0),
        token,
        head,
        heads,
    )


def _caches(spec: AttentionSpec) -> tuple[tuple[str, Codec | None], ...]:
    return ("k", spec.k_codec), ("v", spec.v_codec)


def _pages_of(spec: AttentionSpec, entries: Ints) -> Ints:
    """The logical pages that entries reach into."""
    first = entries * spec.block_size
    last = np.minimum(first + spec.block_size, spec.seq_lens[0]) - 1
    most = spec.block_size // spec.page_size + 2
    pages = first[:, None] // spec.page_size + np.arange(most)
    return np.unique(pages[pages <= last[:, None] // spec.page_size])


def _read(backend: Backend, case: Case, name: str, codec: Codec | None, pages: Ints, kv_head: int) -> Array:
    """K or V of these pages in one head, reconstructed: [pages, page_size, 1, d]."""
    hnd = backend.capabilities.kv_layout is KVLayout.HND

    def part(tensor: Any) -> Array:
        tensor = tensor.transpose(1, 2) if hnd else tensor  # [pages, page_size, heads, d]
        index = torch.from_numpy(pages).to(tensor.device) if tensor.shape[0] > 1 else slice(None)
        found: Array = tensor[:, :, min(kv_head, tensor.shape[2] - 1)][index].float().double().cpu().numpy()
        return found[:, :, None]

    values = part(getattr(case, f"{name}_cache"))
    if codec is None:
        return values
    return values * part(getattr(case, f"{name}_scales"))
