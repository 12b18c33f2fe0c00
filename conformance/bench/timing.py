"""Times of a call: device events on a GPU, the host's clock elsewhere. All in milliseconds.

Events of all runs are recorded before any is read, so that the device never waits for the host longer than an eager
call makes it wait. A graph holds each rotation once, in turn; its time is divided by their number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

WARM_UPS = 100
EVENTS = 1000
SHORT = 1.0  # ms: at least EVENTS of a run that takes less
LEAST_EVENTS = 20  # of a run that takes longer, however little time there is
CPU_WARM_UPS, CPU_EVENTS = 1, 3
PLANS = 5


@dataclass(frozen=True)
class Times:
    """Median, 95th and 99th percentile in ms of `events` runs, and how many warm-ups came before."""

    median: float
    p95: float
    p99: float
    events: int
    warm_ups: int


class Clock(Protocol):
    """What measures: `events(runs)` times each in turn."""

    warm_ups: int
    least: int
    most: int

    def events(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """The ms that each run took, in order."""


class HostClock:
    """The host's clock, for devices whose calls return when they are done."""

    warm_ups, least, most = CPU_WARM_UPS, CPU_EVENTS, CPU_EVENTS

    def events(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """The ms that each run took, in order."""
        return [_host_ms(run) for run in runs]


class DeviceClock:
    """CUDA events."""

    warm_ups, least, most = WARM_UPS, LEAST_EVENTS, EVENTS

    def events(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """The ms that each run took, in order."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs]
        torch.cuda.synchronize()
        for (start, end), run in zip(pairs, runs, strict=True):
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairs]


def _host_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def clock_of(device: str) -> Clock:
    """The clock of a torch device."""
    return DeviceClock() if device.startswith("cuda") else HostClock()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed. Raises ValueError where there is none."""
    if not values:
        raise ValueError("no times: a percentile needs at least one")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def count_of(estimate: float, seconds: float, clock: Clock) -> int:
    """Events for a run of about `estimate` ms: all that the clock wants where it takes less than SHORT, else what
    `seconds` hold, and never less than its least.
    """
    if estimate < SHORT:
        return clock.most
    return max(clock.least, min(clock.most, int(seconds * 1e3 / estimate)))


def rotated(runs: Sequence[Callable[[], object]], count: int, first: int = 0) -> list[Callable[[], object]]:
    """`count` runs, each rotation in turn, beginning with number `first`."""
    return [runs[(first + i) % len(runs)] for i in range(count)]


def measure(runs: Sequence[Callable[[], object]], clock: Clock, seconds: float, per_run: int = 1) -> Times:
    """Time rotations in turn, warmed up first; `per_run`: calls in each, by which its time is divided. Of a run of more
    than SHORT ms, at most `seconds` of warm-ups and of events, but no fewer than the clock's least.
    """
    estimate = percentile(clock.events(list(runs)), 0.5)
    warm_ups = max(1, -(-clock.warm_ups // per_run))
    if estimate >= SHORT:
        warm_ups = max(len(runs), min(warm_ups, int(seconds * 1e3 / estimate)))
    clock.events(rotated(runs, warm_ups))
    times = clock.events(rotated(runs, count_of(estimate, seconds, clock), warm_ups))
    median, p95, p99 = (percentile(times, share) / per_run for share in (0.5, 0.95, 0.99))
    return Times(median, p95, p99, len(times), warm_ups * per_run)


def plan_ms(plan: Callable[[], object], synchronise: Callable[[], object]) -> float:
    """The median host time of a plan, with what it leaves on the device."""

    def whole() -> None:
        plan()
        synchronise()

    synchronise()
    return percentile([_host_ms(whole) for _ in range(PLANS)], 0.5)


def graph_of(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A CUDA graph of all runs in turn, as one call that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay
