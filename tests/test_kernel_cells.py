"""Cells of the bundled kernels: lists of query heads and the gate, beside other axes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sacts.conformance.worker import Worker
from sacts.reports.records import Verdict

CELLS = (
    "prefill/bf16/kv:65+40/q:2+1/heads:4-1/window:20/pos:rope/lists:query_head",
    "decode/fp16/kv:90+40/pattern:union/kind:multiset/lists:query_head",
    "decode/fp32/kv:90+40/dropout:30/kind:sequence/lists:query_head",
    "decode/bf16/kv:90+40/heads:8-2/block:16/kcodec:int8/vcodec:fp8_e4m3fn/scales:page_head/route:gather/lists:query_head",
    "decode/bf16/kv:90+40/heads:7-1/pattern:one/window:5/empty:force_self/route:gather_heads/lists:query_head",
    "decode/bf16/kv:90+40/heads:8-2/splits:2/tile:16/sink:on/epilogue:gate/schedule:shuffled/lists:query_head",
    "decode/fp32/kv:60+25/dim:80/epilogue:gate/exec:small_plan",
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("triton") as made:
        yield made


@pytest.mark.parametrize("cell", CELLS)
def test_lists_of_query_heads_and_gates_are_served_natively(worker: Worker, cell: str) -> None:
    record = worker.judge(cell)
    assert (record.verdict, record.status) == (Verdict.PASS, "native"), record.sentence
