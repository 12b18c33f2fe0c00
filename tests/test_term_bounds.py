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
from term_problems import ARITHMETICS, MODEL, SPECS, Problem, problem_of

from sacts.conformance.adapter import Outputs
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.emulation.rows import by_token
from sacts.kernels_under_test.faults import ModelFault, model_catalogue, patched
from sacts.reference.bounds import Expected
from sacts.reference.spec import DType


def run(problem: Problem, arithmetic: Arithmetic, package: str = MODEL) -> Outputs:
    """The model, or a patched copy of it, on its own rows."""
    forward = importlib.import_module(f"{package}.forward").forward
    out, lse = (by_token(problem.spec, x) for x in forward(problem.spec, problem.rows(arithmetic, package), arithmetic))
    return Outputs(out, lse)


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
    """Of two problems; angles of 60,000 turns, or K rounded twice, leave no bound to large logits."""
    dtype, how = ARITHMETICS[arithmetic]
    sizes = (1.0, 0.3) if name in ("RoPE, far", "e5m2 K, turned") else (1.0, 8.0)
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
@pytest.mark.parametrize(
    "fault", [f for f in model_catalogue().values() if {"out", "lse"} >= set(f.outputs)], ids=lambda f: f.name
)
def test_a_seeded_fault_of_a_term_leaves_its_bound(fault: ModelFault, dtype: DType) -> None:
    how = Arithmetic(p=dtype, out=dtype, splits=2, tile=16)
    problem = problem_of(replace(SPECS[fault.problem], dtype=dtype), 0, 1.0)
    allowed = problem.expected(how)
    assert max(judged(allowed, run(problem, how)).__dict__.values()) <= 1
    use = judged(allowed, run(problem, how, patched(fault, "emulation")))
    assert {name for name, worst in (("out", use.out), ("lse", use.lse)) if worst > 1} == set(fault.outputs)
