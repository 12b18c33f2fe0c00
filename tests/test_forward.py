"""`forward` against a naive dense attention in torch float64 and against 50-digit arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, product

import mpmath
import numpy as np
import pytest
import torch

from sacts.reference.candidates import CandidateLists, validate
from sacts.reference.forward import Forward, Inputs, forward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, DType

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
        if spec.causal is CAUSAL and spec.block_size == 1:
            tokens = max(0, min(tokens, position + 1))
        entries = -(-tokens // spec.block_size)
        for _ in range(spec.num_kv_heads):
            chosen = random.permutation(entries)[: math.ceil(density * entries)].tolist()
            if spec.candidate_kind is not CandidateKind.SEQUENCE:
                chosen += chosen[::2] + chosen[:1]
            lists.append(chosen)
    return Problem(spec, PageTable(table, spec.page_size, 3 * sum(counts) + 2, tuple(owned)), inputs, lists)


def edges_of(problem: Problem, token: int, kv_head: int) -> dict[int, int]:
    """t -> multiplicity of one row after all masks."""
    spec = problem.spec
    seq_len, position = spec.seq_lens[spec.token_request[token]], spec.token_position[token]
    entries = Counter(problem.lists[token * spec.num_kv_heads + kv_head])
    edges = {}
    for entry, count in entries.items():
        for t in range(entry * spec.block_size, min((entry + 1) * spec.block_size, seq_len)):
            hidden = (spec.causal is CAUSAL and t > position) or (0 <= spec.window_left < position - t)
            if not hidden:
                edges[t] = count if spec.candidate_kind is CandidateKind.MULTISET else 1
    return edges


def naive(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in torch float64: all K and V gathered token by token, then masked with the multiplicities."""
    spec, inputs = problem.spec, problem.inputs
    out = torch.zeros(spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo, dtype=torch.float64)
    lse = torch.full((spec.num_tokens, spec.num_qo_heads), -torch.inf, dtype=torch.float64)
    for token, request in enumerate(spec.token_request):
        slots = [problem.slot(request, t) for t in range(spec.seq_lens[request])]
        for head in range(spec.num_qo_heads):
            kv_head = head // spec.group_size
            edges = edges_of(problem, token, kv_head)
            if not edges:
                continue
            k, v = (
                torch.stack([torch.tensor(cache.data[page, offset, kv_head]) for page, offset in slots])
                for cache in (inputs.k, inputs.v)
            )
            counts = torch.tensor([float(edges.get(t, 0)) for t in range(len(slots))], dtype=torch.float64)
            logits = spec.sm_scale * (k @ torch.tensor(inputs.q[token, head])) + counts.log()
            out[token, head] = torch.softmax(logits, 0) @ v
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
    "sequence": replace(BASE, candidate_kind=CandidateKind.SEQUENCE, causal=CAUSAL),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_forward_is_dense_attention_under_the_mask_of_the_lists(name: str, density: float) -> None:
    problem = problem_of(SPECS[name], seed=len(name), density=density)
    out, lse = naive(problem)
    found = problem.forward()
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
    for keys in ([300.0, -300.0, 300.0, 299.0], [-300.0, -301.0, -300.0, -302.0]):
        problem.inputs.k.data[0, :, 0, 0] = keys
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
    np.testing.assert_array_equal(found.out, clean.out)
    np.testing.assert_array_equal(found.lse, clean.lse)


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
