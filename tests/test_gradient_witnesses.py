"""Witnesses of backward: what they carry, and which faults they alone show."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gradient_cells import (
    CELL,
    Bent,
    judged,
    problem_of,
    verdict_of,
)

from sacts.conformance.adapter import Backend, Case, Gradients, Saved
from sacts.conformance.contract import ContractBroken
from sacts.conformance.probes.gradients import copies
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.faults import ModelFault, seed
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType


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
