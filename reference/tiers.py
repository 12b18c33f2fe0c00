"""Capacity tiers: fixed-K tables of a few sizes, and which sizes cost least. Seed 7.4, equation (21)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import CandidateLists, lists_of
from .layouts import FixedLists, from_fixed, to_fixed

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Tier(NamedTuple):
    """One fixed-K table of `capacity` entries a row: `rows` [n] are the identities of its rows."""

    capacity: int
    rows: Ints
    lists: FixedLists


class TierChoice(NamedTuple):
    """Capacities, ascending, and their expected cost E[T(C(k))] + penalty * tiers."""

    capacities: tuple[int, ...]
    cost: float


def smallest_tier(lengths: ArrayLike, capacities: Sequence[int]) -> Ints:
    """C(k): the smallest capacity that holds each row, [rows]. Raises ValueError for capacities that do not ascend,
    and for a row that fits none: no row is ever cut.
    """
    k, tiers = np.asarray(lengths, np.int64), np.asarray(capacities, np.int64)
    if not len(tiers) or tiers[0] < 0 or (np.diff(tiers) <= 0).any():
        raise ValueError(f"capacities must ascend from 0 or more, got {tuple(capacities)}")
    if (k > tiers[-1]).any():
        row = int(np.argmax(k > tiers[-1]))
        raise ValueError(f"row {row} has {k[row]} entries, more than the largest tier {tiers[-1]}")
    return tiers[np.searchsorted(tiers, k)]


def to_tiers(
    lists: CandidateLists, capacities: Sequence[int], sentinel: ArrayLike, limit: ArrayLike
) -> tuple[Tier, ...]:
    """Every row in the smallest tier that holds it; rows keep their identity. Raises ValueError as `smallest_tier` and
    `to_fixed`.
    """
    lengths = np.diff(lists.indptr)
    chosen = smallest_tier(lengths, capacities)
    sentinels, limits = (np.broadcast_to(np.asarray(x, np.int64), len(lengths)) for x in (sentinel, limit))
    tiers = []
    for capacity in capacities:
        mine = np.flatnonzero(chosen == capacity)
        taken = np.repeat(chosen == capacity, lengths)
        own = CandidateLists(np.concatenate(([0], np.cumsum(lengths[mine]))), lists.indices[taken])
        tiers.append(Tier(capacity, mine, to_fixed(own, capacity, sentinels[mine], limits[mine])))
    return tuple(tiers)


def from_tiers(tiers: Sequence[Tier]) -> CandidateLists:
    """The lists of all tiers in the order of their row identities. Raises ValueError unless every row occurs once."""
    rows = np.concatenate([tier.rows for tier in tiers])
    if not np.array_equal(np.sort(rows), np.arange(len(rows))):
        raise ValueError(f"tiers must hold each of {len(rows)} rows once, got rows {sorted(rows.tolist())}")
    parts = [from_fixed(tier.lists) for tier in tiers]
    row = np.concatenate([np.repeat(t.rows, np.diff(p.indptr)) for t, p in zip(tiers, parts, strict=True)])
    return lists_of(row, np.concatenate([part.indices for part in parts]), len(rows))


def _slots(capacity: Array) -> Array:
    return capacity


def expected_cost(
    lengths: ArrayLike, capacities: Sequence[int], *, penalty: float = 0.0, cost: Callable[[Array], Array] = _slots
) -> float:
    """E[T(C(k))] + penalty * tiers of a choice, equation (21); `cost` is T, by default the slots of a tier. Raises
    ValueError as `smallest_tier`.
    """
    chosen = smallest_tier(lengths, capacities).astype(np.float64)
    return float(np.mean(cost(chosen)) + penalty * len(capacities))


def best_tiers(
    lengths: ArrayLike,
    menu: Sequence[int],
    max_tiers: int,
    *,
    penalty: float = 0.0,
    cost: Callable[[Array], Array] = _slots,
) -> TierChoice:
    """At most `max_tiers` capacities of `menu` with the least E[T(C(k))] + penalty * tiers, equation (21).

    Every row goes to the smallest chosen capacity that holds it; `cost` is T, vectorised over capacities. Dynamic
    programming over the menu: O(max_tiers * menu^2). Of equal costs the fewest tiers win. Raises ValueError without
    rows, or where the menu ends below the longest row.
    """
    k = np.asarray(lengths, np.int64)
    sizes = np.unique(np.asarray(menu, np.int64))
    if not k.size or max_tiers < 1 or not len(sizes) or k.max() > sizes[-1]:
        raise ValueError(f"{k.size} rows and {max_tiers} tiers out of {tuple(sizes.tolist())} leave no choice")
    below = np.searchsorted(np.sort(k), np.concatenate(([-1], sizes)), side="right") / k.size
    served = below[None, 1:] - below[:, None]  # [i, j]: share of rows above menu entry i - 1 and up to entry j
    step = np.where(np.arange(len(sizes) + 1)[:, None] <= np.arange(len(sizes)), served, np.inf)
    step = np.where(np.isfinite(step), step * np.asarray(cost(sizes.astype(np.float64)), np.float64), np.inf)
    best = np.concatenate(([0.0], np.full(len(sizes), np.inf)))  # [i]: cheapest cover of all rows up to entry i - 1
    last, came = np.flatnonzero(sizes >= k.max()) + 1, []
    choice = TierChoice((), np.inf)
    for tiers in range(1, min(max_tiers, len(sizes)) + 1):
        total = best[:, None] + step
        came.append(np.argmin(total, axis=0))
        best = np.concatenate(([np.inf], total.min(axis=0)))
        end = int(last[np.argmin(best[last])])
        if best[end] + penalty * tiers < choice.cost:
            choice = TierChoice(_walk_back(came, end, sizes), float(best[end] + penalty * tiers))
    return choice


def _walk_back(came: list[Ints], end: int, sizes: Ints) -> tuple[int, ...]:
    chosen = []
    for step in reversed(came):
        chosen.append(int(sizes[end - 1]))
        end = int(step[end - 1])
    return tuple(reversed(chosen))
