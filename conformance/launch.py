"""Launch a backend on one problem, forward, and read what came back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.matrices.axes import Execution
from sacts.reference.forward import Inputs
from sacts.reference.spec import AttentionSpec, FallbackReason, Hints

from . import branches, conventions, tensors
from .adapter import Backend, Case, LseBase, Outputs, Support
from .build import Problem
from .contract import CLEAN, AdapterRaised, ContractBroken, Launched, Surroundings

Array = NDArray[np.float64]

T = TypeVar("T")


@dataclass(frozen=True)
class Observed:
    """What came back. out [tokens, heads, d_vo] and lse [tokens, heads] (converted to natural log, empty rows -inf)
    in FP64, with the raw bits of both; lse is None where the backend has none.
    """

    out: Array
    lse: Array | None
    out_bits: NDArray[np.int64]
    lse_bits: NDArray[np.int64] | None


class Launcher:
    """Runs one backend on one device. `on_launch(first)` begins the time of a launch, `on_return()` ends it."""

    def __init__(
        self,
        backend: Backend,
        device: str,
        on_launch: Callable[[bool], None] = lambda first: None,
        execution: Execution = Execution.EAGER,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = backend
        self.device = device
        self.execution = execution
        self._on_launch, self._on_return = on_launch, on_return
        self._launched: set[tuple[type, AttentionSpec]] = set()
        self._returns_own: dict[type, bool] = {}

    def executing(self, execution: Execution) -> Launcher:
        """The same, but for what runs before each launch."""
        same = self.backend, self.device, self._on_launch, execution, self._on_return
        return self if execution is self.execution else Launcher(*same)

    def forced(self, reason: FallbackReason) -> Launcher:
        """The same, but for a backend that is told to leave its sparse path."""
        return Launcher(self.backend.forced(reason), self.device, self._on_launch, self.execution, self._on_return)

    def support(self, spec: AttentionSpec, num_branches: int = 1) -> Support:
        """What the backend declares for a judge's spec of so many branches. Raises AdapterRaised."""
        try:
            return self.backend.support(conventions.spec_for(spec, self.backend.capabilities, num_branches))
        except Exception as error:  # whatever an adapter raises is its own verdict
            raise AdapterRaised("support(spec)") from error

    def __call__(
        self,
        problem: Problem,
        inputs: Inputs,
        *,
        hints: Hints | None = None,
        surroundings: Surroundings = CLEAN,
        between: Callable[[], object] = lambda: None,
    ) -> Observed:
        """One launch, or of branches one for each, whose gate is 1 where those of all others are 0: what comes back is
        out and lse of the branch. `between`: what happens after its plan. Raises ContractBroken, AdapterRaised, or
        Refused where the backend refuses the spec.
        """
        where = self.backend, self.device, problem, inputs, hints or problem.hints, surroundings
        if problem.branches == 1:
            return self.perform(_Forward(*where, between))
        tokens, heads = problem.spec.num_tokens // problem.branches, problem.spec.num_qo_heads
        seen = []
        for branch in range(problem.branches):
            gates = branches.one_hot(tokens, heads, problem.branches, branch)
            seen.append(self.perform(_Forward(*where, between, gates, branch)))
        return _side_by_side(problem, seen)

    def gated(
        self,
        problem: Problem,
        inputs: Inputs,
        gates: Array,
        *,
        hints: Hints | None = None,
        surroundings: Surroundings = CLEAN,
    ) -> Observed:
        """One launch with these gates [num_tokens, num_qo_heads, branches], and q of the first branch: out of the call,
        lse [num_tokens, num_qo_heads, branches]. Raises as a call does.
        """
        where = self.backend, self.device, problem, inputs, hints or problem.hints, surroundings
        return self.perform(_Forward(*where, gates=gates))

    def perform(self, launch: Launched[T]) -> T:
        """Make a launch, forward or backward: `launch` holds no state yet. Raises as a call does."""
        kind = type(launch)
        self._on_launch((kind, launch.problem.spec) not in self._launched)
        self._launched.add((kind, launch.problem.spec))
        again = replace(launch)
        try:
            with _filled_memory(self._returns_own.get(kind, False)):
                observed, own = launch.run(self.execution)
        finally:
            self._on_return()
        if own and not self._returns_own.get(kind):  # its empty tensors held no NaN yet: once more, under the fill
            self._returns_own[kind] = True
            return self.perform(again)
        self._returns_own[kind] = own
        return observed

    def case(self, problem: Problem, inputs: Inputs, hints: Hints | None = None) -> Case:
        """The problem as this backend takes it, for what it says about a case without running it."""
        gates = None
        if problem.branches > 1:
            tokens, heads = problem.spec.num_tokens // problem.branches, problem.spec.num_qo_heads
            gates = branches.one_hot(tokens, heads, problem.branches, 0)
        where = self.backend, self.device, problem, inputs, hints or problem.hints, CLEAN
        return _Forward(*where, gates=gates).case()[0]


def _side_by_side(problem: Problem, seen: Sequence[Observed]) -> Observed:
    """What came back of each branch, [tokens of the call, ...], in the order of the problem's tokens."""
    every = range(problem.branches)
    order = np.argsort(np.concatenate([branches.tokens_of(problem.spec, len(every), branch) for branch in every]))

    def put(parts: Sequence[NDArray[Any] | None]) -> Any:
        some = [part for part in parts if part is not None]
        return np.concatenate(some)[order] if some else None

    def of_branch(name: str) -> list[NDArray[Any] | None]:
        found = [getattr(each, name) for each in seen]
        return [x if x is None else x[..., branch] for branch, x in enumerate(found)]

    return Observed(
        out=put([each.out for each in seen]),
        lse=put(of_branch("lse")),
        out_bits=put([each.out_bits for each in seen]),
        lse_bits=put(of_branch("lse_bits")),
    )


@contextmanager
def _filled_memory(on: bool) -> Iterator[None]:
    """Let torch fill fresh tensors with NaN, so that an element that the backend never wrote shows."""
    if not on:
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports the compiler, for 2 s
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@dataclass(frozen=True)
class _Forward(Launched[Observed]):
    """A launch of `run`; `between`: what happens after its plan. `gates` [num_tokens, num_qo_heads, branches] of the
    call, None where it has no branches; `branch`: whose q stands in it.
    """

    between: Callable[[], object] = lambda: None
    gates: Array | None = None
    branch: int = 0

    @property
    def tokens(self) -> NDArray[np.int64]:
        return branches.tokens_of(self.problem.spec, self.problem.branches, self.branch)

    def case(self) -> tuple[Case, torch.Tensor]:
        case, live = super().case()
        if self.gates is None:
            return case, live
        return replace(case, gates=torch.from_numpy(self.gates.astype(np.float32)).to(self.device)), live

    def call(self, case: Case, planned: tuple[Any, ...]) -> Any:
        self.between()
        before = self.backend.counters()
        result = self.backend.run(case, planned)
        if before is not None:
            self._check_counters(Counter(self.backend.counters()), Counter(before))
        return result

    @property
    def _declared(self) -> str:
        """The path that the backend must take."""
        capabilities = self.backend.capabilities
        return str(self.backend.support(conventions.spec_for(self.problem.spec, capabilities, self.problem.branches)))

    def _check_counters(self, counted: Counter[str], before: Counter[str]) -> None:
        """Requirement: a run is counted once, under its path. Raises ContractBroken."""
        counted.subtract(before)
        more = {path: n for path, n in counted.items() if n}
        if more != {self._declared: 1}:
            seen = ", ".join(f"{path} {n:+}" for path, n in sorted(more.items())) or "nothing"
            raise ContractBroken(f"one run was counted as {seen}, expected {self._declared} +1", "counters")

    def returns_own(self, result: Outputs) -> bool:
        return result.out.data_ptr() != self._out.inner.data_ptr()

    def observe(self, result: Any) -> Observed:
        spec = self.spec
        if not isinstance(result, Outputs):
            raise ContractBroken(f"run must return Outputs, got {type(result).__name__}")
        shape = (spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo)
        self.check_tensor("out", result.out, shape, tensors.TORCH[spec.dtype])
        self.check_written("out", result.out)
        if result.lse is not None:
            self.check_tensor("lse", result.lse, self.lse_shape, torch.float32)
            self.check_written("lse", result.lse)
        if result.path is None and self.backend.reason:
            raise ContractBroken("a backend that is forced to fall back must say its path")
        if result.path is not None and result.path != self._declared:
            raise ContractBroken(f"the backend took the path {result.path}, but declared {self._declared}")
        return Observed(
            out=tensors.to_numpy(result.out),
            lse=None if result.lse is None else self._natural(tensors.to_numpy(result.lse)),
            out_bits=tensors.bits(result.out),
            lse_bits=None if result.lse is None else tensors.bits(result.lse),
        )

    def _natural(self, lse: Array) -> Array:
        capabilities = self.backend.capabilities
        lse = np.where(lse == capabilities.empty_lse, -np.inf, lse)
        return lse * np.log(2.0) if capabilities.lse_base is LseBase.TWO else lse
