"""Candidate lists: what a selector may say, what each illegal entry means, and the normalisation N(D, W, A, T).

A list is CSR: `indptr` [rows + 1], `indices` [nnz]; entries are token ids, or block ids where spec.block_size > 1.
`validate` decides about every entry before anything is launched (DESIGN section 4); membership is by logical position
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .paging import PageTable
from .spec import AttentionSpec, CandidateKind, CausalRule, Row

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class CandidateLists:
    """Raw lists as a selector wrote them: unsorted, perhaps with duplicates and sentinels."""

    indptr: Ints
    indices: Ints


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
    negative, acausal (token lists: each serves one row), uncommitted (>= T), out-of-range and foreign entries, and for
    duplicates in a sequence; ValueError for a CSR that is not one.
    """
    _check_csr(spec, raw)
    rows = np.repeat(np.arange(spec.num_rows), np.diff(raw.indptr))
    entries = np.arange(len(raw.indices)) - raw.indptr[rows]
    real = ~np.isin(raw.indices, list(sentinels))
    rows, entries, values = rows[real], entries[real], raw.indices[real]
    illegal = [*_bad_positions(spec, rows, entries, values)]
    if not illegal:
        illegal = [*_bad_pages(spec, table, rows, entries, values)]
    order = np.lexsort((values, rows)) if spec.candidate_kind is not CandidateKind.SEQUENCE else np.arange(len(rows))
    first, counts = _first_of_each(rows, values)
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
    count_of = np.zeros(len(rows), np.int64)
    count_of[first] = counts if spec.candidate_kind is CandidateKind.MULTISET else 1
    keep = order[count_of[order] > 0]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows[keep], minlength=spec.num_rows))))
    return ValidatedCandidates(indptr, values[keep], count_of[keep], len(rows) - len(first))


def _check_csr(spec: AttentionSpec, raw: CandidateLists) -> None:
    if raw.indptr.shape != (spec.num_rows + 1,):
        raise ValueError(f"indptr must have {spec.num_rows + 1} entries (rows + 1), got shape {raw.indptr.shape}")
    steps = np.diff(raw.indptr)
    if raw.indptr[0] != 0 or raw.indptr[-1] != len(raw.indices) or (steps < 0).any():
        at = int(np.argmax(steps < 0)) if (steps < 0).any() else "the ends"
        raise ValueError(f"indptr must rise from 0 to {len(raw.indices)} (the number of indices); it does not at {at}")


def _first_of_each(rows: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Index of the first occurrence of each (row, value), and how often it occurs; one sort."""
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort((values, rows))
    new = np.r_[True, (np.diff(rows[order]) != 0) | (np.diff(values[order]) != 0)]
    starts = np.flatnonzero(new)
    return order[starts], np.diff(np.r_[starts, len(order)])


def _bad_positions(spec: AttentionSpec, rows: Ints, entries: Ints, values: Ints) -> list[IllegalEntry]:
    tokens = rows // spec.num_kv_heads
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
    illegal = []
    request_of_row = np.repeat(np.asarray(spec.token_request, np.int64), spec.num_kv_heads)
    for request, seq_len in enumerate(spec.seq_lens):
        mine = np.flatnonzero(request_of_row[rows] == request)
        if not len(mine):
            continue
        last = (seq_len - 1) // table.page_size
        faults = {page: fault for page in range(last + 1) if (fault := _page_fault(table, request, page))}
        first_page = values[mine] * spec.block_size // table.page_size
        last_page = np.minimum(((values[mine] + 1) * spec.block_size - 1) // table.page_size, last)
        for page, (severity, reason) in faults.items():
            illegal += [
                IllegalEntry(severity, spec.row(int(rows[i])), int(entries[i]), int(values[i]), reason)
                for i in mine[(first_page <= page) & (page <= last_page)]
            ]
    return illegal


def _page_fault(table: PageTable, request: int, page: int) -> tuple[Severity, str] | None:
    if page >= table.table.shape[1]:
        columns = table.table.shape[1]
        return Severity.OUT_OF_RANGE, f"needs logical page {page}, but the page table has {columns} columns"
    physical = int(table.table[request, page])
    where = f"needs logical page {page}, which maps to physical page {physical}"
    if not 0 <= physical < table.num_pages:
        return Severity.OUT_OF_RANGE, f"{where}, outside the pool of {table.num_pages} pages"
    if physical not in table.owned[request]:
        return Severity.FOREIGN, f"{where}, which the request does not own"
    return None


def expand(spec: AttentionSpec, candidates: ValidatedCandidates) -> tuple[Ints, Ints, Ints]:
    """All edges before masks: (row, t, count) arrays; a block names its committed tokens only (t < T)."""
    rows = np.repeat(np.arange(spec.num_rows), np.diff(candidates.indptr))
    t = candidates.indices[:, None] * spec.block_size + np.arange(spec.block_size)
    seq_len = np.asarray(spec.seq_lens, np.int64)[np.asarray(spec.token_request, np.int64)[rows // spec.num_kv_heads]]
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
    union = np.unique(np.concatenate([np.asarray(x, np.int64).ravel() for x in (dynamic, window, sinks)]))
    union = union[(union >= 0) & (union < seq_len)]
    page, offset, physical = table.locate(request, union)
    return [
        Triple(t, (p, o), (f, o))
        for t, p, o, f in zip(union.tolist(), page.tolist(), offset.tolist(), physical.tolist(), strict=True)
    ]


def blocks_of(tokens: ArrayLike, block_size: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Tokens as blocks and masks, equation (2): block ids [u], and which of their slots are attended [u, B]."""
    block, offset = np.divmod(np.unique(np.asarray(tokens, np.int64)), block_size)
    blocks, inverse = np.unique(block, return_inverse=True)
    mask = np.zeros((len(blocks), block_size), bool)
    mask[inverse, offset] = True
    return blocks, mask
