"""Runs: neighbours of equal value in a sorted array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def runs(x: Ints) -> tuple[Ints, Ints]:
    """Where each run of equal values in x [n] starts, and how many it has. (np.diff with `prepend` is far slower.)"""
    first = np.ones(len(x), bool)
    np.not_equal(x[1:], x[:-1], out=first[1:])
    start = first.nonzero()[0]
    length = np.empty_like(start)
    np.subtract(start[1:], start[:-1], out=length[:-1])
    length[-1:] = len(x) - start[-1:]
    return start, length
