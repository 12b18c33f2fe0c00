"""The gate of gradients: a right backward passes on every kind of cell, each seeded fault fails there and is named, and
each breach of the contract of backward is named.

`SACTS_GRADIENTS=20 pytest -s tests/test_gradient_gate.py -k campaign` judges so many replicates of every smoke cell
under every arithmetic, and prints the largest observed / allowed of each probe.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from term_problems import BASE, SPECS

from sacts.conformance.adapter import Backend, Case, Gradients, KVLayout, LseBase, Outputs, Refused, Saved
from sacts.conformance.audit import audit
from sacts.conformance.build import Problem, build
from sacts.conformance.contract import ContractBroken
from sacts.conformance.gradients import GradientVerdict, judge_gradients
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.gradients import copies
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.faults import ModelFault, model_catalogue, patched, seed
from sacts.kernels_under_test.sdpa import Adapter as Dense
from sacts.matrices import tiers
from sacts.matrices.cell import parse
from sacts.reference.numerics import Numerics
from sacts.reference.spec import CandidateKind, DType
from sacts.reports.records import Gate, Record, Verdict, blank, decode, encode

REPLICATES = int(os.environ.get("SACTS_GRADIENTS", "0"))
GRADIENTS = {"d_q", "d_k", "d_v", "d_sink"}
FAULTS = [
    fault
    for fault in model_catalogue().values()
    if set(fault.outputs) <= GRADIENTS and SPECS[fault.problem].candidate_kind is CandidateKind.SET  # as in every cell
]
RAGGED = "prefill/{}/kv:150+45/q:5+3/dim:32/map:shared/causal:bottom_right"
CELL = "decode/fp32/kv:40+0+21/dim:32"
TERMS = ("rope", "logits_soft_cap", "alibi_slopes", "buckets", "sink_logits", "dropout")

ROW, KEY = r"request \d, query \d, head \d", r"\(request \d, token \d+ .*, KV head \d, channel \d+\) is .*"
# What the sentence must say beside the output: the element is always named, the row where it is an edge's fault.
PLACES = {
    "delta_missing": rf"d_k {KEY}: in every edge of {ROW} D is not subtracted",
    "delta_once_per_value_tile": r"D is subtracted twice \(D is ",
    "delta_of_half_the_channels": rf"in every edge of {ROW} dS is off by .* P, as with D .* instead of",
    "gradient_of_lse_ignored": rf"in every edge of {ROW} d_lse is not added",
    "alias_not_summed": rf"d_v {KEY}: the edge of {ROW} is missing",
    "d_k_without_scale": rf"every edge of {ROW} counts 7\.54\d? times",
    "soft_cap_derivative_missing": rf"edge of {ROW} counts 1\.\d+ times",
    "rotation_of_d_q_not_undone": rf"d_q of {ROW} is turned by a wrong angle",
    "rotation_of_d_k_not_undone": rf"the edge of {ROW} is turned by a wrong angle",
    "rotation_undone_by_the_first_reference": rf"the edge of {ROW} is turned by a wrong angle",
    "dropout_missing_in_d_v": rf"the edge of {ROW} is dropped, yet gives",
    "dropout_missing_in_d_p": rf"the edge of {ROW} counts ",
    "dropout_drawn_anew": rf"the edge of {ROW} is dropped, yet gives",
    "sink_gradient_of_the_wrong_sign": rf"d_sink \(query head \d\) .*: {ROW} alone gives",
    "weights_without_the_sink": rf"every edge of {ROW} counts .* as with another lse",
    "backward_without_alibi": rf"the edge of {ROW} counts .* times",
    "backward_without_buckets": rf"the edge of {ROW} counts .* times",
    "keys_of_the_first_list_only": r"edge of request \d, query \d, head [13] (is missing|counts 0 times)",
    "backward_k_rounded_twice": r"d_q \(request \d, .*, channel \d+\) is .*every edge of the row is right",
    "backward_first_head_only": rf"every edge of {ROW} counts 0 times",
    "d_s_in_half_of_its_bits": rf"d_k {KEY}: the edge of {ROW} counts \d\.\d+ times",
}


def problem_of(cell: str, spec_name: str = "plain") -> Problem:
    """The problem of a cell, with the terms of a spec that no cell asks for yet."""
    problem = build(replace(parse(cell), lists=SPECS[spec_name].lists.value))
    terms = {name: getattr(SPECS[spec_name], name) for name in TERMS}
    terms = {name: value for name, value in terms.items() if value != getattr(BASE, name)}
    if "dropout" in terms:
        terms["dropout"] = replace(terms["dropout"], request_uids=tuple(range(5, 5 + problem.spec.num_requests)))
    return replace(problem, spec=replace(problem.spec, **terms))


def verdict_of(adapter: Any, cell: str, spec_name: str = "plain") -> GradientVerdict:
    return judge_gradients(Launcher(Backend(adapter), "cpu"), problem_of(cell, spec_name))


# --- right backends

ARITHMETICS = {
    "P in the dtype": {},
    "FP32 P": {"p": DType.FP32},
    "tensor cores, cubic exp2": {"exp2": "cubic", "fraction_bits": 25, "tile": 32},
    "tensor cores of 24 bits, truncated exp2, rows in another order": {
        "exp2": "truncated",
        "fraction_bits": 24,
        "order": 7,
    },
}


def emulation(how: dict[str, Any]) -> Adapter:
    return Adapter({dtype: Arithmetic(**{"p": dtype} | how | {"out": dtype}) for dtype in DType})


@pytest.mark.parametrize("spec_name", ["plain", "RoPE", "soft cap", "ALiBi", "sink", "dropout", "lists of query heads"])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("how", ARITHMETICS.values(), ids=ARITHMETICS)
def test_a_right_backward_passes(how: dict[str, Any], dtype: DType, spec_name: str) -> None:
    found = verdict_of(emulation(how), RAGGED.format(dtype), spec_name)
    assert (found.said, found.finding) == ("pass", None)
    assert found.use is not None
    assert 1e-3 < found.use <= 1


@pytest.mark.parametrize(
    "cell",
    [
        "decode/bf16/kv:33+0+5/pattern:duplicates",
        "decode/fp16/kv:40+21/pattern:empty",
        "decode/fp16/kv:70+30/map:high",
        "decode/fp16/kv:100/block:16/cache:strided/splits:2",
        "decode/bf16/kv:65/heads:6-2/dim:32/values:huge",
        "decode/fp32/kv:40/map:identity/cache:span",
    ],
)
@pytest.mark.parametrize("adapter", [Adapter, Dense])
def test_a_right_backward_passes_whatever_the_cell(adapter: type, cell: str) -> None:
    found = verdict_of(adapter(), cell)
    assert (found.said, found.finding) == ("pass", None)
    assert found.probes["gradients"].said == "judged"


def test_a_sink_whose_weight_is_below_the_smallest_normal_number_may_be_flushed() -> None:
    """Logits of 100 beside the sink: its gradient is about 1e-45, which a kernel may give as 0."""
    found = verdict_of(Adapter(), "decode/bf16/kv:130/heads:16-2/splits:8/tile:16/values:huge/sink:on")
    assert (found.said, found.finding) == ("pass", None)


@pytest.mark.parametrize("how", ARITHMETICS.values(), ids=ARITHMETICS)
def test_no_cell_of_a_campaign_raises_an_alarm(how: dict[str, Any]) -> None:
    """A tenth of the cells, once, where no campaign is asked for."""
    launcher, largest, said, alarms = Launcher(Backend(emulation(how)), "cpu"), dict[str, float](), Counter[str](), []
    cells = tiers.load(tiers.path_of("smoke"))
    for replicate in range(max(REPLICATES, 1)):
        for cell in cells if REPLICATES else cells[::10]:
            found = judge_gradients(launcher, build(cell, replicate))
            said[found.said] += 1
            if found.finding:
                alarms.append(f"{cell.id}, replicate {replicate}: {found.finding.sentence}")
            for name, probe in found.probes.items():
                largest[name] = max(largest.get(name, 0.0), probe.use)
    print(f"\n{dict(said)}, largest observed / allowed {largest}")
    assert not alarms, alarms[:3]


class OtherConventions(Adapter):
    """The model behind pages of another order, an lse of base 2 and FP32 gradients."""

    def __init__(self) -> None:
        super().__init__()
        numerics = {dtype: replace(each, gradient=DType.FP32) for dtype, each in self.capabilities.numerics.items()}
        self.capabilities = replace(
            self.capabilities,
            kv_layout=KVLayout.HND,
            lse_base=LseBase.TWO,
            empty_lse=0.0,
            numerics=numerics,
            d_lse=False,
        )

    def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
        assert d_lse is None
        own = self.inner(case)
        lse = torch.where(saved.lse == 0.0, float("-inf"), saved.lse * 0.6931471805599453)
        found = super().backward(own, Saved(saved.out, lse), d_out, None)
        assert case.gradients is not None
        return Gradients(found.d_q, found.d_k.transpose(1, 2).contiguous(), found.d_v.transpose(1, 2).contiguous())

    def inner(self, case: Case) -> Case:
        made = case.gradients
        assert made is not None
        nhd = Gradients(made.d_q, *(torch.zeros_like(x.transpose(1, 2).contiguous()) for x in (made.d_k, made.d_v)))
        k, v = (x.transpose(1, 2) for x in (case.k_cache, case.v_cache))
        return replace(case, k_cache=k, v_cache=v, gradients=nhd)


def test_declared_conventions_are_converted() -> None:
    found = verdict_of(OtherConventions(), "decode/bf16/kv:150+9+33/dim:32")
    assert (found.said, found.finding) == ("pass", None)


# --- seeded faults


@cache
def adapter_of(name: str) -> Any:
    return importlib.import_module(f"{patched(model_catalogue()[name], 'emulation')}.adapter").Adapter


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_of_backward_fails_at_the_gate_of_gradients_and_is_named(
    fault: ModelFault, dtype: DType
) -> None:
    found = verdict_of(adapter_of(fault.name)(), RAGGED.format(dtype), fault.problem)
    assert found.said == "fail"
    assert found.finding is not None
    assert found.finding.gate is Gate.GRADIENTS
    assert found.finding.place.split(" ")[0] in fault.outputs
    assert re.search(PLACES[fault.name], found.finding.sentence), found.finding.sentence


def test_what_lies_before_the_gradients_is_not_blamed_for_them() -> None:
    record = judged(adapter_of("delta_missing")(), "decode/bf16/kv:60/dim:32")
    assert {gate for gate, said in record.gates.items() if said == "fail"} == {Gate.GRADIENTS}
    assert (record.gates[Gate.COUNT], record.gates[Gate.MERGE]) == ("pass", "not applicable")
    assert record.use[Gate.GRADIENTS] > 1
    spoilt = judged(adapter_of("dropout_by_place_in_the_batch")(), "decode/bf16/kv:60/dim:32")
    assert spoilt.gates[Gate.GRADIENTS] == "pass"  # a fault of dropout alone: no cell asks for it


def test_the_audit_finds_every_plain_fault_caught_and_named_in_cells() -> None:
    """Through `judge`, as `sacts audit` compares records; forward is right, so no earlier gate is named."""
    plain = [replace_named(fault) for fault in FAULTS if fault.problem == "plain"]
    records = [judged(adapter_of(fault.name)(), RAGGED.format("bf16"), fault.adapter) for fault in plain]
    outcomes = audit(plain, records)
    assert len(outcomes) == 8
    assert [outcome.fault.name for outcome in outcomes if not outcome.caught] == []


class Fed(Adapter):
    """The model fed something else than it should read, or with its gradients changed."""

    def __init__(
        self,
        feed: Callable[[Saved, Any, Any], tuple[Saved, Any, Any]] = lambda *given: given,
        bend: Callable[[Case, Gradients], Gradients] = lambda case, found: found,
    ) -> None:
        super().__init__()
        self.feed, self.bend = feed, bend

    def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
        return self.bend(case, super().backward(case, *self.feed(saved, d_out, d_lse)))


def lost_query(saved: Saved, d_out: Any, d_lse: Any) -> tuple[Saved, Any, Any]:
    d_out, d_lse = d_out.clone(), d_lse.clone()
    d_out[3], d_lse[3] = 0.0, 0.0
    return saved, d_out, d_lse


def swapped_rows(case: Case, found: Gradients) -> Gradients:
    page = int(case.page_table[0, 0])
    found.d_k[page, [2, 5]] = found.d_k[page, [5, 2]].clone()
    return found


def less(case: Case, found: Gradients) -> Gradients:
    found.d_k.mul_(0.99)
    return found


# The faults of GATES.md section 5 that the catalogue does not hold, in the words that name them.
OTHERS: dict[str, tuple[Fed, str]] = {
    "a query is lost": (Fed(lost_query), rf"d_v {KEY}: every edge of request 0, query 3, head \d counts 0 times"),
    "lse of the row before": (
        Fed(lambda saved, d_out, d_lse: (replace(saved, lse=saved.lse.roll(1, 0)), d_out, d_lse)),
        rf"d_v {KEY}: every edge of {ROW} counts .* times: P is e\^.* times as large, as with another lse",
    ),
    "lse without a split": (
        Fed(lambda saved, d_out, d_lse: (replace(saved, lse=saved.lse - 0.3), d_out, d_lse)),
        rf"d_v {KEY}: every edge of {ROW} counts 1\.3\d+ times: P is e\^0\.\d+ times as large",
    ),
    "D of another head": (
        Fed(lambda saved, d_out, d_lse: (replace(saved, out=saved.out.roll(1, 1)), d_out, d_lse)),
        rf"d_k {KEY}: in every edge of {ROW} dS is off by .* P, as with D .* instead of ",
    ),
    "two keys exchanged": (Fed(bend=swapped_rows), r"what belongs (to|here stands at) request 0, token [25] at"),
    "d_k 1 % too small": (Fed(bend=less), rf"d_k {KEY}: (every|the) edge of {ROW} counts 0\.9[89]\d* times"),
}


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("name", OTHERS)
def test_a_fault_of_the_detection_table_is_caught_and_named(name: str, dtype: DType) -> None:
    adapter, words = OTHERS[name]
    found = verdict_of(adapter, f"prefill/{dtype}/kv:150+45/q:5+3/dim:32/causal:bottom_right")
    assert found.finding is not None
    assert re.search(words, found.finding.sentence), found.finding.sentence


class Catalogued:
    """A fault of the model as the audit reads one."""

    def __init__(self, fault: ModelFault) -> None:
        self.name = self.adapter = fault.name
        self.gates, self.place, self.verdict = ("gradients",), PLACES[fault.name], "fail"


def replace_named(fault: ModelFault) -> Catalogued:
    return Catalogued(fault)


def judged(adapter: Any, cell: str, name: str = "x") -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), name, parse(cell))


# --- the contract


class Bent(Adapter):
    """The model with its gradients bent."""

    def __init__(self, bend: Callable[[Case, Gradients], Any]) -> None:
        super().__init__()
        self.bend = bend

    def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Any:
        self.given = {"saved.out": saved.out, "saved.lse": saved.lse, "d_out": d_out, "d_lse": d_lse}
        return self.bend(case, super().backward(case, saved, d_out, d_lse))


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


# --- witnesses


def test_the_witnesses_are_carried_and_their_sums_are_known_to_the_bit() -> None:
    record = judged(Adapter(), "decode/bf16/kv:300+20/dim:32/pattern:all")
    for name in ("bw_value", "bw_dk", "bw_null"):
        assert record.probes[name].said == "judged"
        assert record.probes[name].use < 1e-6
    assert record.probes["bw_const"].said == "judged"


@pytest.mark.parametrize("name", ["bw_const", "bw_null"])
def test_a_null_witness_vanishes_in_the_reference(name: str) -> None:
    made = next(
        copy for copy in copies(problem_of("decode/bf16/kv:300+20/dim:32"), Backend(Adapter())) if name in copy.judged
    )
    for output in ("d_q", "d_k") if name == "bw_const" else ("d_q", "d_k", "d_v"):
        assert np.abs(made.bounds.allowed[output].value).max() < 1e-12, output
    assert np.abs(made.call.d_out).max() > 0


def test_an_accumulator_of_the_output_format_is_seen_most_clearly_by_bw_value() -> None:
    """d_v is summed over the rows in bf16, as with bf16 atomics."""

    class Coarse(Adapter):
        def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Gradients:
            spec, total = case.spec, None
            for token in range(spec.num_tokens):
                alone = torch.zeros_like(d_out)
                alone[token] = d_out[token]
                assert case.gradients is not None
                case.gradients.d_k.zero_(), case.gradients.d_v.zero_()
                d_v = super().backward(case, saved, alone, None).d_v.clone()
                total = d_v if total is None else total + d_v
            found = super().backward(case, saved, d_out, d_lse)
            assert total is not None
            found.d_v.copy_(total)
            return found

    cell = "prefill/bf16/kv:64/q:16/heads:4-1/dim:32/pattern:all/causal:bottom_right"
    found = verdict_of(Coarse(), cell)
    assert found.said == "fail"
    assert found.probes["bw_value"].use > 20 * found.probes["gradients"].use
    assert found.finding is not None
    assert "each right alone and wrong together: the sum of" in found.finding.sentence


def test_the_least_edge_lost_in_d_q_is_seen_by_the_witnesses_alone() -> None:
    """Beside 300 edges of other weights the least one is nothing; among 256 equal ones each shows."""
    least = "p.masked_fill(~rows.edge[:, None], 2.0).argmin(dim=-1, keepdim=True)"
    lost = ModelFault(
        name="least_edge_lost_in_d_q",
        stands_for="a key that d_q never meets",
        file="backward.py",
        find="d_q = product(d_z, scores.k,",
        replace=f"d_q = product(d_z.scatter(-1, {least}, 0.0), scores.k,",
        problem="plain",
        outputs=("d_q",),
    )
    found = verdict_of(seed(lost)(), "decode/bf16/kv:300/dim:32/pattern:all")
    assert found.probes["gradients"].use <= 1
    assert {name for name, probe in found.probes.items() if probe.use > 1} == {"bw_dk", "bw_null"}
    assert found.finding is not None
    words = (
        r"d_q \(request 0, query 0, head \d, channel \d+\) .*: the edge of request 0, token \d+ at .* is missing in d_q"
    )
    assert re.search(words, found.finding.sentence), found.finding.sentence
    assert "in a copy of all requests, lists cut to 2^m edges" in found.finding.sentence


def test_a_witness_whose_fault_would_not_show_is_untrusted() -> None:
    """An FP8-like P: one lost edge of 1024 stays within what its cast allows."""

    class Loose(Adapter):
        def __init__(self) -> None:
            super().__init__()
            numerics = {dtype: Numerics(p=dtype, out=dtype, u_exp=0.05) for dtype in DType}
            self.capabilities = replace(self.capabilities, numerics=numerics)

    found = verdict_of(Loose(), "decode/bf16/kv:1024/dim:32/pattern:all")
    assert found.probes["bw_dk"].said == "untrusted"
    assert re.fullmatch(r"\d+ of \d+", found.probes["bw_dk"].rows)


def test_a_contract_broken_in_company_is_raised_as_such() -> None:
    with pytest.raises(ContractBroken, match="backward must return Gradients"):
        verdict_of(Bent(lambda c, g: None), CELL)
