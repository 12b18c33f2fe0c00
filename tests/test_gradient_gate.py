"""The gate of gradients: a right backward passes on every kind of cell, and each seeded fault fails there and is named.

`SACTS_GRADIENTS=20 pytest -s tests/test_gradient_gate.py -k campaign` judges so many replicates of every smoke cell
under every arithmetic, and prints the largest observed / allowed of each probe.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_cells import (
    FAULTS,
    KEY,
    RAGGED,
    ROW,
    adapter_of,
    judged,
    verdict_of,
)

from sacts.conformance.adapter import Backend, Case, Gradients, KVLayout, LseBase, Saved
from sacts.conformance.audit import audit
from sacts.conformance.build import build
from sacts.conformance.gradients import judge_gradients
from sacts.conformance.launch import Launcher
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.faults import ModelFault
from sacts.kernels_under_test.sdpa import Adapter as Dense
from sacts.matrices import tiers
from sacts.reference.spec import DType
from sacts.reports.records import Gate

REPLICATES = int(os.environ.get("SACTS_GRADIENTS", "0"))

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
