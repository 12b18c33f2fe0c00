"""Philox4x32-10 (Salmon et al., SC 2011; Random123): random words as a function of a counter, and dropout from it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .spec import Dropout

Words = NDArray[np.uint64]

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
ROUNDS = 10


def philox4x32(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]) -> tuple[Words, ...]:
    """The four output words of each counter; its words broadcast and are taken modulo 2^32, so -1 is 0xFFFFFFFF."""
    c0, c1, c2, c3 = (np.asarray(word).astype(np.int64).astype(np.uint64) & WORD for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(ROUNDS):
        a, b = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & WORD, (a >> HALF) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def keep(
    dropout: Dropout, key: ArrayLike, query: ArrayLike, qo_head: ArrayLike, request_uid: ArrayLike
) -> NDArray[np.bool_]:
    """a_j of each edge (arguments broadcast): x0 >= floor(p * 2^32), counter (key, query, query head, request uid).

    `key`: logical position of the key, or its ordinal in a sequence; `query`: logical position of the query.
    """
    seed = dropout.seed & 0xFFFFFFFF, dropout.seed >> 32
    x0 = philox4x32((key, query, qo_head, request_uid), seed)[0]
    return x0 >= np.uint64(math.floor(dropout.p * 2**32))
