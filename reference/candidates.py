"""Candidate lists: what a selector may say, what each illegal entry means, and the normalisation N(D, W, A, T).

A list is CSR: `indptr` [rows + 1], `indices` [nnz]; entries are token ids, or block ids where spec.block_size > 1.
`unite` adds W and A to D, `validate` decides about every entry before anything is launched (DESIGN section 4);
membership is by logical position alone. `distinct` is the one place where repeats are found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .paging import PageTable
from .spec import AttentionSpec, CandidateKind, CausalRule, ListsPer, Row

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class CandidateLists:
    """Raw lists as a selector wrote them: unsorted, perhaps with duplicates and sentinels."""

    indptr: Ints
    indices: Ints


def rows_of(indptr: Ints) -> Ints:
    """The row of each entry of a CSR: [nnz]."""
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def lists_of(rows: Ints, values: Ints, num_rows: int) -> CandidateLists:
    """Lists with `values[i]` in row `rows[i]`, in the order given within each row."""
    order = np.argsort(rows, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=num_rows))))
    return CandidateLists(indptr, values[order])


class Distinct(NamedTuple):
    """Distinct (row, value) pairs, sorted by row, then value: pair u stands at order[starts[u] : starts[u + 1]] of
    the entries, its first occurrence first.
    """

    order: Ints
    starts: Ints

    @property
    def first(self) -> Ints:
        """The first occurrence of each pair: [pairs]."""
        return self.order[self.starts]

    @property
    def counts(self) -> Ints:
        """How often each pair occurs: [pairs]."""
        return np.diff(np.append(self.starts, len(self.order)))

    @property
    def inverse(self) -> Ints:
        """The pair of each entry: [entries]."""
        pair = np.empty(len(self.order), np.int64)
        pair[self.order] = np.repeat(np.arange(len(self.starts)), self.counts)
        return pair


def distinct(rows: Ints, values: Ints) -> Distinct:
    """Find repeats within rows by one sort: O(n log n), whatever the length of the context."""
    order = np.lexsort((values, rows))
    new = (np.diff(rows[order]) != 0) | (np.diff(values[order]) != 0)
    return Distinct(order, np.flatnonzero(np.concatenate(([len(order) > 0], new))))


@dataclass(frozen=True)
class ValidatedCandidates:
    """Lists that passed `validate`: entries unique in each row, `counts` the multiplicity of each (1 but for a
    multiset).

    Sorted by logical position, except for a sequence, whose order means something. `duplicates`: how many entries
    repeated another.
    """

    indptr: Ints
    indices: Ints
    counts: Ints
    duplicates: int


class Severity(IntEnum):
    """The kinds of illegal entry, mildest first; they are never lumped together."""

    PADDING = 0
    DUPLICATE = 1
    ACAUSAL = 2
    OUT_OF_RANGE = 3
    UNCOMMITTED = 4
    FOREIGN = 5
    STALE_GENERATION = 6


class IllegalEntry(NamedTuple):
    """One entry that must not be launched: `entry` counts from the start of the row's list."""

    severity: Severity
    row: Row
    entry: int
    value: int
    reason: str

    def __str__(self) -> str:
        return f"{self.row}, entry {self.entry}: {self.value} {self.reason}"


class CandidateError(ValueError):
    """Illegal candidate entries; `.entries` holds all of them, worst severity first."""

    def __init__(self, entries: list[IllegalEntry]) -> None:
        self.entries = sorted(entries, key=lambda e: (-e.severity, e.row, e.entry))
        worst = self.entries[0]
        more = f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""
        super().__init__(f"{worst.severity.name.lower()}: {worst}{more}")


def validate(
    spec: AttentionSpec, raw: CandidateLists, table: PageTable, *, sentinels: Collection[int] = ()
) -> ValidatedCandidates:
    """Check every entry of `raw` and return the lists that attention is defined on.

    `sentinels` are the padding values that the layout declares; nothing else is padding. Raises CandidateError for
    negative, acausal (token lists: each serves one row), uncommitted (>= T), out-of-range and foreign entries, for
    pages of a stale generation, and for duplicates in a sequence; ValueError for a CSR that is not one.
    """
    _check_csr(spec, raw)
    rows = rows_of(raw.indptr)
    entries = np.arange(len(raw.indices)) - raw.indptr[rows]
    real = ~np.isin(raw.indices, list(sentinels))
    rows, entries, values = rows[real], entries[real], raw.indices[real]
    illegal = [*_bad_positions(spec, rows, entries, values)]
    if not illegal:
        illegal = [*_bad_pages(spec, table, rows, entries, values)]
    pairs = distinct(rows, values)
    first = pairs.first
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        named = {(bad.row, bad.entry) for bad in illegal}
        repeated = (
            IllegalEntry(
                Severity.DUPLICATE, spec.row(int(rows[i])), int(entries[i]), int(values[i]), "repeats an entry"
            )
            for i in np.setdiff1d(np.arange(len(rows)), first)
        )
        illegal += [bad for bad in repeated if (bad.row, bad.entry) not in named]
    if illegal:
        raise CandidateError(illegal)
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        first = np.sort(first)
    lists = lists_of(rows[first], values[first], spec.num_rows)
    counts = pairs.counts if spec.candidate_kind is CandidateKind.MULTISET else np.ones(len(first), np.int64)
    return ValidatedCandidates(lists.indptr, lists.indices, counts, len(rows) - len(first))


def _check_csr(spec: AttentionSpec, raw: CandidateLists, name: str = "candidates") -> None:
    if raw.indptr.shape != (spec.num_rows + 1,):
        raise ValueError(
            f"{name}: indptr must have {spec.num_rows + 1} entries (rows + 1), got shape {raw.indptr.shape}"
        )
    steps = np.diff(raw.indptr)
    if raw.indptr[0] != 0 or raw.indptr[-1] != len(raw.indices) or (steps < 0).any():
        at = int(np.argmax(steps < 0)) if (steps < 0).any() else "the ends"
        raise ValueError(
            f"{name}: indptr must rise from 0 to {len(raw.indices)} (the number of indices); it does not at {at}"
        )


def _bad_positions(spec: AttentionSpec, rows: Ints, entries: Ints, values: Ints) -> list[IllegalEntry]:
    tokens = rows // spec.list_heads
    seq_lens = np.asarray(spec.seq_lens, np.int64)[np.asarray(spec.token_request, np.int64)[tokens]]
    position = np.asarray(spec.token_position, np.int64)[tokens]
    token_list = spec.block_size == 1 and spec.causal is not CausalRule.NONE
    rules: tuple[tuple[Severity, NDArray[np.bool_], Callable[[int], str]], ...] = (
        (Severity.OUT_OF_RANGE, values < 0, lambda i: "is negative and no declared sentinel"),
        (
            Severity.UNCOMMITTED,
            values >= -(-seq_lens // spec.block_size),
            lambda i: f"starts at or beyond T = {seq_lens[i]}",
        ),
        (
            Severity.ACAUSAL,
            token_list & (values >= 0) & (values > position) & (values < seq_lens),
            lambda i: f"lies beyond the query's position {position[i]}",
        ),
    )
    return [
        IllegalEntry(severity, spec.row(int(rows[i])), int(entries[i]), int(values[i]), reason(int(i)))
        for severity, bad, reason in rules
        for i in np.flatnonzero(bad)
    ]


def _bad_pages(spec: AttentionSpec, table: PageTable, rows: Ints, entries: Ints, values: Ints) -> list[IllegalEntry]:
    """Faults of the pages that committed entries need; each (entry, page) has one name."""
    requests = np.asarray(spec.token_request, np.int64)[rows // spec.list_heads]
    at, page = _pages_needed(spec, table.page_size, requests, values)
    request, columns = requests[at], table.table.shape[1]
    listed = page < columns
    physical = np.full(len(at), -1, np.int64)
    physical[listed] = table.table[request[listed], page[listed]]
    inside = listed & (physical >= 0) & (physical < table.num_pages)
    stale, foreign = np.zeros(len(at), bool), np.zeros(len(at), bool)
    stale[inside] = table.is_stale(request[inside], page[inside])
    foreign[inside] = ~table.owns(request[inside], physical[inside])

    def where(i: int) -> str:
        return f"needs logical page {page[i]}, which maps to physical page {physical[i]}"

    rules: tuple[tuple[Severity, NDArray[np.bool_], Callable[[int], str]], ...] = (
        (
            Severity.OUT_OF_RANGE,
            ~listed,
            lambda i: f"needs logical page {page[i]}, but the page table has {columns} columns",
        ),
        (
            Severity.OUT_OF_RANGE,
            listed & ~inside,
            lambda i: f"{where(i)}, outside the pool of {table.num_pages} pages",
        ),
        (Severity.STALE_GENERATION, stale, lambda i: f"{where(i)}, which was given to others since the table was read"),
        (Severity.FOREIGN, foreign & ~stale, lambda i: f"{where(i)}, which the request does not own"),
    )
    return [
        IllegalEntry(severity, spec.row(int(rows[at[i]])), int(entries[at[i]]), int(values[at[i]]), reason(int(i)))
        for severity, bad, reason in rules
        for i in np.flatnonzero(bad)
    ]


def _pages_needed(spec: AttentionSpec, page_size: int, requests: Ints, values: Ints) -> tuple[Ints, Ints]:
    """(index of the entry, logical page) for every page that holds a committed token of the entry."""
    last_token = np.minimum((values + 1) * spec.block_size, np.asarray(spec.seq_lens, np.int64)[requests]) - 1
    first_page = values * spec.block_size // page_size
    span = last_token // page_size - first_page + 1
    at = np.repeat(np.arange(len(values)), span)
    return at, first_page[at] + np.arange(len(at)) - (np.cumsum(span) - span)[at]


def expand(spec: AttentionSpec, candidates: ValidatedCandidates) -> tuple[Ints, Ints, Ints]:
    """All edges before masks: (row, t, count) arrays; a block names its committed tokens only (t < T)."""
    rows = rows_of(candidates.indptr)
    t = candidates.indices[:, None] * spec.block_size + np.arange(spec.block_size)
    seq_len = np.asarray(spec.seq_lens, np.int64)[np.asarray(spec.token_request, np.int64)[rows // spec.list_heads]]
    committed = t < seq_len[:, None]
    shape = t.shape
    return (
        np.broadcast_to(rows[:, None], shape)[committed],
        t[committed],
        np.broadcast_to(candidates.counts[:, None], shape)[committed],
    )


class Triple(NamedTuple):
    """One element of N: logical position, l(t) = (logical page, offset), p(t) = (physical page, offset)."""

    t: int
    logical: tuple[int, int]
    physical: tuple[int, int]


def normalize(
    dynamic: ArrayLike, window: ArrayLike, sinks: ArrayLike, seq_len: int, table: PageTable, request: int
) -> list[Triple]:
    """N(D, W, A, T) = {(t, l(t), p(t)) : t in D u W u A, 0 <= t < T}, equation (16), in the order of t."""
    union = np.concatenate([np.asarray(x, np.int64).ravel() for x in (dynamic, window, sinks)])
    union = _set_of(union[(union >= 0) & (union < seq_len)])
    page, offset, physical = table.locate(request, union)
    return [
        Triple(t, (p, o), (f, o))
        for t, p, o, f in zip(union.tolist(), page.tolist(), offset.tolist(), physical.tolist(), strict=True)
    ]


def blocks_of(tokens: ArrayLike, block_size: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Tokens as blocks and masks, equation (2): block ids [u], and which of their slots are attended [u, B]."""
    block, offset = np.divmod(np.asarray(tokens, np.int64), block_size)
    pairs = distinct(np.zeros_like(block), block)
    mask = np.zeros((len(pairs.starts), block_size), bool)
    mask[pairs.inverse, offset] = True
    return block[pairs.first], mask


def _set_of(values: Ints) -> Ints:
    return values[distinct(np.zeros_like(values), values).first]


def unite(
    spec: AttentionSpec, dynamic: CandidateLists, window: CandidateLists, sinks: CandidateLists
) -> CandidateLists:
    """D, W and A of every row as one raw list, equation (1): D's entries first, then W's, then A's.

    Nothing is removed: `validate` counts repeats over the three together, or drops them, as the candidate kind says.
    Raises ValueError for a row of a sequence with a window or sinks: where they stand in the order means nothing.
    """
    branches = {"dynamic": dynamic, "window": window, "sinks": sinks}
    for name, lists in branches.items():
        _check_csr(spec, lists, name)
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        for name in ("window", "sinks"):
            filled = np.flatnonzero(np.diff(branches[name].indptr))
            if len(filled):
                row = spec.row(int(filled[0]))
                raise ValueError(f"{row}: a sequence cannot be united with {name}, got {name} entries in this row")
    return concatenate(tuple(branches.values()))


def concatenate(branches: Sequence[CandidateLists]) -> CandidateLists:
    """The lists of each row one after the other; all branches have the same rows."""
    rows = np.concatenate([rows_of(lists.indptr) for lists in branches])
    values = np.concatenate([lists.indices for lists in branches])
    return lists_of(rows, values, len(branches[0].indptr) - 1)


def local_window(spec: AttentionSpec, size: int) -> CandidateLists:
    """W of every row: the last `size` entries up to the one that holds the query's position, committed ones only.

    Entries are tokens, or blocks of spec.block_size. It adds candidates; spec.window_left, which removes keys, is
    another field and is not looked at. Raises ValueError for a negative size.
    """
    end = _own_entry(spec) + 1
    return _ranges(spec, "local window", size, np.maximum(end - size, 0), end)


def fixed_sinks(spec: AttentionSpec, count: int) -> CandidateLists:
    """A of every row: the first `count` entries, of them the committed ones that begin at or before a causal query.

    Entries are tokens, or blocks of spec.block_size. Raises ValueError for a negative count.
    """
    end = _committed_entries(spec) if spec.causal is CausalRule.NONE else _own_entry(spec) + 1
    return _ranges(spec, "sink count", count, np.zeros_like(end), np.minimum(end, count))


def _committed_entries(spec: AttentionSpec) -> Ints:
    seq_lens = np.asarray(spec.seq_lens, np.int64)[np.asarray(spec.token_request, np.int64)]
    return -(-seq_lens // spec.block_size)


def _own_entry(spec: AttentionSpec) -> Ints:
    """The entry that holds each query token's position, or the last committed one; -1 before the first key."""
    own = np.asarray(spec.token_position, np.int64) // spec.block_size
    return np.clip(own, -1, _committed_entries(spec) - 1)


def _ranges(spec: AttentionSpec, name: str, size: int, start: Ints, end: Ints) -> CandidateLists:
    """Consecutive entries start .. end - 1 of each query token, the same for all its heads."""
    if size < 0:
        raise ValueError(f"{name} must not be negative, got {size}")
    lengths = np.repeat(np.maximum(end - start, 0), spec.list_heads)
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    first = np.repeat(start, spec.list_heads)
    return CandidateLists(indptr, np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], lengths))


def serve_rows(spec: AttentionSpec, shared: CandidateLists, query_block: int) -> CandidateLists:
    """Raw lists per row from lists that each serve `query_block` consecutive queries of a request.

    `shared` has one list per (request, block of queries, head that has lists), in this order; the last block of a
    request may be smaller. In a token list under a causal rule, committed entries beyond a row's query are masked, not
    errors: the list serves later queries too. Raises ValueError for a wrong number of lists.
    """
    blocks = [-(-length // query_block) for length in spec.qo_lens]
    first_block = np.concatenate(([0], np.cumsum(blocks)))[:-1]
    if len(shared.indptr) - 1 != sum(blocks) * spec.list_heads:
        heads = "KV heads" if spec.lists is ListsPer.KV_HEAD else "query heads"
        raise ValueError(
            f"{sum(blocks)} blocks of {query_block} queries x {spec.list_heads} {heads} need as many lists, "
            f"got {len(shared.indptr) - 1}"
        )
    request = np.asarray(spec.token_request, np.int64)
    query = np.arange(spec.num_tokens) - np.asarray(spec.qo_indptr, np.int64)[request]
    block = first_block[request] + query // query_block
    source = (block[:, None] * spec.list_heads + np.arange(spec.list_heads)).ravel()
    lengths = np.diff(shared.indptr)[source]
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    values = shared.indices[np.arange(indptr[-1]) + np.repeat(shared.indptr[source] - indptr[:-1], lengths)]
    rows = rows_of(indptr)
    if spec.block_size > 1 or spec.causal is CausalRule.NONE:
        return CandidateLists(indptr, values)
    token = rows // spec.list_heads
    masked = values > np.asarray(spec.token_position, np.int64)[token]
    masked &= (values >= 0) & (values < np.asarray(spec.seq_lens, np.int64)[request[token]])
    return lists_of(rows[~masked], values[~masked], spec.num_rows)
