"""Raw candidate lists of a cell, by the axes `pattern`, `kind`, `qblock`, `lists`, `format` and
`branches`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sacts.matrices.cell import Cell
from sacts.reference.candidates import CandidateLists
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule
from sacts.reference.tiers import smallest_tier

from .adapter import PADDING
from .draw import Draw, Ints

WINDOW, SINKS = 16, 4  # of the pattern `union`
HOT = 16  # entries that every row names, of the pattern `hot`
EXAMPLE_TOKENS = (1, 2, 63, 64, 65, 127)


def _scattered(n: int, draw: Draw) -> Ints:
    return draw.permutation(n)[: -(-n // 4)]


def _clustered(n: int, draw: Draw) -> Ints:
    run = max(1, n // 6)
    starts = (draw.integer(0, max(1, n // 2 - run)), draw.integer(n // 2, max(n // 2 + 1, n - run)))
    entries = np.unique(np.concatenate([np.arange(start, start + run) for start in starts]))
    return entries[entries < n][::-1]


def _contiguous(n: int, draw: Draw) -> Ints:
    run = -(-n // 4)
    return np.arange(run) + draw.integer(0, n - run + 1)


def _hot(n: int, draw: Draw) -> Ints:
    hot = np.arange(min(n, HOT))
    return np.concatenate((np.setdiff1d(draw.permutation(n)[: n // 8], hot), hot))


def _duplicates(n: int, draw: Draw) -> Ints:
    entries = _scattered(n, draw)
    entries = np.concatenate((entries, entries[::3]))
    entries = entries[draw.permutation(len(entries))]
    middle = len(entries) // 2
    padding = np.full(2, PADDING, np.int64)
    return np.concatenate((padding[:1], entries[:middle], padding, entries[middle:], padding[:1]))


def _union(n: int, draw: Draw) -> Ints:
    return np.concatenate((_scattered(n, draw), np.arange(max(0, n - WINDOW), n), np.arange(min(n, SINKS))))


CASE64K_PAGES = 4096
CASE64K_TILES = ((4, 32), (2, 40), (1, 40))  # pages in a tile of 64, and how many such tiles lie outside the window
CASE64K_WINDOW = 4  # full tiles at the end


def _case64k(n: int, draw: Draw) -> Ints:
    """Pages of 16 by tiles of 64 tokens: the last tiles whole, then the 64K case's mix, scaled to n pages; all pages
    where they make no tile.
    """
    if n < 4:
        return np.arange(n)
    tiles, scale = n // 4, n / CASE64K_PAGES
    window = max(1, round(CASE64K_WINDOW * scale))
    order = draw.permutation(tiles - window)
    pages, taken = [np.arange(4 * (tiles - window), 4 * tiles)], 0
    for pages_in_tile, count in CASE64K_TILES:
        chosen = order[taken : taken + max(1, round(count * scale))]
        taken += len(chosen)
        for tile in chosen:
            pages.append(4 * tile + draw.permutation(4)[:pages_in_tile])
    return np.concatenate(pages)


_PATTERNS: dict[str, Callable[[int, Draw], Ints]] = {
    "scattered": _scattered,
    "clustered": _clustered,
    "contiguous": _contiguous,
    "hot": _hot,
    "all": lambda n, draw: draw.permutation(n),
    "one": lambda n, draw: draw.permutation(n)[:1],
    "empty": lambda n, draw: np.zeros(0, np.int64),
    "duplicates": _duplicates,
    "union": _union,
    "case64k": _case64k,
    "example": lambda n, draw: np.asarray([t for t in EXAMPLE_TOKENS if t < n], np.int64),
}


def _repeated(entries: Ints) -> Ints:
    """A list of a multiset: every third entry three times in all, the repeats behind the others."""
    return np.concatenate((entries, np.tile(entries[::3], 2)))


def raw_lists(cell: Cell, spec: AttentionSpec, draw: Draw) -> CandidateLists:
    """The lists of a cell in its format."""
    return _FORMATS[cell.format](_drawn(cell, spec, draw))


def _drawn(cell: Cell, spec: AttentionSpec, draw: Draw) -> CandidateLists:
    """One list per row, over the entries that the row may name: token lists end at a causal query's own position, or at
    that of the first of the queries that share a list.
    """
    repeats = spec.candidate_kind is CandidateKind.MULTISET
    lists: list[Ints] = []
    for token, (request, position) in enumerate(zip(spec.token_request, spec.token_position, strict=True)):
        if (token - spec.qo_indptr[request]) % cell.qblock:
            lists += lists[-spec.list_heads :]
            continue
        tokens = spec.seq_lens[request]
        if spec.block_size == 1 and spec.causal is not CausalRule.NONE:
            tokens = min(tokens, max(0, position + 1))
        entries = -(-tokens // spec.block_size)
        for _ in range(spec.list_heads):
            named = _PATTERNS[cell.pattern](entries, draw) if entries else np.zeros(0, np.int64)
            if branch := request % cell.branches:  # shorter than the first, each by another share
                named = named[: len(named) - len(named) // (branch + 2)]
            lists.append(_repeated(named) if repeats else named)
    lengths = [len(entries) for entries in lists]
    return CandidateLists(np.cumsum([0, *lengths]), np.concatenate([np.zeros(0, np.int64), *lists]))


CAPACITIES = tuple(16 * 4**n for n in range(8))  # of lists in tiers


def _to_length(lists: CandidateLists, capacity: Ints) -> CandidateLists:
    """Lists with padding behind the entries, up to `capacity` [rows]."""
    lengths = np.diff(lists.indptr)
    indptr = np.concatenate(([0], np.cumsum(capacity)))
    indices = np.full(indptr[-1], PADDING, np.int64)
    indices[np.arange(lengths.sum()) + np.repeat(indptr[:-1] - lists.indptr[:-1], lengths)] = lists.indices
    return CandidateLists(indptr, indices)


def _fixed_k(lists: CandidateLists) -> CandidateLists:
    lengths = np.diff(lists.indptr)
    return _to_length(lists, np.full_like(lengths, lengths.max(initial=0)))


_FORMATS: dict[str, Callable[[CandidateLists], CandidateLists]] = {
    "csr": lambda lists: lists,
    "fixed_k": _fixed_k,
    "tiers": lambda lists: _to_length(lists, smallest_tier(np.diff(lists.indptr), CAPACITIES)),
}
