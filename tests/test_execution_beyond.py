"""Cells of `exec:` beyond a run behind another: capacities that are too small, and graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_execution import PLAIN, TRAINED, Planning, judged

from sacts.conformance import execution
from sacts.conformance.adapter import Backend, Case, Gradients, Outputs, Refused
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices.axes import Execution
from sacts.matrices.cell import parse
from sacts.reports.records import Gate, Verdict

# --- beyond what was made room for


class Capacity(Adapter):
    """Its plan has room for as many entries as the lists had, and a workspace of 4 bytes an output row. `refuses`: what
    it refuses by name, of "plan" and "workspace"; elsewhere it takes what fits, or writes behind its end.
    """

    def __init__(self, *refuses: str) -> None:
        super().__init__()
        self.refuses, self.refusals = refuses, 0

    def workspace_bytes(self, case: Case) -> int:
        return 4 * case.spec.num_tokens

    def plan(self, case: Case) -> torch.Tensor:
        return case.kv_indptr.clone()

    def run(self, case: Case, plan: Any = None) -> Outputs:
        lists, room = case.kv_indptr if plan is None else plan, len(case.workspace) // 4
        for what, beyond in (("plan", lists[-1] < len(case.kv_indices)), ("workspace", room < case.spec.num_tokens)):
            if beyond and what in self.refuses:
                self.refusals += 1
                raise Refused(f"{what}: no room for {case.kv_indptr[-1]} entries of {case.spec.num_tokens} queries")
        bits = case.workspace.as_strided((4 * case.spec.num_tokens,), (1,))
        bits.fill_(1)
        entries = torch.cat([case.kv_indices[a : a + n] for a, n in zip(case.kv_indptr, lists.diff(), strict=False)])
        return super().run(replace(case, kv_indptr=lists, kv_indices=entries))


@pytest.mark.parametrize("cell", ["small_plan", "small_workspace"])
def test_a_refusal_beyond_the_capacity_passes_and_is_asked_for(cell: str) -> None:
    adapter = Capacity("plan", "workspace")
    record = judged(adapter, f"{PLAIN}/exec:{cell}")
    assert record.verdict is Verdict.PASS, record.sentence
    assert record.gates[Gate.REUSE] == "pass"
    assert adapter.refusals


@pytest.mark.parametrize(
    ("cell", "gate", "words"),
    [
        ("small_plan", Gate.REUSE, "right by itself, wrong under a plan for shorter lists"),
        ("small_workspace", Gate.REUSE, "wrote outside workspace: 1 elements behind it"),
    ],
)
def test_what_a_backend_cuts_or_writes_beyond_its_capacity_is_seen(cell: str, gate: Gate, words: str) -> None:
    record = judged(Capacity(), f"{PLAIN}/exec:{cell}")
    assert record.finding is not None
    assert record.finding.gate is gate
    assert words in record.sentence
    assert judged(Capacity(), PLAIN).verdict is Verdict.PASS


def test_what_a_refusal_leaves_behind_is_seen() -> None:
    class Spoiled(Capacity):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            before, self.refusals = self.refusals, 0
            outputs = super().run(case, plan)
            outputs.out.mul_(1 + before)
            return outputs

    record = judged(Spoiled("plan"), f"{PLAIN}/exec:small_plan")
    assert record.finding is not None
    assert record.finding.gate is Gate.REUSE


# --- graphs, with a recorder that runs again what it recorded


class Aside:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def join(self) -> None:
        pass


def run_again(run: Any) -> Any:
    return run, run()


@pytest.mark.parametrize("how", [Execution.GRAPH, Execution.DOUBLE_BUFFER])
@pytest.mark.parametrize(("keeps", "kept"), [({"page_table"}, True), ({"kv_indices"}, False)])
def test_a_recorded_run_is_replayed_on_its_own_contents(
    how: Execution, keeps: set[str], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "record", run_again)
    monkeypatch.setattr(execution, "Side", Aside)
    problem = build(parse(PLAIN))
    backend = Backend(Planning(frozenset(keeps)))
    inputs = RANDOM.inputs(problem)
    right = Launcher(backend, "cpu")(problem, inputs)
    seen = Launcher(backend, "cpu", execution=how)(problem, inputs)
    assert bool((seen.out_bits == right.out_bits).all()) is kept


class Bound(Planning):
    """Its second graph of the same shapes reads and writes the buffers of the first."""

    def __init__(self) -> None:
        super().__init__(frozenset({"page_table"}))
        self.first: dict[Any, Case] = {}

    def run(self, case: Case, plan: Any = None) -> Outputs:
        return super().run(self.first.setdefault(case.q.shape, case), plan)


@pytest.mark.parametrize(("how", "right"), [(Execution.GRAPH, True), (Execution.DOUBLE_BUFFER, False)])
def test_a_second_graph_that_is_bound_to_the_first_buffer_is_seen(
    how: Execution, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "record", run_again)
    monkeypatch.setattr(execution, "Side", Aside)
    problem = build(parse(PLAIN))
    inputs = RANDOM.inputs(problem)
    expected = Launcher(Backend(Planning(frozenset({"page_table"}))), "cpu")(problem, inputs)
    seen = Launcher(Backend(Bound()), "cpu", execution=how)(problem, inputs)
    assert bool((seen.out_bits == expected.out_bits).all()) is right


def test_two_buffers_share_nothing_but_the_caches() -> None:
    problem = build(parse(TRAINED))
    case = Launcher(Backend(Adapter()), "cpu").case(problem, RANDOM.inputs(problem))
    case = replace(case, gradients=Gradients(case.q.clone(), case.k_cache.clone(), case.v_cache.clone()))
    twin = execution.Memory(case, torch.from_numpy(problem.pages), {}, lambda: None).twin().case
    fields = {name for name, x in vars(case).items() if isinstance(x, torch.Tensor)}
    assert {name for name in fields if getattr(twin, name) is getattr(case, name)} == {"k_cache", "v_cache"}
    assert twin.gradients is not None
    assert case.gradients is not None
    assert twin.gradients.d_q is not case.gradients.d_q
