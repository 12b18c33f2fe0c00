"""Cell -> Problem: everything a cell decides except the values of q, K and V, in NumPy.

The seed is the cell's id and the replicate, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sacts.matrices.cell import Cell
from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.edges import row_kv_heads
from sacts.reference.forward import Inputs, edges
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    DType,
    EmptyRowRule,
    Hints,
    ListsPer,
    Reduction,
    Route,
    Row,
    Schedule,
)
from sacts.reference.tiers import smallest_tier

from .adapter import PADDING
from .codes import Scales, scales_of
from .draw import Array, Draw, Ints
from .terms import terms_of

WINDOW, SINKS = 16, 4  # of the pattern `union`
HOT = 16  # entries that every row names, of the pattern `hot`
STALE_COLUMNS = 2  # page-table columns beyond the longest request
EXAMPLE_TOKENS, EXAMPLE_PAGES = (1, 2, 63, 64, 65, 127), (41, 7)


@dataclass(frozen=True)
class Problem:
    """A spec with its candidates and paging. `pages` [L]: the physical pages that hold data, sorted: those of the
    requests and decoys that none owns. A slot is (live page index, offset); `slot_request` [L, page_size] is its
    owner or -1, `slot_token` its logical position there. `k_scales`, `v_scales`: of K and V in codes, None where they
    are stored as they are.
    """

    cell: Cell
    replicate: int
    spec: AttentionSpec
    hints: Hints
    table: PageTable
    raw: CandidateLists
    candidates: ValidatedCandidates
    pages: Ints
    slot_request: Ints
    slot_token: Ints
    k_scales: Scales | None = None
    v_scales: Scales | None = None

    def draw(self, *purpose: object) -> Draw:
        """The stream of this problem for one purpose."""
        return Draw(self.cell.id, self.replicate, *purpose)

    @cached_property
    def needed(self) -> NDArray[np.bool_]:
        """Slots that some row attends: [L, page_size, num_kv_heads]. Nothing else may influence a result."""
        rows, t, _ = edges(self.lenient.spec, self.candidates)
        token, head = rows // self.spec.list_heads, row_kv_heads(self.spec, rows)
        request = np.asarray(self.spec.token_request, np.int64)[token]
        page, offset = np.divmod(t, self.spec.page_size)
        needed = np.zeros((*self.slot_request.shape, self.spec.num_kv_heads), bool)
        needed[np.searchsorted(self.pages, self.table.table[request, page]), offset, head] = True
        return needed

    @property
    def lenient(self) -> Problem:
        """The same; where the spec forbids empty rows, with one that leaves them zero."""
        forbids = self.spec.empty_row is EmptyRowRule.FORBID
        return replace(self, spec=replace(self.spec, empty_row=EmptyRowRule.ZERO)) if forbids else self

    @property
    def forbidden(self) -> list[Row]:
        """The rows without an edge, where the spec forbids them: no backend may compute such a problem."""
        if self.spec.empty_row is not EmptyRowRule.FORBID:
            return []
        rows, _, _ = edges(self.lenient.spec, self.candidates)
        return [self.spec.row(int(row)) for row in np.setdiff1d(np.arange(self.spec.num_rows), rows)]

    def position_in(self, request: int) -> Ints:
        """Logical position of each slot in one request, -1 where the page is not the request's: [L, page_size]."""
        spec = self.spec
        position = np.full(self.slot_request.shape, -1, np.int64)
        count = _page_count(spec.seq_lens[request], spec.page_size)
        live = np.searchsorted(self.pages, self.table.table[request, :count])
        position[live] = np.arange(count * spec.page_size).reshape(count, spec.page_size)
        return position

    def inputs(self, q: Array, k: Array, v: Array) -> Inputs:
        """Values for this problem: q [tokens, heads, d], k and v [L, page_size, num_kv_heads, d], each brought to the
        nearest value that its codes can stand for where it is stored in codes.
        """
        k, v = (x if scales is None else scales.on_grid(x) for scales, x in ((self.k_scales, k), (self.v_scales, v)))
        return Inputs(q, PagedCache(self.pages, k), PagedCache(self.pages, v))


SM_SCALE = 0.75  # times 1 / sqrt(d): not the usual default, so that a backend that ignores sm_scale is found


def build(
    cell: Cell,
    replicate: int = 0,
    *,
    default_scale: bool = False,
    causal_rule: CausalRule = CausalRule.BOTTOM_RIGHT,
) -> Problem:
    """The problem of a cell. The same arguments give the same problem on any machine.

    For backends that know no other: `default_scale`: sm_scale is 1 / sqrt(head_dim_qk); `causal_rule`: the rule of
    causal cells.
    """
    spec = AttentionSpec(
        num_qo_heads=cell.heads[0],
        num_kv_heads=cell.heads[1],
        head_dim_qk=cell.dim,
        head_dim_vo=cell.vdim or cell.dim,
        page_size=cell.page,
        seq_lens=cell.kv,
        qo_lens=cell.qo_lens,
        dtype=DType(cell.dtype),
        sm_scale=(1.0 if default_scale else SM_SCALE) / math.sqrt(cell.dim),
        block_size=cell.block,
        causal=CausalRule.NONE if cell.causal == CausalRule.NONE else causal_rule,
        window_left=cell.window,
        lists=ListsPer(cell.lists),
        **terms_of(cell, Draw(cell.id, replicate, "terms")),
    )
    draw = Draw(cell.id, replicate, "layout")
    table, pages = _PAGE_MAPS[cell.map](spec, draw)
    hints = Hints(
        num_splits=cell.splits,
        kv_tile=cell.tile,
        q_tile=cell.qtile,
        schedule=Schedule(cell.schedule),
        route=Route(cell.route),
        reduction=Reduction(cell.reduction),
    )
    return _assembled(cell, replicate, spec, hints, table, pages, _FORMATS[cell.format](_raw_lists(cell, spec, draw)))


def last_query(problem: Problem, request: int, *purpose: object) -> Problem:
    """The last query of one request as a problem of its own: the same position, lists, masks, kind of page map and
    hints, on other pages. `purpose` names the draw of these. The request must have a query.

    Under the top-left rule, where a query's position is its place in the request, the earlier queries stay.
    """
    spec, tokens = problem.spec, slice(*problem.spec.qo_indptr[request : request + 2])
    if spec.causal is not CausalRule.TOP_LEFT:
        tokens = slice(tokens.stop - 1, tokens.stop)
    rows = slice(tokens.start * spec.list_heads, tokens.stop * spec.list_heads)
    dropout = spec.dropout and replace(
        spec.dropout, request_uids=((spec.dropout.request_uids or range(spec.num_requests))[request],)
    )
    alone = replace(
        spec,
        seq_lens=spec.seq_lens[request : request + 1],
        qo_lens=(tokens.stop - tokens.start,),
        query_positions=spec.query_positions[tokens],
        query_ordinals=spec.query_ordinals[rows],
        dropout=dropout,
    )
    table, pages = _PAGE_MAPS[problem.cell.map](alone, problem.draw("pages", *purpose))
    indptr = problem.raw.indptr[rows.start : rows.stop + 1]
    raw = CandidateLists(indptr - indptr[0], problem.raw.indices[indptr[0] : indptr[-1]])
    return _assembled(problem.cell, problem.replicate, alone, problem.hints, table, pages, raw)


def _assembled(
    cell: Cell, replicate: int, spec: AttentionSpec, hints: Hints, table: PageTable, pages: Ints, raw: CandidateLists
) -> Problem:
    slot_request = np.full((len(pages), spec.page_size), -1, np.int64)
    slot_token = np.zeros_like(slot_request)
    for request, seq_len in enumerate(spec.seq_lens):
        for page in range(_page_count(seq_len, spec.page_size)):
            live = np.searchsorted(pages, table.table[request, page])
            slot_request[live] = request
            slot_token[live] = page * spec.page_size + np.arange(spec.page_size)
    scales = {}
    if spec.k_codec or spec.v_codec:
        where = pages, slot_request, slot_token, (cell.id, replicate, "scales")
        scales = {f"{name}_scales": scales_of(spec, name, *where) for name in ("k", "v")}
    return Problem(
        cell=cell,
        replicate=replicate,
        spec=spec,
        hints=hints,
        table=table,
        raw=raw,
        candidates=validate(spec, raw, table, sentinels=(PADDING,)),
        pages=pages,
        slot_request=slot_request,
        slot_token=slot_token,
        **scales,
    )


# --- pages


def _page_count(seq_len: int, page_size: int) -> int:
    return -(-seq_len // page_size)


def _table(spec: AttentionSpec, pages: Ints, num_pages: int, decoys: Ints) -> tuple[PageTable, Ints]:
    """Deal `pages` to the requests in turn; decoys hold data that belongs to nobody."""
    counts = [_page_count(seq_len, spec.page_size) for seq_len in spec.seq_lens]
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
    return sum(_page_count(seq_len, spec.page_size) for seq_len in spec.seq_lens)


def _random_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    total = _total_pages(spec)
    num_pages = total + total // 2 + 3
    order = 1 + draw.permutation(num_pages - 1)  # page 0 belongs to nobody, as in most pools
    return _table(spec, order[:total], num_pages, np.concatenate((np.zeros(1, np.int64), order[total:])))


def _shared_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    """Random pages, then the first logical pages of every request are those of request 0."""
    table, live = _random_pages(spec, draw)
    shared = max(1, min(seq_len // spec.page_size for seq_len in spec.seq_lens) // 2)
    prefix = table.table[0, : min(shared, _page_count(spec.seq_lens[0], spec.page_size))]
    dealt = []
    for request, seq_len in enumerate(spec.seq_lens):
        mine = table.table[request, : _page_count(seq_len, spec.page_size)].copy()
        mine[: len(prefix)] = prefix[: len(mine)]
        dealt.append(mine)
    return _assemble(spec, dealt, table.num_pages, live)


def _aliased_pages(spec: AttentionSpec, draw: Draw) -> tuple[PageTable, Ints]:
    """Random pages, then every second whole page of a later request is the page behind it in request 0."""
    table, live = _random_pages(spec, draw)
    whole = [seq_len // spec.page_size for seq_len in spec.seq_lens]
    dealt = []
    for request, seq_len in enumerate(spec.seq_lens):
        mine = table.table[request, : _page_count(seq_len, spec.page_size)].copy()
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


_PAGE_MAPS: dict[str, Callable[[AttentionSpec, Draw], tuple[PageTable, Ints]]] = {
    "random": _random_pages,
    "shared": _shared_pages,
    "alias": _aliased_pages,
    "identity": _identity_pages,
    "high": _high_pages,
    "example": _example_pages,
}

# --- candidate lists


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


def _raw_lists(cell: Cell, spec: AttentionSpec, draw: Draw) -> CandidateLists:
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
