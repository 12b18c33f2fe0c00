"""The index gate: lists that a backend makes of raw ones, item by item; faults that nothing else shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sacts.conformance.adapter import Backend, Case, Normalized
from sacts.conformance.build import build
from sacts.conformance.contract import ContractBroken
from sacts.conformance.gates.index import judge_index
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices import tiers
from sacts.matrices.cell import parse
from sacts.reference.spec import CandidateKind
from sacts.reports.records import Gate, Verdict

CELL = parse("prefill/bf16/kv:65+20/q:4+2")


def right(case: Case, slots: bool = False) -> Normalized:
    """By torch, row by row."""
    spec, rows = case.spec, []
    for row in range(spec.num_rows):
        some = case.kv_indices[case.kv_indptr[row] : case.kv_indptr[row + 1]]
        rows.append(torch.unique(some[some >= 0]).long())
    indptr = torch.tensor([0, *torch.tensor([len(x) for x in rows]).cumsum(0).tolist()])
    indices = torch.cat(rows)
    where = None
    if slots:
        request = torch.tensor(spec.token_request).repeat_interleave(spec.num_kv_heads).repeat_interleave(indptr.diff())
        page = case.page_table[request, indices * spec.block_size // spec.page_size].long()
        where = page * spec.page_size + indices * spec.block_size % spec.page_size
    return Normalized(indptr, indices, where)


class Listing(Adapter):
    """The model, with lists made by `make`."""

    def __init__(self, make: Callable[[Case], Normalized]) -> None:
        super().__init__()
        self.make = make

    def normalize(self, case: Case) -> Normalized:
        return self.make(case)


def changed(change: Callable[[Normalized], Normalized]) -> Callable[[Case], Normalized]:
    return lambda case: change(right(case, slots=True))


def without_last(made: Normalized) -> Normalized:
    indptr = made.kv_indptr.clone()
    indptr[-1] -= 1
    return replace(made, kv_indptr=indptr)


def repeated(made: Normalized) -> Normalized:
    indices = made.kv_indices.clone()
    indices[1] = indices[0]
    return replace(made, kv_indices=indices, slots=None)


def beyond(made: Normalized) -> Normalized:
    indices = made.kv_indices.clone()
    indices[0] = 64 if 64 not in indices[: made.kv_indptr[1]] else 1000
    return replace(made, kv_indices=indices, slots=None)


def misplaced(made: Normalized) -> Normalized:
    assert made.slots is not None
    slots = made.slots.clone()
    slots[2] += 1
    return replace(made, slots=slots)


FAULTS = {
    "is missing": without_last,
    "stands 2 times, expected 1": repeated,
    "which is no candidate": beyond,
    "is at slot": misplaced,
}


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("cell", tiers.load(tiers.path_of("smoke")), ids=lambda cell: cell.id)
def test_right_lists_pass(cell: object, slots: bool) -> None:
    problem = build(cell, 0)  # type: ignore[arg-type]
    case = Launcher(Backend(Adapter()), "cpu").case(problem, RANDOM.inputs(problem))
    assert judge_index(problem, right(case, slots)) is None


@pytest.mark.parametrize("words", FAULTS)
def test_wrong_lists_fail_though_the_outputs_are_right(words: str) -> None:
    record = judge(Launcher(Backend(Listing(changed(FAULTS[words]))), "cpu"), "listing", CELL)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is Gate.INDEX
    assert words in record.sentence
    assert record.gates[Gate.COUNT] == "not reached"
    assert judge(Launcher(Backend(Adapter()), "cpu"), "model", CELL).verdict is Verdict.PASS


def test_a_backend_without_lists_says_so() -> None:
    record = judge(Launcher(Backend(Adapter()), "cpu"), "model", CELL)
    assert record.gates[Gate.INDEX] == "not offered"
    record = judge(Launcher(Backend(Listing(right)), "cpu"), "listing", CELL)
    assert (record.verdict, record.gates[Gate.INDEX]) == (Verdict.PASS, "pass")


def test_the_order_of_a_sequence_counts() -> None:
    problem = build(CELL, 0)
    problem = replace(problem, spec=replace(problem.spec, candidate_kind=CandidateKind.SEQUENCE))
    case = Launcher(Backend(Adapter()), "cpu").case(problem, RANDOM.inputs(problem))
    made = right(case)
    assert judge_index(problem, made) is None
    indices = made.kv_indices.clone()
    indices[[0, 1]] = indices[[1, 0]]
    finding = judge_index(problem, replace(made, kv_indices=indices))
    assert finding is not None
    assert "entry 0 is token" in finding.sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: replace(made, kv_indptr=made.kv_indptr[:-1]), "is no CSR"),
        (lambda made: replace(made, kv_indptr=made.kv_indptr + 1), "is no CSR"),
        (lambda made: replace(made, slots=made.slots[1:]), "slots has"),
    ],
)
def test_what_is_no_csr_breaks_the_contract(change: Callable[[Normalized], Normalized], words: str) -> None:
    problem = build(CELL, 0)
    case = Launcher(Backend(Adapter()), "cpu").case(problem, RANDOM.inputs(problem))
    with pytest.raises(ContractBroken, match=words):
        judge_index(problem, change(right(case, slots=True)))
