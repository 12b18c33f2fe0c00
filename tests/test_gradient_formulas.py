"""The bounds of gradients against the formulas of docs/bounds.md section 10, written out edge by edge in Python floats:
one query row, one head, every key its own slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from test_bound_formulas import U32, A, U, gamma

from sacts.reference.candidates import CandidateLists, validate
from sacts.reference.forward import Inputs
from sacts.reference.gradient_bounds import ExpectedGradients, FedErrors, expected_gradients
from sacts.reference.numerics import Numerics
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, CausalRule, DType

Array = NDArray[np.float64]

SCALE, KEYS, SLOTS = 0.4, 40, 64
FLUSH = 2.0**-126


@dataclass(frozen=True)
class Row:
    """q [d], k [KEYS, d], v [KEYS, d_vo]; d_out [d_vo], d_lse; how wrong out [d_vo] and lse are that are fed."""

    q: Array
    k: Array
    v: Array
    d_out: Array
    d_lse: float
    out_error: Array
    lse_error: float


def dot(a: Array, b: Array) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def sizes(a: Array, b: Array) -> float:
    return dot(np.abs(a), np.abs(b))


def delta_error(row: Row, numerics: Numerics, p: list[float], s: list[float], z: list[float], lse: float) -> float:
    """E_D of a sum of P dP, without a soft cap."""
    d, d_v, o = len(row.q), len(row.d_out), 2 * numerics.u_operand
    terms = []
    for j in range(KEYS):
        error = (gamma(d) + o) * SCALE * sizes(row.q, row.k[j]) + 2 * U32 * abs(z[j])
        r = error + 4 * U32 * (abs(s[j]) + abs(lse) + 1) + numerics.u_exp + row.lse_error
        eta, size = r * (1 + r), sizes(row.d_out, row.v[j])
        operands = o * size
        d_p, e_dp = abs(dot(row.d_out, row.v[j])), operands + (gamma(d_v) + 2 * U32) * (size + operands)
        f = p[j] * (eta * d_p + (1 + eta) * e_dp)
        terms.append(f + gamma(KEYS) * (p[j] * d_p + f))
    return math.fsum(terms)


def written_out(row: Row, numerics: Numerics, cap: float) -> tuple[Array, Array, Array]:
    """B of d_q [d], d_k [KEYS, d], d_v [KEYS, d_vo], with 4u (|value| + B)."""
    d, d_v, o = len(row.q), len(row.d_out), 2 * numerics.u_operand
    z = [SCALE * dot(row.q, key) for key in row.k]
    s = [cap * math.tanh(x / cap) if cap else x for x in z]
    lse = max(s) + math.log(math.fsum(math.exp(x - max(s)) for x in s))
    p = [math.exp(x - lse) for x in s]
    out = np.array([dot(np.array(p), column) for column in row.v.T])
    mean = dot(row.d_out, out)
    e_d = math.fsum(
        abs(x) * (e + gamma(d_v) * (abs(y) + e)) for x, e, y in zip(row.d_out, row.out_error, out, strict=True)
    )
    u_s, a_s = (0.0, 0.0) if numerics.p is DType.FP32 else (U[numerics.p], A[numerics.p])
    edges, values = [], []
    if numerics.delta_from_p:
        e_d = delta_error(row, numerics, p, s, z, lse)
    for j in range(KEYS):
        error = (gamma(d) + o) * SCALE * sizes(row.q, row.k[j]) + 2 * U32 * abs(z[j])
        slope = 1.0
        if cap:
            near = max(abs(z[j]) - error, 0.0) / cap
            error = error * min(1.0, 4 * math.exp(-2 * near)) + cap * numerics.u_tanh + 4 * U32 * abs(s[j])
            slope = 1 - math.tanh(z[j] / cap) ** 2
        r = error + 4 * U32 * (abs(s[j]) + abs(lse) + 1) + numerics.u_exp + row.lse_error
        eta = r * (1 + r)
        d_p, size = dot(row.d_out, row.v[j]), sizes(row.d_out, row.v[j])
        d_s = abs(p[j] * (d_p - mean + row.d_lse))
        operands = o * size
        e_dp = operands + (gamma(d_v) + 2 * U32) * (size + operands)
        added = abs(d_p) + abs(mean) + abs(row.d_lse)
        y = d_s * eta + p[j] * (1 + eta) * (e_dp + 4 * U32 * added) + FLUSH * (added + 2)
        of_mean = p[j] * (1 + eta) * e_d
        x = y
        if cap:
            x = y * slope + (d_s + y + of_mean) * (2 * error / cap + (error / cap) ** 2 + 4 * U32)
        whole = d_s * slope + x + slope * of_mean
        t = u_s * whole + a_s
        if numerics.scaled_d_s:
            t = (u_s + U32) * whole + a_s / SCALE
        edges.append((x, slope * p[j], eta, t, whole + t, p[j] * slope * (d_p - mean + row.d_lse)))
        w = p[j] * (eta + u_s * (1 + eta)) + a_s + FLUSH
        n = gamma(1) + U32
        half = np.abs(row.d_out) * (w + (o + n) * (p[j] + w)) + FLUSH * (1 + SCALE)
        values.append(half + 4 * U32 * (np.abs(p[j] * row.d_out) + half))
    x, steep, eta, t, h, d_z = (np.array(column) for column in zip(*edges, strict=True))
    tiles = min(KEYS, math.ceil(KEYS / numerics.min_tile))
    of_query = []
    for column in row.k.T:
        reach = sizes(h, column)
        b = sizes(x + steep * eta * e_d + t, column) + e_d * abs(dot(steep, column)) + o * reach
        half = SCALE * (b + (gamma(KEYS) + tiles * U32) * (reach + o * reach)) + FLUSH * (1 + SCALE) * (KEYS + 1)
        of_query.append(half + 4 * U32 * (abs(SCALE * dot(d_z, column)) + half))
    of_keys = []
    for j in range(KEYS):
        n = gamma(1) + U32
        b = x[j] + steep[j] * (1 + eta[j]) * e_d + t[j] + o * h[j]
        half = SCALE * np.abs(row.q) * (b + n * h[j] * (1 + o)) + FLUSH * (1 + SCALE)
        of_keys.append(half + 4 * U32 * (np.abs(SCALE * d_z[j] * row.q) + half))
    return np.array(of_query), np.array(of_keys), np.array(values)


def evaluated(row: Row, numerics: Numerics, cap: float) -> ExpectedGradients:
    spec = AttentionSpec(1, 1, len(row.q), len(row.d_out), SLOTS, (SLOTS,), (1,), DType.FP32, SCALE)
    spec = replace(spec, causal=CausalRule.NONE, logits_soft_cap=cap)
    keys, values = (np.zeros((1, SLOTS, 1, x.shape[1])) for x in (row.k, row.v))
    keys[0, :KEYS, 0], values[0, :KEYS, 0] = row.k, row.v
    table = PageTable(np.zeros((1, 1), np.int64), SLOTS, 1, (frozenset({0}),))
    page = np.zeros(1, np.int64)
    inputs = Inputs(row.q[None, None], PagedCache(page, keys), PagedCache(page, values))
    lists = validate(spec, CandidateLists(np.array([0, KEYS]), np.arange(KEYS)), table)
    fed = FedErrors(row.out_error[None, None], np.full((1, 1), row.lse_error))
    d_lse = np.full((1, 1), row.d_lse)
    return expected_gradients(spec, inputs, table, lists, row.d_out[None, None], numerics, fed, d_lse=d_lse)


CONTRACTS = {
    "bf16": Numerics.default(DType.BF16),
    "fp16": Numerics.default(DType.FP16),
    "fp32": Numerics.default(DType.FP32),
    "cubic exponential": Numerics(DType.FP16, DType.FP16, u_exp=1.1e-4),
    "tf32 operands": Numerics(DType.FP32, DType.FP32, u_operand=2.0**-11),
    "dS scaled before its cast": Numerics(DType.FP16, DType.FP16, scaled_d_s=True),
    "tiles of one slot": Numerics(DType.FP32, DType.FP32, min_tile=1),
}


@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_bounds_of_gradients_are_the_formulas_of_the_document(contract: str, cap: float) -> None:
    random = np.random.default_rng(7)
    row = Row(
        q=random.normal(size=12),
        k=random.normal(size=(KEYS, 12)),
        v=0.3 + random.normal(size=(KEYS, 5)),
        d_out=random.normal(size=5),
        d_lse=float(random.normal()),
        out_error=1e-3 * random.random(5),
        lse_error=1e-4,
    )
    numerics = CONTRACTS[contract]
    found = evaluated(row, numerics, cap)
    d_q, d_k, d_v = written_out(row, numerics, cap)
    np.testing.assert_allclose(found.d_q.half_width[0, 0], d_q, rtol=1e-5)
    np.testing.assert_allclose(found.d_k.half_width[0, :KEYS, 0], d_k, rtol=1e-5)
    np.testing.assert_allclose(found.d_v.half_width[0, :KEYS, 0], d_v, rtol=1e-5)


def test_a_delta_of_p_has_an_error_of_its_own() -> None:
    random = np.random.default_rng(8)
    row = Row(
        q=random.normal(size=12),
        k=random.normal(size=(KEYS, 12)),
        v=0.3 + random.normal(size=(KEYS, 5)),
        d_out=random.normal(size=5),
        d_lse=0.0,
        out_error=np.full(5, 1e3),  # of no matter: out is not read
        lse_error=1e-4,
    )
    numerics = Numerics(DType.BF16, DType.FP32, delta_from_p=True)
    found = evaluated(row, numerics, 0.0)
    d_q, d_k, d_v = written_out(row, numerics, 0.0)
    np.testing.assert_allclose(found.d_q.half_width[0, 0], d_q, rtol=1e-5)
    np.testing.assert_allclose(found.d_k.half_width[0, :KEYS, 0], d_k, rtol=1e-5)
    np.testing.assert_allclose(found.d_v.half_width[0, :KEYS, 0], d_v, rtol=1e-5)
