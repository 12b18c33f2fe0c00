"""Quantised caches against loops over single elements: groups, their scales and codes, the type."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantised_caches import (
    E5M2,
    GROUPS,
    INT4,
    INT8,
    PAGES,
    SHAPE,
    Array,
    Bools,
    cache_of,
    data_of,
    examples,
    granularities,
    variants,
)

from sacts.reference.codecs import error_bound
from sacts.reference.formats import decode_table
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.quantised import (
    quantise,
    real_slots,
)
from sacts.reference.spec import Codec, OverflowRule, ScaleGranularity

# --- scales and codes of groups


def looped(data: Array, codec: Codec, real: Bools) -> tuple[dict[tuple[int, ...], tuple[Fraction, int]], Array]:
    """Scale and zero point of each group, and the reconstruction of the real slots, element by element."""
    members: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for at in np.ndindex(*data.shape):
        key = tuple(at[i] for i in GROUPS[codec.granularity])
        members[key] += [float(data[at])] if real[at[:2]] else []
    groups = {key: group_of(values, codec) for key, values in members.items()}
    values = numbers(codec)
    result = np.zeros(data.shape)
    for at in np.ndindex(*data.shape):
        scale, zero = groups[tuple(at[i] for i in GROUPS[codec.granularity])]
        if real[at[:2]]:
            result[at] = min(((v - zero) * float(scale) for v in values), key=lambda y: abs(y - float(data[at])))
    return groups, result


def numbers(codec: Codec) -> list[float]:
    values = decode_table(codec.format)
    values = values[np.isfinite(values)]
    return sorted({float(v) for v in values if not codec.format.integer or v >= codec.code_range[0]})


def group_of(values: list[float], codec: Codec) -> tuple[Fraction, int]:
    """From the definition: the smallest scale of the kind that is at least what the two ends need."""
    if not any(values):
        return Fraction(1), 0
    least, largest, ends = Fraction(min(values)), Fraction(max(values)), numbers(codec)
    steps = [Fraction(ends[0]), Fraction(ends[-1])]
    need = (largest - least) / (steps[1] - steps[0]) if codec.asymmetric else max(least / steps[0], largest / steps[1])
    if codec.power_of_two:
        scale = Fraction(2) ** -126
        while scale < need:
            scale *= 2
    else:
        scale = Fraction(float(np.float32(float(need) * (1 - 2.0**-20))))
        while scale < need:
            scale = Fraction(float(np.nextafter(np.float32(float(scale)), np.float32(np.inf))))
    return scale, int(steps[0]) - round(least / scale) if codec.asymmetric else 0


@granularities
@variants
def test_scales_and_codes_are_those_of_a_loop_over_elements(codec: Codec, granularity: ScaleGranularity) -> None:
    codec = replace(codec, granularity=granularity)
    data = data_of(len(granularity))
    real = np.random.default_rng(3).random(SHAPE[:2]) < 0.6
    real[2] = False  # a live page without a single token
    found = quantise(PagedCache(PAGES, data), codec, real)
    groups, result = looped(data, codec, real)
    assert found.scales.size == len(groups) == math.prod(SHAPE[i] for i in GROUPS[granularity])
    assert len(set(groups.values())) > 1 or granularity is ScaleGranularity.TENSOR
    for key, (scale, zero) in groups.items():
        at = tuple(dict(zip(GROUPS[granularity], key, strict=True)).get(i, 0) for i in range(4))
        assert (Fraction(float(found.scales[at])), found.zeros[at]) == (scale, zero)
    back = found.reconstruct()
    assert back.pages is PAGES
    np.testing.assert_array_equal(back.data[real], result[real])
    assert (found.codes[~real] == 0).all()


@granularities
@variants
@examples
@given(seed=st.integers(0, 2**32), offset=st.sampled_from((0.0, 1.0, 1000.0, -(2.0**20))), octaves=st.integers(-30, 30))
def test_no_element_moves_further_than_the_bound(
    codec: Codec, granularity: ScaleGranularity, seed: int, offset: float, octaves: int
) -> None:
    codec = replace(codec, granularity=granularity, overflow=OverflowRule.ERROR)
    data = (np.random.default_rng(seed).normal(size=SHAPE) + offset) * 2.0**octaves
    found = quantise(PagedCache(PAGES, data), codec)
    moved = np.abs(found.reconstruct().data - data)
    bound = error_bound(data, codec, found.scales, found.zeros)
    assert np.isfinite(bound).all()
    assert (moved <= bound * (1 + 2.0**-50)).all()  # the difference itself is rounded


def test_a_tail_neither_widens_a_range_nor_is_read() -> None:
    """Also row 71 of the known faults: an INT4 range that includes the zeros of padded lanes."""
    data = np.random.default_rng(4).uniform(5, 6, (2, 4, 1, 96))
    real = np.array([[True] * 4, [True, True, False, False]])
    codec = Codec(INT4, ScaleGranularity.PAGE, asymmetric=True, overflow=OverflowRule.ERROR)
    right = quantise(PagedCache(np.arange(2), data), codec, real)
    assert (right.scales < 1.01 / 15).all()
    for junk in (0.0, 1e30, -1e30, np.nan, np.inf):
        poisoned = data.copy()
        poisoned[~real] = junk
        found = quantise(PagedCache(np.arange(2), poisoned), codec, real)
        for name in ("codes", "scales", "zeros"):
            np.testing.assert_array_equal(getattr(found, name), getattr(right, name))
    widened = data.copy()
    widened[~real] = 0.0
    assert quantise(PagedCache(np.arange(2), widened), codec).scales[1, 0, 0, 0] > 4 * right.scales[1, 0, 0, 0]


TABLE = PageTable(
    np.array([[5, 2, 7, 99], [5, 3, 2, 9], [8, 5, 5, 7]]), page_size=4, num_pages=10, owned=(frozenset(),) * 3
)


def test_real_slots_are_those_that_any_request_has_committed() -> None:
    """Page 7 is stale for request 2; page 5 is shared, and full for one request only; page 9 is stale."""
    seq_lens = (9, 7, 0)
    pages = np.array([0, 2, 3, 5, 7, 8, 9])
    expected = np.zeros((len(pages), 4), bool)
    for request, length in enumerate(seq_lens):
        for t in range(length):
            expected[pages.tolist().index(TABLE.table[request, t // 4]), t % 4] = True
    stale = np.where(np.arange(4) * 4 >= np.array(seq_lens)[:, None], 2**40, TABLE.table)
    for table in (TABLE, replace(TABLE, table=stale)):
        np.testing.assert_array_equal(real_slots(pages, table, seq_lens), expected)
    assert expected.sum(1).tolist() == [0, 4, 3, 4, 1, 0, 0]
    assert not real_slots(pages, TABLE, (0, 0, 0)).any()


def test_of_two_lengths_of_a_shared_page_the_longer_one_counts() -> None:
    table = replace(TABLE, table=np.array([[5], [5], [5]]))
    assert real_slots(np.array([5]), table, (2, 3, 1)).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named(value: float) -> None:
    data = data_of(0)
    data[2, 1, 0, 3] = value
    with pytest.raises(ValueError, match=rf"physical page 5, token 1, head 0, channel 3: {value} cannot be quantised"):
        quantise(PagedCache(PAGES, data), Codec(E5M2))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"real must be \(4, 3\)"):
        quantise(PagedCache(PAGES, data_of(0)), Codec(INT8), np.ones((4, 2), bool))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pages": PAGES[:3]}, "3 sorted distinct pages, got"),
        ({"pages": PAGES[::-1]}, "sorted distinct pages"),
        ({"pages": np.array([1, 1, 5, 8])}, "sorted distinct pages"),
        ({"codes": np.full(SHAPE, 16, np.uint8)}, "codes hold 16, which is no code of int4"),
        (
            {"scales": np.ones((4, 1, 1, 1))},
            r"scales must be \(4, 1, 2, 1\) for granularity page_head, got \(4, 1, 1, 1\)",
        ),
        ({"zeros": np.zeros(4)}, r"zeros must be \(4, 1, 2, 1\)"),
        ({"scales": np.full((4, 1, 2, 1), 0.1)}, r"scales\[0, 0, 0, 0\] is 0.1; must be positive FP32"),
        ({"scales": np.array([1.0] * 7 + [-2.0]).reshape(4, 1, 2, 1)}, r"scales\[3, 0, 1, 0\] is -2.0"),
        ({"scales": np.full((4, 1, 2, 1), np.inf)}, "is inf; must be positive FP32"),
        ({"zeros": np.full((4, 1, 2, 1), 0.5)}, r"zeros\[0, 0, 0, 0\] is 0.5; must be integers up to"),
        ({"zeros": np.full((4, 1, 2, 1), 2.0**25)}, "must be integers up to 16777216.0"),
    ],
)
def test_a_cache_without_meaning_is_refused(changes: dict[str, object], words: str) -> None:
    good = cache_of(Codec(INT4, ScaleGranularity.PAGE_HEAD, asymmetric=True))
    with pytest.raises(ValueError, match=words):
        replace(good, **changes)  # type: ignore[arg-type]


def test_symmetric_zero_points_are_zero_and_powers_of_two_are_powers_of_two() -> None:
    good = cache_of(Codec(INT8, power_of_two=True))
    with pytest.raises(ValueError, match=r"is 1.0; must be integers up to 0.0"):
        replace(good, zeros=np.ones((1, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"is 3.0; must be a power of two"):
        replace(good, scales=np.full((1, 1, 1, 1), 3.0))
