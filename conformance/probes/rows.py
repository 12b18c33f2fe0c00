"""What a witness has to know of the one row that it is made for: which slots it attends, in which tile each falls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sacts.reference import scores
from sacts.reference.edges import attended
from sacts.reference.spec import AttentionSpec, CandidateKind, EpilogueKind

from ..build import Problem
from ..draw import Array

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RowSlots:
    """The k keys of one row by logical position (of a sequence: in its order): t [k], live page [k], offset [k],
    `tile` [k]: which of the row's tiles each falls into where tiles are `kv_tile` slots of its entries in order; tiles
    without a key are left out; `ahead` [k]: how far the position that RoPE and bias take for the key is ahead of the
    query's; repeats [k]: how often each counts.
    """

    t: Ints
    page: Ints
    offset: Ints
    tile: Ints
    ahead: Ints
    repeats: Ints

    @property
    def tiles(self) -> int:
        """Tiles that hold a key."""
        return int(self.tile[-1]) + 1 if len(self.tile) else 0


def last_rows(problem: Problem) -> list[RowSlots]:
    """The rows of the last query token: for each KV head, or for each query head where these have lists."""
    spec = problem.spec
    token = spec.num_tokens - 1
    request = spec.token_request[token]
    every = attended(spec, problem.candidates)
    found = []
    for row in range(token * spec.list_heads, spec.num_rows):
        mine = np.flatnonzero(every.row == row)
        entries = problem.candidates.indices[problem.candidates.indptr[row] : problem.candidates.indptr[row + 1]]
        if spec.candidate_kind is CandidateKind.SEQUENCE:
            slot = every.key_position[mine]
        else:
            mine = mine[np.argsort(every.t[mine], kind="stable")]
            t = every.t[mine]
            slot = np.searchsorted(entries, t // spec.block_size) * spec.block_size + t % spec.block_size
        _, tile = np.unique(slot // problem.hints.kv_tile, return_inverse=True)
        page, offset = np.divmod(every.t[mine], spec.page_size)
        live = np.searchsorted(problem.pages, problem.table.table[request, page])
        ahead = every.key_position[mine] - every.query_position[row]
        tiles = np.asarray(tile, np.int64)
        found.append(RowSlots(every.t[mine], live, offset, tiles, ahead, every.multiplicity[mine]))
    return found


def added(spec: AttentionSpec, row: RowSlots, qo_head: int) -> Array:
    """What bias and repeats add to the logit of each key: [k]."""
    bias = scores.bias(spec, -row.ahead[None, None], np.array([[qo_head]])) if spec.alibi_slopes or spec.buckets else 0
    repeats = np.log(row.repeats) if spec.candidate_kind is CandidateKind.MULTISET else np.zeros(len(row.t))
    total: Array = np.broadcast_to(bias, (1, 1, 1, len(row.t)))[0, 0, 0] + repeats
    return total


def plain(spec: AttentionSpec) -> bool:
    """Whether the logit is sm_scale q.k and nothing else, and out the normalised sum: what exact witnesses are built
    on.
    """
    return not (
        spec.rope
        or spec.logits_soft_cap
        or spec.alibi_slopes
        or spec.buckets
        or spec.sink_logits
        or spec.dropout
        or spec.k_codec
        or spec.v_codec
        or spec.candidate_kind is not CandidateKind.SET
        or spec.empty_row.forces
        or spec.epilogue.kind is not EpilogueKind.NONE
    )
