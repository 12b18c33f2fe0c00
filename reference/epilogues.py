"""Epilogues: what is done to out once all splits are merged, how an error of out passes through it, and how a gradient
comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .formats import FORMATS, round_to
from .spec import DType, Epilogue, EpilogueKind, Nonlinearity

Array = NDArray[np.float64]

U32 = FORMATS[DType.FP32].u
EVALUATION = 2.0**-48  # relative error of the functions below in FP64, with room
TINY = 2.0**-1070  # what an underflow may lose, with room

FUNCTIONS: dict[Nonlinearity, Callable[[Array], Array]] = {
    Nonlinearity.RELU: lambda x: np.maximum(x, 0.0),
    Nonlinearity.SIGMOID: lambda x: 0.5 + 0.5 * np.tanh(x / 2),
    Nonlinearity.TANH: np.tanh,
    Nonlinearity.SILU: lambda x: x * (0.5 + 0.5 * np.tanh(x / 2)),
}
SLOPES = {Nonlinearity.RELU: 1.0, Nonlinearity.SIGMOID: 0.25, Nonlinearity.TANH: 1.0, Nonlinearity.SILU: 1.1}


def gate_of(epilogue: Epilogue, own: Array | None, given: Array | None) -> Array | None:
    """The gate that is `given`, else that of the values, where the epilogue has one."""
    return own if given is None and epilogue.kind is EpilogueKind.GATE else given


def apply(epilogue: Epilogue, out: Array, error: Array, gate: Array | None) -> tuple[Array, Array]:
    """out after the epilogue, and its error where out may be wrong by `error`, both [tokens, heads, d_vo].

    Where a rounding boundary lies within the error, either side is possible and the error is the distance of the two.
    Raises ValueError for a gate that is missing, not needed, or not [tokens, heads, d_vo or 1].
    """
    _check_gate(epilogue, out.shape, gate)
    if epilogue.kind is EpilogueKind.NONE:
        return out, error
    if gate is not None:
        return out * gate, _times(gate, error) + EVALUATION * np.abs(out * gate)
    if epilogue.function is not None:
        result = FUNCTIONS[epilogue.function](out)
        return result, SLOPES[epilogue.function] * error + EVALUATION * (np.abs(result) + np.minimum(np.abs(out), 1.0))
    result, low, high = (_rounded(epilogue, x) for x in (out, out - error, out + error))
    return result, np.maximum(high - result, result - low)


def _rounded(epilogue: Epilogue, x: Array) -> Array:
    if epilogue.dtype is not None:
        return round_to(x, epilogue.dtype)
    largest = 2 ** (epilogue.bits - 1) - 1
    rounded: Array = np.clip(np.rint(x / epilogue.scale), -largest, largest) * epilogue.scale
    return rounded


FAR = 2.0**1000  # in place of an end at infinity, which 0 cannot multiply
SILU_LEAST_AT = -1.2784645427610738  # where x sigmoid(x) is least


def interval(epilogue: Epilogue, low: Array, high: Array, gate: Array | None, u: float) -> tuple[Array, Array]:
    """What a kernel may write where the out that it reads lies in [low, high]: both ends [tokens, heads, d_vo].

    `u`: error of its function, relative to the larger of |f(x)| and min(|x|, 1); products round in FP32. An end at
    infinity is a limit: a row without a bound has one behind a function that is bounded, or behind a gate of 0.
    """
    if epilogue.kind is EpilogueKind.GATE:
        assert gate is not None
        ends = np.sort([np.where(gate == 0, 0.0, x) * gate for x in (low, high)], axis=0)
        error = U32 * np.abs(ends)
        return ends[0] - error[0], ends[1] + error[1]
    if epilogue.function is None:
        if epilogue.kind is not EpilogueKind.LOW_BIT:
            return _rounded(epilogue, low), _rounded(epilogue, high)
        slack = 2 * U32  # out / scale, and code * scale
        low, high = _rounded(epilogue, low - slack * np.abs(low)), _rounded(epilogue, high + slack * np.abs(high))
        return low - slack * np.abs(low), high + slack * np.abs(high)
    function = FUNCTIONS[epilogue.function]
    points = [np.clip(x, -FAR, FAR) for x in (low, high)]
    if epilogue.function is Nonlinearity.SILU:
        points.append(np.clip(SILU_LEAST_AT, *points))
    values = np.array([function(x) for x in points])
    errors = np.array(
        [u * np.maximum(np.abs(f), np.minimum(np.abs(x), 1.0)) for f, x in zip(values, points, strict=True)]
    )
    highest = (values + errors).max(axis=0)
    return (values - errors).min(axis=0), np.where(highest >= FAR, np.inf, highest)


def _check_gate(epilogue: Epilogue, shape: tuple[int, ...], gate: Array | None) -> None:
    if (gate is not None) is not (epilogue.kind is EpilogueKind.GATE):
        raise ValueError(f"epilogue {epilogue.kind}: gate must be {'given' if gate is None else 'None'}")
    if gate is not None and gate.shape not in (shape, (*shape[:2], 1)):
        raise ValueError(f"gate must be {shape} or {(*shape[:2], 1)}, got {gate.shape}")


def _bell(x: Array) -> Array:
    """sigmoid(x) (1 - sigmoid(x)), without cancellation."""
    e = np.exp(-np.abs(x))
    bell: Array = e / ((1 + e) * (1 + e))
    return bell


DERIVATIVES: dict[Nonlinearity, Callable[[Array], Array]] = {
    Nonlinearity.RELU: lambda x: np.where(x > 0, 1.0, 0.0),
    Nonlinearity.SIGMOID: _bell,
    Nonlinearity.TANH: lambda x: 4 * _bell(2 * x),
    Nonlinearity.SILU: lambda x: FUNCTIONS[Nonlinearity.SIGMOID](x) + x * _bell(x),
}
# How far a derivative f'(x) may be off where x may be off by e.
DERIVATIVE_ERRORS: dict[Nonlinearity, Callable[[Array, Array, Array], Array]] = {
    Nonlinearity.RELU: lambda slope, x, e: np.where((np.abs(x) <= e) & (e > 0), 1.0, 0.0),
    Nonlinearity.SIGMOID: lambda slope, x, e: slope * (np.expm1(e) + EVALUATION),  # |ln f'|' <= 1
    Nonlinearity.TANH: lambda slope, x, e: slope * (np.expm1(2 * e) + EVALUATION),  # |ln f'|' <= 2
    Nonlinearity.SILU: lambda slope, x, e: 0.51 * e + EVALUATION,  # |f''| <= 1 / 2
}


class PulledBack(NamedTuple):
    """The gradient of out before the epilogue, d_out [tokens, heads, d_vo], and of the gate, shaped as it is (None
    without one), each with its error (infinite where that of out is).
    """

    d_out: Array
    error: Array
    d_gate: Array | None = None
    d_gate_error: Array | None = None


def pull_back(epilogue: Epilogue, out: Array, error: Array, d_out: Array, gate: Array | None) -> PulledBack:
    """`d_out` [tokens, heads, d_vo], the gradient of what `apply` yields, back through it; `out` and `error` before it.

    A cast is straight through, as autograd has it. relu has slope 0 at 0, as torch has it. Raises ValueError for a gate
    as `apply`, and for `low_bit`.
    """
    _check_gate(epilogue, d_out.shape, gate)
    if epilogue.kind is EpilogueKind.LOW_BIT:
        raise ValueError("epilogue low_bit has no gradient: writing codes is flat almost everywhere")
    if gate is not None:
        product = d_out * out
        wrong = _times(d_out, error) + EVALUATION * np.abs(product) + TINY
        if gate.shape != out.shape:
            wrong = wrong.sum(-1, keepdims=True) + out.shape[-1] * EVALUATION * np.abs(product).sum(-1, keepdims=True)
            product = product.sum(-1, keepdims=True)
        return PulledBack(d_out * gate, EVALUATION * np.abs(d_out * gate) + TINY, product, wrong)
    if epilogue.function is None:
        return PulledBack(d_out, np.zeros_like(d_out))
    slope = DERIVATIVES[epilogue.function](out)
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = DERIVATIVE_ERRORS[epilogue.function](slope, out, error)
    wrong = np.where(np.isfinite(error), wrong, np.inf)
    return PulledBack(d_out * slope, _times(d_out, wrong) + TINY)


def _times(x: Array, error: Array) -> Array:
    """|x| error, 0 where x is 0, also against an infinite error."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(x == 0, 0.0, np.abs(x) * error)
