"""Launches of a run that can be made again: with the same tensors, so that nothing is prepared twice."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from sacts.conformance.adapter import Case

Launch = Callable[[], object]


@dataclass
class Repeats:
    """What a run launched last, by which adapter and for which case, which it keeps alive: a run of these very objects
    does it again.
    """

    adapter: object = None
    case: Case | None = None
    launches: list[Launch] = field(default_factory=list)


def launch(kernel: Any, grid: tuple[int], *arguments: Any, **named: Any) -> Launch:
    """Launch a kernel, and return what launches it again with the same arguments: once compiled, without a look at them
    (which takes longer than a short kernel).
    """
    compiled = kernel[grid](*arguments, **named)
    if not isinstance(compiled, CompiledKernel):  # the interpreter
        return partial(kernel[grid], *arguments, **named)
    ordered = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    # A pointer may be a number, of which the launcher asks the driver nothing; its memory is the case's or the plan's.
    numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in (ordered[name] for name in kernel.arg_names)]
    return partial(compiled[(*grid, 1, 1)], *numbers)


def launch_with(memory: Tensor | None, kernel: Any, grid: tuple[int], *arguments: Any, **named: Any) -> Launch:
    """Launch a kernel whose descriptions of tensors, if it makes any, lie in this memory, now and again. Raises
    ValueError where they do not fit.
    """
    if memory is None:
        return launch(kernel, grid, *arguments, **named)

    def taken(size: int, alignment: int, stream: int | None) -> Tensor:
        if size > memory.numel():
            raise ValueError(f"descriptions take {size} bytes, {memory.numel()} were planned")
        return memory

    context = copy_context()
    context.run(triton.set_allocator, taken)
    return partial(context.run, context.run(launch, kernel, grid, *arguments, **named))


def early(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it runs, and waits by itself for its end."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
