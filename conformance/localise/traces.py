"""A trace beside what must be in it: the keys that a row visits, its logits, its running m, l and o after each tile.
The first of these that is wrong, and the first tile in which it is, is where a kernel went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import tee
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sacts.reference.candidates import ValidatedCandidates
from sacts.reference.forward import Inputs
from sacts.reference.groups import MAX_LOGITS, Group
from sacts.reference.numerics import Numerics
from sacts.reference.paging import PageTable
from sacts.reference.spec import AttentionSpec
from sacts.reference.tile_bounds import RowLogits, TileStates, row_group, row_logits, tile_states
from sacts.reports.records import Finding, Gate

from ..adapter import Trace
from ..contract import ContractBroken, place_of

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Traced:
    """A `Trace` on the CPU: the same fields, FP64 and int64."""

    tokens: Ints
    tiles: Ints
    splits: Ints
    logits: Array | None
    m: Array | None
    l: Array | None
    o: Array | None


def read_trace(spec: AttentionSpec, trace: Trace) -> Traced:
    """Check the shapes of a trace and bring it here. Raises ContractBroken, naming the field."""
    rows, group = spec.num_rows, spec.heads_per_list
    slots, tiles = trace.tokens.shape[-1], trace.splits.shape[-1]
    shapes = {
        "tokens": (rows, slots),
        "tiles": (rows, slots),
        "splits": (rows, tiles),
        "logits": (rows, group, slots),
        "m": (rows, group, tiles),
        "l": (rows, group, tiles),
        "o": (rows, group, tiles, spec.head_dim_vo),
    }
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        tensor = getattr(trace, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ContractBroken(f"trace: {name} has shape {tuple(tensor.shape)}, expected {shape}", name)
        kind = np.int64 if name in ("tokens", "tiles", "splits") else np.float64
        found[name] = None if tensor is None else tensor.detach().cpu().double().numpy().astype(kind)
    rising = (np.diff(found["tiles"], axis=1) >= 0).all() and (found["tiles"] >= 0).all()
    if not rising or (found["tiles"] >= max(tiles, 1)).any():
        raise ContractBroken(f"trace: tiles must rise from 0 to at most {tiles - 1} along each row", "tiles")
    return Traced(**found)


def judge_trace(
    spec: AttentionSpec,
    inputs: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    trace: Traced,
    numerics: Numerics,
) -> Finding | None:
    """Requirement: each row visits its candidates, each as often as it is named; logits, m, ln l + m and o / l lie
    within their bounds. The first layer that is wrong in any row is named, at its first tile.
    """
    rows = []
    for row in range(spec.num_rows):
        group = row_group(spec, inputs, table, candidates, row)
        logits = None if group is None else row_logits(spec, group, numerics)
        visited = (trace.tokens[row], trace.tiles[row], trace.splits[row])
        rows.append(_Row(spec, table, trace, numerics, row, group, logits, *visited))
    layers: tuple[Callable[[_Row], Iterator[Finding]], ...] = (
        _Row.index,
        _Row.logit,
        _Row.maximum,
        _Row.denominator,
        _Row.numerator,
    )
    for layer in layers:
        for each in rows:
            finding = next(layer(each), None)
            if finding is not None:
                return finding
    return None


@dataclass(frozen=True)
class _Row:
    """One candidate row of a trace, and what it must be; None of an empty row."""

    spec: AttentionSpec
    table: PageTable
    trace: Traced
    numerics: Numerics
    row: int
    group: Group | None
    logits: RowLogits | None
    tokens: Ints
    tiles: Ints
    splits: Ints

    def _finding(self, gate: Gate, tile: int, words: str, head: int = 0, token: int | None = None) -> Finding:
        spec = self.spec
        query, first = divmod(self.row, spec.list_heads)
        place = place_of(spec, query, first * spec.heads_per_list + head)
        where = f"tile {tile}" + (f" of split {self.splits[tile]}" if (self.splits > 0).any() else "")
        if token is not None:
            page = token // spec.page_size
            physical = self.table.table[spec.token_request[query], page]
            where += f", logical page {page} -> physical page {physical}"
        return Finding(gate, place, f"{place}: {words}; {where}")

    def index(self) -> Iterator[Finding]:
        """Keys that are missing, foreign to the row, or visited too often. A repeat may be visited once."""
        named = {} if self.logits is None else dict(zip(self.logits.t, self.logits.counts, strict=True))
        at = np.flatnonzero(self.tokens >= 0)
        visited, first, times = np.unique(self.tokens[at], return_index=True, return_counts=True)
        for i in np.argsort(first).tolist():
            token, n = int(visited[i]), int(times[i])
            allowed, tile = int(named.get(token, 0)), int(self.tiles[at[first[i]]])
            if not allowed:
                yield self._finding(Gate.COUNT, tile, f"visits token {token}, which is no candidate", token=token)
            elif n not in (1, allowed):
                words = f"visits token {token} {n} times, expected {allowed}"
                yield self._finding(Gate.COUNT, tile, words, token=token)
        for token in sorted(set(named) - set(visited)):
            yield self._finding(Gate.COUNT, int(self.tiles.max(initial=0)), f"never visits token {token}", token=token)

    def _visits(self) -> tuple[Ints, Ints, Array]:
        """Of each slot that is an edge: its place in the trace, the index of its key, and how many repeats it is."""
        assert self.logits is not None
        place = {int(t): i for i, t in enumerate(self.logits.t)}
        at = np.flatnonzero(self.tokens >= 0)
        key = np.array([place[int(t)] for t in self.tokens[at]], np.int64)
        return at, key, self.logits.counts[key] / np.bincount(key, minlength=len(place))[key]

    def logit(self) -> Iterator[Finding]:
        """The first logit that is outside."""
        if self.trace.logits is None or self.logits is None:
            return
        at, key, share = self._visits()
        observed, bound = self.trace.logits[self.row][:, at], self.logits.bound[:, key]
        right = self.logits.value[:, key] + np.log(share)
        wrong = ~(np.abs(observed - right) <= bound) & np.isfinite(bound)
        for i in np.flatnonzero(wrong.any(axis=0)).tolist():
            head, token = int(wrong[:, i].argmax()), int(self.tokens[at[i]])
            words = f"the logit of token {token} is {_beside(observed[head, i], right[head, i], bound[head, i])}"
            yield self._finding(Gate.LOGITS, int(self.tiles[at[i]]), words, head, token)

    @cached_property
    def _shared(self) -> list[Iterator[tuple[int, TileStates, int]]]:
        return [self._each_state()]

    def _states(self) -> Iterator[tuple[int, TileStates, int]]:
        """Each tile that ends a state with an edge, in order: the tile, expected states, and which of them is its; made
        once, as far as a layer asks.
        """
        self._shared[0], states = tee(self._shared[0])
        return states

    def _each_state(self) -> Iterator[tuple[int, TileStates, int]]:
        if self.group is None:
            return
        at, key, share = self._visits()
        keys, heads = self.group.t.shape[1], self.spec.heads_per_list
        step = max(1, MAX_LOGITS // (keys * heads))
        for split in dict.fromkeys(self.splits[: int(self.tiles[at].max(initial=-1)) + 1].tolist()):
            so_far = np.zeros(keys)
            tiles = np.flatnonzero(self.splits == split)
            for start in range(0, len(tiles), step):
                part, counts = tiles[start : start + step], []
                for tile in part:
                    mine = self.tiles[at] == tile
                    so_far = so_far + np.bincount(key[mine], share[mine], minlength=keys)
                    counts.append(so_far)
                whole = np.rint(counts).astype(np.int64)
                states = tile_states(self.spec, self.group, whole, self.numerics, one_by_one=bool((share == 1).all()))
                yield from ((int(tile), states, n) for n, tile in enumerate(part) if states.edges[n])

    def maximum(self) -> Iterator[Finding]:
        """Running maxima that are outside."""
        if self.trace.m is None:
            return
        for tile, states, n in self._states():
            m, low, high = self.trace.m[self.row, :, tile], states.m_low[n], states.m_high[n]
            for head in np.flatnonzero(~((low <= m) & (m <= high)) & states.trusted[n]).tolist():
                words = f"the running maximum is {m[head]:.9g}, expected {low[head]:.9g} to {high[head]:.9g}"
                yield self._finding(Gate.LOGITS, tile, words, head)

    def denominator(self) -> Iterator[Finding]:
        """Every m + ln l that is outside."""
        if self.trace.m is None or self.trace.l is None:
            return
        for tile, states, n in self._states():
            with np.errstate(divide="ignore", invalid="ignore"):
                lse = self.trace.m[self.row, :, tile] + np.log(self.trace.l[self.row, :, tile])
            wrong = ~(np.abs(lse - states.lse[n]) <= states.lse_bound[n]) & states.trusted[n]
            for head in np.flatnonzero(wrong).tolist():
                words = f"m + ln l is {_beside(lse[head], states.lse[n, head], states.lse_bound[n, head])}"
                yield self._finding(Gate.LSE, tile, words, head)

    def numerator(self) -> Iterator[Finding]:
        """Every o / l that is outside."""
        if self.trace.l is None or self.trace.o is None:
            return
        for tile, states, n in self._states():
            with np.errstate(divide="ignore", invalid="ignore"):
                out = self.trace.o[self.row, :, tile] / self.trace.l[self.row, :, tile, None]
            wrong = ~(np.abs(out - states.out[n]) <= states.half_width[n]) & states.trusted[n][:, None]
            for head in np.flatnonzero(wrong.any(axis=-1)).tolist():
                channel = int(wrong[head].argmax())
                at = n, head, channel
                beside = _beside(out[head, channel], states.out[at], states.half_width[at])
                yield self._finding(Gate.RESCALE, tile, f"o / l in channel {channel} is {beside}", head)


def _beside(observed: float, right: float, bound: float) -> str:
    return f"{observed:.9g}, expected {right:.9g} within {bound:.2g}"
