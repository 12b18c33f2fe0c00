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
    Refused,
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
