"""Each breach of the contract of backward is named by the gate of gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_cells import (
    CELL,
    Bent,
    judged,
)

from sacts.conformance.adapter import Case, Gradients, Outputs, Refused, Saved
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.sdpa import Adapter as Dense
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType
from sacts.reports.records import Gate, Verdict, blank, decode, encode


def spoil(case: Case, found: Gradients, name: str, at: int) -> Gradients:
    buffer = getattr(found, name)
    buffer.view(-1).as_strided((1,), (1,), buffer.storage_offset() + at).fill_(1)
    return found


def own(found: Gradients, fill: bool) -> Gradients:
    d_k = torch.empty_like(found.d_k)
    d_k[:] = found.d_k if fill else d_k
    return replace(found, d_k=d_k)


BREACHES: dict[str, tuple[Callable[[Case, Gradients], Any], str]] = {
    "returns a tuple": (lambda c, g: (g.d_q, g.d_k), "backward must return Gradients, got tuple"),
    "no tensor": (lambda c, g: replace(g, d_q=g.d_q.numpy()), "d_q must be a tensor, got ndarray"),
    "shape": (lambda c, g: replace(g, d_v=g.d_v[1:]), r"d_v has shape \(\d+, 16, 2, 32\), expected \(\d+, 16, 2, 32\)"),
    "dtype": (lambda c, g: replace(g, d_k=g.d_k.half()), "d_k has dtype torch.float16, expected torch.float32"),
    "a sink": (lambda c, g: replace(g, d_sink=torch.zeros(4)), "d_sink must be None: the spec has no sink logits"),
    "before d_q": (lambda c, g: spoil(c, g, "d_q", -2), "wrote outside d_q: 2 elements before it"),
    "behind d_v": (lambda c, g: spoil(c, g, "d_v", g.d_v.numel()), "wrote outside d_v: 1 elements behind it"),
    "inputs": (lambda c, g: c.q.add_(1) is None or g, "the launch changed its input q"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_each_breach_of_the_contract_of_backward_is_named(name: str) -> None:
    bend, words = BREACHES[name]
    record = judged(Bent(bend), CELL)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is Gate.CONTRACT
    assert re.search(words, record.sentence), record.sentence


@pytest.mark.parametrize("name", ["saved.out", "saved.lse", "d_out", "d_lse"])
def test_what_is_fed_must_not_be_changed(name: str) -> None:
    adapter = Bent(lambda c, g: adapter.given[name].add_(1) is None or g)
    assert f"the launch changed its input {name}" in judged(adapter, CELL).sentence


def test_an_element_of_d_q_that_is_never_written_is_named() -> None:
    class Forgetful(Adapter):
        def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
            made = case.gradients
            assert made is not None
            kept = made.d_q[1, 2].clone()
            found = super().backward(case, saved, d_out, d_lse)
            found.d_q[1, 2] = kept
            return found

    record = judged(Forgetful(), CELL)
    assert "row (request 1, query 0, KV head 1), query head 2: d_q was never written (32 of " in record.sentence


def test_own_tensors_are_accepted_when_every_element_is_written() -> None:
    assert judged(Bent(lambda c, g: own(g, fill=True)), CELL).verdict is Verdict.PASS
    assert not torch.are_deterministic_algorithms_enabled()


def test_own_tensors_must_hold_zeros_where_no_row_attends() -> None:
    record = judged(Bent(lambda c, g: own(g, fill=False)), CELL)
    assert "which no row attends: no request's page, KV head 0, channel 0) is nan, allowed 0 to 0" in record.sentence


def test_a_page_of_nobody_must_keep_its_zero() -> None:
    class Astray(Dense):
        def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
            found = super().backward(case, saved, d_out, d_lse)
            found.d_v[0] = 1.0
            return found

    record = judged(Astray(), CELL)
    assert (record.verdict, record.finding and record.finding.gate) == (Verdict.FAIL, Gate.GRADIENTS)
    assert "d_v (physical page 0 offset 0, which no row attends: no request's page, KV head 0, channel 0) is 1" in (
        record.sentence
    )


def test_a_page_without_data_must_keep_its_zero_in_a_pool_beyond_32_bits_too() -> None:
    def astray(case: Case, found: Gradients) -> Gradients:
        found.d_k[1] = 1.0
        return found

    record = judged(Bent(astray), "decode/fp16/kv:70+30/dim:32/map:high")
    assert (record.verdict, record.finding and record.finding.gate) == (Verdict.FAIL, Gate.CONTRACT)
    assert record.sentence == "d_k of physical page 1 is not 0, but the page holds no key of any request"


def test_a_plan_is_made_for_backward_too() -> None:
    class Planned(Adapter):
        def plan(self, case: Case) -> str:
            return "forward" if case.gradients is None else "backward"

        def run(self, case: Case, plan: Any = None) -> Outputs:
            assert plan == "forward"
            return super().run(case)

        def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
            assert plan == "backward"
            return super().backward(case, saved, d_out, d_lse)

    assert judged(Planned(), CELL).verdict is Verdict.PASS


def test_what_stands_where_no_row_attends_must_not_reach_a_gradient() -> None:
    class Leaking(Adapter):
        """P of a masked slot is 0, and 0 * NaN is NaN."""

        def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
            found = super().backward(case, saved, d_out, d_lse)
            found.d_q[0] += 0.0 * case.v_cache[case.page_table[0, 0]].sum()
            return found

    record = judged(Leaking(), "decode/fp32/kv:40/dim:32/pattern:one")
    assert record.verdict is Verdict.FAIL
    assert record.sentence.endswith("only where poison stands in slots that no row attends")


def refuse(case: Case, found: Gradients) -> Gradients:
    raise Refused("no backward for head_dim 32")


def fall(case: Case, found: Gradients) -> Gradients:
    raise IndexError("out of range")


def test_a_backward_that_refuses_or_raises_says_so() -> None:
    refused = judged(Bent(refuse), CELL)
    assert (refused.verdict, refused.finding and refused.finding.gate) == (Verdict.FAIL, Gate.CONTRACT)
    assert refused.sentence == "backward refused (no backward for head_dim 32), but support declared native"
    raised = judged(Bent(fall), CELL)
    assert raised.verdict is Verdict.ERROR
    assert raised.sentence.startswith("backward(case) raised IndexError: out of range")


def test_without_a_backward_the_gate_is_not_offered() -> None:
    class Forward:
        def run(self, case: Case, plan: Any = None) -> Outputs:
            return Dense().run(case, plan)

        support, capabilities = Dense().support, Dense.capabilities

    record = judged(Forward(), CELL)
    assert (record.verdict, record.gates[Gate.GRADIENTS]) == (Verdict.FALLBACK, "not offered")
    assert Gate.GRADIENTS not in record.use
    assert record.probes["gradients"].said == "not applicable"


def test_what_has_no_bound_is_untrusted_and_never_passes() -> None:
    class Vague(Adapter):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = replace(
                self.capabilities, numerics={dtype: Numerics(p=dtype, out=dtype, u_exp=0.6) for dtype in DType}
            )

        def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
            found = super().backward(case, saved, d_out, d_lse)
            for each in (found.d_q, found.d_k, found.d_v):
                each.zero_()
            return found

    record = judged(Vague(), CELL)
    assert record.gates[Gate.GRADIENTS] == "untrusted"
    assert record.verdict is Verdict.UNTRUSTED
    assert record.sentence == "no gradient of this case has a bound that would reject zeros"
    assert record.probes["gradients"].said == "untrusted"
    assert "elements have no bound" in record.probes["gradients"].rows


def test_records_of_the_older_shape_are_still_read() -> None:
    record = blank("x", "cpu", CELL, 0, Verdict.PASS)
    old = encode(record).replace(b'"gradients"', b'"elsewhere"')
    assert decode(old).gates.get(Gate.GRADIENTS) is None
