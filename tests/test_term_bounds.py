"""The bounds of every term against a modelled kernel: a right one never leaves them, whatever its arithmetic, and one
that gets the term wrong does.

The model (`kernels_under_test/emulation`) computes in FP32 with the casts of its `Arithmetic`; it shares no code with
the reference.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sacts.conformance.adapter import Case, Outputs
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import TORCH, Arithmetic
from sacts.kernels_under_test.faults import ModelFault, model_catalogue, patched
from sacts.reference.bounds import Expected, expected
from sacts.reference.candidates import CandidateLists, validate
from sacts.reference.forward import Inputs
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Dropout,
    DType,
    EmptyRowRule,
    Epilogue,
    EpilogueKind,
    Hints,
    Nonlinearity,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

Array = NDArray[np.float64]

BASE = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=32,
    head_dim_vo=16,
    page_size=16,
    seq_lens=(300, 0, 77),
    qo_lens=(5, 1, 3),
    dtype=DType.BF16,
    sm_scale=0.2,
    causal=CausalRule.BOTTOM_RIGHT,
)
FAR = replace(BASE, causal=CausalRule.ABSOLUTE, query_positions=(*range(60000, 60005), 0, *range(40000, 40003)))
MULTISET = replace(BASE, candidate_kind=CandidateKind.MULTISET)
SEQUENCE = replace(BASE, candidate_kind=CandidateKind.SEQUENCE)
SPECS = {
    "plain": BASE,
    "negative scale": replace(BASE, sm_scale=-0.2),
    "RoPE": replace(BASE, rope=RoPE(32)),
    "RoPE, interleaved, in part": replace(BASE, rope=RoPE(16, 500000.0, RopeLayout.INTERLEAVED)),
    "RoPE, far": replace(FAR, rope=RoPE(32)),
    "RoPE of a sequence": replace(SEQUENCE, rope=RoPE(32)),
    "soft cap": replace(BASE, logits_soft_cap=15.0),
    "small soft cap": replace(BASE, logits_soft_cap=0.5),
    "ALiBi": replace(BASE, alibi_slopes=(0.5, 0.25, 2.0**-8, 0.013)),
    "ALiBi, far": replace(FAR, alibi_slopes=(0.5, 0.25, 2.0**-8, 0.013)),
    "buckets": replace(BASE, buckets=RelativeBuckets((0, 1, 9, 100), ((0.3, -2.0, 5.1, 0.0),) * 4)),
    "sink": replace(BASE, sink_logits=(0.0, 3.1, -20.0, 40.0)),
    "dropout": replace(BASE, dropout=Dropout(0.3, 11, (5, 1, 2))),
    "multiset": MULTISET,
    "window": replace(BASE, window_left=40),
    "forced sink token": replace(BASE, empty_row=EmptyRowRule.FORCE_SINK_TOKEN, seq_lens=(300, 1, 77), window_left=2),
    "cast": replace(BASE, epilogue=Epilogue(EpilogueKind.CAST, DType.FP16)),
    "silu": replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SILU)),
    "sigmoid": replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SIGMOID)),
    "low bit": replace(BASE, epilogue=Epilogue(EpilogueKind.LOW_BIT, bits=8, scale=0.011)),
    "everything": replace(
        MULTISET,
        rope=RoPE(32),
        logits_soft_cap=20.0,
        alibi_slopes=(0.5, 0.25, 2.0**-8, 0.013),
        sink_logits=(0.0, 3.0, -20.0, 2.0),
        dropout=Dropout(0.5, 3),
        window_left=200,
    ),
}
ARITHMETICS = {
    "fp32": (DType.FP32, Arithmetic(p=DType.FP32, out=DType.FP32)),
    "bf16": (DType.BF16, Arithmetic()),
    "fp16, 3 splits, tiles in any order": (DType.FP16, Arithmetic(DType.FP16, DType.FP16, tile=16, splits=3, order=5)),
    "bf16, tensor cores, cubic exp2": (DType.BF16, Arithmetic(exp2="cubic", fraction_bits=25, tile=32)),
    "bf16, 8 octaves late, cast P in l": (DType.BF16, Arithmetic(lag=8, l_sums_cast_p=True, tile=16)),
    "merged outputs, truncated exp2": (
        DType.FP16,
        Arithmetic(DType.FP16, DType.FP16, DType.FP16, exp2="truncated", splits=4, merge_outputs=True, tile=16),
    ),
    "rotated to bf16": (DType.BF16, Arithmetic(rotated=DType.BF16)),
}


@dataclass(frozen=True)
class Problem:
    """Lists that name real tokens only; values that the dtype holds."""

    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    raw: CandidateLists

    def expected(self, arithmetic: Arithmetic) -> Expected:
        lists = validate(self.spec, self.raw, self.table)
        return expected(self.spec, self.inputs, self.table, lists, arithmetic.numerics)

    def case(self) -> Case:
        dtype = TORCH[self.spec.dtype]
        q, k, v = (torch.from_numpy(x).to(dtype) for x in (self.inputs.q, self.inputs.k.data, self.inputs.v.data))
        shape = (self.spec.num_tokens, self.spec.num_qo_heads)
        table, seq_lens, qo_indptr, indptr, indices = (
            torch.from_numpy(np.asarray(x, np.int32))
            for x in (self.table.table, self.spec.seq_lens, self.spec.qo_indptr, self.raw.indptr, self.raw.indices)
        )
        out, lse = torch.empty(*shape, self.spec.head_dim_vo, dtype=dtype), torch.empty(shape)
        return Case(self.spec, Hints(), q, k, v, table, seq_lens, qo_indptr, indptr, indices, out, lse, torch.empty(0))


def problem_of(spec: AttentionSpec, seed: int, size: float) -> Problem:
    random = np.random.default_rng(seed)
    counts = [-(-t // spec.page_size) for t in spec.seq_lens]
    order, ends = random.permutation(sum(counts)), np.cumsum(counts)
    table = np.zeros((len(counts), max(counts)), np.int64)
    for request, count in enumerate(counts):
        table[request, :count] = order[ends[request] - count : ends[request]]
    pages = np.arange(sum(counts))
    slots = (len(pages), spec.page_size, spec.num_kv_heads)

    def values(*shape: int, size: float = 1.0) -> Array:
        x = torch.from_numpy(size * random.normal(size=shape)).to(TORCH[spec.dtype])
        return x.double().numpy()

    inputs = Inputs(
        values(spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk, size=size),
        PagedCache(pages, values(*slots, spec.head_dim_qk)),
        PagedCache(pages, values(*slots, spec.head_dim_vo)),
    )
    lists = []
    for request, position in zip(spec.token_request, spec.token_position, strict=True):
        for _ in range(spec.num_kv_heads):
            seen = max(0, min(spec.seq_lens[request], position + 1))
            chosen = random.permutation(seen)[: int(random.integers(0, seen + 1))].tolist()
            if spec.candidate_kind is CandidateKind.MULTISET:
                chosen += chosen[::3] + chosen[:1]
            lists.append(chosen)
    raw = CandidateLists(np.cumsum([0, *map(len, lists)]), np.array([t for row in lists for t in row], np.int64))
    return Problem(spec, inputs, PageTable(table, spec.page_size, len(pages), _owned(table, counts)), raw)


def _owned(table: NDArray[np.int64], counts: list[int]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(row[:count].tolist()) for row, count in zip(table, counts, strict=True))


def run(problem: Problem, arithmetic: Arithmetic) -> Outputs:
    return Adapter({problem.spec.dtype: arithmetic}).run(problem.case())


@dataclass(frozen=True)
class Use:
    """Largest observed error / allowed error; above 1: outside."""

    out: float
    lse: float


def judged(allowed: Expected, outputs: Outputs) -> Use:
    assert outputs.lse is not None
    assert allowed.trusted.mean() > 0.9
    out, lse = outputs.out.double().numpy(), outputs.lse.double().numpy()
    inside = (allowed.out_lo <= out) & (out <= allowed.out_hi)
    reach = np.maximum(allowed.out_hi - allowed.out, allowed.out - allowed.out_lo)
    with np.errstate(invalid="ignore", divide="ignore"):
        use = np.nan_to_num(np.abs(out - allowed.out) / reach)
        lse_use = np.nan_to_num(np.abs(lse - allowed.lse) / allowed.lse_bound)
    use[~allowed.trusted], lse_use[~allowed.trusted] = 0.0, 0.0
    lse_use[np.isneginf(lse) & np.isneginf(allowed.lse)] = 0.0
    return Use(float(np.where(inside, np.minimum(use, 1), 2.0).max()), float(lse_use.max()))


@cache
def uses(name: str, arithmetic: str) -> tuple[Use, ...]:
    """Of two problems; angles of 60,000 turns leave no bound to large logits."""
    dtype, how = ARITHMETICS[arithmetic]
    sizes = (1.0, 0.3) if name == "RoPE, far" else (1.0, 8.0)
    problems = (problem_of(replace(SPECS[name], dtype=dtype), seed, size) for seed, size in enumerate(sizes))
    return tuple(judged(problem.expected(how), run(problem, how)) for problem in problems)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", SPECS)
def test_a_right_kernel_never_leaves_the_bounds_of_a_term(name: str, arithmetic: str) -> None:
    for use in uses(name, arithmetic):
        assert use.out <= 1
        assert use.lse <= 1


@pytest.mark.parametrize("name", SPECS)
def test_the_bound_of_a_term_is_not_idle(name: str) -> None:
    """With FP32 throughout, where no cast hides the term's own error."""
    assert max(max(use.out, use.lse) for use in uses(name, "fp32")) > 5e-3


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize("fault", [f for f in model_catalogue().values() if f.problem in SPECS], ids=lambda f: f.name)
def test_a_seeded_fault_of_a_term_leaves_its_bound(fault: ModelFault, dtype: DType) -> None:
    package = patched(fault, "emulation")
    how = Arithmetic(p=dtype, out=dtype, splits=2, tile=16)
    problem = problem_of(replace(SPECS[fault.problem], dtype=dtype), 0, 1.0)
    faulty = importlib.import_module(f"{package}.adapter").Adapter({dtype: how})
    allowed = problem.expected(how)
    assert max(judged(allowed, run(problem, how)).__dict__.values()) <= 1
    use = judged(allowed, faulty.run(problem.case()))
    assert {name for name, worst in (("out", use.out), ("lse", use.lse)) if worst > 1} == set(fault.outputs)
