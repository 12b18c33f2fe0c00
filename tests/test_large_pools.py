"""What runs around a launch copies of a pool that is much larger than what is live in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacts.conformance import execution
from sacts.conformance.adapter import Backend, Capabilities, Gradients
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices.cell import parse

TRAINED = "train/fp32/kv:40+9/q:3+2/dim:32"


class Copies(TorchDispatchMode):
    """Elements of the largest tensor that is copied."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if str(func.overloadpacket).removeprefix("aten.") in ("clone", "copy_", "_to_copy", "index"):
            self.largest = max(self.largest, made.numel())
        return made


def in_a_large_pool() -> tuple[execution.Memory, Gradients]:
    """A case with gradients in a pool whose pages are few of many."""
    problem = build(parse(TRAINED))
    case = Launcher(Backend(Adapter()), "cpu").case(problem, RANDOM.inputs(problem))
    live = torch.from_numpy(problem.pages) * 100
    k, v = (torch.zeros(len(x) * 100, *x.shape[1:], dtype=x.dtype) for x in (case.k_cache, case.v_cache))
    k[::100], v[::100] = case.k_cache, case.v_cache
    gradients = Gradients(torch.ones_like(case.q), torch.zeros_like(k), torch.zeros_like(v))
    gradients.d_k[live], gradients.d_v[live] = 2, 3
    table = (case.page_table * 100).to(case.page_table.dtype)
    case = replace(case, k_cache=k, v_cache=v, page_table=table, gradients=gradients)
    return execution.Memory(case, live, {}, lambda: None), gradients


def test_of_gradients_in_a_large_pool_the_live_pages_alone_are_copied() -> None:
    memory, gradients = in_a_large_pool()
    calls = execution.Calls(Capabilities(), lambda case: (), lambda case, plan: case.gradients, lambda ask: ask())
    with Copies() as copies:
        result = execution.overwritten(calls, memory)
    assert result is gradients
    assert 0 < copies.largest <= gradients.d_k.numel() // 50
    assert memory.late == []
    assert bool((gradients.d_k[memory.live] == 2).all() and (gradients.d_v[memory.live] == 3).all())


def test_a_second_buffer_has_the_gradients_of_the_live_pages() -> None:
    memory, gradients = in_a_large_pool()
    with Copies() as copies:
        second = memory.twin().case.gradients
    assert second is not None and copies.largest <= gradients.d_k.numel() // 50
    for name in ("d_q", "d_k", "d_v"):
        mine, own = getattr(gradients, name), getattr(second, name)
        assert torch.equal(mine, own) and mine.data_ptr() != own.data_ptr()


def test_what_is_written_late_to_a_live_page_is_seen() -> None:
    memory, gradients = in_a_large_pool()

    def settled(device: torch.device) -> None:
        gradients.d_v[memory.live[-1]] += 1

    calls = execution.Calls(Capabilities(), lambda case: (), lambda case, plan: case.gradients, lambda ask: ask())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "settle", settled)
        execution.overwritten(calls, memory)
    assert memory.late == ["d_v"]
