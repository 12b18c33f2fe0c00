"""Codes against exact fractions taken from the bits of each format, and against torch and ml_dtypes where these agree.

`SACTS_CODECS=50 pytest tests/test_codecs.py` draws 50 times as many examples.
"""

from __future__ import annotations

import ast
import math
import os
import re
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sacts.reference import codecs
from sacts.reference.codecs import decode, encode, error_bound, nearest, pack, scales_of, unpack
from sacts.reference.formats import FORMATS, FP8_FORMATS, decode_table, round_to
from sacts.reference.spec import Codec, CodecFormat, DType, NaNRule, OverflowRule

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


# --- a second formulation: bits as text, values as fractions


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


# --- decoding


@pytest.mark.parametrize("format", CodecFormat)
def test_every_code_has_the_value_that_its_bits_say(format: CodecFormat) -> None:
    table = decode_table(format)
    assert table.shape == (2**format.bits,)
    for code, found in enumerate(table.tolist()):
        value = value_of(format, code)
        if value is not None:
            assert Fraction(found) == value, hex(code)
            negative = code >= 2 ** (format.bits - 1)
            assert math.copysign(1, found) == (-1 if negative else 1), hex(code)
        elif code in LAYOUT[format][3]:
            assert found == (math.inf if code < 0x80 else -math.inf)
        else:
            assert math.isnan(found)


@pytest.mark.parametrize("format", TORCH)
def test_torch_decodes_all_codes_alike(format: CodecFormat) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    same(decode_table(format), codes.view(TORCH[format]).to(torch.float64).numpy())


@pytest.mark.parametrize("format", ML_DTYPES)
def test_ml_dtypes_decodes_all_codes_alike(format: CodecFormat) -> None:
    codes = np.arange(2**format.bits, dtype=np.uint8)
    same(decode_table(format), codes.view(ML_DTYPES[format]).astype(np.float64))


def same(found: Array, expected: Array) -> None:
    """Equal numbers, zeros of equal sign, NaN in the same places; the sign of a NaN means nothing."""
    np.testing.assert_array_equal(found, expected)
    number = ~np.isnan(expected)
    assert (np.signbit(found) == np.signbit(expected))[number].all()


def test_the_extremes_are_those_of_the_published_tables() -> None:
    assert [FP8_FORMATS[f].max for f in (E4M3FN, E5M2, E4M3FNUZ)] == [448, 57344, 240]
    assert [2 * FP8_FORMATS[f].a for f in (E4M3FN, E5M2, E4M3FNUZ)] == [2.0**-9, 2.0**-16, 2.0**-10]
    assert [FP8_FORMATS[f].u for f in (E4M3FN, E5M2, E4M3FNUZ)] == [2.0**-4, 2.0**-3, 2.0**-4]


def test_a_decode_table_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        decode_table(INT8)[0] = 1


def test_a_code_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"element \(1,\): 16 is no code of int4, which has 16"):
        decode([15, 16], INT4)


# --- encoding


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


@pytest.mark.parametrize("scale", [1.0, fp32(0.1), fp32(3e-39), fp32(1.7e30)])
@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_encoding_finds_the_nearest_code_at_every_midpoint_and_beside_it(codec: Codec, scale: float) -> None:
    x = hard_values(codec, scale)
    found = encode(x, codec, scale)
    assert found.dtype == np.uint8
    assert found.tolist() == [searched(each, codec, scale) for each in x.tolist()]


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_the_hard_values_tell_one_rounding_from_two(codec: Codec) -> None:
    """Through FP32 some of them go wrong; else the test above would be idle."""
    x, scale = hard_values(codec, fp32(0.1)), fp32(0.1)
    assert (encode(round_to(x, DType.FP32), codec, scale) != encode(x, codec, scale)).mean() > 0.05


@pytest.mark.parametrize("format", [INT8, INT4])
@pytest.mark.parametrize("zero", [-3, 7, 15_008, -(2**23)])
def test_a_zero_point_moves_the_codes(format: CodecFormat, zero: int) -> None:
    codec, scale = Codec(format, asymmetric=True), fp32(0.37)
    values = np.arange(codec.code_range[0], codec.code_range[1], 0.5) - zero
    x = np.concatenate([np.nextafter(values * scale, side) for side in (-np.inf, np.inf)] + [values * scale])
    assert encode(x, codec, scale, zero).tolist() == [searched(each, codec, scale, zero) for each in x.tolist()]
    codes = np.arange(2**format.bits)
    assert encode(decode(codes, format, scale, zero), codec, scale, zero).tolist() == codes.tolist()


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_saturation_starts_at_the_tie_and_follows_the_declared_rule(codec: Codec) -> None:
    top = float(max(numbers(codec)))
    if codec.format.integer:
        edges = np.array([top + 0.5, codec.code_range[0] - 0.5])
    else:
        tie = FP8_FORMATS[codec.format].max + 2.0 ** (
            FP8_FORMATS[codec.format].emax - FP8_FORMATS[codec.format].precision
        )
        edges = np.array([tie, -tie])
    near = [edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf), 100 * edges, 1e300 * edges]
    x = np.concatenate((*near, [np.inf, -np.inf]))
    over = np.array([not math.isfinite(each) or overflows(each, codec) for each in x.tolist()])
    assert over.any()
    assert not over.all()
    ends = [numbers(codec)[max(numbers(codec))], numbers(codec)[min(numbers(codec))]]
    assert encode(x, codec).tolist() == [ends[int(each < 0)] for each in x.tolist()]
    refusing = replace(codec, overflow=OverflowRule.ERROR)
    encode(x[~over], refusing)
    for each in x[over].tolist():
        with pytest.raises(
            ValueError, match=rf"element \(1,\): .* with scale 1.0 lies beyond the codes of {codec.format}"
        ):
            encode([0.0, each], refusing)


@pytest.mark.parametrize(("format", "codes"), [(E4M3FN, [0x7E, 0x7F, 0xFE, 0xFF]), (E5M2, [0x7B, 0x7C, 0xFB, 0xFC])])
def test_overflow_without_saturation_is_infinity_or_nan_as_ofp8_says(format: CodecFormat, codes: list[int]) -> None:
    codec = Codec(format, overflow=OverflowRule.NON_FINITE)
    tie = {E4M3FN: 464.0, E5M2: 61440.0}[format]  # 448 is even, so its tie stays; 57344 is odd, so its tie leaves
    below = tie if format is E4M3FN else np.nextafter(tie, 0)
    x = [below, np.nextafter(below, np.inf), -below, -np.nextafter(below, np.inf)]
    assert encode(x, codec).tolist() == codes
    assert encode([np.inf, -np.inf, 1e300], codec).tolist() == [codes[1], codes[3], codes[1]]


def test_nan_follows_the_declared_rule() -> None:
    nans = np.array([np.nan, -np.nan])
    for format in FP8:
        kept = encode(nans, Codec(format, nan=NaNRule.KEEP))
        assert kept.tolist() == [0x7F, 0xFF]
        assert np.isnan(decode(kept, format)).all()
    assert encode(nans, Codec(INT8, nan=NaNRule.CODE, nan_code=-5)).tolist() == [251, 251]
    assert encode(nans, Codec(INT4, nan=NaNRule.CODE, nan_code=-5, overflow=OverflowRule.ERROR)).tolist() == [11, 11]
    for format in WRITTEN:
        with pytest.raises(ValueError, match=r"element \(0, 1\) is NaN"):
            encode([[1.0, np.nan]], Codec(format))


def test_a_nan_is_no_overflow() -> None:
    codec = Codec(E4M3FN, nan=NaNRule.KEEP, overflow=OverflowRule.ERROR)
    assert encode([np.nan], codec).tolist() == [0x7F]


@pytest.mark.parametrize("format", FP8)
def test_the_sign_of_zero_is_kept_where_the_format_has_it(format: CodecFormat) -> None:
    tiny = FP8_FORMATS[format].a
    assert encode([0.0, -0.0, tiny, -tiny, 5e-324, -5e-324], Codec(format)).tolist() == [0, 0x80, 0, 0x80, 0, 0x80]
    assert encode([-0.0, -0.4], Codec(INT8)).tolist() == [0, 0]


def test_fnuz_is_read_and_never_written() -> None:
    with pytest.raises(ValueError, match="fp8_e4m3fnuz is read, never written"):
        encode([1.0], Codec(E4M3FNUZ))
    assert decode([0x08, 0x80 | 0x7F], E4M3FNUZ).tolist() == [2.0**-7, -240.0]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"element \(1,\): scale must be positive and finite"):
        encode([1.0, 2.0], Codec(INT8), [1.0, scale])


@pytest.mark.parametrize(
    ("codec", "zero", "words"),
    [
        (Codec(E4M3FN), 1.0, "must be 0 under a symmetric codec, got 1.0"),
        (Codec(INT8), -3.0, "must be 0 under a symmetric codec"),
        (Codec(INT8, asymmetric=True), 0.5, "must be an integer up to"),
        (Codec(INT8, asymmetric=True), 2.0**25, "must be an integer up to"),
        (Codec(INT8, asymmetric=True), math.nan, "must be an integer up to"),
    ],
)
def test_a_zero_point_that_is_none_is_refused(codec: Codec, zero: float, words: str) -> None:
    with pytest.raises(ValueError, match=rf"element \(1,\): zero point {words}"):
        encode([1.0, 2.0], codec, 1.0, [0.0, zero])


def test_a_quotient_that_fp64_does_not_hold_saturates_in_silence() -> None:
    with np.errstate(all="raise"):
        for codec in CODECS:
            assert encode([1e300, -1e300], codec, 2.0**-126).tolist() == encode([1e9, -1e9], codec).tolist()


# --- other opinions about encoding


def fp32_inputs(format: CodecFormat) -> NDArray[np.float32]:
    values = hard_values(Codec(format), 1.0)
    random = np.random.default_rng(1).normal(size=500) * np.exp2(np.random.default_rng(2).integers(-20, 9, 500))
    near = np.concatenate((values, random, [500.0, 1e6, 1e30, -1e30])).astype(np.float32)
    return np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))])


def torch_codes(x: Array | NDArray[np.float32], format: CodecFormat) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = torch.from_numpy(x).to(TORCH[format]).view(torch.uint8).numpy()
    return found


def ml_codes(x: Array | NDArray[np.float32], format: CodecFormat) -> NDArray[np.uint8]:
    with np.errstate(over="ignore"):
        return x.astype(ML_DTYPES[format]).view(np.uint8)


OPINIONS = pytest.mark.parametrize("opinion", [torch_codes, ml_codes])
Opinion = Callable[[Array | NDArray[np.float32], CodecFormat], NDArray[np.uint8]]


@OPINIONS
@pytest.mark.parametrize("format", FP8)
def test_other_libraries_encode_fp32_numbers_in_range_alike(opinion: Opinion, format: CodecFormat) -> None:
    x = fp32_inputs(format)
    inside = x[[not overflows(each, Codec(format)) for each in x.tolist()]]
    assert len(inside) > 3000
    assert (opinion(inside, format) == encode(inside, Codec(format))).all()


@OPINIONS
@pytest.mark.parametrize("format", FP8)
def test_other_libraries_round_fp64_twice_on_the_way(opinion: Opinion, format: CodecFormat) -> None:
    """They go through FP32: a number just past a midpoint falls onto it. So they are no opinion about FP64."""
    tie = float(np.mean(decode_table(format)[8:10]))
    just_above = np.nextafter(np.array([tie]), np.inf)
    assert encode(just_above, Codec(format)).tolist() == [9]
    assert opinion(just_above, format).tolist() == [8]


def test_other_libraries_disagree_about_overflow_of_e4m3fn() -> None:
    """ml_dtypes follows OFP8 without saturation; torch saturates (2.13), earlier ones wrote NaN."""
    x = np.array([464.0, 465.0, 1e30, np.inf, -np.inf], np.float32)
    spec = encode(x, Codec(E4M3FN, overflow=OverflowRule.NON_FINITE)).tolist()
    assert ml_codes(x, E4M3FN).tolist() == spec == [0x7E, 0x7F, 0x7F, 0x7F, 0xFF]
    assert torch_codes(x, E4M3FN).tolist() in (spec, encode(x, Codec(E4M3FN)).tolist())


@OPINIONS
def test_other_libraries_overflow_to_infinity_in_e5m2(opinion: Opinion) -> None:
    x = np.array([61439.0, 61440.0, 1e30, -np.inf], np.float32)
    assert opinion(x, E5M2).tolist() == encode(x, Codec(E5M2, overflow=OverflowRule.NON_FINITE)).tolist()


def test_other_libraries_choose_their_own_nan() -> None:
    x = np.array([np.nan, -np.nan], np.float32)
    assert torch_codes(x, E5M2).tolist() == [0x7F, 0xFF] == encode(x, Codec(E5M2, nan=NaNRule.KEEP)).tolist()
    assert np.isnan(decode(ml_codes(x, E5M2), E5M2)).all()
    assert ml_codes(x, E5M2).tolist() == [0x7E, 0xFE]


def test_a_cast_to_int4_of_ml_dtypes_is_no_encoder() -> None:
    """It truncates and wraps around."""
    assert np.array([2.7, 9.0]).astype(ml_dtypes.int4).astype(int).tolist() == [2, -7]
    assert encode([2.7, 9.0], Codec(INT4)).tolist() == [3, 7]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_int8_is_encoded_as_torch_quantises_it() -> None:
    x = np.random.default_rng(3).normal(size=4000).astype(np.float32)
    scale, zero = 2.0**-6, 9  # with a power of two torch's x * (1 / scale) is exact
    theirs = torch.quantize_per_tensor(torch.from_numpy(x), scale, zero, torch.qint8).int_repr().numpy()
    assert (encode(x, Codec(INT8, asymmetric=True), scale, zero).view(np.int8) == theirs).all()


# --- round trips and bounds


@pytest.mark.parametrize("codec", CODECS, ids=named)
@examples
@given(exponent=st.integers(-126, 120), mantissa=st.integers(2**23, 2**24 - 1))
def test_every_number_comes_back_as_its_code_under_any_scale(codec: Codec, exponent: int, mantissa: int) -> None:
    scale = math.ldexp(mantissa, exponent - 23)
    codes = np.array(sorted(numbers(codec).values()))
    if not codec.format.integer:
        codes = np.append(codes, 0x80)
    assert encode(decode(codes, codec.format, scale), codec, scale).tolist() == codes.tolist()


scales = st.floats(min_value=2.0**-126, max_value=2.0**120, width=32)
inputs = st.tuples(st.floats(-70000, 70000), st.sampled_from((1.0, 2.0**-3, 2.0**-8, 2.0**-16, 2.0**-30)))


@pytest.mark.parametrize("codec", CODECS, ids=named)
@examples
@given(inputs, scales)
def test_no_number_moves_further_than_the_bound(codec: Codec, x: tuple[float, float], scale: float) -> None:
    number = x[0] * x[1] * scale
    moved = abs(Fraction(float(decode(encode(number, codec, scale), codec.format, scale))) - Fraction(number))
    assert moved <= Fraction(float(error_bound(number, codec, scale)))


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_the_bound_is_reached_and_ends_where_the_codes_end(codec: Codec) -> None:
    x = hard_values(codec, 1.0)
    moved = np.abs(decode(encode(x, codec), codec.format) - x)
    bound = error_bound(x, codec)
    assert (moved <= bound).all()
    assert (moved == bound).any()
    assert bound.max() < 0.5 * np.abs(x).max()
    top = float(max(numbers(codec)))
    assert 2 * top < error_bound(3.1 * top, codec) < 2.11 * top
    assert error_bound(3.1 * top, replace(codec, overflow=OverflowRule.ERROR)) == math.inf


@pytest.mark.parametrize("x", [5.0, -5.0, 2.0**-1030, 1e300])
def test_the_nearest_integer_of_extreme_quotients(x: float) -> None:
    assert nearest(np.array(x), np.array(1.0)) == (round(x) if abs(x) < 1e299 else x)


# --- scales


def exact_ends(least: float, largest: float, codec: Codec, scale: float, zero: float) -> bool:
    """Nothing within [least, largest] is further than half a step (fp8: at all) from the numbers of the codes."""
    known = [(v - Fraction(zero)) * Fraction(scale) for v in (ordered(codec)[0], ordered(codec)[-1])]
    slack = Fraction(scale) / 2 if codec.asymmetric else 0
    return known[0] - slack <= Fraction(least) and Fraction(largest) <= known[1] + slack


magnitudes = st.floats(-3e38, 3e38) | st.floats(-10, 10) | st.floats(-1e-30, 1e-30)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("codec", [*CODECS, Codec(INT8, asymmetric=True), Codec(INT4, asymmetric=True)], ids=named)
@examples
@given(magnitudes, magnitudes)
def test_scales_reach_both_ends_and_no_smaller_scale_does(codec: Codec, power_of_two: bool, a: float, b: float) -> None:
    codec = replace(codec, power_of_two=power_of_two)
    least, largest = min(a, b), max(a, b)
    if codec.power_of_two and max(-least, largest) > 2.0**126:
        return
    found = scales_of(np.array([least]), np.array([largest]), codec)
    scale, zero = float(found[0][0]), float(found[1][0])
    assert scale == fp32(scale) > 0
    assert math.frexp(scale)[0] == 0.5 or not power_of_two
    assert zero == round(zero)
    assert abs(zero) <= (2**24 if codec.asymmetric else 0)
    assert exact_ends(least, largest, codec, scale, zero)
    smaller = scale / 2 if power_of_two else float(np.nextafter(np.float32(scale), np.float32(0)))
    if not codec.asymmetric and (least, largest) != (0, 0) and scale > 2.0**-126:
        assert not exact_ends(least, largest, codec, smaller, zero)


def test_scales_are_the_smallest_that_reach_both_ends() -> None:
    least, largest = np.array([-4.0, -1.0, 0.0, -8.0]), np.array([1.0, 7.0, 0.0, 7.0])
    third = scales_of(np.array([0.0, 0.0]), np.array([9.0, 8.0]), Codec(INT4))[0]
    assert third.tolist() == [np.nextafter(np.float32(9 / 7), np.float32(2)), np.float32(8 / 7)]
    assert np.float32(9 / 7) < Fraction(9, 7)
    assert scales_of(least, largest, Codec(INT4))[0].tolist() == [0.5, 1.0, 1.0, 1.0]
    narrow = scales_of(least, largest, Codec(INT4, narrow_range=True))[0]
    assert narrow[[1, 2]].tolist() == [1.0, 1.0]
    assert narrow[3] == np.float32(8 / 7)
    assert scales_of(least, largest, Codec(INT4, power_of_two=True))[0].tolist() == [0.5, 1.0, 1.0, 1.0]
    assert scales_of(least, largest, Codec(INT4, power_of_two=True, narrow_range=True))[0].tolist() == [1, 1, 1, 2]
    assert scales_of(np.array([-448.0]), np.array([3.0]), Codec(E4M3FN))[0] == 1.0


def test_asymmetric_groups_use_all_steps_of_their_own_range_and_never_include_zero() -> None:
    codec = Codec(INT4, asymmetric=True)
    scale, zero = scales_of(np.array([1000.0]), np.array([1030.0]), codec)
    assert (scale.tolist(), zero.tolist()) == ([2.0], [-508.0])
    assert encode([1000.0, 1030.0], codec, scale, zero).tolist() == [8, 7]


def test_an_asymmetric_tie_at_the_end_moves_by_half_a_step_only() -> None:
    """1/2 rounds to 0 and 31/2 to 16, one step too many: the end of the range is nearest, and is no overflow."""
    codec = Codec(INT4, asymmetric=True, overflow=OverflowRule.ERROR)
    scale, zero = scales_of(np.array([0.5]), np.array([15.5]), codec)
    codes = encode([0.5, 15.5], codec, scale, zero)
    assert decode(codes, INT4, scale, zero).tolist() == [0.0, 15.0]


def test_a_tie_at_the_least_value_does_not_move_the_zero_point() -> None:
    """1/2 rounds to 0: the least code is -7 there, though -7 - 1/2 would round to -8."""
    codec = Codec(INT4, asymmetric=True, narrow_range=True)
    scale, zero = scales_of(np.array([0.5]), np.array([14.5]), codec)
    assert (scale.tolist(), zero.tolist()) == ([1.0], [-7.0])


def test_a_span_that_fp64_rounds_down_does_not_cost_more_than_half_a_step() -> None:
    """-1/2 + 2^-54 less -31/2 is 15 in FP64; with scale 1 the upper end would lie beyond half a step."""
    codec = Codec(INT4, asymmetric=True, overflow=OverflowRule.ERROR)
    ends = np.array([-15.5, np.nextafter(-0.5, 0)])
    assert ends[1] - ends[0] == 15
    scale, zero = scales_of(ends[:1], ends[1:], codec)
    assert scale[0] == 1 + 2.0**-23
    moved = np.abs(decode(encode(ends, codec, scale, zero), INT4, scale, zero) - ends)
    assert (moved <= error_bound(ends, codec, scale, zero)).all()


@pytest.mark.parametrize("value", [0.3125, -5.0])
def test_an_asymmetric_group_of_one_value_has_its_size_as_scale(value: float) -> None:
    """Any scale would do; this one keeps the zero point small."""
    scale, zero = scales_of(np.array([value]), np.array([value]), Codec(INT8, asymmetric=True))
    assert (scale[0], zero[0]) == (abs(value), -129 if value > 0 else -127)


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("value", [3.140625, -0.1875, 1e-44, -1e30, 0.0])
def test_a_group_of_one_value_comes_back_close_to_it(format: CodecFormat, asymmetric: bool, value: float) -> None:
    if asymmetric and not format.integer:
        return
    codec = Codec(format, asymmetric=asymmetric)
    scale, zero = scales_of(np.array([value]), np.array([value]), codec)
    back = decode(encode([value], codec, scale, zero), format, scale, zero)[0]
    assert abs(back - value) <= max(abs(value) * 2.0**-23, 0 if value == 0 else 2.0**-127)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_group_of_one_value_far_from_zero_is_exact_in_steps_of_the_zero_point(power_of_two: bool) -> None:
    codec = Codec(INT4, asymmetric=True, power_of_two=power_of_two)
    value = np.array([1.0 + 2.0**-7])
    scale, zero = scales_of(value, value, codec)
    assert decode(encode(value, codec, scale, zero), INT4, scale, zero).tolist() == value.tolist()


def test_a_scale_that_fp32_does_not_hold_is_refused() -> None:
    assert scales_of(np.array([0.0]), np.array([2.0**128]), Codec(INT8))[0] < FORMATS[DType.FP32].max
    with pytest.raises(ValueError, match="FP32 does not hold"):
        scales_of(np.array([0.0]), np.array([1e41]), Codec(INT8))


def test_tiny_groups_get_a_normal_scale() -> None:
    """A subnormal scale would be flushed to zero by hardware."""
    for format in WRITTEN:
        assert scales_of(np.array([-1e-44]), np.array([1e-44]), Codec(format))[0] == 2.0**-126


# --- two codes in a byte


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_packed_nibbles_are_where_the_codec_says(length: int, low_first: bool, axis: int) -> None:
    codec = Codec(INT4, low_nibble_first=low_first)
    shape = [3, 4, 6]
    shape[axis] = length
    codes = np.random.default_rng(0).integers(0, 16, shape)
    packed = pack(codes, codec, axis)
    assert packed.dtype == np.uint8
    assert packed.shape[axis] == -(-length // 2)
    for at in np.ndindex(*packed.shape):
        first, second = (tuple(2 * i + n if a == axis else i for a, i in enumerate(at)) for n in (0, 1))
        other = int(codes[second]) if second[axis] < length else 0
        low, high = (int(codes[first]), other) if low_first else (other, int(codes[first]))
        assert packed[at] == low + 16 * high
    assert (unpack(packed, codec, axis, length) == codes).all()


def test_the_nibble_behind_an_odd_last_code_is_never_read() -> None:
    assert unpack([0x21, 0xF3], Codec(INT4), 0, 3).tolist() == [1, 2, 3]
    assert unpack([0x21, 0xF3], Codec(INT4, low_nibble_first=False), 0, 3).tolist() == [2, 1, 15]


def test_packing_refuses_what_is_no_code_or_no_length() -> None:
    with pytest.raises(ValueError, match=r"element \(0,\): -1 is no code of int4"):
        pack([-1], Codec(INT4), 0)
    with pytest.raises(ValueError, match="5 codes of int4 take 3 bytes, got 2"):
        unpack([0, 0], Codec(INT4), 0, 5)
    assert pack([255, 0], Codec(INT8), 0).tolist() == [255, 0]


# --- the type


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": E4M3FN, "asymmetric": True}, "fp8_e4m3fn has no use for asymmetric, got True"),
        ({"format": E5M2, "narrow_range": True}, "fp8_e5m2 has no use for narrow_range"),
        ({"format": INT8, "nibble_axis": "token"}, "int8 has no use for nibble_axis, got 'token'"),
        ({"format": E5M2, "low_nibble_first": False}, "no use for low_nibble_first"),
        ({"format": INT8, "nan_code": 3}, "no use for nan_code, got 3"),
        ({"format": INT8, "overflow": OverflowRule.NON_FINITE}, "no infinity and no NaN"),
        ({"format": INT4, "nan": NaNRule.KEEP}, "int4 cannot follow NaN rule keep"),
        ({"format": E4M3FN, "nan": NaNRule.CODE}, "fp8_e4m3fn cannot follow NaN rule code"),
        ({"format": INT4, "nibble_axis": "page"}, "must be 'dim' or 'token', got 'page'"),
        ({"format": INT4, "nan": NaNRule.CODE, "nan_code": 8}, r"must be in \(-8, 7\), got 8"),
        ({"format": INT4, "nan": NaNRule.CODE, "nan_code": -8, "narrow_range": True}, r"\(-7, 7\), got -8"),
    ],
)
def test_a_codec_without_meaning_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Codec(**changes)  # type: ignore[arg-type]


def test_only_integers_have_a_code_range() -> None:
    assert Codec(INT8).code_range == (-128, 127)
    assert Codec(INT4, narrow_range=True).code_range == (-7, 7)
    with pytest.raises(ValueError, match="no integer codes"):
        _ = Codec(E5M2).code_range


def test_every_offset_of_a_code_is_below_the_largest_zero_point() -> None:
    assert codecs.MAX_OFFSET < codecs.MAX_ZERO


@pytest.mark.parametrize("module", ["codecs", "quantised"])
def test_every_public_function_and_rule_is_in_the_document(module: str) -> None:
    root = Path(__file__).parent.parent
    document = (root / "docs" / "semantics-codecs.md").read_text(encoding="utf-8")
    tree = ast.parse((root / "reference" / f"{module}.py").read_text(encoding="utf-8"))
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert {name for name in public if f"[`{name}`](../reference/{module}.py)" not in document} == set()
    rules = re.split(r"\n\*\*(?=Q\d)", document)[1:]
    assert [rule.split(".")[0] for rule in rules] == [f"Q{i}" for i in range(1, 18)]
    assert [rule[:3] for rule in rules if "](../tests/" not in rule] == []
