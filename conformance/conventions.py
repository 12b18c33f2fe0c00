"""Conventions: how a problem is handed to a backend that declares them, and which other declarations might explain a
failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sacts.matrices.cell import Cell
from sacts.reference.candidates import CandidateLists
from sacts.reference.forward import edges
from sacts.reference.spec import AttentionSpec, CausalRule

from . import branches
from .adapter import (
    PADDING,
    SEQ_LEN,
    Capabilities,
    Consumes,
    IndexSpace,
    KVLayout,
    LseBase,
    Scale,
    SentinelPlaces,
)
from .build import Problem, build
from .draw import Ints


def spec_for(spec: AttentionSpec, capabilities: Capabilities, num_branches: int = 1) -> AttentionSpec:
    """The spec as the backend sees it: each request once, whatever its branches; a backend of physical slots gets
    tokens that need no mask.
    """
    spec = branches.folded(spec, num_branches)
    if capabilities.index_space is IndexSpace.LOGICAL:
        return spec
    return replace(spec, block_size=1, causal=CausalRule.NONE, window_left=-1)


def problem_for(cell: Cell, replicate: int, capabilities: Capabilities) -> Problem:
    """The problem of a cell with the scale and the causal rule that a backend knows, where it knows no other."""
    own_scale = capabilities.scale is Scale.DEFAULT
    return build(cell, replicate, default_scale=own_scale, causal_rule=capabilities.causal)


def lists_for(problem: Problem, capabilities: Capabilities) -> CandidateLists:
    """The candidate lists in the declared form: raw or validated, logical or physical, with the declared padding; of
    branches those of all rows, branch after branch.
    """
    lists = _lists(problem, capabilities)
    if problem.branches == 1:
        return lists
    return branches.rearranged(lists, branches.rows_of_lists(problem.spec, problem.branches))


def _lists(problem: Problem, capabilities: Capabilities) -> CandidateLists:
    if capabilities.index_space is IndexSpace.PHYSICAL:
        return _physical(problem)
    if capabilities.consumes is Consumes.VALIDATED:
        lists = problem.candidates  # of a multiset each entry stands as often as it counts
        ends = np.concatenate(([0], np.cumsum(lists.counts)))
        return CandidateLists(ends[lists.indptr], np.repeat(lists.indices, lists.counts))
    return _padded(problem.spec, problem.raw, capabilities)


def _physical(problem: Problem) -> CandidateLists:
    """The attended tokens of each row as physical slots."""
    spec = problem.spec
    rows, t, counts = edges(problem.lenient.spec, problem.candidates)
    rows, t = np.repeat(rows, counts), np.repeat(t, counts)
    request = np.asarray(spec.token_request, np.int64)[rows // spec.list_heads]
    page, offset = np.divmod(t, spec.page_size)
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=spec.num_rows))))
    return CandidateLists(indptr, problem.table.table[request, page] * spec.page_size + offset)


def _padded(spec: AttentionSpec, raw: CandidateLists, capabilities: Capabilities) -> CandidateLists:
    rows = np.repeat(np.arange(spec.num_rows), np.diff(raw.indptr))
    padding = raw.indices == PADDING
    order: Ints = np.arange(len(rows))
    if capabilities.sentinel_places is SentinelPlaces.TAIL:
        order = np.lexsort((padding, rows))
    request = np.asarray(spec.token_request, np.int64)[rows // spec.list_heads]
    own_length = np.asarray(spec.seq_lens, np.int64)[request]
    sentinel = own_length if capabilities.sentinel == SEQ_LEN else np.full(len(rows), int(capabilities.sentinel))
    return CandidateLists(raw.indptr, np.where(padding, sentinel, raw.indices)[order])


def converted(problem: Problem, capabilities: Capabilities) -> list[str]:
    """What of this cell the backend does not see because the suite converts it away."""
    lost = []
    if problem.cell.cache != "contiguous" and not capabilities.real_strides:
        lost.append("strided cache made contiguous")
    if capabilities.index_space is IndexSpace.PHYSICAL:
        lost.append("masks and blocks resolved into physical slots")
    if problem.spec.causal not in (CausalRule.NONE, CausalRule.BOTTOM_RIGHT):
        lost.append(f"causal rule {problem.spec.causal}")
    if capabilities.scale is Scale.DEFAULT:
        lost.append("sm_scale is 1 / sqrt(head_dim_qk)")
    return lost


_VALUES: dict[str, tuple[Any, ...]] = {
    "lse_base": tuple(LseBase),
    "empty_lse": (float("-inf"), float("inf"), 0.0),
    "kv_layout": tuple(KVLayout),
    "scale": tuple(Scale),
    "causal": (CausalRule.BOTTOM_RIGHT, CausalRule.TOP_LEFT),
    "index_space": tuple(IndexSpace),
    "sentinel": (PADDING, SEQ_LEN),
    "sentinel_places": tuple(SentinelPlaces),
    "consumes": tuple(Consumes),
    "real_strides": (True, False),
    "packed_kv": (False, True),
    "workspace_zeroed": (False, True),
}


def described(capabilities: Capabilities) -> dict[str, str]:
    """Every convention as it is declared, as text."""
    return {field: str(getattr(capabilities, field)) for field in _VALUES}


def alternatives(declared: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(field, other value) for every convention, as text, the likelier mistakes first."""
    for field, values in _VALUES.items():
        for value in map(str, values):
            if value != declared[field]:
                yield field, value


def declare(capabilities: Capabilities, field: str, value: Any) -> Capabilities:
    """The same capabilities with one convention declared otherwise; `value` may be text. Raises ValueError."""
    for known in _VALUES.get(field, ()):
        if str(value) == str(known):
            return replace(capabilities, **{field: known})
    raise ValueError(f"no convention {field} = {value!r}")
