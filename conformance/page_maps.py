"""Page maps: which physical pages hold the KV of each request, by the axis `map`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sacts.reference.paging import PageTable
from sacts.reference.spec import AttentionSpec

from .draw import Draw, Ints

STALE_COLUMNS = 2  # page-table columns beyond the longest request
EXAMPLE_PAGES = (41, 7)


def page_count(seq_len: int, page_size: int) -> int:
    """Pages that a length fills, the last one perhaps in part."""
    return -(-seq_len // page_size)


def _table(spec: AttentionSpec, pages: Ints, num_pages: int, decoys: Ints) -> tuple[PageTable, Ints]:
    """Deal `pages` to the requests in turn; decoys hold data that belongs to nobody."""
    counts = [page_count(seq_len, spec.page_size) for seq_len in spec.seq_lens]
    return _assemble(spec, np.split(pages, np.cumsum(counts)[:-1]), num_pages, np.union1d(pages, decoys))


def _assemble(spec: AttentionSpec, dealt: list[Ints], num_pages: int, live: Ints) -> tuple[PageTable, Ints]:
    """A table of these pages, and the live pages. Columns beyond a request's pages are stale: live pages of others."""
    table = np.empty((spec.num_requests, max(map(len, dealt)) + STALE_COLUMNS), np.int64)
    for request, mine in enumerate(dealt):
        table[request] = np.resize(np.setdiff1d(live, mine)[::-1], table.shape[1])
        table[request, : len(mine)] = mine
    owned = tuple(frozenset(mine.tolist()) for mine in dealt)
    return PageTable(table, spec.page_size, num_pages, owned), live


def _total_pages(spec: AttentionSpec) -> int:
    return sum(page_count(seq_len, spec.page_size) for seq_len in spec.seq_lens)


def _random_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    total = _total_pages(spec)
    num_pages = total + total // 2 + 3
    order = 1 + draw.permutation(num_pages - 1)  # page 0 belongs to nobody, as in most pools
    return _table(spec, order[:total], num_pages, np.concatenate((np.zeros(1, np.int64), order[total:])))


def _shared_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    """Random pages, then the first logical pages of every request are those of request 0."""
    table, live = _random_pages(spec, draw)
    shared = max(1, min(seq_len // spec.page_size for seq_len in spec.seq_lens) // 2)
    prefix = table.table[0, : min(shared, page_count(spec.seq_lens[0], spec.page_size))]
    dealt = []
    for request, seq_len in enumerate(spec.seq_lens):
        mine = table.table[request, : page_count(seq_len, spec.page_size)].copy()
        mine[: len(prefix)] = prefix[: len(mine)]
        dealt.append(mine)
    return _assemble(spec, dealt, table.num_pages, live)


def _aliased_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    """Random pages, then every second whole page of a later request is the page behind it in request 0."""
    table, live = _random_pages(spec, draw)
    whole = [seq_len // spec.page_size for seq_len in spec.seq_lens]
    dealt = []
    for request, seq_len in enumerate(spec.seq_lens):
        mine = table.table[request, : page_count(seq_len, spec.page_size)].copy()
        if request:
            aliased = np.arange(0, min(whole[request], whole[0] - 1), 2)
            mine[aliased] = table.table[0, aliased + 1]
        dealt.append(mine)
    return _assemble(spec, dealt, table.num_pages, live)


def _identity_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    total = _total_pages(spec)
    return _table(spec, np.arange(total), total + 2, np.arange(total, total + 2))


def _high_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    total = _total_pages(spec)
    page_elements = spec.page_size * spec.num_kv_heads * min(spec.head_dim_qk, spec.head_dim_vo)
    first = 2**31 // page_elements + 1
    order = first + draw.permutation(total + 4)
    return _table(spec, order[:total], first + total + 4, np.concatenate((np.zeros(1, np.int64), order[total:])))


def _example_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    pages = np.asarray(EXAMPLE_PAGES, np.int64)
    return _table(spec, pages, 48, np.setdiff1d(np.arange(48), pages))


PAGE_MAPS: dict[str, Callable[[AttentionSpec, Draw], tuple[PageTable, Ints]]] = {
    "random": _random_pages,
    "shared": _shared_pages,
    "alias": _aliased_pages,
    "identity": _identity_pages,
    "high": _high_pages,
    "example": _example_pages,
}
