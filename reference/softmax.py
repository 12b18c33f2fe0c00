"""Softmax by parts: states (m, l, o) per tile, their merge, and the end, equations (4)-(7).

A state's arrays share leading dimensions: m, l [...], o [..., d_v]; o is not normalised. Slots with logit -inf carry
no mass; a state without mass has l = 0 and whatever m: it never reaches the maximum.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class State(NamedTuple):
    """An un-normalised partial result: running maximum, sum of exponentials, weighted values."""

    m: Array
    l: Array  # noqa: E741 - the field's name for the denominator
    o: Array


def tile_state(logits: Array, v: Array) -> State:
    """The state of one tile: logits [..., n] (masked: -inf), v [n, d_v]. V where no row attends is junk."""
    m = logits.max(axis=-1, initial=-np.inf)
    p = np.exp(logits - np.where(np.isfinite(m), m, 0.0)[..., None])
    attended = np.isfinite(logits).any(axis=tuple(range(logits.ndim - 1)))
    return State(m, p.sum(axis=-1), p[..., attended] @ v[attended])


def merge(a: State, b: State) -> State:
    """Both states on the larger maximum, equations (5)-(7); an empty one is skipped."""
    m = np.maximum(np.where(a.l > 0, a.m, -np.inf), np.where(b.l > 0, b.m, -np.inf))
    base = np.where(np.isfinite(m), m, 0.0)
    scale_a, scale_b = (np.exp(np.where(s.l > 0, s.m, -np.inf) - base) for s in (a, b))
    o = _scaled(scale_a, a) + _scaled(scale_b, b)
    return State(m, np.where(a.l > 0, scale_a * a.l, 0.0) + np.where(b.l > 0, scale_b * b.l, 0.0), o)


def _scaled(scale: Array, state: State) -> Array:
    return np.where((state.l > 0)[..., None], scale[..., None] * state.o, 0.0)


def trace(logits: Array, v: Array, kv_tile: int) -> tuple[list[State], list[State]]:
    """Per-tile states of a row, local and running: tiles of `kv_tile` slots in the order of the slots."""
    starts = range(0, logits.shape[-1], kv_tile)
    local = [tile_state(logits[..., i : i + kv_tile], v[i : i + kv_tile]) for i in starts]
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
    safe = np.where(some, state.l, 1.0)
    out = np.where(some[..., None], state.o / safe[..., None], 0.0)
    return out, np.where(some, state.m + np.log(safe), -np.inf)
