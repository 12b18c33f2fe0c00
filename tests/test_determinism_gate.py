"""Gate determinism: a broken promise fails the cell, named by level, output and row; what is not promised may vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from sacts.conformance.adapter import Backend, Case, Determinism, Outputs
from sacts.conformance.gates.determinism import HELD
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.kernels_under_test.sdpa import Adapter
from sacts.matrices.cell import parse
from sacts.reports.records import Gate, Record, Verdict

CELL = "decode/fp32/kv:150+9+33/dim:32/pattern:duplicates"
ALL = frozenset(HELD)
Promises = Mapping[str, frozenset[Determinism]]


class Varying(Adapter):
    """Right, but for a last bit or two of one output that depend on something."""

    def __init__(self, choose: Callable[[Case, int], int], promises: Promises, output: str = "out") -> None:
        self.capabilities = replace(Adapter.capabilities, determinism=promises)
        self.choose, self.output, self.launches = choose, output, 0

    def run(self, case: Case, plan: object = None) -> Outputs:
        self.launches += 1
        outputs = super().run(case, plan)
        bits = getattr(outputs, self.output)
        bits.copy_(torch.where(bits.isfinite(), bits * (1 + self.choose(case, self.launches) % 4 * 2.0**-23), bits))
        return outputs


def steady(case: Case, launch: int) -> int:
    return 0


VARIATIONS: dict[Determinism, Callable[[Case, int], int]] = {
    Determinism.RUN_TO_RUN: lambda case, launch: launch,
    Determinism.BATCH_INVARIANT: lambda case, launch: case.spec.num_requests,
    Determinism.SCHEDULE: lambda case, launch: case.hints.num_splits,
    Determinism.PLACEMENT_INVARIANT: lambda case, launch: int(case.page_table[:, 0].sum()),
}


def judged(adapter: Varying, cell: str = CELL) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell))


@pytest.mark.parametrize("output", ["out", "lse"])
@pytest.mark.parametrize("level", VARIATIONS)
def test_a_broken_promise_fails_the_cell_and_its_level_is_named(level: Determinism, output: str) -> None:
    record = judged(Varying(VARIATIONS[level], {output: frozenset({level})}, output))
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is Gate.DETERMINISM
    assert record.gates[Gate.DETERMINISM] == "fail"
    others = {said for gate, said in record.gates.items() if gate != Gate.DETERMINISM}
    assert others == {"pass", "not applicable", "not offered"}
    assert record.sentence.startswith("row (request ")
    assert f"{output} has 2 distinct results in 2 launches" in record.sentence
    assert f"the backend promises {level}: the same bits" in record.sentence
    assert 0 < record.use[Gate.DETERMINISM] <= 1


@pytest.mark.parametrize("level", [Determinism.BATCH_INVARIANT, Determinism.SCHEDULE])
def test_among_many_promises_the_broken_one_is_named(level: Determinism) -> None:
    record = judged(Varying(VARIATIONS[level], dict.fromkeys(("out", "lse"), ALL)))
    assert f"the backend promises {level}:" in record.sentence


@pytest.mark.parametrize("level", VARIATIONS)
def test_what_is_not_promised_may_vary(level: Determinism) -> None:
    others = ALL - {level} if level is not Determinism.RUN_TO_RUN else frozenset()
    if level is Determinism.PLACEMENT_INVARIANT:
        others -= {Determinism.BATCH_INVARIANT}  # alone its pages are others
    for promises in ({}, {"lse": ALL}, {"out": others}):
        record = judged(Varying(VARIATIONS[level], promises))
        assert record.verdict is Verdict.FALLBACK, record.sentence


def test_the_range_of_a_backend_that_promises_nothing_is_told() -> None:
    record = judged(Varying(VARIATIONS[Determinism.RUN_TO_RUN], {}))
    assert 0 < record.use[Gate.DETERMINISM] <= 1
    assert record.gates[Gate.DETERMINISM] == "not applicable"
    assert Gate.DETERMINISM not in judged(Varying(steady, {})).use


@pytest.mark.parametrize(
    ("promised", "launches"),
    [
        ((), 2),
        ((Determinism.RUN_TO_RUN, Determinism.PROCESS_TO_PROCESS), 2),
        (HELD, 3),
        ((Determinism.BATCH_INVARIANT,), 3),
        ((Determinism.SCHEDULE, Determinism.PLACEMENT_INVARIANT), 4),
    ],
)
def test_a_promise_that_holds_costs_one_or_two_launches(promised: tuple[Determinism, ...], launches: int) -> None:
    adapter = Varying(steady, dict.fromkeys(("out", "lse"), frozenset(promised)))
    assert judged(adapter).verdict is Verdict.FALLBACK
    assert adapter.launches == launches


def test_a_backend_that_may_vary_is_held_to_its_bounds_in_both_launches() -> None:
    class Leaking(Varying):
        def run(self, case: Case, plan: object = None) -> Outputs:
            outputs = super().run(case, plan)
            outputs.out[0, 0, 0] += 0.5 * (self.launches == 2)
            return outputs

    record = judged(Leaking(VARIATIONS[Determinism.RUN_TO_RUN], {}))
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
