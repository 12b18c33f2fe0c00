"""The index pipeline on the device: a selector's scores become lists with pages, N(D, W, A, T), equations (1), (16) and
(17): merge of heads, top-k, union with the local window and the sinks, cut at T, deduplication, sort, CSR, slots.

All of it runs in the plan: what depends on the data alone is the number of entries, which the host reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from sacts.reference.spec import AttentionSpec, CausalRule


class HeadMerge(StrEnum):
    """How the scores of the query heads of one KV head become those of a list: the largest, the sum, or each head's own
    list.
    """

    MAX = "max"
    SUM = "sum"
    PRIVATE = "private"


@dataclass(frozen=True)
class Selection:
    """What a row's list is made of, in entries (tokens, or blocks of the spec): the `k` of the largest scores, a local
    `window`, and `sinks`.
    """

    k: int
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")


@dataclass(frozen=True)
class Lists:
    """CSR over the candidate rows, branch behind branch: `kv_indptr` [num_lists + 1] and `kv_indices` [nnz] int32,
    distinct but for a sequence, which keeps its order; `counts` [nnz]: how often each entry was named.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    counts: Tensor

    @property
    def rows(self) -> Tensor:
        """The row of each entry: [nnz]."""
        lengths = self.kv_indptr.diff()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def lists_from(spec: AttentionSpec, scores: Tensor, selection: Selection) -> Lists:
    """N(D, W, A, T) of each row, D the top k of `scores` [num_rows, entries], see `top`. Entries that no row may see
    count for nothing, whatever their scores. Raises ValueError for scores of another shape.
    """
    behind_own, end = _ends(spec, scores.device)
    entries = -(-max(spec.seq_lens, default=0) // spec.block_size)
    if scores.dim() != 2 or scores.shape[0] != spec.num_rows or scores.shape[1] < entries:
        raise ValueError(f"scores must be [{spec.num_rows}, {entries} or more], got {tuple(scores.shape)}")
    dynamic = top(scores, end, selection.k)
    window = _range((behind_own - selection.window).clamp(min=0), behind_own, selection.window)
    sinks = _range(torch.zeros_like(end), end.clamp(max=selection.sinks), selection.sinks)
    named = torch.cat((dynamic, window, sinks), dim=1)
    rows = torch.arange(spec.num_rows, device=scores.device)[:, None].expand(named.shape)
    return distinct(rows[named >= 0], named[named >= 0], spec.num_rows)


def top(scores: Tensor, end: Tensor, k: int) -> Tensor:
    """The k entries with the largest `scores` [rows, entries] of those before `end` [rows]: int64 [rows, at most k],
    the best first, -1 where a row sees fewer. Of equal scores the lower entry wins; NaN ranks as -infinity.
    """
    entry = torch.arange(scores.shape[1], device=scores.device)
    seen = entry < end[:, None]
    ranked = torch.where(seen & ~scores.isnan(), scores, float("-inf")) + 0.0  # no -0.0, which a radix sort tells apart
    # What is not seen stands behind all that is: a stable sort takes it last, behind a score of -infinity too.
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.where(best < end[:, None], best, -1)


def merged(spec: AttentionSpec, scores: Tensor, rule: HeadMerge) -> Tensor:
    """Scores of the lists of a spec, [num_rows, entries], from those of all query heads [tokens * num_qo_heads,
    entries]; a sum in FP64. NaN of one head is -infinity before it is merged. Raises ValueError where the rule and the
    spec's `lists` say different things.
    """
    if spec.heads_per_list > 1 if rule is HeadMerge.PRIVATE else spec.heads_per_list < spec.group_size:
        raise ValueError(f"merge {rule} does not make lists per {spec.lists}")
    if rule is HeadMerge.PRIVATE:
        return scores
    heads = scores.view(spec.num_rows, spec.heads_per_list, scores.shape[1])
    heads = torch.where(heads.isnan(), float("-inf"), heads)
    return heads.amax(dim=1) if rule is HeadMerge.MAX else heads.sum(dim=1, dtype=torch.float64)


def distinct(rows: Tensor, entries: Tensor, num_rows: int) -> Lists:
    """Entries of rows, both [n] in any order, sorted and without repeats, which are counted."""
    keys, counts = torch.unique((rows << 32) + entries, return_counts=True)
    return csr(keys >> 32, keys & 0xFFFFFFFF, counts, num_rows)


def csr(rows: Tensor, entries: Tensor, counts: Tensor, num_rows: int) -> Lists:
    """Entries that are sorted by row."""
    kv_indptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=rows.device)
    kv_indptr[1:] = torch.bincount(rows, minlength=num_rows).cumsum(0)
    return Lists(kv_indptr, entries.to(torch.int32), counts)


def slots_of(spec: AttentionSpec, page_table: Tensor, rows: Tensor, entries: Tensor) -> Tensor:
    """p(t) of the first token of each entry, equation (17): physical page * page_size + offset, int64 [n]; `rows` [n]
    may be those of several branches, one behind another.
    """
    token = rows % spec.num_rows // spec.list_heads
    request = torch.tensor(spec.token_request, dtype=torch.long, device=rows.device)[token]
    t = entries.long() * spec.block_size
    page = page_table[request, t // spec.page_size].long()
    return page * spec.page_size + t % spec.page_size


def _ends(spec: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row, the entry behind its own, or behind the last committed one, where its local window ends; and the
    first that it cannot see: at T, under a causal rule behind its own. Both [num_rows].
    """
    seq_lens = torch.tensor([spec.seq_lens[request] for request in spec.token_request], dtype=torch.long, device=device)
    position = torch.tensor(spec.token_position, dtype=torch.long, device=device)
    committed = (seq_lens + spec.block_size - 1) // spec.block_size
    behind_own = (position.div(spec.block_size, rounding_mode="floor") + 1).clamp(min=0)
    behind_own = torch.minimum(behind_own, committed)
    end = committed if spec.causal is CausalRule.NONE else behind_own
    return behind_own.repeat_interleave(spec.list_heads), end.repeat_interleave(spec.list_heads)


def _range(start: Tensor, end: Tensor, width: int) -> Tensor:
    """Entries start .. end - 1 of each row, no more than `width`: [rows, width], -1 behind the last."""
    entry = start[:, None] + torch.arange(width, device=start.device)
    return torch.where(entry < end[:, None], entry, -1)
