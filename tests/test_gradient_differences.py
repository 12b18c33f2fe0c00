"""`backward` against central differences of a row's definition in 60 digits: no derivative is written down here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from sacts.reference.candidates import ValidatedCandidates
from sacts.reference.forward import Inputs
from sacts.reference.gradients import Gradients, backward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.philox import keep
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    Dropout,
    DType,
    Epilogue,
    EpilogueKind,
    Nonlinearity,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

DIGITS, STEP = 60, "1e-20"
BASE = AttentionSpec(
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim_qk=4,
    head_dim_vo=2,
    page_size=2,
    seq_lens=(6,),
    qo_lens=(2,),
    dtype=DType.FP32,
    sm_scale=0.7,
)
TABLE = PageTable(np.array([[1, 0, 1]]), 2, 2, (frozenset((0, 1)),))  # physical page 1 at two logical pages
LISTS = ([0, 3, 4], [1, 2, 5, 3])
BUCKETS = RelativeBuckets((0, 2, 4), ((0.5, -0.3, 0.1), (-0.7, 0.2, 0.9)))
SPECS = {
    "plain": BASE,
    "soft cap and sink": replace(BASE, logits_soft_cap=0.6, sink_logits=(0.4, -1.0)),
    "multiset with everything": replace(
        BASE,
        candidate_kind=CandidateKind.MULTISET,
        rope=RoPE(4),
        logits_soft_cap=2.0,
        alibi_slopes=(0.5, 0.1),
        buckets=BUCKETS,
        sink_logits=(0.4, -1.0),
        dropout=Dropout(0.3, 11),
    ),
    "sequence": replace(
        BASE,
        candidate_kind=CandidateKind.SEQUENCE,
        rope=RoPE(4, 20.0, RopeLayout.INTERLEAVED),
        alibi_slopes=(0.5, 0.1),
        dropout=Dropout(0.3, 3),
    ),
    "silu": replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SILU)),
    "tanh": replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.TANH)),
    "sigmoid": replace(BASE, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SIGMOID)),
}
FUNCTIONS: dict[Nonlinearity, Callable[[Any], Any]] = {
    Nonlinearity.TANH: mpmath.tanh,
    Nonlinearity.SIGMOID: lambda x: 1 / (1 + mpmath.exp(-x)),
    Nonlinearity.SILU: lambda x: x / (1 + mpmath.exp(-x)),
}


def turned(x: list[Any], position: int, rope: RoPE | None) -> list[Any]:
    result = list(x)
    for i in range(rope.rotary_dim // 2 if rope else 0):
        assert rope is not None
        half = rope.rotary_dim // 2
        a, b = (2 * i, 2 * i + 1) if rope.layout is RopeLayout.INTERLEAVED else (i, i + half)
        angle = position * mpf(rope.base) ** (mpf(-2 * i) / rope.rotary_dim)
        spun = mpmath.mpc(x[a], x[b]) * mpmath.expj(angle)
        result[a], result[b] = spun.real, spun.imag
    return result


def loss(spec: AttentionSpec, x: dict[str, Any], token: int, head: int, d_out: list[Any], d_lse: Any) -> Any:
    """d_out.out + d_lse lse of one row; x: q, k, v, sink and buckets as object arrays of mpf."""
    ts, position = LISTS[token], spec.token_position[token]
    sequence = spec.candidate_kind is CandidateKind.SEQUENCE
    query = len(ts) - (ts[-1] == position) if sequence else position
    weights, values = [], []
    for r, t in enumerate(ts):
        key, at = r if sequence else t, (TABLE.table[0, t // 2], t % 2)
        q, k = turned(list(x["q"][token, head]), query, spec.rope), turned(list(x["k"][at]), key, spec.rope)
        z = mpf(spec.sm_scale) * sum(a * b for a, b in zip(q, k, strict=True))
        if spec.logits_soft_cap:
            z = mpf(spec.logits_soft_cap) * mpmath.tanh(z / mpf(spec.logits_soft_cap))
        if spec.alibi_slopes:
            z -= mpf(spec.alibi_slopes[head]) * abs(query - key)
        if spec.buckets:
            z += x["buckets"][head, sum(max(query - key, 0) >= first for first in spec.buckets.first) - 1]
        weights.append((1 + t % 2 if spec.candidate_kind is CandidateKind.MULTISET else 1) * mpmath.exp(z))
        kept = not spec.dropout or keep(spec.dropout, key, position, head, 0)
        values.append([int(kept) / (1 - mpf(spec.dropout.p if spec.dropout else 0)) * v for v in x["v"][at]])
    total = sum(weights) + (mpmath.exp(x["sink"][head]) if spec.sink_logits else 0)
    out = [sum(w * v for w, v in zip(weights, column, strict=True)) / total for column in zip(*values, strict=True)]
    if spec.epilogue.function:
        out = [FUNCTIONS[spec.epilogue.function](value) for value in out]
    return sum(a * b for a, b in zip(out, d_out, strict=True)) + d_lse * mpmath.log(total)


def in_digits(x: Any) -> Any:
    return np.vectorize(mpf, otypes=[object])(x)


def found_of(spec: AttentionSpec, inputs: Inputs, d_out: Any, d_lse: Any) -> Gradients:
    counts = [1 + t % 2 if spec.candidate_kind is CandidateKind.MULTISET else 1 for ts in LISTS for t in ts]
    lists = np.cumsum([0, *map(len, LISTS)]), np.concatenate(LISTS), np.array(counts)
    return backward(spec, inputs, TABLE, ValidatedCandidates(*lists, 0), d_out, d_lse)


@pytest.mark.parametrize("name", SPECS)
def test_every_gradient_is_the_limit_of_differences(name: str) -> None:
    spec, random, pages = SPECS[name], np.random.default_rng(len(name)), np.arange(2)
    q, k, v = (random.normal(size=shape) for shape in ((2, 2, 4), (2, 2, 1, 4), (2, 2, 1, 2)))
    d_out, d_lse = random.normal(size=(2, 2, 2)), random.normal(size=(2, 2))
    found = found_of(spec, Inputs(q, PagedCache(pages, k), PagedCache(pages, v)), d_out, d_lse)
    gradients = {
        "q": found.d_q.value,
        "k": found.d_k.pages.cache.data[:, :, 0],
        "v": found.d_v.pages.cache.data[:, :, 0],
        **({"sink": found.d_sink.value} if found.d_sink else {}),
        **({"buckets": found.d_buckets.value} if found.d_buckets else {}),
    }
    with mpmath.workdps(DIGITS):
        plain = {"q": q, "k": k[:, :, 0], "v": v[:, :, 0], "sink": spec.sink_logits or (0.0,)}
        x = {part: in_digits(value) for part, value in plain.items()}
        x["buckets"] = in_digits(spec.buckets.bias) if spec.buckets else np.zeros((2, 3), object)
        step = mpf(STEP)

        def whole() -> Any:
            rows = [(token, head) for token in range(2) for head in range(2)]
            return sum(loss(spec, x, *row, in_digits(d_out[row]), mpf(float(d_lse[row]))) for row in rows)

        for part, gradient in gradients.items():
            for at in np.ndindex(gradient.shape):
                before = x[part][at]
                x[part][at] = before + step
                above = whole()
                x[part][at] = before - step
                slope = (above - whole()) / (2 * step)
                x[part][at] = before
                assert abs(slope - mpf(float(gradient[at]))) < 1e-14 * (1 + abs(slope)), f"d_{part}{at}"
