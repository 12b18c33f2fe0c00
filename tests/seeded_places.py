"""Faults whose place is known, seeded in small correct backends: what is changed, and which location is right.

Two carriers. `Patched` hands the emulation a changed Case, or changes its result. `Looped` computes row by row, tile by
tile and split by split in FP32, so that single keys, tiles and splits can be spoilt. Targets are named by what survives
when the problem is cut: the request's first physical page, the query, the KV head, the logical position, the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch

from sacts.conformance.adapter import Capabilities, Case, Consumes, Outputs
from sacts.conformance.build import Problem
from sacts.conformance.localise.clues import Clue, Kind
from sacts.conformance.localise.locate import Location
from sacts.conformance.localise.slots import Walk, walk
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, CausalRule, DType

NUMERICS = {d: Numerics(p=DType.FP32, out=d, merges_states=True, unit_p=True) for d in DType}
CAPABILITIES = Capabilities(consumes=Consumes.VALIDATED, numerics=NUMERICS)

Check = Callable[[Location], bool]


@dataclass(frozen=True)
class Target:
    """One candidate row: `page` is the first physical page of its request, `row` its (token, first query head) in the
    whole problem, `mine` its edges there.
    """

    problem: Problem
    row: tuple[int, int]
    request: int
    page: int
    query: int
    kv_head: int
    mine: Walk

    def is_row(self, case: Case, index: int) -> bool:
        """Whether candidate row `index` of a launched case is this one."""
        row = case.spec.row(index)
        return (
            int(case.page_table[row.request, 0]) == self.page
            and row.query == self.query
            and row.kv_head == self.kv_head
            and row.qo_head in (None, self.row[1])
        )

    def named(self, location: Location) -> bool:
        """Whether the location names this row."""
        spec = self.problem.spec
        if location.row is None:
            return False
        token, head = location.row
        return spec.row_of(token, head) == spec.row_of(*self.row)


@dataclass(frozen=True)
class Key:
    """What a row reads for one slot: logical position, and physical (page, offset, head) of K and V; `scale` of K."""

    t: int
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    scale: float = 1.0
    masked: bool = False  # takes a slot of its tile, nothing else


class Looped:
    """A right backend in loops, with places to spoil it."""

    name = "looped"
    capabilities = CAPABILITIES

    def keys(self, case: Case, row: int, keys: list[Key]) -> list[Key]:
        """What the row reads."""
        return keys

    def rescale(self, case: Case, row: int, tile: int, scale: float) -> tuple[float, float]:
        """Factors of the old l and o when the maximum rises in `tile`."""
        return scale, scale

    def twice(self, case: Case, row: int, tile: int) -> bool:
        """Whether the tile is walked twice."""
        return False

    def merged(self, case: Case, row: int, states: list[Any], scales: list[float]) -> list[float]:
        """Factor of each split's l and o in the merge."""
        return scales

    def denominator(self, case: Case, row: int, l: float, m: float) -> float:
        """The l that divides and is exported."""
        return l

    def run(self, case: Case, plan: object = None) -> Outputs:
        spec = case.spec
        for row in range(spec.num_rows):
            keys = self.keys(case, row, list(_keys(case, row)))
            token, first = divmod(row, spec.list_heads)
            for g in range(spec.heads_per_list):
                head = first * spec.heads_per_list + g
                out, lse = self._row(case, row, case.q[token, head].float(), keys)
                case.out[token, head] = out.to(case.out.dtype)
                case.lse[token, head] = lse
        return Outputs(case.out, case.lse)

    def _row(self, case: Case, row: int, q: torch.Tensor, keys: list[Key]) -> tuple[torch.Tensor, float]:
        spec, tile, splits = case.spec, case.hints.kv_tile, case.hints.num_splits
        if not any(not key.masked for key in keys):
            return torch.zeros(spec.head_dim_vo), -float("inf")
        k = torch.stack([case.k_cache[key.k].float() * key.scale for key in keys])
        v = torch.stack([case.v_cache[key.v].float() for key in keys])
        z = (k @ q) * spec.sm_scale
        z[[key.masked for key in keys]] = -float("inf")
        tiles = -(-len(keys) // tile)
        per = -(-tiles // splits)
        states = []
        for split in range(splits):
            m, l, o = -float("inf"), 0.0, torch.zeros(spec.head_dim_vo)
            for j in range(split * per, min((split + 1) * per, tiles)):
                for _ in range(2 if self.twice(case, row, j) else 1):
                    part, values = z[j * tile : (j + 1) * tile], v[j * tile : (j + 1) * tile]
                    top = max(m, float(part.max()))
                    if top == -float("inf"):
                        continue
                    old_l, old_o = 0.0, 0.0
                    if m > -float("inf"):
                        scale = float(np.exp(m - top))
                        old_l, old_o = self.rescale(case, row, j, scale) if scale < 1 else (scale, scale)
                    p = torch.exp(part - top)
                    l, o, m = old_l * l + float(p.sum()), old_o * o + p @ values.masked_fill(p[:, None] == 0, 0), top
            states.append((m, l, o))
        top = max(m for m, _, _ in states)
        scales = [float(np.exp(m - top)) if l else 0.0 for m, l, _ in states]
        scales = self.merged(case, row, states, scales) if splits > 1 else scales
        l = sum(s * state[1] for s, state in zip(scales, states, strict=True))
        o = sum((s * state[2] for s, state in zip(scales, states, strict=True)), torch.zeros(spec.head_dim_vo))
        l = self.denominator(case, row, l, top)
        return (o / l, top + float(np.log(l))) if l else (torch.zeros(spec.head_dim_vo), -float("inf"))


def _keys(case: Case, row: int) -> Iterator[Key]:
    spec = case.spec
    r, position = spec.row(row), spec.token_position[row // spec.list_heads]
    for entry in case.kv_indices[case.kv_indptr[row] : case.kv_indptr[row + 1]].tolist():
        for t in range(entry * spec.block_size, (entry + 1) * spec.block_size):
            seen = t < spec.seq_lens[r.request] and _visible(spec, position, t)
            at = address(case, r.request, t if t < spec.seq_lens[r.request] else 0, r.kv_head)
            yield Key(t, at, at, masked=not seen)


def _visible(spec: AttentionSpec, position: int, t: int) -> bool:
    causal = spec.causal is CausalRule.NONE or t <= position
    return causal and (spec.window_left < 0 or t >= position - spec.window_left)


def address(case: Case, request: int, t: int, kv_head: int) -> tuple[int, int, int]:
    """Physical (page, offset, head)."""
    page, offset = divmod(t, case.spec.page_size)
    return int(case.page_table[request, page]), offset, kv_head


class Patched:
    """The emulation, walking tiles and splits as the hints say, behind a changed case or before a changed result."""

    name = "patched"
    capabilities = CAPABILITIES

    def __init__(
        self,
        case: Callable[[Case], Case] = lambda case: case,
        result: Callable[[Case], None] = lambda case: None,
    ) -> None:
        self._case, self._result = case, result

    def run(self, case: Case, plan: object = None) -> Outputs:
        arithmetic = Arithmetic(p=DType.FP32, out=case.spec.dtype, tile=case.hints.kv_tile)
        Adapter({case.spec.dtype: arithmetic}).run(self._case(case))
        self._result(case)
        return Outputs(case.out, case.lse)


# --- targets


def target(problem: Problem, random: Random, edges: int = 2, tiles: int = 1) -> Target | None:
    """A random candidate row with so many edges and tiles, if there is one."""
    spec, found = problem.spec, []
    for index in range(spec.num_rows):
        row, token = spec.row(index), index // spec.list_heads
        if not spec.seq_lens[row.request]:
            continue
        head = index % spec.list_heads * spec.heads_per_list
        mine = walk(problem, token, head, problem.hints)
        if len(mine) >= edges and mine.num_tiles >= tiles:
            page = int(problem.table.table[row.request, 0])
            found.append(Target(problem, (token, head), row.request, page, row.query, row.kv_head, mine))
    return random.choice(found) if found else None


def names_token(location: Location, where: Target, t: int, *kinds: Kind) -> bool:
    """The row, and a clue of one of these kinds with this own token, its tile and its page."""
    place = np.flatnonzero(where.mine.token == t)
    for clue in location.clues:
        for owner in clue.tokens:
            if clue.kind in kinds and (owner.request, owner.token) == (where.request, t):
                tile = not len(place) or int(where.mine.tile[place[0]]) in clue.tiles
                return where.named(location) and tile and t // where.problem.spec.page_size in clue.pages
    return False


def first(location: Location, *kinds: Kind) -> Clue | None:
    """The first clue of one of these kinds."""
    return next((clue for clue in location.clues if clue.kind in kinds), None)


# --- faults: (problem, random) -> (backend, check), or None where the cell cannot show it

Seeded = tuple[Any, Check]


class _Keyed(Looped):
    def __init__(self, where: Target, change: Callable[[Case, list[Key]], list[Key]], batched: bool = False) -> None:
        self._where, self._change, self._batched = where, change, batched

    def keys(self, case: Case, row: int, keys: list[Key]) -> list[Key]:
        active = self._where.is_row(case, row) and (case.spec.num_requests > 1 or not self._batched)
        return self._change(case, keys) if active else keys


def _edge(where: Target, random: Random) -> int:
    return int(random.choice(where.mine.token.tolist()))


def dropped(problem: Problem, random: Random) -> Seeded | None:
    """One token of one row is skipped."""
    where = target(problem, random)
    if not where:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, masked=key.masked or key.t == t) for key in keys]

    return _Keyed(where, change), lambda found: names_token(found, where, t, Kind.MISSING)


def doubled(problem: Problem, random: Random) -> Seeded | None:
    """One token of one row counts twice."""
    where = target(problem, random)
    if not where:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return keys + [key for key in keys if key.t == t and not key.masked]

    return _Keyed(where, change), lambda found: names_token(found, where, t, Kind.REPEATED)


def replaced(problem: Problem, random: Random) -> Seeded | None:
    """One token of one row is read instead of another, which is no candidate."""
    where = target(problem, random)
    free = (
        [] if not where else sorted(set(range(problem.spec.seq_lens[where.request])) - set(where.mine.token.tolist()))
    )
    if not where or not free:
        return None
    t, other = _edge(where, random), random.choice(free)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        def at(key: Key) -> Key:
            request = _request_of(case, where)
            place = address(case, request, other, where.kv_head)
            return replace(key, k=place, v=place) if key.t == t else key

        return [at(key) for key in keys]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return (
            names_token(found, where, t, Kind.MISSING)
            and extra is not None
            and [(o.request, o.token) for o in extra.tokens] == [(where.request, other)]
        )

    return _Keyed(where, change), right


def _request_of(case: Case, where: Target) -> int:
    return int((case.page_table[:, 0] == where.page).nonzero()[0, 0])


def foreign(problem: Problem, random: Random) -> Seeded | None:
    """One token is read from another request's page, K and V."""
    where = target(problem, random)
    pages = np.unique(problem.pages[(problem.slot_request >= 0).any(axis=1)])
    outside = [] if not where else [int(p) for p in pages if p not in problem.table.owned[where.request]]
    if not where or not outside:
        return None
    t, page = _edge(where, random), random.choice(outside)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [
            replace(key, k=(page, *key.k[1:]), v=(page, *key.v[1:])) if key.t == t and not key.masked else key
            for key in keys
        ]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return (
            names_token(found, where, t, Kind.MISSING)
            and extra is not None
            and [(o.physical, o.offset) for o in extra.tokens] == [(page, t % problem.spec.page_size)]
            and extra.tokens[0].request != where.request
        )

    return _Keyed(where, change), right


def tail(problem: Problem, random: Random) -> Seeded | None:
    """The slot behind T is attended."""
    where = target(problem, random, edges=1)
    if not where or not problem.spec.seq_lens[where.request] % problem.spec.page_size:
        return None
    t = problem.spec.seq_lens[where.request]

    def change(case: Case, keys: list[Key]) -> list[Key]:
        at = address(case, _request_of(case, where), t, where.kv_head)
        return [*keys, Key(t, at, at)]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return where.named(found) and extra is not None and [o.token for o in extra.tokens] == [t]

    return _Keyed(where, change), right


def key_scale(problem: Problem, random: Random) -> Seeded | None:
    """One key is dequantised with a scale that is not its own."""
    where = target(problem, random, edges=3)
    if not where:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, scale=-2.0) if key.t == t else key for key in keys]

    return _Keyed(where, change), lambda found: names_token(found, where, t, Kind.WEIGHT, Kind.EXTRA, Kind.MISSING)


def exchanged_values(problem: Problem, random: Random) -> Seeded | None:
    """V of two tokens of a row is exchanged."""
    where = target(problem, random, edges=3)
    if not where:
        return None
    a, b = random.sample(where.mine.token.tolist(), 2)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        v = {key.t: key.v for key in keys}
        return [replace(key, v=v[{a: b, b: a}.get(key.t, key.t)]) if {a, b} <= set(v) else key for key in keys]

    def right(found: Location) -> bool:
        both = (Kind.EXCHANGED, Kind.WEIGHT)
        return names_token(found, where, a, *both) and names_token(found, where, b, *both)

    return _Keyed(where, change), right


def _page_fault(problem: Problem, random: Random, which: str) -> Seeded | None:
    """One logical page is read from another physical page: K, V or both."""
    where = target(problem, random, edges=3)
    if not where:
        return None
    size = problem.spec.page_size
    page = _edge(where, random) // size
    own = int(problem.table.table[where.request, page])
    other = random.choice([int(p) for p in problem.pages if p != own])
    lost = where.mine.token[where.mine.token // size == page].tolist()

    def change(case: Case, keys: list[Key]) -> list[Key]:
        def at(key: Key) -> Key:
            k, v = (other, *key.k[1:]), (other, *key.v[1:])
            return replace(key, k=k if "k" in which else key.k, v=v if "v" in which else key.v)

        return [at(key) if key.t // size == page and not key.masked else key for key in keys]

    def right(found: Location) -> bool:
        pages = {page for clue in found.clues for page in clue.pages}
        named = {o.token for clue in found.clues for o in clue.tokens if o.request == where.request}
        physical = {o.physical for clue in found.clues for o in clue.tokens}
        return where.named(found) and page in pages and bool(named & set(lost)) and (which == "k" or other in physical)

    return _Keyed(where, change), right


def page_of_both(problem: Problem, random: Random) -> Seeded | None:
    """The page table is off for one logical page."""
    return _page_fault(problem, random, "kv")


def page_of_v(problem: Problem, random: Random) -> Seeded | None:
    """V comes from another page than K."""
    return _page_fault(problem, random, "v")


def page_of_k(problem: Problem, random: Random) -> Seeded | None:
    """K comes from another page than V."""
    return _page_fault(problem, random, "k")


def head_of_v(problem: Problem, random: Random) -> Seeded | None:
    """V comes from another KV head."""
    where = target(problem, random)
    if not where or problem.spec.num_kv_heads < 2:
        return None
    other = (where.kv_head + 1) % problem.spec.num_kv_heads

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, v=(*key.v[:2], other)) for key in keys]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return where.named(found) and extra is not None and {o.kv_head for o in extra.tokens} == {other}

    return _Keyed(where, change), right


def only_in_a_batch(problem: Problem, random: Random) -> Seeded | None:
    """A token is skipped, but only where other requests run beside."""
    where = target(problem, random)
    if not where or sum(n > 0 for n in problem.spec.qo_lens) < 2:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, masked=key.masked or key.t == t) for key in keys]

    def right(found: Location) -> bool:
        return names_token(found, where, t, Kind.MISSING) and first(found, Kind.BATCH) is not None

    return _Keyed(where, change, batched=True), right


def contaminated(problem: Problem, random: Random) -> Seeded | None:
    """A row also attends the first token of one other request, where that runs beside it."""
    where = target(problem, random)
    near = [] if not where else [n for n, t in enumerate(problem.spec.seq_lens) if t and n != where.request]
    if not where or not near or problem.cell.map == "shared":
        return None
    other = random.choice(near)
    page = int(problem.table.table[other, 0])

    def change(case: Case, keys: list[Key]) -> list[Key]:
        at = page, 0, where.kv_head
        return [*keys, Key(0, at, at)] if page in case.page_table[:, 0].tolist() else keys

    def right(found: Location) -> bool:
        extra, batch = first(found, Kind.EXTRA), first(found, Kind.BATCH)
        named = extra is not None and [(o.request, o.token) for o in extra.tokens] == [(other, 0)]
        return where.named(found) and named and batch is not None and batch.requests == (other,)

    return _Keyed(where, change, batched=True), right


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
