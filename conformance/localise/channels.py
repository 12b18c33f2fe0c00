"""Channels and places: is a result right but for some channels, or right but somewhere else?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sacts.reports.records import Gate

from ..contract import place_of
from .clues import NAMED, Clue, Kind
from .launches import Family, Meter, Seen

Array = NDArray[np.float64]

STEPS = 128  # distinct values of the ramp, exact in every dtype
STRIDE = 37  # coprime to STEPS: neighbouring channels get values far apart


def ramp(channels: int) -> Array:
    """A value for each channel: in [1, 2), distinct within STEPS neighbours."""
    return 1 + (np.arange(channels) * STRIDE % STEPS) / STEPS


def few_channels(seen: Seen) -> bool:
    """Whether the wrong elements leave half of the channels or more untouched, in every row."""
    wrong = np.atleast_1d((seen.out_use > 1).any(axis=(0, 1)))
    return bool(wrong.any()) and 2 * int(wrong.sum()) <= len(wrong)


def wrong_channels(meter: Meter, family: Family, token: int, qo_head: int) -> Clue | None:
    """V is one number in each channel, so each row must return just these numbers: what does not is its channel's
    fault, whatever the weights are. One launch.
    """
    v = family.inputs.v.data
    values = ramp(v.shape[-1])
    seen = meter(family.with_v(np.broadcast_to(values, v.shape).copy(), integers=False))
    row = seen.observed.out[token, qo_head]
    wrong = np.flatnonzero(seen.out_use[token, qo_head] > 1)
    if not len(wrong) or len(wrong) == len(values):
        return None
    shown = [_said(values, int(c), float(row[c]), float(seen.expected.out[token, qo_head, c])) for c in wrong[:NAMED]]
    more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    words = f"with the same V in every slot, {', '.join(shown)}{more}: channel fault, the weights are right"
    return Clue(Kind.CHANNEL, words, Gate.OUT, channels=tuple(int(c) for c in wrong))


def _said(values: Array, channel: int, observed: float, right: float) -> str:
    words = f"channel {channel} is {observed:.6g} instead of {right:.6g}"
    scale = right / values[channel]
    near = np.flatnonzero(np.abs(values * scale - observed) < 0.25 / STEPS * abs(scale))
    return f"{words} (what channel {near[0]} should hold)" if len(near) == 1 and near[0] != channel else words


def misplaced(family: Family, seen: Seen) -> tuple[tuple[int, int], Clue] | None:
    """A wrong row that holds, in every channel, what another row should: (the row, the clue). No launch."""
    right, spec = seen.expected, family.problem.spec
    distinct = (right.edges > 0) & right.trusted
    for token, head in np.argwhere(seen.bad):
        row = seen.observed.out[token, head]
        held = ((row >= right.out_lo) & (row <= right.out_hi)).all(axis=-1) & distinct
        held[token, head] = False
        found = np.argwhere(held)
        if len(found) == 1 and row.any():
            other = int(found[0, 0]), int(found[0, 1])
            words = f"holds the result of {place_of(spec, *other)}"
            return (int(token), int(head)), Clue(Kind.MISPLACED, words, Gate.OUT, row=other)
    return None
