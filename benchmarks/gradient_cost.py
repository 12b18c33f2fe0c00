"""The cost of the layer of gradients: the time of all its probes on each smoke cell / that of the random values alone,
launched and with their bounds, and / that of judging the cell without it.

`OMP_NUM_THREADS=1 python benchmarks/gradient_cost.py` for the modelled kernel; `... sdpa cuda` for another.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from sacts.conformance.adapter import Backend
from sacts.conformance.backward_launch import launch_backward
from sacts.conformance.build import build
from sacts.conformance.gradients import judge_gradients
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.loading import load
from sacts.conformance.probes.gradients import random_copy
from sacts.matrices import tiers
from sacts.matrices.cell import Cell

REPEATS = 3
MODEL = "sacts.kernels_under_test.emulation.adapter:Adapter"


def fastest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


class Forward:
    """The same backend without its backward."""

    def __init__(self, backend: Backend) -> None:
        self.run, self.support = backend.adapter.run, backend.support
        self.capabilities = backend.capabilities


def ratios(backend: Backend, device: str, cell: Cell, clock: Callable[[], float]) -> tuple[float, float, float]:
    """All gradient probes / the random ones, / the whole of forward, and their seconds."""
    launcher, forward, problem = Launcher(backend, device), Launcher(Backend(Forward(backend)), device), build(cell)

    def random_case() -> None:
        copy = random_copy(problem, backend)
        launch_backward(launcher, problem, copy.inputs, copy.call)

    judge_gradients(launcher, problem)
    whole = fastest(lambda: judge_gradients(launcher, problem), clock)
    return whole / fastest(random_case, clock), whole / fastest(lambda: judge(forward, "x", cell), clock), whole


def main() -> None:
    """Print each cell's ratios, then the medians and the whole time."""
    name = sys.argv[1] if len(sys.argv) > 1 else MODEL
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    backend, clock = load(name), time.process_time if device == "cpu" else time.perf_counter
    found = []
    for cell in tiers.load(tiers.path_of("smoke")):
        found.append(ratios(backend, device, cell, clock))
        print(f"{found[-1][0]:5.1f} {found[-1][1]:5.2f}  {cell.id}")
    case, judged, seconds = zip(*found, strict=True)
    print(
        f"median {statistics.median(case):.2f} of the random case, {statistics.median(judged):.2f} of forward,", end=" "
    )
    print(f"all cells {sum(seconds):.1f} s")


if __name__ == "__main__":
    main()
