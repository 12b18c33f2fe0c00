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

Array = NDArray[np.float64]


class State(NamedTuple):
    """An un-normalised partial result: running maximum, sum of exponentials, weighted values."""

    m: Array
    l: Array  # noqa: E741 - the field's name for the denominator
    o: Array


def tile_state(logits: Array, v: Array, kept: Array | None = None) -> State:
    """The state of one tile: logits [..., n] (masked: -inf) and v [n, d_v]; or b of them with values of their own,
    logits [b, ..., n] and v [b, n, d_v]. V where no row attends is junk.

    `kept` (shape of the logits): a_j / (1 - p) of dropout, a factor of the numerator; the denominator keeps every edge.
    """
    edge = np.asarray(logits > -np.inf)
    m = logits.max(axis=-1, initial=-np.inf)
    p = np.exp(logits - m[..., None]) if edge.all() else _exp_of_edges(logits, edge, m)
    unused = ~np.asarray(edge.any(axis=tuple(range(v.ndim - 2, edge.ndim - 1))))
    if not np.isfinite(v[unused]).all():
        v = np.where(unused[..., None], 0.0, v)
    weights = p if kept is None else p * kept
    rows = math.prod(m.shape[v.ndim - 2 :])
    o = weights.reshape(*v.shape[:-2], rows, p.shape[-1]) @ v
    return State(m, p.sum(axis=-1), o.reshape(*m.shape, v.shape[-1]))


def _exp_of_edges(logits: Array, edge: NDArray[np.bool_], m: Array) -> Array:
    """e^(z - m), 0 where there is no edge: exp costs most there, so only the edges are touched."""
    at = np.flatnonzero(edge)
    p = np.zeros(logits.shape)
    p.reshape(-1)[at] = np.exp(logits.reshape(-1).take(at) - np.repeat(m, np.count_nonzero(edge, axis=-1).reshape(-1)))
    return p


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
