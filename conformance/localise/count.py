"""A row that fails the count witness, decoded: its residual names suspects for nothing, tomography confirms them."""

from __future__ import annotations

import numpy as np

from sacts.reference.bounds import Exactness, Expected
from sacts.reference.forward import Inputs
from sacts.reference.spec import Hints
from sacts.reports.records import Gate, Strip

from ..build import Problem
from ..launch import Launcher, Observed
from ..probes.inputs import dithered
from .clues import Reading, read
from .launches import Family, Meter
from .tomography import decode, suspects_of


def explain_count(
    launcher: Launcher,
    problem: Problem,
    inputs: Inputs,
    expected: Expected,
    observed: Observed,
    row: tuple[int, int],
    hints: Hints,
) -> tuple[Gate, str, Strip | None]:
    """What is wrong with output row (token, query head) of a launch of equal logits: the gate that is to blame, the
    words (empty where the decoded row is right), and its strip.
    """
    family = Family(problem, inputs, Exactness(equal_logits=True), hints)
    reading = read_count(Meter(launcher), family, expected, observed, row)
    words = "; ".join(clue.words for clue in reading.clues)
    return (reading.clues[0].gate if reading.clues else Gate.COUNT), words, reading.strip


def read_count(meter: Meter, family: Family, expected: Expected, observed: Observed, row: tuple[int, int]) -> Reading:
    """Decode the row; slots whose code matches the residual of the sum of codes are looked at alone from the start."""
    k = int(expected.edges[row])
    residual = (observed.out[row] - expected.out[row]) * k
    limit = family.problem.spec.head_dim_vo // 4
    suspects = None
    if k and np.isfinite(residual).all():
        codes = ~dithered(family.problem)
        suspects = suspects_of(family.problem, family.inputs.v.data[..., codes], residual[codes], limit)
    return read(family, decode(meter, family, *row, suspects=suspects), *row)
