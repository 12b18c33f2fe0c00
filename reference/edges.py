"""Edges: which keys each row attends after all masks, where they stand, and what an empty row becomes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .candidates import ValidatedCandidates, expand
from .spec import AttentionSpec, CandidateKind, EmptyRowRule, Row

Ints = NDArray[np.int64]


class Edges(NamedTuple):
    """Edges sorted by row, in the order of each list: candidate row, logical position t of the key, multiplicity, and
    the position that position-dependent terms and dropout use, t or (sequence) the ordinal: [edges] each.

    `query_position` [rows]: what those terms use for the query. `named` [rows]: slots that the lists name.
    """

    row: Ints
    t: Ints
    multiplicity: Ints
    key_position: Ints
    query_position: Ints
    named: Ints

    def part(self, start: int, stop: int) -> Edges:
        """The edges from `start` to `stop`."""
        some = slice(start, stop)
        row, t, multiplicity, key_position = (x[some] for x in self[:4])
        return Edges(row, t, multiplicity, key_position, self.query_position, self.named)


class EmptyRowError(ValueError):
    """Rows without an edge that the empty-row rule does not allow; `.rows` holds them, the message names the first."""

    def __init__(self, rows: list[Row], reason: str) -> None:
        self.rows = rows
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        super().__init__(f"{rows[0]}: {reason}{more}")


def attended(spec: AttentionSpec, candidates: ValidatedCandidates) -> Edges:
    """All edges of a problem, DESIGN section 4. Raises EmptyRowError, before anything is computed, as the rule says."""
    row, t, count = expand(spec, candidates)
    position = row_positions(spec)
    named = np.diff(candidates.indptr) * spec.block_size
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        length = np.bincount(row, minlength=spec.num_rows)
        start = np.cumsum(length) - length
        key_position = np.arange(len(row)) - start[row]
        last = np.full(spec.num_rows, -1)
        last[length > 0] = t[(start + length - 1)[length > 0]]
        query_position = length - ((last == position) & (length > 0))
    else:
        key_position, query_position = t, position
    if spec.query_ordinals:
        query_position = np.asarray(spec.query_ordinals, np.int64)
    seen = scores.visible(spec, position[row], t)
    edges = Edges(row[seen], t[seen], count[seen], key_position[seen], query_position, named)
    empty = np.flatnonzero(np.bincount(edges.row, minlength=spec.num_rows) == 0)
    return _forced(spec, edges, empty) if len(empty) and spec.empty_row is not EmptyRowRule.ZERO else edges


def row_positions(spec: AttentionSpec) -> Ints:
    """Logical position of the query of each candidate row: [num_rows]."""
    return np.repeat(np.asarray(spec.token_position, np.int64), spec.list_heads)


def row_requests(spec: AttentionSpec) -> Ints:
    """Request of each candidate row: [num_rows]."""
    return np.repeat(np.asarray(spec.token_request, np.int64), spec.list_heads)


def row_kv_heads(spec: AttentionSpec, rows: Ints) -> Ints:
    """The KV head that each of these candidate rows reads."""
    head = rows % spec.list_heads
    return head if spec.lists_per_kv_head == 1 else head // spec.lists_per_kv_head


def _forced(spec: AttentionSpec, edges: Edges, empty: Ints) -> Edges:
    """One edge for each empty row, past all masks: its own token, or token 0; a list of one where order counts."""
    position, seq_len = row_positions(spec)[empty], np.asarray(spec.seq_lens, np.int64)[row_requests(spec)[empty]]
    own = spec.empty_row is EmptyRowRule.FORCE_SELF
    t = position if own else np.zeros_like(empty)
    refused = {
        EmptyRowRule.FORBID: (np.ones(len(empty), bool), "has no edge, which the spec forbids"),
        EmptyRowRule.FORCE_SELF: (
            (t < 0) | (t >= seq_len),
            "has no edge, and its own token, which it must attend, is not committed",
        ),
        EmptyRowRule.FORCE_SINK_TOKEN: (seq_len == 0, "has no edge, and T = 0 leaves no sink token to attend"),
    }
    bad, reason = refused[spec.empty_row]
    if bad.any():
        raise EmptyRowError([spec.row(int(row)) for row in empty[bad]], reason)
    query_position, key_position = edges.query_position, t
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        key_position = np.zeros_like(t)
        if not spec.query_ordinals:
            query_position = query_position.copy()
            query_position[empty] = t != position
    order = np.argsort(np.concatenate((edges.row, empty)), kind="stable")
    row, t, count, key_position = (
        np.concatenate(parts)[order]
        for parts in (
            (edges.row, empty),
            (edges.t, t),
            (edges.multiplicity, np.ones_like(t)),
            (edges.key_position, key_position),
        )
    )
    named = np.maximum(edges.named, np.bincount(empty, minlength=spec.num_rows))
    return Edges(row, t, count, key_position, query_position, named)
