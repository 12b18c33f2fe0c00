"""Floating-point formats: unit roundoff, subnormals, and correct rounding from FP64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .spec import DType

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A binary format: `precision` significant bits (with the implicit one), exponents from `emin` to `emax`."""

    precision: int
    emin: int
    emax: int

    @property
    def u(self) -> float:
        """Unit roundoff of round to nearest: 2^-precision."""
        return 2.0**-self.precision

    @property
    def a(self) -> float:
        """Half the smallest subnormal: the absolute error of rounding near zero."""
        return 2.0 ** (self.emin - self.precision)

    @property
    def max(self) -> float:
        """The largest finite value."""
        return (2.0 - 2.0 ** (1 - self.precision)) * 2.0**self.emax


FORMATS = {
    DType.FP16: Format(11, -14, 15),
    DType.BF16: Format(8, -126, 127),
    DType.FP32: Format(24, -126, 127),
}


def round_to(x: ArrayLike, dtype: DType) -> Array:
    """Round FP64 values to `dtype`, to nearest, ties to even, in one step; kept as FP64.

    Subnormals are kept, values beyond the largest finite one become infinite (IEEE 754-2019, 4.3.1); NaN stays NaN.
    """
    fmt = FORMATS[dtype]
    x = np.asarray(x, np.float64)
    spacing = _spacing_exponent(x, fmt)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(x, -spacing)), spacing)
    rounded = np.where(np.isfinite(x), rounded, x)
    return np.where(np.abs(rounded) > fmt.max, np.copysign(np.inf, x), rounded)


def half_spacing(x: ArrayLike, dtype: DType) -> Array:
    """Half the distance from |x| to the next larger value of `dtype`: how far rounding to x moves a number."""
    return np.ldexp(0.5, _spacing_exponent(np.asarray(x, np.float64), FORMATS[dtype]))


def _spacing_exponent(x: Array, fmt: Format) -> NDArray[np.int_]:
    """e such that the values of `fmt` around x lie 2^e apart: frexp puts |x| in [2^(exponent-1), 2^exponent)."""
    _, exponent = np.frexp(x)
    return np.where(x == 0, fmt.emin + 1, np.maximum(exponent, fmt.emin + 1)) - fmt.precision
