"""Traces of a modelled kernel: a right one lies within the bounds of logits and tile states, in any arithmetic; of a
wrong one the layer and the tile are named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hard_problems import one_by_one
from term_problems import ARITHMETICS, MODEL, SPECS, Problem, problem_of

from sacts.conformance.adapter import Backend, Case, Outputs, Trace
from sacts.conformance.build import build
from sacts.conformance.contract import ContractBroken
from sacts.conformance.launch import Launcher
from sacts.conformance.localise import traces
from sacts.conformance.localise.locate import locate
from sacts.conformance.localise.traces import judge_trace, read_trace
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.emulation.rows import by_token
from sacts.kernels_under_test.faults import ModelFault, patched
from sacts.matrices.cell import parse
from sacts.reference.spec import DType, EpilogueKind
from sacts.reference.tile_bounds import tile_states
from sacts.reports.records import Finding, Gate

NAMES = [name for name, spec in SPECS.items() if spec.epilogue.kind is EpilogueKind.NONE and "KV" not in name]
NAMES.remove("e5m2 K, turned")


def traced(name: str, arithmetic: str, package: str = MODEL) -> tuple[Problem, Trace, Arithmetic]:
    dtype, how = ARITHMETICS[arithmetic]
    problem = problem_of(replace(SPECS[name], dtype=dtype), 3, 1.0)
    trace = importlib.import_module(f"{package}.trace").trace
    return problem, trace(problem.spec, problem.rows(how, package), how), how


def found(problem: Problem, trace: Trace, how: Arithmetic) -> Finding | None:
    where = problem.spec, problem.inputs, problem.table, problem.lists
    return judge_trace(*where, read_trace(problem.spec, trace), how.numerics)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", ["multiset", "everything"])
def test_repeats_may_be_visited_one_by_one(name: str, arithmetic: str) -> None:
    dtype, how = ARITHMETICS[arithmetic]
    problem = problem_of(replace(SPECS[name], dtype=dtype), 3, 1.0)
    trace = importlib.import_module(f"{MODEL}.trace").trace(problem.spec, one_by_one(problem.rows(how)), how)
    assert found(problem, trace, how) is None


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", NAMES)
def test_the_trace_of_a_right_kernel_is_within_its_bounds(name: str, arithmetic: str) -> None:
    problem, trace, how = traced(name, arithmetic)
    assert found(problem, trace, how) is None


FAULTS = {
    "never_rescaled": ("forward.py", "o = scale[..., None] * o + product(", "o = o + product(", Gate.RESCALE),
    "l_never_rescaled": ("forward.py", "l = scale * l + (", "l = l + (", Gate.LSE),
    "maximum_of_the_tile": (
        "forward.py",
        "torch.where(top > m + arithmetic.lag, top, m)",
        "torch.where(top > -torch.inf, top, m)",
        Gate.LOGITS,
    ),
    "without_bias": ("terms.py", "    if spec.alibi_slopes:", "    if False:", Gate.LOGITS),
    "last_key_lost": ("rows.py", "in enumerate(distinct)\n", "in enumerate(distinct[:-1])\n", Gate.COUNT),
    "after_the_tiles": (
        "forward.py",
        "out = torch.where(some[..., None], state.o / l[..., None], 0.0)",
        "out = state.o",
        Gate.OUT,
    ),
}


def of_fault(name: str) -> str:
    """A patched model, as a package."""
    file, find, by, _ = FAULTS[name]
    return patched(ModelFault(f"traced_{name}", "a test", file, find, by, "plain", ()), "emulation")


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "after_the_tiles"])
def test_the_layer_and_the_tile_of_a_fault_are_named(fault: str) -> None:
    name = "ALiBi" if fault == "without_bias" else "plain"
    problem, trace, how = traced(name, "fp16, 3 splits, tiles in any order", of_fault(fault))
    finding = found(problem, trace, how)
    assert finding is not None
    assert finding.gate is FAULTS[fault][3], finding.sentence
    assert "tile " in finding.sentence


def test_the_first_tile_that_does_not_rescale_is_named() -> None:
    """Against the tiles in which the maximum rises, from the logits."""
    how = Arithmetic(p=DType.FP32, out=DType.FP32, tile=16)
    problem = problem_of(replace(SPECS["plain"], dtype=DType.FP32), 3, 1.0)
    make = importlib.import_module(f"{of_fault('never_rescaled')}.trace").trace
    trace = make(problem.spec, problem.rows(how, of_fault("never_rescaled")), how)
    finding = found(problem, trace, how)
    assert finding is not None
    logits = np.where(trace.tokens.numpy()[:, None] >= 0, trace.logits.numpy(), -np.inf)
    tops = np.stack([logits[..., trace.tiles[0].numpy() == tile].max(axis=-1) for tile in range(trace.splits.shape[1])])
    rises = (tops[1:] > np.maximum.accumulate(tops)[:-1]) & np.isfinite(tops[0])
    row = int(np.flatnonzero(rises.any(axis=(0, 2)))[0])
    assert str(problem.spec.row(row)) in finding.sentence
    assert finding.sentence.endswith(f"tile {1 + int(np.flatnonzero(rises[:, row].any(axis=-1))[0])}")


def test_a_maximum_that_lags_further_than_declared_is_named() -> None:
    problem, trace, how = traced("plain", "bf16, 8 octaves late, cast P in l")
    assert found(problem, trace, how) is None
    where = problem.spec, problem.inputs, problem.table, problem.lists
    finding = judge_trace(*where, read_trace(problem.spec, trace), replace(how.numerics, lag=0.0))
    assert finding is not None
    assert finding.gate is Gate.LOGITS
    assert "running maximum" in finding.sentence


def test_the_states_of_a_row_are_made_once_for_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, trace, how = traced("plain", "fp32")
    made = list[object]()

    def counted(spec: object, group: object, *arguments: object, **options: object) -> object:
        made.append(group)
        return tile_states(spec, group, *arguments, **options)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(traces, "tile_states", counted)
    assert found(problem, trace, how) is None
    splits = trace.splits.max().item() + 1
    assert 0 < len(made) <= problem.spec.num_rows * splits


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("logits", lambda x: x[..., :-1], r"logits has shape .* expected"),
        ("m", lambda x: x[0], "m has shape"),
        ("tiles", lambda x: x.flip(-1), "tiles must rise"),
        ("tiles", lambda x: x + 1, "tiles must rise"),
    ],
)
def test_a_trace_of_another_form_breaks_the_contract(
    field: str, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    problem, trace, _ = traced("plain", "fp32")
    with pytest.raises(ContractBroken, match=words):
        read_trace(problem.spec, replace(trace, **{field: change(getattr(trace, field))}))


CELL = "prefill/bf16/kv:65+20/q:4+2"


class Faulty(Adapter):
    """The model with one patch, its trace included."""

    def __init__(self, package: str) -> None:
        super().__init__({dtype: Arithmetic(p=dtype, out=dtype, tile=16) for dtype in DType})
        self.package = package

    def run(self, case: Case, plan: object = None) -> Outputs:
        forward = importlib.import_module(f"{self.package}.forward").forward
        rows = importlib.import_module(f"{self.package}.rows").rows_of(case)
        out, lse = (by_token(case.spec, x) for x in forward(case.spec, rows, self._arithmetic(case)))
        return Outputs(out.to(case.q.dtype), lse)

    def trace(self, case: Case, plan: object = None) -> Trace:
        rows = importlib.import_module(f"{self.package}.rows").rows_of(case)
        made: Trace = importlib.import_module(f"{self.package}.trace").trace(case.spec, rows, self._arithmetic(case))
        return made


def test_locate_says_what_the_trace_says() -> None:
    launcher = Launcher(Backend(Faulty(of_fault("never_rescaled"))), "cpu")
    found = locate(launcher, build(parse(CELL), 0))
    assert found is not None
    assert found.finding.gate is Gate.RESCALE
    assert "o / l in channel" in found.finding.sentence
    assert "From its outputs alone: " in found.finding.sentence


def test_locate_says_that_the_fault_comes_after_the_trace() -> None:
    found = locate(Launcher(Backend(Faulty(of_fault("after_the_tiles"))), "cpu"), build(parse(CELL), 0))
    assert found is not None
    assert "its trace is right in every tile: the fault comes after the last" in found.finding.sentence
