"""Levels of determinism: each seeded variation shows at its own level, and a promise of that level is then broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sacts.conformance.adapter import Backend, Capabilities, Case, Determinism, Outputs
from sacts.conformance.build import build
from sacts.conformance.cli import app
from sacts.conformance.cli.determinism import PROCESSES
from sacts.conformance.determinism import EXACT, HEADS, LEVELS, Measurement, across_processes, measure
from sacts.conformance.launch import Launcher, Observed
from sacts.conformance.probes.inputs import RANDOM
from sacts.conformance.relations import chosen, heads_reversed, relabelled, scaled, shuffled
from sacts.conformance.worker import Worker
from sacts.kernels_under_test.sdpa import Adapter
from sacts.matrices.cell import parse
from sacts.reference.forward import forward

CELL = parse("decode/fp32/kv:150+9+33/dim:32/pattern:duplicates")
EVERYTHING = {name: frozenset(Determinism) for name in ("out", "lse")}


class Varying(Adapter):
    """A backend that never varies, but for a last step that depends on what it promises not to depend on."""

    capabilities = replace(Adapter.capabilities, determinism=EVERYTHING)

    def __init__(self, choose: Callable[[Case, int], int]) -> None:
        self.choose, self.launches = choose, 0

    def run(self, case: Case, plan: Any = None) -> Outputs:
        self.launches += 1
        outputs = super().run(case, plan)
        outputs.out.mul_(1 + self.choose(case, self.launches) % 4 * 2.0**-23)
        return outputs


VARIATIONS: dict[Determinism, Callable[[Case, int], int]] = {
    Determinism.RUN_TO_RUN: lambda case, launch: launch,
    Determinism.SCHEDULE: lambda case, launch: case.hints.num_splits,
    Determinism.BATCH_INVARIANT: lambda case, launch: case.spec.num_requests,
    Determinism.PLACEMENT_INVARIANT: lambda case, launch: int(case.page_table[0, 0]),
}


SHOWS_AT = {level: {level} for level in VARIATIONS} | {
    Determinism.RUN_TO_RUN: set(VARIATIONS),
    Determinism.PLACEMENT_INVARIANT: {Determinism.PLACEMENT_INVARIANT, Determinism.BATCH_INVARIANT},
}


def measured(adapter: Adapter) -> list[Measurement]:
    return measure(Launcher(Backend(adapter), "cpu"), CELL, 0, 3)


@pytest.mark.parametrize("level", VARIATIONS)
def test_a_variation_breaks_the_promise_of_its_level(level: Determinism) -> None:
    found = {(each.level, each.output): each for each in measured(Varying(VARIATIONS[level]))}
    mine = found[level, "out"]
    assert mine.distinct > 1
    assert not mine.kept
    assert 0 < mine.range_use <= 1
    assert mine.place.startswith("row (request ")
    elsewhere = set(VARIATIONS) - SHOWS_AT[level]
    assert all(each.kept for each in found.values() if each.level in elsewhere)


def test_a_backend_that_never_varies_gives_the_same_bits_at_every_level() -> None:
    found = measured(Adapter())
    levels = {*map(str, LEVELS), EXACT, HEADS}
    assert {each.level for each in found} == levels | {"logit shift", "plan, other spec, run", "scale moved"}
    assert all(each.kept and each.distinct == 1 for each in found if each.level in levels)
    assert {each.level for each in found if each.promised} == {EXACT}


@pytest.mark.parametrize("output", ["out", "lse"])
def test_heads_that_differ_by_their_place_break_batch_invariance(output: str) -> None:
    class Uneven(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            outputs = super().run(case)
            getattr(outputs, output)[:, 0] *= 1 + 2.0**-22
            return outputs

    promises = dict.fromkeys(("out", "lse"), frozenset({Determinism.BATCH_INVARIANT}))
    for capabilities, kept in (
        (Adapter.capabilities, True),
        (replace(Adapter.capabilities, determinism=promises), False),
    ):
        Uneven.capabilities = capabilities
        found = {(each.level, each.output): each for each in measured(Uneven())}
        assert found[HEADS, output].distinct > 1
        assert found[HEADS, output].kept is kept
        assert all(each.kept for (level, _), each in found.items() if level != HEADS)


def test_an_output_that_saturates_breaks_the_scaling_of_v() -> None:
    class Saturating(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            outputs = super().run(case)
            outputs.out.clamp_(-0.5, 0.5)
            return outputs

    found = {(each.level, each.output): each for each in measured(Saturating())}
    assert [key for key, each in found.items() if not each.kept] == [(EXACT, "out")]


def test_a_range_beyond_the_bound_is_out_of_bound_without_any_promise() -> None:
    class Drifting(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            outputs = super().run(case)
            outputs.out.mul_(1 + 0.1 * float(torch.rand(())))
            return outputs

    torch.manual_seed(0)
    found = {(each.level, each.output): each for each in measured(Drifting())}
    assert not found[Determinism.RUN_TO_RUN, "out"].kept
    assert found[Determinism.RUN_TO_RUN, "out"].range_use > 1
    assert found[Determinism.RUN_TO_RUN, "lse"].kept


def test_other_processes_are_compared_by_their_bits() -> None:
    same, other = {"out": "a", "lse": "b"}, {"out": "a", "lse": "c"}
    kept = across_processes({"out": True, "lse": True}, [same, same, other])
    assert [(each.output, each.distinct, each.kept) for each in kept] == [("out", 1, True), ("lse", 2, False)]
    assert all(each.kept for each in across_processes({"out": True, "lse": False}, [same, other]))


@cache
def right() -> tuple[Any, Any]:
    problem = build(CELL)
    inputs = RANDOM.inputs(problem)
    return forward(problem.spec, inputs, problem.table, problem.candidates), (problem, inputs)


@pytest.mark.parametrize(
    "variant",
    [
        lambda p, i: relabelled(p, i, 0),
        lambda p, i: shuffled(p, i, 0),
        lambda p, i: chosen(p, i, [2, 0]),
        lambda p, i: chosen(p, i, [1]),
    ],
)
def test_a_variant_has_the_result_of_the_original_in_the_reference(variant: Callable[..., Any]) -> None:
    expected, (problem, inputs) = right()
    other = variant(problem, inputs)
    found = forward(other.problem.spec, other.inputs, other.problem.table, other.problem.candidates)
    np.testing.assert_allclose(found.out, expected.out[other.tokens], rtol=0, atol=1e-14)
    np.testing.assert_allclose(found.lse, expected.lse[other.tokens], rtol=0, atol=1e-13)
    assert (other.problem.needed.sum(), len(other.problem.pages)) <= (problem.needed.sum(), len(problem.pages))


def test_relabelling_moves_pages_and_shuffling_moves_entries() -> None:
    _, (problem, inputs) = right()
    assert (relabelled(problem, inputs, 0).problem.table.table != problem.table.table).any()
    assert (shuffled(problem, inputs, 0).problem.raw.indices != problem.raw.indices).any()


def test_the_command_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes are started afresh: those of one server share the seed of hashes and places in memory."""
    fresh = list[bool]()

    class Seen(Worker):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            fresh.append(self.fresh)

    monkeypatch.setattr("sacts.conformance.cli.determinism.Worker", Seen)
    result = CliRunner().invoke(app, ["determinism", "decode/fp16/kv:20", "-a", "sdpa", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert fresh == [False] + [True] * PROCESSES
    for level in Determinism:
        assert str(level) in result.output
    for gradient in ("d_q", "d_k", "d_v"):
        assert result.output.count(gradient) == len(LEVELS) + 1
    assert CliRunner().invoke(app, ["determinism", "decode/fp17/kv:20"]).exit_code == 2


@pytest.mark.parametrize("variant", [heads_reversed, scaled])
def test_an_exact_relation_holds_in_the_reference(variant: Callable[..., Any]) -> None:
    expected, (problem, inputs) = right()
    other = variant(problem, inputs)
    found = forward(other.problem.spec, other.inputs, other.problem.table, other.problem.candidates)
    bits = np.zeros(0, np.int64)
    out, lse = other.undone(Observed(found.out, found.lse, bits, bits))
    np.testing.assert_allclose(out, expected.out, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=1e-13)


def test_no_promise_is_the_default() -> None:
    assert Capabilities().determinism == {}


def test_a_scale_that_is_kept_from_another_call_of_the_same_shapes_is_out_of_bound() -> None:
    class Remembering(Adapter):
        def __init__(self) -> None:
            self.scales: dict[torch.Size, float] = {}

        def run(self, case: Case, plan: Any = None) -> Outputs:
            scale = self.scales.setdefault(case.q.shape, case.spec.sm_scale)
            return super().run(replace(case, spec=replace(case.spec, sm_scale=scale)))

    found = {(each.level, each.output): each for each in measured(Remembering())}
    assert {level for (level, _), each in found.items() if not each.kept} == {"scale moved"}


def test_a_request_without_queries_is_no_batch_of_its_own() -> None:
    cell = parse("prefill/fp16/kv:6+20/q:3+0")
    assert all(each.kept for each in measure(Launcher(Backend(Adapter()), "cpu"), cell, 0, 1))
