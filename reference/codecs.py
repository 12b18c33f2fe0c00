"""Codecs: numbers to codes and back, with one rounding; scales and zero points of groups. DESIGN section 4, seed 7.2.

A code is a bit pattern, uint8 (int4: below 16 until `pack` puts two in a byte). Scales and zero points broadcast
against what they belong to; scales are positive numbers that FP32 holds, zero points integers up to 2^24 in size, so
that (value of the code - zero point) * scale is exact in FP64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .formats import FORMATS, FP8_FORMATS, decode_table, round_to, spacing_exponent
from .spec import Codec, CodecFormat, DType, NaNRule, OverflowRule

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Codes = NDArray[np.uint8]

NAN_CODE = 0x7F  # what NaN becomes in fp8, with its sign
LEAST_SCALE = 2.0**-126  # the smallest normal FP32: hardware may flush smaller ones to zero
MAX_ZERO = 2.0**24  # FP32 holds every integer up to here
MAX_OFFSET = 2.0**23  # steps between 0 and the values of an asymmetric group


def decode(codes: ArrayLike, format: CodecFormat, scale: ArrayLike = 1.0, zero: ArrayLike = 0.0) -> Array:
    """(value of the code - zero) * scale, exact. Raises ValueError for a code that the format does not have."""
    codes, table = np.asarray(codes), decode_table(format)
    bad = (codes < 0) | (codes >= len(table))
    if bad.any():
        raise ValueError(f"{_place(bad)}: {codes[bad][0]} is no code of {format}, which has {len(table)}")
    return np.asarray((table[codes] - zero) * np.asarray(scale, np.float64))


def encode(x: ArrayLike, codec: Codec, scale: ArrayLike = 1.0, zero: ArrayLike = 0.0) -> Codes:
    """The code whose value is nearest to the exact x / scale + zero, in one rounding; of two the one that is even in
    its last bit (integers: of code - zero).

    fp8: overflow is judged after rounding with an unbounded exponent, as in IEEE 754 and OFP8; the sign of zero and of
    NaN is kept. Integers: up to half a step beyond the range is nearest to the end of the range, no overflow.
    Infinite x overflow. Raises ValueError as the codec's overflow and NaN rules say, naming the first such element,
    for a format that is only read (fp8_e4m3fnuz), a scale that is not positive and finite, and a zero point that is no
    integer or not 0 under a symmetric codec.
    """
    x, scale, zero = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (x, scale, zero)))
    _refuse(~((scale > 0) & (scale < np.inf)), scale, "scale must be positive and finite")
    _refuse(
        ~((zero == np.rint(zero)) & (np.abs(zero) <= MAX_ZERO)), zero, f"zero point must be an integer up to {MAX_ZERO}"
    )
    _refuse((zero != 0) & (not codec.asymmetric), zero, "zero point must be 0 under a symmetric codec")
    nan = np.isnan(x)
    if codec.nan is NaNRule.ERROR and nan.any():
        raise ValueError(f"{_place(nan)} is NaN, which the codec's NaN rule refuses")
    if codec.format.integer:
        codes, over = _integers(x, codec, scale, zero)
    elif codec.format is CodecFormat.FP8_E4M3FNUZ:
        raise ValueError(f"{codec.format} is read, never written: encode to fp8_e4m3fn or fp8_e5m2")
    else:
        codes, over = _fp8(x, codec, scale)
    over &= ~nan
    if codec.overflow is OverflowRule.ERROR and over.any():
        raise ValueError(
            f"{_place(over)}: {x[over][0]} with scale {scale[over][0]} lies beyond the codes of {codec.format}"
        )
    return codes


def _integers(x: Array, codec: Codec, scale: Array, zero: Array) -> tuple[Codes, Bools]:
    least, largest = codec.code_range
    number = np.clip(nearest(x, scale) + zero, least, largest)
    number = np.where(np.isnan(x), codec.nan_code, number)
    over = (x > (largest - zero + 0.5) * scale) | (x < (least - zero - 0.5) * scale)
    return (number.astype(np.int64) & (2**codec.format.bits - 1)).astype(np.uint8), over


def _fp8(x: Array, codec: Codec, scale: Array) -> tuple[Codes, Bools]:
    fmt = FP8_FORMATS[codec.format]
    with np.errstate(over="ignore", invalid="ignore"):
        spacing = np.ldexp(1.0, spacing_exponent(x / scale, fmt))
        size = np.abs(nearest(x, scale * spacing)) * spacing
    over = np.asarray(~(size <= fmt.max))
    finite = decode_table(codec.format)[:0x80]
    finite = finite[np.isfinite(finite)]
    codes = np.searchsorted(finite, np.where(over, fmt.max, size))
    if codec.overflow is OverflowRule.NON_FINITE:
        codes = np.where(over, len(finite), codes)  # e5m2: infinity; e4m3fn: NaN, the code behind the largest number
    codes = np.where(np.isnan(x), NAN_CODE, codes)
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8), over


def nearest(x: Array, step: Array) -> Array:
    """The integer nearest to the exact x / step, ties to even; `step` has at most 32 significant bits.

    One rounding, though the quotient is rounded too: a tie (n + 1/2) * step is a number of FP64, any other x lies at
    least 2^-53 of it away, and no such quotient rounds to n + 1/2.
    """
    with np.errstate(over="ignore"):
        return np.asarray(np.rint(x / step))


def error_bound(x: ArrayLike, codec: Codec, scale: ArrayLike = 1.0, zero: ArrayLike = 0.0) -> Array:
    """How far decode(encode(x)) may lie from x.

    Integers: scale / 2. fp8: max(u |x|, a scale), u the unit roundoff, a half the smallest subnormal. Beyond the
    largest code the distance to it, where that is more, if the codec saturates; else infinite.
    """
    x, scale, zero = (np.asarray(a, np.float64) for a in (x, scale, zero))
    if codec.format.integer:
        least, largest = ((end - zero) * scale for end in codec.code_range)
        near, past = np.asarray(0.5 * scale), 0.5 * scale
        beyond = np.maximum(x - largest, least - x)
    else:
        fmt = FP8_FORMATS[codec.format]
        near, past = np.maximum(fmt.u * np.abs(x), fmt.a * scale), 2.0 ** (fmt.emax - fmt.precision) * scale
        beyond = np.abs(x) - fmt.max * scale
    if codec.overflow is OverflowRule.SATURATE:
        return np.maximum(near, np.nextafter(beyond, np.inf))
    return np.where(beyond > past, np.inf, near)


# --- scales and zero points


def scales_of(least: Array, largest: Array, codec: Codec) -> tuple[Array, Array]:
    """Scale and zero point of groups whose values lie in [least, largest]; nothing in a group is
    clipped by more than half a step (asymmetric), or at all.

    Symmetric: the smallest scale that reaches both ends, max(largest / largest code, least / least code). Asymmetric:
    (largest - least) / number of steps, and the least value gets the least code; a group of one value v: scale |v|.
    Scales are rounded up, to FP32 or to a power of two, to at least 2^-126, and so that no zero point exceeds 2^24.
    A group of zeros has scale 1 and zero point 0. Raises ValueError for a scale that FP32 cannot hold.
    """
    size = np.maximum(np.abs(least), np.abs(largest))
    if codec.asymmetric:
        low, high = codec.code_range
        scale = np.maximum(_rounded_up(_span(least, largest), high - low, codec), _rounded_up(size, MAX_OFFSET, codec))
        if not codec.power_of_two:
            scale = np.where(least == largest, _rounded_up(size, 1, codec), scale)
    elif codec.format.integer:
        low, high = codec.code_range
        scale = np.maximum(
            _rounded_up(np.maximum(largest, 0), high, codec), _rounded_up(np.maximum(-least, 0), -low, codec)
        )
    else:
        scale = _rounded_up(size, FP8_FORMATS[codec.format].max, codec)
    scale = np.where(size == 0, 1.0, scale)
    if (scale > FORMATS[DType.FP32].max).any():
        raise ValueError(f"values up to {size.max()} need a scale that FP32 does not hold")
    if not codec.asymmetric:
        return scale, np.zeros_like(scale)
    return scale, np.where(size == 0, 0.0, codec.code_range[0] - nearest(least, scale))


def _span(least: Array, largest: Array) -> Array:
    """largest - least, rounded up: the error of the difference is a number itself (TwoSum)."""
    span = largest - least
    back = span - largest
    error = (largest - (span - back)) - (least + back)
    return np.where(error > 0, np.nextafter(span, np.inf), span)


def _rounded_up(size: Array, codes: float, codec: Codec) -> Array:
    """The smallest scale from 2^-126 on with scale * codes >= size (the product is exact); 0 for size 0. May exceed
    FP32's range.
    """
    quotient = np.maximum(size / codes, LEAST_SCALE)
    if codec.power_of_two:
        scale = np.ldexp(0.5, np.frexp(quotient)[1])
        above = 2 * scale
    else:
        with np.errstate(over="ignore"):
            scale = round_to(quotient, DType.FP32)
            above = np.nextafter(scale.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    return np.where(size > 0, np.where(scale * codes >= size, scale, above), 0.0)


# --- two codes in a byte


def pack(codes: ArrayLike, codec: Codec, axis: int) -> Codes:
    """int4: two neighbours along `axis` to a byte, in the codec's order; an odd one out gets a neighbour of code 0.

    n codes along the axis become ceil(n / 2) bytes; codes of 8 bits stay as they are. Raises ValueError for a code
    that needs more than its bits.
    """
    codes = np.asarray(codes)
    bad = (codes < 0) | (codes >= 2**codec.format.bits)
    if bad.any():
        raise ValueError(f"{_place(bad)}: {codes[bad][0]} is no code of {codec.format}")
    if codec.format.bits == 8:
        return codes.astype(np.uint8)
    along: Codes = np.moveaxis(codes.astype(np.uint8), axis, -1)
    along = np.pad(along, [(0, 0)] * (along.ndim - 1) + [(0, along.shape[-1] % 2)])
    low, high = (along[..., i::2] for i in ((0, 1) if codec.low_nibble_first else (1, 0)))
    packed: Codes = np.asarray(low | high << 4, np.uint8)
    return np.moveaxis(packed, -1, axis)


def unpack(packed: ArrayLike, codec: Codec, axis: int, length: int) -> Codes:
    """The first `length` codes along `axis`; the inverse of `pack`. The nibble behind an odd last one is not read.

    Raises ValueError where the packed axis does not hold exactly `length` codes.
    """
    packed = np.asarray(packed, np.uint8)
    per_byte = 8 // codec.format.bits
    if packed.shape[axis] != -(-length // per_byte):
        raise ValueError(
            f"{length} codes of {codec.format} take {-(-length // per_byte)} bytes, got {packed.shape[axis]}"
        )
    if per_byte == 1:
        return packed
    along = np.moveaxis(packed, axis, -1)
    nibbles = (along & 0xF, along >> 4) if codec.low_nibble_first else (along >> 4, along & 0xF)
    both = np.stack(nibbles, axis=-1).reshape(*along.shape[:-1], -1)
    return np.moveaxis(both[..., :length], -1, axis)


def _refuse(bad: Bools, values: Array, rule: str) -> None:
    """Raise ValueError for the first bad value."""
    if bad.any():
        raise ValueError(f"{_place(bad)}: {rule}, got {values[bad][0]}")


def _place(bad: Bools) -> str:
    """The index of the first bad element, in words."""
    return f"element {tuple(np.argwhere(bad)[0].tolist())}"
