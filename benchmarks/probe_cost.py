"""The cost of all probes: CPU time of judging each smoke cell / of one plain launch of its random values, for the
bundled kernel in the interpreter. `TRITON_INTERPRET=1 OMP_NUM_THREADS=1 python benchmarks/probe_cost.py`
"""

from __future__ import annotations

import statistics
import time

from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.loading import load
from sacts.conformance.probes.inputs import RANDOM
from sacts.matrices import tiers

REPEATS = 3


def main() -> None:
    """Print each cell's ratio, then the median and the whole time."""
    launcher, ratios, total = Launcher(load("triton"), "cpu"), [], 0.0
    for cell in tiers.load(tiers.path_of("smoke")):
        problem = build(cell)
        inputs = RANDOM.inputs(problem)
        launcher(problem, inputs)
        plain, whole = [], []
        for _ in range(REPEATS):
            start = time.process_time()
            launcher(problem, inputs)
            middle = time.process_time()
            judge(launcher, "triton", cell)
            plain.append(middle - start)
            whole.append(time.process_time() - middle)
        ratios.append(min(whole) / min(plain))
        total += min(whole)
        print(f"{ratios[-1]:5.1f}  {cell.id}")
    print(f"median {statistics.median(ratios):.2f}, all cells {total:.1f} s")


if __name__ == "__main__":
    main()
