"""What is made before a launch: raw lists normalised on the device, empty rows decided, and the tables of the terms.

A plan holds while its spec, its hints and the lists of its case do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from sacts.conformance.adapter import PADDING, Case, Refused
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, EmptyRowRule, FallbackReason, Hints

from .copies import copied, memory_for
from .index import Lists, csr, distinct
from .launches import Repeats
from .limits import programs_of, q_tile_of, tile_of
from .tables import Tables, tables_of
from .tasks import Rows, Tasks, tasks_of
from .tuning import chosen, programs


@dataclass(frozen=True)
class MadeFor:
    """What a plan was made for, as far as the host knows it: `entries` of the raw lists."""

    spec: AttentionSpec
    hints: Hints
    entries: int
    device: torch.device
    fallback: FallbackReason | None

    def check(self, case: Case) -> None:
        """Raises Refused, with what was planned and what is given, for a case that the plan was not made for."""
        spec = case.spec
        for what, planned, given in (
            ("rows", self.spec.num_rows, spec.num_rows),
            ("entries of kv_indices", self.entries, case.kv_indices.numel()),
            ("device", self.device, case.q.device),
            ("fallback", self.fallback, case.fallback),
            *((f"hint {name}", *_both(self.hints, case.hints, name)) for name in _names(Hints)),
            *((f"spec.{name}", *_both(self.spec, spec, name)) for name in _names(AttentionSpec)),
        ):
            if planned is not given and planned != given:
                raise Refused(f"the plan was made for another case: {what}: planned for {planned}, got {given}")


def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _both(planned: object, given: object, name: str) -> tuple[object, object]:
    return getattr(planned, name), getattr(given, name)


@dataclass(frozen=True)
class Plan:
    """What the kernels read beside the case, all on its device. None: the spec has no such term.

    `kv_indptr`, `kv_indices`: the normalised lists, of a forced row the entry of its forced token alone. int32
    [num_branches * num_tokens], the same of each branch: `token_position`. int32 [num_lists]: `forced` (the token, -1
    elsewhere), `query_ordinals`. [nnz]: `ordinals` int32, of the first token of each entry; `log2_counts` FP32.
    `descriptions`: memory for those of K and V, where tiles are copied by them (`copies`), uint8.
    `made_for`: the case, as far as it may not change. `masks`: of a fallback, as `sdpa.masks_of` makes them.
    `repeats`: what was launched last.
    """

    made_for: MadeFor
    tasks: Tasks
    kv_indptr: Tensor
    kv_indices: Tensor
    token_position: Tensor
    tables: Tables
    forced: Tensor | None = None
    ordinals: Tensor | None = None
    query_ordinals: Tensor | None = None
    log2_counts: Tensor | None = None
    descriptions: Tensor | None = None
    masks: list[list[Tensor | None]] | None = None
    repeats: Repeats = field(default_factory=Repeats, compare=False)


def plan_of(case: Case) -> Plan:
    """The plan of a case. Raises Refused, naming the row, for an empty one that the spec forbids."""
    spec, device = case.spec, case.q.device
    lists = normalized(case)
    token_request = torch.tensor(spec.token_request, device=device).repeat(spec.num_branches)
    token_position = torch.tensor(spec.token_position, dtype=torch.int32, device=device).repeat(spec.num_branches)
    forced = None
    if spec.empty_row is not EmptyRowRule.ZERO:
        lists, forced = _with_forced_tokens(spec, lists, token_position)
    ordinals = query_ordinals = None
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        ordinals, query_ordinals = _ordinals(spec, lists, token_position, forced)
    tasks = _tasks(case, lists, token_request, token_position, forced)
    return Plan(
        made_for=MadeFor(spec, case.hints, case.kv_indices.numel(), device, case.fallback),
        tasks=tasks,
        kv_indptr=lists.kv_indptr,
        kv_indices=lists.kv_indices,
        token_position=token_position,
        tables=tables_of(spec, device),
        forced=forced,
        ordinals=ordinals,
        query_ordinals=query_ordinals,
        log2_counts=lists.counts.float().log2() if spec.candidate_kind is CandidateKind.MULTISET else None,
        descriptions=_descriptions(case, tasks),
    )


def _descriptions(case: Case, tasks: Tasks) -> Tensor | None:
    """Memory for the descriptions of all programs, where tiles are copied by them."""
    spec, hints, device = case.spec, case.hints, case.q.device
    if not copied(case, tasks.tile):
        return None
    return memory_for(programs(tasks.num_tasks * programs_of(spec, hints.route), hints, device), device)


def _tasks(case: Case, lists: Lists, token_request: Tensor, token_position: Tensor, forced: Tensor | None) -> Tasks:
    """The task table of lists, tokens of one list together where the hints say so, or where most tokens have one."""
    spec, hints, choice = case.spec, case.hints, chosen(case)
    q_tile = q_tile_of(spec, hints.route, choice.q_tile)
    repeats = _repeats(spec, lists, token_request, token_position, forced) if q_tile > 1 else None
    if repeats is not None and not choice.asked and int(repeats.sum()) * 2 < len(repeats):
        q_tile = 1
    request = token_request.repeat_interleave(spec.list_heads)
    return tasks_of(
        Rows(lists.kv_indptr[:-1], lists.kv_indptr.diff(), spec.block_size, request, repeats, spec.list_heads),
        choice.num_splits,
        tile_of(spec, choice.tile_of(q_tile).kv_tile),
        schedule=hints.schedule,
        q_tile=q_tile,
        least_part=choice.least_part,
    )


def normalized(case: Case) -> Lists:
    """N(D, W, A, T) of each row, equation (16): no padding, sorted without repeats, or in the order of a sequence."""
    spec = case.spec
    rows = torch.repeat_interleave(torch.arange(spec.num_lists, device=case.q.device), case.kv_indptr.diff())
    real = case.kv_indices != PADDING
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        entries = case.kv_indices[real]
        return csr(rows[real], entries, torch.ones_like(entries), spec.num_lists)
    return distinct(rows[real], case.kv_indices[real], spec.num_lists)


def _repeats(
    spec: AttentionSpec, lists: Lists, token_request: Tensor, token_position: Tensor, forced: Tensor | None
) -> Tensor:
    """Whether each row has the list of the row before it with the same head, of the same request and branch, with the
    same counts: bool [num_lists]. A forced row stands alone, and so does one that is far from it under a window: what
    lies between the tokens that either sees is not loaded.
    """
    rows, heads = lists.rows, spec.list_heads
    starts, lengths = lists.kv_indptr[:-1].long(), lists.kv_indptr.diff()
    row = torch.arange(spec.num_lists, device=rows.device)
    before = (row - heads).clamp(min=0)
    repeats = (row // heads % spec.num_tokens > 0) & (lengths == lengths[before])
    repeats &= token_request[row // heads] == token_request[before // heads]
    if spec.window_left >= 0 and spec.causal is not CausalRule.NONE:
        position = token_position[row // heads].long()
        repeats &= (position - position[before]).abs() <= spec.window_left + 1
    if forced is not None:
        repeats &= (forced < 0) & (forced[before] < 0)
    at = torch.arange(len(rows), device=rows.device) - starts[rows] + starts[before][rows]
    at = at.clamp(max=max(0, len(rows) - 1))  # of rows of other lengths, which repeat nothing
    differs = (lists.kv_indices != lists.kv_indices[at]) | (lists.counts != lists.counts[at])
    repeats[rows[differs]] = False
    return repeats


def _by_row(spec: AttentionSpec, lists: Lists, token_position: Tensor) -> tuple[Tensor, Tensor]:
    """Position of the query and T, of the row of each entry: [nnz]."""
    token = lists.rows // spec.list_heads
    seq_lens = torch.tensor([spec.seq_lens[request] for request in spec.token_request], device=token.device)
    return token_position[token].long(), seq_lens.repeat(spec.num_branches)[token]


def _with_forced_tokens(spec: AttentionSpec, lists: Lists, token_position: Tensor) -> tuple[Lists, Tensor]:
    """The lists, those of rows without an edge replaced by the entry of their forced token; that token, or -1. Raises
    Refused.
    """
    position, seq_len = _by_row(spec, lists, token_position)
    first = lists.kv_indices.long() * spec.block_size
    last = torch.minimum(first + spec.block_size, seq_len) - 1
    if spec.causal is not CausalRule.NONE:
        last = torch.minimum(last, position)
    if spec.window_left >= 0:
        first = torch.maximum(first, position - spec.window_left)
    rows = lists.rows
    empty = torch.ones(spec.num_lists, dtype=torch.bool, device=rows.device)
    empty[rows[first <= last]] = False
    forced_rows = empty.nonzero()[:, 0]
    if spec.empty_row is EmptyRowRule.FORBID and len(forced_rows):
        raise Refused(f"{_named(spec, int(forced_rows[0]))} has no edge, which empty_row forbid forbids")
    own = token_position[forced_rows // spec.list_heads]
    token = own if spec.empty_row is EmptyRowRule.FORCE_SELF else torch.zeros_like(own)
    forced = torch.full((spec.num_lists,), -1, dtype=torch.int32, device=rows.device)
    forced[forced_rows] = token
    kept = ~empty[rows]
    row, order = torch.cat((rows[kept], forced_rows)).sort(stable=True)
    entries = torch.cat((lists.kv_indices[kept], token // spec.block_size))[order]
    counts = torch.cat((lists.counts[kept], torch.ones_like(token)))[order]
    return csr(row, entries, counts, spec.num_lists), forced


def _named(spec: AttentionSpec, index: int) -> str:
    """A row in words, with its branch where there are several."""
    branch, row = divmod(index, spec.num_rows)
    return f"{spec.row(row)}{f', branch {branch},' if spec.num_branches > 1 else ''}"


def _ordinals(
    spec: AttentionSpec, lists: Lists, token_position: Tensor, forced: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The ordinal of the first token of each entry among the committed tokens of its row, and that of each query: k - 1
    where the list ends with the query's own token, else k. A forced token is a list of one.
    """
    position, seq_len = _by_row(spec, lists, token_position)
    rows, first = lists.rows, lists.kv_indices.long() * spec.block_size
    committed = (seq_len - first).clamp(0, spec.block_size)
    before = torch.cat((committed.new_zeros(1), committed.cumsum(0)))
    ordinals = before[:-1] - before[lists.kv_indptr[:-1].long()][rows]
    query = before[lists.kv_indptr[1:].long()] - before[lists.kv_indptr[:-1].long()]
    ends_with_own = (first + committed - 1 == position) & (committed > 0)
    last_of_row = torch.where(committed > 0, torch.arange(len(rows), device=rows.device), -1)
    last = torch.full_like(query, -1).scatter_reduce(0, rows, last_of_row, "amax")
    query[last >= 0] -= ends_with_own[last[last >= 0]].long()
    if forced is not None:
        ordinals = torch.where(forced[rows] >= 0, -(forced[rows] % spec.block_size), ordinals)
        own = token_position[torch.arange(spec.num_lists, device=rows.device) // spec.list_heads]
        query = torch.where(forced >= 0, (forced != own).long(), query)
    if spec.query_ordinals:
        query = torch.tensor(spec.query_ordinals, device=rows.device)
    return ordinals.to(torch.int32), query.to(torch.int32)
