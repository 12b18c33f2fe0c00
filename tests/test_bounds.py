"""The bounds hold for a right kernel, are not idle, and close on the count witness.

The kernel here is a simulation in FP32 NumPy with tiles, splits, a cast of P and one of the output, both made by torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sacts.reference.bounds import Exactness, Expected, expected
from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.forward import Inputs
from sacts.reference.numerics import Numerics
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, CausalRule, DType

Array = NDArray[np.float64]
Single = NDArray[np.float32]

TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
COUNT = Exactness(equal_logits=True, exact_sums=True, zero_logits=True)
FAMILIES = ("gaussian", "huge", "equal", "heavy tail")


def cast(x: Array | Single, dtype: DType) -> Single:
    return torch.from_numpy(np.asarray(x, np.float32)).to(TORCH[dtype]).float().numpy()


@dataclass(frozen=True)
class Problem:
    """One request in one contiguous run of pages: caches reshape to [T, kv heads, d]."""

    spec: AttentionSpec
    table: PageTable
    inputs: Inputs
    candidates: ValidatedCandidates

    def expected(self, numerics: Numerics, exactness: Exactness = Exactness()) -> Expected:  # noqa: B008
        return expected(self.spec, self.inputs, self.table, self.candidates, numerics, exactness)

    def row(self, token: int, kv_head: int) -> list[int]:
        row = token * self.spec.num_kv_heads + kv_head
        start, end = self.candidates.indptr[row : row + 2]
        return [int(t) for t in self.candidates.indices[start:end]]


def problem_of(q: Array, k: Array, v: Array, lists: list[list[int]], dtype: DType, sm_scale: float) -> Problem:
    """q [n, heads, d]; k and v [T, kv heads, d]; one token list a row."""
    page_size, pages = 16, len(k) // 16
    spec = AttentionSpec(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=k.shape[2],
        head_dim_vo=v.shape[2],
        page_size=page_size,
        seq_lens=(len(k),),
        qo_lens=(len(q),),
        dtype=dtype,
        sm_scale=sm_scale,
    )
    table = PageTable(np.arange(pages)[None], page_size, pages, (frozenset(range(pages)),))
    q, k, v = (cast(x, dtype).astype(np.float64) for x in (q, k, v))
    k, v = (x.reshape(pages, page_size, *x.shape[1:]) for x in (k, v))
    inputs = Inputs(q, PagedCache(np.arange(pages), k), PagedCache(np.arange(pages), v))
    raw = CandidateLists(np.cumsum([0, *map(len, lists)]), np.fromiter(chain(*lists), np.int64))
    return Problem(spec, table, inputs, validate(spec, raw, table))


def random_problem(family: str, dtype: DType, seed: int) -> Problem:
    random = np.random.default_rng(seed)
    d = int(random.choice([16, 32, 64]))
    seq_len = 16 * int(random.integers(1, 20))
    q, k, v = (random.normal(size=shape) for shape in ((1, 4, d), (seq_len, 2, d), (seq_len, 2, d)))
    if family == "huge":
        q, k = 10 * q, 10 * k
    elif family == "equal":
        k = np.broadcast_to(k[:1], k.shape)
    elif family == "heavy tail":
        k = k * np.exp(random.normal(size=(seq_len, 1, 1)))
        v = np.clip(v * np.exp(2 * random.normal(size=(seq_len, 1, 1))), -1e3, 1e3)
    lists = [random.permutation(seq_len)[: int(random.integers(1, seq_len + 1))].tolist() for _ in range(2)]
    return problem_of(q, k, v, lists, dtype, 0.75 / math.sqrt(d))


def kernel(problem: Problem, numerics: Numerics, tile: int, splits: int, fault: str = "") -> tuple[Array, Array, Array]:
    """out before the output cast, out, lse of one query token, in FP32 throughout."""
    spec, heads = problem.spec, []
    for kv_head in range(spec.num_kv_heads):
        t = problem.row(0, kv_head)
        k, v = (
            cache.data.reshape(-1, *cache.data.shape[2:])[t, kv_head].astype(np.float32)
            for cache in (problem.inputs.k, problem.inputs.v)
        )
        q = problem.inputs.q[0, kv_head * spec.group_size :][: spec.group_size].astype(np.float32)
        z = (q @ k.T) * np.float32(spec.sm_scale * math.log2(math.e))
        per_split = -(-len(t) // (tile * splits)) * tile
        starts = range(0, len(t), per_split)
        states = [_split(z[:, i : i + per_split], v[i : i + per_split], numerics, tile, fault) for i in starts]
        states = states[:-1] if fault == "the last split is lost" else states
        m = np.max([state[0] for state in states], axis=0)
        scales = [np.exp2(state[0] - m) for state in states]
        l = sum(scale * state[1] for scale, state in zip(scales, states, strict=True))
        o = sum(scale[:, None] * state[2] for scale, state in zip(scales, states, strict=True))
        assert o.dtype == l.dtype == np.float32
        heads.append((o / l[:, None], (m + np.log2(l)) * np.float32(math.log(2))))
    out, lse = (np.concatenate(parts)[None] for parts in zip(*heads, strict=True))
    return out.astype(np.float64), cast(out, numerics.out).astype(np.float64), lse.astype(np.float64)


def _split(z: Single, v: Single, numerics: Numerics, tile: int, fault: str) -> tuple[Single, Single, Single]:
    m = np.full(len(z), -np.inf, np.float32)
    l, o = np.zeros(len(z), np.float32), np.zeros((len(z), v.shape[1]), np.float32)
    for start in range(0, z.shape[1], tile):
        part = z[:, start : start + tile]
        m_new = np.maximum(m, part.max(axis=1))
        p = np.exp2(part - m_new[:, None])
        scale = np.exp2(m - m_new)
        scale_o = np.ones_like(scale) if fault == "o is not rescaled" and start else scale
        cast_p = cast(p, numerics.p)
        l = scale * l + (cast_p if numerics.l_sums_cast_p else p).sum(axis=1)
        o = scale_o[:, None] * o + cast_p @ v[start : start + tile]
        m = m_new
    return m, l, o


@dataclass(frozen=True)
class Run:
    """One simulated launch: `use`: largest error before the output cast / allowed error."""

    name: str
    inside: bool
    lse_inside: bool
    use: float


def judged(problem: Problem, numerics: Numerics, tile: int, splits: int, fault: str = "") -> Run:
    allowed = problem.expected(numerics)
    exact, out, lse = kernel(problem, numerics, tile, splits, fault)
    assert allowed.trusted.all()
    return Run(
        f"tile {tile} splits {splits} {numerics}",
        bool(((allowed.out_lo <= out) & (out <= allowed.out_hi)).all()),
        bool((np.abs(lse - allowed.lse) <= allowed.lse_bound).all()),
        float((np.abs(exact - allowed.out) / allowed.half_width).max()),
    )


@cache
def runs(family: str, dtype: DType) -> list[Run]:
    settings = product((16, 32, 64, 128), (1, 2, 5))
    return [
        judged(random_problem(family, dtype, seed), Numerics(dtype, dtype, l_sums_cast_p=seed % 3 == 0), tile, splits)
        for seed, (tile, splits) in enumerate(settings)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DType)
def test_a_right_kernel_never_leaves_the_bounds(family: str, dtype: DType) -> None:
    assert len(runs(family, dtype)) == 12
    for run in runs(family, dtype):
        assert run.inside, run.name
        assert run.lse_inside, run.name
        assert run.use <= 1, run.name


@pytest.mark.parametrize(("dtype", "used"), [(DType.BF16, 0.02), (DType.FP16, 0.02), (DType.FP32, 0.002)])
def test_the_bound_is_not_idle(dtype: DType, used: float) -> None:
    assert max(run.use for run in runs("gaussian", dtype)) > used


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("family", ["gaussian", "huge"])
def test_a_wrong_kernel_leaves_the_bounds(family: str, dtype: DType) -> None:
    problem, numerics = random_problem(family, dtype, seed=2), Numerics(dtype, dtype)
    assert len(problem.row(0, 0)) > 48
    right, not_rescaled, lost = (
        judged(problem, numerics, 16, 2, fault) for fault in ("", "o is not rescaled", "the last split is lost")
    )
    assert right.inside
    assert right.lse_inside
    assert not not_rescaled.inside
    assert not lost.inside
    assert not lost.lse_inside


def witness(dtype: DType, k: int = 512, channels: int = 16) -> tuple[Problem, Array]:
    """q = 0 and +-1 codes over k candidates; channel 0 sums to 0, the others are drawn."""
    codes = np.random.default_rng(9).choice([-1.0, 1.0], (k, channels))
    codes[:, 0] = np.resize([1.0, -1.0], k)
    keys = np.random.default_rng(10).normal(size=(k, 1, 8))
    return problem_of(np.zeros((1, 1, 8)), keys, codes[:, None], [list(range(k))], dtype, 0.3), codes


@pytest.mark.parametrize("dtype", DType)
def test_the_count_witness_tells_every_dropped_and_doubled_candidate(dtype: DType) -> None:
    problem, codes = witness(dtype)
    allowed = problem.expected(Numerics(dtype, dtype, splits=True, unit_p=True), COUNT)
    low, high = allowed.out_lo[0, 0], allowed.out_hi[0, 0]
    k, total = len(codes), codes.sum(axis=0)
    mean = cast(total / k, dtype)
    assert ((low <= mean) & (mean <= high)).all()
    assert abs(math.log(k) - float(allowed.lse[0, 0])) < 1e-15
    for changed, size in (((total - codes) / (k - 1), k - 1), ((total + codes) / (k + 1), k + 1)):
        seen = cast(changed, dtype)
        assert ((seen < low) | (seen > high))[:, 0].all()
        assert ((seen < low) | (seen > high)).all(axis=1).any()
        assert abs(math.log(size) - float(allowed.lse[0, 0])) > 100 * float(allowed.lse_bound[0, 0])


def test_the_witness_without_splits_has_no_error_but_the_flush_where_the_codes_cancel() -> None:
    problem, codes = witness(DType.BF16)
    allowed = problem.expected(replace(Numerics.default(DType.BF16), unit_p=True), COUNT)
    assert 0 < allowed.half_width[0, 0, 0] <= 2.0**-126 * (2 + len(codes))
    assert allowed.out_lo[0, 0, 0] >= -(2.0**-116)
    assert allowed.out_hi[0, 0, 0] <= 2.0**-116


def test_exactness_flags_and_unit_p_narrow_the_witness_and_nothing_else_may() -> None:
    problem, _ = witness(DType.BF16)
    numerics = replace(Numerics.default(DType.BF16), unit_p=True)
    exact = problem.expected(numerics, COUNT).half_width.max()
    assert exact < 1e-5
    for weaker in (
        problem.expected(numerics),
        problem.expected(numerics, Exactness(equal_logits=True)),
        problem.expected(replace(numerics, unit_p=False), COUNT),
    ):
        assert weaker.half_width.max() > 2 * exact


def test_logits_near_a_million_have_no_bound() -> None:
    random = np.random.default_rng(4)
    q, k, v = (random.normal(size=shape) for shape in ((1, 1, 64), (64, 1, 64), (64, 1, 8)))
    problem = problem_of(100 * q, 100 * k, v, [list(range(64))], DType.BF16, 12.0)
    assert np.abs(12.0 * 100 * k[:, 0] @ problem.inputs.q[0, 0]).max() > 1e6
    allowed = problem.expected(Numerics.default(DType.BF16))
    assert not allowed.trusted.any()
    assert (allowed.out_lo == -np.inf).all()
    assert (allowed.out_hi == np.inf).all()
    assert (allowed.lse_bound == np.inf).all()
    assert (allowed.half_width == np.inf).all()


def test_an_empty_row_must_be_exactly_zero_beside_a_row_that_is_not() -> None:
    random = np.random.default_rng(6)
    q, k, v = (random.normal(size=shape) for shape in ((2, 2, 8), (32, 2, 8), (32, 2, 8)))
    problem = problem_of(q, k, v, [[], [0, 3], [5], []], DType.FP16, 0.3)
    problem = replace(problem, spec=replace(problem.spec, causal=CausalRule.BOTTOM_RIGHT))
    allowed = problem.expected(Numerics.default(DType.FP16))
    empty = np.array([[True, False], [False, True]])
    assert ((allowed.edges == 0) == empty).all()
    assert allowed.trusted.all()
    for zero in (allowed.out, allowed.out_lo, allowed.out_hi, allowed.half_width, allowed.lse_bound):
        assert (zero[empty] == 0).all()
    assert (allowed.lse[empty] == -np.inf).all()
    assert (allowed.half_width[~empty] > 0).all()
    assert (allowed.lse_bound[~empty] > 0).all()


@pytest.mark.parametrize(
    ("worse", "base", "lse_too"),
    [
        ({"u_exp": 1.1e-4}, {}, True),
        ({"u_operand": 2.0**-11}, {}, True),
        ({"p": DType.FP16}, {"p": DType.FP32}, False),
        ({"p": DType.BF16}, {"p": DType.FP16}, False),
        ({"partial": DType.BF16}, {"splits": True}, False),
        ({"l_sums_cast_p": True}, {}, True),
        ({"dense": True}, {}, True),
        ({"min_tile": 1}, {}, True),
        ({"splits": True}, {"splits": False}, True),
    ],
)
def test_the_bounds_grow_as_the_numerics_get_worse(
    worse: dict[str, object], base: dict[str, object], lse_too: bool
) -> None:
    random = np.random.default_rng(8)
    q, k, v = (random.normal(size=shape) for shape in ((1, 4, 32), (512, 2, 32), (512, 2, 32)))
    problem = problem_of(q, k, v, [random.permutation(512)[:40].tolist() for _ in range(2)], DType.BF16, 0.2)
    better = replace(Numerics.default(DType.BF16), **base)  # type: ignore[arg-type]
    narrow, wide = problem.expected(better), problem.expected(replace(better, **worse))  # type: ignore[arg-type]
    assert (wide.half_width > narrow.half_width).all()
    assert (wide.out_lo <= narrow.out_lo).all()
    assert (wide.out_hi >= narrow.out_hi).all()
    assert (wide.lse_bound > narrow.lse_bound if lse_too else wide.lse_bound == narrow.lse_bound).all()
