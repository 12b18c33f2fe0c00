"""Levels of determinism of gradients: each seeded variation shows at its own level, and breaks the promise of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_determinism_levels import SHOWS_AT, VARIATIONS

from sacts.conformance.adapter import Backend, Case, Determinism, Gradients, Saved
from sacts.conformance.build import build
from sacts.conformance.determinism import LEVELS, Measurement
from sacts.conformance.gradient_determinism import OUTPUTS, digests, measure
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.faults import cell_catalogue, seed
from sacts.kernels_under_test.sdpa import Adapter as Dense
from sacts.matrices.cell import parse
from sacts.reference.gradients import backward
from sacts.reports.records import Gate, Verdict

CELL = parse("prefill/fp32/kv:60+35/q:5+3/dim:32/map:shared/causal:bottom_right")
EVERYTHING = {name: frozenset(Determinism) for name in ("out", "lse", *OUTPUTS)}


class Varying(Dense):
    """A backend that never varies, but for a last step that depends on what it promises not to depend on."""

    def __init__(self, choose: Callable[[Case, int], int], output: str = "d_k") -> None:
        self.capabilities = replace(Dense.capabilities, determinism=EVERYTHING)
        self.choose, self.output, self.launches = choose, output, 0

    def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
        self.launches += 1
        found = super().backward(case, saved, d_out, d_lse)
        getattr(found, self.output).mul_(1 + self.choose(case, self.launches) % 4 * 2.0**-23)
        return found


def measured(adapter: Any) -> dict[tuple[str, str], Measurement]:
    return {(each.level, each.output): each for each in measure(Launcher(Backend(adapter), "cpu"), CELL, 0, 3)}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("level", VARIATIONS)
def test_a_variation_breaks_the_promise_of_its_level(level: Determinism, output: str) -> None:
    found = measured(Varying(VARIATIONS[level], output))
    mine = found[level, output]
    assert mine.distinct > 1
    assert mine.promised
    assert not mine.kept
    assert mine.place.startswith("row (request " if output == "d_q" else "request ")
    elsewhere = set(VARIATIONS) - SHOWS_AT[level]
    assert all(each.kept for each in found.values() if each.level in elsewhere or each.output != output)


@pytest.mark.parametrize("adapter", [Adapter, Dense])
def test_a_backend_that_adds_in_one_order_gives_the_same_bits_from_run_to_run(adapter: type) -> None:
    found = measured(adapter())
    assert {level for level, _ in found} == set(map(str, LEVELS))
    assert all(each.kept for each in found.values())
    assert all(found[Determinism.RUN_TO_RUN, name].distinct == 1 for name in OUTPUTS)
    assert not any(each.promised for each in found.values())


class Atomic(Adapter):
    """Rows add to their slots in another order in each launch, as atomic additions do."""

    launches = 0

    def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
        self.launches += 1
        self.arithmetic = {dtype: replace(each, order=self.launches) for dtype, each in self.arithmetic.items()}
        return super().backward(case, saved, d_out, d_lse)


def test_additions_in_any_order_stay_within_the_range_and_break_a_promise() -> None:
    found = measured(Atomic())
    mine = found[Determinism.RUN_TO_RUN, "d_v"]
    assert mine.distinct > 1
    assert 0 < mine.range_use <= 1
    assert mine.kept
    assert found[Determinism.RUN_TO_RUN, "d_q"].distinct == 1
    promising = Atomic()
    promising.capabilities = replace(promising.capabilities, determinism={"d_v": frozenset({Determinism.RUN_TO_RUN})})
    assert not measured(promising)[Determinism.RUN_TO_RUN, "d_v"].kept


def test_a_range_beyond_what_any_order_explains_is_out_of_bound_without_any_promise() -> None:
    class Drifting(Adapter):
        def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
            found = super().backward(case, saved, d_out, d_lse)
            found.d_q.mul_(1 + 1e-4 * float(torch.rand(())))
            return found

    torch.manual_seed(0)
    found = measured(Drifting())
    assert not found[Determinism.RUN_TO_RUN, "d_q"].kept
    assert found[Determinism.RUN_TO_RUN, "d_q"].range_use > 1
    assert found[Determinism.RUN_TO_RUN, "d_k"].kept


def test_another_process_is_compared_by_the_bits_of_each_gradient() -> None:
    """The command itself is tried in tests/test_determinism_levels.py."""
    once, again = (digests(Launcher(Backend(Dense()), "cpu"), CELL, 0) for _ in range(2))
    assert once == again
    assert set(once) == set(OUTPUTS)
    other = digests(Launcher(Backend(Varying(lambda case, launch: 1)), "cpu"), CELL, 0)
    assert [name for name in OUTPUTS if once[name] != other[name]] == ["d_k"]


def test_a_backend_without_backward_has_nothing_to_measure() -> None:
    class Forward:
        run, capabilities, support = Dense().run, Dense.capabilities, Dense().support

    launcher = Launcher(Backend(Forward()), "cpu")
    assert measure(launcher, CELL, 0, 1) == []
    assert digests(launcher, CELL, 0) == {}


def test_the_cell_has_slots_that_several_requests_add_to_and_slots_of_one() -> None:
    """Else the comparison of batches would compare nothing, or sums of different rows."""
    found = build(CELL)
    d_out = np.random.default_rng(0).normal(
        size=(found.spec.num_tokens, found.spec.num_qo_heads, found.spec.head_dim_vo)
    )
    right = backward(found.spec, RANDOM.inputs(found), found.table, found.candidates, d_out)
    references = right.d_k.pages.references
    assert references.max() > 1
    assert (references == 1).sum() > 10


@pytest.mark.parametrize("name", ["first_tile_of_rows_dropped", "hot_slots_added_twice"])
def test_a_fault_of_one_reduction_fails_in_its_cell_alone(name: str) -> None:
    fault = cell_catalogue()[name]
    record = judge(Launcher(Backend(seed(fault)()), "cpu"), name, parse(fault.problem))
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is Gate.GRADIENTS
    by_atomics = fault.problem.rsplit("/", 1)[0]
    assert judge(Launcher(Backend(seed(fault)()), "cpu"), name, parse(by_atomics)).verdict is Verdict.PASS
