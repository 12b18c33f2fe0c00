"""What ran before: whatever a backend remembers of another run in the same memory shows in the cells of `exec:reuse`,
and is blamed on the gate `reuse`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from sacts.conformance import execution
from sacts.conformance.adapter import (
    Backend,
    Capabilities,
    Case,
    Gradients,
    IndexSpace,
    Normalized,
    Outputs,
    Saved,
    Scale,
)
from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.conformance.status import status_of
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices.axes import Execution
from sacts.matrices.cell import parse
from sacts.reports.records import Gate, Record, Verdict

PLAIN = "decode/fp32/kv:60+25/dim:32"
CODED = "decode/bf16/kv:60+25/dim:32/kcodec:int8/vcodec:int4/scales:page/zeros:on"
TRAINED = "train/fp32/kv:40+9/q:3+2/dim:32"
REUSE = "/exec:reuse"


def judged(adapter: Any, cell: str, device: str = "cpu") -> Record:
    return judge(Launcher(Backend(adapter), device), "x", parse(cell))


class Remembering(Adapter):
    """Takes one field of a case from the first call of its shapes."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field, self.seen = field, dict[Any, Any]()

    def remembered(self, case: Case) -> Case:
        key = (tuple(case.q.shape), tuple(case.page_table.shape), tuple(case.kv_indices.shape))
        if self.field == "sm_scale":
            return replace(case, spec=replace(case.spec, sm_scale=self.seen.setdefault(key, case.spec.sm_scale)))
        return replace(case, **{self.field: self.seen.setdefault(key, getattr(case, self.field).clone())})

    def run(self, case: Case, plan: Any = None) -> Outputs:
        return super().run(self.remembered(case))


FIELDS = {
    **dict.fromkeys(("sm_scale", "q", "k_cache", "v_cache", "page_table", "kv_indices"), PLAIN),
    **dict.fromkeys(("k_scales", "v_scales", "k_zeros", "v_zeros"), CODED),
}


@pytest.mark.parametrize("field", FIELDS)
def test_what_a_backend_remembers_by_shape_is_blamed_on_reuse(field: str) -> None:
    record = judged(Remembering(field), FIELDS[field] + REUSE)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is Gate.REUSE
    assert record.gates[Gate.REUSE] == "fail"
    assert record.sentence.startswith("right by itself, wrong behind a run on other lists, pages and data")


@pytest.mark.parametrize("field", ["sm_scale", "page_table"])
def test_alone_it_does_not_show(field: str) -> None:
    """The reason for the cells of `exec:reuse`."""
    record = judged(Remembering(field), PLAIN)
    assert record.verdict is Verdict.PASS
    assert record.gates[Gate.REUSE] == "not applicable"


@pytest.mark.parametrize("cell", [PLAIN, CODED, TRAINED])
def test_a_backend_that_remembers_nothing_passes(cell: str) -> None:
    record = judged(Adapter(), cell + REUSE)
    assert record.verdict is Verdict.PASS, record.sentence
    assert record.gates[Gate.REUSE] == "pass"


def test_a_request_without_queries_passes_behind_another_run() -> None:
    """Drawn by sacts fuzz: no row has a request."""
    assert judged(Adapter(), "prefill/fp32/kv:64/q:0/exec:reuse").verdict is Verdict.PASS


def test_out_of_another_run_is_blamed_on_reuse() -> None:
    class Stale(Adapter):
        seen: ClassVar[dict[Any, Any]] = {}

        def run(self, case: Case, plan: Any = None) -> Outputs:
            right = super().run(case)
            case.out.copy_(self.seen.setdefault(case.out.shape, right.out.clone()))
            return right

    record = judged(Stale(), PLAIN + REUSE)
    assert record.finding is not None
    assert record.finding.gate is Gate.REUSE


def test_what_is_wrong_alone_is_not_blamed_on_reuse() -> None:
    class Doubling(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            outputs = super().run(case)
            outputs.out.mul_(2)
            return outputs

    record = judged(Doubling(), PLAIN + REUSE)
    assert record.finding is not None
    assert record.finding.gate not in (Gate.REUSE, Gate.CONTRACT)


def test_what_backward_remembers_is_blamed_on_reuse() -> None:
    class Forgetful(Adapter):
        seen: ClassVar[dict[Any, Any]] = {}

        def backward(
            self, case: Case, saved: Saved, d_out: torch.Tensor, d_lse: torch.Tensor | None = None, plan: Any = None
        ) -> Gradients:
            return super().backward(case, saved, self.seen.setdefault(d_out.shape, d_out.clone()), d_lse)

    record = judged(Forgetful(), TRAINED + REUSE)
    assert record.finding is not None
    assert record.finding.gate is Gate.REUSE
    assert record.gates[Gate.GRADIENTS] == "pass"
    assert record.gates[Gate.OUT] == "pass"


class Planning(Adapter):
    """Its plan takes the page table; `keeps`: what it declares to keep."""

    def __init__(self, keeps: frozenset[str] | None) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, plan_keeps=keeps)
        self.plans = 0

    def plan(self, case: Case) -> torch.Tensor:
        self.plans += 1
        return case.page_table.clone()

    def run(self, case: Case, plan: Any = None) -> Outputs:
        return super().run(replace(case, page_table=plan))


def test_a_plan_that_keeps_more_than_it_declares_is_blamed_on_reuse() -> None:
    record = judged(Planning(frozenset({"kv_indices"})), PLAIN + REUSE)
    assert record.finding is not None
    assert record.finding.gate is Gate.REUSE


@pytest.mark.parametrize("keeps", [frozenset({"page_table"}), None])
def test_a_plan_that_keeps_what_it_declares_passes(keeps: frozenset[str] | None) -> None:
    record = judged(Planning(keeps), PLAIN + REUSE)
    assert record.verdict is Verdict.PASS, record.sentence


@pytest.mark.parametrize(("keeps", "plans"), [(frozenset({"page_table"}), 2), (None, 2)])
def test_a_plan_is_kept_where_it_says_what_it_keeps(keeps: frozenset[str] | None, plans: int) -> None:
    """One plan for the run with another scale, one for the judged run; a kept one serves two runs."""
    adapter = Planning(keeps)
    runs: list[int] = []
    adapter_run = adapter.run
    adapter.run = lambda case, plan=None: (runs.append(1), adapter_run(case, plan))[1]  # type: ignore[method-assign]
    problem = build(parse(PLAIN + REUSE))
    Launcher(Backend(adapter), "cpu", execution=Execution.REUSE)(problem, RANDOM.inputs(problem))
    assert adapter.plans == plans
    assert len(runs) == (3 if keeps else 2)


class Placing(Adapter):
    """Its plan takes the lengths, as a backend does that derives positions on the host."""

    def __init__(self, keeps: frozenset[str]) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, plan_keeps=keeps)

    def plan(self, case: Case) -> tuple[int, ...]:
        return case.spec.seq_lens

    def run(self, case: Case, plan: Any = None) -> Outputs:
        return super().run(replace(case, spec=replace(case.spec, seq_lens=plan)))


@pytest.mark.parametrize(("keeps", "verdict"), [({"seq_lens"}, Verdict.PASS), ({"kv_indices"}, Verdict.FAIL)])
def test_lengths_that_a_plan_took_are_other_ones_in_the_next_run(keeps: set[str], verdict: Verdict) -> None:
    record = judged(Placing(frozenset(keeps)), "prefill/fp32/kv:60+25/q:3+2/dim:32/pattern:all/window:5" + REUSE)
    assert record.verdict is verdict
    assert record.finding is None or record.finding.gate is Gate.REUSE


class Deferring(Adapter):
    """Leaves its work to whoever waits; `reads`: takes the lists only then, else it writes late what it read before."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.pending = reads, list[Any]()

    def run(self, case: Case, plan: Any = None) -> Outputs:
        right = super().run(case)
        seen, kept = right.out.clone(), case
        self.pending = [lambda: case.out.copy_(super(Deferring, self).run(kept).out if self.reads else seen)]
        return right

    def settle(self, *_: object) -> None:
        while self.pending:
            self.pending.pop()()


@pytest.mark.parametrize("reads", [True, False])
def test_work_that_ends_behind_its_run_is_seen(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = Deferring(reads)
    monkeypatch.setattr(execution, "settle", adapter.settle)
    record = judged(adapter, f"{PLAIN}/exec:overwritten")
    assert record.verdict is Verdict.FAIL
    assert "changed behind the run, in stream order: work was still under way" in record.sentence
    assert record.finding is not None
    assert record.finding.gate is Gate.REUSE


@pytest.mark.parametrize("cell", [PLAIN, CODED, TRAINED])
def test_a_backend_that_is_done_when_it_returns_passes(cell: str) -> None:
    record = judged(Adapter(), f"{cell}/exec:overwritten")
    assert record.verdict is Verdict.PASS, record.sentence


@pytest.mark.parametrize("space", IndexSpace)
@pytest.mark.parametrize("cell", [PLAIN, CODED, "prefill/fp16/kv:90/q:4/block:16/cache:strided/causal:bottom_right"])
def test_other_contents_differ_and_are_legal(cell: str, space: IndexSpace) -> None:
    adapter = Adapter()
    adapter.capabilities = Capabilities(index_space=space)
    problem = build(parse(cell))
    case = Launcher(Backend(adapter), "cpu").case(problem, RANDOM.inputs(problem))
    live = torch.from_numpy(problem.pages)
    memory = execution.Memory(case, live, {}, lambda: None)
    mine = {name: x.clone() for name, x in memory.views().items()}
    other = execution.others(memory, frozenset({"q"}), space)
    assert other.keys() == mine.keys() - {"q"}
    assert all((other[name] != mine[name]).any() for name in other), "each must differ"
    assert set(other["page_table"].flatten().tolist()) <= set(problem.pages.tolist())
    if space is IndexSpace.LOGICAL:
        assert sorted(np.diff(case.kv_indptr.numpy())) == sorted(np.diff(problem.candidates.indptr))
        entries = -(-max(problem.spec.seq_lens) // problem.spec.block_size)
        assert int(other["kv_indices"].min()) >= 0 and int(other["kv_indices"].max()) < entries
    memory.put(other)
    assert all(torch.equal(memory.views()[name], x.to(mine[name].dtype)) for name, x in other.items())
    memory.put(mine)
    assert all(torch.equal(memory.views()[name], x) for name, x in mine.items())


# --- what needs a member that not every backend has


class Listing(Adapter):
    def normalize(self, case: Case) -> Normalized:
        keys = [case.kv_indices[a:b] for a, b in zip(case.kv_indptr[:-1], case.kv_indptr[1:], strict=True)]
        lists = [row[row >= 0].unique() for row in keys]
        indptr = torch.tensor([0, *(len(row) for row in lists)]).cumsum(0)
        return Normalized(indptr.int(), torch.cat(lists))


def test_an_index_cell_judges_the_lists_alone() -> None:
    class Silent(Listing):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            raise AssertionError("nothing runs in an index cell")

    record = judged(Silent(), "index/fp16/kv:90+50/q:1+1/pattern:duplicates")
    assert record.verdict is Verdict.PASS
    assert record.gates == {gate: "pass" if gate is Gate.INDEX else "not applicable" for gate in Gate}


def test_an_index_cell_sees_a_repeated_entry() -> None:
    class Repeating(Listing):
        def normalize(self, case: Case) -> Normalized:
            right = super().normalize(case)
            return Normalized(right.kv_indptr, right.kv_indices.clamp(min=int(right.kv_indices[:2].max())))

    record = judged(Repeating(), "index/fp16/kv:90+50/q:1+1/pattern:duplicates")
    assert record.finding is not None
    assert record.finding.gate is Gate.INDEX


class Graphed(Planning):
    def __init__(self, keeps: frozenset[str] | None, graph: bool = True) -> None:
        super().__init__(keeps)
        self.capabilities = replace(self.capabilities, graph=graph)


class Bare:
    """`run` alone."""

    def run(self, case: Case, plan: Any = None) -> Outputs:
        raise AssertionError("what is refused is not run")


@pytest.mark.parametrize(
    ("adapter", "cell", "reason"),
    [
        (Bare(), "index/fp16/kv:9/q:1", "index: the backend has no normalize"),
        (Bare(), "train/fp16/kv:9/q:1", "train: the backend has no backward"),
        (Bare(), "decode/fp16/kv:9/exec:graph", "graph: the backend does not declare it"),
        (Graphed(frozenset()), "decode/fp16/kv:9/exec:graph", "graph: needs a CUDA device"),
        (Graphed(frozenset()), "decode/fp16/kv:9/exec:double_buffer", "graph: needs a CUDA device"),
        (Bare(), "decode/fp16/kv:9/exec:small_plan", "small_plan: the backend does not plan"),
        (Bare(), "decode/fp16/kv:9/exec:small_workspace", "small_workspace: the backend asks for none"),
    ],
)
def test_what_a_backend_has_no_member_for_is_refused_in_its_name(adapter: Any, cell: str, reason: str) -> None:
    record = judged(adapter, cell)
    assert record.verdict is Verdict.REFUSED
    assert record.status == f"refused({reason})"
    assert record.sentence == reason


@pytest.mark.parametrize(("keeps", "reason"), [(None, "graph: plan_keeps does not say what a plan keeps"), ({}, "")])
def test_a_graph_needs_a_plan_that_says_what_it_keeps(keeps: Any, reason: str) -> None:
    cell = parse("decode/fp16/kv:9/exec:graph")
    launcher = Launcher(Backend(Graphed(None if keeps is None else frozenset(keeps))), "cuda")
    assert status_of(launcher, build(cell)).support.reason == reason


def test_a_backend_of_one_scale_is_run_with_it_only() -> None:
    scales = set()

    class OneScale(Adapter):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = replace(self.capabilities, scale=Scale.DEFAULT)

        def run(self, case: Case, plan: Any = None) -> Outputs:
            scales.add(case.spec.sm_scale)
            return super().run(case)

    assert judged(OneScale(), PLAIN + REUSE).verdict is Verdict.PASS
    assert len(scales) == 1


def test_what_the_suite_itself_raises_is_not_the_backend_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, torch.Tensor]:
        raise IndexError("ours")

    monkeypatch.setattr(execution, "others", broken)
    with pytest.raises(IndexError, match="ours"):
        judged(Adapter(), PLAIN + REUSE)


@pytest.mark.parametrize("member", ["plan", "run", "workspace_bytes"])
def test_what_each_member_raises_is_the_backend_s(member: str) -> None:
    class Raising(Planning):
        pass

    def raises(*_: object, **__: object) -> None:
        raise KeyError("theirs")

    setattr(Raising, member, raises)
    record = judged(Raising(frozenset()), PLAIN + REUSE)
    assert record.verdict is Verdict.ERROR
    assert "KeyError: 'theirs'" in record.sentence
