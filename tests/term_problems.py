"""Problems with every term for a modelled kernel: specs and arithmetics by name; values that a dtype holds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.conformance.adapter import Case
from sacts.kernels_under_test.emulation.arithmetic import TORCH, Arithmetic
from sacts.kernels_under_test.emulation.terms import Rows
from sacts.reference.bounds import Expected, expected
from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.codecs import pack
from sacts.reference.forward import Inputs
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.quantised import QuantisedCache, quantise, real_slots
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Codec,
    CodecFormat,
    Dropout,
    DType,
    EmptyRowRule,
    Epilogue,
    EpilogueKind,
    Hints,
    ListsPer,
    Nonlinearity,
    RelativeBuckets,
    RoPE,
    RopeLayout,
    ScaleGranularity,
)

Array = NDArray[np.float64]
Coded = tuple[QuantisedCache | None, QuantisedCache | None]

MODEL = "sacts.kernels_under_test.emulation"

BASE = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=32,
    head_dim_vo=16,
    page_size=16,
    seq_lens=(150, 0, 45),
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
    "forced sink token": replace(BASE, empty_row=EmptyRowRule.FORCE_SINK_TOKEN, seq_lens=(150, 1, 45), window_left=2),
    "cast": replace(BASE, epilogue=Epilogue(EpilogueKind.CAST, DType.FP16)),
    "silu": replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SILU)),
    "sigmoid": replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SIGMOID)),
    "low bit": replace(BASE, epilogue=Epilogue(EpilogueKind.LOW_BIT, bits=8, scale=0.011)),
    "int8 KV": replace(
        BASE,
        k_codec=Codec(CodecFormat.INT8, ScaleGranularity.PAGE),
        v_codec=Codec(CodecFormat.INT8, ScaleGranularity.PAGE_HEAD, asymmetric=True),
    ),
    "int4 and e4m3 KV": replace(
        BASE,
        k_codec=Codec(CodecFormat.INT4, ScaleGranularity.PAGE_CHANNEL, asymmetric=True),
        v_codec=Codec(CodecFormat.FP8_E4M3FN, ScaleGranularity.HEAD, power_of_two=True),
    ),
    "e5m2 K, turned": replace(
        BASE,
        rope=RoPE(32),
        k_codec=Codec(CodecFormat.FP8_E5M2, ScaleGranularity.TOKEN_HEAD),
        v_codec=Codec(CodecFormat.INT8, ScaleGranularity.CHANNEL),
    ),
    "everything": replace(
        MULTISET,
        rope=RoPE(32),
        logits_soft_cap=20.0,
        alibi_slopes=(0.5, 0.25, 2.0**-8, 0.013),
        sink_logits=(0.0, 3.0, -20.0, 2.0),
        dropout=Dropout(0.5, 3),
        window_left=100,
    ),
    "lists of query heads": replace(BASE, lists=ListsPer.QUERY_HEAD),
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
    "K and V rounded to bf16": (DType.BF16, Arithmetic(rotated=DType.BF16, reconstructed=DType.BF16)),
    "rounded to fp16": (
        DType.FP16,
        Arithmetic(DType.FP16, DType.FP16, rotated=DType.FP16, reconstructed=DType.FP16, splits=2),
    ),
    "tf32": (DType.FP32, Arithmetic(DType.FP32, DType.FP32, tf32=True, fraction_bits=25)),
}


@dataclass(frozen=True)
class Problem:
    """Lists that name real tokens only; values that the dtype holds."""

    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    raw: CandidateLists
    coded: Coded = (None, None)

    @property
    def lists(self) -> ValidatedCandidates:
        return validate(self.spec, self.raw, self.table)

    def expected(self, arithmetic: Arithmetic) -> Expected:
        return expected(self.spec, self.inputs, self.table, self.lists, arithmetic.numerics)

    def case(self) -> Case:
        dtype = TORCH[self.spec.dtype]
        q, k, v = (torch.from_numpy(x).to(dtype) for x in (self.inputs.q, self.inputs.k.data, self.inputs.v.data))
        k, v = (torch.empty(0) if codec else x for codec, x in ((self.spec.k_codec, k), (self.spec.v_codec, v)))
        shape = (self.spec.num_tokens, self.spec.num_qo_heads)
        table, seq_lens, qo_indptr, indptr, indices = (
            torch.from_numpy(np.asarray(x, np.int32))
            for x in (self.table.table, self.spec.seq_lens, self.spec.qo_indptr, self.raw.indptr, self.raw.indices)
        )
        out, lse = torch.empty(*shape, self.spec.head_dim_vo, dtype=dtype), torch.empty(shape)
        return Case(self.spec, Hints(), q, k, v, table, seq_lens, qo_indptr, indptr, indices, out, lse, torch.empty(0))

    def rows(self, arithmetic: Arithmetic, package: str = MODEL) -> Rows:
        """The rows of the model, or of a patched copy."""
        rows, dequantise = (importlib.import_module(f"{package}.{name}") for name in ("rows", "dequantise"))
        coded = (each and dequantise.Coded(each.codec, *_tensors(each)) for each in self.coded)
        found: Rows = rows.rows_of(self.case(), *coded, arithmetic.reconstructed)
        return found


def _tensors(cache: QuantisedCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = pack(cache.codes, cache.codec, -1) if cache.codec.format is CodecFormat.INT4 else cache.codes
    codes, scales, zeros = (torch.from_numpy(np.ascontiguousarray(x)) for x in (codes, cache.scales, cache.zeros))
    return codes, scales.float(), zeros.float()


def quantised(spec: AttentionSpec, inputs: Inputs, table: PageTable) -> tuple[Inputs, Coded]:
    """Inputs as their codes have them; scales of neighbouring pages, heads and channels differ by large factors."""
    random, caches, coded = np.random.default_rng(8), [], []
    for cache, codec in ((inputs.k, spec.k_codec), (inputs.v, spec.v_codec)):
        if codec is None:
            caches.append(cache)
            coded.append(None)
            continue
        page, head, dim = (np.exp2(random.integers(-1, 2, n)) for n in np.delete(cache.data.shape, 1))
        shift = 0.5 if codec.asymmetric else 0.0
        data = (cache.data + shift) * page[:, None, None, None] * head[:, None] * dim
        coded.append(quantise(PagedCache(cache.pages, data), codec, real_slots(cache.pages, table, spec.seq_lens)))
        caches.append(coded[-1].reconstruct())
    return Inputs(inputs.q, caches[0], caches[1]), (coded[0], coded[1])


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
        for _ in range(spec.num_qo_heads if spec.lists is ListsPer.QUERY_HEAD else spec.num_kv_heads):
            seen = max(0, min(spec.seq_lens[request], position + 1))
            chosen = random.permutation(seen)[: int(random.integers(0, seen + 1))].tolist()
            if spec.candidate_kind is CandidateKind.MULTISET:
                chosen += chosen[::3] + chosen[:1]
            lists.append(chosen)
    raw = CandidateLists(np.cumsum([0, *map(len, lists)]), np.array([t for row in lists for t in row], np.int64))
    pool = PageTable(table, spec.page_size, len(pages), _owned(table, counts))
    inputs, coded = quantised(spec, inputs, pool)
    return Problem(spec, inputs, pool, raw, coded)


def aliased(problem: Problem) -> Problem:
    """The first request reads one page at two logical offsets, and the last one a page of the first."""
    table = problem.table.table.copy()
    table[0, 4], table[-1, 0] = table[0, 1], table[0, 0]
    owned = tuple(frozenset(row[: -(-t // 16)].tolist()) for row, t in zip(table, problem.spec.seq_lens, strict=True))
    return replace(problem, table=replace(problem.table, table=table, owned=owned))


def _owned(table: NDArray[np.int64], counts: list[int]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(row[:count].tolist()) for row, count in zip(table, counts, strict=True))
