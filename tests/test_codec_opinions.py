"""What other libraries say about encoding, round trips, and how far an element moves.

`SACTS_CODECS=50 pytest tests/test_codec_opinions.py` draws 50 times as many examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from code_values import (
    CODECS,
    E4M3FN,
    E5M2,
    FP8,
    INT4,
    INT8,
    ML_DTYPES,
    TORCH,
    Array,
    examples,
    hard_values,
    named,
    numbers,
    overflows,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sacts.reference.codecs import decode, encode, error_bound, nearest
from sacts.reference.formats import decode_table
from sacts.reference.spec import Codec, CodecFormat, NaNRule, OverflowRule

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
