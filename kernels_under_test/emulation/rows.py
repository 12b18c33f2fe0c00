"""From a case to the rows of the model: lists normalised, pages looked up, masks and empty rows applied."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from sacts.conformance.adapter import PADDING, Case, Refused
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, DType, EmptyRowRule

from .dequantise import Coded, gathered
from .terms import Rows


def rows_of(case: Case, k: Coded | None = None, v: Coded | None = None, reconstructed: DType = DType.FP32) -> Rows:
    """All candidate rows of a case, padded to the longest; K or V from codes where the spec has a codec."""
    spec = case.spec
    lists = [_attended(case, index) for index in range(spec.num_rows)]
    width = max((len(keys) for keys, _ in lists), default=0) or 1
    padded = [keys + [(0, 0, 0)] * (width - len(keys)) for keys, _ in lists]
    t, count, ordinal = torch.tensor(padded, dtype=torch.long).reshape(spec.num_rows, width, 3).unbind(-1)
    edge = count > 0
    request = torch.tensor(spec.token_request, dtype=torch.long).repeat_interleave(spec.list_heads)
    position = torch.tensor(spec.token_position, dtype=torch.long).repeat_interleave(spec.list_heads)
    of = torch.arange(spec.num_rows) % spec.list_heads
    head = of // spec.lists_per_kv_head
    page = torch.where(edge, case.page_table.long()[request[:, None], t // spec.page_size], 0)
    offset = torch.where(edge, t % spec.page_size, 0)
    at = page, offset, head[:, None].expand_as(page)
    keys, values = (
        torch.where(edge[..., None], gathered(coded, *at, dim, reconstructed) if coded else cache[at].float(), 0.0)
        for cache, coded, dim in (
            (case.k_cache, k, spec.head_dim_qk),
            (case.v_cache, v, spec.head_dim_vo),
        )
    )
    sequence = spec.candidate_kind is CandidateKind.SEQUENCE
    uids = torch.tensor(
        spec.dropout.request_uids if spec.dropout and spec.dropout.request_uids else range(spec.num_requests)
    )
    return Rows(
        q=by_row(spec, case.q),
        k=keys,
        v=values,
        edge=edge,
        counts=count.clamp(min=1),
        key_position=ordinal if sequence else t,
        query_position=torch.tensor([query for _, query in lists]) if sequence else position,
        dropout_query=position,
        qo_head=of[:, None] * spec.heads_per_list + torch.arange(spec.heads_per_list),
        uid=uids[request],
        slot=(page * spec.page_size + offset) * spec.num_kv_heads + head[:, None],
        token=t,
    )


def _attended(case: Case, index: int) -> tuple[list[tuple[int, int, int]], int]:
    """(token, count, ordinal) of each edge of a row, and the query's ordinal."""
    spec = case.spec
    row = spec.row(index)
    seq_len, position = spec.seq_lens[row.request], spec.token_position[index // spec.list_heads]
    entries = case.kv_indices[case.kv_indptr[index] : case.kv_indptr[index + 1]].tolist()
    tokens = [
        token
        for entry in entries
        if entry != PADDING
        for token in range(entry * spec.block_size, min((entry + 1) * spec.block_size, seq_len))
    ]
    times = Counter(tokens)
    distinct = list(times)
    query = len(distinct) - (bool(distinct) and distinct[-1] == position)
    if spec.query_ordinals:
        query = spec.query_ordinals[index]
    repeats = spec.candidate_kind is CandidateKind.MULTISET
    edges = [
        (token, times[token] if repeats else 1, ordinal)
        for ordinal, token in enumerate(distinct)
        if _visible(spec, position, token)
    ]
    if not edges and spec.empty_row is EmptyRowRule.FORBID:
        raise Refused(f"{row} has no edge, which the spec forbids")
    if not edges and spec.empty_row.forces:
        token = position if spec.empty_row is EmptyRowRule.FORCE_SELF else 0
        edges = [(token, 1, 0)]
        query = query if spec.query_ordinals else int(token != position)
    return edges, query


def _visible(spec: AttentionSpec, position: int, token: int) -> bool:
    causal = spec.causal is CausalRule.NONE or token <= position
    return causal and (spec.window_left < 0 or token >= position - spec.window_left)


def by_row(spec: AttentionSpec, x: Tensor) -> Tensor:
    """[num_tokens, num_qo_heads, ...] as FP32 [R, g, ...] of rows."""
    return x.float().reshape(spec.num_rows, spec.heads_per_list, *x.shape[2:])


def branches_of(case: Case) -> list[Case]:
    """Each branch of a case as a case of its own: its lists, which stand one branch after another."""
    spec = replace(case.spec, num_branches=1, query_ordinals=())
    starts = [branch * spec.num_rows for branch in range(case.spec.num_branches)]
    return [
        replace(
            case,
            spec=replace(spec, query_ordinals=case.spec.query_ordinals[start : start + spec.num_rows]),
            kv_indptr=case.kv_indptr[start : start + spec.num_rows + 1],
        )
        for start in starts
    ]


def by_token(spec: AttentionSpec, x: Tensor) -> Tensor:
    """[R, g, ...] of rows as [num_tokens, num_qo_heads, ...]."""
    return x.reshape(spec.num_tokens, spec.num_qo_heads, *x.shape[2:])
