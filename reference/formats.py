"""Formats of numbers: unit roundoff, subnormals, correct rounding from FP64; the codes of 8-bit and 4-bit formats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .spec import CodecFormat, DType

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
    spacing = spacing_exponent(x, fmt)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(x, -spacing)), spacing)
    rounded = np.where(np.isfinite(x), rounded, x)
    return np.where(np.abs(rounded) > fmt.max, np.copysign(np.inf, x), rounded)


def half_spacing(x: ArrayLike, dtype: DType) -> Array:
    """Half the distance from |x| to the next larger value of `dtype`: how far rounding to x moves a number."""
    return np.ldexp(0.5, spacing_exponent(np.asarray(x, np.float64), FORMATS[dtype]))


def spacing_exponent(x: Array, fmt: Format) -> NDArray[np.int_]:
    """e such that the values of `fmt`, its exponents unbounded above, lie 2^e apart around x: frexp puts |x| in
    [2^(exponent-1), 2^exponent).
    """
    _, exponent = np.frexp(x)
    return np.where(x == 0, fmt.emin + 1, np.maximum(exponent, fmt.emin + 1)) - fmt.precision


class Specials(StrEnum):
    """Which codes of an fp8 format are no finite number. `IEEE`: the largest exponent is infinity (mantissa 0) or NaN;
    `FN` (finite): 0x7f and 0xff are NaN; `FNUZ` (finite, unsigned zero): 0x80, which would be -0, is NaN.
    """

    IEEE = "ieee"
    FN = "fn"
    FNUZ = "fnuz"


@dataclass(frozen=True)
class Fp8(Format):
    """An 8-bit format: a sign bit, 8 - precision exponent bits with bias 1 - emin, precision - 1 mantissa bits."""

    specials: Specials

    @property
    def max(self) -> float:
        """The largest finite value; in `FN` the mantissa of all ones is missing from the largest exponent."""
        return super().max - (2.0 ** (self.emax + 1 - self.precision) if self.specials is Specials.FN else 0.0)


# OCP 8-bit Floating Point Specification (OFP8) 1.0; FNUZ as in LLVM's Float8E4M3FNUZ.
FP8_FORMATS = {
    CodecFormat.FP8_E4M3FN: Fp8(4, -6, 8, Specials.FN),
    CodecFormat.FP8_E5M2: Fp8(3, -14, 15, Specials.IEEE),
    CodecFormat.FP8_E4M3FNUZ: Fp8(4, -7, 7, Specials.FNUZ),
}


def format_of(name: DType | CodecFormat) -> Format:
    """The format of a tensor, or of FP8 codes."""
    return FP8_FORMATS[name] if isinstance(name, CodecFormat) else FORMATS[name]


@cache
def decode_table(format: CodecFormat) -> Array:
    """The value of every code, by bit pattern: [256], int4: [16]; exact in FP64, read-only."""
    codes = np.arange(2**format.bits)
    half = 2 ** (format.bits - 1)
    table = (codes + half) % (2 * half) - float(half) if format.integer else _fp8_values(codes, FP8_FORMATS[format])
    table.flags.writeable = False
    return table


def _fp8_values(codes: NDArray[np.int_], fmt: Fp8) -> Array:
    """(-1)^sign * 2^(exponent - bias) * 1.mantissa, or 2^emin * 0.mantissa where the exponent is 0."""
    exponent, mantissa = np.divmod(codes & 0x7F, 2 ** (fmt.precision - 1))
    fraction = np.ldexp(mantissa.astype(np.float64), 1 - fmt.precision)
    size = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) + fmt.emin - 1)
    largest = exponent == 2 ** (8 - fmt.precision) - 1
    nan = {
        Specials.IEEE: largest & (mantissa > 0),
        Specials.FN: codes & 0x7F == 0x7F,
        Specials.FNUZ: codes == 0x80,
    }[fmt.specials]
    if fmt.specials is Specials.IEEE:
        size = np.where(largest, np.inf, size)
    return np.copysign(np.where(nan, np.nan, size), np.where(codes < 0x80, 1.0, -1.0))
