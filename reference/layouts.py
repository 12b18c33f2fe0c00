"""Layouts of candidate lists: conversions from token CSR, the canonical form, each with an inverse.

Lists are CandidateLists of logical positions (or block ids, where a function says entries). Blocks, masks and
FlexAttention's lists carry sets only; their inverse is sorted. A conversion refuses what it could not give back.
DESIGN section 4, seed 1.2, 7.3 and 7.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import CandidateLists, ValidatedCandidates, distinct, lists_of, rows_of
from .paging import PageTable

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def repeated(candidates: ValidatedCandidates) -> CandidateLists:
    """Each entry as often as it counts: a multiset for layouts without counts. `validate` is the inverse."""
    rows = np.repeat(rows_of(candidates.indptr), candidates.counts)
    return lists_of(rows, np.repeat(candidates.indices, candidates.counts), len(candidates.indptr) - 1)


def _refuse(lists: CandidateLists, bad: Bools, reason: str) -> None:
    """Raise ValueError for the first bad entry."""
    if bad.any():
        i = int(np.argmax(bad))
        row = int(rows_of(lists.indptr)[i])
        raise ValueError(f"row {row}, entry {i - lists.indptr[row]}: {lists.indices[i]} {reason}")


def _refuse_repeats(lists: CandidateLists) -> None:
    again = np.ones(len(lists.indices), bool)
    again[distinct(rows_of(lists.indptr), lists.indices).first] = False
    _refuse(lists, again, "repeats an entry, but this layout carries sets only")


def _refuse_outside(lists: CandidateLists, limit: Ints) -> None:
    _refuse(lists, (lists.indices < 0) | (lists.indices >= limit[rows_of(lists.indptr)]), "is no legal entry")


# --- blocks and their masks; BSR


@dataclass(frozen=True)
class BlockLists:
    """Blocks that hold candidates and, for each, which of its slots are attended: CSR over block rows.

    indptr [block_rows + 1], indices [nnz] (block ids, sorted, unique), mask [nnz, R, B]: whether slot b of the block
    belongs to S of row r of the block row. R = 1: CSR of blocks with in-block masks; R > 1: BSR, with `num_rows` rows
    in all (the last block row may be partly filled).
    """

    indptr: Ints
    indices: Ints
    mask: Bools
    num_rows: int


def to_blocks(lists: CandidateLists, block_size: int, block_rows: int = 1) -> BlockLists:
    """Tokens as blocks of `block_size` tokens x `block_rows` rows with masks, equation (2).

    Expanding changes what is loaded (U), never what is attended (S). Raises ValueError for a repeated or negative
    token.
    """
    _refuse_repeats(lists)
    _refuse(lists, lists.indices < 0, "is negative")
    num_rows = len(lists.indptr) - 1
    row = rows_of(lists.indptr)
    block, slot = np.divmod(lists.indices, block_size)
    block_row, inner = np.divmod(row, block_rows)
    pairs = distinct(block_row, block)
    mask = np.zeros((len(pairs.starts), block_rows, block_size), bool)
    mask[pairs.inverse, inner, slot] = True
    blocks = lists_of(block_row[pairs.first], block[pairs.first], -(-num_rows // block_rows))
    return BlockLists(blocks.indptr, blocks.indices, mask, num_rows)


def from_blocks(blocks: BlockLists) -> CandidateLists:
    """S of each row, sorted. Raises ValueError for a mask that attends in a row beyond `num_rows`."""
    _, block_rows, block_size = blocks.mask.shape
    at, inner, slot = np.nonzero(blocks.mask)
    row = rows_of(blocks.indptr)[at] * block_rows + inner
    if (row >= blocks.num_rows).any():
        raise ValueError(f"the mask attends in row {row.max()}, but there are {blocks.num_rows} rows")
    t = blocks.indices[at] * block_size + slot
    order = np.lexsort((t, row))
    return lists_of(row[order], t[order], blocks.num_rows)


def loaded(blocks: BlockLists, limit: ArrayLike) -> CandidateLists:
    """U of each block row: the tokens below `limit` (T, or one T per block row) of all its blocks, sorted."""
    block_size = blocks.mask.shape[2]
    row = np.repeat(rows_of(blocks.indptr), block_size)
    t = (blocks.indices[:, None] * block_size + np.arange(block_size)).ravel()
    committed = t < np.broadcast_to(np.asarray(limit, np.int64), len(blocks.indptr) - 1)[row]
    return lists_of(row[committed], t[committed], len(blocks.indptr) - 1)


# --- fixed K


@dataclass(frozen=True)
class FixedLists:
    """`entries` [rows, K]; where an entry equals its row's `sentinel` [rows], the slot is padding, wherever it is."""

    entries: Ints
    sentinel: Ints


def to_fixed(lists: CandidateLists, capacity: int, sentinel: ArrayLike, limit: ArrayLike) -> FixedLists:
    """Every row as `capacity` entries, in their order, filled up with `sentinel` (-1, T, or any value that is no
    entry; one, or one per row). `limit`: row i may name entries 0 .. limit[i] - 1 (one, or one per row).

    Raises ValueError for a row longer than the capacity (nothing is cut), a sentinel that is a legal entry (a real
    entry is no padding), and an entry that is not legal.
    """
    rows = len(lists.indptr) - 1
    sentinels, limits = (np.broadcast_to(np.asarray(x, np.int64), rows) for x in (sentinel, limit))
    legal = (sentinels >= 0) & (sentinels < limits)
    if legal.any():
        bad = int(np.argmax(legal))
        raise ValueError(f"row {bad}: the sentinel {sentinels[bad]} is a legal entry (below {limits[bad]})")
    lengths = np.diff(lists.indptr)
    if (lengths > capacity).any():
        bad = int(np.argmax(lengths > capacity))
        raise ValueError(f"row {bad} has {lengths[bad]} entries, more than the capacity {capacity}")
    _refuse_outside(lists, limits)
    row = rows_of(lists.indptr)
    entries = np.repeat(sentinels[:, None], capacity, axis=1)
    entries[row, np.arange(len(row)) - lists.indptr[row]] = lists.indices
    return FixedLists(entries, sentinels)


def from_fixed(fixed: FixedLists) -> CandidateLists:
    """The lists without padding, in their order."""
    row, slot = np.nonzero(fixed.entries != fixed.sentinel[:, None])
    return lists_of(row, fixed.entries[row, slot], len(fixed.entries))


# --- dense masks


def to_mask(lists: CandidateLists, width: int) -> Bools:
    """[rows, width]: True where a row names a token. Raises ValueError for repeats and tokens outside the width."""
    rows = len(lists.indptr) - 1
    _refuse_repeats(lists)
    _refuse_outside(lists, np.full(rows, width))
    mask = np.zeros((rows, width), bool)
    mask[rows_of(lists.indptr), lists.indices] = True
    return mask


def from_mask(mask: Bools) -> CandidateLists:
    """The tokens of each row, sorted."""
    row, t = np.nonzero(mask)
    return lists_of(row, t, len(mask))


# --- FlexAttention


class FlexLists(NamedTuple):
    """The block lists of FlexAttention's BlockMask for one (batch, head).

    kv_num_blocks [Q], kv_indices [Q, KV]: the first kv_num_blocks[q] ids name the partial blocks of query block q, to
    which `mask` [num_rows, width] (what mask_mod answers) applies; full_kv_num_blocks, full_kv_indices: those without
    a masked slot, where it is not consulted. The ids behind them are the other blocks and mean nothing.
    """

    kv_num_blocks: Ints
    kv_indices: Ints
    full_kv_num_blocks: Ints
    full_kv_indices: Ints
    mask: Bools
    q_block: int
    kv_block: int


def to_flex(lists: CandidateLists, width: int, q_block: int, kv_block: int) -> FlexLists:
    """Query rows of one (batch, head) as full and partial blocks; a block cut off by the last row or by `width` is
    never full. Raises ValueError as `to_mask`.
    """
    mask = to_mask(lists, width)
    padded = np.zeros((-(-mask.shape[0] // q_block) * q_block, -(-width // kv_block) * kv_block), bool)
    padded[: mask.shape[0], :width] = mask
    tiles = padded.reshape(-1, q_block, padded.shape[1] // kv_block, kv_block)
    attended = tiles.sum(axis=(1, 3))
    full = attended == q_block * kv_block
    partial = (attended > 0) & ~full
    ids = [np.argsort(~kind, axis=1, kind="stable") for kind in (partial, full)]
    return FlexLists(partial.sum(1), ids[0], full.sum(1), ids[1], mask, q_block, kv_block)


def from_flex(flex: FlexLists) -> CandidateLists:
    """What FlexAttention attends: full blocks whole, partial blocks as far as the mask allows."""
    rows, width = flex.mask.shape
    query, t = np.arange(rows) // flex.q_block, np.arange(width) // flex.kv_block
    seen = np.zeros((2, len(flex.kv_num_blocks), flex.kv_indices.shape[1]), bool)
    lists = ((flex.kv_num_blocks, flex.kv_indices), (flex.full_kv_num_blocks, flex.full_kv_indices))
    for kind, (num_blocks, indices) in zip(seen, lists, strict=True):
        row, slot = np.nonzero(np.arange(indices.shape[1]) < num_blocks[:, None])
        kind[row, indices[row, slot]] = True
    partial, full = (kind[query[:, None], t] for kind in seen)
    return from_mask(full | (partial & flex.mask))


# --- delta-coded lists


class DeltaLists(NamedTuple):
    """indptr [rows + 1]; deltas [nnz]: the first entry of each row, then the gap from each entry to the next."""

    indptr: Ints
    deltas: Ints


def to_deltas(lists: CandidateLists) -> DeltaLists:
    """Sorted lists as gaps; a gap of 0 repeats an entry. Raises ValueError for a row that descends: its order would
    mean something.
    """
    gaps = np.diff(lists.indices, prepend=0)
    starts = lists.indptr[:-1][np.diff(lists.indptr) > 0]
    inner = np.ones(len(gaps), bool)
    inner[starts] = False
    _refuse(lists, inner & (gaps < 0), "is smaller than the entry before it")
    gaps[starts] = lists.indices[starts]
    return DeltaLists(lists.indptr, gaps)


def from_deltas(coded: DeltaLists) -> CandidateLists:
    """The lists whose gaps these are."""
    total = np.concatenate(([0], np.cumsum(coded.deltas)))
    before = total[coded.indptr[:-1]]
    return CandidateLists(coded.indptr, total[1:] - np.repeat(before, np.diff(coded.indptr)))


# --- page tables


class PageLists(NamedTuple):
    """A batch's pages as CSR: kv_indptr [requests + 1], kv_indices [nnz] physical pages in logical order,
    last_page_len [requests]: tokens in the last page, 0 for a request without tokens.
    """

    kv_indptr: Ints
    kv_indices: Ints
    last_page_len: Ints


def to_page_lists(table: PageTable, seq_lens: Sequence[int]) -> PageLists:
    """The committed pages of a 2-D page table; stale columns are left behind. Raises ValueError for a request with
    more pages than the table has columns.
    """
    lengths = np.asarray(seq_lens, np.int64)
    pages = -(-lengths // table.page_size)
    if (pages > table.table.shape[1]).any():
        request = int(np.argmax(pages))
        raise ValueError(f"request {request} has {pages[request]} pages, the table {table.table.shape[1]} columns")
    row, page = np.nonzero(np.arange(table.table.shape[1]) < pages[:, None])
    last = np.where(lengths > 0, (lengths - 1) % table.page_size + 1, 0)
    return PageLists(np.concatenate(([0], np.cumsum(pages))), table.table[row, page], last)


def from_page_lists(pages: PageLists, page_size: int, columns: int, stale: int) -> tuple[Ints, tuple[int, ...]]:
    """The 2-D table [requests, columns], `stale` in the columns beyond, and seq_lens. Raises ValueError for a request
    with more pages than columns, or a last page that is empty or overfull.
    """
    counts = np.diff(pages.kv_indptr)
    if (counts > columns).any():
        raise ValueError(f"request {np.argmax(counts)} has {counts.max()} pages, the table {columns} columns")
    bad = np.where(counts > 0, (pages.last_page_len < 1) | (pages.last_page_len > page_size), pages.last_page_len != 0)
    if bad.any():
        n = int(np.argmax(bad))
        raise ValueError(
            f"request {n}: {pages.last_page_len[n]} tokens in the last of {counts[n]} pages of {page_size}"
        )
    table = np.full((len(counts), columns), stale, np.int64)
    request = rows_of(pages.kv_indptr)
    table[request, np.arange(len(request)) - pages.kv_indptr[request]] = pages.kv_indices
    seq_lens = np.where(counts > 0, (counts - 1) * page_size + pages.last_page_len, 0)
    return table, tuple(seq_lens.tolist())


# --- how full a layout is


def eta_blk(tokens: ArrayLike, block_size: int) -> float:
    """k / (u B), equation (18), of one row's token list: k tokens that touch u blocks. 1 / B at worst, then every
    token loads a block of its own. Raises ValueError for an empty list.
    """
    t = np.asarray(tokens, np.int64)
    lists = CandidateLists(np.array([0, len(t)]), t)
    if not len(t):
        raise ValueError("an empty list touches no block")
    return len(t) / (len(to_blocks(lists, block_size).indices) * block_size)


def eta_idx(lengths: ArrayLike, capacity: int) -> float:
    """sum k_i / (N K), equation (20): how much of a fixed-K table is no padding. Raises ValueError without rows."""
    k = np.asarray(lengths, np.int64)
    if not k.size or capacity < 1:
        raise ValueError(f"{k.size} rows of capacity {capacity} hold no slot")
    return float(k.sum() / (k.size * capacity))
