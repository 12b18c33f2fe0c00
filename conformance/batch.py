"""Several problems as one launch: their requests stand side by side, each on pages of its own; what comes out is cut
apart again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sacts.reference.candidates import CandidateLists, ValidatedCandidates
from sacts.reference.forward import Inputs
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec

from . import branches
from .build import Problem
from .codes import Scales, joined
from .launch import Observed

Ints = NDArray[np.int64]


def join(problems: Sequence[Problem]) -> Problem:
    """One problem whose requests are those of `problems`, in their order; each keeps lists, page-map kind, stale
    columns and decoys. The first keeps its physical pages; page 0, where nobody owns it, is one page for all.

    The problems must be of one cell and replicate. Raises ValueError where they have different numbers of branches.
    """
    first = problems[0]
    if len(problems) == 1:
        return first
    shifts = _page_shifts(problems)
    pages = np.unique(np.concatenate([_moved(p, p.pages, shift) for p, shift in zip(problems, shifts, strict=True)]))
    slot_request = np.full((len(pages), first.spec.page_size), -1, np.int64)
    slot_token = np.zeros_like(slot_request)
    requests = 0
    for problem, shift in zip(problems, shifts, strict=True):
        live = np.searchsorted(pages, _moved(problem, problem.pages, shift))
        owned = problem.slot_request >= 0
        slot_request[live] = np.where(owned, problem.slot_request + requests, slot_request[live])
        slot_token[live] = np.where(owned, problem.slot_token, slot_token[live])
        requests += problem.spec.num_requests
    return replace(
        first,
        spec=_joined_spec([problem.spec for problem in problems]),
        table=_joined_tables(problems, shifts, int(pages[-1]) + 1),
        raw=CandidateLists(*_joined_lists([(p.raw.indptr, p.raw.indices) for p in problems])),
        candidates=ValidatedCandidates(
            *_joined_lists([(p.candidates.indptr, p.candidates.indices) for p in problems]),
            np.concatenate([p.candidates.counts for p in problems]),
            sum(p.candidates.duplicates for p in problems),
        ),
        pages=pages,
        slot_request=slot_request,
        slot_token=slot_token,
        k_scales=_joined_scales([problem.k_scales for problem in problems], problems, shifts, pages),
        v_scales=_joined_scales([problem.v_scales for problem in problems], problems, shifts, pages),
        branches=branches.joined([problem.branches for problem in problems]),
    )


def _joined_scales(
    parts: Sequence[Scales | None], problems: Sequence[Problem], shifts: Sequence[int], pages: Ints
) -> Scales | None:
    live = [np.searchsorted(pages, _moved(p, p.pages, shift)) for p, shift in zip(problems, shifts, strict=True)]
    coded = [(scales, places) for scales, places in zip(parts, live, strict=True) if scales]
    return joined(coded, len(pages)) if coded else None


def join_inputs(whole: Problem, parts: Sequence[tuple[Problem, Inputs]]) -> Inputs:
    """The values of `whole`, which joins the problems of `parts` in this order."""
    shape = (*whole.slot_request.shape, whole.spec.num_kv_heads)
    k = np.zeros((*shape, whole.spec.head_dim_qk))
    v = np.zeros((*shape, whole.spec.head_dim_vo))
    for (problem, inputs), shift in zip(parts, _page_shifts([problem for problem, _ in parts]), strict=True):
        live = np.searchsorted(whole.pages, _moved(problem, problem.pages, shift))
        k[live], v[live] = inputs.k.data, inputs.v.data
    q = np.concatenate([inputs.q for _, inputs in parts])
    gates = [inputs.gate for _, inputs in parts if inputs.gate is not None]
    gate = np.concatenate(gates) if gates else None
    return Inputs(q, PagedCache(whole.pages, k), PagedCache(whole.pages, v), gate)


def cut(observed: Observed, problems: Sequence[Problem]) -> Iterator[Observed]:
    """What came back for each problem of a joined launch."""
    ends = list(accumulate(problem.spec.num_tokens for problem in problems))
    for problem, end in zip(problems, ends, strict=True):
        tokens = slice(end - problem.spec.num_tokens, end)
        yield Observed(
            out=observed.out[tokens],
            lse=None if observed.lse is None else observed.lse[tokens],
            out_bits=observed.out_bits[tokens],
            lse_bits=None if observed.lse_bits is None else observed.lse_bits[tokens],
        )


def live_pages(whole: Problem, problems: Sequence[Problem]) -> list[Ints]:
    """Where the live pages of each problem lie among those of `whole`, which joins them in this order."""
    if len(problems) == 1:
        return [np.arange(len(whole.pages))]
    shifts = _page_shifts(problems)
    return [np.searchsorted(whole.pages, _moved(p, p.pages, shift)) for p, shift in zip(problems, shifts, strict=True)]


def _lowest(problem: Problem) -> int:
    """The first physical page that moves: page 0 stays where it is nobody's."""
    stays = problem.pages[0] == 0 and (problem.slot_request[0] < 0).all() and len(problem.pages) > 1
    return int(problem.pages[int(stays)])


def _page_shifts(problems: Sequence[Problem]) -> list[int]:
    """How far each problem's pages move up, so that they follow those of the one before."""
    shifts, end = [], None
    for problem in problems:
        low, high = _lowest(problem), int(problem.pages[-1]) + 1
        shift = 0 if end is None else end - low
        shifts.append(shift)
        end = high + shift
    return shifts


def _moved(problem: Problem, pages: Ints, shift: int) -> Ints:
    return np.where(pages < _lowest(problem), pages, pages + shift)


def _joined_lists(lists: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    starts = accumulate((len(indices) for _, indices in lists), initial=0)
    indptr = [indptr[:-1] + start for (indptr, _), start in zip(lists, starts, strict=False)]
    total = sum(len(indices) for _, indices in lists)
    return np.concatenate([*indptr, [total]]), np.concatenate([indices for _, indices in lists])


def _joined_tables(problems: Sequence[Problem], shifts: Sequence[int], num_pages: int) -> PageTable:
    columns = max(problem.table.table.shape[1] for problem in problems)
    rows, owned = [], []
    for problem, shift in zip(problems, shifts, strict=True):
        for mine, pages in zip(problem.table.table, problem.table.owned, strict=True):
            stale = np.resize(mine[len(pages) :], columns - len(pages))
            rows.append(_moved(problem, np.concatenate((mine[: len(pages)], stale)), shift))
            owned.append(frozenset(_moved(problem, np.array(sorted(pages), np.int64), shift).tolist()))
    return PageTable(np.array(rows), problems[0].table.page_size, num_pages, tuple(owned))


def _joined_spec(specs: Sequence[AttentionSpec]) -> AttentionSpec:
    """The terms that belong to requests, tokens or rows one after the other; a request keeps the identity that its
    dropout is drawn for.
    """
    changes: dict[str, Any] = {
        name: tuple(value for spec in specs for value in getattr(spec, name))
        for name in ("seq_lens", "qo_lens", "query_positions", "query_ordinals")
    }
    if specs[0].dropout:
        uids = tuple(
            uid for spec in specs if spec.dropout for uid in spec.dropout.request_uids or range(spec.num_requests)
        )
        changes["dropout"] = replace(specs[0].dropout, request_uids=uids)
    return replace(specs[0], **changes)
