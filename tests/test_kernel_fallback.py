"""The bundled backend told to leave its kernels: dense attention over the normalised lists, by its own numerics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacts.conformance.adapter import Backend, Case, Refused
from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test import sdpa
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.tf32 import Triton
from sacts.matrices.cell import parse
from sacts.reference.spec import DType, FallbackReason
from sacts.reports.records import Verdict

CELL = "decode/fp16/kv:90+50/pattern:duplicates"
CELLS = (
    f"{CELL}/fallback:workspace",
    f"{CELL}/exec:reuse/fallback:dense",
    f"{CELL}/exec:small_plan/fallback:empty",
    "prefill/bf16/kv:60+40/q:3+2/heads:8-2/page:1/causal:bottom_right/window:20/fallback:head_dim/lists:query_head",
    "decode/fp32/kv:60+0/block:16/cache:strided/splits:2/tile:16/fallback:block_size",
)


def case_of(adapter: Adapter, reason: FallbackReason | None) -> Case:
    problem = build(parse(CELL))
    return replace(Launcher(Backend(adapter), "cpu").case(problem, RANDOM.inputs(problem)), fallback=reason)


@pytest.mark.parametrize("cell", CELLS)
def test_the_other_path_is_judged_by_all_gates(cell: str) -> None:
    record = judge(Launcher(Backend(Adapter()), "cpu"), "triton", parse(cell))
    assert record.verdict is Verdict.FALLBACK, record.sentence
    assert record.status == f"fallback({parse(cell).fallback})"


def test_it_serves_what_the_dense_backend_serves_and_refuses_the_rest_in_its_words() -> None:
    rope = "decode/fp32/kv:40+60/map:shared/pos:rope/fallback:dense"
    record = judge(Launcher(Backend(Adapter()), "cpu"), "triton", parse(rope))
    assert (record.verdict, record.sentence) == (Verdict.REFUSED, "not yet: rope")
    large = replace(build(parse(CELL)).spec, head_dim_qk=1025)
    assert str(Adapter().support(large)) == "refused(head_dim_qk above 1024)"
    assert str(Adapter().falls_back(large, FallbackReason.HEAD_DIM)) == "fallback(head_dim)"


@pytest.mark.parametrize("adapter", [Adapter(), Triton()], ids=["triton", "triton-tf32"])
def test_its_numerics_are_those_of_the_dense_backend(adapter: Adapter) -> None:
    forced = Backend(adapter).forced(FallbackReason.DENSE)
    for dtype in DType:
        assert forced.capabilities.numerics_of(dtype) == sdpa.Adapter.capabilities.numerics_of(dtype)
        assert Backend(adapter).capabilities.numerics_of(dtype) != sdpa.Adapter.capabilities.numerics_of(dtype)


def test_it_needs_no_workspace_and_is_counted_under_its_path() -> None:
    adapter = Adapter()
    case = case_of(adapter, FallbackReason.WORKSPACE)
    assert adapter.workspace_bytes(case) == 0
    for _ in range(2):
        adapter.run(case)
    adapter.run(replace(case, fallback=FallbackReason.EMPTY))
    assert adapter.counters() == {"fallback(workspace)": 2, "fallback(empty)": 1}
    assert Adapter().counters() == {}


class Reads(TorchDispatchMode):
    """The operations that read the device on the host, or may."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name in ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2"):
            self.names.append(name)
        boolean = [x for x in args[1] if x is not None and x.dtype is torch.bool] if name == "aten.index" else []
        self.names += ["aten.index by a mask"] * len(boolean)
        return func(*args, **kwargs or {})


def test_what_is_read_on_the_host_is_read_in_the_plan_so_that_a_graph_can_record_the_run() -> None:
    adapter = Adapter()
    case = case_of(adapter, FallbackReason.DENSE)
    with Reads() as planned:
        plan = adapter.plan(case)
    with Reads() as run:
        adapter.run(case, plan)
    assert planned.names and not run.names


def test_it_has_no_trace() -> None:
    with pytest.raises(Refused, match=r"fallback\(dense\) has no tiles to trace"):
        Adapter().trace(case_of(Adapter(), FallbackReason.DENSE))


def test_a_plan_of_another_case_is_refused_there_too() -> None:
    adapter = Adapter()
    case = case_of(adapter, FallbackReason.DENSE)
    plan = adapter.plan(replace(case, spec=replace(case.spec, window_left=3)))
    with pytest.raises(Refused, match=r"spec.window_left: planned for 3, got -1"):
        adapter.run(case, plan)
    with pytest.raises(Refused, match=r"fallback: planned for None, got dense"):
        adapter.run(case, adapter.plan(replace(case, fallback=None)))
