"""Quantised caches in scattered memory: strides, scales inside pages, exponents, what memory cannot hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from quantised_caches import (
    E4M3FN,
    GROUPS,
    INT4,
    INT8,
    PAGES,
    SHAPE,
    cache_of,
    granularities,
    variants,
)

from sacts.reference.formats import decode_table
from sacts.reference.paging import NHD, PACKED_HND, CacheView, Strides, cache_view
from sacts.reference.quantised import (
    Stored,
    StoredCache,
)
from sacts.reference.spec import Codec, ScaleGranularity

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
