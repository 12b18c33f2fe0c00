"""K of +-1 codes. `select`: a query that is a multiple of one key's code gives that key all the mass. `comb`: a generic
query, read through one-hot V.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..draw import Array, Draw
from .rows import RowSlots

Ints = NDArray[np.int64]

GAP = 32.0  # nats between the selected key and the next: together the others weigh less than 2^-24 up to 10^6 keys
LARGEST_FACTOR = 2.0**8  # of a code, so that logits stay far from where bounds end
SPREAD = 2.0  # standard deviation of the logits of `comb`, in nats


def edge_tokens(row: RowSlots, page_size: int, draw: Draw) -> Ints:
    """Places in the row of the keys that addressing mistakes hit first: the last key and the first, then, in random
    order, the first and the last of each page.
    """
    page = row.t // page_size
    turn = np.flatnonzero(np.diff(page))
    edges = np.unique(np.concatenate((turn, turn + 1))).astype(np.int64)
    edges = edges[draw.permutation(len(edges))]
    return np.asarray(list(dict.fromkeys([len(row.t) - 1, 0, *edges.tolist()])), np.int64)


def factor(codes: Array, target: int, sm_scale: float, spread: float = 0.0) -> float | None:
    """The power of two by which q must exceed the code of the key `target` among codes [k, n]; None where another key
    is too like it. `spread`: nats by which other terms may raise the others above it.
    """
    overlap = codes @ codes[target]
    others = np.delete(overlap, target)
    gap = float(overlap[target] - others.max(initial=-np.inf))
    if not math.isfinite(gap):
        return 1.0
    if gap <= 0:
        return None
    needed = 2.0 ** max(0, math.ceil(math.log2((GAP + spread) / (abs(sm_scale) * gap))))
    return needed if needed <= LARGEST_FACTOR else None


def generic(n: int, sm_scale: float, draw: Draw) -> Array:
    """A query over n codes whose logits spread by SPREAD."""
    return draw.normal((n,)) * SPREAD / (abs(sm_scale) * math.sqrt(n))


def teeth(row: RowSlots, page_size: int, channels: int) -> Array:
    """V [k, channels]: one-hot by place in the row in the first half, by logical page in the second."""
    half = channels // 2
    v = np.zeros((len(row.t), channels))
    place = np.arange(len(row.t))
    v[place, place % half] = 1.0
    v[place, half + row.t // page_size % (channels - half)] = 1.0
    return v
