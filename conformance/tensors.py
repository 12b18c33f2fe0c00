"""The only boundary between NumPy (the suite's world, FP64) and torch (the adapter's)."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.reference.codecs import pack
from sacts.reference.spec import Codec, CodecFormat, DType

Array = NDArray[np.float64]

TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
STORED = {
    CodecFormat.INT8: torch.int8,
    CodecFormat.INT4: torch.uint8,  # two to a byte along the last dimension, the first in the low nibble
    CodecFormat.FP8_E4M3FN: torch.float8_e4m3fn,
    CodecFormat.FP8_E5M2: torch.float8_e5m2,
}
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.uint8: torch.uint8}
_BITS |= dict.fromkeys(STORED.values(), torch.uint8)
_NUMPY_BITS = {torch.int16: np.int16, torch.int32: np.int32, torch.uint8: np.uint8}
# A NaN that no arithmetic produces: an output element that still holds it was never written.
_UNWRITTEN = {torch.float16: 0x7E5A, torch.bfloat16: 0x7FDA, torch.float32: 0x7FDADADA, torch.uint8: 0xFF}
_GUARD = 256  # elements before and after each buffer


def to_torch(values: Array, dtype: DType, device: str) -> torch.Tensor:
    """Values that `dtype` holds exactly (or non-finite ones), as a tensor."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(values.astype(np.float32)).to(TORCH[dtype]).to(device)


def indices(values: NDArray[np.int64], device: str) -> torch.Tensor:
    """Index arrays travel as int32."""
    return torch.from_numpy(values.astype(np.int32)).to(device)


def to_numpy(tensor: torch.Tensor) -> Array:
    """FP64 values of a floating-point tensor."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def bits(tensor: torch.Tensor) -> NDArray[np.int64]:
    """The bit patterns of a tensor's elements."""
    return tensor.detach().contiguous().view(_BITS[tensor.dtype]).cpu().numpy().astype(np.int64)


@dataclass(frozen=True)
class CacheForm:
    """How a KV pool lies in memory. `hnd`: pages are [heads, page_size, d] instead of [page_size, heads, d];
    `packed`: K and V share one tensor [num_pages, 2, ...]; `strides`: `contiguous`, `strided` (a view with twice the
    page stride and an odd base offset) or `span` (a view with so large a page stride that
    the pool spans 2^32 elements).
    """

    hnd: bool = False
    packed: bool = False
    strides: str = "contiguous"


SPANNED = 2**32  # elements from a pool's first page to behind its last: half of the pages lie beyond 32-bit offsets
MAP_NORESERVE = 0x4000  # of Linux; the module mmap names it from Python 3.13
UNRESERVED = 2**30  # bytes from which memory on the CPU is address space first
ODD_OFFSET = 8  # elements: 16 bytes in 16-bit types, as aligned loads of a strided view may expect


@dataclass(frozen=True)
class Pool:
    """K and V caches over the same pages, their common tensor where they are packed, and the live pages' index."""

    k: torch.Tensor
    v: torch.Tensor
    packed: torch.Tensor | None
    live: torch.Tensor


Codes = NDArray[np.uint8]
Filler = float | tuple[float, ...]


@dataclass(frozen=True)
class Held:
    """What the pages of a cache hold, as a tensor [L, page_size, heads, d], and the filler of the same dtype."""

    data: torch.Tensor
    filler: torch.Tensor


def held(values: Array, dtype: DType, filler: Filler) -> Held:
    """Values that are stored as they are."""
    return Held(*(to_torch(np.ascontiguousarray(x), dtype, "cpu") for x in (values, np.atleast_1d(filler))))


def held_codes(codes: Codes, codec: Codec, filler: Filler) -> Held:
    """Codes [L, page_size, heads, d], in the form in which a cache holds them. The filler is of the format's own worst
    codes, whatever its values: the largest, the least, and all bits.
    """
    stored = STORED[codec.format]
    packed = torch.from_numpy(np.ascontiguousarray(pack(codes, codec, -1)))
    worst = torch.tensor([0x7F, 0x80, 0xFF, 0x77], dtype=torch.uint8).roll(np.size(filler))
    return Held(packed.view(stored), worst.view(stored))


def held_scales(scales: Array, filler: Filler) -> Held:
    """Scales or zero points, FP32."""
    return Held(*(torch.from_numpy(np.array(x, np.float32, ndmin=1)) for x in (scales, filler)))


def pool(
    k: Array,
    v: Array,
    pages: NDArray[np.int64],
    num_pages: int,
    dtype: DType,
    device: str,
    form: CacheForm,
    filler: Filler,
) -> Pool:
    """The pool of caches that are stored as they are, k and v [L, page_size, heads, d]: see `pool_of`."""
    return pool_of(held(k, dtype, filler), held(v, dtype, filler), pages, num_pages, device, form)


def pool_of(k: Held, v: Held, pages: NDArray[np.int64], num_pages: int, device: str, form: CacheForm) -> Pool:
    """Caches whose `pages` hold k and v; what lies between the pages of a view is the filler, value after value.

    The rest of a large pool is never touched, so it costs address space only. `packed` needs k and v of one shape and
    stored alike; others stay two tensors.
    """
    live = torch.from_numpy(pages).to(device)
    both = None
    if form.packed and k.data.dtype == v.data.dtype and k.data.shape == v.data.shape:
        page = _page_of(k, form)
        both = _pages(num_pages, (2, *page), k, device, form.strides)
        caches = both[:, 0], both[:, 1]
    else:
        k_pages, v_pages = (_pages(num_pages, _page_of(x, form), x, device, form.strides) for x in (k, v))
        caches = k_pages, v_pages
    for cache, each in zip(caches, (k, v), strict=True):
        _put(cache, live, each, form)
    return Pool(caches[0], caches[1], both, live)


def paged(data: Held, pages: NDArray[np.int64], num_pages: int, device: str, form: CacheForm) -> torch.Tensor:
    """What belongs to the pages of a pool, one element or more each, [num_pages, ...]; or to all pages: [1, ...]."""
    if len(data.data) == 1:
        return (data.data.swapaxes(1, 2) if form.hnd else data.data).contiguous().to(device)
    whole = _pages(num_pages, _page_of(data, form), data, device, form.strides)
    _put(whole, torch.from_numpy(pages).to(device), data, form)
    return whole


def taken(whole: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The live pages of what belongs to pages; all of what belongs to all."""
    return whole if len(whole) == 1 and len(live) > 1 else _as_bits(whole)[live]


def put(whole: torch.Tensor, live: torch.Tensor, contents: torch.Tensor) -> None:
    """Replace what `taken` takes."""
    bits = _as_bits(whole)
    if len(whole) == 1 and len(live) > 1:
        bits.copy_(_as_bits(contents))
    else:
        bits[live] = _as_bits(contents)


def _page_of(data: Held, form: CacheForm) -> tuple[int, ...]:
    tokens, heads, dim = data.data.shape[1:]
    return (heads, tokens, dim) if form.hnd else (tokens, heads, dim)


def _put(cache: torch.Tensor, live: torch.Tensor, data: Held, form: CacheForm) -> None:
    values = data.data.swapaxes(1, 2) if form.hnd else data.data
    _as_bits(cache)[live] = _as_bits(values.contiguous()).to(cache.device)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: torch does not index them everywhere."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else tensor


def _pages(num_pages: int, page: tuple[int, ...], data: Held, device: str, strides: str) -> torch.Tensor:
    """Storage of `num_pages` pages, uninitialised but for the filler between the pages of a strided view."""
    dtype = data.data.dtype
    if strides == "contiguous":
        return storage(num_pages * int(np.prod(page)), dtype, device).view(num_pages, *page)
    size = int(np.prod(page))
    if strides == "strided":
        length = num_pages * 2 * size + ODD_OFFSET
        filler = _as_bits(data.filler)
        whole = filler.repeat(-(-length // len(filler)))[:length].to(device).view(dtype)
        return whole[ODD_OFFSET:].view(num_pages, 2, *page)[:, 0]
    inner = torch.empty(page, device="meta").stride()
    stride = max(SPANNED // num_pages, size) // 16 * 16 + 16
    return storage(num_pages * stride, dtype, device).as_strided((num_pages, *page), (stride, *inner))


def storage(length: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Uninitialised elements. Of a large pool on the CPU nothing is reserved, since most of it is never touched."""
    size = length * dtype.itemsize
    if device != "cpu" or size < UNRESERVED or sys.platform != "linux":
        return torch.empty(length, dtype=dtype, device=device)
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(space, dtype=dtype)


def digest(*tensors: torch.Tensor) -> bytes:
    """A hash of the tensors' bytes."""
    state = blake2b()
    for tensor in tensors:
        plain = tensor.detach().contiguous().cpu()
        state.update(plain.view(_BITS.get(plain.dtype, plain.dtype)).numpy().tobytes())
    return state.digest()


@dataclass(frozen=True)
class Guarded:
    """A buffer between two guard zones, filled with a pattern that no arithmetic produces."""

    whole: torch.Tensor
    inner: torch.Tensor

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Guarded:
        """A buffer of `shape`; buffer and guards hold the unwritten pattern."""
        size = int(np.prod(shape, dtype=np.int64))
        whole = torch.full((size + 2 * _GUARD,), _UNWRITTEN[dtype], dtype=_BITS[dtype], device=device).view(dtype)
        return cls(whole, whole[_GUARD : _GUARD + size].view(shape))

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Guarded:
        """A buffer of `shape` that holds zeros; on the CPU, memory that nobody touches is none."""
        size = int(np.prod(shape, dtype=np.int64))
        if device == "cpu":
            whole = torch.from_numpy(np.zeros(size + 2 * _GUARD, _NUMPY_BITS[_BITS[dtype]]))
        else:
            whole = torch.zeros(size + 2 * _GUARD, dtype=_BITS[dtype], device=device)
        whole[:_GUARD], whole[_GUARD + size :] = _UNWRITTEN[dtype], _UNWRITTEN[dtype]
        return cls(whole.view(dtype), whole.view(dtype)[_GUARD : _GUARD + size].view(shape))

    def blank(self) -> None:
        """Make the buffer hold the unwritten pattern again."""
        self.inner.view(_BITS[self.inner.dtype]).fill_(_UNWRITTEN[self.inner.dtype])

    def broken(self) -> str | None:
        """Where a guard zone was written, in words, or None."""
        zones = self.whole.view(_BITS[self.whole.dtype])
        for name, zone in (("before", zones[:_GUARD]), ("behind", zones[-_GUARD:])):
            changed = (zone != _UNWRITTEN[self.whole.dtype]).nonzero()
            if len(changed):
                at = _GUARD - int(changed[-1]) if name == "before" else int(changed[0]) + 1
                return f"{at} elements {name} it"
        return None


def unwritten(tensor: torch.Tensor) -> NDArray[np.int64]:
    """Indices [n, ndim] of the elements that still hold the unwritten pattern."""
    return (tensor.contiguous().view(_BITS[tensor.dtype]) == _UNWRITTEN[tensor.dtype]).nonzero().cpu().numpy()
