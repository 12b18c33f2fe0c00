"""What the traces of adapters show, each in a cell, a line each: `right`, or gate and sentence. Run by
test_kernel_trace.py in a process of its own, because TRITON_INTERPRET binds when a kernel is decorated.
"""

from __future__ import annotations

import sys

from sacts.conformance.build import build
from sacts.conformance.inspection import traced
from sacts.conformance.launch import Launcher
from sacts.conformance.loading import load
from sacts.conformance.probes.inputs import RANDOM
from sacts.matrices.cell import parse


def main(adapters: list[str], cells: list[str]) -> None:
    for adapter, cell in zip(adapters, cells, strict=True):
        launcher, problem = Launcher(load(adapter), "cpu"), build(parse(cell))
        finding = traced(launcher, problem, RANDOM.inputs(problem), problem.hints)
        print("right" if finding is None else f"{finding.gate}: {finding.sentence}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1::2], sys.argv[2::2])
