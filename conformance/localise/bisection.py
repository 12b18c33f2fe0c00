"""Bisection over a row's tiles, isolation of its splits, and of its request: smaller problems, launched until the
smallest that still fails is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cuts import some_requests, tile_range
from .launches import BudgetSpent, Family, Meter
from .slots import walk


def fails(meter: Meter, family: Family, token: int, qo_head: int) -> bool:
    """Whether one output row leaves its bounds in a launch of `family`."""
    return bool(meter(family).bad[token, qo_head])


def first_bad_tile(meter: Meter, family: Family, token: int, qo_head: int) -> int | None:
    """The first tile with which a row leaves its bounds, where the whole row does: out and lse of the first b tiles
    are the running state after tile b, so about log2(tiles) launches find it. None where no shorter prefix is right
    or the budget ends first. Raises what a launch raises.
    """
    good, bad = 0, walk(family.problem, token, qo_head, family.hints).num_tiles
    try:
        while bad - good > 1:
            middle = (good + bad) // 2
            if fails(meter, tile_range(family, 0, middle), token, qo_head):
                bad = middle
            else:
                good = middle
    except BudgetSpent:
        return None
    return bad - 1


@dataclass(frozen=True)
class SplitTrial:
    """What became of one split's range by itself, under one split, and beside its neighbour, under two."""

    alone_fails: bool
    pair: tuple[int, int]
    pair_fails: bool


def try_split(meter: Meter, family: Family, split: int, token: int, qo_head: int) -> SplitTrial:
    """Launch a split's range alone and with a neighbour: a split that is right alone is spoilt by the merge."""
    mine = walk(family.problem, token, qo_head, family.hints)
    length = -(-mine.num_tiles // family.hints.num_splits)
    first = max(0, split - 1) if split else 0
    alone = tile_range(family, split * length, (split + 1) * length).with_splits(1)
    pair = tile_range(family, first * length, (first + 2) * length).with_splits(2)
    return SplitTrial(fails(meter, alone, token, qo_head), (first, first + 1), fails(meter, pair, token, qo_head))


def partners(meter: Meter, family: Family, token: int, qo_head: int) -> tuple[int, ...] | None:
    """None where the row is wrong in a batch of its request alone; else the requests beside which it is wrong, as few
    as halving finds (all others where no half is enough). Raises what a launch raises.
    """
    spec, branches = family.problem.spec, family.problem.branches
    request, branch = divmod(spec.token_request[token], branches)
    query = token - spec.qo_indptr[spec.token_request[token]]

    def wrong(beside: list[int]) -> bool:
        batch = sorted([request, *beside])
        smaller = some_requests(family, batch)
        start = smaller.problem.spec.qo_indptr[batch.index(request) * branches + branch]
        return fails(meter, smaller, start + query, qo_head)

    beside = [n for n in range(family.problem.num_calls) if n != request]
    if not beside or wrong([]):
        return None
    while len(beside) > 1:
        half = len(beside) // 2
        chosen = next((part for part in (beside[:half], beside[half:]) if wrong(part)), None)
        if chosen is None:
            break
        beside = chosen
    return tuple(beside)
