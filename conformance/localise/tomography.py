"""Tomography: with V one-hot over groups of slots, out *is* the probability row, summed over groups (GATES.md section
7). Groups that agree are not looked at further, the others are cut again: O(log(slots)) launches for any context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sacts.reference.formats import FORMATS, half_spacing

from ..build import Problem
from .launches import BudgetSpent, Family, Meter, Seen
from .slots import Slots, Walk, joined, others, walk

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

REFINED = 8  # groups that are looked into at a time, the most wrong ones
AGREEING = 0.1  # share of a row's mass that must fit the gain which its lse means, for that gain to be believed
SUSPECTED = 0.5  # correlation of a residual with a slot's code from which the slot is a suspect


@dataclass(frozen=True)
class Groups:
    """Slots in groups, one group a channel: `group` [n] of each slot."""

    slots: Slots
    group: Ints

    def one_hot(self, shape: tuple[int, ...]) -> Array:
        """V [L, page_size, num_kv_heads, d_vo]: 1 in the channel of its slot's group."""
        v = np.zeros(shape)
        v[(*self.slots.at, self.group)] = 1.0
        return v


@dataclass(frozen=True)
class Masses:
    """The weight of each group in one output row: observed, expected, and the error allowed at gain 1 [groups].

    `gain`: what the weights of most of the row are multiplied by, 1 where it is within the bounds. `off`: groups that
    do not have their share even so.
    """

    groups: Groups
    observed: Array
    expected: Array
    gain: float
    off: Bools

    @property
    def total(self) -> float:
        """Of all groups."""
        return float(self.observed.sum())

    @cached_property
    def size(self) -> Ints:
        """Slots of each group."""
        return np.bincount(self.groups.group, minlength=len(self.observed))


@dataclass(frozen=True)
class Decoded:
    """One output row, decoded. `first`: its masses over all live slots; slots with their observed and expected weight
    where they differ; `rest`: groups that are wrong but were not cut further. lse: observed (NaN: none) and expected.
    """

    walk: Walk
    first: Masses
    slots: Slots
    observed: Array
    expected: Array
    rest: int
    lse: tuple[float, float]

    @property
    def gain(self) -> float:
        """Of the first look."""
        return self.first.gain


def decode(
    meter: Meter, family: Family, token: int, qo_head: int, suspects: Slots | None = None, refine: bool = True
) -> Decoded:
    """Decode output row (token, query head) under `family`'s q and K. Raises what a launch raises; a spent budget ends
    the search with what is known, but for the first launch.
    """
    problem, channels = family.problem, family.problem.spec.head_dim_vo
    mine = walk(problem, token, qo_head, family.hints)
    groups = _first_groups(problem, mine, others(problem, token, qo_head, mine), channels, suspects)
    seen = _look(meter, family, groups)
    first = _masses(family, groups, seen, token, qo_head)
    found, rest = _refined(meter, family, first, mine, (token, qo_head)) if refine else ([], int(first.off.sum()))
    lse = np.nan if seen.observed.lse is None else float(seen.observed.lse[token, qo_head])
    slots = Slots(*(np.concatenate([getattr(s, f) for s, _, _ in found] or [np.zeros(0, np.int64)]) for f in _FIELDS))
    observed, right = (np.concatenate([part[i] for part in found] or [np.zeros(0)]) for i in (1, 2))
    return Decoded(mine, first, slots, observed, right, rest, (lse, float(seen.expected.lse[token, qo_head])))


_FIELDS = ("page", "offset", "head")


def suspects_of(problem: Problem, v: Array, residual: Array, limit: int) -> Slots:
    """Slots whose code in V [L, page_size, num_kv_heads, d] explains a residual [d] of a sum of codes, up to sign: the
    best first, at most `limit`.
    """
    codes = v.reshape(-1, v.shape[-1])
    norms = (codes * codes).sum(axis=-1)
    match = np.abs(codes @ residual) / np.where(norms > 0, norms, np.inf)
    best = np.argsort(-match, kind="stable")[:limit]
    chosen = best[match[best] > SUSPECTED]
    page, offset, head = np.unravel_index(chosen, v.shape[:-1])
    return Slots(page, offset, head)


def _first_groups(problem: Problem, mine: Walk, rest: Slots, channels: int, suspects: Slots | None) -> Groups:
    """Suspects alone; then edges in their order, no group across a tile where channels suffice; then all others."""
    if len(mine) + len(rest) <= channels:
        return Groups(joined(mine.slots, rest), np.arange(len(mine) + len(rest)))
    shape = (*problem.slot_request.shape, problem.spec.num_kv_heads)
    alone = np.zeros(shape, bool)
    slots, group = Slots(*(np.zeros(0, np.int64),) * 3), np.zeros(0, np.int64)
    if suspects is not None and len(suspects):
        slots = suspects.take(slice(channels // 4))
        group = np.arange(len(slots))
        alone[slots.at] = True
    left = channels - len(slots)
    inner = ~alone[mine.slots.at]
    outer = ~alone[rest.at]
    for_edges = min(int(inner.sum()), left - min(int(outer.sum()), left // 4))
    for_rest = min(int(outer.sum()), left - for_edges)
    own = _by_tile(mine.tile[inner], for_edges)
    far = _evenly(int(outer.sum()), for_rest)
    slots = joined(joined(slots, mine.slots.take(np.flatnonzero(inner))), rest.take(np.flatnonzero(outer)))
    return Groups(slots, np.concatenate((group, len(group) + own, len(group) + for_edges + far)))


def _evenly(n: int, parts: int) -> Ints:
    """n neighbours in `parts` groups of almost one size: [n]."""
    return np.arange(n) * parts // max(n, 1)


def _by_tile(tile: Ints, parts: int) -> Ints:
    """Edges, sorted by tile, in at most `parts` groups; none holds a part of a tile and something else."""
    tiles, size = np.unique(tile, return_counts=True)
    if len(tiles) > parts:
        return _evenly(len(tiles), parts)[np.repeat(np.arange(len(tiles)), size)]
    share = np.minimum(size, parts // max(len(tiles), 1))
    groups = [first + _evenly(n, k) for first, n, k in zip(np.cumsum(share) - share, size, share, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *groups])


def _look(meter: Meter, family: Family, groups: Groups) -> Seen:
    return meter(family.with_v(groups.one_hot(family.inputs.v.data.shape), integers=True))


def _masses(family: Family, groups: Groups, seen: Seen, token: int, qo_head: int, gain: float | None = None) -> Masses:
    """The row's masses; `gain` is estimated where none is given: e^(right lse - lse) where part of the row fits it."""
    count = int(groups.group.max(initial=-1)) + 1
    observed, right, width, low, high = (
        x[token, qo_head, :count]
        for x in (
            seen.observed.out,
            seen.expected.out,
            seen.expected.half_width,
            seen.expected.out_lo,
            seen.expected.out_hi,
        )
    )
    inside, edges = (observed >= low) & (observed <= high), int(seen.expected.edges[token, qo_head])
    if gain is None:
        majority = right[inside].sum() > 0.5 * right.sum()
        own = None if inside.all() else _by_lse(family, groups, seen, token, qo_head, whole=majority)
        gain = own or _gain(family, observed, right, inside, edges)
    if gain == 1.0:
        return Masses(groups, observed, right, gain, ~inside)
    dtype = family.problem.spec.dtype
    with np.errstate(invalid="ignore"):
        share = gain * right
        larger = np.nan_to_num(np.maximum(np.abs(observed), np.abs(share)))
        allowed = abs(gain) * width + 2 * half_spacing(larger, dtype)
        allowed += 0.0 if family.equal else 4 * FORMATS[dtype].u * np.abs(share)  # of the gain itself
        return Masses(groups, observed, right, gain, ~(np.abs(observed - share) <= allowed))


def _by_lse(family: Family, groups: Groups, seen: Seen, token: int, qo_head: int, *, whole: bool) -> float | None:
    """The gain that the row's lse means, where a part of the row fits it, or the `whole` row."""
    if seen.observed.lse is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        gain = float(np.exp(seen.expected.lse[token, qo_head] - seen.observed.lse[token, qo_head]))
    if not 0 < gain < np.inf or gain == 1.0:
        return None
    masses = _masses(family, groups, seen, token, qo_head, gain)
    fits = masses.expected[~masses.off & (masses.expected > 0)].sum() > AGREEING * masses.expected.sum()
    return gain if fits and not (whole and masses.off.any()) else None


def _gain(family: Family, observed: Array, right: Array, inside: Bools, edges: int) -> float:
    """1 where most of the row's mass is within its bounds, else the weighted median of observed / expected; under
    equal logits k / l for a whole number l of edges in the denominator, where one is near.
    """
    if right[inside].sum() > 0.5 * right.sum():
        return 1.0
    some = np.flatnonzero((right > 0) & (observed > 0) & np.isfinite(observed))
    if not len(some):
        return 1.0
    ratio = observed[some] / right[some]
    order = np.argsort(ratio)
    mass = np.cumsum(right[some][order])
    gain = float(ratio[order][np.searchsorted(mass, mass[-1] / 2)])
    whole = round(edges / gain) if 0 < gain < np.inf else 0
    near = family.equal and whole and abs(edges / whole / gain - 1) < 4 * FORMATS[family.problem.spec.dtype].u
    return edges / whole if near else gain


def _refined(
    meter: Meter, family: Family, masses: Masses, mine: Walk, row: tuple[int, int]
) -> tuple[list[tuple[Slots, Array, Array]], int]:
    """Single slots that are wrong, with their weights, and the number of wrong groups that were not cut further."""
    gain, found, rest = masses.gain, [], 0
    channels = family.problem.spec.head_dim_vo
    while True:
        single = masses.off & (masses.size == 1)
        where = np.flatnonzero(single[masses.groups.group])
        group = masses.groups.group[where]
        found.append((masses.groups.slots.take(where), masses.observed[group], masses.expected[group]))
        wide = np.flatnonzero(masses.off & (masses.size > 1))
        if not len(wide):
            return found, rest
        deviation = np.abs(masses.observed[wide] - gain * masses.expected[wide])
        worst = np.argsort(-np.nan_to_num(deviation, nan=np.inf), kind="stable")
        chosen = wide[worst[: max(1, min(REFINED, channels // 2))]]
        groups = _cut(family.problem, masses, mine, chosen, channels)
        try:
            seen = _look(meter, family, groups)
        except BudgetSpent:
            return found, rest + len(wide)
        rest += len(wide) - len(chosen)
        masses = _masses(family, groups, seen, *row, gain=gain)


def _cut(problem: Problem, masses: Masses, mine: Walk, chosen: Ints, channels: int) -> Groups:
    """The chosen groups, each cut into an equal share of the channels; of one that lost mass, its edges only."""
    edge = np.zeros((*problem.slot_request.shape, problem.spec.num_kv_heads), bool)
    edge[mine.slots.at] = True
    lost = masses.observed < masses.gain * masses.expected
    members = [
        np.flatnonzero((masses.groups.group == g) & (~lost[g] | edge[masses.groups.slots.at])) for g in chosen.tolist()
    ]
    share = np.array([min(len(m), channels // len(chosen)) for m in members])
    starts = np.cumsum(share) - share
    group = [start + _evenly(len(m), int(n)) for m, n, start in zip(members, share, starts, strict=True)]
    return Groups(masses.groups.slots.take(np.concatenate(members)), np.concatenate(group))
