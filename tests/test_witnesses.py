"""Each new probe, and the random one, shows a seeded fault that no other probe shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHOWN = """
import json, sys
from dataclasses import replace
from sacts.conformance.build import build
from sacts.conformance.gates.intervals import largest, lse_use
from sacts.conformance.gates.witnesses import used
from sacts.conformance.launch import Launcher
from sacts.conformance.loading import load
from sacts.conformance.probes.copies import copies
from sacts.matrices.cell import parse
found = {}
for name, cell in json.loads(sys.argv[1]):
    launcher = Launcher(load(f"sacts.kernels_under_test.faults:{name}"), "cpu")
    problem = build(parse(cell))
    shown = set()
    for copy in copies(problem, launcher.backend.capabilities.numerics_of(problem.spec.dtype)):
        seen = launcher(copy.problem, copy.inputs)
        shown |= {probe for probe in copy.judged if used(copy, seen, probe) > 1}
        shown |= {f"lse of {sorted(copy.judged)}"} if largest(lse_use(copy.expected, seen)) > 1 else set()
    found[name] = sorted(shown)
print(json.dumps(found))
"""
CLIMB = "decode/fp32/kv:200/pattern:all/tile:32"
ONLY = {
    "gain_in_out": ("decode/bf16/kv:60/pattern:all", "dither"),
    "exponent_clamped": (CLIMB, "select"),
    "large_rise_not_rescaled": (CLIMB, "cliff"),
    "late_rise_not_rescaled": ("decode/fp32/kv:160/pattern:all", "stair"),
    "small_weights_skip_v": (CLIMB, "comb"),
    "values_saturate": (CLIMB, "random"),
}


@pytest.fixture(scope="module")
def shown() -> dict[str, list[str]]:
    pairs = json.dumps([(name, cell) for name, (cell, _) in ONLY.items()])
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SHOWN, pairs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result: dict[str, list[str]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("fault", ONLY)
def test_a_fault_shows_in_the_one_probe_that_was_made_for_it(shown: dict[str, list[str]], fault: str) -> None:
    assert shown[fault] == [ONLY[fault][1]]
