"""The dropout witness: each way to draw or use the keep mask wrongly is caught at its gate; other faults are not blamed
on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from sacts.conformance.adapter import Backend, Case, Outputs
from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes import dropout, margins
from sacts.conformance.probes.copies import copies
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.faults import cell_catalogue, model_catalogue, seed
from sacts.matrices.cell import parse
from sacts.reference.philox import keep
from sacts.reference.spec import DType
from sacts.reports.records import Gate, Record, Verdict

PREFILL = "prefill/bf16/kv:40/q:3/pattern:all/causal:bottom_right/dropout:50"
BATCH = "decode/fp32/kv:90+40/pattern:all/dropout:25"
CAUGHT = {
    fault.name: (fault.problem, fault.place) for fault in cell_catalogue().values() if "dropout" in fault.outputs
} | {
    "dropout_on_the_denominator": (PREFILL, r"dropped edges were missing everywhere, without 1 / \(1 - p\)"),
    "dropout_without_its_scale": (PREFILL, r"the factor 1 / \(1 - p\) were missing"),
    "dropout_by_place_in_the_batch": (BATCH, "drawn by the place of the request in the batch"),
    "dropout_drawn_anew": (PREFILL, r"of 38 edges \d+ are kept, \d+ by the right mask"),
}


def judged(adapter: object, cell: str) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell))


@pytest.mark.parametrize("name", CAUGHT)
def test_a_wrong_mask_or_denominator_is_caught_at_the_gate_dropout_and_named(name: str) -> None:
    cell, words = CAUGHT[name]
    record = judged(seed({**model_catalogue(), **cell_catalogue()}[name])(), cell)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is Gate.DROPOUT, record.sentence
    assert re.search(words, record.sentence), record.sentence


def test_a_lost_candidate_of_a_cell_with_dropout_is_blamed_on_the_count() -> None:
    class Losing:
        def __init__(self) -> None:
            self._right = Adapter()
            self.capabilities = self._right.capabilities

        def run(self, case: Case, plan: object = None) -> Outputs:
            indices = case.kv_indices.clone()
            start = case.kv_indptr[:-1].long()
            indices[start] = indices[start + 1]  # the first entry of each list becomes a repeat of the second
            return self._right.run(replace(case, kv_indices=indices))

    record = judged(Losing(), BATCH)
    assert record.finding is not None
    assert record.finding.gate is Gate.COUNT, record.sentence
    assert "missing token" in record.sentence


class Spoilt(Adapter):
    """Right but for `out`, which `spoil` changes in place."""

    def __init__(self, spoil: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self._spoil = spoil

    def run(self, case: Case, plan: object = None) -> Outputs:
        outputs = super().run(case)
        self._spoil(outputs.out)
        return outputs


@pytest.mark.parametrize(
    "spoil",
    [lambda out: out.mul_(1 + 2.0**-16), lambda out: out[:, :, 1::2].neg_()],
    ids=["a gain", "other values in odd channels"],
)
def test_what_keeps_as_many_edges_as_the_right_mask_is_not_blamed_on_it(
    spoil: Callable[[torch.Tensor], object],
) -> None:
    """Also where a row has one edge, which any fault of the values leaves kept."""
    record = judged(Spoilt(spoil), "decode/fp32/kv:60+1/dim:32/pattern:all/dropout:25")
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is not Gate.DROPOUT, record.sentence


def test_the_witness_shows_the_kept_share_in_even_channels_and_its_margin_one_edge() -> None:
    problem = build(parse(BATCH))
    copy = next(
        copy for copy in copies(problem, Adapter().capabilities.numerics_of(DType.FP32)) if "dropout" in copy.judged
    )
    spec, drawn = problem.spec, problem.spec.dropout
    assert drawn
    for token, (t, uid) in enumerate(zip(spec.seq_lens, drawn.request_uids, strict=True)):
        for head in range(spec.num_qo_heads):
            kept = int(keep(drawn, np.arange(t), t - 1, head, uid).sum())
            assert copy.expected.out[token, head, ::2] == pytest.approx(kept / t / 0.75)
    one = 1 / (90 * 0.75) / margins.noticed(copy.expected, DType.FP32).min()
    assert 1 < copy.margin["dropout"].min() <= one * 1.01


def test_a_cell_without_dropout_has_no_such_probe() -> None:
    assert not dropout.suits(build(parse("decode/fp32/kv:40")))
    assert judged(Adapter(), "decode/fp32/kv:40").gates[Gate.DROPOUT] == "not applicable"


def test_the_mistakes_have_words_of_their_own_and_yield_results_of_their_own() -> None:
    problem = build(parse("decode/fp32/kv:150+90/dropout:25"))
    found = list(dropout.mistakes(problem, dropout.DROPOUT.inputs(problem)))
    assert len({wrong.words for wrong in found}) == len(found)
    right = copies(problem, Adapter().capabilities.numerics_of(DType.FP32))[2].expected.out
    same = [wrong.words for wrong in found if np.allclose(wrong.out, right)]
    assert same == ["the keep mask were drawn by the logical position of the key"]
