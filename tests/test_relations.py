"""Relations that take a launch of their own: true in the reference, kept by a right kernel, broken by a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from sacts.conformance.adapter import PADDING, Backend, Case, Determinism, Outputs
from sacts.conformance.build import Problem, build
from sacts.conformance.determinism import measure
from sacts.conformance.launch import Launcher, Observed
from sacts.conformance.messages import Measurement
from sacts.conformance.probes.inputs import RANDOM
from sacts.conformance.relations import RELATIONS, entries_repeated
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices.cell import parse
from sacts.reference.candidates import CandidateError, Severity, validate
from sacts.reference.forward import forward
from sacts.reference.spec import CandidateKind

SHORT = "decode/bf16/kv:70+9/dim:32/pattern:duplicates/splits:2/tile:16"
WINDOW = "prefill/fp16/kv:60+20/q:3+2/dim:32/causal:bottom_right/window:16"
BLOCKS = "prefill/bf16/kv:60/q:20/dim:32/block:8/causal:bottom_right"
NO_BITS = np.zeros(0, np.int64)


def problem_of(cell: str, **changes: Any) -> Problem:
    problem = build(parse(cell))
    spec = replace(problem.spec, **changes)
    candidates = validate(spec, problem.raw, problem.table, sentinels=(PADDING,))
    return replace(problem, spec=spec, candidates=candidates)


@pytest.mark.parametrize("cell", [SHORT, WINDOW, BLOCKS])
@pytest.mark.parametrize("kind", [CandidateKind.SET, CandidateKind.MULTISET])
@pytest.mark.parametrize("name", RELATIONS)
def test_a_relation_is_true_in_the_reference(name: str, kind: CandidateKind, cell: str) -> None:
    problem = problem_of(cell, candidate_kind=kind)
    original = RANDOM.inputs(problem)
    inputs, variants = RELATIONS[name].make(problem, original)
    right = forward(problem.spec, inputs, problem.table, problem.candidates)
    assert variants or (name, cell) == ("masked entries", SHORT)
    for variant in variants:
        other = variant.problem
        found = forward(other.spec, variant.inputs, other.table, other.candidates)
        out, lse = variant.undone(Observed(found.out, found.lse, NO_BITS, NO_BITS))
        np.testing.assert_allclose(out, right.out, rtol=0, atol=1e-13)
        np.testing.assert_allclose(lse, right.lse, rtol=0, atol=1e-12)
        assert variant.name


def test_a_variant_says_something_else_than_its_original() -> None:
    for name, cell in [
        ("padding position", SHORT),
        ("repeated entries", SHORT),
        ("masked entries", WINDOW),
        ("masked entries", BLOCKS),
    ]:
        problem = problem_of(cell)
        _, variants = RELATIONS[name].make(problem, RANDOM.inputs(problem))
        for variant in variants:
            assert variant.problem.raw.indices.tolist() != problem.raw.indices.tolist(), name
            assert name != "masked entries" or variant.problem.candidates.indptr[-1] > problem.candidates.indptr[-1]
    problem = problem_of(SHORT)
    inputs, shifted = RELATIONS["logit shift"].make(problem, RANDOM.inputs(problem))
    shifts = [variant.shift for variant in shifted]
    expected = problem.spec.sm_scale * 128
    assert shifts == [-expected, expected]
    assert not inputs.k.data[..., 0].any()


def test_padding_stands_where_its_name_says() -> None:
    problem = problem_of(SHORT)
    _, variants = RELATIONS["padding position"].make(problem, RANDOM.inputs(problem))
    for variant in variants:
        raw = variant.problem.raw
        for row, (a, b) in enumerate(zip(raw.indptr, raw.indptr[1:], strict=False)):
            entries = raw.indices[a:b]
            real = problem.raw.indices[problem.raw.indptr[row] : problem.raw.indptr[row + 1]]
            assert entries[entries != PADDING].tolist() == real[real != PADDING].tolist()
            place = {"head": 0, "tail": len(entries) - 2}.get(variant.name.split()[-1], (len(entries) - 2) // 2)
            assert np.flatnonzero(entries == PADDING).tolist() == [place, place + 1]


def test_a_repeated_entry_is_nothing_in_a_set_ln_2_in_a_multiset_and_an_error_in_a_sequence() -> None:
    for kind, shift in ((CandidateKind.SET, 0.0), (CandidateKind.MULTISET, np.log(2))):
        problem = problem_of("decode/bf16/kv:30", candidate_kind=kind)
        _, (variant,) = entries_repeated(problem, RANDOM.inputs(problem))
        assert variant.shift == shift
    problem = problem_of("decode/bf16/kv:30", candidate_kind=CandidateKind.SEQUENCE)
    with pytest.raises(CandidateError) as raised:
        entries_repeated(problem, RANDOM.inputs(problem))
    assert {entry.severity for entry in raised.value.entries} == {Severity.DUPLICATE}


# --- backends


class Changed(Adapter):
    """The emulation, fed with another case."""

    def __init__(self, change: Callable[[Case], Case] = lambda case: case) -> None:
        super().__init__()
        self.change = change

    def run(self, case: Case, plan: Any = None) -> Outputs:
        return super().run(self.change(case), plan)


class Clamped(Changed):
    def run(self, case: Case, plan: Any = None) -> Outputs:
        outputs = super().run(case, plan)
        outputs.lse.copy_(torch.where(outputs.lse.isfinite(), outputs.lse.clamp(-8.0, 8.0), outputs.lse))
        return outputs


class OnePlan(Changed):
    """Keeps one plan, the last, for every call."""

    def plan(self, case: Case) -> None:
        self.planned = case.spec.num_tokens

    def run(self, case: Case, plan: Any = None) -> Outputs:
        outputs = super().run(case)
        outputs.out[self.planned :] = 0
        return outputs


def padding_ends_the_list(case: Case) -> Case:
    """What stands behind the first sentinel is lost."""
    indices, first = case.kv_indices.clone(), case.kv_indptr.tolist()
    for a, b in pairwise(first):
        ends = (indices[a:b] == PADDING).nonzero()
        if len(ends):
            indices[a + int(ends[0]) : b] = PADDING
    return replace(case, kv_indices=indices)


def without_window(case: Case) -> Case:
    return replace(case, spec=replace(case.spec, window_left=-1))


def as_multiset(case: Case) -> Case:
    return replace(case, spec=replace(case.spec, candidate_kind=CandidateKind.MULTISET))


class OneScale(Changed):
    """Keeps the scale of the first call of its shapes."""

    def run(self, case: Case, plan: Any = None) -> Outputs:
        self.scale = getattr(self, "scale", {})
        scale = self.scale.setdefault(case.q.shape, case.spec.sm_scale)
        return super().run(replace(case, spec=replace(case.spec, sm_scale=scale)), plan)


FAULTS: dict[str, tuple[Callable[[], Adapter], str, str]] = {
    "logit shift": (Clamped, SHORT, "every logit +"),
    "scale moved": (OneScale, "decode/bf16/kv:70+9/dim:32", "sm_scale twice as large, q half"),
    "padding position": (lambda: Changed(padding_ends_the_list), "decode/bf16/kv:70+9/dim:32", "padding at the "),
    "masked entries": (lambda: Changed(without_window), WINDOW, "masked entries behind each list"),
    "repeated entries": (lambda: Changed(as_multiset), "decode/bf16/kv:70+9/dim:32", "each list twice over"),
    "plan, other spec, run": (OnePlan, "decode/bf16/kv:70+9+30/dim:32", "another spec between plan and run"),
}


def measured(adapter: Adapter, cell: str) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for each in measure(Launcher(Backend(adapter), "cpu"), parse(cell), 0, 1):
        found.setdefault(each.level, []).append(each)
    return found


@pytest.mark.parametrize("cell", [SHORT, WINDOW, BLOCKS])
def test_a_right_kernel_keeps_them(cell: str) -> None:
    found = measured(Changed(), cell)
    missing = {"masked entries"} if cell == SHORT else set()
    assert set(RELATIONS) - missing <= set(found)
    for each in chain.from_iterable(found.values()):
        assert each.kept, each
        assert not each.promised or each.level not in RELATIONS


@pytest.mark.parametrize("name", RELATIONS)
def test_a_seeded_fault_breaks_its_relation_and_its_variant_is_named(name: str) -> None:
    make, cell, variant = FAULTS[name]
    broken = [each for each in measured(make(), cell)[name] if not each.kept]
    assert broken
    assert all(each.place.startswith("row (request ") for each in broken)
    assert {each.variant.startswith(variant) for each in broken} == {True}
    assert all(each.kept for each in measured(Changed(), cell)[name])


def test_a_plan_that_outlives_another_spec_keeps_its_bits_where_run_to_run_is_promised() -> None:
    class Promising(Changed):
        def __init__(self) -> None:
            super().__init__()
            levels = frozenset({Determinism.RUN_TO_RUN})
            self.capabilities = replace(self.capabilities, determinism={"out": levels, "lse": levels})

        def plan(self, case: Case) -> None:
            self.planned = case.spec.seq_lens

        def run(self, case: Case, plan: Any = None) -> Outputs:
            outputs = super().run(case)
            if self.planned != case.spec.seq_lens:
                outputs.lse.mul_(1 + 2.0**-22)
            return outputs

    found = measured(Promising(), "decode/bf16/kv:70+9+30/dim:32")["plan, other spec, run"]
    assert [(each.output, each.promised, each.kept) for each in found] == [("out", True, True), ("lse", True, False)]


def test_one_hint_alone_is_named() -> None:
    class Tiled(Changed):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            outputs = super().run(case)
            if case.hints.kv_tile == 32:
                outputs.out.mul_(1.5)
            return outputs

    out, lse = measured(Tiled(), "decode/bf16/kv:70+9/dim:32")[Determinism.SCHEDULE]
    assert not out.kept
    assert out.variant == "1 splits, tiles of 32"
    assert lse.kept


def test_a_consumer_of_validated_lists_is_not_asked_about_raw_ones() -> None:
    from sacts.kernels_under_test.sdpa import Adapter as Validated

    found = {each.level for each in measure(Launcher(Backend(Validated()), "cpu"), parse(WINDOW), 0, 1)}
    assert {name for name, relation in RELATIONS.items() if relation.raw} & found == set()
    assert "masked entries" in found
