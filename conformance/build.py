"""Cell -> Problem: everything a cell decides except the values of q, K and V, in NumPy.

The seed is the cell's id and the replicate, nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sacts.matrices.cell import Cell
from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.edges import row_kv_heads
from sacts.reference.formats import round_to
from sacts.reference.forward import Inputs, edges
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import (
    AttentionSpec,
    CausalRule,
    DType,
    EmptyRowRule,
    EpilogueKind,
    Hints,
    ListsPer,
    Reduction,
    Route,
    Row,
    Schedule,
)

from . import branches
from .adapter import PADDING
from .codes import Scales, scales_of
from .draw import Array, Draw, Ints
from .lists import raw_lists
from .page_maps import PAGE_MAPS, page_count
from .terms import terms_of


@dataclass(frozen=True)
class Problem:
    """A spec with its candidates and paging. `pages` [L]: the physical pages that hold data, sorted: those of the
    requests and decoys that none owns. A slot is (live page index, offset); `slot_request` [L, page_size] is its
    owner or -1, `slot_token` its logical position there. `k_scales`, `v_scales`: of K and V in codes, None where they
    are stored as they are. `branches`: of a call with gated branches; each request of the call then stands so often in
    `spec`, once per branch (`branches`), and `Launcher` makes one launch for each.
    """

    cell: Cell
    replicate: int
    spec: AttentionSpec
    hints: Hints
    table: PageTable
    raw: CandidateLists
    candidates: ValidatedCandidates
    pages: Ints
    slot_request: Ints
    slot_token: Ints
    k_scales: Scales | None = None
    v_scales: Scales | None = None
    branches: int = 1

    def draw(self, *purpose: object) -> Draw:
        """The stream of this problem for one purpose."""
        return Draw(self.cell.id, self.replicate, *purpose)

    @cached_property
    def needed(self) -> NDArray[np.bool_]:
        """Slots that some row attends: [L, page_size, num_kv_heads]. Nothing else may influence a result."""
        rows, t, _ = edges(self.lenient.spec, self.candidates)
        token, head = rows // self.spec.list_heads, row_kv_heads(self.spec, rows)
        request = np.asarray(self.spec.token_request, np.int64)[token]
        page, offset = np.divmod(t, self.spec.page_size)
        needed = np.zeros((*self.slot_request.shape, self.spec.num_kv_heads), bool)
        needed[np.searchsorted(self.pages, self.table.table[request, page]), offset, head] = True
        return needed

    @property
    def lenient(self) -> Problem:
        """The same; where the spec forbids empty rows, with one that leaves them zero."""
        forbids = self.spec.empty_row is EmptyRowRule.FORBID
        return replace(self, spec=replace(self.spec, empty_row=EmptyRowRule.ZERO)) if forbids else self

    @property
    def forbidden(self) -> list[Row]:
        """The rows without an edge, where the spec forbids them: no backend may compute such a problem."""
        if self.spec.empty_row is not EmptyRowRule.FORBID:
            return []
        rows, _, _ = edges(self.lenient.spec, self.candidates)
        return [self.spec.row(int(row)) for row in np.setdiff1d(np.arange(self.spec.num_rows), rows)]

    @property
    def num_calls(self) -> int:
        """Requests of the call, each counted once."""
        return self.spec.num_requests // self.branches

    def position_in(self, request: int) -> Ints:
        """Logical position of each slot in one request, -1 where the page is not the request's: [L, page_size]."""
        spec = self.spec
        position = np.full(self.slot_request.shape, -1, np.int64)
        count = page_count(spec.seq_lens[request], spec.page_size)
        live = np.searchsorted(self.pages, self.table.table[request, :count])
        position[live] = np.arange(count * spec.page_size).reshape(count, spec.page_size)
        return position

    def inputs(self, q: Array, k: Array, v: Array) -> Inputs:
        """Values for this problem: q [tokens, heads, d], k and v [L, page_size, num_kv_heads, d], each brought to the
        nearest value that its codes can stand for where it is stored in codes.
        """
        k, v = (x if scales is None else scales.on_grid(x) for scales, x in ((self.k_scales, k), (self.v_scales, v)))
        return Inputs(q, PagedCache(self.pages, k), PagedCache(self.pages, v), self._gate())

    def _gate(self) -> Array | None:
        """A gate for the epilogue that needs one, of either sign, exact in the dtype."""
        if self.spec.epilogue.kind is not EpilogueKind.GATE:
            return None
        shape = (self.spec.num_tokens, self.spec.num_qo_heads, self.spec.head_dim_vo)
        return round_to(self.draw("gate", shape[0]).normal(shape), self.spec.dtype)


SM_SCALE = 0.75  # times 1 / sqrt(d): not the usual default, so that a backend that ignores sm_scale is found


def build(
    cell: Cell,
    replicate: int = 0,
    *,
    default_scale: bool = False,
    causal_rule: CausalRule = CausalRule.BOTTOM_RIGHT,
) -> Problem:
    """The problem of a cell. The same arguments give the same problem on any machine.

    For backends that know no other: `default_scale`: sm_scale is 1 / sqrt(head_dim_qk); `causal_rule`: the rule of
    causal cells.
    """
    spec = AttentionSpec(
        num_qo_heads=cell.heads[0],
        num_kv_heads=cell.heads[1],
        head_dim_qk=cell.dim,
        head_dim_vo=cell.vdim or cell.dim,
        page_size=cell.page,
        seq_lens=cell.kv,
        qo_lens=cell.qo_lens,
        dtype=DType(cell.dtype),
        sm_scale=(1.0 if default_scale else SM_SCALE) / math.sqrt(cell.dim),
        block_size=cell.block,
        causal=CausalRule.NONE if cell.causal == CausalRule.NONE else causal_rule,
        window_left=cell.window,
        lists=ListsPer(cell.lists),
        **terms_of(cell, Draw(cell.id, replicate, "terms")),
    )
    draw = Draw(cell.id, replicate, "layout")
    table, pages = PAGE_MAPS[cell.map](spec, draw)
    if cell.branches > 1:
        spec, table = branches.unfolded(spec, cell.branches), branches.unfolded_table(table, cell.branches)
    hints = Hints(
        num_splits=cell.splits,
        kv_tile=cell.tile,
        q_tile=cell.qtile,
        schedule=Schedule(cell.schedule),
        route=Route(cell.route),
        reduction=Reduction(cell.reduction),
    )
    problem = _assembled(cell, replicate, spec, hints, table, pages, raw_lists(cell, spec, draw))
    return replace(problem, branches=cell.branches)


def last_query(problem: Problem, request: int, *purpose: object) -> Problem:
    """The last query of one request as a problem of its own: the same position, lists, masks, kind of page map and
    hints, on other pages. Of a call with branches: one of them, alone. `purpose` names the draw of the pages. The
    request must have a query.

    Under the top-left rule, where a query's position is its place in the request, the earlier queries stay.
    """
    spec, tokens = problem.spec, slice(*problem.spec.qo_indptr[request : request + 2])
    if spec.causal is not CausalRule.TOP_LEFT:
        tokens = slice(tokens.stop - 1, tokens.stop)
    rows = slice(tokens.start * spec.list_heads, tokens.stop * spec.list_heads)
    dropout = spec.dropout and replace(
        spec.dropout, request_uids=((spec.dropout.request_uids or range(spec.num_requests))[request],)
    )
    alone = replace(
        spec,
        seq_lens=spec.seq_lens[request : request + 1],
        qo_lens=(tokens.stop - tokens.start,),
        query_positions=spec.query_positions[tokens],
        query_ordinals=spec.query_ordinals[rows],
        dropout=dropout,
    )
    table, pages = PAGE_MAPS[problem.cell.map](alone, problem.draw("pages", *purpose))
    indptr = problem.raw.indptr[rows.start : rows.stop + 1]
    raw = CandidateLists(indptr - indptr[0], problem.raw.indices[indptr[0] : indptr[-1]])
    return _assembled(problem.cell, problem.replicate, alone, problem.hints, table, pages, raw)


def _assembled(
    cell: Cell, replicate: int, spec: AttentionSpec, hints: Hints, table: PageTable, pages: Ints, raw: CandidateLists
) -> Problem:
    slot_request = np.full((len(pages), spec.page_size), -1, np.int64)
    slot_token = np.zeros_like(slot_request)
    for request, seq_len in enumerate(spec.seq_lens):
        for page in range(page_count(seq_len, spec.page_size)):
            live = np.searchsorted(pages, table.table[request, page])
            slot_request[live] = request
            slot_token[live] = page * spec.page_size + np.arange(spec.page_size)
    scales: dict[str, Any] = {}
    if spec.k_codec or spec.v_codec:
        where = pages, slot_request, slot_token, (cell.id, replicate, "scales")
        scales = {f"{name}_scales": scales_of(spec, name, *where) for name in ("k", "v")}
    return Problem(
        cell=cell,
        replicate=replicate,
        spec=spec,
        hints=hints,
        table=table,
        raw=raw,
        candidates=validate(spec, raw, table, sentinels=(PADDING,)),
        pages=pages,
        slot_request=slot_request,
        slot_token=slot_token,
        **scales,
    )
