"""Logits in whole octaves below the row's maximum, and +-1 codes whose sum vanishes only if every octave is counted.

`cliff`: one rise of ten octaves at one tile boundary; partners of opposite code stand before it and behind it at the
low level. `stair`: the maximum climbs from tile to tile; partners share a level, mostly across tiles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sacts.reference.formats import round_to
from sacts.reference.spec import DType

from ..draw import Array, Draw
from .rows import RowSlots

Ints = NDArray[np.int64]

DROP = 10  # octaves of a cliff: more than the 8 that a running maximum may lag
OCTAVES = 12  # of a whole stair
PIECES = 3  # values of one format whose sum is a level to FP32 accuracy and beyond


class Levels(NamedTuple):
    """level [k]: octaves below the maximum; codes [k, channels]: -1, 0 or 1; rise [k]: how many octaves the maximum
    rises when the key's tile comes in, 0 where it does not.
    """

    level: Ints
    codes: Array
    rise: Ints


def boundaries(row: RowSlots) -> list[int]:
    """Tiles that a cliff may stand before: two keys or more follow it."""
    return [tile for tile in range(1, row.tiles) if (row.tile >= tile).sum() >= 2]


def cliff(row: RowSlots, boundary: int, channels: int, draw: Draw) -> Levels:
    """A cliff before the tile `boundary`."""
    before, behind = np.flatnonzero(row.tile < boundary), np.flatnonzero(row.tile >= boundary)
    first = behind[:1]  # stands at the top, so that the maximum rises in this very tile
    rest = behind[1:][draw.permutation(len(behind) - 1)]
    pairs = min(len(before), -(-len(rest) // 2))
    low, top = rest[:pairs], np.concatenate((first, rest[pairs:]))
    level = np.zeros(len(row.t), np.int64)
    level[before], level[low] = DROP, DROP
    codes = np.zeros((len(row.t), channels))
    _pair(codes, before[draw.permutation(len(before))[:pairs]], low, draw)
    _pair(codes, top[: len(top) // 2], top[len(top) // 2 : len(top) // 2 * 2], draw)
    return Levels(level, codes, np.where(row.tile == boundary, DROP, 0))


def stair(row: RowSlots, channels: int, draw: Draw) -> Levels:
    """A stair over all tiles."""
    top = (row.tiles - 1 - np.arange(row.tiles)) * OCTAVES // row.tiles
    uniform = draw.permutation(len(row.t)) / len(row.t)
    level = top[row.tile] + np.floor(uniform * (OCTAVES - top[row.tile])).astype(np.int64)
    _, first = np.unique(row.tile, return_index=True)
    level[first] = top
    codes = np.zeros((len(row.t), channels))
    for each in np.unique(level):
        mine = np.flatnonzero(level == each)
        half = len(mine) // 2
        _pair(codes, mine[:half], mine[len(mine) - half :], draw)
    codes[:, ::2] = draw.signs(codes[:, ::2].shape)
    rise = -np.diff(top, prepend=top[:1])
    return Levels(level, codes, rise[row.tile])


def _pair(codes: Array, some: Ints, others: Ints, draw: Draw) -> None:
    codes[some] = draw.signs((len(some), codes.shape[1]))
    codes[others] = -codes[some]


def keys(levels: Ints, sm_scale: float, dtype: DType) -> Array:
    """K [k, PIECES] with q = 1: sm_scale * sum is -level ln 2."""
    rest = -levels * math.log(2.0) / sm_scale
    pieces = []
    for _ in range(PIECES):
        pieces.append(round_to(rest, dtype))
        rest = rest - pieces[-1]
    return np.stack(pieces, axis=-1)


def unscaled(levels: Levels, row: RowSlots) -> Array:
    """How far the code channels of out move where the accumulator misses the rescale of one rise: [rises, channels]."""
    weights = 2.0**-levels.level
    weights /= weights.sum()
    moved = [np.zeros((0, levels.codes.shape[1]))]
    for tile in np.unique(row.tile[levels.rise > 0]):
        before = row.tile < tile
        rise = float(levels.rise[row.tile == tile].max())
        moved.append(np.abs(weights[before] @ levels.codes[before])[None] * (2.0**rise - 1))
    return np.concatenate(moved)
