"""Physical slots as a row sees them: which it attends, in which order, tile and split, and their names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sacts.reference.forward import edges
from sacts.reference.spec import Hints

from ..build import Problem

Ints = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Slots:
    """Physical (live page, offset, KV head) triples: [n] each."""

    page: Ints
    offset: Ints
    head: Ints

    def __len__(self) -> int:
        return len(self.page)

    def take(self, part: Ints | slice) -> Slots:
        """Some of them."""
        return Slots(self.page[part], self.offset[part], self.head[part])

    @property
    def at(self) -> tuple[Ints, Ints, Ints]:
        """An index into arrays [L, page_size, num_kv_heads]."""
        return self.page, self.offset, self.head


def joined(first: Slots, second: Slots) -> Slots:
    """Both, in this order."""
    pairs = zip(first.at, second.at, strict=True)
    return Slots(*(np.concatenate(pair) for pair in pairs))


@dataclass(frozen=True)
class Walk:
    """The edges of one output row in the order in which a backend walks them: by logical position (a sequence: by its
    list), in tiles of `kv_tile` slots, and in splits of whole tiles, as evenly as these go.

    token, count, tile, split [edges]; slots: where they stand; num_tiles, splits: of the whole row.
    """

    slots: Slots
    token: Ints
    count: Ints
    tile: Ints
    split: Ints
    num_tiles: int

    def __len__(self) -> int:
        return len(self.token)


def row_entries(problem: Problem, token: int, qo_head: int) -> tuple[int, Ints]:
    """Index of the candidate row of one output row, and its validated entries in their order."""
    row = problem.spec.row_of(token, qo_head)
    lists = problem.candidates
    return row, lists.indices[lists.indptr[row] : lists.indptr[row + 1]]


def walk(problem: Problem, token: int, qo_head: int, hints: Hints) -> Walk:
    """The edges of output row (token, query head) under these hints."""
    spec = problem.spec
    row, entries = row_entries(problem, token, qo_head)
    rows, t, count = edges(spec, problem.candidates)
    t, count = t[rows == row], count[rows == row]
    block = spec.block_size
    place = {int(entry): i for i, entry in enumerate(entries)}  # forced edges stand in no list: slot 0
    ordinal = np.array([place.get(int(x) // block, 0) * block + int(x) % block for x in t], np.int64)
    order = np.argsort(ordinal, kind="stable")
    t, count, ordinal = t[order], count[order], ordinal[order]
    tile = ordinal // hints.kv_tile
    num_tiles = max(1, -(-len(entries) * block // hints.kv_tile))
    page, offset = np.divmod(t, spec.page_size)
    live = np.searchsorted(problem.pages, problem.table.table[spec.token_request[token], page])
    head = np.full(len(t), qo_head // spec.group_size, np.int64)
    split = tile // -(-num_tiles // hints.num_splits)
    return Walk(Slots(live, offset, head), t, count, tile, split, num_tiles)


def others(problem: Problem, token: int, qo_head: int, own: Walk) -> Slots:
    """Every slot that the row must not read: its request's own first, then other requests', then other heads'."""
    spec = problem.spec
    free = np.ones((*problem.slot_request.shape, spec.num_kv_heads), bool)
    free[own.slots.at] = False
    page, offset, head = np.nonzero(free)
    mine = problem.position_in(spec.token_request[token])[page, offset] >= 0
    order = np.lexsort((~mine, head != qo_head // spec.group_size))
    return Slots(page[order], offset[order], head[order])


@dataclass(frozen=True)
class Owner:
    """Whose a slot is, seen from a row: `request` -1 for nobody's, `token` its logical position there."""

    request: int
    token: int
    physical: int
    offset: int
    kv_head: int


def owner_of(problem: Problem, slots: Slots, i: int, token: int) -> Owner:
    """The row's own request where the page is its own, else the request that owns it."""
    page, offset, head = int(slots.page[i]), int(slots.offset[i]), int(slots.head[i])
    request = problem.spec.token_request[token]
    position = int(problem.position_in(request)[page, offset])
    if position < 0:
        request, position = int(problem.slot_request[page, offset]), int(problem.slot_token[page, offset])
    return Owner(request, position, int(problem.pages[page]), offset, head)


def name(problem: Problem, owner: Owner, token: int) -> str:
    """A slot as seen from a row: its own token, another request's, or nobody's."""
    spec = problem.spec
    where = f"physical page {owner.physical} offset {owner.offset}, KV head {owner.kv_head}"
    if owner.request < 0:
        return f"a slot of no request ({where})"
    if owner.request != spec.token_request[token]:
        return f"token {owner.token} of request {owner.request} ({where})"
    seq_len = spec.seq_lens[owner.request]
    tail = f" beyond T = {seq_len}" if owner.token >= seq_len else ""
    return f"token {owner.token}{tail} (logical page {owner.token // spec.page_size} -> {where})"
