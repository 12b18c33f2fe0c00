"""What a witness has to know of the one row that it is made for: which slots it attends, in which tile each falls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sacts.reference.forward import edges
from sacts.reference.spec import AttentionSpec, CandidateKind, EmptyRowRule, EpilogueKind

from ..build import Problem

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RowSlots:
    """The k keys of one row by logical position: t [k], live page [k], offset [k], and `tile` [k]: which of the row's
    tiles each falls into where tiles are `kv_tile` slots of its entries in order; tiles without a key are left out.
    """

    t: Ints
    page: Ints
    offset: Ints
    tile: Ints

    @property
    def tiles(self) -> int:
        """Tiles that hold a key."""
        return int(self.tile[-1]) + 1 if len(self.tile) else 0


def last_rows(problem: Problem) -> list[RowSlots]:
    """The row of the last query token, for each KV head."""
    spec = problem.spec
    token = spec.num_tokens - 1
    request = spec.token_request[token]
    rows, t, _ = edges(spec, problem.candidates)
    found = []
    for row in range(token * spec.num_kv_heads, spec.num_rows):
        mine = np.sort(t[rows == row])
        entries = problem.candidates.indices[problem.candidates.indptr[row] : problem.candidates.indptr[row + 1]]
        slot = np.searchsorted(entries, mine // spec.block_size) * spec.block_size + mine % spec.block_size
        _, tile = np.unique(slot // problem.hints.kv_tile, return_inverse=True)
        page, offset = np.divmod(mine, spec.page_size)
        live = np.searchsorted(problem.pages, problem.table.table[request, page])
        found.append(RowSlots(mine, live, offset, np.asarray(tile, np.int64)))
    return found


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
        or spec.empty_row is not EmptyRowRule.ZERO
        or spec.epilogue.kind is not EpilogueKind.NONE
    )
