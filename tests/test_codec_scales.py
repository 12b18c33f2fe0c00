"""Scales of a group: they reach both ends of its values, no smaller one does, and groups of one value come back.

`SACTS_CODECS=50 pytest tests/test_codec_scales.py` draws 50 times as many examples.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from code_values import (
    CODECS,
    E4M3FN,
    INT4,
    INT8,
    WRITTEN,
    examples,
    fp32,
    named,
    ordered,
)
from hypothesis import given
from hypothesis import strategies as st

from sacts.reference.codecs import decode, encode, error_bound, scales_of
from sacts.reference.formats import FORMATS
from sacts.reference.spec import Codec, CodecFormat, DType, OverflowRule

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
