"""Gate gradients, element by element: each lies in the interval that docs/bounds.md section 10 allows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.formats import half_spacing
from sacts.reference.forward import Inputs
from sacts.reference.gradient_bounds import Allowed, expected_gradients
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType

from ..backward_launch import Call, ObservedGradients
from ..build import Problem
from .intervals import use_within

Array = NDArray[np.float64]

OUTPUTS = ("d_v", "d_k", "d_q", "d_sink")  # in the order in which failures are looked at


@dataclass(frozen=True)
class Bounds:
    """What a launch must give, by output; d_k and d_v over the live pages [L, page_size, KV heads, d], where slots that
    no row attends have gradient exactly 0. `dtype` of d_q, d_k and d_v.
    """

    allowed: dict[str, Allowed]
    dtype: DType

    def noticed(self, output: str) -> Array:
        """The change of each element, before it is rounded, that leaves the interval on either side."""
        of, dtype = self.allowed[output], self.dtype_of(output)
        up = of.high + half_spacing(of.high, dtype) - of.value
        down = of.value - of.low + half_spacing(of.low, dtype)
        return np.where(np.isfinite(of.half_width), np.maximum(up, down), np.inf)

    def dtype_of(self, output: str) -> DType:
        """The format that an output is stored in."""
        return DType.FP32 if output == "d_sink" else self.dtype


def bounds_of(problem: Problem, inputs: Inputs, call: Call, numerics: Numerics) -> Bounds:
    """The allowance of every element, for a backend with these numerics that is fed this."""
    spec, dtype = problem.spec, numerics.gradient or numerics.out
    right = expected_gradients(
        spec,
        inputs,
        problem.table,
        problem.candidates,
        call.d_out,
        replace(numerics, out=dtype),
        call.errors,
        d_lse=call.d_lse,
    )
    at = np.searchsorted(problem.pages, right.pages)
    allowed = {"d_q": right.d_q, "d_k": _spread(right.d_k, at, problem), "d_v": _spread(right.d_v, at, problem)}
    if right.d_sink is not None:
        allowed["d_sink"] = right.d_sink
    return Bounds({name: allowed[name] for name in OUTPUTS if name in allowed}, dtype)


def _spread(part: Allowed, at: NDArray[np.int64], problem: Problem) -> Allowed:
    """A bound over the attended pages, as one over the live pages."""
    whole = []
    for each in (part.value, part.half_width, part.low, part.high, part.run_to_run):
        filled = np.zeros((len(problem.pages), *each.shape[1:]))
        filled[at] = each
        whole.append(np.where(problem.needed[..., None], filled, 0.0))
    return Allowed(*whole)


def uses(bounds: Bounds, observed: ObservedGradients) -> dict[str, Array]:
    """Observed / allowed error of each element, by output; 0 where an element has no bound."""
    found = {}
    for name, of in bounds.allowed.items():
        seen = getattr(observed, name)
        with np.errstate(invalid="ignore"):
            inside = (seen >= of.low) & (seen <= of.high)
        rounding = half_spacing(np.nan_to_num(seen), bounds.dtype_of(name))
        use = use_within(seen, of.value, of.half_width, rounding, inside)
        found[name] = np.where(np.isfinite(of.half_width), use, 0.0)
    return found


def unbounded(bounds: Bounds) -> tuple[int, int]:
    """How many elements have no bound, of how many."""
    parts = [np.isinf(of.half_width) for of in bounds.allowed.values()]
    return sum(int(part.sum()) for part in parts), sum(part.size for part in parts)
