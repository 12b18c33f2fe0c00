"""Small correct backends that faults of known place are seeded in, and the rows that these are aimed at.

Two carriers. `Patched` hands the emulation a changed Case, or changes its result. `Looped` computes row by row, tile by
tile and split by split in FP32, so that single keys, tiles and splits can be spoilt. Targets are named by what survives
when the problem is cut: the request's first physical page, the query, the KV head, the logical position, the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from sacts.conformance.adapter import Capabilities, Case, Consumes, Outputs
from sacts.conformance.build import Problem
from sacts.conformance.localise.clues import Clue, Kind
from sacts.conformance.localise.locate import Location
from sacts.conformance.localise.slots import Walk, walk
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


Seeded = tuple[Any, Check]  # a faulty backend, and which location is right
