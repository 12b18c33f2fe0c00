"""Epilogues: what is done to out once all splits are merged, and how an error of out passes through it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .formats import FORMATS, round_to
from .spec import DType, Epilogue, EpilogueKind, Nonlinearity

Array = NDArray[np.float64]

U32 = FORMATS[DType.FP32].u
EVALUATION = 2.0**-48  # relative error of the functions below in FP64, with room

FUNCTIONS: dict[Nonlinearity, Callable[[Array], Array]] = {
    Nonlinearity.RELU: lambda x: np.maximum(x, 0.0),
    Nonlinearity.SIGMOID: lambda x: 0.5 + 0.5 * np.tanh(x / 2),
    Nonlinearity.TANH: np.tanh,
    Nonlinearity.SILU: lambda x: x * (0.5 + 0.5 * np.tanh(x / 2)),
}
SLOPES = {Nonlinearity.RELU: 1.0, Nonlinearity.SIGMOID: 0.25, Nonlinearity.TANH: 1.0, Nonlinearity.SILU: 1.1}


def apply(epilogue: Epilogue, out: Array, error: Array, gate: Array | None) -> tuple[Array, Array]:
    """out after the epilogue, and its error where out may be wrong by `error`, both [tokens, heads, d_vo].

    Where a rounding boundary lies within the error, either side is possible and the error is the distance of the two.
    Raises ValueError for a gate that is missing, not needed, or not [tokens, heads, d_vo or 1].
    """
    if (gate is not None) is not (epilogue.kind is EpilogueKind.GATE):
        raise ValueError(f"epilogue {epilogue.kind}: gate must be {'given' if gate is None else 'None'}")
    if epilogue.kind is EpilogueKind.NONE:
        return out, error
    if epilogue.kind is EpilogueKind.GATE:
        assert gate is not None
        if gate.shape not in (out.shape, (*out.shape[:2], 1)):
            raise ValueError(f"gate must be {out.shape} or {(*out.shape[:2], 1)}, got {gate.shape}")
        return out * gate, error * np.abs(gate) + EVALUATION * np.abs(out * gate)
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


SILU_LEAST_AT = -1.2784645427610738  # where x sigmoid(x) is least


def interval(epilogue: Epilogue, low: Array, high: Array, gate: Array | None, u: float) -> tuple[Array, Array]:
    """What a kernel may write where the out that it reads lies in [low, high]: both ends [tokens, heads, d_vo].

    `u`: error of its function, relative to the larger of |f(x)| and min(|x|, 1); products round in FP32.
    """
    if epilogue.kind is EpilogueKind.GATE:
        assert gate is not None
        ends = np.sort([low * gate, high * gate], axis=0)
        error = U32 * np.abs(ends)
        return ends[0] - error[0], ends[1] + error[1]
    if epilogue.function is None:
        slack = 2 * U32 if epilogue.kind is EpilogueKind.LOW_BIT else 0.0  # out / scale, and code * scale
        low, high = _rounded(epilogue, low - slack * np.abs(low)), _rounded(epilogue, high + slack * np.abs(high))
        return low - slack * np.abs(low), high + slack * np.abs(high)
    function = FUNCTIONS[epilogue.function]
    points = [low, high]
    if epilogue.function is Nonlinearity.SILU:
        points.append(np.clip(SILU_LEAST_AT, low, high))
    values = np.array([function(x) for x in points])
    errors = np.array(
        [u * np.maximum(np.abs(f), np.minimum(np.abs(x), 1.0)) for f, x in zip(values, points, strict=True)]
    )
    return (values - errors).min(axis=0), (values + errors).max(axis=0)
