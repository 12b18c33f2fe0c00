"""Cells of `epilogue:gate`: out times a gate of its own token, query head and channel, behind the merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from sacts.conformance.adapter import Backend, Case, Outputs
from sacts.conformance.batch import join, join_inputs
from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import COUNT, RANDOM
from sacts.conformance.relations import chosen, heads_reversed
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices.cell import parse
from sacts.reference.bounds import expected
from sacts.reference.formats import round_to
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType, Epilogue
from sacts.reports.records import Gate, Verdict

CELL = "prefill/bf16/kv:60+25/q:3+2/epilogue:gate"


class Gated(Adapter):
    """The modelled kernel under another gate."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.other = other

    def run(self, case: Case, plan: object = None) -> Outputs:
        assert case.gate is not None
        return super().run(replace(case, gate=self.other(case.gate)))


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": torch.ones_like,
    "another query head's": lambda gate: gate.roll(1, 1),
    "another token's": lambda gate: gate.roll(1, 0),
    "another channel's": lambda gate: gate.roll(1, 2),
    "one for all channels": lambda gate: gate[..., :1].expand_as(gate),
    "its sigmoid": torch.sigmoid,
    "its size": torch.abs,
}


@pytest.mark.parametrize("name", WRONG)
def test_another_gate_fails_at_out_and_none_by_name(name: str) -> None:
    record = judge(Launcher(Backend(Gated(WRONG[name])), "cpu"), "x", parse(CELL))
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is (Gate.TERMS if name == "none" else Gate.OUT)
    assert "as if there were no epilogue" in record.sentence or name != "none"
    assert record.gates[Gate.LSE] == ("not reached" if name == "none" else "pass")


@pytest.mark.parametrize("cell", [CELL, f"{CELL}/exec:reuse", "decode/fp16/kv:90+5/splits:2/tile:16/epilogue:gate"])
def test_the_right_gate_passes(cell: str) -> None:
    assert judge(Launcher(Backend(Adapter()), "cpu"), "x", parse(cell)).verdict is Verdict.PASS


def test_a_gate_that_is_kept_from_another_call_is_blamed_on_reuse() -> None:
    seen: dict[torch.Size, torch.Tensor] = {}
    keeping = Gated(lambda gate: seen.setdefault(gate.shape, gate.clone()))
    record = judge(Launcher(Backend(keeping), "cpu"), "x", parse(f"{CELL}/exec:reuse"))
    assert record.finding is not None
    assert record.finding.gate is Gate.REUSE


def test_the_bound_is_that_of_out_times_the_gate() -> None:
    """Against the plain cell's interval: each end times the gate, one FP32 rounding more, then the output's."""
    problem = build(parse(CELL))
    inputs = RANDOM.inputs(problem)
    assert inputs.gate is not None
    numerics = Numerics(p=DType.BF16, out=DType.BF16)
    where = problem.table, problem.candidates, numerics
    gated = expected(problem.spec, inputs, *where)
    plain = expected(replace(problem.spec, epilogue=Epilogue()), inputs, *where)
    sides = [(plain.out + sign * plain.half_width) * inputs.gate for sign in (-1, 1)]
    low, high = np.minimum(*sides), np.maximum(*sides)
    slack = 2.0**-23
    np.testing.assert_array_equal(gated.out, plain.out * inputs.gate)
    assert (gated.out_lo >= round_to(low - slack * np.abs(low), DType.BF16)).all()
    assert (gated.out_lo <= round_to(low, DType.BF16)).all()
    assert (gated.out_hi <= round_to(high + slack * np.abs(high), DType.BF16)).all()
    assert (gated.out_hi >= round_to(high, DType.BF16)).all()


def test_gates_stay_with_their_tokens_and_heads() -> None:
    problem = build(parse(CELL))
    inputs = RANDOM.inputs(problem)
    assert inputs.gate is not None
    second = chosen(problem, inputs, [1]).inputs
    assert second.gate is not None
    np.testing.assert_array_equal(second.gate, inputs.gate[3:])
    turned = heads_reversed(problem, inputs)
    assert turned.inputs.gate is not None
    np.testing.assert_array_equal(turned.inputs.gate, inputs.gate[:, turned.heads])
    count = COUNT.inputs(problem)
    assert count.gate is not None
    joined = join_inputs(join([problem, problem]), [(problem, inputs), (problem, count)])
    np.testing.assert_array_equal(joined.gate, np.concatenate([inputs.gate, count.gate]))
