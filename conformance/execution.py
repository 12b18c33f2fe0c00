"""What ran before a launch, in the same memory: nothing, a run on other contents, or the recording of a graph.

The other contents are legal (live pages, tokens that a row may name) and differ in all that a plan does not keep, so
that whatever a backend remembers of them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sacts.matrices.axes import Execution

from . import tensors
from .adapter import Capabilities, Case, IndexSpace, Scale

PAGED = ("k_cache", "v_cache")
DECODING = ("k_scales", "v_scales", "k_zeros", "v_zeros")


@dataclass(frozen=True)
class Calls:
    """What is asked of a backend: `plan` gives its plan as a last argument of `run`, nothing where it does not plan.
    `asked(ask)` is ask(), where whatever it raises is the backend's; `plan` and `run` go through it.
    """

    capabilities: Capabilities
    plan: Callable[[Case], tuple[Any, ...]]
    run: Callable[[Case, tuple[Any, ...]], Any]
    asked: Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Memory:
    """The tensors of a case whose contents may change between two runs. `given`: those beside the case's own, by name;
    `blank`: makes the buffers for results as they were before anything ran.
    """

    case: Case
    live: torch.Tensor
    given: dict[str, torch.Tensor]
    blank: Callable[[], None]

    def views(self) -> dict[str, torch.Tensor]:
        """Contents by name; of what belongs to pages the live ones only."""
        plain = {name: getattr(self.case, name) for name in ("q", "page_table", "kv_indices")}
        paged = {name: getattr(self.case, name) for name in (*PAGED, *DECODING)}
        held = {name: tensors.taken(x, self.live) for name, x in paged.items() if x is not None}
        return {**plain, **self.given, **held}

    def put(self, contents: dict[str, torch.Tensor]) -> None:
        """Replace contents in place."""
        for name, value in contents.items():
            whole = self.given[name] if name in self.given else getattr(self.case, name)
            if name in (*PAGED, *DECODING):
                tensors.put(whole, self.live, value)
            else:
                whole.copy_(value)


def others(memory: Memory, keeps: frozenset[str], space: IndexSpace) -> dict[str, torch.Tensor]:
    """Other contents than those of a case, of the same shapes, for all that a plan does not keep."""
    live = memory.live.sort().values
    found = {}
    for name, mine in memory.views().items():
        if name == "page_table":
            other = _next_page(mine, live)
        elif name == "kv_indices":
            other = _other_lists(memory.case, live, space)
        elif name in PAGED:
            other = _finite(mine.roll(1, 0))
        elif name in DECODING:
            other = 2 * _finite(mine)
        else:
            other = 0.5 - mine.flip(-1)
        found[name] = other.to(mine.dtype)
    return {name: other for name, other in found.items() if name not in keeps}


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, 0.0, 0.0, 0.0) if x.is_floating_point() else x


def _next_page(pages: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The live page behind each, in the order of their numbers; of the last, the first."""
    return live[(torch.searchsorted(live, pages.long()) + 1) % len(live)]


def _other_lists(case: Case, live: torch.Tensor, space: IndexSpace) -> torch.Tensor:
    """Each row's entries mirrored between its least and its largest; physical slots on the next page."""
    entries = case.kv_indices.long()
    if space is IndexSpace.PHYSICAL:
        page, offset = entries // case.spec.page_size, entries % case.spec.page_size
        return _next_page(page, live) * case.spec.page_size + offset
    rows = torch.repeat_interleave(torch.arange(case.spec.num_rows, device=entries.device), case.kv_indptr.diff())
    request = torch.tensor(case.spec.token_request, dtype=torch.long, device=entries.device)[
        rows // case.spec.list_heads
    ]
    real = (entries >= 0) & (entries * case.spec.block_size < case.seq_lens.long()[request])
    ends = torch.zeros(case.spec.num_rows, dtype=torch.long, device=entries.device)
    low = ends.scatter_reduce(0, rows[real], entries[real], "amin", include_self=False)
    high = ends.scatter_reduce(0, rows[real], entries[real], "amax", include_self=False)
    return torch.where(real, low[rows] + high[rows] - entries, entries)


def reused(calls: Calls, memory: Memory) -> Any:
    """Run on other contents, with another sm_scale where the backend takes one, and on other contents under the plan
    that is kept, where one is; then on the case's own.
    """
    keeps, space = calls.capabilities.plan_keeps, calls.capabilities.index_space
    mine = {name: x.clone() for name, x in memory.views().items()}
    memory.put(others(memory, frozenset(), space))
    case = memory.case
    if calls.capabilities.scale is Scale.SPEC:
        case = replace(case, spec=replace(case.spec, sm_scale=2 * case.spec.sm_scale))
    calls.run(case, calls.plan(case))
    memory.put(mine)
    if keeps is None:
        memory.blank()
        return calls.run(memory.case, calls.plan(memory.case))
    memory.put(others(memory, keeps, space))
    plan = calls.plan(memory.case)
    calls.run(memory.case, plan)
    memory.put(mine)
    memory.blank()
    return calls.run(memory.case, plan)


def replayed(calls: Calls, memory: Memory) -> Any:
    """Record a run on other contents as a graph, behind one that compiles, and replay it on the case's own."""
    mine = {name: x.clone() for name, x in memory.views().items()}
    memory.put(others(memory, calls.capabilities.plan_keeps or frozenset(), calls.capabilities.index_space))
    graph, result = calls.asked(lambda: _recorded(calls, memory))
    memory.put(mine)
    memory.blank()
    calls.asked(graph.replay)
    return result


def _recorded(calls: Calls, memory: Memory) -> tuple[torch.cuda.CUDAGraph, Any]:
    plan = calls.plan(memory.case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls.run(memory.case, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = calls.run(memory.case, plan)
    return graph, result


def eager(calls: Calls, memory: Memory) -> Any:
    """Plan and run, once."""
    return calls.run(memory.case, calls.plan(memory.case))


PERFORM: dict[Execution, Callable[[Calls, Memory], Any]] = {
    Execution.EAGER: eager,
    Execution.REUSE: reused,
    Execution.GRAPH: replayed,
}
