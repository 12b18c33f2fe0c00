"""What a kernel may hold on its way through one candidate row: its logits, and the running m, l, o after each tile;
GATES.md section 2 "Tile traces", docs/bounds.md section 13.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bounds import GENERIC, allowance
from .candidates import ValidatedCandidates
from .edges import attended
from .forward import evaluate
from .groups import Group, Inputs, groups
from .logit_bounds import U32, logit_error
from .numerics import Numerics
from .paging import PageTable
from .spec import AttentionSpec, CandidateKind

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class RowLogits(NamedTuple):
    """Of one candidate row: logical positions t [k] of its keys, how often it names each, counts [k]; value and bound
    [g, k] of each logit after all terms but ln(count).
    """

    t: Ints
    counts: Ints
    value: Array
    bound: Array


class TileStates(NamedTuple):
    """Running states of one candidate row after each of n tiles: m lies in [m_low, m_high] [n, g]; lse = m + ln l and
    its bound [n, g]; out = o / l, the error allowed in FP32, [n, g, d_vo]; edges [n] so far; trusted [n, g].
    """

    m_low: Array
    m_high: Array
    lse: Array
    lse_bound: Array
    out: Array
    half_width: Array
    edges: Ints
    trusted: Bools


def row_group(
    spec: AttentionSpec, inputs: Inputs, table: PageTable, candidates: ValidatedCandidates, row: int
) -> Group | None:
    """The edges of one candidate row alone, b = r = 1, S its edges in the order of its list; None for an empty row."""
    edges = attended(spec, candidates)
    start, stop = np.searchsorted(edges.row, [row, row + 1])
    if start == stop:
        return None
    part = edges.part(int(start), int(stop))
    group = next(groups(spec, inputs, table, candidates, part))
    b, r = (int(x[0]) for x in np.nonzero(group.rows == row))
    place = {int(t): i for i, t in zip(np.flatnonzero(group.edge[b, r]), group.t[b, group.edge[b, r]], strict=True)}
    keys = np.array([place[int(t)] for t in part.t])
    one, query = slice(b, b + 1), slice(r, r + 1)
    return Group(
        request=group.request,
        rows=group.rows[one, query],
        qo_heads=group.qo_heads[one],
        t=group.t[one, keys],
        key_position=group.key_position[one, keys],
        query_position=group.query_position[one, query],
        q=group.q[one, query],
        k=group.k[one, keys],
        v=group.v[one, keys],
        counts=group.counts[one, query, keys],
        z=group.z[one, query][..., keys],
        slots=group.slots[one, query],
        product_bound=group.product_bound[one, query],
        largest_v=group.largest_v[one],
    )


def row_logits(spec: AttentionSpec, group: Group, numerics: Numerics) -> RowLogits:
    """The logits of a `row_group`."""
    return RowLogits(
        group.t[0], group.counts[0, 0], _without_counts(spec, group)[0, 0], logit_error(spec, group, numerics)[0, 0]
    )


def tile_states(
    spec: AttentionSpec, group: Group, visits: Ints, numerics: Numerics, *, one_by_one: bool = False
) -> TileStates:
    """The running states of a `row_group` after each tile: `visits` [n, S], how often each key was visited until then.
    A sink logit joins after the last tile and is no part of them, nor is the merge of splits. `one_by_one`: repeats
    are visited as often as they are named, so that no logit of the maximum has a count in it.
    """
    spec = replace(spec, sink_logits=())
    numerics = replace(numerics, splits=False)
    prefixes = _prefixes(spec, group, visits)
    rows = evaluate(spec, prefixes)
    half_width, lse_bound, trusted = allowance(spec, prefixes, rows, numerics, GENERIC)
    some = np.asarray(prefixes.edge.any(axis=-1))[0, :, None]
    error = np.where(prefixes.edge[:, :, None], logit_error(spec, prefixes, numerics), 0.0).max(axis=-1, initial=0.0)[0]
    top = rows.state.m[0]
    if one_by_one:
        single = _without_counts(spec, prefixes)
        top = np.where(prefixes.edge[:, :, None], single, -np.inf).max(axis=-1, initial=-np.inf)[0]
    with np.errstate(invalid="ignore"):
        reach = np.where(some, error + 4 * U32 * np.abs(top), 0.0)
    return TileStates(
        m_low=top - numerics.lag * math.log(2) - reach,
        m_high=top + reach,
        lse=rows.lse[0],
        lse_bound=lse_bound[0],
        out=rows.out[0],
        half_width=half_width[0] + 2 * U32 * np.abs(rows.out[0]),
        edges=prefixes.counts.sum(axis=-1)[0],
        trusted=trusted[0],
    )


def _prefixes(spec: AttentionSpec, group: Group, visits: Ints) -> Group:
    """One query for each prefix: what was visited so far [n, S] are its edges, no more than the row names."""
    n = len(visits)
    counts = np.minimum(visits, group.counts[0, 0])[None]
    z = np.repeat(_without_counts(spec, group), n, axis=1)
    if spec.candidate_kind is CandidateKind.MULTISET:
        z = z + np.log(np.maximum(counts, 1))[:, :, None]
    return replace(
        group,
        rows=np.repeat(group.rows, n, axis=1),
        query_position=np.repeat(group.query_position, n, axis=1),
        q=np.repeat(group.q, n, axis=1),
        counts=counts,
        z=z,
        slots=np.repeat(group.slots, n, axis=1),
        product_bound=np.repeat(group.product_bound, n, axis=1),
    )


def _without_counts(spec: AttentionSpec, group: Group) -> Array:
    if spec.candidate_kind is not CandidateKind.MULTISET:
        return group.z
    return group.z - np.log(np.maximum(group.counts, 1))[:, :, None]
