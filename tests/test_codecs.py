"""Codes against exact fractions taken from the bits of each format, and against torch and ml_dtypes where these agree:
decoding, encoding, two codes in a byte, the type.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from code_values import (
    CODECS,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    FP8,
    INT4,
    INT8,
    LAYOUT,
    ML_DTYPES,
    TORCH,
    WRITTEN,
    Array,
    fp32,
    hard_values,
    named,
    numbers,
    overflows,
    searched,
    value_of,
)

from sacts.reference import codecs
from sacts.reference.codecs import decode, encode, pack, unpack
from sacts.reference.formats import FP8_FORMATS, decode_table, round_to
from sacts.reference.spec import Codec, CodecFormat, DType, NaNRule, OverflowRule

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
