"""The detection table: the gates see what today's rules miss, and a right kernel is rejected by none of ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from sacts.conformance.detection import GATES, RULES, WITNESS, FaultyAdapter, Trial, table, trials
from sacts.kernels_under_test.faults.detection import AXES, OneFault, names
from sacts.matrices.cell import parse
from sacts.reports.records import PROVES

CELL = parse("decode/bf16/kv:249+249/heads:2-1/dim:32/pattern:all/splits:4/tile:16")
OURS = GATES[-1]
# What only the witnesses see (docs/detection.md); a flat input hides what a scale or a rescale does.
UNSEEN = ("gain 1e-3", "P truncated, not rounded", "bf16 accumulator", "one late rescale skipped")
# A P that is a power of two is not truncated; where P is generic, several share a channel: docs/detection.md.
UNWITNESSED = ("P truncated, not rounded",)
HIDDEN_WHERE_FLAT = (
    "two V rows swapped",
    "K scale wrong, one page",
    "accumulator never rescaled",
)


@cache
def found(fault: str) -> tuple[Trial, ...]:
    adapter = FaultyAdapter(OneFault, lambda made: made.capabilities.numerics_of(made.dtype))
    return tuple(trials({fault: replace(CELL, **AXES.get(fault, {}))}, 2, adapter))  # type: ignore[arg-type]  # axes by name


@pytest.mark.parametrize("fault", [name for name in names() if name not in UNSEEN])
def test_two_trials_of_each_fault_are_rejected(fault: str) -> None:
    for trial in found(fault):
        if trial.family != WITNESS and not (trial.family == "flat" and fault in HIDDEN_WHERE_FLAT):
            assert OURS in trial.rejected, trial.family


@pytest.mark.parametrize("fault", [name for name in names() if name not in UNWITNESSED])
def test_a_witness_sees_each_fault(fault: str) -> None:
    """Also those below the resolution of any generic input."""
    assert all(trial.rejected for trial in found(fault) if trial.family == WITNESS), found(fault)


def test_no_gate_rejects_a_right_kernel() -> None:
    for trial in found(""):
        assert not trial.rejected & {*GATES, *PROVES}


@pytest.mark.parametrize(
    "fault", ["drop one", "mask after exp (7 slots)", "LSE misses a split", "zero tail keys unmasked"]
)
def test_allclose_accepts_what_the_gates_reject(fault: str) -> None:
    assert any("allclose 1e-2" not in trial.rejected and OURS in trial.rejected for trial in found(fault))


def test_the_table_has_a_row_for_each_fault_and_both_shares() -> None:
    lines = table([*found(""), *found("drop one")]).splitlines()
    assert lines[0] == f"| fault | {' | '.join((*RULES, *GATES))} | witness |"
    assert lines[2].startswith("| **correct kernel** |")
    assert lines[3].startswith("| drop one |")
    assert all(cell.strip().count("/") == 1 for cell in lines[3].split("|")[2:-2])
    assert lines[3].endswith(" | count 100 |")
