"""Problems at which a bound is most likely to be too narrow: sums that cancel, values in the subnormals of a format,
saturated soft caps, repeats, fed results wrong by all that is allowed. A seed draws one, its terms and its arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from term_problems import Problem, aliased, problem_of, quantised

from sacts.kernels_under_test.emulation.arithmetic import TORCH, Arithmetic
from sacts.kernels_under_test.emulation.terms import Rows
from sacts.reference.candidates import CandidateLists
from sacts.reference.forward import Inputs
from sacts.reference.numerics import Numerics
from sacts.reference.paging import PagedCache
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Codec,
    CodecFormat,
    Dropout,
    DType,
    Epilogue,
    EpilogueKind,
    RelativeBuckets,
    RoPE,
    RopeLayout,
    ScaleGranularity,
)

Array = NDArray[np.float64]
Random = np.random.Generator

BASE = AttentionSpec(
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim_qk=8,
    head_dim_vo=4,
    page_size=16,
    seq_lens=(90, 20),
    qo_lens=(2, 1),
    dtype=DType.FP32,
    sm_scale=1.0,
    causal=CausalRule.NONE,
)
CODECS = (
    None,
    None,
    Codec(CodecFormat.INT4, ScaleGranularity.PAGE_CHANNEL, asymmetric=True),
    Codec(CodecFormat.FP8_E5M2, ScaleGranularity.TOKEN_HEAD),
)
FP8 = (CodecFormat.FP8_E4M3FN, CodecFormat.FP8_E5M2)
LOGITS = (0.02, 1.0, 9.0, 17.5)  # largest size, about; the last one has P in the subnormals of FP16
EXPONENTS = ("exact", "exact", "truncated", "cubic")


@dataclass(frozen=True)
class Hard:
    """A problem with its arithmetic; `repeats`: whether the kernel visits repeats one by one; `fed`: how wrong out and
    lse are that backward is fed, in units of themselves; `promised`: what of the contract says more than is kept.
    """

    problem: Problem
    arithmetic: Arithmetic
    d_out: Array
    d_lse: Array
    repeats: bool = False
    fed: float = 0.0
    promised: Mapping[str, object] = field(default_factory=dict)

    @property
    def numerics(self) -> Numerics:
        return replace(self.arithmetic.numerics, **self.promised)  # type: ignore[arg-type]


def hard(seed: int, **changes: object) -> Hard:
    """The problem of a seed; `changes` of its spec are made before values are drawn."""
    random = np.random.default_rng(seed)
    spec = replace(_spec(random), **changes)  # type: ignore[arg-type]
    problem = problem_of(replace(spec, k_codec=None, v_codec=None), seed, 1.0)
    d_out, inputs = _values(random, spec, problem)
    inputs, coded = quantised(spec, inputs, problem.table)
    problem = replace(problem, spec=_scaled(random, spec, inputs), inputs=inputs, coded=coded)
    if random.random() < 0.3 and not spec.k_codec and not spec.v_codec:
        problem = aliased(problem)
    shape = (spec.num_tokens, spec.num_qo_heads)
    d_lse = np.float32(random.normal(size=shape)).astype(np.float64) * random.integers(0, 2)
    fed = float(random.choice([0.0, 1e-5, 1e-3]))
    repeats = spec.candidate_kind is CandidateKind.MULTISET and random.random() < 0.5
    return Hard(problem, _arithmetic(random, spec), d_out, d_lse, repeats, fed)


def _spec(random: Random) -> AttentionSpec:
    def some(share: float, value: object, otherwise: object = None) -> object:
        return value if random.random() < share else otherwise

    layout = RopeLayout.INTERLEAVED if random.random() < 0.5 else RopeLayout.HALF_SPLIT
    changes = {
        "dtype": list(DType)[random.integers(3)],
        "rope": some(0.4, RoPE(8 if random.random() < 0.5 else 4, 100.0, layout)),
        "logits_soft_cap": some(0.4, float(random.choice([0.25, 1.0, 4.0])), 0.0),
        "alibi_slopes": some(0.2, (0.25, 2.0**-8), ()),
        "buckets": some(0.2, RelativeBuckets((0, 1, 9), ((0.3, -2.0, 5.1),) * 2)),
        "sink_logits": some(0.3, (1.5, -3.0), ()),
        "dropout": some(0.2, Dropout(0.3, int(random.integers(99)))),
        "candidate_kind": some(0.4, CandidateKind.MULTISET, CandidateKind.SET),
        "epilogue": some(0.2, Epilogue(EpilogueKind.CAST, DType.FP16), Epilogue()),
        "k_codec": CODECS[random.integers(len(CODECS))],
        "v_codec": CODECS[random.integers(len(CODECS))],
    }
    if changes["alibi_slopes"]:
        changes["buckets"] = None
    if random.random() < 0.1:
        changes |= {"causal": CausalRule.ABSOLUTE, "query_positions": (5000, 5001, 300)}
    return replace(BASE, **changes)


def _arithmetic(random: Random, spec: AttentionSpec) -> Arithmetic:
    def format_of() -> DType:
        return list(DType)[random.integers(3)]

    splits, lag = int(random.integers(1, 4)), int(random.choice([0, 8]))
    p: DType | CodecFormat = format_of()
    if random.random() < 0.25:
        p = FP8[random.integers(2)]
    return Arithmetic(
        p=p,
        p_offset=int(random.choice([0, 8 - lag])) if p in FP8 else 0,  # no further: a late maximum would overflow
        fp8_mma=bool(random.random() < 0.2),
        out=DType.FP32 if random.random() < 0.7 else spec.dtype,
        partial=format_of(),
        rotated=format_of(),
        reconstructed=format_of(),
        exp2=str(random.choice(EXPONENTS)),
        fraction_bits=int(random.choice([0, 0, 25])),
        tf32=bool(random.random() < 0.2),
        l_sums_cast_p=bool(random.integers(2)),
        tile=int(random.choice([16, 32])),
        splits=splits,
        order=int(random.integers(4)),
        lag=lag,
        delta_from_p=bool(random.random() < 0.3),
        scaled_d_s=bool(random.random() < 0.3),
        merge_outputs=bool(random.integers(2)),
    )


def _family(random: Random, shape: tuple[int, ...]) -> Array:
    """Values of one tensor."""
    normal = random.normal(size=shape)
    families = (
        normal,
        np.sign(normal) * (np.abs(normal) > 0.5),
        normal * 10.0 ** random.integers(-8, -2),
        normal * np.exp2(random.integers(-14, 4, size=shape)),
        np.broadcast_to(normal[:1], shape) + 1e-3 * normal * random.integers(0, 2),
        np.round(32 * random.random(shape)) / 32 + 1,
    )
    return families[random.integers(len(families))]


def _values(random: Random, spec: AttentionSpec, problem: Problem) -> tuple[Array, Inputs]:
    """d_out and inputs, as the dtype holds them; in half of all cases dS vanishes, since the channels of each V add to
    one number and d_out is constant.
    """

    def held(x: Array) -> Array:
        return torch.from_numpy(np.ascontiguousarray(x)).to(TORCH[spec.dtype]).double().numpy()

    k, v = (cache.data.shape for cache in problem.inputs[1:3])
    values, d_out = _family(random, v), _family(random, (spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo))
    if random.random() < 0.5:
        values = np.round(32 * values) / 32
        values[..., 1] = 4.5 - values[..., 0]
        d_out = np.zeros_like(d_out)
        d_out[..., :2] = 1.0
    pages = problem.inputs.k.pages
    keys = PagedCache(pages, held(_family(random, k)))
    inputs = Inputs(held(_family(random, problem.inputs.q.shape)), keys, PagedCache(pages, held(values)))
    return held(d_out), inputs


def _scaled(random: Random, spec: AttentionSpec, inputs: Inputs) -> AttentionSpec:
    """A scale that makes the largest logit about one of LOGITS, or saturates the soft cap."""
    size = max(np.abs(np.einsum("thc,psgc->th", np.abs(inputs.q), np.abs(inputs.k.data))).max(), 1e-30)
    mean = size / inputs.k.data[..., 0].size
    target = float(random.choice(LOGITS))
    if spec.logits_soft_cap:
        target = spec.logits_soft_cap * float(random.choice([0.5, 4.0, 8.5]))
    return replace(spec, sm_scale=float(np.float32(random.choice([-1, 1]) * min(target / mean, 1e20))))


def one_by_one(rows: Rows) -> Rows:
    """The rows of a kernel that visits a repeated key as often as it is named: each visit an edge of its own."""
    width = int((rows.counts * rows.edge).sum(dim=1).max().clamp(min=1))
    at, edge = [], torch.zeros(len(rows.edge), width, dtype=torch.bool)
    for row, (some, counts) in enumerate(zip(rows.edge, rows.counts, strict=True)):
        names = torch.repeat_interleave(torch.arange(len(some)), counts * some)
        edge[row, : len(names)] = True
        at.append(torch.cat((names, torch.zeros(width - len(names), dtype=torch.long))))
    names = torch.stack(at)

    def of(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each[name] for each, name in zip(x, names, strict=True)])

    return rows._replace(
        k=of(rows.k) * edge[..., None],
        v=of(rows.v) * edge[..., None],
        edge=edge,
        counts=torch.ones_like(names),
        key_position=of(rows.key_position),
        slot=of(rows.slot),
        token=of(rows.token),
    )


def two_keys(spec: AttentionSpec, q: Array, k: Array, v: Array, names: list[int], how: Arithmetic) -> Hard:
    """One query q [d] over the first keys k [n, d] and v [n, d_vo] of one page, named as `names` says; d_out is 1."""
    spec = replace(spec, num_qo_heads=1, num_kv_heads=1, head_dim_qk=len(q), head_dim_vo=v.shape[1], dtype=how.out)
    spec = replace(spec, seq_lens=(16,), qo_lens=(1,), causal=CausalRule.NONE)
    problem = problem_of(replace(spec, k_codec=None, v_codec=None), 0, 1.0)
    keys, values = np.zeros((1, 16, 1, len(q))), np.zeros((1, 16, 1, v.shape[1]))
    keys[0, : len(k), 0], values[0, : len(v), 0] = k, v
    inputs, coded = quantised(
        spec, Inputs(q[None, None], PagedCache(np.arange(1), keys), PagedCache(np.arange(1), values)), problem.table
    )
    raw = CandidateLists(np.array([0, len(names)]), np.array(names))
    problem = replace(problem, spec=spec, inputs=inputs, coded=coded, raw=raw)
    repeats = spec.candidate_kind is CandidateKind.MULTISET
    return Hard(problem, how, np.ones((1, 1, v.shape[1])), np.zeros((1, 1)), repeats)


def _repeated() -> Hard:
    """FP16 P of a key at a logit of -17.3, named 200 times: each visit rounds it in the subnormals."""
    spec = replace(BASE, candidate_kind=CandidateKind.MULTISET)
    how = Arithmetic(p=DType.FP16, out=DType.FP32)
    k = np.array([[0.0, 0.0], [-17.3, 0.0]])
    return two_keys(spec, np.array([1.0, 0.0]), k, np.array([[0.0, 0.0], [1.0, 2.0]]), [0] + 200 * [1], how)


def _small_queries() -> Hard:
    """q of 1e-5, turned and rounded to FP16."""
    random = np.random.default_rng(0)
    q, k, v = 1e-5 * random.normal(size=8), random.normal(size=(16, 8)), random.normal(size=(16, 4))
    how = Arithmetic(p=DType.FP32, out=DType.FP32, rotated=DType.FP16)
    q, k, v = (np.float32(x).astype(np.float64) for x in (q, k, v))
    return two_keys(replace(BASE, rope=RoPE(8)), q, k, v, list(range(16)), how)


def _vanishing() -> Hard:
    """dS is 0, since the channels of each V add to one number; the cast of what rounding leaves of it is not."""
    random = np.random.default_rng(252)
    k = np.round(8 * random.normal(size=(16, 4))) / 8
    x = np.round(32 * random.random(16)) / 32 + 1
    how = Arithmetic(p=DType.BF16, out=DType.BF16)
    p = np.exp(k[:, 0])
    k[:, 1] = np.where(np.cumsum(p) - p > p.sum() / 2, 1, -1)  # so that the sum of P K nearly vanishes
    return two_keys(BASE, np.array([1.0, 0.0, 0.0, 0.0]), k, np.stack((x, 4.5 - x), axis=1), list(range(16)), how)


def _saturated() -> Hard:
    """Two equal keys far up a soft cap, where a slope of 1e-7 errs by all of itself, and dS is nearly 0."""
    spec = replace(BASE, sm_scale=8.98 * 0.5, logits_soft_cap=0.5)
    v = np.array([[1.0078125, 1.0], [1.0, 1.0078125]])
    return two_keys(spec, np.array([1.0, 0.0]), np.ones((2, 2)), v, [0, 1], Arithmetic())


def _turned_codes() -> Hard:
    """K from codes, rounded to BF16 and then turned by an eighth: across q, so that the turned products vanish."""
    base = float((np.pi / 4) ** -4)  # the second of four frequencies is pi / 4
    spec = replace(BASE, rope=RoPE(8, base), k_codec=Codec(CodecFormat.INT8, ScaleGranularity.TENSOR))
    k, q = np.zeros((2, 8)), np.zeros(8)
    k[1, 1], k[1, 5] = 100.0, 99.0
    q[1] = q[5] = np.float32(np.sqrt(0.5))  # at position 15, where it is turned onto one channel
    how = Arithmetic(p=DType.FP32, out=DType.FP32, reconstructed=DType.BF16)
    return two_keys(spec, q, k, np.array([[1.0, 2.0], [-1.0, 1.0]]), [0, 1], how)


def _small_weights() -> Hard:
    """A key at a logit of -6 that is a difference of products of 400, rounded to BF16: its weight may err by more than
    itself.
    """
    size, wanted, up, down = 400.0, -6.0, 1 + 1.01 * 2.0**-8, 1 + 0.99 * 2.0**-8  # beside a midpoint of BF16
    q = np.float32([0, 0, *[up] * 8, *[down] * 8, 1, 0]).astype(np.float64)
    k = np.zeros((2, 20))
    k[1, 2:10], k[1, 10:18] = np.float32(up), -np.float32(down)
    k[1, 18] = torch.tensor(wanted / (size / 16) - float(q @ k[1])).bfloat16().item()
    how = Arithmetic(p=DType.FP32, out=DType.FP32, rotated=DType.BF16)
    spec = replace(BASE, rope=RoPE(2, 100.0), sm_scale=size / 16)
    return two_keys(spec, q, k, np.array([[1.0, 0.0], [-1.0, 1.0]]), [0, 1], how)


NAMED = {
    "small weights that err by more than themselves": _small_weights,
    "repeats in the subnormals": _repeated,
    "small queries rounded to FP16": _small_queries,
    "dS that vanishes": _vanishing,
    "a saturated soft cap": _saturated,
    "codes rounded and then turned": _turned_codes,
}
