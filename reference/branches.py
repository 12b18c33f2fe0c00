"""Scored candidates before attention: branches that name one token, and query heads that share one KV head.

A merge decides the score that travels with (t, score), and so the next selection; it never decides S: every rule
yields the union. DESIGN section 4, seed 1.1 and 7.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import CandidateLists, distinct, lists_of, rows_of
from .forward import Inputs
from .spec import AttentionSpec

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class BranchMerge(StrEnum):
    """The score of a token that several branches name: that of the first branch, the largest, or the gated sum."""

    KEEP = "keep"
    MAX_SCORE = "max_score"
    SUM_GATE = "sum_gate"


class GqaMerge(StrEnum):
    """What becomes of the candidates of the query heads of one KV group: one list with the largest score or the sum
    of the scores, or a private list for each head.
    """

    MAX = "max"
    SUM = "sum"
    PRIVATE = "private"


@dataclass(frozen=True)
class ScoredLists:
    """A selector's lists with one finite score per entry: indptr [rows + 1], indices [nnz] (logical tokens or blocks,
    no padding), scores [nnz]. An entry occurs once in a row.

    Raises ValueError, naming row and entry, for a score that is not finite and for an entry that repeats another.
    """

    indptr: Ints
    indices: Ints
    scores: Array

    def __post_init__(self) -> None:
        if self.indices.shape != self.scores.shape or self.indptr[-1] != len(self.indices):
            raise ValueError(
                f"indptr ends at {self.indptr[-1]}, got {len(self.indices)} indices and {len(self.scores)} scores"
            )
        rows = rows_of(self.indptr)
        repeated = np.ones(len(rows), bool)
        repeated[distinct(rows, self.indices).first] = False
        for bad, words in ((~np.isfinite(self.scores), "has no finite score"), (repeated, "repeats another")):
            if bad.any():
                i = int(np.argmax(bad))
                raise ValueError(f"row {rows[i]}, entry {i - self.indptr[rows[i]]}: {self.indices[i]} {words}")

    @property
    def num_rows(self) -> int:
        """Rows of the lists."""
        return len(self.indptr) - 1

    def lists(self) -> CandidateLists:
        """The lists without their scores."""
        return CandidateLists(self.indptr, self.indices)


def merge_branches(branches: Sequence[ScoredLists], rule: BranchMerge, gates: ArrayLike | None = None) -> ScoredLists:
    """One (t, score) per token of each row, in the order of t; the same tokens for every rule.

    `gates` [branches] or [branches, rows], default 1: with SUM_GATE a token's score is the sum of gate * score over
    the branches that name it (the sum of their gates where scores are 1). KEEP takes the first branch in the order
    given. Raises ValueError for branches with different rows, or gates with another rule.
    """
    if len({branch.num_rows for branch in branches}) != 1:
        raise ValueError(f"branches must have the same rows, got {[branch.num_rows for branch in branches]}")
    if gates is not None and rule is not BranchMerge.SUM_GATE:
        raise ValueError(f"gates mean nothing with the rule {rule.value}")
    rows = np.concatenate([rows_of(branch.indptr) for branch in branches])
    indices = np.concatenate([branch.indices for branch in branches])
    scores = np.concatenate([branch.scores for branch in branches])
    if rule is BranchMerge.SUM_GATE:
        of_branch = np.repeat(np.arange(len(branches)), [len(branch.indices) for branch in branches])
        gate = np.asarray(1.0 if gates is None else gates, np.float64)
        gate = gate[:, None] if gate.ndim == 1 else gate
        scores = scores * np.broadcast_to(gate, (len(branches), branches[0].num_rows))[of_branch, rows]
    return _reduced(rows, indices, scores, branches[0].num_rows, _BRANCH_SCORE[rule])


def merge_heads(heads: ScoredLists, num_qo_heads: int, num_kv_heads: int, rule: GqaMerge) -> ScoredLists:
    """Candidates per query head (row: token * num_qo_heads + head) to lists per KV group (row: token * num_kv_heads +
    KV head), or unchanged for PRIVATE, where each query head attends to its own list of its group's KV head.

    A head that does not name a token adds nothing to its score. Raises ValueError where rows or heads do not divide.
    """
    if num_qo_heads % num_kv_heads or heads.num_rows % num_qo_heads:
        raise ValueError(
            f"{heads.num_rows} rows do not divide into {num_qo_heads} query heads, or those into {num_kv_heads} groups"
        )
    if rule is GqaMerge.PRIVATE:
        return heads
    group_size = num_qo_heads // num_kv_heads
    rows = rows_of(heads.indptr) // group_size
    return _reduced(rows, heads.indices, heads.scores, heads.num_rows // group_size, _GQA_SCORE[rule])


def with_private_lists(spec: AttentionSpec, inputs: Inputs) -> tuple[AttentionSpec, Inputs]:
    """The same call with one candidate row per (token, query head), for lists that PRIVATE leaves per head: every
    query head gets a KV head of its own, with the data of its group's. `AttentionSpec.lists` says so without a copy.
    """
    k, v = (cache.repeat_heads(spec.group_size) for cache in (inputs.k, inputs.v))
    return replace(spec, num_kv_heads=spec.num_qo_heads), inputs._replace(k=k, v=v)


def select(scored: ScoredLists, k: int) -> ScoredLists:
    """The k entries of each row with the largest scores, in the order of t; of equal scores the smaller t first.

    Shorter rows stay as they are, nothing is padded. Raises ValueError for a negative k.
    """
    if k < 0:
        raise ValueError(f"k must not be negative, got {k}")
    rows = rows_of(scored.indptr)
    best_first = np.lexsort((scored.indices, -scored.scores, rows))
    rank = np.arange(len(rows)) - scored.indptr[rows]
    kept = best_first[rank < k]
    kept = kept[np.lexsort((scored.indices[kept], rows[kept]))]
    lists = lists_of(rows[kept], scored.indices[kept], scored.num_rows)
    return ScoredLists(lists.indptr, lists.indices, scored.scores[kept])


def group_union(heads: CandidateLists, group_size: int) -> CandidateLists:
    """U of each KV group: what `group_size` consecutive query heads name together, sorted; what a kernel that works
    by KV head loads. Each head still attends to its own S only.
    """
    rows = rows_of(heads.indptr) // group_size
    first = distinct(rows, heads.indices).first
    return lists_of(rows[first], heads.indices[first], (len(heads.indptr) - 1) // group_size)


def _first(scores: Array, starts: Ints) -> Array:
    return scores[starts]


def _largest(scores: Array, starts: Ints) -> Array:
    largest: Array = np.maximum.reduceat(scores, starts)
    return largest


def _total(scores: Array, starts: Ints) -> Array:
    total: Array = np.add.reduceat(scores, starts)
    return total


_BRANCH_SCORE = {BranchMerge.KEEP: _first, BranchMerge.MAX_SCORE: _largest, BranchMerge.SUM_GATE: _total}
_GQA_SCORE = {GqaMerge.MAX: _largest, GqaMerge.SUM: _total}


def _reduced(
    rows: Ints, indices: Ints, scores: Array, num_rows: int, score: Callable[[Array, Ints], Array]
) -> ScoredLists:
    pairs = distinct(rows, indices)
    if not len(pairs.starts):
        return ScoredLists(np.zeros(num_rows + 1, np.int64), indices, scores)
    lists = lists_of(rows[pairs.first], indices[pairs.first], num_rows)
    return ScoredLists(lists.indptr, lists.indices, score(scores[pairs.order], pairs.starts))
