"""Numbers from names: raw Philox words keyed by a hash of (cell id, probe, replicate, purpose), the same on every
machine.

NumPy's derived streams (normal, permutation) are not stable across versions; everything here uses integers and exact
sums.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Draw:
    """A stream that depends on `names` alone."""

    def __init__(self, *names: object) -> None:
        digest = blake2b("\0".join(map(str, names)).encode(), digest_size=16).digest()
        self._philox = np.random.Philox(key=int.from_bytes(digest, "little"))

    def _raw(self, n: int) -> NDArray[np.uint64]:
        return np.asarray(self._philox.random_raw(n), np.uint64)

    def permutation(self, n: int) -> Ints:
        """0..n-1 in random order."""
        return np.argsort(self._raw(n), kind="stable")

    def integer(self, low: int, high: int) -> int:
        """One integer in [low, high)."""
        return low + int(self._raw(1)[0] % np.uint64(high - low))

    def signs(self, shape: tuple[int, ...]) -> Array:
        """+1 or -1."""
        return (self._raw(math.prod(shape)).reshape(shape) >> np.uint64(63)).astype(np.float64) * 2 - 1

    def normal(self, shape: tuple[int, ...]) -> Array:
        """Mean 0, variance 1, |x| < 6: the sum of twelve 16-bit uniforms, which is exact, so the same everywhere."""
        n = math.prod(shape)
        parts = self._raw(3 * n).view(np.uint16).reshape(n, 12)
        total: Array = parts.sum(axis=1, dtype=np.uint32).astype(np.float64)
        return ((total + 6) / 65536 - 6).reshape(shape)
