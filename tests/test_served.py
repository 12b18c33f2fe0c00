"""The bundled backends refuse by name what they do not serve: the dense one all but the plain row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sacts.conformance.adapter import Backend, Refused, refused
from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged.adapter import Adapter as Paged
from sacts.kernels_under_test.sdpa import Adapter as Dense
from sacts.matrices.cell import parse
from sacts.reference.spec import (
    CandidateKind,
    CausalRule,
    Codec,
    CodecFormat,
    Dropout,
    EmptyRowRule,
    Epilogue,
    EpilogueKind,
    RelativeBuckets,
    RoPE,
)
from sacts.reports.records import Verdict

PROBLEM = build(parse("decode/fp32/kv:20"))
BEYOND: dict[str, dict[str, Any]] = {
    "not yet: candidate_kind multiset": {"candidate_kind": CandidateKind.MULTISET},
    "not yet: empty_row forbid": {"empty_row": EmptyRowRule.FORBID},
    "not yet: rope": {"rope": RoPE(64)},
    "not yet: logits_soft_cap": {"logits_soft_cap": 30.0},
    "not yet: alibi_slopes": {"alibi_slopes": (0.5,) * 4},
    "not yet: buckets": {"buckets": RelativeBuckets((0,), ((0.0,),) * 4)},
    "not yet: sink_logits": {"sink_logits": (0.0,) * 4},
    "not yet: dropout": {"dropout": Dropout(0.5, 1)},
    "not yet: k_codec int8": {"k_codec": Codec(CodecFormat.INT8)},
    "not yet: v_codec fp8_e5m2": {"v_codec": Codec(CodecFormat.FP8_E5M2)},
    "not yet: epilogue gate": {"epilogue": Epilogue(EpilogueKind.GATE)},
}


UNREAD: dict[str, dict[str, Any]] = {
    "buckets beyond a distance of 65536": {"buckets": RelativeBuckets((0, 65537), ((0.0, 0.0),) * 4)},
    "head_dim_qk above 1024": {"head_dim_qk": 1025},
    "head_dim_vo above 1024": {"head_dim_vo": 2048},
}
REFUSALS = [(Dense(), reason, fields) for reason, fields in BEYOND.items()] + [
    (Paged(), reason, fields) for reason, fields in UNREAD.items()
]


@pytest.mark.parametrize(("adapter", "reason", "fields"), REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_served_is_refused_by_name(adapter: Any, reason: str, fields: dict[str, Any]) -> None:
    spec = replace(PROBLEM.spec, **fields)
    assert adapter.support(spec) == refused(reason)
    launcher = Launcher(Backend(adapter), "cpu")
    with pytest.raises(Refused, match=reason):
        launcher(replace(PROBLEM, spec=spec), RANDOM.inputs(PROBLEM))


def test_the_plain_row_is_served() -> None:
    assert str(Paged().support(PROBLEM.spec)) == "native"
    assert str(Dense().support(PROBLEM.spec)) == "fallback(dense)"


@pytest.mark.parametrize("reason", [reason for reason in BEYOND if reason not in UNREAD])
def test_triton_serves_what_the_dense_backend_refuses(reason: str) -> None:
    assert str(Paged().support(replace(PROBLEM.spec, **BEYOND[reason]))) == "native"


def test_top_left_is_served_where_it_is_the_declared_rule() -> None:
    adapter = Dense()
    adapter.capabilities = replace(Dense.capabilities, causal=CausalRule.TOP_LEFT)
    cell = parse("prefill/fp32/kv:40/q:5/block:16/pattern:all/causal:bottom_right")
    record = judge(Launcher(Backend(adapter), "cpu"), "dense", cell)
    assert record.verdict is Verdict.FALLBACK
    assert record.converted == ["causal rule top_left"]
