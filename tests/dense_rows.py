"""Rows from the definitions, key by key in Python: the second formulation that forward and gradients are held to."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    EmptyRowRule,
    ListsPer,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

Tensor = torch.Tensor


class Edge(NamedTuple):
    """One key of a row: position t, multiplicity, and where position-dependent terms see key and query."""

    t: int
    copies: int
    key: int
    query: int


def position_of(spec: AttentionSpec, token: int) -> int:
    request = spec.token_request[token]
    i = token - spec.qo_indptr[request]
    if spec.query_positions:
        return spec.query_positions[token]
    return i if spec.causal is CausalRule.TOP_LEFT else spec.seq_lens[request] - spec.qo_lens[request] + i


def row_of(spec: AttentionSpec, lists: list[list[int]], token: int, head: int) -> list[Edge]:
    """The edges of one row after all masks and the empty-row rule; `head`: the one that has the list."""
    seq_len, position = spec.seq_lens[spec.token_request[token]], position_of(spec, token)
    heads = spec.num_qo_heads if spec.lists is ListsPer.QUERY_HEAD else spec.num_kv_heads
    row = token * heads + head
    counts = Counter(lists[row])
    sequence = spec.candidate_kind is CandidateKind.SEQUENCE
    listed = [
        t
        for entry in counts  # in the order of their first occurrence
        for t in range(entry * spec.block_size, min((entry + 1) * spec.block_size, seq_len))
    ]

    def edge(t: int, ordinal: int) -> Edge:
        if not sequence:
            return Edge(
                t, counts[t // spec.block_size] if spec.candidate_kind is CandidateKind.MULTISET else 1, t, position
            )
        query = spec.query_ordinals[row] if spec.query_ordinals else len(listed) - (listed[-1] == position)
        return Edge(t, 1, ordinal, query)

    edges = [edge(t, r) for r, t in enumerate(listed)]
    causal = spec.causal is not CausalRule.NONE
    edges = [e for e in edges if not (causal and e.t > position) and not (0 <= spec.window_left < position - e.t)]
    if edges or spec.empty_row is EmptyRowRule.ZERO:
        return edges
    forced = position if spec.empty_row is EmptyRowRule.FORCE_SELF else 0
    if sequence:
        query = spec.query_ordinals[row] if spec.query_ordinals else int(forced != position)
        return [Edge(forced, 1, 0, query)]
    return [Edge(forced, 1, forced, position)]  # once, however often the masked list names it


def turned(x: Tensor, position: int, rope: RoPE) -> Tensor:
    """RoPE of x [..., d] by complex multiplication."""
    n, lead = rope.rotary_dim, x.shape[:-1]
    interleaved = rope.layout is RopeLayout.INTERLEAVED
    pairs = x[..., :n].reshape(*lead, -1, 2) if interleaved else x[..., :n].reshape(*lead, 2, -1).transpose(-1, -2)
    angle = torch.tensor([position / rope.base ** (2 * i / n) for i in range(n // 2)], dtype=torch.float64)
    spun = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(spun)
    return torch.cat(((pairs if interleaved else pairs.transpose(-1, -2)).reshape(*lead, n), x[..., n:]), -1)


def bucket_of(buckets: RelativeBuckets, distance: int) -> int:
    behind = buckets.bidirectional and distance < 0
    size = abs(distance) if buckets.bidirectional else max(distance, 0)
    return max(b for b, least in enumerate(buckets.first) if size >= least) + len(buckets.first) * behind


def kept(spec: AttentionSpec, token: int, head: int, edge: Edge) -> float:
    """The factor of dropout, from Philox on Python integers."""
    if spec.dropout is None:
        return 1.0
    request = spec.token_request[token]
    uid = spec.dropout.request_uids[request] if spec.dropout.request_uids else request
    c = [edge.key, position_of(spec, token) % 2**32, head, uid]
    key = [spec.dropout.seed % 2**32, spec.dropout.seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b // 2**32 ^ c[1] ^ key[0], b % 2**32, a // 2**32 ^ c[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return (c[0] >= int(spec.dropout.p * 2**32)) / (1 - spec.dropout.p)
