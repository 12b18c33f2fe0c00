"""Quantised KV of a problem: its scales and zero points, values on their grid, and the codes that stand for these.

The scales belong to the problem, the values to a probe. A value is put on the grid once, when a probe makes it; what a
launch hands out are the codes of exactly these values, found again, never quantised anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.codecs import decode, encode
from sacts.reference.formats import FP8_FORMATS
from sacts.reference.quantised import QuantisedCache, group_shape
from sacts.reference.spec import AttentionSpec, Codec, CodecFormat, NaNRule, OverflowRule

from .draw import Array, Draw, Ints

Bools = NDArray[np.bool_]
Codes = NDArray[np.uint8]

LEVELS = {CodecFormat.INT4: 3}  # octaves that scales spread over; other formats: SPREAD
SPREAD = 5
LARGEST_STEP = {CodecFormat.INT4: -1}  # log2 of the largest scale of a format; other formats: COARSE
COARSE = -2
MANTISSA = 0.25  # a scale that is no power of two exceeds one by this share of it at most
OFFSETS = {CodecFormat.INT4: (1, 3)}  # the least and the largest size of a zero point; other formats: WIDE_OFFSETS
WIDE_OFFSETS = (8, 32)
EDGE_SHARE = 0.25  # of the elements of values:scale_edges


class NotOnGrid(ValueError):
    """A value that some row attends and that no code stands for."""


@dataclass(frozen=True)
class Scales:
    """Scales and zero points of K or V over the live pages: [L, page_size, num_kv_heads, d], of size 1 along the axes
    that share one.
    """

    codec: Codec
    scales: Array
    zeros: Array

    def on_grid(self, values: Array) -> Array:
        """The values that the nearest codes stand for: [L, page_size, num_kv_heads, d]."""
        return decode(self._codes(values), self.codec.format, self.scales, self.zeros)

    def codes(self, values: Array, needed: Bools) -> Codes:
        """The codes of values that are on the grid already, in the slots that some row attends [L, page_size,
        num_kv_heads]; elsewhere the nearest ones: what is not finite becomes NaN or infinity where the format has
        them, else the least or the largest code. Raises NotOnGrid.
        """
        codes = self._codes(values)
        wrong = needed[..., None] & (decode(codes, self.codec.format, self.scales, self.zeros) != values)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0].tolist())
            raise NotOnGrid(f"live page, offset, head, channel {at}: no code of {self.codec.format} is {values[at]}")
        return codes

    def idle(self, needed: Bools) -> Bools:
        """Which scales belong to slots that no row attends: [L, page_size, num_kv_heads, d], of size 1 where shared."""
        shared = tuple(axis for axis in range(3) if self.scales.shape[axis] == 1)
        some = np.asarray(needed.any(axis=shared, keepdims=True))
        return np.broadcast_to(~some[..., None], self.scales.shape)

    def at_edges(self, values: Array, draw: Draw) -> Array:
        """A quarter of the values replaced by edges of the format, each in the scale and about the zero point of its
        place; those beyond the largest code saturate.
        """
        some = edges(self.codec.format)
        chosen = _uniform(draw, values.shape) < EDGE_SHARE
        edge = some[(_uniform(draw, values.shape) * len(some)).astype(np.int64)]
        return self.on_grid(np.where(chosen, (edge - self.zeros) * self.scales, values))

    def _codes(self, values: Array) -> Codes:
        integer = self.codec.format.integer
        keep = {"nan": NaNRule.CODE, "nan_code": self.codec.code_range[0]} if integer else {"nan": NaNRule.KEEP}
        finite = replace(self.codec, overflow=OverflowRule.SATURATE, **keep)
        codes = encode(values, finite, self.scales, self.zeros)
        if integer or np.isfinite(values).all():
            return codes
        beyond = replace(finite, overflow=OverflowRule.NON_FINITE)
        return np.where(np.isfinite(values), codes, encode(values, beyond, self.scales, self.zeros))

    def cache(self, pages: Ints, values: Array, needed: Bools) -> QuantisedCache:
        """The cache that stands for these values, as the reference holds it."""
        return QuantisedCache(self.codec, pages, self.codes(values, needed), self.scales, self.zeros)

    def at(self, index: Ints | NDArray[np.intp], axis: int) -> Scales:
        """Those of other pages, tokens, heads or channels (axis 0 to 3), in this order; what is shared stays."""
        moved = (x if x.shape[axis] == 1 else np.take(x, index, axis) for x in (self.scales, self.zeros))
        return Scales(self.codec, *moved)


def edges(format: CodecFormat) -> Array:
    """Of both signs: 0, the number next to it, the largest, and twice that; of fp8 also the largest subnormal and the
    least normal number.
    """
    if format.integer:
        largest = float(1 << (format.bits - 1))  # of the negative ones; the positive saturate
        sizes = [0.0, 1.0, largest - 1, largest, 2 * largest]
    else:
        fmt = FP8_FORMATS[format]
        normal, step = 2.0**fmt.emin, 2.0 ** (fmt.emin - fmt.precision + 1)
        sizes = [0.0, step, normal - step, normal, fmt.max, 2 * fmt.max]
    return np.array([sign * size for size in sizes for sign in (1, -1)])


def scales_of(
    spec: AttentionSpec, which: str, pages: Ints, slot_request: Ints, slot_token: Ints, names: tuple[object, ...]
) -> Scales | None:
    """The drawn scales of "k" or "v", None without a codec: neighbouring pages (logical and physical), heads, tokens
    and channels have scales an octave or more apart, and so have K and V. `names` of the draws; what each page has is
    drawn for these pages, what all share is the same in all problems of a cell.
    """
    codec = spec.k_codec if which == "k" else spec.v_codec
    if codec is None:
        return None
    dim = spec.head_dim_qk if which == "k" else spec.head_dim_vo
    shape = group_shape(codec, (*slot_request.shape, spec.num_kv_heads, dim))
    levels = LEVELS.get(codec.format, SPREAD)
    turn = np.indices(shape)[1:].sum(axis=0)
    if shape[0] > 1:
        names = (*names, *pages.tolist())
        levels_of = _page_levels(pages, slot_request, slot_token, levels, Draw(*names, "levels"))  # of K and V alike
        turn = turn + levels_of[:, None, None, None]
    octave = LARGEST_STEP.get(codec.format, COARSE) - (turn + (which == "v")) % levels
    draw = Draw(*names, which)
    scales = 2.0**octave
    if not codec.power_of_two:
        scales = (scales * (1 + MANTISSA * _uniform(draw, shape))).astype(np.float32).astype(np.float64)
    zeros = np.zeros(shape)
    if codec.asymmetric:
        low, high = OFFSETS.get(codec.format, WIDE_OFFSETS)
        zeros = draw.signs(shape) * np.floor(low + (high + 1 - low) * _uniform(draw, shape))
    return Scales(codec, scales, zeros)


def _uniform(draw: Draw, shape: tuple[int, ...]) -> Array:
    """In [0, 1), in steps of one n-th."""
    n = int(np.prod(shape))
    return (draw.permutation(n) / n).reshape(shape)


def _page_levels(pages: Ints, slot_request: Ints, slot_token: Ints, levels: int, draw: Draw) -> Ints:
    """A level for each live page, other than those of the logical page before it and of its physical neighbours as far
    as so few levels allow.
    """
    found = np.full(len(pages), -1)
    order = np.lexsort((slot_token[:, 0], slot_request[:, 0]))
    before = -1
    for page in order.tolist():
        first = slot_token[page, 0] == 0 or slot_request[page, 0] < 0
        beside = [p for p in (page - 1, page + 1) if 0 <= p < len(pages)]
        taken = [] if first or before < 0 else [found[before]]
        taken += [found[p] for p in beside if abs(int(pages[p] - pages[page])) == 1]
        choice = draw.permutation(levels)
        found[page] = min(choice.tolist(), key=taken.count)
        before = page
    return found


def joined(parts: list[tuple[Scales, Ints]], total: int) -> Scales:
    """The scales of problems side by side: each with the places of its live pages among `total`."""
    first = parts[0][0]
    if first.scales.shape[0] == 1 and not len({part.scales.tobytes() for part, _ in parts}) == 1:
        raise ValueError("problems that share one scale must have the same")
    if first.scales.shape[0] == 1:
        return first
    scales, zeros = np.ones((total, *first.scales.shape[1:])), np.zeros((total, *first.scales.shape[1:]))
    for part, live in parts:
        scales[live], zeros[live] = part.scales, part.zeros
    return Scales(first.codec, scales, zeros)
