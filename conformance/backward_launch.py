"""Launch a backend's backward on one problem and hold it to the contract: it is fed out and lse, so that gradients are
judged in isolation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.reference.bounds import expected
from sacts.reference.formats import round_to
from sacts.reference.forward import Inputs, forward
from sacts.reference.gradient_bounds import FedErrors
from sacts.reference.numerics import Numerics
from sacts.reference.spec import Hints

from . import tensors
from .adapter import Backend, Capabilities, Case, Gradients, KVLayout, LseBase, Saved
from .build import Problem
from .contract import CLEAN, ContractBroken, Launched, Surroundings
from .launch import Launcher

Array = NDArray[np.float64]

SCANNED = 2**26  # elements of d_k or d_v up to which every page without data is looked at
FIRST_PAGES = 64  # of a larger pool


@dataclass(frozen=True)
class Call:
    """What backward is given beside the problem, in FP64. d_out [tokens, heads, d_vo]; d_lse [tokens, heads], of the
    natural lse, 0 where the backend takes none; out and lse as they are fed (lse in the declared convention, as FP32
    holds it); errors: how far these are from the exact ones, or (a backend that reads neither) from its own.
    """

    d_out: Array
    d_lse: Array
    out: Array
    lse: Array
    errors: FedErrors

    def only(self, some: NDArray[np.bool_]) -> Call:
        """The same with d_out and d_lse 0 outside these output rows [tokens, heads]."""
        return replace(self, d_out=np.where(some[..., None], self.d_out, 0.0), d_lse=np.where(some, self.d_lse, 0.0))


@dataclass(frozen=True)
class ObservedGradients:
    """What came back, in FP64: d_q [tokens, heads, d_qk]; d_k and d_v [live pages, page_size, KV heads, d]; d_sink
    [heads], None where the spec has no sink.
    """

    d_q: Array
    d_k: Array
    d_v: Array
    d_sink: Array | None


def call_of(problem: Problem, inputs: Inputs, backend: Backend, d_out: Array, d_lse: Array) -> Call:
    """The call with the reference's own out and lse, rounded to what the backend takes."""
    spec, declared = problem.spec, backend.capabilities
    right = forward(spec, inputs, problem.table, problem.candidates)
    out = round_to(right.out, spec.dtype)
    base = np.log(2.0) if declared.lse_base is LseBase.TWO else 1.0
    some = np.isfinite(right.lse)
    lse = np.where(some, np.float32(right.lse / base).astype(np.float64), declared.empty_lse)
    if not declared.reads_saved:
        numerics = backend.numerics(spec.dtype, problem.hints)
        own = expected(spec, inputs, problem.table, problem.candidates, numerics)
        reach = np.maximum(own.out_hi - own.out, own.out - own.out_lo)
        bounded = np.where(own.trusted[..., None], np.maximum(reach, own.half_width), np.inf)
        errors = FedErrors(bounded, np.where(own.trusted, own.lse_bound, np.inf))
    else:
        wrong = np.zeros(lse.shape)
        wrong[some] = np.abs(lse[some] * base - right.lse[some]) + right.lse_error[some]
        errors = FedErrors(np.abs(out - right.out) + right.out_error, wrong)
    return Call(d_out, d_lse if declared.d_lse else np.zeros_like(d_lse), out, lse, errors)


def launch_backward(
    launcher: Launcher,
    problem: Problem,
    inputs: Inputs,
    call: Call,
    *,
    hints: Hints | None = None,
    surroundings: Surroundings = CLEAN,
) -> ObservedGradients:
    """One launch of backward. Raises ContractBroken, AdapterRaised, or Refused where the backend refuses the spec."""
    how = launcher.backend, launcher.device, problem, inputs, hints or problem.hints, surroundings
    return launcher.perform(_Backward(*how, call))


def dtype_of(numerics: Numerics) -> torch.dtype:
    """The dtype of d_q, d_k and d_v."""
    return tensors.TORCH[numerics.gradient or numerics.out]


@dataclass(frozen=True)
class _Backward(Launched[ObservedGradients]):
    """A launch of `backward`."""

    fed: Call

    name = "backward"

    @cached_property
    def _dtype(self) -> torch.dtype:
        return dtype_of(self.backend.numerics(self.problem.spec.dtype, self.hints))

    @cached_property
    def _buffers(self) -> dict[str, tensors.Guarded]:
        """d_q and d_sink must be written; d_k and d_v start at zero, so that rows may add to them."""
        spec, caches = self.problem.spec, _cache_shapes(self.problem, self.backend.capabilities)
        made = {
            "d_q": tensors.Guarded.make(
                (spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk), self._dtype, self.device
            )
        }
        made |= {name: tensors.Guarded.zeros(shape, self._dtype, self.device) for name, shape in caches.items()}
        if spec.sink_logits:
            made["d_sink"] = tensors.Guarded.make((spec.num_qo_heads,), torch.float32, self.device)
        return made

    def given(self) -> dict[str, torch.Tensor]:
        return self._given

    def blank(self, live: torch.Tensor) -> None:
        super().blank(live)
        for name, each in self._buffers.items():
            if name in ("d_k", "d_v"):  # the rest of a large pool is never touched
                each.inner[live] = 0
            else:
                each.blank()

    @cached_property
    def _given(self) -> dict[str, torch.Tensor]:
        spec, d_lse = self.problem.spec, None
        if self.backend.capabilities.d_lse:
            d_lse = torch.from_numpy(self.fed.d_lse.astype(np.float32)).to(self.device)
        given = {
            "saved.out": tensors.to_torch(self.fed.out, spec.dtype, self.device),
            "saved.lse": torch.from_numpy(self.fed.lse.astype(np.float32)).to(self.device),
            "d_out": tensors.to_torch(self.fed.d_out, spec.dtype, self.device),
        }
        return given if d_lse is None else given | {"d_lse": d_lse}

    def case(self) -> tuple[Case, torch.Tensor]:
        case, live = super().case()
        return replace(case, gradients=Gradients(**{name: each.inner for name, each in self._buffers.items()})), live

    def call(self, case: Case, planned: tuple[Any, ...]) -> Any:
        given = self._given
        saved = Saved(given["saved.out"], given["saved.lse"])
        return self.backend.backward(case, saved, given["d_out"], given.get("d_lse"), planned)

    def watched(self, case: Case, live: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().watched(case, live) | self._given

    def offered(self) -> dict[str, tensors.Guarded]:
        return super().offered() | self._buffers

    def returns_own(self, result: Gradients) -> bool:
        return any(getattr(result, name).data_ptr() != each.inner.data_ptr() for name, each in self._buffers.items())

    def observe(self, result: Any) -> ObservedGradients:
        spec = self.problem.spec
        if not isinstance(result, Gradients):
            raise ContractBroken(f"backward must return Gradients, got {type(result).__name__}")
        for name, each in self._buffers.items():
            dtype = torch.float32 if name == "d_sink" else self._dtype
            self.check_tensor(name, getattr(result, name), tuple(each.inner.shape), dtype)
        if result.d_sink is not None and not spec.sink_logits:
            raise ContractBroken("d_sink must be None: the spec has no sink logits", "d_sink")
        self.check_written("d_q", result.d_q)
        if result.d_sink is not None and len(left := tensors.unwritten(result.d_sink)):
            raise ContractBroken(f"query head {int(left[0][0])}: d_sink was never written", "d_sink")
        d_k, d_v = (self._live(name, getattr(result, name)) for name in ("d_k", "d_v"))
        d_sink = None if result.d_sink is None else tensors.to_numpy(result.d_sink)
        return ObservedGradients(tensors.to_numpy(result.d_q), d_k, d_v, d_sink)

    def _live(self, name: str, gradient: torch.Tensor) -> Array:
        """The pages with data, NHD. Requirement: every other page has gradient 0."""
        others = torch.from_numpy(_looked_at(gradient, self.problem.pages)).to(gradient.device)
        touched = others[(gradient[others] != 0).flatten(1).any(dim=1)].tolist()
        if touched:
            place = f"physical page {touched[0]}"
            raise ContractBroken(f"{name} of {place} is not 0, but the page holds no key of any request", place)
        pages = torch.from_numpy(self.problem.pages).to(gradient.device)
        found = tensors.to_numpy(gradient[pages])
        return np.swapaxes(found, 1, 2) if self.backend.capabilities.kv_layout is KVLayout.HND else found


def _looked_at(gradient: torch.Tensor, pages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pages without data: all, or in a pool so large that nobody should touch it whole, the first ones and the
    neighbours of pages with data.
    """
    if gradient.numel() <= SCANNED:
        return np.setdiff1d(np.arange(len(gradient)), pages)
    near = np.concatenate((np.arange(FIRST_PAGES), pages - 1, pages + 1))
    return np.setdiff1d(near[(near >= 0) & (near < len(gradient))], pages)


def _cache_shapes(problem: Problem, capabilities: Capabilities) -> dict[str, tuple[int, ...]]:
    spec = problem.spec
    inner: tuple[int, ...] = (spec.page_size, spec.num_kv_heads)
    if capabilities.kv_layout is KVLayout.HND:
        inner = inner[::-1]
    return {
        name: (problem.table.num_pages, *inner, dim)
        for name, dim in (("d_k", spec.head_dim_qk), ("d_v", spec.head_dim_vo))
    }
