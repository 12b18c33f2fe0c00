"""Paging: from logical positions to physical addresses, DESIGN section 3 and equation (17); who owns which page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Array = NDArray[np.float64]

CACHE_AXES = ("page", "token", "head", "dim")
# Axes of the usual allocations, outermost first; "kv" is 0 for K and 1 for V in a packed one.
NHD = ("page", "token", "head", "dim")
HND = ("page", "head", "token", "dim")
PACKED_NHD = ("page", "kv", "token", "head", "dim")
PACKED_HND = ("page", "kv", "head", "token", "dim")


class Strides(NamedTuple):
    """Strides of a KV cache [pages, page_size, heads, dim] (or any permutation of it), in elements."""

    page: int
    token: int
    head: int


@dataclass(frozen=True)
class CacheView:
    """K or V inside an allocation: `shape` (pages, page_size, heads, dim), strides and `dim_stride` in elements,
    `base`: offset of page 0, token 0, head 0, dim 0 from the allocation's first element.
    """

    shape: tuple[int, int, int, int]
    strides: Strides
    dim_stride: int = 1
    base: int = 0

    def address(self, physical_page: ArrayLike, offset: ArrayLike, head: ArrayLike) -> Ints:
        """Element offset of the first of `dim` elements from the start of the allocation, equation (17).

        Raises IndexError, naming the coordinate, for one outside the shape.
        """
        for name, values, size in zip(CACHE_AXES, (physical_page, offset, head), self.shape, strict=False):
            values = np.asarray(values, np.int64)
            bad = (values < 0) | (values >= size)
            if bad.any():
                raise IndexError(f"{name} {values[bad].flat[0]} lies outside a cache with {size} along this axis")
        return self.base + address(physical_page, offset, head, self.strides)


def cache_view(
    shape: Sequence[int], axes: Sequence[str], at: Mapping[str, int | slice] | None = None, *, base: int = 0
) -> CacheView:
    """The view that `at` cuts out of a contiguous allocation.

    `shape`, `axes`: sizes and names of the allocation's axes, outermost first (NHD, HND, PACKED_NHD or any order;
    axes that are not in CACHE_AXES, such as "kv" or "layer", need an index in `at`). `at`: an index, or a slice for
    an axis that is only partly or not densely used. `base`: offset of the allocation itself, in elements.

    Raises ValueError, naming the axis, for one that is missing, unknown, out of range, or walked backwards.
    """
    at = dict(at or {})
    if len(shape) != len(axes) or sorted(set(axes)) != sorted(axes):
        raise ValueError(f"shape {tuple(shape)} needs one distinct axis name per size, got {tuple(axes)}")
    unknown = [name for name in at if name not in axes]
    if unknown:
        raise ValueError(f"the allocation has no axis {unknown[0]!r}, only {tuple(axes)}")
    sizes, strides, step = {}, {}, 1
    for name, size in reversed(list(zip(axes, shape, strict=True))):
        taken = _taken(name, size, at.get(name, slice(None)))
        base += taken.start * step
        if name in CACHE_AXES:
            sizes[name], strides[name] = len(taken), step * taken.step
        step *= size
    missing = [name for name in CACHE_AXES if name not in sizes]
    if missing:
        raise ValueError(f"the allocation needs an axis {missing[0]!r}, got {tuple(axes)}")
    return CacheView(
        (sizes["page"], sizes["token"], sizes["head"], sizes["dim"]),
        Strides(strides["page"], strides["token"], strides["head"]),
        strides["dim"],
        base,
    )


def _taken(name: str, size: int, index: int | slice) -> range:
    """Which of an axis' positions a view uses; a cache axis stays an axis, any other must be fixed by an index."""
    kept = name in CACHE_AXES
    if isinstance(index, slice) is not kept:
        problem = f"must stay an axis of the view, got the index {index}" if kept else "needs an index"
        raise ValueError(f"axis {name!r} {problem}")
    if isinstance(index, slice):
        taken = range(*index.indices(size))
        if taken.step < 1:
            raise ValueError(f"axis {name!r} needs a positive step, got {taken.step}")
        return taken
    if not 0 <= index < size:
        raise ValueError(f"axis {name!r} has {size} entries, got the index {index}")
    return range(index, index + 1)


@dataclass(frozen=True)
class PageTable:
    """`table` [requests, max_pages]: the physical page of each logical page. Columns beyond a request's last
    committed page are stale and mean nothing. `owned[n]`: the physical pages that request n may read; a page of a
    shared prefix is owned by several requests. `num_pages`: pages in the pool.

    `generations` [requests, max_pages]: the generation of each page when the request was given it;
    `pool_generations` [num_pages]: the current one, which grows each time a page is handed out anew. Both or none.
    """

    table: Ints
    page_size: int
    num_pages: int
    owned: tuple[frozenset[int], ...]
    generations: Ints | None = None
    pool_generations: Ints | None = None

    def __post_init__(self) -> None:
        if (self.generations is None) != (self.pool_generations is None):
            raise ValueError("generations and pool_generations must be given together")
        if self.generations is not None and self.generations.shape != self.table.shape:
            raise ValueError(f"generations must have shape {self.table.shape}, not {self.generations.shape}")
        if self.pool_generations is not None and self.pool_generations.shape != (self.num_pages,):
            raise ValueError(f"pool_generations must have shape ({self.num_pages},), not {self.pool_generations.shape}")

    def locate(self, request: int, t: ArrayLike) -> tuple[Ints, Ints, Ints]:
        """l(t) and p(t): logical page, offset in it, and physical page of logical positions `t` of one request."""
        page, offset = np.divmod(np.asarray(t, np.int64), self.page_size)
        return page, offset, self.table[request, page]

    @cached_property
    def _owned_keys(self) -> Ints:
        return np.array(
            [n * self.num_pages + page for n, pages in enumerate(self.owned) for page in pages if self._in_pool(page)],
            np.int64,
        )

    def _in_pool(self, page: int) -> bool:
        return 0 <= page < self.num_pages

    def owns(self, request: ArrayLike, physical: ArrayLike) -> NDArray[np.bool_]:
        """Whether each request may read each physical page; pages outside the pool belong to nobody."""
        request, physical = np.asarray(request, np.int64), np.asarray(physical, np.int64)
        inside = (physical >= 0) & (physical < self.num_pages)
        return inside & np.isin(request * self.num_pages + physical, self._owned_keys)

    def is_stale(self, request: ArrayLike, page: ArrayLike) -> NDArray[np.bool_]:
        """Whether the physical pages of logical pages were handed out anew since the request was given them; the
        pages must lie in the pool. Without generations nothing is stale.
        """
        at = np.asarray(request, np.int64), np.asarray(page, np.int64)
        physical = self.table[at]
        if self.generations is None or self.pool_generations is None:
            return np.zeros(np.shape(physical), bool)
        stale: NDArray[np.bool_] = self.generations[at] != self.pool_generations[physical]
        return stale

    def references(self, seq_lens: Sequence[int], physical: int) -> tuple[tuple[int, int], ...]:
        """All (request, logical page) that a physical page stands for, stale columns left out.

        Each is an identity of its own: the same bytes at another logical position are other keys, and must not be
        deduplicated; a gradient of the page is the sum over all of them.
        """
        committed = np.arange(self.table.shape[1]) * self.page_size < np.asarray(seq_lens, np.int64)[:, None]
        found = np.argwhere(committed & (self.table == physical))
        return tuple((int(request), int(page)) for request, page in found)


def share_prefix(table: PageTable, source: int, target: int, num_pages: int) -> PageTable:
    """The first `num_pages` logical pages of `source` become those of `target` too: same bytes, two owners.

    What `target` had there it still owns. Raises ValueError where the table has fewer columns, or `source` does not
    own one of the pages.
    """
    if not 0 <= num_pages <= table.table.shape[1]:
        raise ValueError(f"a prefix of {num_pages} pages does not fit a table of {table.table.shape[1]} columns")
    pages = table.table[source, :num_pages]
    foreign = pages[~table.owns(source, pages)]
    if len(foreign):
        raise ValueError(f"request {source} does not own physical page {foreign[0]} and cannot share it")
    owned = list(table.owned)
    owned[target] |= frozenset(pages.tolist())

    def shared(array: Ints) -> Ints:
        array = array.copy()
        array[target, :num_pages] = array[source, :num_pages]
        return array

    generations = None if table.generations is None else shared(table.generations)
    return replace(table, table=shared(table.table), owned=tuple(owned), generations=generations)


class PrivatePage(NamedTuple):
    """What copy-on-write yields: the new table, and the physical page to copy from and to (equal: nothing to copy)."""

    table: PageTable
    source: int
    destination: int


def copy_on_write(table: PageTable, seq_lens: Sequence[int], request: int, page: int) -> PrivatePage:
    """Give `request` a page of its own at logical page `page`, before it is written.

    A page is private if this is its only reference and the request its only owner; then nothing changes. Otherwise
    the lowest page that nobody owns is handed out (its generation grows), and every other reference stays as it was,
    those of the same request included. Raises ValueError for a logical page that is not committed, MemoryError where
    the pool is full.
    """
    if not 0 <= page * table.page_size < seq_lens[request]:
        raise ValueError(f"request {request} has no committed logical page {page} (T = {seq_lens[request]})")
    source = int(table.table[request, page])
    others = [reference for reference in table.references(seq_lens, source) if reference != (request, page)]
    owners = [n for n, pages in enumerate(table.owned) if source in pages]
    if not others and owners == [request]:
        return PrivatePage(table, source, source)
    taken = frozenset[int]().union(*table.owned)
    destination = next((free for free in range(table.num_pages) if free not in taken), None)
    if destination is None:
        raise MemoryError(f"request {request}, logical page {page}: all {table.num_pages} pages of the pool are owned")
    owned = list(table.owned)
    kept = owned[request] if any(n == request for n, _ in others) else owned[request] - {source}
    owned[request] = kept | {destination}
    new_table = table.table.copy()
    new_table[request, page] = destination
    if table.generations is None or table.pool_generations is None:
        return PrivatePage(replace(table, table=new_table, owned=tuple(owned)), source, destination)
    pool_generations, generations = table.pool_generations.copy(), table.generations.copy()
    pool_generations[destination] += 1
    generations[request, page] = pool_generations[destination]
    fresh = PageTable(new_table, table.page_size, table.num_pages, tuple(owned), generations, pool_generations)
    return PrivatePage(fresh, source, destination)


def address(physical_page: ArrayLike, offset: ArrayLike, head: ArrayLike, strides: Strides) -> Ints:
    """Element offset from the cache's base pointer, equation (17), in 64 bits."""
    page, token, kv_head = (np.asarray(x, np.int64) for x in (physical_page, offset, head))
    return page * strides.page + token * strides.token + kv_head * strides.head


@dataclass(frozen=True)
class PagedCache:
    """The pages of a pool that hold data: `pages` [n] sorted physical ids, `data` [n, page_size, heads, dim]."""

    pages: Ints
    data: Array

    def gather(self, table: PageTable, request: int, length: int) -> Array:
        """K or V of the first `length` logical positions of one request: [length, heads, dim].

        Raises LookupError for a page that holds no data.
        """
        return self.read(table, request, np.arange(length))

    def read(self, table: PageTable, request: int, t: ArrayLike) -> Array:
        """K or V at logical positions `t` [n] of one request: [n, heads, dim].

        Raises LookupError for a page that holds no data.
        """
        t = np.asarray(t, np.int64)
        _, offset, physical = table.locate(request, t)
        held = np.isin(physical, self.pages)
        if not held.all():
            i = int(np.argmin(held))
            raise LookupError(f"request {request}, position {t[i]}: physical page {physical[i]} holds no data")
        return self.data[np.searchsorted(self.pages, physical), offset]

    def repeat_heads(self, times: int) -> PagedCache:
        """Each head `times` times in a row: what the query heads of a group read, one head each."""
        return PagedCache(self.pages, np.repeat(self.data, times, axis=2))

    def with_copy(self, source: int, destination: int) -> PagedCache:
        """The cache after a copy-on-write: `destination` holds what `source` holds. Raises LookupError as `gather`."""
        if source not in self.pages:
            raise LookupError(f"physical page {source} holds no data")
        kept = self.pages != destination
        pages = np.append(self.pages[kept], destination)
        data = np.concatenate((self.data[kept], self.data[self.pages == source]))
        order = np.argsort(pages)
        return PagedCache(pages[order], data[order])


class Scattered(NamedTuple):
    """Values added up by physical slot: `cache`, and `references` [pages, page_size, heads], how many went to each."""

    cache: PagedCache
    references: Ints


def scatter(page: Ints, offset: Ints, head: Ints, values: Array, page_size: int, num_heads: int) -> Scattered:
    """The sum of all values [n, dim] of each physical slot (page, offset, head) [n each]; 0 where a page that occurs
    has no value. The inverse of reading: a slot that is read at several logical positions, or by several requests,
    receives them all.
    """
    pages, index = np.unique(page, return_inverse=True)
    slot = (index * page_size + offset) * num_heads + head
    references = np.bincount(slot, minlength=len(pages) * page_size * num_heads)
    data = np.zeros((len(references), values.shape[-1]))
    if references.max(initial=0) <= 1:
        data[slot] = values
    else:
        order = np.argsort(slot, kind="stable")
        nth = np.arange(len(slot)) - (np.cumsum(references) - references)[slot[order]]
        for n in range(int(references.max())):
            some = order[nth == n]
            data[slot[some]] += values[some]
    shape = len(pages), page_size, num_heads
    return Scattered(PagedCache(pages, data.reshape(*shape, values.shape[-1])), references.reshape(shape))
