"""The reference's own error, certified: 80-digit arithmetic never finds more than the estimate admits.

`SACTS_CERTIFICATE=20 pytest tests/test_certificate.py` judges 20 times as many rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
from mpmath import mpf
from numpy.typing import NDArray

from sacts.reference import groups, keys
from sacts.reference.candidates import ValidatedCandidates
from sacts.reference.forward import Forward, Inputs, forward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.philox import keep
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Dropout,
    DType,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

Array = NDArray[np.float64]
Random = np.random.Generator

REPLICATES = int(os.environ.get("SACTS_CERTIFICATE", "1"))
DIGITS = 80
REQUESTS, LENGTH, PAGE = 5, 2**20, 64

BASE = AttentionSpec(
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim_qk=6,
    head_dim_vo=3,
    page_size=PAGE,
    seq_lens=(LENGTH,) * REQUESTS,
    qo_lens=(1,) * REQUESTS,
    dtype=DType.FP32,
    sm_scale=0.41,
)
MULTISET = replace(BASE, candidate_kind=CandidateKind.MULTISET)
SEQUENCE = replace(BASE, candidate_kind=CandidateKind.SEQUENCE)
SPECS = {
    "plain": BASE,
    "multiset": MULTISET,
    "RoPE": replace(BASE, rope=RoPE(4, 500000.0)),
    "RoPE of a sequence": replace(SEQUENCE, rope=RoPE(6, 10000.0, RopeLayout.INTERLEAVED)),
    "soft cap": replace(BASE, logits_soft_cap=30.0),
    "ALiBi": replace(BASE, alibi_slopes=(0.5, 2.0**-8)),
    "buckets": replace(BASE, buckets=RelativeBuckets((0, 1, 1000), ((5.0, -3.0, 0.1), (-700.0, 0.0, 1e-9)))),
    "sink": replace(BASE, sink_logits=(3.0, -40.0)),
    "large sink": replace(MULTISET, sink_logits=(5e4, 700.0), logits_soft_cap=1000.0),
    "dropout": replace(BASE, dropout=Dropout(0.5, 7)),
    "everything": replace(
        MULTISET,
        rope=RoPE(6),
        logits_soft_cap=50.0,
        alibi_slopes=(1e-6, 3e-6),
        sink_logits=(1.0, 2.0),
        causal=CausalRule.BOTTOM_RIGHT,
    ),
}


def gaussian(random: Random, q: Array, k: Array, v: Array) -> None:
    pass


def large_logits(random: Random, q: Array, k: Array, v: Array) -> None:
    q *= 10 ** random.uniform(1, 6, (len(q), 1, 1))


def beyond_range(random: Random, q: Array, k: Array, v: Array) -> None:
    q *= 10 ** random.uniform(5, 12, (len(q), 1, 1))


def tiny_inputs(random: Random, q: Array, k: Array, v: Array) -> None:
    for x in (q, k, v):
        x *= 10.0 ** -random.choice([20, 150, 160, 300, 315, 323], (len(x), *[1] * (x.ndim - 1)))


def huge_values(random: Random, q: Array, k: Array, v: Array) -> None:
    v *= 10 ** random.uniform(-300, 300, (len(v), v.shape[1], 1, 1))


def heavy_tails(random: Random, q: Array, k: Array, v: Array) -> None:
    for x in (q, k, v):
        x *= np.exp(random.normal(size=x.shape))


def cancelling_products(random: Random, q: Array, k: Array, v: Array) -> None:
    q[..., 1::2], k[..., 1::2] = -q[..., ::2] * (1 + 2.0**-45), k[..., ::2]
    q *= 10 ** random.uniform(0, 6, (len(q), 1, 1))


def cancelling_values(random: Random, q: Array, k: Array, v: Array) -> None:
    k[:] = k[:1, :1]
    v[:, 1::2] = -v[:, ::2]


def equal_keys(random: Random, q: Array, k: Array, v: Array) -> None:
    k[:] = 300 * k[0, 0]


def one_dominates(random: Random, q: Array, k: Array, v: Array) -> None:
    k[:, ::7] *= 1e3
    v[:, ::7] *= 1e-8


def zeros(random: Random, q: Array, k: Array, v: Array) -> None:
    q[random.random(len(q)) < 0.5] = 0.0
    v[random.random(v.shape) < 0.5] = 0.0


Family = Callable[[Random, Array, Array, Array], None]
FAMILIES: tuple[Family, ...] = (
    gaussian,
    large_logits,
    beyond_range,
    tiny_inputs,
    huge_values,
    heavy_tails,
    cancelling_products,
    cancelling_values,
    equal_keys,
    one_dominates,
    zeros,
)


class Problem(NamedTuple):
    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    candidates: ValidatedCandidates

    def forward(self) -> Forward:
        with np.errstate(all="ignore"):
            return forward(*self)


def problem_of(spec: AttentionSpec, family: Family, seed: int) -> Problem:
    """Each request attends 1 to 9 keys anywhere in a million, which share two pages."""
    random = np.random.default_rng(seed)
    table = np.zeros((REQUESTS, LENGTH // PAGE), np.int64)
    lists, counts = [], []
    for request in range(REQUESTS):
        pages = np.sort(random.permutation(LENGTH // PAGE)[:2])
        table[request, pages] = 2 * request + np.arange(2)
        t = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
        chosen = random.permutation(t)[: int(random.integers(1, 10))]
        lists.append(chosen if spec.candidate_kind is CandidateKind.SEQUENCE else np.sort(chosen))
        counts.append(random.integers(1, 4 if spec.candidate_kind is CandidateKind.MULTISET else 2, len(chosen)))
    q, k, v = (
        random.normal(size=shape)
        for shape in ((REQUESTS, 2, 6), (2 * REQUESTS, PAGE, 1, 6), (2 * REQUESTS, PAGE, 1, 3))
    )
    family(random, q, k, v)
    everything = np.arange(2 * REQUESTS)
    return Problem(
        spec,
        Inputs(q, PagedCache(everything, k), PagedCache(everything, v)),
        PageTable(table, PAGE, 2 * REQUESTS, ()),
        ValidatedCandidates(np.cumsum([0, *map(len, lists)]), np.concatenate(lists), np.concatenate(counts), 0),
    )


def turned(x: list[mpf], position: int, rope: RoPE) -> list[mpf]:
    result, half = list(x), rope.rotary_dim // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.layout is RopeLayout.INTERLEAVED else (i, i + half)
        angle = position * mpf(rope.base) ** (mpf(-2 * i) / rope.rotary_dim)
        c, s = mpmath.cos(angle), mpmath.sin(angle)
        result[a], result[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return result


def exact(problem: Problem, request: int, head: int) -> tuple[list[mpf], mpf]:
    """out and lse of one row with 80 digits, from the definitions."""
    spec, inputs = problem.spec, problem.inputs
    mine = slice(*problem.candidates.indptr[request : request + 2])
    sequence, position = spec.candidate_kind is CandidateKind.SEQUENCE, LENGTH - 1
    ts, counts = problem.candidates.indices[mine].tolist(), problem.candidates.counts[mine].tolist()
    query = len(ts) - (ts[-1] == position) if sequence else position
    logits, values, kept = [], [], []
    for r, (t, count) in enumerate(zip(ts, counts, strict=True)):
        at = problem.table.table[request, t // PAGE], t % PAGE, 0
        q, k = ([mpf(x) for x in row.tolist()] for row in (inputs.q[request, head], inputs.k.data[at]))
        key = r if sequence else t
        if spec.rope:
            q, k = turned(q, query, spec.rope), turned(k, key, spec.rope)
        z = mpf(spec.sm_scale) * mpmath.fsum(a * b for a, b in zip(q, k, strict=True))
        if spec.logits_soft_cap:
            z = spec.logits_soft_cap * mpmath.tanh(z / spec.logits_soft_cap)
        if spec.alibi_slopes:
            z -= mpf(spec.alibi_slopes[head]) * abs(query - key)
        if spec.buckets:
            z += mpf(spec.buckets.bias[head][sum(query - key >= first for first in spec.buckets.first) - 1])
        logits.append(z + mpmath.log(count))
        values.append([mpf(x) for x in inputs.v.data[at].tolist()])
        kept.append(draw(spec, key, position, head, request))
    top = max(logits)
    weights = [mpmath.exp(z - top) for z in logits]
    total = mpmath.fsum(weights) + (mpmath.exp(mpf(spec.sink_logits[head]) - top) if spec.sink_logits else 0)
    out = [
        mpmath.fsum(w * a * x for w, a, x in zip(weights, kept, column, strict=True)) / total
        for column in zip(*values, strict=True)
    ]
    return out, top + mpmath.log(total)


def draw(spec: AttentionSpec, key: int, query: int, head: int, uid: int) -> mpf:
    """a_j / (1 - p); which edges are kept is the business of test_philox."""
    return int(keep(spec.dropout, key, query, head, uid)) / (1 - mpf(spec.dropout.p)) if spec.dropout else mpf(1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_contains_the_true_error_of_every_row(
    name: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the rows by the dense path, half gathered."""
    judged, use = 0, 0.0
    for replicate in range(2 * REPLICATES):
        if replicate == REPLICATES:
            gather_everything(monkeypatch)
        problem = problem_of(SPECS[name], family, seed=1000 * replicate + len(name))
        found = problem.forward()
        for request, head in np.argwhere(found.in_range):
            where = f"{name}, {family.__name__}, replicate {replicate}, request {request}, head {head}"
            use = max(use, share_of_the_estimate(problem, found, request, head))
            assert use <= 1, where
            judged += 1
        assert np.isinf(found.out_error[~found.in_range]).all()
        assert np.isinf(found.lse_error[~found.in_range]).all()
    rows = 2 * REPLICATES * 2 * REQUESTS
    if family is beyond_range:
        assert SPECS[name].logits_soft_cap or judged < rows
    elif SPECS[name].rope is None:  # angles of a million turns cost digits
        assert judged == rows
    if family is gaussian:
        assert judged == rows
        assert use > 1e-4 or name == "large sink", "the estimate is idle"


def gather_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SMALL", 0)
    monkeypatch.setattr(groups, "SMALL", 0)
    monkeypatch.setattr(groups, "DENSE_SHARE", 2)


def share_of_the_estimate(problem: Problem, found: Forward, request: int, head: int) -> float:
    """The largest true error of one row over what the estimate admits."""
    with mpmath.workdps(DIGITS):
        out, lse = exact(problem, request, head)
        values = [*found.out[request, head].tolist(), float(found.lse[request, head])]
        admitted = [*found.out_error[request, head].tolist(), float(found.lse_error[request, head])]
        errors = [abs(mpf(value) - right) for value, right in zip(values, [*out, lse], strict=True)]
        assert all(bound > 0 or error == 0 for error, bound in zip(errors, admitted, strict=True))
        return max(float(error / bound) if bound else 0.0 for error, bound in zip(errors, admitted, strict=True))


def test_a_row_whose_logits_may_exceed_ten_million_is_out_of_range_and_no_other_is() -> None:
    problem = problem_of(BASE, gaussian, seed=1)
    problem.inputs.k.data[:] = problem.inputs.k.data[4, 7]
    key = problem.inputs.k.data[0, 0, 0]
    for request, logit in enumerate((1.0, -0.9e7, 0.9e7, 1.2e7, -1.2e7)):
        problem.inputs.q[request] = logit * key / (BASE.sm_scale * key @ key)
    assert problem.forward().in_range[:, 0].tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("size", [1e-320, 1e-170, 1e-5, 1.0, 1e150])
def test_a_norm_is_never_too_small(size: float) -> None:
    x = size * np.random.default_rng(0).normal(size=(50, 7))
    with mpmath.workdps(DIGITS):
        for row, bound in zip(x.tolist(), keys.norm(x).tolist(), strict=True):
            exact_norm = mpmath.sqrt(mpmath.fsum(mpf(value) ** 2 for value in row))
            assert exact_norm <= bound <= 1.01 * exact_norm + 1e-149
