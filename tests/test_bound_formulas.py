"""The bounds against the formulas of docs/bounds.md section 1, written out edge by edge in Python floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from sacts.reference.bounds import Expected, expected
from sacts.reference.candidates import CandidateLists, validate
from sacts.reference.forward import Inputs
from sacts.reference.numerics import Numerics
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, DType

Array = NDArray[np.float64]

U32 = 2.0**-24
U = {DType.FP16: 2.0**-11, DType.BF16: 2.0**-8, DType.FP32: 2.0**-24}
A = {DType.FP16: 2.0**-25, DType.BF16: 2.0**-134, DType.FP32: 2.0**-150}  # half the smallest subnormal
CASTS = {DType.FP16: np.float16, DType.FP32: np.float32}
SCALE = 0.4


@dataclass(frozen=True)
class Row:
    """One query over its k candidates: q [d], k [k, d], v [k, d_vo]."""

    q: Array
    k: Array
    v: Array


def gamma(n: int) -> float:
    return (n + 2) * 2.0**-23


def written_out(row: Row, numerics: Numerics, walked: int) -> tuple[list[float], float]:
    """B' of each channel, and the lse bound; `walked`: slots that the tiles walk over."""
    k, d = row.k.shape
    s = [SCALE * math.fsum(a * b for a, b in zip(row.q, key, strict=True)) for key in row.k]
    products = [SCALE * math.fsum(abs(a * b) for a, b in zip(row.q, key, strict=True)) for key in row.k]
    top = max(s)
    l = math.fsum(math.exp(x - top) for x in s)
    lse = top + math.log(l)
    w = [math.exp(x - lse) for x in s]
    u_p, a_p = U[numerics.p], A[numerics.p]
    rescales = min(k, math.ceil(walked / numerics.min_tile))
    eta = []
    for x, size in zip(s, products, strict=True):
        e = (gamma(d) + 2 * numerics.u_operand) * size + 2 * U32 * abs(x)
        m = max(abs(x), abs(top))  # every running maximum that this weight meets lies between the two
        merge = numerics.u_exp + 8 * U32 * max(abs(lse), m) + 4 * U32 if numerics.splits else 0.0
        rescale = rescales * (numerics.u_exp + 2 * U32)
        eta.append(math.expm1(e + 4 * U32 * (abs(x) + m) + numerics.u_exp + rescale + 6 * U32 * m + merge))
    mean_eta = math.fsum(a * b for a, b in zip(w, eta, strict=True))
    cast_l = u_p + a_p * k / l if numerics.l_sums_cast_p else 0.0
    rho = mean_eta + gamma(k) + cast_l
    half_width = []
    for column in row.v.T:
        out = math.fsum(a * b for a, b in zip(w, column, strict=True))
        total = math.fsum(a * abs(b) for a, b in zip(w, column, strict=True))
        plain = math.fsum(map(abs, column))
        terms = [
            math.fsum(a * b * abs(c) for a, b, c in zip(w, eta, column, strict=True)) + abs(out) * mean_eta,
            (u_p + 2 * numerics.u_operand) * total + a_p / l * plain,
            (gamma(k) + rescales * U32) * (1 + u_p) * total,
            (gamma(k) + 4 * U32 + cast_l) * abs(out),
            U[numerics.partial] * total + A[numerics.partial] if numerics.splits else 0.0,
            2.0**-126 * (2 + plain / min(l, 1.0)),
        ]
        half_width.append(math.fsum(terms) / (1 - rho))
    log_error = 2 * (2.0**-21 + 4 * U32 * (abs(math.log(l)) + abs(lse) + abs(top))) + U32 * abs(lse)
    return half_width, rho / (1 - rho) + log_error


def written_out_alone(row: Row, numerics: Numerics) -> tuple[list[float], float]:
    """The same for a row of one key."""
    (key,), (v,) = row.k, row.v.tolist()
    s = SCALE * math.fsum(a * b for a, b in zip(row.q, key, strict=True))
    products = SCALE * math.fsum(abs(a * b) for a, b in zip(row.q, key, strict=True))
    e = (gamma(len(key)) + 2 * numerics.u_operand) * products + 2 * U32 * abs(s)
    far = abs(s) + e
    apart = 17 * U32
    if numerics.splits and not numerics.merges_states:
        apart += 2 * numerics.u_exp + 8 * U32 * far
    u_p, a_p = (0.0, 0.0) if numerics.unit_p else (U[numerics.p], A[numerics.p])
    cast_l = u_p + a_p if numerics.l_sums_cast_p else 0.0
    rho = gamma(1) + cast_l
    u_part, a_part = (U[numerics.partial], A[numerics.partial]) if numerics.splits else (0.0, 0.0)
    factor = (
        apart + u_p + 2 * numerics.u_operand + a_p + (gamma(1) + U32) * (1 + u_p) + gamma(1) + 4 * U32 + cast_l + u_part
    )
    half_width = [(factor * abs(x) + a_part + 2.0**-126 * (2 + abs(x))) / (1 - rho) for x in v]
    merge = numerics.u_exp + 8 * U32 * far + 4 * U32 if numerics.splits else 0.0
    exponent = e + 14 * U32 * far + 2 * numerics.u_exp + 2 * U32 + merge
    return half_width, exponent + rho / (1 - rho) + 2 * (2.0**-21 + 8 * U32 * far) + U32 * far


def evaluated(row: Row, seq_len: int, numerics: Numerics, block_size: int = 1, junk: float = 0.0) -> Expected:
    """The row by `expected`: a token list, or all blocks under a window that leaves its keys; `junk` in other slots."""
    k, d = row.k.shape
    spec = AttentionSpec(1, 1, d, row.v.shape[1], seq_len, (seq_len,), (1,), DType.FP32, SCALE, block_size)
    keys, values = (np.full((1, seq_len, 1, x.shape[1]), junk) for x in (row.k, row.v))
    entries = chosen = np.random.default_rng(1).permutation(seq_len)[:k]
    if block_size > 1:
        spec = replace(spec, window_left=k - 1)
        entries, chosen = np.arange(seq_len // block_size), np.arange(seq_len - k, seq_len)
    keys[0, chosen, 0], values[0, chosen, 0] = row.k, row.v
    table = PageTable(np.zeros((1, 1), np.int64), seq_len, 1, (frozenset({0}),))
    page = np.zeros(1, np.int64)
    inputs = Inputs(row.q[None, None], PagedCache(page, keys), PagedCache(page, values))
    lists = validate(spec, CandidateLists(np.array([0, len(entries)]), entries), table)
    return expected(spec, inputs, table, lists, numerics)


CONTRACTS = {
    "bf16": Numerics.default(DType.BF16),
    "fp16": Numerics.default(DType.FP16),
    "fp32": Numerics.default(DType.FP32),
    "no splits": Numerics(DType.BF16, DType.FP16, splits=False),
    "low-precision partials": Numerics(DType.FP32, DType.FP32, partial=DType.FP16),
    "cubic exponential": Numerics(DType.FP16, DType.FP16, u_exp=1.1e-4),
    "tf32 operands": Numerics(DType.FP32, DType.FP32, u_operand=2.0**-11),
    "l sums the cast P": Numerics(DType.FP16, DType.FP32, l_sums_cast_p=True),
    "dense": Numerics(DType.FP32, DType.FP32, dense=True),
    "tiles of 64": Numerics(DType.FP32, DType.FP32, min_tile=64),
    "tiles of one slot": Numerics(DType.FP32, DType.FP32, min_tile=1),
}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("spread", [1.0, 6.0, 0.01])
def test_the_bounds_are_the_formulas_of_the_document(contract: str, spread: float) -> None:
    random = np.random.default_rng(7)
    row = Row(random.normal(size=24), spread * random.normal(size=(70, 24)), 0.3 + random.normal(size=(70, 5)))
    numerics = CONTRACTS[contract]
    found = evaluated(row, 300, numerics)
    half_width, lse_bound = written_out(row, numerics, walked=300 if numerics.dense else 70)
    np.testing.assert_allclose(found.half_width[0, 0], half_width, rtol=1e-6)
    np.testing.assert_allclose(found.lse_bound[0, 0], lse_bound, rtol=1e-6)


ALONE = CONTRACTS | {
    "P is 1": Numerics(DType.BF16, DType.FP32, unit_p=True, l_sums_cast_p=True),
    "states merged": Numerics(DType.FP32, DType.FP32, splits=True, merges_states=True),
    "outputs merged": Numerics(DType.FP32, DType.FP32, splits=True),
}


@pytest.mark.parametrize("contract", ALONE)
@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_the_bounds_of_a_row_of_one_edge_are_those_of_the_document(contract: str, spread: float) -> None:
    random = np.random.default_rng(12)
    row = Row(random.normal(size=24), spread * random.normal(size=(1, 24)), 0.3 + random.normal(size=(1, 5)))
    found = evaluated(row, 300, ALONE[contract])
    half_width, lse_bound = written_out_alone(row, ALONE[contract])
    assert found.trusted.all()
    np.testing.assert_allclose(found.half_width[0, 0], half_width, rtol=1e-4)  # the reference's own error
    np.testing.assert_allclose(found.lse_bound[0, 0], lse_bound, rtol=1e-6)


def test_a_row_of_one_edge_has_a_bound_of_out_where_rows_of_more_have_none() -> None:
    random = np.random.default_rng(13)
    numerics = Numerics(DType.BF16, DType.BF16, u_operand=2.0**-8, unit_p=True)
    rows = [Row(random.normal(size=24), 100 * random.normal(size=(k, 24)), random.normal(size=(k, 5))) for k in (1, 2)]
    alone, two = (evaluated(row, 300, numerics) for row in rows)
    assert alone.trusted.all()
    assert not two.trusted.any()
    assert (alone.half_width < 0.01 * np.abs(alone.out)).all()
    assert 0.5 < alone.lse_bound[0, 0] < 20


@pytest.mark.parametrize("k", [3, 70])
def test_blocks_count_every_slot_that_they_load_but_no_more_rescales_than_edges(k: int) -> None:
    random = np.random.default_rng(9)
    row = Row(random.normal(size=24), random.normal(size=(k, 24)), random.normal(size=(k, 5)))
    numerics = Numerics(DType.FP32, DType.FP32, u_exp=1e-3)
    found = evaluated(row, 300, numerics, block_size=20)
    assert found.edges[0, 0] == k
    half_width, lse_bound = written_out(row, numerics, walked=300)
    np.testing.assert_allclose(found.half_width[0, 0], half_width, rtol=1e-6)
    np.testing.assert_allclose(found.lse_bound[0, 0], lse_bound, rtol=1e-6)


@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e300])
def test_what_stands_in_slots_that_no_row_attends_moves_no_bound(junk: float) -> None:
    random = np.random.default_rng(10)
    row = Row(random.normal(size=24), random.normal(size=(70, 24)), random.normal(size=(70, 5)))
    numerics = Numerics.default(DType.BF16)
    clean, found = (evaluated(row, 300, numerics, junk=x) for x in (0.0, junk))
    for name in ("out", "half_width", "out_lo", "out_hi", "lse", "lse_bound", "edges", "trusted"):
        np.testing.assert_array_equal(getattr(found, name), getattr(clean, name), err_msg=name)


@pytest.mark.parametrize("out", CASTS)
def test_the_interval_is_the_rounded_result_with_its_half_width_on_both_sides(out: DType) -> None:
    random = np.random.default_rng(8)
    row = Row(random.normal(size=16), random.normal(size=(40, 16)), random.normal(size=(40, 32)))
    found = evaluated(row, 64, Numerics(DType.BF16, out))
    np.testing.assert_array_equal(found.out_lo, (found.out - found.half_width).astype(CASTS[out]))
    np.testing.assert_array_equal(found.out_hi, (found.out + found.half_width).astype(CASTS[out]))
    assert (found.out_lo < found.out_hi).all()
