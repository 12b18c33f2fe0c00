"""The bounds of gradients against the backward of a modelled kernel: a right one never leaves them, in isolation or end
to end, whatever its arithmetic and the order of its sums; each seeded fault does.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from term_problems import ARITHMETICS, BASE, MODEL, SPECS, Problem, aliased, problem_of

from sacts.kernels_under_test.emulation.arithmetic import TORCH, Arithmetic, cast
from sacts.kernels_under_test.emulation.backward import HOT, Saved, scattered
from sacts.kernels_under_test.emulation.backward import backward as model_backward
from sacts.kernels_under_test.emulation.forward import forward as model_forward
from sacts.kernels_under_test.emulation.rows import by_token
from sacts.kernels_under_test.faults import ModelFault, model_catalogue, patched
from sacts.reference.forward import forward
from sacts.reference.gradient_bounds import Allowed, ExpectedGradients, FedErrors, expected_gradients
from sacts.reference.spec import AttentionSpec, DType, Epilogue, EpilogueKind, Reduction

Array = NDArray[np.float64]

NAMES = [name for name, spec in SPECS.items() if spec.epilogue.kind in (EpilogueKind.NONE, EpilogueKind.CAST)]


class Call(NamedTuple):
    """d_out and d_lse, and what backward is fed: all exact in their dtypes."""

    d_out: Array
    d_lse: Array
    out: Array
    lse: Array


def call_of(problem: Problem, how: Arithmetic, *, end_to_end: bool) -> tuple[Call, FedErrors]:
    """In isolation the reference's own out and lse, rounded; end to end those of the model, within their bounds: out as
    it is before an epilogue.
    """
    problem = replace(problem, spec=replace(problem.spec, epilogue=Epilogue()))
    spec, random = problem.spec, np.random.default_rng(5)
    right = forward(spec, problem.inputs, problem.table, problem.lists)
    if end_to_end:
        allowed = problem.expected(how)
        out, lse = (by_token(spec, x) for x in model_forward(spec, problem.rows(how), how))
        rounding = np.maximum(allowed.out_hi - allowed.out, allowed.out - allowed.out_lo)
        errors = FedErrors(np.maximum(rounding, allowed.half_width), allowed.lse_bound)
    else:
        out, lse = cast(torch.from_numpy(right.out).float(), how.out), torch.from_numpy(right.lse).float()
        some = np.isfinite(right.lse)
        lse_error = np.zeros(right.lse.shape)
        lse_error[some] = np.abs(lse.double().numpy()[some] - right.lse[some]) + right.lse_error[some]
        errors = FedErrors(np.abs(out.double().numpy() - right.out) + right.out_error, lse_error)
    d_out = torch.from_numpy(random.normal(size=right.out.shape)).to(TORCH[spec.dtype]).double().numpy()
    d_lse = np.float32(random.normal(size=right.lse.shape)).astype(np.float64)
    return Call(d_out, d_lse, out.double().numpy(), lse.double().numpy()), errors


class Found(NamedTuple):
    """What the model wrote, rounded to its output format, caches whole: [pages, page_size, heads, d]."""

    d_q: Array
    d_k: Array
    d_v: Array
    d_sink: Array


def run(problem: Problem, call: Call, how: Arithmetic, package: str = MODEL, order: int = 0) -> Found:
    spec, rows, backward = problem.spec, problem.rows(how, package), importlib.import_module(f"{package}.backward")
    d_out, d_lse, out, lse = (
        torch.from_numpy(x).float().reshape(spec.num_rows, spec.heads_per_list, *x.shape[2:]) for x in call
    )
    found = backward.backward(spec, rows, backward.Saved(out, lse), d_out, d_lse, how)
    caches = problem.inputs.k.data.shape, problem.inputs.v.data.shape
    d_k, d_v = (
        backward.scattered(d, rows.slot, int(np.prod(shape[:3])), order).reshape(shape)
        for d, shape in zip((found.d_k, found.d_v), caches, strict=True)
    )
    written = (cast(x, how.out).double().numpy() for x in (by_token(spec, found.d_q), d_k, d_v))
    return Found(*written, by_token(spec, found.d_sink).sum(dim=0).double().numpy())


def use_of(allowed: Allowed, found: Array) -> float:
    """Largest error / allowed error of the elements that have a bound; 2 where one is outside."""
    trusted = np.isfinite(allowed.half_width)
    assert trusted.mean() > 0.9
    reach = np.maximum(allowed.high - allowed.value, allowed.value - allowed.low)
    inside = (allowed.low <= found) & (found <= allowed.high)
    with np.errstate(invalid="ignore", divide="ignore"):
        use = np.nan_to_num(np.abs(found - allowed.value) / reach)
    return float(np.where(inside, np.minimum(use, 1), 2)[trusted].max(initial=0.0))


@dataclass(frozen=True)
class Uses:
    d_q: float
    d_k: float
    d_v: float
    d_sink: float


def judged(allowed: ExpectedGradients, found: Found) -> Uses:
    elsewhere = np.setdiff1d(np.arange(len(found.d_k)), allowed.pages)
    assert not found.d_k[elsewhere].any()
    assert not found.d_v[elsewhere].any()
    d_k, d_v = found.d_k[allowed.pages], found.d_v[allowed.pages]
    sink = use_of(allowed.d_sink, found.d_sink) if allowed.d_sink else 0.0
    return Uses(use_of(allowed.d_q, found.d_q), use_of(allowed.d_k, d_k), use_of(allowed.d_v, d_v), sink)


def allowed_of(problem: Problem, how: Arithmetic, call: Call, errors: FedErrors) -> ExpectedGradients:
    where = problem.spec, problem.inputs, problem.table, problem.lists
    return expected_gradients(*where, call.d_out, how.numerics, errors, d_lse=call.d_lse)


def problem_for(spec: AttentionSpec, dtype: DType, far: bool = False) -> Problem:
    return aliased(problem_of(replace(spec, dtype=dtype), 3, 0.3 if far else 1.0))


@cache
def uses(name: str, arithmetic: str, end_to_end: bool) -> Uses:
    dtype, how = ARITHMETICS[arithmetic]
    problem = problem_for(SPECS[name], dtype, name == "RoPE, far")
    call, errors = call_of(problem, how, end_to_end=end_to_end)
    return judged(allowed_of(problem, how, call, errors), run(problem, call, how))


@pytest.mark.parametrize("end_to_end", [False, True], ids=["isolated", "end to end"])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", NAMES)
def test_a_right_backward_never_leaves_the_bounds(name: str, arithmetic: str, end_to_end: bool) -> None:
    found = uses(name, arithmetic, end_to_end)
    assert max(found.__dict__.values()) <= 1, found


@pytest.mark.parametrize("name", NAMES)
def test_the_bounds_of_gradients_are_not_idle(name: str) -> None:
    found = uses(name, "fp32", False)
    assert min(found.d_q, found.d_k, found.d_v) > 2e-3, found


FAULTS = [fault for fault in model_catalogue().values() if set(fault.outputs) <= set(Found._fields)]


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_of_backward_leaves_its_bound(fault: ModelFault, dtype: DType) -> None:
    how = Arithmetic(p=dtype, out=dtype)
    problem = problem_for(SPECS[fault.problem], dtype)
    call, errors = call_of(problem, how, end_to_end=False)
    allowed = allowed_of(problem, how, call, errors)
    assert max(judged(allowed, run(problem, call, how)).__dict__.values()) <= 1
    found = judged(allowed, run(problem, call, how, patched(fault, "emulation"))).__dict__
    assert {name for name, use in found.items() if use > 1} == set(fault.outputs)


def test_every_fault_of_the_model_has_a_test() -> None:
    """The others, of out and lse, are in test_term_bounds."""
    names = {*Found._fields, "out", "lse"}
    for fault in model_catalogue().values():
        assert fault.problem in SPECS
        assert set(fault.outputs) <= names
        assert len({"out", "lse"} & set(fault.outputs)) in (0, len(fault.outputs))


def range_of(runs: list[Found], name: str, allowed: ExpectedGradients) -> tuple[Array, Array]:
    """All results of one output, [runs, ...], and the largest distance of two."""
    results = [getattr(found, name) for found in runs]
    found = np.array([x[allowed.pages] if name in ("d_k", "d_v") else x for x in results])
    return found, found.max(axis=0) - found.min(axis=0)


def in_another_order(problem: Problem, call: Call, how: Arithmetic, order: int, tile: int = 16) -> Found:
    """As a kernel adds whose tiles of keys, and rows, add to memory one by one, as it happens."""
    spec, rows, random = problem.spec, problem.rows(how), torch.Generator().manual_seed(order)
    d_out, d_lse, out, lse = (
        torch.from_numpy(x).float().reshape(spec.num_rows, spec.heads_per_list, *x.shape[2:]) for x in call
    )
    width = rows.edge.shape[1]
    parts = []
    for start in range(0, width, tile):
        mine = (torch.arange(width) >= start) & (torch.arange(width) < start + tile)
        part = rows._replace(edge=rows.edge & mine)
        parts.append(model_backward(spec, part, Saved(out, lse), d_out, d_lse, how).d_q)
    d_q = torch.zeros_like(parts[0])
    for at in torch.randperm(len(parts), generator=random).tolist():
        d_q += parts[at]
    found = run(problem, call, how, order=order + 1)
    d_sink = torch.zeros(spec.num_qo_heads)
    by_row = by_token(spec, model_backward(spec, rows, Saved(out, lse), d_out, d_lse, how).d_sink)
    for at in torch.randperm(len(by_row), generator=random).tolist():
        d_sink += by_row[at]
    return found._replace(d_q=cast(by_token(spec, d_q), how.out).double().numpy(), d_sink=d_sink.double().numpy())


@pytest.mark.parametrize("out", [DType.FP32, None], ids=["stored in FP32", "stored as it is"])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("name", ["multiset", "RoPE", "everything", "soft cap"])
def test_runs_that_add_in_another_order_lie_within_the_range(name: str, dtype: DType, out: DType | None) -> None:
    how = Arithmetic(p=dtype, out=out or dtype, tile=16)
    problem = problem_for(SPECS[name], dtype)
    call, errors = call_of(problem, how, end_to_end=False)
    allowed = allowed_of(problem, how, call, errors)
    runs = [in_another_order(problem, call, how, order) for order in range(6)]
    for each in Found._fields:
        gate: Allowed | None = getattr(allowed, each)
        if gate is None:
            continue
        _, spread = range_of(runs, each, allowed)
        assert (spread <= gate.run_to_run).all()
        if how.out is DType.FP32:
            assert spread.max() > 0
            narrow = gate.run_to_run < 0.1 * gate.half_width
            assert narrow[spread > 0].mean() > (0.9 if dtype is DType.BF16 and each in ("d_k", "d_v") else -1)


def test_runs_of_a_gradient_that_vanishes_lie_within_the_range() -> None:
    """Stored in BF16 near 0, so that the range is that of the sums, not of the values."""
    how = Arithmetic()
    problem = problem_for(SPECS["plain"], DType.BF16)
    data = np.round(32 * np.abs(problem.inputs.v.data)) / 32
    data[..., 1:] = 0.0
    data[..., 1] = 4.5 - data[..., 0]
    inputs = problem.inputs._replace(v=replace(problem.inputs.v, data=data))
    problem = replace(problem, inputs=inputs)
    call, errors = call_of(problem, how, end_to_end=False)
    d_out = np.zeros_like(call.d_out)
    d_out[..., :2] = 1.0
    call = call._replace(d_out=d_out, d_lse=np.zeros_like(call.d_lse))
    allowed = allowed_of(problem, how, call, errors)
    runs = [in_another_order(problem, call, how, order) for order in range(6)]
    spreads = []
    for name in ("d_q", "d_k"):
        gate: Allowed = getattr(allowed, name)
        found, spread = range_of(runs, name, allowed)
        assert ((gate.low <= found) & (found <= gate.high)).all()
        assert (spread <= gate.run_to_run).all()
        spreads.append(spread.max())
    assert max(spreads) > 0


def test_behind_a_nonlinear_epilogue_no_gradient_has_a_bound() -> None:
    problem = problem_for(SPECS["silu"], DType.BF16)
    how = Arithmetic()
    call, errors = call_of(replace(problem, spec=replace(problem.spec, epilogue=BASE.epilogue)), how, end_to_end=False)
    allowed = allowed_of(problem, how, call, errors)
    for each in (allowed.d_q, allowed.d_k, allowed.d_v):
        assert np.isinf(each.half_width).all()


def test_three_reductions_add_the_same_terms_in_other_orders() -> None:
    generator = torch.Generator().manual_seed(5)
    d = torch.randn(9, 6, 3, generator=generator)
    slot = torch.stack([torch.randperm(12, generator=generator)[:6] for _ in range(9)])
    exact = torch.zeros(12, 3, dtype=torch.float64).index_add_(0, slot.flatten(), d.flatten(0, 1).double())
    sums = {each: scattered(d, slot, 12, 1, each) for each in Reduction}
    for found in sums.values():
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert not torch.equal(sums[Reduction.ATOMIC], sums[Reduction.KV_CENTRIC])
    hot = torch.bincount(slot.flatten(), minlength=12) > HOT
    assert hot.any()
    assert not hot.all()
    torch.testing.assert_close(sums[Reduction.HYBRID][hot], sums[Reduction.KV_CENTRIC][hot], rtol=0, atol=0)
    torch.testing.assert_close(sums[Reduction.HYBRID][~hot], sums[Reduction.ATOMIC][~hot], rtol=0, atol=0)
