"""A quantised KV cache: codes, scales and zero points of physical pages, wherever they lie in memory; DESIGN section 4.

Scales belong to the physical page: whoever reads a page through whatever table reads it with the page's own scale. The
function that a backend computes is attention over the reconstructed KV; how far that is from attention over the
original KV is a second, separately reported number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import ValidatedCandidates
from .codecs import MAX_ZERO, decode, encode, pack, scales_of, unpack
from .formats import decode_table, round_to
from .forward import Forward, Inputs, forward
from .paging import CACHE_AXES, CacheView, PagedCache, PageTable
from .spec import AttentionSpec, Codec, DType, OverflowRule

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Codes = NDArray[np.uint8]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class QuantisedCache:
    """K or V in codes: `pages` [n] sorted physical ids; `codes` [n, page_size, heads, dim] uint8, one code each;
    `scales` and `zeros` of the same axes, of size 1 where the codec's granularity shares them.

    Raises ValueError, naming the field, for a shape that the granularity does not have, a code that the format does
    not have, a scale that is not a positive FP32 value (or power of two), or a zero point that is no integer up to
    2^24 in size (or not 0 under a symmetric codec).
    """

    codec: Codec
    pages: Ints
    codes: Codes
    scales: Array
    zeros: Array

    def __post_init__(self) -> None:
        if self.codes.ndim != 4 or len(self.codes) != len(self.pages) or (np.diff(self.pages) <= 0).any():
            raise ValueError(
                f"codes must be [pages, page_size, heads, dim] of {len(self.pages)} sorted distinct pages, "
                f"got {self.codes.shape} of pages {self.pages}"
            )
        if (self.codes >= len(decode_table(self.codec.format))).any():
            raise ValueError(f"codes hold {self.codes.max()}, which is no code of {self.codec.format}")
        shape = group_shape(self.codec, self.codes.shape)
        for name, values in (("scales", self.scales), ("zeros", self.zeros)):
            if values.shape != shape:
                raise ValueError(f"{name} must be {shape} for granularity {self.codec.granularity}, got {values.shape}")
        scales, zeros = self.scales, self.zeros
        good = (scales > 0) & (scales < np.inf) & (round_to(scales, DType.FP32) == scales)
        if self.codec.power_of_two:
            good &= np.frexp(scales)[0] == 0.5
        kind = "a power of two" if self.codec.power_of_two else "positive FP32 values"
        self._refuse("scales", good, f"must be {kind}")
        limit = MAX_ZERO if self.codec.asymmetric else 0.0
        self._refuse("zeros", (np.abs(zeros) <= limit) & (zeros == np.rint(zeros)), f"must be integers up to {limit}")

    def _refuse(self, name: str, good: Bools, rule: str) -> None:
        """Raise ValueError for the first value that is not good."""
        if not good.all():
            at = tuple(np.argwhere(~good)[0].tolist())
            raise ValueError(f"{name}[{', '.join(map(str, at))}] is {getattr(self, name)[at]}; {rule}")

    def reconstruct(self) -> PagedCache:
        """The values that the codes stand for, (value of the code - zero) * scale, exact in FP64."""
        return PagedCache(self.pages, decode(self.codes, self.codec.format, self.scales, self.zeros))


def group_shape(codec: Codec, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of codes [pages, page_size, heads, dim]: 1 along the axes that share one."""
    axes = codec.granularity.axes
    return tuple(size if name in axes else 1 for name, size in zip(CACHE_AXES, shape, strict=True))


def real_slots(pages: Ints, table: PageTable, seq_lens: Sequence[int]) -> Bools:
    """Which slots of the physical pages hold a committed token of any request: [pages, page_size]."""
    committed = np.asarray(seq_lens, np.int64)[:, None] - np.arange(table.table.shape[1]) * table.page_size
    used = committed > 0
    filled = np.zeros(max(table.num_pages, int(pages.max(initial=-1)) + 1, int(table.table[used].max(initial=-1)) + 1))
    np.maximum.at(filled, table.table[used], committed[used])
    return np.arange(table.page_size) < filled[pages][:, None]


def quantise(cache: PagedCache, codec: Codec, real: Bools | None = None) -> QuantisedCache:
    """Codes, scales and zero points of a cache; scales come from the `real` slots [pages, page_size] alone (None: all).

    The slots that are not real (tails, free pages) get code 0, whatever they hold; no value that is real is clipped.
    Raises ValueError for a real value that is infinite or NaN, naming physical page, token, head and channel, and as
    `codecs.encode` and `codecs.scales_of`.
    """
    held = np.ones(cache.data.shape[:2], bool) if real is None else real
    if held.shape != cache.data.shape[:2]:
        raise ValueError(f"real must be {cache.data.shape[:2]} (pages, page_size), got {held.shape}")
    each = np.broadcast_to(held[..., None, None], cache.data.shape)
    bad = each & ~np.isfinite(cache.data)
    if bad.any():
        page, token, head, channel = np.argwhere(bad)[0]
        raise ValueError(
            f"physical page {cache.pages[page]}, token {token}, head {head}, channel {channel}: "
            f"{cache.data[page, token, head, channel]} cannot be quantised"
        )
    scales, zeros = scales_of(*_ends(cache.data, each, codec), codec)
    never_clips = replace(codec, overflow=OverflowRule.SATURATE)
    codes = encode(np.where(each, cache.data, 0.0), never_clips, scales, zeros)
    return QuantisedCache(codec, cache.pages, np.where(each, codes, 0).astype(np.uint8), scales, zeros)


def _ends(data: Array, real: Bools, codec: Codec) -> tuple[Array, Array]:
    """The least and the largest real value of each group; 0 and 0 where a group has none."""
    shared = tuple(i for i, name in enumerate(CACHE_AXES) if name not in codec.granularity.axes)
    some = real.any(axis=shared, keepdims=True)
    least = np.min(data, axis=shared, keepdims=True, where=real, initial=np.inf)
    largest = np.max(data, axis=shared, keepdims=True, where=real, initial=-np.inf)
    return np.where(some, least, 0.0), np.where(some, largest, 0.0)


# --- in memory


@dataclass(frozen=True)
class Stored:
    """An array [pages, page_size, heads, dim] inside one allocation: `memory` [elements], and where it lies in it.

    Codes are uint8 (int4: bytes of two, `view.shape` counts bytes); scales FP32 values, or exponents where `memory`
    holds integers; zero points any type. A view of scales has size 1 along the axes that share one.
    """

    memory: NDArray[np.generic]
    view: CacheView

    def read(self, pages: ArrayLike) -> NDArray[np.generic]:
        """The elements of some pages: [n, page_size, heads, dim]. Raises IndexError as `addresses`."""
        return self.memory[self.addresses(pages)]

    def write(self, pages: ArrayLike, values: ArrayLike) -> None:
        """Put values there. Raises IndexError as `addresses`, ValueError where two elements share an address."""
        at = self.addresses(pages)
        if len(np.unique(at)) != at.size:
            raise ValueError(f"strides {self.view.strides}, {self.view.dim_stride} put two elements at one address")
        self.memory[at] = values

    def addresses(self, pages: ArrayLike) -> Ints:
        """Where the elements lie: [n, page_size, heads, dim]. Raises IndexError, naming the page or the address, for a
        page outside the view or an address outside the memory.
        """
        _, tokens, heads, dim = self.view.shape
        page, token, head = np.ix_(np.asarray(pages, np.int64), np.arange(tokens), np.arange(heads))
        at = self.view.address(page, token, head)[..., None] + np.arange(dim) * self.view.dim_stride
        bad = (at < 0) | (at >= len(self.memory))
        if bad.any():
            raise IndexError(f"address {at[bad][0]} lies outside an allocation of {len(self.memory)} elements")
        return at


class StoredCache(NamedTuple):
    """K or V of a pool as a kernel finds it: codes, scales and zero points (None: symmetric) with strides of their own.

    `page_size` and `head_dim` count codes, not bytes.
    """

    codec: Codec
    page_size: int
    head_dim: int
    codes: Stored
    scales: Stored
    zeros: Stored | None = None

    def load(self, pages: ArrayLike) -> QuantisedCache:
        """The physical pages `pages`, sorted. Raises IndexError as `Stored.addresses`, ValueError as
        `QuantisedCache`, or where int4 is not packed as its size says.
        """
        held = np.asarray(pages, np.int64)
        codes = np.asarray(self.codes.read(held), np.uint8)
        codes = unpack(codes, self.codec, *self._packed())
        owners = self._owners(held)
        scales = self.scales.read(owners)
        values = np.exp2(scales.astype(np.float64)) if _exponents(scales) else scales.astype(np.float64)
        zeros = np.zeros(values.shape) if self.zeros is None else self.zeros.read(owners).astype(np.float64)
        return QuantisedCache(self.codec, held, codes, values, zeros)

    def store(self, cache: QuantisedCache) -> None:
        """Write a cache; the rest of the memory stays as it is. Raises IndexError and ValueError as `Stored.write`,
        ValueError for another codec, and where the memory does not hold a scale or zero point exactly.
        """
        if cache.codec != self.codec:
            raise ValueError(f"the cache has {cache.codec}, the memory is laid out for {self.codec}")
        if (self.zeros is None) is self.codec.asymmetric:
            raise ValueError(f"zero points must be stored exactly if asymmetric is set, got {self.zeros}")
        owners = self._owners(cache.pages)
        axis, _ = self._packed()
        self.codes.write(cache.pages, pack(cache.codes, self.codec, axis))
        exponents = np.frexp(cache.scales)[1] - 1.0
        _write_exactly("scale", self.scales, owners, exponents if _exponents(self.scales.memory) else cache.scales)
        if self.zeros is not None:
            _write_exactly("zero point", self.zeros, owners, cache.zeros)

    def _packed(self) -> tuple[int, int]:
        """The axis along which codes share a byte, and the codes along it."""
        token = self.codec.nibble_axis == "token"
        return (1, self.page_size) if token else (3, self.head_dim)

    def _owners(self, pages: Ints) -> Ints:
        """The pages whose scales are read: one for all where pages share theirs."""
        return pages if "page" in self.codec.granularity.axes else np.zeros(1, np.int64)


def _exponents(scales: NDArray[np.generic]) -> bool:
    return np.issubdtype(scales.dtype, np.integer)


def _write_exactly(name: str, stored: Stored, pages: Ints, values: Array) -> None:
    stored.write(pages, values)
    lost = stored.read(pages).astype(np.float64) != values
    if lost.any():
        raise ValueError(f"{name} {values[lost][0]} does not fit memory of type {stored.memory.dtype}")


# --- the distance to the original


def quantise_inputs(
    spec: AttentionSpec, inputs: Inputs, table: PageTable
) -> tuple[QuantisedCache | None, QuantisedCache | None]:
    """K and V under the codecs of the spec, scales from the committed slots; None where the spec has no codec.

    Raises ValueError as `quantise`.
    """
    k, v = (
        None if codec is None else quantise(cache, codec, real_slots(cache.pages, table, spec.seq_lens))
        for codec, cache in ((spec.k_codec, inputs.k), (spec.v_codec, inputs.v))
    )
    return k, v


def reconstructed(inputs: Inputs, k: QuantisedCache | None, v: QuantisedCache | None) -> Inputs:
    """What a backend's result is judged on: K and V as their codes say; the original where there are none."""
    return Inputs(inputs.q, k.reconstruct() if k else inputs.k, v.reconstruct() if v else inputs.v)


class QuantisationError(NamedTuple):
    """Attention over the reconstructed KV less attention over the original: `out` [num_tokens, num_qo_heads,
    head_dim_vo] and `lse` [num_tokens, num_qo_heads], 0 where both are -inf. `own_out`, `own_lse`: bounds of the error
    of these differences themselves; `in_range` as in `Forward`. The summaries cover the rows in range; 0 without any.
    """

    out: Array
    lse: Array
    own_out: Array
    own_lse: Array
    in_range: Bools
    baseline: Forward

    def largest(self) -> tuple[float, float]:
        """Largest |difference| of out, and of lse."""
        out, lse = self._judged()
        return float(np.abs(out).max(initial=0.0)), float(np.abs(lse).max(initial=0.0))

    def rms(self) -> tuple[float, float]:
        """Root mean square difference of out, and of lse."""
        out, lse = (x if x.size else np.zeros(1) for x in self._judged())
        return float(np.sqrt(np.mean(out**2))), float(np.sqrt(np.mean(lse**2)))

    def _judged(self) -> tuple[Array, Array]:
        return self.out[self.in_range], self.lse[self.in_range]


def quantisation_error(
    spec: AttentionSpec,
    original: Inputs,
    reconstruction: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    *,
    gate: Array | None = None,
) -> QuantisationError:
    """What the codecs cost: a property of the model, no error of a kernel. The baseline is attention over the
    reconstructed KV, `forward` of the same spec and candidates. Raises as `forward`.
    """
    before, baseline = (forward(spec, inputs, table, candidates, gate=gate) for inputs in (original, reconstruction))
    with np.errstate(invalid="ignore"):
        lse = np.where(baseline.lse == before.lse, 0.0, baseline.lse - before.lse)
    return QuantisationError(
        baseline.out - before.out,
        lse,
        baseline.out_error + before.out_error,
        baseline.lse_error + before.lse_error,
        baseline.in_range & before.in_range,
        baseline,
    )
