"""Launches that are made again: with which arguments, and that these lie in memory of the caller or of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import _allocation

from sacts.conformance.adapter import Backend
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged import adapter, copies, launches, words
from sacts.kernels_under_test.paged.limits import INTERPRETED
from sacts.matrices.cell import parse


class Made:
    """What a compiled kernel is launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launched.append((grid, *arguments))


class Kernel:
    """A kernel that was compiled."""

    arg_names = ("out_ptr", "q_ptr", "none_ptr", "scale", "count", "BLOCK")

    def __init__(self) -> None:
        self.made, self.launched = Made(), 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Made]:
        def launch(*arguments: Any, **named: Any) -> Made:
            self.launched += 1
            return self.made

        return launch


def test_a_launch_is_made_again_with_addresses_in_the_order_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "CompiledKernel", Made)
    kernel, out, q = Kernel(), torch.zeros(4), torch.arange(9.0)[3:]
    again = launches.launch(kernel, (7,), out, q, BLOCK=16, count=3, scale=0.5, none_ptr=None, num_warps=4)
    assert (kernel.launched, kernel.made.launched) == (1, [])
    again()
    assert (kernel.launched, kernel.made.launched) == (1, [((7, 1, 1), out.data_ptr(), q.data_ptr(), None, 0.5, 3, 16)])
    assert q.data_ptr() != torch.Tensor.untyped_storage(q).data_ptr()


class Describing(Kernel):
    """A kernel whose descriptions take memory when it is launched."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.taken = size, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.taken.append(_allocation._allocator.get()(self.size, 128, None))

        return launch


def test_descriptions_lie_in_the_memory_of_the_plan_now_and_again() -> None:
    before, memory = _allocation._allocator.get(), torch.zeros(256, dtype=torch.uint8)
    kernel = Describing(256)
    again = launches.launch_with(memory, kernel, (7,))
    again()
    assert [taken is memory for taken in kernel.taken] == [True, True]
    assert _allocation._allocator.get() is before


def test_descriptions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="descriptions take 257 bytes, 256 were planned"):
        launches.launch_with(torch.zeros(256, dtype=torch.uint8), Describing(257), (7,))


def storages(held: object) -> Iterator[int]:
    """Where the tensors of a record begin in memory, and those of the records in it."""
    if isinstance(held, Tensor):
        yield held.untyped_storage().data_ptr()
    elif dataclasses.is_dataclass(held):
        for field in dataclasses.fields(held):
            yield from storages(getattr(held, field.name))
    elif isinstance(held, tuple | list):
        for each in held:
            yield from storages(each)


@pytest.mark.parametrize(
    "cell",
    [
        "decode/bf16/kv:60+40/pattern:all/splits:2/tile:16/pos:rope/cap:30/sink:on/dropout:25/epilogue:gate",
        "decode/bf16/kv:60/pattern:all/kcodec:int8/vcodec:fp8_e5m2/scales:page",
        "decode/fp32/kv:60+40/dim:80/kcodec:int4/vcodec:int4/scales:page_channel/zeros:on/route:gather_heads",
        "prefill/bf16/kv:60+40/q:3+2/pattern:duplicates/pos:alibi/branches:2",
        "prefill/bf16/kv:60+40/q:3+2/page:64/block:16/tile:16",  # copied by descriptions
    ],
)
def test_what_kernels_get_lies_in_the_case_or_in_the_plan(monkeypatch: pytest.MonkeyPatch, cell: str) -> None:
    """So that it is there when the launch is made again."""
    given: list[Any] = []

    def launch(kernel: Any, grid: Any, *arguments: Any, **named: Any) -> Callable[[], None]:
        given.extend((*arguments, *named.values()))
        return lambda: None

    monkeypatch.setattr(adapter, "launch", launch)
    monkeypatch.setattr(adapter, "launch_with", lambda memory, *rest, **named: launch(*rest, memory=memory, **named))
    problem, backend = build(parse(cell)), adapter.Adapter()
    case = Launcher(Backend(backend), "cpu").case(problem, RANDOM.inputs(problem))
    case = replace(case, workspace=torch.empty(backend.workspace_bytes(case), dtype=torch.uint8))
    plan = backend.plan(case)
    backend.run(case, plan)
    tensors = [x for x in given if isinstance(x, Tensor) and x.numel()]
    assert len(tensors) >= 10
    assert {x.untyped_storage().data_ptr() for x in tensors} <= {*storages(case), *storages(plan)}


@pytest.mark.parametrize(
    ("device", "capability", "hip", "early", "decodes", "copied"),
    [
        ("cpu", (0, 0), None, False, True, INTERPRETED),
        ("xpu", (9, 0), None, False, False, False),
        ("cuda", (9, 0), None, True, True, True),
        ("cuda", (8, 9), None, False, True, False),
        ("cuda", (8, 6), None, False, False, False),
        ("cuda", (9, 4), "6.4", False, False, False),
    ],
)
def test_what_a_processor_can_do_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    hip: str | None,
    early: bool,
    decodes: bool,
    copied: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    where: Any = SimpleNamespace(type=device)
    assert (launches.early(where), words.decodes(where), copies.copies(where)) == (early, decodes, copied)
