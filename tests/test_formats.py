"""`round_to` against rounding that shares no code with it: NumPy, torch, and a search among all 16-bit values."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sacts.reference.formats import FORMATS, half_spacing, round_to
from sacts.reference.spec import DType

Array = NDArray[np.float64]

TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
SIXTEEN_BITS = (DType.FP16, DType.BF16)


@cache
def non_negative_values(dtype: DType) -> Array:
    """Every finite value of a 16-bit format from 0 up, by bit pattern: the index is the pattern."""
    patterns = torch.arange(2**15, dtype=torch.int32).to(torch.int16)
    values: Array = patterns.view(TORCH[dtype]).to(torch.float64).numpy()
    return values[np.isfinite(values)]


def bits(x: Array) -> list[int]:
    """Bit patterns: tells -0 from 0. All NaNs count as one."""
    return [int(pattern) for pattern in np.where(np.isnan(x), np.nan, x).view(np.int64).ravel()]


def samples(dtype: DType) -> Array:
    """Values of all magnitudes, of both signs."""
    random = np.random.default_rng(11)
    fmt = FORMATS[dtype]
    exponents = random.uniform(fmt.emin - fmt.precision - 3, fmt.emax + 3, 20_000)
    signed: Array = np.exp2(exponents) * random.choice([-1.0, 1.0], exponents.shape)
    return signed


def hard_values(dtype: DType) -> Array:
    """Values, midpoints, and the FP64 numbers next to both, where rounding through FP32 goes wrong."""
    if dtype is DType.FP32:
        random = np.random.default_rng(12)
        patterns = np.concatenate((np.arange(200), random.integers(0, 0x7F7FFFFF, 20_000), 0x7F7FFFFF - np.arange(200)))
        values = np.unique(patterns).astype(np.uint32).view(np.float32).astype(np.float64)
        above = np.append(np.nextafter(values[:-1].astype(np.float32), np.float32(np.inf)).astype(np.float64), 2.0**128)
    else:
        values = non_negative_values(dtype)
        above = np.append(values[1:], 2.0 ** (FORMATS[dtype].emax + 1))
    middle = (values + above) / 2
    near = [np.nextafter(x, towards) for x in (values, middle) for towards in (-np.inf, np.inf)]
    positive = np.concatenate((values, middle, *near))
    return np.concatenate((positive, -positive))


def searched(x: Array, dtype: DType) -> Array:
    """Nearest value of a 16-bit format, ties to the even bit pattern, found among all values."""
    values = np.append(non_negative_values(dtype), 2.0 ** (FORMATS[dtype].emax + 1))
    size = np.minimum(np.abs(x), values[-1])
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    to_below, to_above = size - values[below], values[above] - size  # exact by Sterbenz, or far from a tie
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    nearest = np.where(take_above, values[above], values[below])
    return np.copysign(np.where(nearest == values[-1], np.inf, nearest), x)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_rounding_finds_the_nearest_of_all_16_bit_values(dtype: DType) -> None:
    for x in (samples(dtype), hard_values(dtype)):
        assert bits(round_to(x, dtype)) == bits(searched(x, dtype))


@pytest.mark.parametrize(("dtype", "numpy_type"), [(DType.FP16, np.float16), (DType.FP32, np.float32)])
def test_rounding_is_numpys_cast_from_fp64(dtype: DType, numpy_type: type[np.floating]) -> None:
    with np.errstate(over="ignore"):
        for x in (samples(dtype), hard_values(dtype)):
            assert bits(round_to(x, dtype)) == bits(x.astype(numpy_type).astype(np.float64))


@pytest.mark.parametrize("dtype", DType)
def test_rounding_is_torchs_cast_of_fp32_numbers(dtype: DType) -> None:
    """torch may round FP64 twice on the way to 16 bits, so 16-bit casts are compared on numbers that FP32 holds."""
    for x in (samples(dtype), hard_values(dtype)):
        tensor = torch.from_numpy(x)
        if dtype is not DType.FP32:
            tensor = tensor.to(torch.float32)
        assert bits(round_to(tensor.double().numpy(), dtype)) == bits(tensor.to(TORCH[dtype]).double().numpy())


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_the_hard_values_tell_one_rounding_from_two(dtype: DType) -> None:
    x = hard_values(dtype)
    twice = round_to(round_to(x, DType.FP32), dtype)
    assert (twice != round_to(x, dtype)).sum() > 1000


@pytest.mark.parametrize("dtype", DType)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(x=st.floats(allow_nan=False, allow_infinity=False))
@example(x=65519.99999999999)
@example(x=65520.0)
@example(x=2.0**-25)
@example(x=1.7976931348623157e308)
@example(x=5e-324)
def test_rounding_by_the_definition_in_exact_fractions(dtype: DType, x: float) -> None:
    fmt = FORMATS[dtype]
    size = abs(Fraction(x))
    exponent = fmt.emin
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    spacing = Fraction(2) ** (exponent - fmt.precision + 1)
    nearest = round(size / spacing) * spacing  # Fraction rounds ties to even
    expected = float("inf") if nearest > Fraction(fmt.max) else float(nearest)
    with np.errstate(over="ignore"):
        rounded = float(round_to(x, dtype))
    assert abs(rounded) == expected
    assert np.signbit(rounded) == np.signbit(x)


@pytest.mark.parametrize("dtype", DType)
def test_overflow_starts_half_a_step_beyond_the_largest_value(dtype: DType) -> None:
    fmt = FORMATS[dtype]
    edge = fmt.max + 2.0 ** (fmt.emax - fmt.precision)
    x = np.array([np.nextafter(edge, 0), edge, np.inf, -edge, -np.inf, np.nan])
    assert bits(round_to(x, dtype)) == bits(np.array([fmt.max, np.inf, np.inf, -np.inf, -np.inf, np.nan]))


@pytest.mark.parametrize("dtype", DType)
def test_rounding_keeps_shape_and_what_is_already_rounded(dtype: DType) -> None:
    once = round_to(samples(dtype).reshape(100, -1), dtype)
    assert once.shape == (100, 200)
    assert bits(round_to(once, dtype)) == bits(once)


@pytest.mark.parametrize("dtype", DType)
def test_formats_have_torchs_constants(dtype: DType) -> None:
    info = torch.finfo(TORCH[dtype])
    fmt = FORMATS[dtype]
    assert fmt.u == info.eps / 2
    assert fmt.max == info.max
    assert fmt.a == info.tiny * info.eps / 2
    assert round_to(fmt.a, dtype) == 0
    assert round_to(np.nextafter(fmt.a, 1), dtype) == 2 * fmt.a


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_half_spacing_is_half_the_step_to_the_next_larger_value(dtype: DType) -> None:
    values = non_negative_values(dtype)[1:]
    steps = np.diff(np.append(values, 2.0 ** (FORMATS[dtype].emax + 1)))
    assert (half_spacing(values, dtype) == steps / 2).all()
    assert (half_spacing(-values, dtype) == steps / 2).all()


@pytest.mark.parametrize("dtype", DType)
def test_half_spacing_of_zero_is_half_the_smallest_subnormal(dtype: DType) -> None:
    assert half_spacing([0.0, -0.0], dtype).tolist() == [FORMATS[dtype].a] * 2


def test_half_spacing_of_fp32_is_numpys_spacing() -> None:
    x = np.abs(hard_values(DType.FP32))
    x = np.unique(x[(x > 2.0**-149) & (x < FORMATS[DType.FP32].max / 2)].astype(np.float32))
    assert (half_spacing(x, DType.FP32) == np.spacing(x).astype(np.float64) / 2).all()


@pytest.mark.parametrize("dtype", DType)
def test_no_number_is_moved_further_than_half_the_spacing_around_its_result(dtype: DType) -> None:
    x = samples(dtype)
    rounded = round_to(x, dtype)
    x, rounded = x[np.isfinite(rounded)], rounded[np.isfinite(rounded)]
    assert (np.abs(x - rounded) <= half_spacing(rounded, dtype)).all()
