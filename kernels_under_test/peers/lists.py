"""Candidate lists as other libraries want them; made in a plan, where they are looked at from the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sacts.conformance.adapter import Case, Refused


@dataclass(frozen=True)
class Units:
    """Runs of query tokens that share their lists: unit u holds tokens u * query_block to (u + 1) * query_block.

    entries [units, list_heads, longest]: sorted ids, -1 behind the last; counts [units, list_heads]; request [units].
    """

    entries: Tensor
    counts: Tensor
    request: Tensor
    query_block: int

    @property
    def shared(self) -> bool:
        """Whether all KV heads of each unit have the same list."""
        return bool((self.entries == self.entries[:, :1]).all())

    @property
    def even(self) -> bool:
        """Whether all lists are of one length."""
        return bool((self.counts == self.entries.shape[2]).all())


def units_of(case: Case) -> Units:
    """The lists of a case, equal ones of neighbouring tokens once."""
    spec = case.spec
    counts = case.kv_indptr.diff().view(spec.num_tokens, spec.list_heads).long()
    longest = max(1, int(counts.max()))
    entries = torch.full((spec.num_rows, longest), -1, dtype=torch.int64, device=case.q.device)
    entries[torch.arange(longest, device=entries.device) < counts.view(-1, 1)] = case.kv_indices.long()
    entries = entries.view(spec.num_tokens, spec.list_heads, longest)
    request = torch.tensor(spec.token_request, device=entries.device)
    block = _query_block(entries, request)
    return Units(entries[::block], counts[::block], request[::block], block)


def _query_block(entries: Tensor, request: Tensor) -> int:
    """The largest number of neighbours that share lists throughout; equal lists of two blocks do not join them."""
    changed = (entries[1:] != entries[:-1]).flatten(1).any(1) | (request[1:] != request[:-1])
    return math.gcd(len(request), *(changed.nonzero()[:, 0] + 1).tolist())


def whole_blocks(case: Case) -> None:
    """Raises Refused where a block reaches beyond T, which a list of whole pages cannot say."""
    for request, seq_len in enumerate(case.spec.seq_lens):
        if seq_len % case.spec.block_size:
            raise Refused(f"request {request}: T {seq_len} is no multiple of block_size {case.spec.block_size}")


def contiguous_pages(case: Case) -> slice:
    """The pages that the requests occupy in order, one each. Raises Refused for KV that is not contiguous."""
    spec = case.spec
    if any(seq_len != spec.page_size for seq_len in spec.seq_lens):
        raise Refused("needs contiguous KV: one page that holds all of a request")
    pages = case.page_table[:, 0].tolist()
    if pages != list(range(pages[0], pages[0] + len(pages))):
        raise Refused("needs contiguous KV: requests one behind the other")
    return slice(pages[0], pages[0] + len(pages))


def tokens_of(case: Case, units: Units) -> tuple[Tensor, Tensor]:
    """Logical positions [units, list_heads, slots] of all tokens that the entries name, and whether they are there."""
    size = case.spec.block_size
    t = units.entries[..., None] * size + torch.arange(size, device=units.entries.device)
    there = (units.entries[..., None] >= 0) & (t < case.seq_lens.long()[units.request][:, None, None, None])
    return t.clamp(min=0).flatten(2), there.flatten(2)
