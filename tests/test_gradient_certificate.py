"""The gradients' own error, certified in ball arithmetic: the true error of an element never exceeds its estimate.

flint's balls enclose the exact gradient of each element, so a comparison that holds is a proof for that element.
`SACTS_CERTIFICATE=20 pytest -s tests/test_gradient_certificate.py` judges 20 times as many rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from flint import arb, ctx
from numpy.typing import NDArray

from sacts.reference import groups, keys
from sacts.reference.candidates import ValidatedCandidates
from sacts.reference.forward import Inputs
from sacts.reference.gradients import Gradients, backward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.philox import keep
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Dropout,
    DType,
    Epilogue,
    EpilogueKind,
    Nonlinearity,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

Array = NDArray[np.float64]
Random = np.random.Generator
Vector = list[arb]

REPLICATES = int(os.environ.get("SACTS_CERTIFICATE", "1"))
BITS = 500
REQUESTS, QUERIES, HEADS, LENGTH, PAGE = 2, 2, 2, 2**20, 64

BASE = AttentionSpec(
    num_qo_heads=HEADS,
    num_kv_heads=1,
    head_dim_qk=6,
    head_dim_vo=3,
    page_size=PAGE,
    seq_lens=(LENGTH,) * REQUESTS,
    qo_lens=(QUERIES,) * REQUESTS,
    dtype=DType.FP32,
    sm_scale=0.41,
)
MULTISET = replace(BASE, candidate_kind=CandidateKind.MULTISET)
SEQUENCE = replace(BASE, candidate_kind=CandidateKind.SEQUENCE)
BUCKETS = RelativeBuckets((0, 1, 1000), ((5.0, -3.0, 0.1), (-700.0, 0.0, 1e-9)))


def ending(function: Nonlinearity) -> AttentionSpec:
    return replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=function))


SPECS = {
    "plain": BASE,
    "multiset": MULTISET,
    "RoPE": replace(BASE, rope=RoPE(4, 500000.0)),
    "RoPE of a sequence": replace(SEQUENCE, rope=RoPE(6, 10000.0, RopeLayout.INTERLEAVED)),
    "soft cap": replace(BASE, logits_soft_cap=30.0),
    "small soft cap": replace(BASE, logits_soft_cap=1e-3),
    "tiny soft cap": replace(BASE, logits_soft_cap=1e-8),
    "ALiBi": replace(BASE, alibi_slopes=(0.5, 2.0**-8)),
    "buckets": replace(BASE, buckets=BUCKETS),
    "sink": replace(BASE, sink_logits=(3.0, -40.0)),
    "large sink": replace(MULTISET, sink_logits=(5e4, 700.0), logits_soft_cap=1000.0),
    "dropout": replace(BASE, dropout=Dropout(0.5, 7)),
    "everything": replace(
        MULTISET,
        rope=RoPE(6),
        logits_soft_cap=50.0,
        alibi_slopes=(1e-6, 3e-6),
        buckets=BUCKETS,
        sink_logits=(1.0, 2.0),
        dropout=Dropout(0.3, 9),
        causal=CausalRule.BOTTOM_RIGHT,
    ),
    "gate": replace(BASE, epilogue=Epilogue(EpilogueKind.GATE), sink_logits=(0.1, 0.2)),
    **{str(function): ending(function) for function in Nonlinearity},
}


class Tensors(NamedTuple):
    """q [tokens, heads, d], k and v [pages, PAGE, 1, d], d_out [tokens, heads, d_v], d_lse [tokens, heads]."""

    q: Array
    k: Array
    v: Array
    d_out: Array
    d_lse: Array


def gaussian(random: Random, x: Tensors) -> None:
    pass


def large_logits(random: Random, x: Tensors) -> None:
    x.q[:] *= 10 ** random.uniform(1, 6, (len(x.q), 1, 1))


def beyond_range(random: Random, x: Tensors) -> None:
    x.q[:] *= 10 ** random.uniform(5, 12, (len(x.q), 1, 1))


def tiny_inputs(random: Random, x: Tensors) -> None:
    for part in x:
        part *= 10.0 ** -random.choice([20, 150, 160, 300, 315, 323], (len(part), *[1] * (part.ndim - 1)))


def huge_values(random: Random, x: Tensors) -> None:
    x.v[:] *= 10 ** random.uniform(-300, 300, (len(x.v), x.v.shape[1], 1, 1))


def huge_gradients(random: Random, x: Tensors) -> None:
    x.d_out[:] *= 10 ** random.uniform(-300, 300, (*x.d_out.shape[:2], 1))
    x.d_lse[:] *= 10 ** random.uniform(-300, 300, x.d_lse.shape)


def tiny_times_huge(random: Random, x: Tensors) -> None:
    """Logits as usual from huge q and tiny k, or the reverse; dS underflows, and a huge factor brings it back."""
    power = 10.0 ** random.uniform(50, 140)
    x.q[:], x.k[:] = (x.q * power, x.k / power) if random.random() < 0.5 else (x.q / power, x.k * power)
    for part in (x.d_out, x.d_lse):
        part *= 10.0 ** -random.uniform(100, 323, (len(part), *[1] * (part.ndim - 1)))


def small_logits(random: Random, x: Tensors) -> None:
    """z / c of the small cap is some hundreds: the slope is far below 1, and its exponent carries the error of z."""
    x.q[:] *= 10 ** random.uniform(-2, 0, (len(x.q), 1, 1))


def vanishing_weights(random: Random, x: Tensors) -> None:
    """Logits hundreds apart: P is subnormal or 0."""
    x.k[:] *= np.exp(random.normal(size=(*x.k.shape[:2], 1, 1)))
    x.q[:] *= 300
    x.d_out[:] *= 1e290


def heavy_tails(random: Random, x: Tensors) -> None:
    for part in x:
        part *= np.exp(random.normal(size=part.shape))


def cancelling_products(random: Random, x: Tensors) -> None:
    x.q[..., 1::2], x.k[..., 1::2] = -x.q[..., ::2] * (1 + 2.0**-45), x.k[..., ::2]
    x.q[:] *= 10 ** random.uniform(0, 6, (len(x.q), 1, 1))


def equal_values(random: Random, x: Tensors) -> None:
    """dP_j = D but for the rounding: dS is d_lse alone, or nothing."""
    x.v[:] = x.v[:1, :1]
    x.d_lse[::2] = 0.0


def equal_keys(random: Random, x: Tensors) -> None:
    x.k[:] = 300 * x.k[0, 0]


def one_dominates(random: Random, x: Tensors) -> None:
    x.k[:, ::7] *= 1e3
    x.v[:, ::7] *= 1e-8


def zeros(random: Random, x: Tensors) -> None:
    for part in x:
        part[random.random(part.shape) < 0.3] = 0.0
    x.q[random.random(len(x.q)) < 0.5] = 0.0
    x.d_out[random.random(len(x.d_out)) < 0.5] = 0.0


Family = Callable[[Random, Tensors], None]
FAMILIES: tuple[Family, ...] = (
    gaussian,
    large_logits,
    small_logits,
    beyond_range,
    tiny_inputs,
    huge_values,
    huge_gradients,
    tiny_times_huge,
    vanishing_weights,
    heavy_tails,
    cancelling_products,
    equal_values,
    equal_keys,
    one_dominates,
    zeros,
)


class Problem(NamedTuple):
    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    candidates: ValidatedCandidates
    d_out: Array
    d_lse: Array
    gate: Array | None

    def backward(self) -> Gradients:
        with np.errstate(all="ignore"):
            return backward(*self[:6], gate=self.gate)


def problem_of(spec: AttentionSpec, family: Family, seed: int) -> Problem:
    """Each row attends 1 to 9 of 12 keys that lie in two pages anywhere in a million; both requests share a page."""
    random = np.random.default_rng(seed)
    table = np.zeros((REQUESTS, LENGTH // PAGE), np.int64)
    lists, counts = [], []
    for request in range(REQUESTS):
        pages = np.sort(random.permutation(LENGTH // PAGE)[:2])
        table[request, pages] = (0, request + 1)
        t = (pages[:, None] * PAGE + random.permutation(PAGE)[:6]).ravel()
        for _ in range(QUERIES):
            chosen = random.permutation(t)[: int(random.integers(1, 10))]
            lists.append(chosen if spec.candidate_kind is CandidateKind.SEQUENCE else np.sort(chosen))
            counts.append(random.integers(1, 4 if spec.candidate_kind is CandidateKind.MULTISET else 2, len(chosen)))
    tokens, pages = (REQUESTS * QUERIES, HEADS), (REQUESTS + 1, PAGE, 1)
    x = Tensors(
        *(random.normal(size=shape) for shape in ((*tokens, 6), (*pages, 6), (*pages, 3), (*tokens, 3), tokens))
    )
    family(random, x)
    gate = random.normal(size=(*tokens, 1)) if spec.epilogue.kind is EpilogueKind.GATE else None
    everything = np.arange(REQUESTS + 1)
    return Problem(
        spec,
        Inputs(x.q, PagedCache(everything, x.k), PagedCache(everything, x.v)),
        PageTable(table, PAGE, REQUESTS + 1, ()),
        ValidatedCandidates(np.cumsum([0, *map(len, lists)]), np.concatenate(lists), np.concatenate(counts), 0),
        x.d_out,
        x.d_lse,
        gate,
    )


def balls(x: Array) -> Vector:
    return [arb(value) for value in x.tolist()]


def dot(a: Vector, b: Vector) -> arb:
    return sum((x * y for x, y in zip(a, b, strict=True)), arb(0))


def turned(x: Vector, position: int, rope: RoPE | None) -> Vector:
    result = list(x)
    for i in range(rope.rotary_dim // 2 if rope else 0):
        assert rope is not None
        half = rope.rotary_dim // 2
        a, b = (2 * i, 2 * i + 1) if rope.layout is RopeLayout.INTERLEAVED else (i, i + half)
        angle = position * arb(rope.base) ** (arb(-2 * i) / rope.rotary_dim)
        s, c = angle.sin_cos()
        result[a], result[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return result


def sigmoid(x: arb) -> arb:
    e = (-abs(x)).exp()
    return (e if x < 0 else arb(1)) / (1 + e)


def bell(x: arb) -> arb:
    return sigmoid(x) * sigmoid(-x)


SLOPES: dict[Nonlinearity, Callable[[arb], arb]] = {
    Nonlinearity.RELU: lambda x: arb(1) if x > 0 else arb(0),
    Nonlinearity.SIGMOID: bell,
    Nonlinearity.TANH: lambda x: 4 * bell(2 * x),
    Nonlinearity.SILU: lambda x: sigmoid(x) + x * bell(x),
}


class Exact:
    """Every gradient of a problem as balls, row by row from the equations."""

    def __init__(self, problem: Problem) -> None:
        spec = problem.spec
        self.problem = problem
        self.d_q: dict[tuple[int, int], Vector] = {}
        self.d_k: dict[tuple[int, int], Vector] = {}
        self.d_v: dict[tuple[int, int], Vector] = {}
        self.d_sink = [arb(0) for _ in range(HEADS)]
        self.d_buckets = [[arb(0) for _ in range(3)] for _ in range(HEADS)]
        self.d_gate: dict[tuple[int, int], arb] = {}
        for token, head in product(range(spec.num_tokens), range(HEADS)):
            self.add_row(token, head)

    def add_row(self, token: int, head: int) -> None:
        problem, spec = self.problem, self.problem.spec
        request, rope = spec.token_request[token], spec.rope
        mine = slice(*problem.candidates.indptr[token : token + 2])
        sequence, position = spec.candidate_kind is CandidateKind.SEQUENCE, spec.token_position[token]
        ts, counts = problem.candidates.indices[mine].tolist(), problem.candidates.counts[mine].tolist()
        query = len(ts) - (ts[-1] == position) if sequence else position
        q = turned(balls(problem.inputs.q[token, head]), query, rope)
        k, v, z, slope, a, at_key, bucket = [], [], [], [], [], [], []
        for r, (t, count) in enumerate(zip(ts, counts, strict=True)):
            at = problem.table.table[request, t // PAGE], t % PAGE, 0
            at_key.append(r if sequence else t)
            k.append(turned(balls(problem.inputs.k.data[at]), at_key[-1], rope))
            v.append(balls(problem.inputs.v.data[at]))
            x = arb(spec.sm_scale) * dot(q, k[-1])
            slope.append(arb(1))
            if spec.logits_soft_cap:
                slope[-1] = 4 * bell(2 * x / spec.logits_soft_cap)
                x = spec.logits_soft_cap * (x / spec.logits_soft_cap).tanh()
            if spec.alibi_slopes:
                x -= arb(spec.alibi_slopes[head]) * abs(query - at_key[-1])
            if spec.buckets:
                bucket.append(sum(query - at_key[-1] >= first for first in spec.buckets.first) - 1)
                x += arb(spec.buckets.bias[head][bucket[-1]])
            z.append(x + arb(count).log())
            kept = not spec.dropout or keep(spec.dropout, at_key[-1], position, head, request)
            a.append(int(kept) / (1 - arb(spec.dropout.p if spec.dropout else 0)))
        total = sum((x.exp() for x in z), arb(spec.sink_logits[head]).exp() if spec.sink_logits else arb(0))
        p = [x.exp() / total for x in z]
        d_out, d_lse = self.before(token, head, p, a, v), arb(float(problem.d_lse[token, head]))
        d_p = [a_j * dot(d_out, v_j) for a_j, v_j in zip(a, v, strict=True)]
        d = dot(p, d_p)
        d_s = [p_j * (d_p_j - d + d_lse) for p_j, d_p_j in zip(p, d_p, strict=True)]
        scaled = [x * s * arb(spec.sm_scale) for x, s in zip(d_s, slope, strict=True)]
        self.d_q[token, head] = turned([dot(scaled, list(column)) for column in zip(*k, strict=True)], -query, rope)
        for j, t in enumerate(ts):
            to_k = turned([scaled[j] * x for x in q], -at_key[j], rope)
            for total_of, part in ((self.d_k, to_k), (self.d_v, [a[j] * p[j] * x for x in d_out])):
                before = total_of.get((request, t), [arb(0)] * len(part))
                total_of[request, t] = [x + y for x, y in zip(before, part, strict=True)]
            if spec.buckets:
                self.d_buckets[head][bucket[j]] += d_s[j]
        if spec.sink_logits:
            self.d_sink[head] += arb(spec.sink_logits[head]).exp() / total * (d_lse - d)

    def before(self, token: int, head: int, p: Vector, a: Vector, v: list[Vector]) -> Vector:
        """d_out before the epilogue; notes d_gate."""
        epilogue, d_out = self.problem.spec.epilogue, balls(self.problem.d_out[token, head])
        weights = [x * y for x, y in zip(p, a, strict=True)]
        out = [dot(weights, list(column)) for column in zip(*v, strict=True)]
        if epilogue.function:
            return [x * SLOPES[epilogue.function](y) for x, y in zip(d_out, out, strict=True)]
        if self.problem.gate is not None:
            self.d_gate[token, head] = dot(d_out, out)
            return [x * arb(float(self.problem.gate[token, head, 0])) for x in d_out]
        return d_out


class Use(NamedTuple):
    """Elements judged and not, and the largest true error over its estimate."""

    judged: int
    refused: int
    largest: float


def use_of(found: Array, errors: Array, exact: Vector, where: str) -> Use:
    refused, largest = 0, 0.0
    for c, (value, error, right) in enumerate(zip(found.tolist(), errors.tolist(), exact, strict=True)):
        assert error >= 0, where
        if error == np.inf:
            refused += 1
            continue
        distance = abs(arb(value) - right)
        assert distance <= arb(error), f"{where}, channel {c}: {value} is {distance} off, admitted {error}"
        largest = max(largest, float((distance / arb(error)).mid()) if error else 0.0)
    return Use(len(exact) - refused, refused, largest)


def uses_of(problem: Problem, found: Gradients) -> list[tuple[str, Use]]:
    exact, uses = Exact(problem), []
    for at, right in exact.d_q.items():
        uses.append(("d_q", use_of(found.d_q.value[at], found.d_q.error[at], right, f"d_q of token, head {at}")))
    for name, gradient, of_position in (("d_k", found.d_k, exact.d_k), ("d_v", found.d_v, exact.d_v)):
        by_page: dict[tuple[int, int], Vector] = {}
        assert len(gradient.value) == len(of_position)
        for request, t, page, offset, value, error in zip(
            *(x.tolist() for x in (gradient.positions.request, *gradient.positions[2:])),
            gradient.value,
            gradient.error,
            strict=True,
        ):
            right = of_position[request, t]
            uses.append((name, use_of(value, error, right, f"{name} of request {request}, position {t}")))
            before = by_page.get((page, offset), [arb(0)] * len(right))
            by_page[page, offset] = [x + y for x, y in zip(before, right, strict=True)]
        for (page, offset), right in by_page.items():
            at = gradient.pages.cache.pages.tolist().index(page), offset, 0
            pair = gradient.pages.cache.data[at], gradient.page_errors.cache.data[at]
            uses.append((name, use_of(*pair, right, f"{name} of page {page}, offset {offset}")))
    if found.d_sink:
        uses.append(("d_sink", use_of(*found.d_sink, exact.d_sink, "d_sink")))
    if found.d_buckets:
        flat = [x for row in exact.d_buckets for x in row]
        uses.append(("d_buckets", use_of(*(x.ravel() for x in found.d_buckets), flat, "d_buckets")))
    for at, gate in exact.d_gate.items():
        assert found.d_gate is not None
        uses.append(("d_gate", use_of(found.d_gate.value[at], found.d_gate.error[at], [gate], f"d_gate {at}")))
    return uses


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_contains_the_true_error_of_every_element(
    name: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the problems by the dense path, half gathered."""
    uses: list[tuple[str, Use]] = []
    monkeypatch.setattr(ctx, "prec", BITS)
    for replicate in range(2 * REPLICATES):
        if replicate == REPLICATES:
            gather_everything(monkeypatch)
        problem = problem_of(SPECS[name], family, seed=1000 * replicate + len(name))
        uses += uses_of(problem, problem.backward())
    refused, judged = (sum(use[i] for _, use in uses) for i in (1, 0))
    largest = {part: max(use.largest for which, use in uses if which == part) for part, _ in uses}
    print(f"{name}, {family.__name__}: {judged} elements, {refused} out of range, use {largest}")
    if family is gaussian:
        assert not refused
        assert largest["d_v"] > 1e-4, "the estimate is idle"
        if name not in ("large sink", "small soft cap", "tiny soft cap"):  # which leave next to no dZ
            assert min(largest["d_q"], largest["d_k"]) > 1e-6, "the estimate is idle"


def gather_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SMALL", 0)
    monkeypatch.setattr(groups, "SMALL", 0)
    monkeypatch.setattr(groups, "DENSE_SHARE", 2)
