"""The cost of all probes: the time of judging each smoke cell / that of its random values alone, launched and with
their bounds, and / that of the launch alone, for the bundled kernel.

`TRITON_INTERPRET=1 OMP_NUM_THREADS=1 python benchmarks/probe_cost.py` in the interpreter (processor time);
`python benchmarks/probe_cost.py cuda` on a GPU (wall clock, compiled before).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.loading import load
from sacts.conformance.probes.copies import values_of
from sacts.conformance.probes.inputs import RANDOM
from sacts.matrices import tiers
from sacts.matrices.cell import Cell

REPEATS = 3


def fastest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def ratios(launcher: Launcher, cell: Cell, clock: Callable[[], float]) -> tuple[float, float, float]:
    """All probes / the random case, all probes / its launch, and the seconds of all probes."""
    problem = build(cell)
    inputs = RANDOM.inputs(problem)
    numerics = launcher.backend.capabilities.numerics_of(problem.spec.dtype)

    def random_case() -> None:
        launcher(build(cell), inputs)
        values_of(problem, RANDOM, numerics)

    judge(launcher, "triton", cell)
    whole = fastest(lambda: judge(launcher, "triton", cell), clock)
    case, launch = fastest(random_case, clock), fastest(lambda: launcher(problem, inputs), clock)
    return whole / case, whole / launch, whole


def main() -> None:
    """Print each cell's ratios, then the medians and the whole time."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    launcher = Launcher(load("triton"), device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    found = []
    for cell in tiers.load(tiers.path_of("smoke")):
        found.append(ratios(launcher, cell, clock))
        print(f"{found[-1][0]:5.1f} {found[-1][1]:5.1f}  {cell.id}")
    case, launch, seconds = zip(*found, strict=True)
    print(
        f"median {statistics.median(case):.2f} of the random case, {statistics.median(launch):.2f} of its launch,",
        end=" ",
    )
    print(f"all cells {sum(seconds):.1f} s")


if __name__ == "__main__":
    main()
