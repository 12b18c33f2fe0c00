"""`forward` against a naive dense attention in torch float64 and against 50-digit arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain, product

import mpmath
import numpy as np
import pytest
import torch
from dense_rows import Edge, bucket_of, kept, row_of, turned

from sacts.reference import groups as reference_groups
from sacts.reference import keys
from sacts.reference.candidates import CandidateLists, validate
from sacts.reference.forward import Forward, Inputs, forward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Dropout,
    DType,
    EmptyRowRule,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

BASE = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=8,
    head_dim_vo=6,
    page_size=4,
    seq_lens=(23, 9),
    qo_lens=(2, 3),
    dtype=DType.FP32,
    sm_scale=0.37,
)
CAUSAL = CausalRule.BOTTOM_RIGHT


@dataclass
class Problem:
    """A batch with shuffled pages; `lists`: the candidate list of each row."""

    spec: AttentionSpec
    table: PageTable
    inputs: Inputs
    lists: list[list[int]]

    def forward(self) -> Forward:
        raw = CandidateLists(np.cumsum([0, *map(len, self.lists)]), np.fromiter(chain(*self.lists), np.int64))
        return forward(self.spec, self.inputs, self.table, validate(self.spec, raw, self.table))

    def slot(self, request: int, t: int) -> tuple[int, int]:
        """Index into the caches' data of one logical position."""
        page, offset = divmod(t, self.spec.page_size)
        return self.inputs.k.pages.tolist().index(self.table.table[request, page]), offset


def problem_of(spec: AttentionSpec, seed: int, density: float = 0.5, scale: float = 1.0) -> Problem:
    random = np.random.default_rng(seed)
    counts = [-(-t // spec.page_size) for t in spec.seq_lens]
    pages = random.permutation(3 * sum(counts) + 2)[: sum(counts)]
    table = np.full((len(counts), max(counts) + 1), -7)
    owned = []
    for request, count in enumerate(counts):
        table[request, :count] = pages[sum(counts[:request]) :][:count]
        owned.append(frozenset(table[request, :count].tolist()))
    slots = (len(pages), spec.page_size, spec.num_kv_heads)
    inputs = Inputs(
        scale * random.normal(size=(spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk)),
        PagedCache(np.sort(pages), scale * random.normal(size=(*slots, spec.head_dim_qk))),
        PagedCache(np.sort(pages), random.normal(size=(*slots, spec.head_dim_vo))),
    )
    lists = []
    for request, position in zip(spec.token_request, spec.token_position, strict=True):
        tokens = spec.seq_lens[request]
        if spec.causal is not CausalRule.NONE and spec.block_size == 1:
            tokens = max(0, min(tokens, position + 1))
        entries = -(-tokens // spec.block_size)
        for _ in range(spec.num_kv_heads):
            chosen = random.permutation(entries)[: math.ceil(density * entries)].tolist()
            if spec.candidate_kind is not CandidateKind.SEQUENCE:
                chosen += chosen[::2] + chosen[:1]
            lists.append(chosen)
    return Problem(spec, PageTable(table, spec.page_size, 3 * sum(counts) + 2, tuple(owned)), inputs, lists)


def edges_of(problem: Problem, token: int, kv_head: int) -> dict[int, int]:
    """t -> multiplicity of one row."""
    return {edge.t: edge.copies for edge in row_of(problem.spec, problem.lists, token, kv_head)}


def bias_of(spec: AttentionSpec, head: int, edge: Edge) -> float:
    distance, total = edge.query - edge.key, 0.0
    if spec.alibi_slopes:
        total -= spec.alibi_slopes[head] * abs(distance)
    if spec.buckets:
        total += spec.buckets.bias[head][bucket_of(spec.buckets, distance)]
    return total


def naive(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in torch float64: all K and V gathered token by token, masked keys at -inf."""
    spec, inputs = problem.spec, problem.inputs
    out = torch.zeros(spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo, dtype=torch.float64)
    lse = torch.full((spec.num_tokens, spec.num_qo_heads), -torch.inf, dtype=torch.float64)
    for token, request in enumerate(spec.token_request):
        slots = [problem.slot(request, t) for t in range(spec.seq_lens[request])]
        for head in range(spec.num_qo_heads):
            kv_head = head // spec.group_size
            row = row_of(problem.spec, problem.lists, token, kv_head)
            sink = [spec.sink_logits[head]] if spec.sink_logits else []
            if not row and not sink:
                continue
            k, v = (
                torch.tensor(np.array([cache.data[page, offset, kv_head] for page, offset in slots]).reshape(-1, d))
                for cache, d in ((inputs.k, spec.head_dim_qk), (inputs.v, spec.head_dim_vo))
            )
            q, logits = torch.tensor(inputs.q[token, head]), torch.full((len(slots),), -torch.inf, dtype=torch.float64)
            keep = torch.ones(len(slots), dtype=torch.float64)
            for edge in row:
                a, b = (
                    (turned(q, edge.query, spec.rope), turned(k[edge.t], edge.key, spec.rope))
                    if spec.rope
                    else (q, k[edge.t])
                )
                z = spec.sm_scale * (a @ b)
                z = spec.logits_soft_cap * torch.tanh(z / spec.logits_soft_cap) if spec.logits_soft_cap else z
                logits[edge.t] = z + bias_of(spec, head, edge) + math.log(edge.copies)
                keep[edge.t] = kept(spec, token, head, edge)
            logits = torch.cat((logits, torch.tensor(sink, dtype=torch.float64)))
            out[token, head] = (torch.softmax(logits, 0)[: len(slots)] * keep) @ v
            lse[token, head] = torch.logsumexp(logits, 0)
    return out, lse


def exact_row(problem: Problem, token: int, head: int) -> tuple[list[float], float]:
    """One output row with 50 digits."""
    spec, inputs = problem.spec, problem.inputs
    kv_head, request = head // spec.group_size, spec.token_request[token]
    with mpmath.workdps(50):
        weights, values = [], []
        for t, count in edges_of(problem, token, kv_head).items():
            at = (*problem.slot(request, t), kv_head)
            product = mpmath.fdot(inputs.q[token, head].tolist(), inputs.k.data[at].tolist())
            weights.append(count * mpmath.exp(mpmath.mpf(spec.sm_scale) * product))
            values.append(inputs.v.data[at].tolist())
        total = mpmath.fsum(weights)
        out = [float(mpmath.fdot(weights, column) / total) for column in zip(*values, strict=True)]
        return out, float(mpmath.log(total))


BUCKETS = RelativeBuckets((0, 1, 2, 4, 9), tuple(tuple(0.3 * h - 0.7 * b for b in range(5)) for h in range(4)))
BOTH_WAYS = RelativeBuckets((0, 3), tuple(tuple(0.5 * h - 0.9 * b for b in range(4)) for h in range(4)), True)
SINKS = (0.5, -3.0, 4.0, 0.0)
SEQUENCE = replace(BASE, candidate_kind=CandidateKind.SEQUENCE, causal=CAUSAL)
EMPTY = replace(BASE, seq_lens=(3, 9), qo_lens=(5, 11), causal=CAUSAL)

SPECS = {
    "decode": replace(BASE, qo_lens=(1, 1)),
    "several queries": BASE,
    "causal": replace(BASE, causal=CAUSAL),
    "window": replace(BASE, window_left=4),
    "window of the own token": replace(BASE, window_left=0, qo_lens=(5, 4)),
    "causal window": replace(BASE, causal=CAUSAL, window_left=3, qo_lens=(7, 5)),
    "blocks with a partial tail": replace(BASE, block_size=5),
    "causal blocks": replace(BASE, block_size=5, causal=CAUSAL, qo_lens=(6, 9)),
    "blocks of several pages": replace(BASE, block_size=8, window_left=6),
    "GQA 4": replace(BASE, num_qo_heads=8),
    "MQA": replace(BASE, num_kv_heads=1),
    "MHA": replace(BASE, num_kv_heads=4),
    "T = 0": replace(BASE, seq_lens=(0, 9)),
    "no request has KV": replace(BASE, seq_lens=(0, 0)),
    "q_len 0": replace(BASE, seq_lens=(5, 9, 12), qo_lens=(2, 0, 1)),
    "no queries at all": replace(BASE, qo_lens=(0, 0)),
    "q_len > T": replace(BASE, seq_lens=(3, 9), qo_lens=(5, 11), causal=CAUSAL),
    "page 1": replace(BASE, page_size=1),
    "multiset": replace(BASE, candidate_kind=CandidateKind.MULTISET),
    "causal multiset of blocks": replace(BASE, candidate_kind=CandidateKind.MULTISET, block_size=3, causal=CAUSAL),
    "sequence": SEQUENCE,
    "top left": replace(BASE, causal=CausalRule.TOP_LEFT, qo_lens=(7, 4)),
    "absolute positions": replace(BASE, causal=CausalRule.ABSOLUTE, query_positions=(22, 3, 8, 0, 40), window_left=9),
    "positions without causality": replace(BASE, query_positions=(2, 30, 8, 0, 5), alibi_slopes=SINKS),
    "RoPE": replace(BASE, rope=RoPE(8)),
    "RoPE interleaved, partial": replace(BASE, rope=RoPE(6, 50.0, RopeLayout.INTERLEAVED), causal=CAUSAL),
    "RoPE half split, partial, decode": replace(BASE, rope=RoPE(4, 500000.0), qo_lens=(1, 1)),
    "soft cap": replace(BASE, logits_soft_cap=0.8),
    "ALiBi": replace(BASE, alibi_slopes=(0.5, 0.25, 0.125, 1.0)),
    "causal ALiBi of blocks": replace(BASE, alibi_slopes=(0.5, 0.25, 0.125, 1.0), block_size=3, causal=CAUSAL),
    "buckets": replace(BASE, buckets=BUCKETS),
    "buckets both ways": replace(BASE, buckets=BOTH_WAYS, qo_lens=(9, 8)),
    "sink": replace(BASE, sink_logits=SINKS),
    "sink and empty rows": replace(EMPTY, sink_logits=SINKS),
    "dropout": replace(BASE, dropout=Dropout(0.4, 2**63 + 12345, (7, 2**32 - 1))),
    "causal dropout of blocks": replace(BASE, dropout=Dropout(0.7, 5), block_size=3, causal=CAUSAL, qo_lens=(6, 11)),
    "sequence with RoPE": replace(SEQUENCE, rope=RoPE(8, 30.0)),
    "sequence with everything": replace(
        SEQUENCE, rope=RoPE(4, 7.0), alibi_slopes=SINKS, buckets=BOTH_WAYS, dropout=Dropout(0.3, 1), sink_logits=SINKS
    ),
    "sequence of blocks": replace(SEQUENCE, block_size=3, alibi_slopes=(1.0, 0.5, 0.2, 0.1), window_left=7),
    "sequence with ordinals of its own": replace(
        SEQUENCE, query_ordinals=tuple(range(3, 13)), alibi_slopes=(1.0, 0.5, 0.2, 0.1)
    ),
    "multiset with soft cap and ALiBi": replace(
        BASE, candidate_kind=CandidateKind.MULTISET, logits_soft_cap=2.0, alibi_slopes=(0.5, 0.25, 0.125, 1.0)
    ),
    "everything": replace(
        BASE,
        rope=RoPE(6),
        logits_soft_cap=3.0,
        alibi_slopes=(0.5, 0.25, 0.125, 1.0),
        buckets=BUCKETS,
        sink_logits=SINKS,
        dropout=Dropout(0.2, 99),
        causal=CAUSAL,
        window_left=11,
    ),
    "empty rows attend themselves": replace(
        BASE,
        causal=CausalRule.ABSOLUTE,
        query_positions=(22, 0, 1, 8, 0),
        empty_row=EmptyRowRule.FORCE_SELF,
        rope=RoPE(8),
    ),
    "empty rows attend token 0": replace(EMPTY, empty_row=EmptyRowRule.FORCE_SINK_TOKEN, alibi_slopes=SINKS),
    "empty rows of a sequence attend token 0": replace(
        EMPTY, empty_row=EmptyRowRule.FORCE_SINK_TOKEN, candidate_kind=CandidateKind.SEQUENCE, rope=RoPE(8)
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_forward_is_dense_attention_under_the_mask_of_the_lists(name: str, density: float) -> None:
    """Also by the paths for long rows: each row gathers its own keys, or dense by few queries and heads at a time."""
    problem = problem_of(SPECS[name], seed=len(name), density=density)
    out, lse = naive(problem)
    found = problem.forward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "SMALL", 0)
        patch.setattr(reference_groups, "SMALL", 0)
        patch.setattr(reference_groups, "DENSE_SHARE", 2)
        patch.setattr(reference_groups, "MAX_GATHERED", 200)
        gathered = problem.forward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_groups, "MAX_LOGITS", 100)
        pieces = problem.forward()
    for other in (gathered, pieces):
        np.testing.assert_allclose(other.out, out.numpy(), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(other.lse, lse.numpy(), rtol=1e-13, atol=1e-14)
    assert found.out.shape == out.shape
    np.testing.assert_allclose(found.out, out.numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.lse, lse.numpy(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["causal window", "causal multiset of blocks", "GQA 4"])
@pytest.mark.parametrize("largest", [1.0, 300.0, 0.0])
def test_forward_agrees_with_50_digits(name: str, largest: float) -> None:
    """Logits up to +-`largest`; 0: all keys equal."""
    problem = problem_of(SPECS[name], seed=5)
    q, k = problem.inputs.q, problem.inputs.k.data
    if largest:
        q *= largest / np.abs(problem.spec.sm_scale * np.einsum("nhd,psgd->nhpsg", q, k)).max()
    else:
        k[:] = k[0, 0, 0]
    found = problem.forward()
    rows = product(range(0, problem.spec.num_tokens, 2), (0, problem.spec.num_qo_heads - 1))
    compared = 0
    for token, head in rows:
        if not edges_of(problem, token, head // problem.spec.group_size):
            continue
        out, lse = exact_row(problem, token, head)
        rounding = 2.0**-50 * max(largest, 8.0)
        np.testing.assert_allclose(found.out[token, head], out, rtol=0, atol=4 * rounding)
        np.testing.assert_allclose(found.lse[token, head], lse, rtol=0, atol=rounding)
        compared += 1
    assert compared >= 4


def test_logits_of_plus_and_minus_300_neither_overflow_nor_vanish() -> None:
    spec = AttentionSpec(1, 1, 1, 1, page_size=4, seq_lens=(4,), qo_lens=(1,), dtype=DType.FP32, sm_scale=1.0)
    problem = problem_of(spec, seed=0, density=1.0)
    problem.inputs.q[:] = 1.0
    for values in ([300.0, -300.0, 300.0, 299.0], [-300.0, -301.0, -300.0, -302.0]):
        problem.inputs.k.data[0, :, 0, 0] = values
        out, lse = problem.forward()
        exact_out, exact_lse = exact_row(problem, 0, 0)
        np.testing.assert_allclose(out[0, 0], exact_out, rtol=1e-14)
        assert float(lse[0, 0]) == pytest.approx(exact_lse, rel=1e-15)


def test_a_row_without_an_edge_is_zero_with_lse_minus_infinity() -> None:
    problem = problem_of(replace(BASE, causal=CAUSAL, seq_lens=(3, 9), qo_lens=(5, 2)), seed=1, density=1.0)
    problem.lists[2 * 6] = []
    out, lse = problem.forward()
    empty = np.zeros(lse.shape, bool)
    empty[:2] = True
    empty[6, :2] = True
    assert (out[empty] == 0).all()
    assert (lse == -np.inf).tolist() == empty.tolist()
    assert (out[~empty] != 0).all()


@pytest.mark.parametrize("poisoned", ["k", "v"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_stands_in_slots_that_no_row_attends_does_not_matter(poisoned: str, poison: float) -> None:
    problem = problem_of(replace(BASE, causal=CAUSAL, window_left=6), seed=2, density=0.4)
    clean = problem.forward()
    cache = getattr(problem.inputs, poisoned)
    needed = np.zeros(cache.data.shape[:3], bool)
    for token, request in enumerate(problem.spec.token_request):
        for kv_head in range(problem.spec.num_kv_heads):
            for t in edges_of(problem, token, kv_head):
                needed[(*problem.slot(request, t), kv_head)] = True
    assert 0.2 < needed.mean() < 0.8
    cache.data[~needed] = poison
    with np.errstate(invalid="ignore"):
        found = problem.forward()
    assert np.isfinite(clean.out).all()
    for name in ("out", "lse", "out_error", "lse_error", "in_range"):
        np.testing.assert_array_equal(getattr(found, name), getattr(clean, name), err_msg=name)
    assert found.in_range.all()


def test_a_page_without_data_is_named() -> None:
    problem = problem_of(BASE, seed=3)
    lost = int(problem.table.table[1, 1])
    keep = problem.inputs.v.pages != lost
    inputs = problem.inputs._replace(v=PagedCache(problem.inputs.v.pages[keep], problem.inputs.v.data[keep]))
    with pytest.raises(LookupError, match=f"request 1, position 4: physical page {lost} holds no data"):
        replace(problem, inputs=inputs).forward()


@pytest.mark.parametrize("which", ["k", "v"])
def test_an_attended_value_that_is_not_finite_is_named(which: str) -> None:
    problem = problem_of(BASE, seed=5)
    problem.lists[0] = [2]
    getattr(problem.inputs, which).data[(*problem.slot(0, 2), 0)] = np.nan
    with pytest.raises(ValueError, match="request 0, KV head 0: token 2 is attended, but its logit or V is not finite"):
        problem.forward()
