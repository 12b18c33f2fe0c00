"""Paging: from logical positions to physical addresses, DESIGN section 3 and equation (17)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Array = NDArray[np.float64]


class Strides(NamedTuple):
    """Strides of a KV cache [pages, page_size, heads, dim] (or any permutation of it), in elements."""

    page: int
    token: int
    head: int


@dataclass(frozen=True)
class PageTable:
    """`table` [requests, max_pages]: the physical page of each logical page. Columns beyond a request's last
    committed page are stale and mean nothing. `owned[n]`: the physical pages that request n may read; `num_pages`:
    pages in the pool.
    """

    table: Ints
    page_size: int
    num_pages: int
    owned: tuple[frozenset[int], ...]

    def locate(self, request: int, t: ArrayLike) -> tuple[Ints, Ints, Ints]:
        """l(t) and p(t): logical page, offset in it, and physical page of logical positions `t` of one request."""
        page, offset = np.divmod(np.asarray(t, np.int64), self.page_size)
        return page, offset, self.table[request, page]


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
        _, offset, physical = table.locate(request, np.arange(length))
        at = np.minimum(np.searchsorted(self.pages, physical), len(self.pages) - 1)
        missing = self.pages[at] != physical
        if missing.any():
            t = int(np.argmax(missing))
            raise LookupError(f"request {request}, position {t}: physical page {physical[t]} holds no data")
        return self.data[at, offset]
