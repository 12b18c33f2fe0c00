"""Values whose mean lies a hair beside a midpoint of the output format: the smallest gain flips a bit of out."""

from __future__ import annotations

import math

import numpy as np

from sacts.reference.formats import FORMATS
from sacts.reference.spec import DType

from ..draw import Array, Draw

LEAST_KEYS = 3  # with fewer the mean cannot be placed
GAIN = 1e-5  # relative errors of the mass that must show
HAIRS = (4.0, 8.0, 2.0, 16.0)  # relative distances from a midpoint, in 2^-21, by channel in turn
UNATTENDED = 1.5
WHOLE_BITS = 23  # of a partial sum, with one to spare


def values(k: int, longest: int, channels: int, dtype: DType, draw: Draw) -> Array:
    """V [k, channels] of the keys of one row under equal weights. All lie in [1, 2) but one, small, that decides the
    hair; partial sums in any order, also of rows of `longest` keys, are multiples of one power of two that FP32 holds.

    In FP32 nothing has to be placed: out itself shows the gain.
    """
    v = np.ones((k, channels))
    if k < LEAST_KEYS:
        return v
    precision = FORMATS[DType.BF16 if dtype is DType.FP32 else dtype].precision
    units = 2 ** (precision - 1)  # of 1, in steps between neighbours
    for channel in range(channels):
        order = draw.permutation(k)
        hair = _hair(k, longest, precision, HAIRS[channel // 2 % len(HAIRS)])
        v[order[0], channel] = (k % 2) / (2 * units) + (hair if channel % 2 else -hair)
        each, rest = divmod(units + k // 2, k - 1)
        v[order[1:], channel] += each / units
        v[order[1 : rest + 1], channel] += 1 / units
    return v


def _hair(k: int, longest: int, precision: int, distance: float) -> float:
    """A power of two near k * distance * 2^-21, exact beside half a step of the format and in sums."""
    exponent = round(math.log2(k * distance)) - 21
    least = math.ceil(math.log2(2 * longest)) - WHOLE_BITS
    if k % 2:
        least = max(least, 1 - 2 * precision)
    return 2.0 ** max(exponent, least)
