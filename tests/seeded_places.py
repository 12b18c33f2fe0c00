"""Faults whose place is known, seeded in small correct backends: what is changed, and which location is right. Here
those of tiles, splits and whole results, and all of them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from seeded_carriers import Looped, Patched, Seeded, Target, first, target
from seeded_keys import (
    contaminated,
    doubled,
    dropped,
    exchanged_values,
    foreign,
    head_of_v,
    key_scale,
    only_in_a_batch,
    page_of_both,
    page_of_k,
    page_of_v,
    replaced,
    tail,
)

from sacts.conformance.adapter import Case
from sacts.conformance.build import Problem
from sacts.conformance.localise.clues import Kind
from sacts.conformance.localise.locate import Location
from sacts.conformance.probes.inputs import RANDOM


class _Tiled(Looped):
    def __init__(self, where: Target, tile: int, what: str) -> None:
        self._where, self._tile, self._what = where, tile, what

    def rescale(self, case: Case, row: int, tile: int, scale: float) -> tuple[float, float]:
        if not (self._where.is_row(case, row) and tile == self._tile):
            return scale, scale
        return (1.0 if "l" in self._what else scale), (1.0 if "o" in self._what else scale)

    def twice(self, case: Case, row: int, tile: int) -> bool:
        return self._what == "twice" and self._where.is_row(case, row) and tile == self._tile


def _rising_tiles(where: Target) -> list[int]:
    """Tiles of the target row in which the running maximum of its first query head rises, and not only a little."""
    spec, inputs = where.problem.spec, RANDOM.inputs(where.problem)
    tiles = []
    q = inputs.q[where.row].astype(np.float64)
    k = inputs.k.data[where.mine.slots.at]
    logits = (k @ q) * spec.sm_scale
    top = -np.inf
    for tile in range(where.mine.num_tiles):
        part = logits[where.mine.tile == tile]
        if len(part) and part.max() > top:
            if np.isfinite(top) and part.max() > top + 0.3:
                tiles.append(tile)
            top = float(part.max())
    return tiles


def _tile_fault(problem: Problem, random: Random, what: str) -> Seeded | None:
    where = target(problem, random, tiles=2)
    if not where or problem.hints.num_splits > 1 or problem.cell.values != "gaussian":
        return None
    tiles = list(range(where.mine.num_tiles)) if what == "twice" else _rising_tiles(where)
    if not tiles:
        return None
    tile = random.choice(tiles)

    def right(found: Location) -> bool:
        return where.named(found) and any(tile in clue.tiles for clue in found.clues if clue.kind is not Kind.BATCH)

    def exactly(found: Location) -> bool:
        clue = [clue for clue in found.clues if clue.kind is Kind.TILE]
        return where.named(found) and bool(clue) and tile in clue[-1].tiles and len(clue[-1].tiles) == 1

    return _Tiled(where, tile, what), right if what == "twice" else exactly


def o_not_rescaled(problem: Problem, random: Random) -> Seeded | None:
    """o stays on the old maximum in one tile."""
    return _tile_fault(problem, random, "o")


def l_not_rescaled(problem: Problem, random: Random) -> Seeded | None:
    """l stays on the old maximum in one tile."""
    return _tile_fault(problem, random, "l")


def state_not_rescaled(problem: Problem, random: Random) -> Seeded | None:
    """l and o stay on the old maximum in one tile."""
    return _tile_fault(problem, random, "lo")


def tile_twice(problem: Problem, random: Random) -> Seeded | None:
    """One tile is walked twice."""
    return _tile_fault(problem, random, "twice")


class _Merged(Looped):
    def __init__(self, where: Target, split: int, factor: float | None) -> None:
        self._where, self._split, self._factor = where, split, factor

    def merged(self, case: Case, row: int, states: list[Any], scales: list[float]) -> list[float]:
        if not self._where.is_row(case, row):
            return scales
        wrong = 0.0 if self._factor is not None else 2.0
        return [s * wrong if i == self._split else s for i, s in enumerate(scales)]


def _split_fault(problem: Problem, random: Random, lost: bool) -> Seeded | None:
    where = target(problem, random, tiles=2)
    if not where or problem.hints.num_splits < 2:
        return None
    split = random.choice(np.unique(where.mine.split).tolist())

    def right(found: Location) -> bool:
        clue = first(found, Kind.SPLIT)
        return where.named(found) and found.finding.gate == "merge" and clue is not None and clue.splits == (split,)

    return _Merged(where, split, 0.0 if lost else None), right


def split_lost(problem: Problem, random: Random) -> Seeded | None:
    """The merge leaves out one split."""
    return _split_fault(problem, random, lost=True)


def split_weighs_double(problem: Problem, random: Random) -> Seeded | None:
    """The merge brings one split to a wrong maximum."""
    return _split_fault(problem, random, lost=False)


class _Denominator(Looped):
    def __init__(self, where: Target) -> None:
        self._where = where

    def denominator(self, case: Case, row: int, l: float, m: float) -> float:
        return l + 3 * float(np.exp(-m)) if self._where.is_row(case, row) and l else l


def denominator(problem: Problem, random: Random) -> Seeded | None:
    """Three masked slots of logit 0 are counted in the denominator."""
    where = target(problem, random)
    if not where or problem.cell.values == "shifted":
        return None

    def right(found: Location) -> bool:
        return where.named(found) and first(found, Kind.DENOMINATOR) is not None

    return _Denominator(where), right


# --- changed results and cases


def channel_zeroed(problem: Problem, random: Random) -> Seeded | None:
    """One channel of every row is never computed."""
    channel = random.randrange(problem.spec.head_dim_vo)

    def result(case: Case) -> None:
        case.out[..., channel] = 0

    def right(found: Location) -> bool:
        clue = first(found, Kind.CHANNEL)
        return clue is not None and clue.channels == (channel,)

    return (Patched(result=result), right) if target(problem, random) else None


def channels_exchanged(problem: Problem, random: Random) -> Seeded | None:
    """Two channels change places."""
    a, b = random.sample(range(problem.spec.head_dim_vo), 2)

    def result(case: Case) -> None:
        case.out[..., [a, b]] = case.out[..., [b, a]]

    def right(found: Location) -> bool:
        clue = first(found, Kind.CHANNEL)
        return clue is not None and set(clue.channels) == {a, b}

    return (Patched(result=result), right) if target(problem, random, edges=3) else None


def heads_exchanged(problem: Problem, random: Random) -> Seeded | None:
    """Two query heads of one token are stored at each other's place."""
    where = target(problem, random, edges=3)
    if not where or problem.spec.num_qo_heads < 2:
        return None
    a, b = random.sample(range(problem.spec.num_qo_heads), 2)

    def result(case: Case) -> None:
        for row in range(0, case.spec.num_rows, case.spec.list_heads):
            r = case.spec.row(row)
            if int(case.page_table[r.request, 0]) == where.page and r.query == where.query:
                token = row // case.spec.list_heads
                for x in (case.out, case.lse):
                    x[token, [a, b]] = x[token, [b, a]].clone()

    def right(found: Location) -> bool:
        clue = first(found, Kind.MISPLACED)
        return (
            clue is not None
            and clue.row is not None
            and found.row is not None
            and found.row[0] == clue.row[0] == where.row[0]
            and {found.row[1], clue.row[1]} == {a, b}
        )

    return Patched(result=result), right


def query_of_another_head(problem: Problem, random: Random) -> Seeded | None:
    """One query head uses its neighbour's query."""
    where = target(problem, random, edges=3)
    if not where or problem.spec.group_size < 2:
        return None
    a, b = where.row[1], where.row[1] + 1

    def change(case: Case) -> Case:
        q = case.q.clone()
        q[:, a] = q[:, b]
        return replace(case, q=q)

    def right(found: Location) -> bool:
        clue = first(found, Kind.MISPLACED)
        return clue is not None and found.row is not None and found.row[1] == a and clue.row == (found.row[0], b)

    return Patched(change), right


def lse_of_one_row(problem: Problem, random: Random) -> Seeded | None:
    """The lse of one row is off, its out is right."""
    where = target(problem, random, edges=1)
    if not where:
        return None

    def result(case: Case) -> None:
        for row in range(case.spec.num_rows):
            if where.is_row(case, row):
                case.lse[row // case.spec.list_heads, where.row[1]] += 0.5

    def right(found: Location) -> bool:
        return found.row == where.row and found.finding.gate == "lse"

    return Patched(result=result), right


def table_shifted(problem: Problem, random: Random) -> Seeded | None:
    """The page table of one request is read one column too far."""
    where = target(problem, random, edges=2)
    if not where:
        return None

    def change(case: Case) -> Case:
        table = case.page_table.clone()
        mine = (table[:, 0] == where.page).nonzero().flatten()
        table[mine] = torch.roll(table[mine], -1, dims=1)
        return replace(case, page_table=table)

    def right(found: Location) -> bool:
        spec = problem.spec
        own, size = problem.table.table[where.request], spec.page_size
        read = [o for clue in found.clues if clue.kind in (Kind.EXTRA, Kind.PAGE) for o in clue.tokens]
        right = {(int(own[t // size + 1]), t % size) for t in range(spec.seq_lens[where.request])}
        extra = {(o.physical, o.offset) for o in read} & right
        return found.row is not None and spec.token_request[found.row[0]] == where.request and bool(extra)

    return Patched(change), right


FAULTS: dict[str, Callable[[Problem, Random], Seeded | None]] = {
    fault.__name__: fault
    for fault in (
        dropped, doubled, replaced, foreign, tail, key_scale, exchanged_values, page_of_both, page_of_v, page_of_k,
        head_of_v, only_in_a_batch, contaminated, o_not_rescaled, l_not_rescaled, state_not_rescaled, tile_twice,
        split_lost, split_weighs_double, denominator, channel_zeroed, channels_exchanged, heads_exchanged,
        query_of_another_head, lse_of_one_row, table_shifted,
    )
}  # fmt: skip
