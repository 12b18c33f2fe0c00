"""The bound of the gated sum of branches: against exact rationals, simulated FP32 kernels and the reference."""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sacts.conformance import branches
from sacts.conformance.build import Problem, build
from sacts.conformance.probes.inputs import RANDOM
from sacts.conformance.relations import chosen
from sacts.matrices.cell import parse
from sacts.reference.bounds import Expected, expected
from sacts.reference.branch_bounds import gated
from sacts.reference.forward import Branch, forward_branches
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType, Epilogue, EpilogueKind, Nonlinearity

Array = NDArray[np.float64]

TRIALS = int(os.environ.get("SACTS_BRANCHES", "0"))  # more simulated sums of each kind
SILU = Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SILU)


def parts_of(
    random: np.random.Generator, count: int, width: float, *, shape: tuple[int, ...] = (4, 2, 8)
) -> list[Expected]:
    """Branches that must yield `out`, each within a half-width of its own."""
    found = []
    for _ in range(count):
        out = random.normal(size=shape) * 10.0 ** random.integers(-3, 4, shape)
        half = width * np.abs(random.normal(size=shape)) * np.abs(out)
        rows = shape[:2]
        found.append(
            Expected(
                out,
                half,
                out - half,
                out + half,
                np.zeros(rows),
                np.zeros(rows),
                np.ones(rows, np.int64),
                np.ones(rows, bool),
            )
        )
    return found


def single(x: Array) -> NDArray[np.float32]:
    return x.astype(np.float32)


def simulated(random: np.random.Generator, parts: list[Expected], gates: Array, how: str) -> Array:
    """An FP32 kernel that gates and adds branches, each as wrong as its half-width allows."""
    sign = random.choice([-1.0, 1.0], size=parts[0].out.shape) if how == "random" else np.ones(parts[0].out.shape)
    total = np.zeros(parts[0].out.shape, np.float32)
    order = random.permutation(len(parts))
    for b in order.tolist():
        pushed = np.sign(gates[..., b, None]) if how != "random" else sign
        stored = single(parts[b].out + 0.999 * pushed * parts[b].half_width)
        gate = single(gates)[..., b, None]
        if how == "fused":
            total = single(total.astype(np.float64) + gate.astype(np.float64) * stored)
        elif how == "cut":
            total = cut(total.astype(np.float64) + cut(gate.astype(np.float64) * stored).astype(np.float64))
        else:
            total = total + gate * stored
    return total.astype(np.float64)


def cut(x: Array) -> NDArray[np.float32]:
    """Rounded to FP32 towards zero."""
    near = single(x)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)


@pytest.mark.parametrize("how", ["plain", "fused", "cut", "random"])
@pytest.mark.parametrize("width", [0.0, 1e-7, 1e-3])
def test_no_fp32_kernel_whose_branches_are_right_leaves_the_bound_of_the_sum(how: str, width: float) -> None:
    random = np.random.default_rng(5)
    largest = 0.0
    for trial in range(20 + TRIALS):
        count = 2 + trial % 4
        parts = parts_of(random, count, width)
        gates = single(random.normal(size=(4, 2, count))).astype(np.float64)
        numerics = Numerics(p=DType.FP32, out=DType.FP32, branched=True)
        # stored parts are rounded to FP32, which a branch's own half-width covers: 2^-24 of them is added here
        seen = simulated(random, [widened(part) for part in parts], gates, how)
        right = gated([widened(part) for part in parts], gates, numerics)
        assert ((seen >= right.out_lo) & (seen <= right.out_hi)).all()
        largest = max(largest, float((np.abs(seen - right.out) / right.half_width).max()))
    assert largest > (0.05 if width < 1e-5 or how == "random" else 0.7)


def widened(part: Expected) -> Expected:
    return replace(part, half_width=part.half_width + 2.0**-23 * np.abs(part.out))


def test_the_bound_of_the_sum_is_the_formula_of_the_document() -> None:
    """In exact rationals: sum |g| B + (Gamma(B + 1) + ...) sum |g| (|o| + B) + (B + 1) 2^-126."""
    random = np.random.default_rng(7)
    parts = parts_of(random, 3, 1e-3, shape=(1, 1, 4))
    gates = single(random.normal(size=(1, 1, 3))).astype(np.float64)
    found = gated(parts, gates, Numerics(p=DType.FP32, out=DType.FP32))
    for channel in range(4):
        moved = size = out = Fraction(0)
        for b, part in enumerate(parts):
            gate, o, half = (
                Fraction(float(x)) for x in (gates[0, 0, b], part.out[0, 0, channel], part.half_width[0, 0, channel])
            )
            out += gate * o
            moved += abs(gate) * half
            size += abs(gate) * (abs(o) + half)
        right = moved + (Fraction(6, 2**23) + Fraction(5, 2**53)) * size + 4 * Fraction(1, 2**126)
        assert float(abs(Fraction(float(found.half_width[0, 0, channel])) / right - 1)) < 1e-12
        assert abs(Fraction(float(found.out[0, 0, channel])) - out) <= Fraction(4, 2**53) * size


def test_a_row_without_a_bound_in_one_branch_has_none_in_the_sum() -> None:
    parts = parts_of(np.random.default_rng(3), 2, 1e-3)
    trust = np.ones((4, 2), bool)
    trust[1, 1] = False
    broken = replace(parts[1], trusted=trust, half_width=np.where(trust[..., None], parts[1].half_width, np.inf))
    found = gated([parts[0], broken], np.ones((4, 2, 2)), Numerics(p=DType.FP32, out=DType.BF16))
    assert not found.trusted[1, 1] and found.trusted.sum() == 7
    assert np.isinf(found.half_width[1, 1]).all() and np.isfinite(found.half_width[0]).all()


def test_gates_of_another_shape_are_an_error() -> None:
    parts = parts_of(np.random.default_rng(3), 2, 1e-3)
    with pytest.raises(ValueError, match=r"gates must be \(4, 2, 2\) .*, got \(2, 4, 2\)"):
        gated(parts, np.ones((2, 4, 2)), Numerics(p=DType.FP32, out=DType.BF16))


@pytest.mark.parametrize("epilogue", [Epilogue(), SILU])
def test_the_middle_of_the_bound_is_what_the_reference_makes_of_the_branches(epilogue: Epilogue) -> None:
    problem = build(parse("prefill/fp32/kv:30+20/q:3+2/branches:3"))
    inputs = RANDOM.inputs(problem)
    tokens = [branches.tokens_of(problem.spec, 3, b) for b in range(3)]
    gates = branches.drawn_gates((5, 4, 3), problem.draw("gates"))
    alone = [branch_of(problem, b) for b in range(3)]
    right, _ = forward_branches(alone, np.moveaxis(gates, 2, 0), epilogue)
    numerics = Numerics.default(DType.FP32)
    whole = expected(problem.spec, inputs, problem.table, problem.candidates, numerics)
    parts = [Expected(*(getattr(whole, name)[mine] for name in Expected.__dataclass_fields__)) for mine in tokens]
    found = gated(parts, gates, numerics, epilogue)
    np.testing.assert_allclose(found.out, right.out, rtol=1e-12, atol=1e-14)
    assert (found.out_lo < right.out).all() and (right.out < found.out_hi).all()


def branch_of(problem: Problem, branch: int) -> Branch:
    """One branch as a call of its own, by taking its requests out of the judge's."""
    requests = list(range(branch, problem.spec.num_requests, problem.branches))
    alone = replace(problem, branches=1)
    variant = chosen(alone, RANDOM.inputs(problem), requests)
    return Branch(variant.problem.spec, variant.inputs, variant.problem.table, variant.problem.candidates)


def test_a_branch_stored_in_bf16_may_be_off_by_its_rounding_and_no_more() -> None:
    problem = build(parse("decode/fp32/kv:60+40/branches:2"))
    inputs = RANDOM.inputs(problem)
    numerics = Numerics(p=DType.FP32, out=DType.FP32, partial=DType.BF16)
    plain, stored = (
        expected(problem.spec, inputs, problem.table, problem.candidates, replace(numerics, branched=on))
        for on in (False, True)
    )
    rounded = torch.from_numpy(plain.out).to(torch.bfloat16).double().numpy()
    assert ((rounded >= stored.out_lo) & (rounded <= stored.out_hi)).all()
    assert ((rounded < plain.out_lo) | (rounded > plain.out_hi)).any()
    assert (stored.half_width <= 1.01 * (plain.half_width + 2.0**-8 * np.abs(plain.out)) + 1e-30).all()
