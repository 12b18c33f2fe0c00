"""What a call costs on paper: bytes, FLOPs, tiles, workspace and times, counted from real lists. Seed 2, 4, 5 and 7.

Bytes are bytes, bandwidths bytes per second, times seconds, unless a caller uses one other unit throughout. FLOPs
count a multiply-add as two. "Logical" is what S needs, "physical" what whole tiles load and multiply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import CandidateLists, ValidatedCandidates, distinct, lists_of, rows_of
from .spec import AttentionSpec, Codec, DType, EmptyRowRule, Hints, Route, ScaleGranularity

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

ITEM_BYTES = {DType.FP16: 2, DType.BF16: 2, DType.FP32: 4}
INDEX_BYTES = 4  # int32
FP32_BYTES = 4
SCRATCH_ALIGNMENT = 16  # bytes

# --- tiles


class Tiles(NamedTuple):
    """The kv tiles that each row loads: indptr [rows + 1], indices [nnz] (tile ids, sorted), filled [nnz]: how many
    of a tile's `kv_tile` slots the row's candidates fill.
    """

    indptr: Ints
    indices: Ints
    filled: Ints
    kv_tile: int

    @property
    def slots(self) -> int:
        """Physical slots of all tiles."""
        return len(self.indices) * self.kv_tile

    @property
    def efficiency(self) -> float:
        """Candidates per physical slot; 1 where nothing is loaded."""
        return float(self.filled.sum() / self.slots) if self.slots else 1.0


def kv_tiles(lists: CandidateLists, entry_size: int, kv_tile: int, limit: ArrayLike = 2**62) -> Tiles:
    """Group entries of `entry_size` tokens (1, a page, a block) by the boundaries of logical kv tiles.

    Tiles hold logical neighbours only, so scattered pages get a masked tile each; a large page is cut into several.
    `limit` (T, or one per row): tokens at or beyond it fill no slot. Repeated entries count once.
    """
    rows = np.repeat(rows_of(lists.indptr), entry_size)
    t = (lists.indices[:, None] * entry_size + np.arange(entry_size)).ravel()
    committed = t < np.broadcast_to(np.asarray(limit, np.int64), len(lists.indptr) - 1)[rows]
    rows, t = rows[committed], t[committed]
    once = distinct(rows, t).first
    rows, tile = rows[once], t[once] // kv_tile
    pairs = distinct(rows, tile)
    found = lists_of(rows[pairs.first], tile[pairs.first], len(lists.indptr) - 1)
    return Tiles(found.indptr, found.indices, pairs.counts, kv_tile)


def num_pages(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


# --- bytes and FLOPs


def flops(tokens: int, head_dim_qk: int, head_dim_vo: int) -> int:
    """Q K and P V of one query head over `tokens` keys: 4 k d where both dims are d (seed 4.1)."""
    return 2 * tokens * (head_dim_qk + head_dim_vo)


def kv_bytes(tokens: int, head_dim_qk: int, head_dim_vo: int, k_item: float = 2, v_item: float = 2) -> float:
    """K and V of `tokens` tokens in one KV head, equation (12); `k_item`, `v_item`: bytes an element (int4: 0.5)."""
    return tokens * (head_dim_qk * k_item + head_dim_vo * v_item)


def intensity(flop: float, moved: float) -> float:
    """FLOPs per byte, equation (9): 2 / s for one query over K and V of s bytes an element."""
    return flop / moved


def index_bytes(entries: int, item: int = INDEX_BYTES) -> int:
    """The index list of `entries` candidates, without indptr."""
    return entries * item


class Partials(NamedTuple):
    """Workspace of split partial results in bytes: un-normalised o, and m and l together."""

    o: int
    ml: int


def partial_bytes(
    tokens: int, num_splits: int, num_qo_heads: int, head_dim_vo: int, item: int = FP32_BYTES
) -> Partials:
    """Partial results of every (query token, split, query head), equation (13)."""
    states = tokens * num_splits * num_qo_heads
    return Partials(states * head_dim_vo * item, states * 2 * item)


def scale_bytes(
    granularity: ScaleGranularity, *, pages: int, page_size: int, heads: int, head_dim: int, item: float = 2
) -> float:
    """Scales of K or of V over `pages` pages; compare with codes of pages * page_size * heads * head_dim items."""
    sizes = {"page": pages, "token": page_size, "head": heads, "dim": head_dim}
    return math.prod(sizes[axis] for axis in granularity.axes) * item


@dataclass(frozen=True)
class Work:
    """A call in numbers, summed over all rows; every row loads its own K and V (decode: no reuse between queries).

    attended: keys of S before masks. slots: slots of the kv tiles. kv, tile_kv, dense_kv: bytes of K and V for S, for
    whole tiles, and for the whole context. flops, tile_flops: over all query heads. indices: bytes of the index
    lists. partials: split workspace.
    """

    attended: int
    slots: int
    kv: float
    tile_kv: float
    dense_kv: float
    flops: int
    tile_flops: int
    indices: int
    partials: Partials

    @property
    def efficiency(self) -> float:
        """Tile efficiency: keys of S per loaded slot."""
        return self.attended / self.slots if self.slots else 1.0


def work(spec: AttentionSpec, hints: Hints, candidates: ValidatedCandidates) -> Work:
    """Count a call from its lists; K and V are stored as their codecs say, or in the spec's dtype. Scales are counted
    apart, by `scale_bytes`. Raises ValueError for tiles or splits that are left to a backend.
    """
    _check_named(hints, "kv_tile", "num_splits")
    seq_lens = np.asarray(spec.seq_lens, np.int64)[np.asarray(spec.token_request, np.int64)]
    row_lens = np.repeat(seq_lens, spec.list_heads)
    lists = CandidateLists(candidates.indptr, candidates.indices)
    tiles = kv_tiles(lists, spec.block_size, hints.kv_tile, row_lens)
    attended, dims = int(tiles.filled.sum()), (spec.head_dim_qk, spec.head_dim_vo)
    items = [codec.format.bits / 8 if codec else ITEM_BYTES[spec.dtype] for codec in (spec.k_codec, spec.v_codec)]
    kv, tile_kv, dense_kv = (kv_bytes(tokens, *dims, *items) for tokens in (attended, tiles.slots, int(row_lens.sum())))
    return Work(
        attended=attended,
        slots=tiles.slots,
        kv=kv,
        tile_kv=tile_kv,
        dense_kv=dense_kv,
        flops=flops(attended, *dims) * spec.heads_per_list,
        tile_flops=flops(tiles.slots, *dims) * spec.heads_per_list,
        indices=index_bytes(len(candidates.indices)),
        partials=partial_bytes(spec.num_tokens, hints.num_splits, spec.num_qo_heads, spec.head_dim_vo),
    )


# --- memory: gather or direct, transactions


def gather_extra_bytes(kv: float) -> float:
    """What a gather moves beyond the first read of `kv` bytes: one write and one more read, equation (3)."""
    return 2 * kv


def direct_time(kv: float, uses: int, source: float) -> float:
    """`uses` consumers that each read `kv` bytes from the cache at `source` bytes per second (seed 2.2)."""
    return uses * kv / source


def gather_time(kv: float, uses: int, source: float, write: float, read: float, launch: float = 0.0) -> float:
    """One irregular read, one write of the scratch buffer, then `uses` regular reads of it, in series (seed 2.2)."""
    return kv / source + kv / write + uses * kv / read + launch


def break_even_uses(
    kv: float, *, direct: float, source: float, write: float, read: float, launch: float = 0.0
) -> int | None:
    """The smallest number of uses for which a gather is faster than direct reads, None if it never is."""
    saved = kv / direct - kv / read
    if saved <= 0:
        return None
    return math.floor((kv / source + kv / write + launch) / saved) + 1


def transaction_bytes(addresses: ArrayLike, item: int, line: int = 128) -> int:
    """Bytes moved when one warp touches `item` bytes at each byte address: every line once."""
    start = np.asarray(addresses, np.int64)
    first, last = start // line, (start + item - 1) // line
    span = first[:, None] + np.arange(1 + -(-item // line))
    return len(np.unique(span[span <= last[:, None]])) * line


def transaction_efficiency(addresses: ArrayLike, item: int, line: int = 128) -> float:
    """Useful bytes (distinct items) per byte moved, before any cache."""
    useful = len(np.unique(np.asarray(addresses, np.int64))) * item
    return useful / transaction_bytes(addresses, item, line)


def workspace_bytes(spec: AttentionSpec, hints: Hints, entries: int) -> int:
    """What a launch needs beside its outputs, known before its plan; `entries`: of the raw lists of all rows.

    Where rows may be split, o, m and l of every (query token, split, query head) in FP32: equation (13), seed 5.1. On
    the gather routes one write of K and V of every candidate slot (seed 2.1, the first half of equation (3)), for each
    list or again for each query head that it serves (seed 2.2), as they are stored, K and V each rounded up to
    SCRATCH_ALIGNMENT; a row that is forced to attend a token may need one entry more than it names. Bytes that two
    tokens share (int4 packed along tokens) are written for each of them. Several branches count as so many times the
    rows, and the out and lse of each wait in FP32 until they are gated and added. Raises ValueError for splits that are
    left to a backend.
    """
    _check_named(hints, "num_splits")
    rows = spec.num_branches * spec.num_tokens
    partials = partial_bytes(rows, hints.num_splits, spec.num_qo_heads, spec.head_dim_vo)
    branches = spec.num_branches > 1
    kept = branches * rows * spec.num_qo_heads * (spec.head_dim_vo + 1) * FP32_BYTES
    kept += sum(partials) if hints.num_splits > 1 else 0
    if hints.route is Route.DIRECT:
        return kept
    forces = spec.empty_row in (EmptyRowRule.FORCE_SELF, EmptyRowRule.FORCE_SINK_TOKEN)
    slots = (entries + forces * spec.num_lists) * spec.block_size
    copies = slots * (spec.heads_per_list if hints.route is Route.GATHER_HEADS else 1)
    dims = (spec.k_codec, spec.head_dim_qk), (spec.v_codec, spec.head_dim_vo)
    shared = [2 if codec and codec.nibble_axis == "token" else 1 for codec, _ in dims]
    scratch = (
        copies * stored_bytes(spec, codec, head_dim * n) for n, (codec, head_dim) in zip(shared, dims, strict=True)
    )
    return kept + sum(math.ceil(each / SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for each in scratch)


def _check_named(hints: Hints, *names: str) -> None:
    for name in names:
        if getattr(hints, name) == 0:
            raise ValueError(f"hint {name} is 0, which leaves it to the backend: a cost needs the number that it took")


def stored_bytes(spec: AttentionSpec, codec: Codec | None, head_dim: int) -> int:
    """Bytes of one token's K or V in one KV head, as it is stored."""
    return head_dim * ITEM_BYTES[spec.dtype] if codec is None else math.ceil(head_dim * codec.format.bits / 8)


# --- times


def memory_time(moved: float, bandwidth: float, share: float = 1.0) -> float:
    """The least time to move bytes at a share of the bandwidth, equation (8)."""
    return moved / (bandwidth * share)


def roofline_time(flop: float, moved: float, peak: float, bandwidth: float) -> float:
    """The roof over a kernel: the longer of computing at `peak` FLOP/s and moving at `bandwidth`; both measured."""
    return max(flop / peak, memory_time(moved, bandwidth))


@dataclass(frozen=True)
class StageTimes:
    """The stages of a sparse call, equation (10)."""

    route: float
    topk: float
    index: float
    attention: float
    reduce: float
    launch: float

    @property
    def total(self) -> float:
        """t_total, equation (10)."""
        return self.route + self.topk + self.index + self.attention + self.reduce + self.launch

    def speedup(self, dense: float) -> float:
        """Against a dense call of `dense` time, all stages counted."""
        return dense / self.total


class Crossover(NamedTuple):
    """Measured times: `sparse[i][j]` at candidate rate i with block size j, `dense[i]`."""

    rates: Sequence[float]
    block_sizes: Sequence[int]
    sparse: Sequence[Sequence[float]]
    dense: Sequence[float]

    def choices(self) -> tuple[int | None, ...]:
        """The fastest block size at each rate, None for dense; ties go to dense, then to the block size named first.

        Raises ValueError for a table with rows or columns of different lengths.
        """
        times = np.array([[dense, *row] for dense, row in zip(self.dense, self.sparse, strict=True)], np.float64)
        if times.shape != (len(self.rates), len(self.block_sizes) + 1):
            raise ValueError(f"{len(self.rates)} rates x {len(self.block_sizes)} block sizes, times {times.shape}")
        options = (None, *self.block_sizes)
        return tuple(options[i] for i in times.argmin(axis=1))


# --- backward


class PageReuse(NamedTuple):
    """For each page that is referenced, sorted: how many query tiles send it gradients."""

    pages: Ints
    tiles: Ints


def page_reuse(lists: CandidateLists, query_tile: int) -> PageReuse:
    """Count references from the lists of consecutive queries of one head (row: query, entries: pages)."""
    tile = rows_of(lists.indptr) // query_tile
    page = lists.indices[distinct(tile, lists.indices).first]
    pages = distinct(np.zeros_like(page), page)
    return PageReuse(page[pages.first], pages.counts)


def atomic_updates(reuse: PageReuse, page_size: int, head_dim: int) -> Ints:
    """Atomic additions that each page receives for dK or for dV, where every query tile adds its own (seed 7.1)."""
    return reuse.tiles * page_size * head_dim


def partial_gradient_bytes(
    reuse: PageReuse, page_size: int, head_dim_qk: int, head_dim_vo: int, item: int = FP32_BYTES
) -> int:
    """Storage of every (query tile, page) partial dK and dV, equation (15)."""
    return int(reuse.tiles.sum()) * page_size * (head_dim_qk + head_dim_vo) * item


def hot_pages(reuse: PageReuse, threshold: int) -> tuple[PageReuse, PageReuse]:
    """Pages below the reuse threshold r_0 (added atomically), and those at or above it (through partial buffers)."""
    hot = reuse.tiles >= threshold
    return PageReuse(reuse.pages[~hot], reuse.tiles[~hot]), PageReuse(reuse.pages[hot], reuse.tiles[hot])
