"""Quantised caches against loops over single elements: groups, scattered memory, page tables, the distance reported."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.codecs import error_bound
from sacts.reference.formats import decode_table
from sacts.reference.forward import Inputs, forward
from sacts.reference.paging import NHD, PACKED_HND, CacheView, PagedCache, PageTable, Strides, cache_view
from sacts.reference.quantised import (
    QuantisedCache,
    Stored,
    StoredCache,
    group_shape,
    quantisation_error,
    quantise,
    quantise_inputs,
    real_slots,
    reconstructed,
)
from sacts.reference.spec import AttentionSpec, CausalRule, Codec, CodecFormat, DType, OverflowRule, ScaleGranularity

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Codes = NDArray[np.uint8]
INT8, INT4 = CodecFormat.INT8, CodecFormat.INT4
E4M3FN, E5M2 = CodecFormat.FP8_E4M3FN, CodecFormat.FP8_E5M2
examples = settings(max_examples=30 * int(os.environ.get("SACTS_CODECS", "1")), deadline=None, derandomize=True)

# Written out by hand: which coordinates of (page, token, head, dim) name a scale.
GROUPS: dict[ScaleGranularity, tuple[int, ...]] = {
    ScaleGranularity.TENSOR: (),
    ScaleGranularity.HEAD: (2,),
    ScaleGranularity.CHANNEL: (2, 3),
    ScaleGranularity.PAGE: (0,),
    ScaleGranularity.PAGE_HEAD: (0, 2),
    ScaleGranularity.TOKEN_HEAD: (0, 1, 2),
    ScaleGranularity.PAGE_CHANNEL: (0, 2, 3),
}
SHAPE = (4, 3, 2, 5)
PAGES = np.array([1, 2, 5, 8])
VARIANTS = [
    Codec(INT8),
    Codec(INT8, narrow_range=True, power_of_two=True),
    Codec(INT8, asymmetric=True),
    Codec(INT4, asymmetric=True, power_of_two=True),
    Codec(INT4, low_nibble_first=False),
    Codec(INT4, nibble_axis="token", asymmetric=True, narrow_range=True),
    Codec(E4M3FN),
    Codec(E5M2, power_of_two=True),
]


def named(codec: Codec) -> str:
    marks = [str(codec.format), *(name for name in ("asymmetric", "power_of_two") if getattr(codec, name))]
    return "-".join(marks)


variants = pytest.mark.parametrize("codec", VARIANTS, ids=named)
granularities = pytest.mark.parametrize("granularity", ScaleGranularity)


def data_of(seed: int, shape: Sequence[int] = SHAPE) -> Array:
    """Values of very different size from page to page and from head to head, away from 0."""
    random = np.random.default_rng(seed)
    size = np.exp2(random.integers(-3, 4, (shape[0], 1, 1, 1)) + 2 * np.arange(shape[2])[:, None])
    values: Array = (random.normal(size=shape) + 3) * size
    return values


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


# --- the type


def cache_of(codec: Codec, seed: int = 0, shape: tuple[int, int, int, int] = SHAPE) -> QuantisedCache:
    """Random codes that are numbers; every scale and zero point is distinct."""
    random = np.random.default_rng(seed)
    finite = np.flatnonzero(np.isfinite(decode_table(codec.format)))
    codes = random.choice(finite, shape).astype(np.uint8)
    groups = group_shape(codec, shape)
    order = random.permutation(math.prod(groups)).reshape(groups)
    scales = np.asarray(np.exp2(order % 200 - 100.0) if codec.power_of_two else 1 + order * 2.0**-10)
    zeros = np.asarray(order - 7.0 if codec.asymmetric else np.zeros(groups))
    return QuantisedCache(codec, PAGES[: shape[0]], codes, scales, zeros)


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


# --- in memory


def placed(shape: Sequence[int], axes: Sequence[str], at: dict[str, int | slice], base: int, dtype: type) -> Stored:
    """An allocation full of junk with a view on it."""
    memory: NDArray[np.generic] = np.random.default_rng(9).integers(0, 100, base + math.prod(shape)).astype(dtype)
    return Stored(memory, cache_view(shape, axes, at, base=base))


# Sizes of axes that are cut down by `at` are larger than needed; the first is the pool of pages.
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, int], dict[str, int | slice], int]] = {
    "NHD": (NHD, {}, {}, 0),
    "HND packed with the other": (PACKED_HND, {"kv": 2}, {"kv": 1}, 0),
    "pages innermost": (("dim", "head", "token", "page"), {}, {}, 7),
    "padded, every second, odd base": (
        ("page", "head", "token", "dim"),
        {"page": 2, "head": 3, "token": 2, "dim": 2},
        {
            "page": slice(1, None, 2),
            "head": slice(0, None, 3),
            "token": slice(1, None, 2),
            "dim": slice(1, None, 2),
        },
        13,
    ),
}


def stored(layout: str, shape: Sequence[int], dtype: type) -> tuple[Stored, NDArray[np.int64]]:
    """A place for an array of `shape`, and the address of each element, found by NumPy's own indexing."""
    axes, more, at, base = LAYOUTS[layout]
    sizes = dict(zip(("page", "token", "head", "dim"), shape, strict=True))
    allocated = [sizes.get(name, 1) * more.get(name, 1) for name in axes]
    place = placed(allocated, axes, at, base, dtype)
    addresses = base + np.arange(math.prod(allocated)).reshape(allocated)
    addresses = addresses[tuple(at.get(name, slice(None)) for name in axes)]
    kept = [name for name in axes if name in sizes]
    return place, addresses.transpose([kept.index(name) for name in ("page", "token", "head", "dim")])


@granularities
@variants
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stored_cache_is_read_element_by_element_with_strides_of_its_own(
    layout: str, codec: Codec, granularity: ScaleGranularity
) -> None:
    codec = replace(codec, granularity=granularity)
    cache = cache_of(codec)
    pool, (_, tokens, heads, dim) = 10, SHAPE
    packed_token = codec.nibble_axis == "token"
    bytes_of = [pool, tokens, heads, dim]
    if codec.format is INT4:
        bytes_of[1 if packed_token else 3] = -(-bytes_of[1 if packed_token else 3] // 2)
    sharing = [size if i in GROUPS[granularity] else 1 for i, size in enumerate((pool, tokens, heads, dim))]
    others = list(LAYOUTS)
    codes, code_at = stored(layout, bytes_of, np.uint8)
    scales, scale_at = stored(others[others.index(layout) - 1], sharing, np.float32)
    zeros, zero_at = stored(others[others.index(layout) - 2], sharing, np.int32)
    place = StoredCache(codec, tokens, dim, codes, scales, zeros if codec.asymmetric else None)
    before = [each.memory.copy() for each in (codes, scales)]
    place.store(cache)
    value = np.zeros(SHAPE)
    for i, t, h, c in np.ndindex(*SHAPE):
        page = PAGES[i]
        at = tuple(x if axis in GROUPS[granularity] else 0 for axis, x in enumerate((page, t, h, c)))
        if codec.format is INT4:
            pair = t if packed_token else c
            byte = codes.memory[code_at[page, t // 2, h, c] if packed_token else code_at[page, t, h, c // 2]]
            code = int(byte) >> 4 if (pair % 2 == 1) is codec.low_nibble_first else int(byte) & 15
        else:
            code = int(codes.memory[code_at[page, t, h, c]])
        zero = int(zeros.memory[zero_at[at]]) if codec.asymmetric else 0
        value[i, t, h, c] = (decode_table(codec.format)[code] - zero) * float(scales.memory[scale_at[at]])
    np.testing.assert_array_equal(place.load(PAGES).reconstruct().data, value)
    np.testing.assert_array_equal(cache.reconstruct().data, value)
    live = [code_at[PAGES], scale_at[PAGES] if 0 in GROUPS[granularity] else scale_at]
    for memory, old, used in zip((codes.memory, scales.memory), before, live, strict=True):
        rest = np.setdiff1d(np.arange(len(memory)), used)
        np.testing.assert_array_equal(memory[rest], old[rest])


@granularities
def test_the_scale_of_any_other_page_token_or_head_would_show(granularity: ScaleGranularity) -> None:
    """All groups have scales of their own, so the test above cannot pass with a wrong index."""
    cache = cache_of(Codec(INT8, granularity))
    assert len(np.unique(cache.scales)) == cache.scales.size
    right = cache.reconstruct().data
    for axis in GROUPS[granularity]:
        rolled = replace(cache, scales=np.roll(cache.scales, 1, axis))
        assert (rolled.reconstruct().data != right)[cache.codes != 0].all()


def test_scales_that_lie_inside_the_pages_are_read_through_the_same_bytes() -> None:
    """Row 73 of the known faults: the page stride includes the inline scales."""
    codec = Codec(INT8, ScaleGranularity.TOKEN_HEAD)
    pool, (_, tokens, heads, dim) = 9, SHAPE
    head_bytes = 4 + 8  # a scale, then 5 codes and 3 bytes that mean nothing
    memory = np.zeros(pool * tokens * heads * head_bytes, np.uint8)
    strides = Strides(tokens * heads * head_bytes, heads * head_bytes, head_bytes)
    codes = Stored(memory, CacheView((pool, tokens, heads, dim), strides, base=4))
    quarter = Strides(*(stride // 4 for stride in strides))
    scales = Stored(memory.view(np.float32), CacheView((pool, tokens, heads, 1), quarter))
    cache = cache_of(codec)
    place = StoredCache(codec, tokens, dim, codes, scales)
    place.store(cache)
    by_page = memory.reshape(pool, tokens, heads, head_bytes)
    assert (by_page[PAGES][..., 4:9] == cache.codes).all()
    assert (by_page[PAGES][..., :4].copy().view(np.float32) == cache.scales).all()
    np.testing.assert_array_equal(place.load(PAGES).reconstruct().data, cache.reconstruct().data)
    assert (by_page[..., 9:] == 0).all()


@pytest.mark.parametrize("kind", [np.int8, np.float32])
def test_scales_that_are_powers_of_two_may_be_stored_as_exponents(kind: type) -> None:
    codec = Codec(E4M3FN, ScaleGranularity.PAGE_HEAD, power_of_two=True)
    cache = cache_of(codec)
    codes, _ = stored("NHD", (9, *SHAPE[1:]), np.uint8)
    scales, at = stored("pages innermost", (9, 1, 2, 1), kind)
    place = StoredCache(codec, 3, 5, codes, scales)
    place.store(cache)
    expected = np.log2(cache.scales) if kind is np.int8 else cache.scales
    assert (scales.memory[at[PAGES]] == expected).all()
    assert (place.load(PAGES).scales == cache.scales).all()


def test_memory_that_cannot_hold_a_cache_is_refused() -> None:
    codec = Codec(INT4, ScaleGranularity.PAGE, asymmetric=True)
    cache = cache_of(codec)
    codes, _ = stored("NHD", (9, 3, 2, 3), np.uint8)
    scales, _ = stored("NHD", (9, 1, 1, 1), np.float32)
    zeros, _ = stored("NHD", (9, 1, 1, 1), np.int8)
    place = StoredCache(codec, 3, 5, codes, scales, zeros)
    place.store(cache)
    with pytest.raises(ValueError, match=r"zero point 300.0 does not fit memory of type int8"):
        place.store(replace(cache, zeros=np.full((4, 1, 1, 1), 300.0)))
    with pytest.raises(ValueError, match=r"scale .* does not fit memory of type float16"):
        small, _ = stored("NHD", (9, 1, 1, 1), np.float16)
        place._replace(scales=small).store(replace(cache, scales=cache.scales + 2.0**-20))
    with pytest.raises(ValueError, match="laid out for"):
        place.store(cache_of(Codec(INT8)))
    with pytest.raises(ValueError, match="zero points must be stored"):
        place._replace(zeros=None).store(cache)
    with pytest.raises(ValueError, match="two elements at one address"):
        flat = replace(codes, view=replace(codes.view, strides=Strides(18, 0, 3)))
        place._replace(codes=flat).store(cache)
    with pytest.raises(IndexError, match="page 9 lies outside"):
        place.load([9])
    with pytest.raises(IndexError, match="address 162 lies outside an allocation of 162 elements"):
        place._replace(codes=replace(codes, view=replace(codes.view, base=1))).load([8])
    with pytest.raises(ValueError, match="7 codes of int4 take 4 bytes, got 3"):
        place._replace(head_dim=7).load([8])


# --- through page tables, and the distance to the original


SPEC = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=6,
    head_dim_vo=5,
    page_size=4,
    seq_lens=(10, 7, 0),
    qo_lens=(2, 1, 1),
    dtype=DType.BF16,
    sm_scale=0.4,
    causal=CausalRule.BOTTOM_RIGHT,
)
# Requests 0 and 1 share page 5 as their first; request 0 also names it as its third.
SHARED = PageTable(
    np.array([[5, 2, 5], [5, 3, 9], [9, 9, 9]]), 4, 10, (frozenset({5, 2}), frozenset({5, 3}), frozenset())
)
LIVE = np.array([2, 3, 5])


def problem(seed: int = 0, offset: float = 0.0) -> tuple[Inputs, ValidatedCandidates]:
    random = np.random.default_rng(seed)
    k, v = (random.normal(size=(3, 4, 2, d)) + offset for d in (SPEC.head_dim_qk, SPEC.head_dim_vo))
    q = random.normal(size=(SPEC.num_tokens, SPEC.num_qo_heads, SPEC.head_dim_qk))
    lists = [[0, 3, 8, 5], [1, 2, 8], [9, 0, 4], [7], [6, 1], [0, 3, 5], [], []]
    raw = CandidateLists(np.cumsum([0, *map(len, lists)]), np.array([t for row in lists for t in row], np.int64))
    return Inputs(q, PagedCache(LIVE, k), PagedCache(LIVE, v)), validate(SPEC, raw, SHARED)


def attended(candidates: ValidatedCandidates, token: int, head: int) -> list[tuple[int, int, int]]:
    """Where the keys of one query head lie: (place of the page, offset, KV head)."""
    row = token * SPEC.num_kv_heads + head // SPEC.group_size
    mine = candidates.indices[slice(*candidates.indptr[row : row + 2])].tolist()
    table = SHARED.table[SPEC.token_request[token]]
    seen = [t for t in mine if t <= SPEC.token_position[token]]
    return [(LIVE.tolist().index(table[t // 4]), t % 4, head // SPEC.group_size) for t in seen]


def softmax_of(inputs: Inputs, keys: list[tuple[int, int, int]], token: int, head: int) -> tuple[Array, float, Array]:
    """out, lse and the weights of one row, one key after the other."""
    z = [SPEC.sm_scale * math.fsum((inputs.q[token, head] * inputs.k.data[key]).tolist()) for key in keys]
    lse = math.log(math.fsum(map(math.exp, z)))
    weights = np.exp(np.array(z) - lse)
    return weights @ np.array([inputs.v.data[key] for key in keys]), lse, weights


spec_codecs = pytest.mark.parametrize(
    ("k_codec", "v_codec"),
    [
        (Codec(INT8, ScaleGranularity.PAGE_HEAD), Codec(INT4, ScaleGranularity.TOKEN_HEAD, asymmetric=True)),
        (Codec(E4M3FN), Codec(E5M2, ScaleGranularity.PAGE)),
        (Codec(INT4, ScaleGranularity.PAGE_CHANNEL), None),
        (None, Codec(INT8, ScaleGranularity.CHANNEL, power_of_two=True)),
    ],
)


@spec_codecs
def test_the_distance_is_that_of_two_softmaxes_taken_key_by_key(k_codec: Codec | None, v_codec: Codec | None) -> None:
    spec = replace(SPEC, k_codec=k_codec, v_codec=v_codec)
    original, candidates = problem()
    baseline = reconstructed(original, *quantise_inputs(spec, original, SHARED))
    found = quantisation_error(spec, original, baseline, SHARED, candidates)
    for token, head in product(range(SPEC.num_tokens), range(SPEC.num_qo_heads)):
        keys = attended(candidates, token, head)
        if not keys:
            assert (found.lse[token, head], np.abs(found.out[token, head]).max()) == (0, 0)
            continue
        out, lse, _ = softmax_of(original, keys, token, head)
        right_out, right_lse, _ = softmax_of(baseline, keys, token, head)
        np.testing.assert_allclose(found.out[token, head], right_out - out, atol=1e-14)
        np.testing.assert_allclose(found.lse[token, head], right_lse - lse, atol=1e-14)
        np.testing.assert_allclose(found.baseline.out[token, head], right_out, atol=1e-14)
    assert (np.abs(found.out) > 1e-4).any()
    assert (found.lse != 0).any() == (k_codec is not None)
    assert found.largest() == (np.abs(found.out).max(), np.abs(found.lse).max())
    np.testing.assert_allclose(found.rms(), [np.sqrt((x**2).mean()) for x in (found.out, found.lse)], rtol=1e-14)


@spec_codecs
@pytest.mark.parametrize("offset", [0.0, 4.0])
def test_the_distance_stays_within_what_the_bounds_of_the_elements_allow(
    k_codec: Codec | None, v_codec: Codec | None, offset: float
) -> None:
    """lse moves by at most the largest move of a logit e; a weight by a factor within e^(+-2e); V by its own bound."""
    spec = replace(SPEC, k_codec=k_codec, v_codec=v_codec)
    original, candidates = problem(1, offset)
    k, v = quantise_inputs(spec, original, SHARED)
    found = quantisation_error(spec, original, reconstructed(original, k, v), SHARED, candidates)
    k_bound, v_bound = (
        np.zeros_like(cache.data) if codes is None else error_bound(cache.data, codes.codec, codes.scales, codes.zeros)
        for cache, codes in ((original.k, k), (original.v, v))
    )
    for token, head in product(range(3), range(4)):
        keys = attended(candidates, token, head)
        if not keys:
            continue
        _, _, weights = softmax_of(original, keys, token, head)
        logit = max(SPEC.sm_scale * float(np.abs(original.q[token, head]) @ k_bound[key]) for key in keys)
        assert abs(found.lse[token, head]) <= logit + 1e-14
        factor = math.exp(2 * logit)
        moved_v = factor * weights @ np.array([v_bound[key] for key in keys])
        moved_w = (factor - 1) * weights @ np.array([np.abs(original.v.data[key]) for key in keys])
        assert (np.abs(found.out[token, head]) <= moved_v + moved_w + 1e-13).all()


def test_values_that_the_codes_hold_cost_nothing() -> None:
    original, candidates = problem()
    for cache in (original.k, original.v):
        assert isinstance(cache, PagedCache)
        cache.data[:] = np.random.default_rng(5).integers(-127, 128, cache.data.shape) / 16
        cache.data[:, 0, :, :] = 127 / 16
    spec = replace(SPEC, k_codec=Codec(INT8), v_codec=Codec(INT8, ScaleGranularity.PAGE_CHANNEL))
    baseline = reconstructed(original, *quantise_inputs(spec, original, SHARED))
    found = quantisation_error(spec, original, baseline, SHARED, candidates)
    assert found.largest() == found.rms() == (0, 0)


def test_a_shared_page_is_read_with_its_own_scale_by_every_request_and_at_every_logical_page() -> None:
    """Scales by logical page, or of the neighbouring physical page, would give other results."""
    original, candidates = problem()
    spec = replace(SPEC, k_codec=Codec(INT8, ScaleGranularity.PAGE), v_codec=Codec(INT8, ScaleGranularity.PAGE))
    for cache in (original.k, original.v):
        assert isinstance(cache, PagedCache)
        cache.data[:] *= np.array([1.0, 8.0, 1 / 8])[:, None, None, None]
    k, v = quantise_inputs(spec, original, SHARED)
    assert k is not None
    assert v is not None
    assert len(np.unique(k.scales)) == 3
    values = v.reconstruct()
    first, third = values.read(SHARED, 0, [0, 1]), values.read(SHARED, 0, [8, 9])
    np.testing.assert_array_equal(first, third)
    np.testing.assert_array_equal(first, values.read(SHARED, 1, [0, 1]))
    right = forward(spec, reconstructed(original, k, v), SHARED, candidates)
    for changed in (replace(k, scales=np.roll(k.scales, 1, 0)), replace(k, scales=k.scales[[0, 0, 0]])):
        wrong = forward(spec, reconstructed(original, changed, v), SHARED, candidates)
        assert np.abs(wrong.lse[:3] - right.lse[:3]).max() > 1e-2


def test_the_tail_of_a_shared_page_counts_as_far_as_the_longest_request_goes() -> None:
    original, _ = problem()
    original.k.data[LIVE.tolist().index(3), 3] = 1e6  # request 1 ends at offset 3 of page 3
    spec = replace(SPEC, k_codec=Codec(INT8))
    found, _ = quantise_inputs(spec, original, SHARED)
    assert found is not None
    assert found.scales.max() < 1
    longer, _ = quantise_inputs(replace(spec, seq_lens=(10, 8, 0)), original, SHARED)
    assert longer is not None
    assert longer.scales.max() > 1000


def test_rows_out_of_range_are_left_out_of_the_summary() -> None:
    original, candidates = problem()
    original.q[0] *= 1e9
    spec = replace(SPEC, k_codec=Codec(E5M2))
    baseline = reconstructed(original, *quantise_inputs(spec, original, SHARED))
    found = quantisation_error(spec, original, baseline, SHARED, candidates)
    assert not found.in_range[0].any()
    assert found.in_range[1:].all()
    assert found.largest()[1] == np.abs(found.lse[1:]).max() < 1 < np.abs(found.lse[0]).max()
    assert np.isinf(found.own_lse[0]).all()
    assert (found.own_lse[1:] < 1e-10).all()
    nothing = found._replace(in_range=np.zeros_like(found.in_range))
    assert nothing.largest() == nothing.rms() == (0, 0)


def test_a_format_that_is_only_read_is_reconstructed_and_never_chosen() -> None:
    codec = Codec(CodecFormat.FP8_E4M3FNUZ, ScaleGranularity.PAGE)
    cache = cache_of(codec)
    assert (cache.reconstruct().data == decode_table(codec.format)[cache.codes] * cache.scales).all()
    original, _ = problem()
    with pytest.raises(ValueError, match="read, never written"):
        quantise_inputs(replace(SPEC, v_codec=codec), original, SHARED)
