"""What ran before a launch, in the same memory: nothing, a run on other contents, a call beyond its capacity, or the
recording of graphs.

The other contents are legal (live pages, tokens that a row may name) and differ in all that a plan does not keep, so
that whatever a backend remembers of them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sacts.matrices.axes import Execution

from . import tensors
from .adapter import Capabilities, Case, Gradients, IndexSpace, Outputs, Refused, Scale

SHARED = ("k_cache", "v_cache", "kv_cache", "k_scales", "v_scales", "k_zeros", "v_zeros")  # of two buffers
ROUNDS = 3  # in which two buffers alternate; runs before one that is overwritten
PAGED = ("k_cache", "v_cache")
BY_PAGE = ("d_k", "d_v")  # of gradients: as large as the pool
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
    `blank`: makes the buffers for results as they were before anything ran; `guarded`: buffers that were offered beside
    the case's own, by name; `late`: results that were written to when their run was over.
    """

    case: Case
    live: torch.Tensor
    given: dict[str, torch.Tensor]
    blank: Callable[[], None]
    guarded: dict[str, tensors.Guarded] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    def views(self) -> dict[str, torch.Tensor]:
        """Contents by name; of what belongs to pages the live ones only."""
        names = ("q", "page_table", "seq_lens", "kv_indices", "gate", "gates")
        plain = {name: x for name in names if (x := getattr(self.case, name)) is not None}
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

    def described(self) -> Case:
        """The case with the lengths that its memory holds, on the host too."""
        seq_lens = tuple(self.case.seq_lens.tolist())
        return replace(self.case, spec=replace(self.case.spec, seq_lens=seq_lens))

    def twin(self) -> Memory:
        """A second buffer beside this one, over the same caches."""
        own: dict[str, Any] = {name: x.clone() for name, x in _tensors(self.case).items() if name not in SHARED}
        if (gradients := self.case.gradients) is not None:
            buffers = {
                name: tensors.Guarded.zeros(tuple(x.shape), x.dtype, str(x.device)).inner
                for name, x in _tensors(gradients).items()
            }
            own["gradients"] = second = replace(gradients, **buffers)
            self.restore(second, self.taken(gradients))
        return replace(self, case=replace(self.case, **own))

    def taken(self, results: Outputs | Gradients) -> dict[str, torch.Tensor]:
        """Copies of results by name; of what belongs to pages the live ones only: nobody touches the rest of a large
        pool.
        """
        return {name: x[self.live] if self._by_page(name, x) else x.clone() for name, x in _tensors(results).items()}

    def restore(self, results: Outputs | Gradients, contents: dict[str, torch.Tensor]) -> None:
        """Write back what `taken` took."""
        for name, x in _tensors(results).items():
            if self._by_page(name, x):
                x[self.live] = contents[name]
            else:
                x.copy_(contents[name])

    def _by_page(self, name: str, result: torch.Tensor) -> bool:
        return name in BY_PAGE and result.shape[:1] == self.case.k_cache.shape[:1]


def _tensors(of: Case | Outputs | Gradients) -> dict[str, Any]:
    """The tensors of a record, by field."""
    return {name: x for name, x in vars(of).items() if isinstance(x, torch.Tensor)}


def others(memory: Memory, keeps: frozenset[str], space: IndexSpace) -> dict[str, torch.Tensor]:
    """Other contents than those of a case, of the same shapes, for all that a plan does not keep."""
    live = memory.live.sort().values
    found = {}
    for name, mine in memory.views().items():
        if name == "page_table":
            other = _next_page(mine, live)
        elif name == "kv_indices":
            other = _other_lists(memory.case, live, space)
        elif name == "seq_lens":
            other = mine + 1  # the table has a live page there
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
    rows = torch.repeat_interleave(torch.arange(case.spec.num_lists, device=entries.device), case.kv_indptr.diff())
    request = torch.tensor(case.spec.token_request, dtype=torch.long, device=entries.device)[
        rows % case.spec.num_rows // case.spec.list_heads
    ]
    real = (entries >= 0) & (entries * case.spec.block_size < case.seq_lens.long()[request])
    ends = torch.zeros(case.spec.num_lists, dtype=torch.long, device=entries.device)
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
    case = memory.described()
    if calls.capabilities.scale is Scale.SPEC:
        case = replace(case, spec=replace(case.spec, sm_scale=2 * case.spec.sm_scale))
    calls.run(case, calls.plan(case))
    memory.put(mine)
    if keeps is None:
        memory.blank()
        return calls.run(memory.case, calls.plan(memory.case))
    memory.put(others(memory, keeps, space))
    case = memory.described()
    plan = calls.plan(case)
    calls.run(case, plan)
    memory.put(mine)
    memory.blank()
    return calls.run(memory.case, plan)


def overwritten(calls: Calls, memory: Memory) -> Any:
    """Several runs on other contents and one on the case's own, none waited for. Behind the last, in stream order, its
    results are taken and blanked, and its contents overwritten: what then changes in them was written late.
    """
    mine = {name: x.clone() for name, x in memory.views().items()}
    other = others(memory, frozenset(), calls.capabilities.index_space)
    lengths = tuple(seq_len + 1 for seq_len in memory.case.spec.seq_lens)
    longer = replace(memory.case, spec=replace(memory.case.spec, seq_lens=lengths))
    for _ in range(ROUNDS):
        memory.put(other)
        calls.run(longer, calls.plan(longer))
    memory.put(mine)
    memory.blank()
    result = calls.run(memory.case, calls.plan(memory.case))
    if not isinstance(result, Outputs | Gradients):
        return result
    taken = memory.taken(result)
    memory.blank()
    left = memory.taken(result)
    memory.put(other)
    settle(memory.case.q.device)
    now = memory.taken(result)
    memory.late.extend(name for name, x in left.items() if tensors.digest(x) != tensors.digest(now[name]))
    memory.put(mine)
    memory.restore(result, taken)
    return result


def settle(device: torch.device) -> None:
    """Wait for everything that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- beyond what was made room for


def small_plan(calls: Calls, memory: Memory) -> Any:
    """Run under a plan that was made for lists of half the length."""
    plan = calls.plan(_halved(memory.case))
    return _or_refused(calls, memory, lambda: calls.run(memory.case, plan))


def small_workspace(calls: Calls, memory: Memory) -> Any:
    """Plan and run in a workspace of one byte less, between guard zones of its own."""
    short = tensors.Guarded.make((len(memory.case.workspace) - 1,), torch.uint8, str(memory.case.workspace.device))
    short.inner.copy_(memory.case.workspace[:-1])
    memory.guarded["workspace"] = short
    case = replace(memory.case, workspace=short.inner)
    return _or_refused(calls, memory, lambda: calls.run(case, calls.plan(case)))


def _or_refused(calls: Calls, memory: Memory, attempt: Callable[[], Any]) -> Any:
    """What the attempt gives, which then must be right; where it is refused, what the whole call gives behind it."""
    try:
        return attempt()
    except Refused:
        memory.blank()
        return calls.run(memory.case, calls.plan(memory.case))


def _halved(case: Case) -> Case:
    """The first half of each list, in tensors of their own."""
    start, length = case.kv_indptr[:-1].long(), case.kv_indptr.long().diff() // 2
    row = torch.repeat_interleave(torch.arange(len(length), device=length.device), length)
    indptr = torch.cat((length.new_zeros(1), length.cumsum(0)))
    taken = start[row] + torch.arange(len(row), device=row.device) - indptr[row]
    return replace(case, kv_indptr=indptr.to(case.kv_indptr.dtype), kv_indices=case.kv_indices[taken])


# --- graphs


def replayed(calls: Calls, memory: Memory) -> Any:
    """Record a run on other contents as a graph, and replay it on the case's own."""
    mine = {name: x.clone() for name, x in memory.views().items()}
    memory.put(others(memory, calls.capabilities.plan_keeps or frozenset(), calls.capabilities.index_space))
    replay, result = calls.asked(lambda: _recorded(calls, memory))
    memory.put(mine)
    memory.blank()
    calls.asked(replay)
    return result


def double_buffered(calls: Calls, memory: Memory) -> Any:
    """Record a graph over each of two buffers and replay them in turn, side by side: while one runs, the contents of
    the other are written. The caches are common to both. Of out and lse every second token is that of the second
    graph, replayed while the first buffer holds other contents, so that both are judged.
    """
    kept = calls.capabilities.plan_keeps or frozenset()
    mine = {name: x.clone() for name, x in memory.views().items() if name not in SHARED}
    other = others(memory, kept | frozenset(SHARED), calls.capabilities.index_space)
    twin = memory.twin()
    for buffer in (memory, twin):
        buffer.put(other)
    replay, result = calls.asked(lambda: _recorded(calls, memory))
    replay_twin, second = calls.asked(lambda: _recorded(calls, twin))
    side = Side()
    for _ in range(ROUNDS):
        with side:
            calls.asked(replay_twin)
        memory.put(mine)
        memory.blank()
        with side:
            twin.put(mine)
            twin.put(other)
        calls.asked(replay)
    side.join()
    if isinstance(result, Outputs) and isinstance(second, Outputs):
        memory.put(other)
        twin.put(mine)
        calls.asked(replay_twin)
        memory.put(mine)
        for name, x in _tensors(result).items():
            x[1::2] = getattr(second, name)[1::2]
    return result


def _recorded(calls: Calls, memory: Memory) -> tuple[Callable[[], None], Any]:
    case = memory.described()
    plan = calls.plan(case)
    return record(lambda: calls.run(case, plan))


def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A CUDA graph of a run, behind one that compiles: what replays it, and its result."""
    side = Side()
    with side:
        run()
    side.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result


class Side:
    """A stream that begins behind the current one; what is called within it runs beside that, until they `join`."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._within = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._within.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._within.__exit__(*raised)

    def join(self) -> None:
        """Let the current stream wait for this one."""
        torch.cuda.current_stream().wait_stream(self._stream)


def eager(calls: Calls, memory: Memory) -> Any:
    """Plan and run, once."""
    return calls.run(memory.case, calls.plan(memory.case))


PERFORM: dict[Execution, Callable[[Calls, Memory], Any]] = {
    Execution.EAGER: eager,
    Execution.REUSE: reused,
    Execution.OVERWRITTEN: overwritten,
    Execution.SMALL_PLAN: small_plan,
    Execution.SMALL_WORKSPACE: small_workspace,
    Execution.GRAPH: replayed,
    Execution.DOUBLE_BUFFER: double_buffered,
}
