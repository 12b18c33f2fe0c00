"""The bounds of out, lse and gradients on problems that are hard for a bound: a right model never leaves them.

SACTS_HARD=N tries N seeds (a campaign); without it a few.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hard_problems import CODECS, NAMED, Hard, hard, one_by_one
from numpy.typing import NDArray

from sacts.kernels_under_test.emulation.arithmetic import Arithmetic, cast
from sacts.kernels_under_test.emulation.backward import Saved, backward, scattered
from sacts.kernels_under_test.emulation.forward import forward as model_forward
from sacts.kernels_under_test.emulation.rows import by_token
from sacts.kernels_under_test.emulation.terms import Rows
from sacts.reference.bounds import expected
from sacts.reference.forward import forward
from sacts.reference.gradient_bounds import Allowed, ExpectedGradients, FedErrors, expected_gradients
from sacts.reference.numerics import Accumulator
from sacts.reference.spec import CodecFormat, DType, Epilogue, RoPE

Array = NDArray[np.float64]

SEEDS = int(os.environ.get("SACTS_HARD", "150"))
OUTPUTS = {"out", "lse", "d_q", "d_k", "d_v", "d_sink"}


class Use(NamedTuple):
    """The largest error / half-width of an output's elements that have a bound, whether one is outside, and the share
    that has a bound.
    """

    ratio: float
    outside: bool
    trusted: float


def use_of(found: Array, allowed: Allowed) -> Use:
    trusted = np.isfinite(allowed.half_width)
    ratio = np.abs(found - allowed.value)[trusted] / np.maximum(allowed.half_width[trusted], 1e-300)
    inside = (allowed.low <= found) & (found <= allowed.high)
    return Use(float(ratio.max(initial=0.0)), not inside[trusted].all(), float(trusted.mean()))


def rows_of(case: Hard) -> Rows:
    rows = case.problem.rows(case.arithmetic)
    return one_by_one(rows) if case.repeats else rows


def uses_forward(case: Hard) -> dict[str, Use]:
    problem, how = case.problem, case.arithmetic
    allowed = expected(problem.spec, problem.inputs, problem.table, problem.lists, case.numerics)
    out, lse = (by_token(problem.spec, x).double().numpy() for x in model_forward(problem.spec, rows_of(case), how))
    assert np.array_equal(np.isneginf(lse), np.isneginf(allowed.lse))
    some = np.isfinite(allowed.lse)
    right, width = allowed.lse[some], allowed.lse_bound[some]
    gates = {
        "out": Allowed(allowed.out, allowed.half_width, allowed.out_lo, allowed.out_hi, allowed.out),
        "lse": Allowed(right, width, right - width, right + width, right),
    }
    return {"out": use_of(out, gates["out"]), "lse": use_of(lse[some], gates["lse"])}


class Fed(NamedTuple):
    """What backward is fed, [tokens, heads, ...], and how wrong it is."""

    d_out: Array
    d_lse: Array
    out: Array
    lse: Array
    errors: FedErrors


def fed_of(case: Hard) -> Fed:
    """out before the epilogue and lse, wrong by all that is said, up or down at random."""
    spec, random = replace(case.problem.spec, epilogue=Epilogue()), np.random.default_rng(5)
    right = forward(spec, case.problem.inputs, case.problem.table, case.problem.lists)
    some = np.isfinite(right.lse)
    wrong_out, wrong_lse = (
        case.fed * np.where(np.isfinite(x), x, 0.0) * random.choice([-1, 1], size=x.shape)
        for x in (right.out, right.lse)
    )
    out = cast(torch.from_numpy(right.out + wrong_out).float(), case.arithmetic.out).double().numpy()
    lse, error = torch.from_numpy(right.lse + wrong_lse).float().double().numpy(), np.zeros_like(right.lse)
    error[some] = np.abs(lse[some] - right.lse[some]) + right.lse_error[some]
    return Fed(case.d_out, case.d_lse, out, lse, FedErrors(np.abs(out - right.out) + right.out_error, error))


def allowed_backward(case: Hard, fed: Fed) -> ExpectedGradients:
    where = case.problem.spec, case.problem.inputs, case.problem.table, case.problem.lists
    return expected_gradients(*where, fed.d_out, case.numerics, fed.errors, d_lse=fed.d_lse)


def uses_backward(case: Hard) -> dict[str, Use]:
    spec, how, rows, fed = case.problem.spec, case.arithmetic, rows_of(case), fed_of(case)
    allowed = allowed_backward(case, fed)
    d_out, d_lse, out, lse = (
        torch.from_numpy(x).float().reshape(spec.num_rows, spec.group_size, *x.shape[2:]) for x in fed[:4]
    )
    found = backward(spec, rows, Saved(out, lse), d_out, d_lse, how)
    written = {"d_q": by_token(spec, found.d_q)}
    for name, pages in (("d_k", case.problem.inputs.k), ("d_v", case.problem.inputs.v)):
        shape = pages.data.shape
        whole = scattered(getattr(found, name), rows.slot, int(np.prod(shape[:3]))).reshape(shape)
        written[name] = whole[torch.from_numpy(allowed.pages)]
    values = {name: cast(x, how.out).double().numpy() for name, x in written.items()}
    if allowed.d_sink:
        values["d_sink"] = by_token(spec, found.d_sink).sum(dim=0).double().numpy()
    return {name: use_of(x, getattr(allowed, name)) for name, x in values.items()}


def outside(case: Hard) -> set[str]:
    """The outputs that lie outside."""
    return {name for name, use in (uses_forward(case) | uses_backward(case)).items() if use.outside}


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_a_right_kernel_stays_within_the_bounds_of_hard_problems(first: int) -> None:
    found = {seed: outside(hard(seed)) for seed in range(first, first + 25)}
    assert {seed: names for seed, names in found.items() if names} == {}


@pytest.mark.parametrize("name", NAMED)
def test_a_right_kernel_stays_within_the_bounds_of_a_named_problem(name: str) -> None:
    """Each of these once left them."""
    assert outside(NAMED[name]()) == set()


def test_hard_problems_reach_their_bounds() -> None:
    """Of an output in FP32, where no interval hides behind its rounding."""
    most, trusted = dict.fromkeys(OUTPUTS, 0.0), []
    for seed in range(60):
        case = hard(seed)
        case = replace(case, arithmetic=replace(case.arithmetic, out=DType.FP32))
        for name, use in (uses_forward(case) | uses_backward(case)).items():
            most[name] = max(most[name], use.ratio)
            trusted.append(use.trusted)
    assert np.mean(trusted) > 0.9
    assert min(most.values()) > 0.3, most


@pytest.mark.parametrize(
    ("kept", "promised"),
    [
        ({"p": DType.BF16}, {"p": DType.FP32}),
        ({"rotated": DType.BF16}, {"rotated": DType.FP32}),
        ({"reconstructed": DType.BF16}, {"reconstructed": DType.FP32}),
        ({"partial": DType.FP16, "splits": 3, "tile": 16}, {"partial": DType.FP32}),
        ({"exp2": "cubic"}, {"u_exp": 2.0**-22}),
        ({"tf32": True}, {"u_operand": 0.0}),
        ({"fp8_mma": True}, {"accumulator": Accumulator.FP32}),
        ({"p": CodecFormat.FP8_E4M3FN}, {"p_offset": 8}),
        ({"p": CodecFormat.FP8_E5M2}, {"p": CodecFormat.FP8_E4M3FN}),
        ({"l_sums_cast_p": True, "p": DType.BF16}, {"l_sums_cast_p": False}),
    ],
    ids=lambda x: ", ".join(x),
)
def test_a_contract_that_promises_more_than_is_kept_is_caught(
    kept: dict[str, object], promised: dict[str, object]
) -> None:
    """So no term of the contract is idle."""
    how = Arithmetic(**{"p": DType.FP32, "out": DType.FP32} | kept)  # type: ignore[arg-type]
    for seed in range(20):
        case = replace(hard(seed, rope=RoPE(8, 100.0), k_codec=CODECS[-1]), arithmetic=how)
        assert not outside(case)
        if outside(replace(case, promised=promised)):
            return
    pytest.fail("no problem shows it")
