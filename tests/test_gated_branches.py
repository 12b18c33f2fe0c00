"""Gated branches: what a backend gets, what the judge makes of what comes back, and each mistake about lists, gates,
lse and epilogue named at its gate.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sacts.conformance import branches, sample
from sacts.conformance.adapter import (
    Backend,
    Capabilities,
    Case,
    Consumes,
    Determinism,
    Normalized,
    Outputs,
    Support,
    refused,
)
from sacts.conformance.batch import join
from sacts.conformance.build import build, last_query
from sacts.conformance.execution import Memory, others
from sacts.conformance.gates.determinism import Bits
from sacts.conformance.gates.layout import poison
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.localise.locate import locate
from sacts.conformance.probes.copies import copies
from sacts.conformance.probes.inputs import RANDOM
from sacts.conformance.relations import chosen
from sacts.kernels_under_test import sdpa
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.faults import cell_catalogue, seed
from sacts.kernels_under_test.paged.adapter import Adapter as Paged
from sacts.matrices.cell import CellError, parse
from sacts.matrices.shards import predicted
from sacts.reference.edges import attended
from sacts.reference.forward import forward
from sacts.reference.spec import AttentionSpec, CandidateKind, DType
from sacts.reports.records import Gate, Record, Verdict

Array = NDArray[np.float64]

CELL = "decode/bf16/kv:60+40/branches:2"
FAULTS = {fault.name: fault for fault in cell_catalogue().values() if fault.outputs[0] == "branches"}
TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}


def judged(adapter: object, cell: str) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell))


class Seen(Adapter):
    """The model, and the cases that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: list[Case] = []

    def run(self, case: Case, plan: object = None) -> Outputs:
        self.cases.append(case)
        return super().run(case, plan)


# --- what the judge holds, and what a backend gets


def test_to_the_judge_each_request_stands_once_per_branch_over_the_same_pages() -> None:
    one, three = (
        build(parse("decode/bf16/kv:60+40/dropout:30")),
        build(parse("decode/bf16/kv:60+40/dropout:30/branches:3")),
    )
    assert three.branches == 3
    assert three.num_calls == one.spec.num_requests == 2
    assert three.spec.seq_lens == (60, 60, 60, 40, 40, 40)
    assert three.spec.num_branches == 1
    assert three.spec.dropout is not None and one.spec.dropout is not None
    uids = three.spec.dropout.request_uids
    assert uids[:3] == uids[:1] * 3 and uids[3:] == uids[3:4] * 3 and uids[0] != uids[3]
    for n in range(2):
        rows = three.table.table[3 * n : 3 * n + 3]
        assert (rows == rows[0]).all() and three.table.owned[3 * n] == three.table.owned[3 * n + 2]
    assert not three.table.owned[0] & three.table.owned[3]


def test_branches_have_lists_of_their_own_of_other_lengths() -> None:
    problem = build(parse("decode/bf16/kv:60+40/branches:3"))
    lengths = np.diff(problem.candidates.indptr).reshape(2, 3, -1)  # request, branch, KV head
    assert (lengths[:, 0] > lengths[:, 1]).all() and (lengths[:, 2] > lengths[:, 1]).all()
    part = [problem.candidates.indices[a:b] for a, b in zip(problem.raw.indptr, problem.raw.indptr[1:], strict=False)]
    assert set(part[0].tolist()) != set(part[2].tolist())


@pytest.mark.parametrize("cell", ["decode/bf16/kv:60+40/branches:3", "prefill/fp32/kv:30+20/q:3+2/branches:2"])
def test_a_backend_gets_requests_once_and_the_lists_branch_after_branch(cell: str) -> None:
    problem, adapter = build(parse(cell)), Seen()
    count = problem.branches
    Launcher(Backend(adapter), "cpu")(problem, RANDOM.inputs(problem))
    assert len(adapter.cases) == count
    for branch, case in enumerate(adapter.cases):
        spec = case.spec
        assert spec.num_branches == count
        assert spec.seq_lens == parse(cell).kv and spec.qo_lens == parse(cell).qo_lens
        assert case.page_table.shape[0] == spec.num_requests
        assert case.kv_indptr.shape == (count * spec.num_rows + 1,)
        assert case.lse.shape == (spec.num_tokens, spec.num_qo_heads, count)
        assert case.gates is not None and case.gates.dtype == torch.float32
        assert case.gates.shape == (spec.num_tokens, spec.num_qo_heads, count)
        assert (case.gates[..., branch] == 1).all() and case.gates.sum() == case.gates[..., branch].sum()
        for b in range(count):
            for row in range(spec.num_rows):
                token, head = divmod(row, spec.list_heads)
                request = spec.token_request[token]
                own = problem.spec.qo_indptr[request * count + b] + token - spec.qo_indptr[request]
                judges = own * spec.list_heads + head
                mine = case.kv_indices[
                    case.kv_indptr[b * spec.num_rows + row] : case.kv_indptr[b * spec.num_rows + row + 1]
                ]
                right = problem.raw.indices[problem.raw.indptr[judges] : problem.raw.indptr[judges + 1]]
                assert mine.tolist() == right.tolist()


def test_a_call_of_one_branch_has_no_gates_and_the_old_shapes() -> None:
    problem, adapter = build(parse("decode/bf16/kv:60+40")), Seen()
    Launcher(Backend(adapter), "cpu")(problem, RANDOM.inputs(problem))
    (case,) = adapter.cases
    assert case.gates is None and case.lse.ndim == 2 and case.spec == problem.spec


def test_what_comes_back_stands_in_the_order_of_the_judges_tokens() -> None:
    problem = build(parse("prefill/fp32/kv:30+20/q:3+2/branches:2"))
    inputs = RANDOM.inputs(problem)
    found = Launcher(Backend(Adapter()), "cpu")(problem, inputs)
    right = forward(problem.spec, inputs, problem.table, problem.candidates)
    assert found.lse is not None
    np.testing.assert_allclose(found.out, right.out, atol=1e-5)
    np.testing.assert_allclose(found.lse, right.lse, atol=1e-5)


@pytest.mark.parametrize(
    "cell", [CELL, "decode/bf16/kv:60+40/map:shared/branches:3", "decode/bf16/kv:100+40/map:alias/branches:2"]
)
def test_poison_stands_in_no_slot_that_any_branch_attends(cell: str) -> None:
    problem = build(parse(cell))
    every = attended(problem.spec, problem.candidates)
    taken = set()
    for row, t in zip(every.row.tolist(), every.t.tolist(), strict=True):
        request = problem.spec.token_request[row // problem.spec.list_heads]
        page, offset = divmod(t, problem.spec.page_size)
        taken.add((int(problem.table.table[request, page]), offset, row % problem.spec.list_heads))
    places = poison(problem, 0)
    poisoned = {(int(problem.pages[page]), offset, head) for page, offset, head in places.slot.tolist()}
    assert not taken & poisoned
    assert len(taken | poisoned) == problem.needed.size


def test_q_is_one_in_all_branches_of_the_drawn_inputs() -> None:
    problem = build(parse("prefill/fp32/kv:30+20/q:3+2/branches:2"))
    q = RANDOM.inputs(problem).q
    np.testing.assert_array_equal(q[:3], q[3:6])
    np.testing.assert_array_equal(q[6:8], q[8:10])
    assert not (q[0] == q[1]).all()


def test_drawn_gates_have_both_signs_and_bits_that_only_fp32_holds() -> None:
    gates = branches.drawn_gates((3, 4, 2), build(parse(CELL)).draw("gates"))
    assert (gates > 0).any() and (gates < 0).any() and len(np.unique(np.abs(gates))) == gates.size
    assert (gates == gates.astype(np.float32)).all()
    for dtype in (torch.bfloat16, torch.float16):
        assert (torch.from_numpy(gates).to(dtype).double().numpy() != gates).mean() > 0.8


def test_a_fold_has_back_what_was_unfolded() -> None:
    spec = build(parse("prefill/fp32/kv:30+20/q:3+2/dropout:10")).spec
    wide = branches.unfolded(replace(spec, query_positions=(4, 5, 6, 1, 2)), 3)
    back = branches.folded(wide, 3)
    assert back == replace(spec, query_positions=(4, 5, 6, 1, 2), num_branches=3)
    sequence = replace(wide, candidate_kind=CandidateKind.SEQUENCE, query_ordinals=tuple(range(wide.num_rows)))
    assert branches.folded(sequence, 3).query_ordinals == tuple(branches.rows_of_lists(wide, 3).tolist())


def test_a_spec_needs_a_branch_and_ordinals_for_all_lists() -> None:
    spec = build(parse("decode/fp32/kv:30")).spec
    with pytest.raises(ValueError, match="num_branches must be at least 1, got 0"):
        replace(spec, num_branches=0)
    with pytest.raises(ValueError, match="query_ordinals must name 4 rows, got 2"):
        replace(spec, num_branches=2, candidate_kind=CandidateKind.SEQUENCE, query_ordinals=(0, 1))


def test_consumers_of_validated_lists_get_those_of_their_branch() -> None:
    class Validated(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = replace(self.capabilities, consumes=Consumes.VALIDATED)

    adapter = Validated()
    record = judged(adapter, "decode/bf16/kv:60+40/pattern:duplicates/branches:2")
    assert record.verdict is Verdict.PASS, record.sentence
    assert all((case.kv_indices >= 0).all() for case in adapter.cases)


# --- problems made of others


def test_problems_of_different_branches_share_no_launch() -> None:
    problem = build(parse(CELL))
    with pytest.raises(ValueError, match="problems of 1, 2 branches cannot share a launch"):
        join([problem, last_query(problem, 1, "x")])
    assert join([problem, problem]).num_calls == 4


def test_some_requests_of_a_call_keep_all_their_branches() -> None:
    problem = build(parse("decode/fp32/kv:60+40+20/branches:2"))
    inputs = RANDOM.inputs(problem)
    variant = chosen(problem, inputs, [2, 0])
    assert variant.problem.spec.seq_lens == (20, 20, 60, 60)
    assert variant.tokens.tolist() == [4, 5, 0, 1]
    launcher = Launcher(Backend(Adapter()), "cpu")
    whole, some = launcher(problem, inputs), launcher(variant.problem, variant.inputs)
    np.testing.assert_allclose(some.out, whole.out[variant.tokens], atol=1e-6)


def test_other_contents_of_the_same_memory_are_legal_and_have_other_gates() -> None:
    problem = build(parse("decode/fp32/kv:60+9/branches:3"))
    case = Launcher(Backend(Adapter()), "cpu").case(problem, RANDOM.inputs(problem))
    memory = Memory(case, torch.from_numpy(problem.pages), {}, lambda: None)
    found = others(memory, frozenset(), Capabilities().index_space)
    assert case.gates is not None and not torch.equal(found["gates"], case.gates)
    rows = torch.repeat_interleave(torch.arange(case.spec.num_lists), case.kv_indptr.diff())
    lengths = torch.tensor(case.spec.seq_lens)[
        torch.tensor(case.spec.token_request)[rows % case.spec.num_rows // case.spec.list_heads]
    ]
    assert (found["kv_indices"] < lengths).all() and (found["kv_indices"] >= 0).all()
    assert not torch.equal(found["kv_indices"], case.kv_indices)


def test_requests_are_named_with_their_branch_in_rows_and_without_elsewhere() -> None:
    words = "row (request 5, query 0, KV head 1): beside request 4, token 3; (request 3, last query, KV head 0)"
    assert branches.renamed(words, 2) == (
        "row (request 2, branch 1, query 0, KV head 1): beside request 2, token 3; "
        "(request 1, branch 1, last query, KV head 0)"
    )
    assert branches.renamed(words, 1) == words


# --- right backends, and wrong ones

RIGHT = {
    "split": ("decode/bf16/kv:60+40/splits:2/tile:16/branches:2", {}),
    "queries": ("prefill/fp32/kv:40+30/q:3+2/causal:bottom_right/branches:2", {}),
    "epilogue": ("decode/bf16/kv:60+40/epilogue:silu/branches:3", {}),
    "cast": ("decode/fp16/kv:60+40/epilogue:cast/branches:2", {"fraction_bits": 25}),
    "dropout": ("decode/fp32/kv:60+40/dropout:30/branches:2", {}),
    "sequence": ("decode/fp16/kv:60+40/pos:rope/kind:sequence/branches:3", {}),
    "multiset": ("decode/bf16/kv:60+40/kind:multiset/branches:2", {"order": 3, "tile": 16}),
    "codes": ("decode/bf16/kv:60+40/kcodec:int8/vcodec:int8/scales:page/branches:2", {}),
    "reuse": ("decode/bf16/kv:60+40/exec:reuse/branches:3", {}),
    "aliases": ("decode/bf16/kv:100+40/map:alias/branches:2", {}),
    "query heads": ("decode/bf16/kv:60+40/lists:query_head/branches:2", {}),
    "no keys": ("decode/bf16/kv:60+0+5/cap:20/sink:on/branches:3", {}),
    "partial fp16": ("decode/fp32/kv:60+40/branches:2", {"partial": DType.FP16}),
    "partial bf16": ("decode/bf16/kv:90/splits:2/tile:16/branches:3", {"partial": DType.BF16}),
    "empty": ("decode/bf16/kv:60+40/pattern:empty/branches:2", {}),
    "shared lists": ("prefill/bf16/kv:60+40/q:4+4/causal:bottom_right/format:tiers/qblock:4/branches:2", {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_backend_of_branches_passes(name: str) -> None:
    cell, changes = RIGHT[name]
    arithmetic = {dtype: replace(Arithmetic(p=dtype, out=dtype), **changes) for dtype in DType}
    record = judged(Adapter(arithmetic), cell)
    assert record.verdict is Verdict.PASS, record.sentence
    assert record.gates[Gate.MERGE] == "pass"
    assert 0 <= record.use[Gate.MERGE] <= 1
    assert record.gates[Gate.GRADIENTS] == "not applicable"


@pytest.mark.parametrize("cell", [CELL, "prefill/fp32/kv:40+30/q:3+2/causal:bottom_right/branches:3"])
def test_the_dense_backend_serves_branches_and_is_judged(cell: str) -> None:
    record = judged(sdpa.Adapter(), cell)
    assert record.verdict is Verdict.FALLBACK, record.sentence
    assert Gate.MERGE in record.use


def test_a_kernel_that_stores_branches_in_another_format_than_it_declares_is_caught() -> None:
    class Lying(Adapter):
        def __init__(self) -> None:
            super().__init__({dtype: Arithmetic(p=dtype, out=dtype, partial=DType.BF16) for dtype in DType})
            honest = self.capabilities.numerics
            self.capabilities = replace(
                self.capabilities, numerics={d: replace(n, partial=DType.FP32) for d, n in honest.items()}
            )

    record = judged(Lying(), "decode/fp32/kv:60+40/branches:2")
    assert record.verdict is Verdict.FAIL


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_about_branches_is_caught_at_its_gate_and_named(name: str) -> None:
    fault = FAULTS[name]
    record = judged(seed(fault)(), fault.problem)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate == fault.outputs[1], record.sentence
    assert re.search(fault.place, record.sentence), record.sentence
    assert "branch" in record.finding.place


@pytest.mark.parametrize(("p", "verdict"), [(DType.FP32, "fail"), (DType.FP16, "fail"), (DType.BF16, "pass")])
def test_gates_in_bf16_are_a_fault_only_where_the_bound_is_narrower_than_their_rounding(p: DType, verdict: str) -> None:
    """P in bf16 may err by as much in every branch."""
    faulty = seed(FAULTS["gates_in_bf16"])({dtype: Arithmetic(p=p, out=dtype) for dtype in DType})
    assert judged(faulty, CELL).verdict == verdict


def test_where_rows_are_too_many_the_sum_is_judged_in_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "EXACT_EDGES", 300)
    cell = "prefill/fp32/kv:50+30/q:6+4/causal:bottom_right/branches:2"
    record = judged(Adapter(), cell)
    assert record.verdict is Verdict.PASS, record.sentence
    assert len(record.samples["exact"].rows) < 20
    assert record.use[Gate.MERGE] > 0
    record = judged(seed(FAULTS["gates_of_the_head_before"])(), cell)
    assert record.finding is not None and record.finding.gate is Gate.MERGE


def test_locate_names_request_and_branch_and_the_sum() -> None:
    problem = build(parse("decode/bf16/kv:60+40/branches:3"))
    for name, gate, words in (
        ("lists_of_the_first_branch", Gate.OUT, "row (request 0, branch 1, query 0, KV head 0)"),
        ("gates_of_the_head_before", Gate.MERGE, "row (request 0, all branches, query 0, KV head 0)"),
    ):
        found = locate(Launcher(Backend(seed(FAULTS[name])()), "cpu"), problem)
        assert found is not None
        told = branches.told(found.finding, 3)
        assert told is not None and told.gate is gate and words in told.sentence
    assert locate(Launcher(Backend(Adapter()), "cpu"), problem) is None


def test_an_adapter_that_does_not_look_at_the_field_fails() -> None:
    class Unaware(Adapter):
        def run(self, case: Case, plan: object = None) -> Outputs:
            one = replace(case, spec=replace(case.spec, num_branches=1), gates=None)
            return super().run(replace(one, lse=case.lse[..., 0]))

    record = judged(Unaware(), CELL)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None and record.finding.gate is Gate.CONTRACT


def test_a_refusal_of_branches_is_asked_by_the_folded_spec() -> None:
    asked: list[AttentionSpec] = []

    class Refusing(Adapter):
        def support(self, spec: AttentionSpec) -> Support:
            asked.append(spec)
            return refused("not yet: gated branches") if spec.num_branches > 1 else super().support(spec)

        def run(self, case: Case, plan: object = None) -> Outputs:
            raise AssertionError

    support = Launcher(Backend(Refusing()), "cpu").support(build(parse(CELL)).spec, 2)
    assert support.status == "refused" and asked[0].num_branches == 2
    assert Paged().support(asked[0]).status == "native"


def test_promised_bits_are_held_whatever_else_is_in_the_batch() -> None:
    levels = frozenset(Determinism) - {Determinism.SCHEDULE}

    class Promising(Adapter):
        """lse is rounded so coarsely that no order of its sum shows: wrong, but the same bits."""

        def __init__(self) -> None:
            super().__init__()
            self.capabilities = replace(self.capabilities, determinism={"lse": levels})

        def run(self, case: Case, plan: object = None) -> Outputs:
            found = super().run(case, plan)
            case.lse.copy_((case.lse * 64).round() / 64)
            return found

    launcher = Launcher(Backend(Promising()), "cpu")
    problem = build(parse(CELL))
    (first, *_) = copies(problem, launcher.backend.numerics(problem.spec.dtype, problem.hints, 2))
    assert Bits(launcher, first, launcher(problem, first.inputs)).finding() is None


# --- index and lists


class Listing(Adapter):
    """The model, with the lists that it makes; `order` of the branches."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def normalize(self, case: Case) -> Normalized:
        rows = []
        for branch in range(case.spec.num_branches):
            for row in range(case.spec.num_rows):
                at = (branch + self.step) % case.spec.num_branches * case.spec.num_rows + row
                some = case.kv_indices[case.kv_indptr[at] : case.kv_indptr[at + 1]]
                rows.append(torch.unique(some[some >= 0]).long())
        indptr = torch.tensor([0, *np.cumsum([len(x) for x in rows]).tolist()])
        return Normalized(indptr, torch.cat(rows))


def test_the_lists_of_all_branches_are_judged_item_by_item() -> None:
    cell = "index/fp32/kv:60+40/q:2+1/branches:2"
    assert judged(Listing(0), cell).verdict is Verdict.PASS
    record = judged(Listing(1), cell)
    assert record.finding is not None and record.finding.gate is Gate.INDEX
    assert "request 0, branch 0, query 0" in record.sentence


def test_train_has_one_branch_and_costs_grow_with_branches() -> None:
    with pytest.raises(CellError, match="train needs branches:1"):
        parse("train/fp32/kv:40/q:2/branches:2")
    assert predicted(parse(CELL)) == 4 * predicted(parse("decode/bf16/kv:60+40"))
