"""What the bundled adapter does with hints, plans and workspaces, as JSON: run by test_kernel_tasks.py in a process of
its own, because TRITON_INTERPRET binds when a kernel is decorated.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch

from sacts.conformance import tensors
from sacts.conformance.adapter import Backend, Case, Refused
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.matrices.cell import parse
from sacts.reference.spec import Route, Schedule

GATHERS = (Route.GATHER, Route.GATHER_HEADS)


def bits(launcher: Launcher, cell: str) -> dict[str, str]:
    """A hash of out and lse, by schedule and route."""
    problem = build(parse(cell))
    found = {}
    ways = [*((schedule, Route.DIRECT) for schedule in Schedule), *((Schedule.PERSISTENT, route) for route in GATHERS)]
    for schedule, route in ways:
        hints = replace(problem.hints, schedule=schedule, route=route)
        seen = launcher(problem, RANDOM.inputs(problem), hints=hints)
        assert seen.lse_bits is not None
        both = seen.out_bits.tobytes() + seen.lse_bits.tobytes()
        found[f"{schedule} {route}"] = blake2b(both, digest_size=8).hexdigest()
    return found


def sized(adapter: Adapter, case: Case, extra: int) -> dict[str, Any]:
    """A run in a workspace that is `extra` bytes larger than was asked for: what it did, or how it was refused."""
    asked = adapter.workspace_bytes(case)
    workspace = tensors.Guarded.make((asked + extra,), torch.uint8, "cpu")
    workspace.inner.fill_(0xFF)
    before = case.lse.clone()
    try:
        adapter.run(replace(case, workspace=workspace.inner))
    except Refused as refused:
        untouched = torch.equal(case.lse, before) and bool((workspace.inner == 0xFF).all())
        return {"asked": asked, "refused": str(refused), "untouched": untouched}
    return {"asked": asked, "broken": workspace.broken(), "sum": float(case.lse.double().sum())}


def main(cells: list[str]) -> None:
    adapter = Adapter()
    launcher = Launcher(Backend(adapter), "cpu")
    for cell in cells:
        problem = build(parse(cell))
        inputs = RANDOM.inputs(problem)
        cases = [launcher.case(problem, inputs, replace(problem.hints, route=route)) for route in Route]
        said = {
            "cell": cell,
            "bits": bits(launcher, cell),
            "sized": [[sized(adapter, case, extra) for extra in (0, 5, -1)] for case in cases[:2]],
        }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
