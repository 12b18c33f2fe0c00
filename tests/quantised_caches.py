"""Codecs, groups and caches that the tests of quantised caches share."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

from sacts.reference.formats import decode_table
from sacts.reference.quantised import (
    QuantisedCache,
    group_shape,
)
from sacts.reference.spec import Codec, CodecFormat, ScaleGranularity

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
