"""What the device can do at most, measured in the process that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import l2, timing
from .timing import Clock

COPY_BYTES, TINY_COPY_BYTES = 4 << 30, 1 << 20  # of the source; far beyond the L2
GEMM_SIZE, TINY_GEMM_SIZE = 8192, 128
SECONDS = 0.5


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a copy (read and written bytes together) and of a sum that only reads; FLOP/s of a square
    BF16 product; bytes per second that the L2 delivers, 0 where that was not measured.
    """

    copy: float
    read: float
    gemm: float
    l2: float = 0.0

    @property
    def bandwidth(self) -> float:
        """The larger of both bandwidths: nothing that reads memory is faster."""
        return max(self.copy, self.read)


def measure(device: str, clock: Clock) -> Ceilings:
    """The ceilings of a device, by medians."""
    on_gpu = device.startswith("cuda")
    size = COPY_BYTES if on_gpu else TINY_COPY_BYTES
    edge = GEMM_SIZE if on_gpu else TINY_GEMM_SIZE
    return Ceilings(*_bandwidths(size, device, clock), _product(edge, device, clock), _l2(device, clock))


def _l2(device: str, clock: Clock) -> float:
    if not l2.can_read(device):
        return 0.0
    read, size = l2.reading(device)
    return _rate(size, read, clock)


def _bandwidths(size: int, device: str, clock: Clock) -> tuple[float, float]:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return _rate(2 * size, lambda: target.copy_(source), clock), _rate(size, lambda: source.sum(), clock)


def _product(edge: int, device: str, clock: Clock) -> float:
    a, b = (torch.randn(edge, edge, device=device).bfloat16() for _ in range(2))
    return _rate(2 * edge**3, lambda: a @ b, clock)


def _rate(work: float, run: Callable[[], object], clock: Clock) -> float:
    return work / (timing.measure([run], clock, SECONDS).median * 1e-3)
