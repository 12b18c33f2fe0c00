"""Launch a backend on one problem, forward, and read what came back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.matrices.axes import Execution
from sacts.reference.forward import Inputs
from sacts.reference.spec import AttentionSpec, FallbackReason, Hints

from . import conventions, tensors
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

    def support(self, spec: AttentionSpec) -> Support:
        """What the backend declares for a spec. Raises AdapterRaised."""
        try:
            return self.backend.support(conventions.spec_for(spec, self.backend.capabilities))
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
        """One launch; `between`: what happens after its plan. Raises ContractBroken, AdapterRaised, or Refused where
        the backend refuses the spec.
        """
        where = self.backend, self.device, problem, inputs, hints or problem.hints, surroundings
        return self.perform(_Forward(*where, between))

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
        return _Forward(self.backend, self.device, problem, inputs, hints or problem.hints, CLEAN).case()[0]


@contextmanager
def _filled_memory(on: bool) -> Iterator[None]:
    """Let torch fill fresh tensors with NaN, so that an element that the backend never wrote shows."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True)
class _Forward(Launched[Observed]):
    """A launch of `run`; `between`: what happens after its plan."""

    between: Callable[[], object] = lambda: None

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
        return str(self.backend.support(conventions.spec_for(self.problem.spec, self.backend.capabilities)))

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
        spec = self.problem.spec
        if not isinstance(result, Outputs):
            raise ContractBroken(f"run must return Outputs, got {type(result).__name__}")
        shape = (spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo)
        self.check_tensor("out", result.out, shape, tensors.TORCH[spec.dtype])
        self.check_written("out", result.out)
        if result.lse is not None:
            self.check_tensor("lse", result.lse, shape[:2], torch.float32)
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
