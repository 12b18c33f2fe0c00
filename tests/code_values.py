"""Values of codes, a second time: bits as text, values as fractions; and the formats that the tests of codecs try."""

from __future__ import annotations

import math
import os
from bisect import bisect
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import torch
from hypothesis import settings
from numpy.typing import NDArray

from sacts.reference.spec import Codec, CodecFormat

Array = NDArray[np.float64]
INT8, INT4 = CodecFormat.INT8, CodecFormat.INT4
E4M3FN, E5M2, E4M3FNUZ = CodecFormat.FP8_E4M3FN, CodecFormat.FP8_E5M2, CodecFormat.FP8_E4M3FNUZ
WRITTEN = (INT8, INT4, E4M3FN, E5M2)
FP8 = (E4M3FN, E5M2)
TORCH = {E4M3FN: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E4M3FNUZ: torch.float8_e4m3fnuz, INT8: torch.int8}
ML_DTYPES: dict[CodecFormat, type] = {
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    INT8: np.int8,
    INT4: ml_dtypes.int4,
}
# Exponent bits, bias, codes of NaN, codes of infinity: tables 1 and 2 of OFP8 1.0, and LLVM's Float8E4M3FNUZ.
LAYOUT = {
    E4M3FN: (4, 7, {0x7F, 0xFF}, set()),
    E5M2: (5, 15, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
    E4M3FNUZ: (4, 8, {0x80}, set()),
}
examples = settings(max_examples=100 * int(os.environ.get("SACTS_CODECS", "1")), deadline=None, derandomize=True)


def fp32(x: float) -> float:
    return float(np.float32(x))


def value_of(format: CodecFormat, code: int) -> Fraction | None:
    """The value of a code, None for NaN and infinities."""
    if format.integer:
        bits = f"{code:0{format.bits}b}"
        return Fraction(int(bits, 2) - (int(bits[0]) << format.bits))
    width, bias, nans, infinities = LAYOUT[format]
    if code in nans | infinities:
        return None
    bits = f"{code:08b}"
    exponent, mantissa = int(bits[1 : 1 + width], 2), int(bits[1 + width :], 2)
    one = Fraction(1 << (7 - width))
    size = (
        (mantissa / one) * Fraction(2) ** (1 - bias)
        if exponent == 0
        else (1 + mantissa / one) * Fraction(2) ** (exponent - bias)
    )
    return -size if bits[0] == "1" else size


@cache
def numbers(codec: Codec) -> dict[Fraction, int]:
    """Value -> code, of all codes that may be written, +0 before -0."""
    found: dict[Fraction, int] = {}
    for code in range(2**codec.format.bits):
        value = value_of(codec.format, code)
        if value is not None and not (codec.format.integer and value < codec.code_range[0]):
            found.setdefault(value, code)
    return found


@cache
def ordered(codec: Codec) -> list[Fraction]:
    return sorted(numbers(codec))


def searched(x: float, codec: Codec, scale: float = 1.0, zero: int = 0) -> int:
    """The code nearest to x / scale + zero, in exact fractions; of two the one whose last bit (of code - zero) is 0."""
    target = Fraction(x) / Fraction(scale) + zero
    known, values = numbers(codec), ordered(codec)
    place = bisect(values, target)
    value = min(values[max(place - 1, 0) : place + 1], key=lambda v: (abs(v - target), (known[v] - zero) % 2))
    negative_zero = value == 0 and math.copysign(1, x) < 0 and not codec.format.integer
    return 0x80 if negative_zero else known[value]


def overflows(x: float, codec: Codec) -> bool:
    """By the definition: integers beyond half a step; fp8 beyond the tie with the value that would come next, and on
    that tie where the next one would be even.
    """
    values = ordered(codec)
    if codec.format.integer:
        return not values[0] - Fraction(1, 2) <= Fraction(x) <= values[-1] + Fraction(1, 2)
    tie = values[-1] + (values[-1] - values[-2]) / 2
    return abs(Fraction(x)) > tie if numbers(codec)[values[-1]] % 2 == 0 else abs(Fraction(x)) >= tie


def hard_values(codec: Codec, scale: float) -> Array:
    """All values and all midpoints between neighbours, times the scale, and one ulp of FP64 to either side."""
    values = np.array(sorted(float(v) for v in numbers(codec)))
    points = np.concatenate((values, (values[:-1] + values[1:]) / 2)) * scale
    return np.concatenate((points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)))


CODECS = [
    Codec(INT8),
    Codec(INT8, narrow_range=True),
    Codec(INT4),
    Codec(INT4, narrow_range=True),
    Codec(E4M3FN),
    Codec(E5M2),
]


def named(codec: Codec) -> str:
    return f"{codec.format}{'-narrow' if codec.narrow_range else ''}"
