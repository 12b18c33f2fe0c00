"""Softmax by parts: states (m, l, o) per tile, their merge, and the end, equations (4)-(7).

A state's arrays share leading dimensions: m, l [...], o [..., d_v]; o is not normalised. Slots with logit -inf carry
no mass; a state without mass has l = 0 and whatever m: it never reaches the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .runs import runs

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class State(NamedTuple):
    """An un-normalised partial result: running maximum, sum of exponentials, weighted values."""

    m: Array
    l: Array
    o: Array


def tile_state(logits: Array, v: Array, kept: Array | None = None) -> State:
    """The state of one tile: logits [..., n] (masked: -inf) and v [n, d_v]; or b of them with values of their own,
    logits [b, ..., n] and v [b, n, d_v]. V where no row attends is junk.

    `kept` (shape of the logits): a_j / (1 - p) of dropout, a factor of the numerator; the denominator keeps every edge.
    """
    lead, n = logits.shape[: v.ndim - 2], logits.shape[-1]
    z = logits.reshape(*lead, math.prod(logits.shape[v.ndim - 2 : -1]), 1, n)
    m, l, o = edge_state(z, z[..., 0, :] > -np.inf, v, None if kept is None else kept.reshape(z.shape))
    shape = logits.shape[:-1]
    return State(m.reshape(shape), l.reshape(shape), o.reshape(*shape, v.shape[-1]))


def edge_state(z: Array, edge: Bools, v: Array, kept: Array | None = None) -> State:
    """`tile_state` of logits z [(b,) r, g, n] under a mask edge [(b,) r, n] that the g heads share; z may hold junk
    where there is no edge. V [(b,) n, d_v].

    Only the edges are touched: exp and masks cost more than the products where one key in eight is attended.
    """
    *lead, r, g, n = z.shape
    if edge.all() and n:
        m = z.max(axis=-1)
        p = np.exp(z - m[..., None])
        l = p.sum(axis=-1)
    else:
        m, l, p = _weights_of_edges(z.reshape(math.prod(lead) * r, g, n), edge.reshape(math.prod(lead) * r, n))
    unused = ~np.asarray(edge.any(axis=-2))
    if not np.isfinite(v[unused]).all():
        v = np.where(unused[..., None], 0.0, v)
    weights = p if kept is None else p.reshape(z.shape) * kept
    o = weights.reshape(*lead, r * g, n) @ v
    return State(m.reshape(*lead, r, g), l.reshape(*lead, r, g), o.reshape(*lead, r, g, v.shape[-1]))


class EdgeIndex(NamedTuple):
    """Where the edges of a mask [rows, n] lie in an array [rows, g, n]: `at` [g, edges] flat, sorted by row; `rows`
    [some]: the rows that have an edge; `start`, `length` [some]: where each begins among the edges, and how many.
    """

    at: Ints
    rows: Ints
    start: Ints
    length: Ints

    def sums(self, x: Array) -> Array:
        """x [g, edges] added up by row: [g, some]."""
        total: Array = np.add.reduceat(x, self.start, axis=1)
        return total

    def spread(self, x: Array) -> Array:
        """x [g, some], one value a row, at each of its edges: [g, edges]."""
        return np.repeat(x, self.length, axis=1)


def edge_index(edge: Bools, g: int) -> EdgeIndex:
    """The index of the edges of a mask [rows, n] that g heads share."""
    n = edge.shape[-1]
    flat = np.flatnonzero(edge)
    row = flat // max(n, 1)
    at = flat + (g - 1) * n * row + n * np.arange(g)[:, None]
    start, length = runs(row)
    return EdgeIndex(at, row[start], start, length)


def weights_at(z: Array, index: EdgeIndex) -> tuple[Array, Array, Array]:
    """m and l [g, some] of the rows that have an edge, and e^(z - m) [g, edges], of logits z [rows, g, n]."""
    x = z.reshape(-1).take(index.at)
    m: Array = np.maximum.reduceat(x, index.start, axis=1)
    x = np.exp(x - index.spread(m))
    return m, index.sums(x), x


def _weights_of_edges(z: Array, edge: Bools) -> tuple[Array, Array, Array]:
    """m and l [rows, g] and e^(z - m) [rows, g, n], 0 where there is no edge: z [rows, g, n], edge [rows, n]."""
    rows, g, _ = z.shape
    index = edge_index(edge, g)
    m, l, p = np.full((rows, g), -np.inf), np.zeros((rows, g)), np.zeros(z.shape)
    if len(index.rows):
        highest, total, x = weights_at(z, index)
        m[index.rows], l[index.rows] = highest.T, total.T
        p.reshape(-1)[index.at] = x
    return m, l, p


def merge(a: State, b: State) -> State:
    """Both states on the larger maximum, equations (5)-(7); an empty one is skipped."""
    m = np.maximum(np.where(a.l > 0, a.m, -np.inf), np.where(b.l > 0, b.m, -np.inf))
    base = np.where(np.isfinite(m), m, 0.0)
    scale_a, scale_b = (np.exp(np.where(s.l > 0, s.m, -np.inf) - base) for s in (a, b))
    o = _scaled(scale_a, a) + _scaled(scale_b, b)
    return State(m, np.where(a.l > 0, scale_a * a.l, 0.0) + np.where(b.l > 0, scale_b * b.l, 0.0), o)


def _scaled(scale: Array, state: State) -> Array:
    return np.where((state.l > 0)[..., None], scale[..., None] * state.o, 0.0)


def with_sink(state: State, sink: ArrayLike) -> State:
    """A learned sink logit (broadcast to m) joins once, after all merges: m = max(m, s), l gains e^(s-m), o nothing."""
    m = np.broadcast_to(np.asarray(sink, np.float64), state.m.shape)
    return merge(state, State(m, np.ones_like(m), np.zeros_like(state.o)))


def trace(logits: Array, v: Array, kv_tile: int) -> tuple[list[State], list[State]]:
    """Per-tile states of a row, local and running: tiles of `kv_tile` slots in the order of the slots."""
    starts = range(0, logits.shape[-1], kv_tile)
    local = [tile_state(logits[..., i : i + kv_tile], v[..., i : i + kv_tile, :]) for i in starts]
    running: list[State] = []
    for state in local:
        running.append(merge(running[-1], state) if running else state)
    return local, running


def merge_all(states: Iterable[State]) -> State:
    """Fold of `merge`, in order."""
    return reduce(merge, states)


def finish(state: State) -> tuple[Array, Array]:
    """out = o / l and lse = m + ln l (natural); without mass, out 0 and lse -inf (empty-row rule `zero`)."""
    some = state.l > 0
    if some.all():
        return state.o / state.l[..., None], state.m + np.log(state.l)
    safe = np.where(some, state.l, 1.0)
    out = np.where(some[..., None], state.o / safe[..., None], 0.0)
    return out, np.where(some, state.m + np.log(safe), -np.inf)
