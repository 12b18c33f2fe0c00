"""Launches under a budget: one input family on one problem, and what came back beside what must come back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.bounds import Exactness, Expected, expected
from sacts.reference.forward import Inputs
from sacts.reference.numerics import Numerics
from sacts.reference.spec import EpilogueKind, Hints

from ..build import Problem
from ..gates.intervals import lse_use, out_use
from ..launch import Launcher, Observed
from ..messages import BUDGET

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]


class BudgetSpent(Exception):
    """No launch is left."""


@dataclass(frozen=True)
class Family:
    """Values of q, K and V on a problem, what they prove about the arithmetic, and the hints of the launch.

    `equal`: all logits of a row are one number, so that every edge weighs the same.
    """

    problem: Problem
    inputs: Inputs
    exactness: Exactness
    hints: Hints

    @property
    def equal(self) -> bool:
        """Whether every edge of a row has the same logit."""
        return self.exactness.equal_logits

    @property
    def shows_v(self) -> bool:
        """Whether V may hold any numbers, and out shows their weights: not in codes, nor before an epilogue."""
        spec = self.problem.spec
        return spec.v_codec is None and spec.epilogue.kind is EpilogueKind.NONE

    def with_v(self, v: Array, *, integers: bool) -> Family:
        """Other values of V [L, page_size, num_kv_heads, d_vo]; `integers`: their sums are exact where they were."""
        exactness = self.exactness if integers else replace(self.exactness, exact_sums=False)
        return replace(self, inputs=self.inputs._replace(v=replace(self.inputs.v, data=v)), exactness=exactness)

    def with_splits(self, num_splits: int) -> Family:
        """The same under another number of splits."""
        return replace(self, hints=replace(self.hints, num_splits=num_splits))


@dataclass(frozen=True)
class Seen:
    """One launch. `out_use` [tokens, heads, d_vo] and `lse_use` [tokens, heads]: observed / allowed error."""

    expected: Expected
    observed: Observed
    out_use: Array
    lse_use: Array

    @property
    def bad(self) -> Bools:
        """Output rows that leave their bounds: [tokens, heads]."""
        return (self.out_use > 1).any(axis=-1) | (self.lse_use > 1)


def reference(launcher: Launcher, family: Family) -> Expected:
    """What a launch of this family must give, by the backend's numerics contract."""
    problem, numerics = family.problem, reference_numerics(launcher, family)
    return expected(problem.spec, family.inputs, problem.table, problem.candidates, numerics, family.exactness)


def reference_numerics(launcher: Launcher, family: Family) -> Numerics:
    """The backend's numerics contract for a launch of this family."""
    return launcher.backend.numerics(family.problem.spec.dtype, family.hints, family.problem.branches)


def compare(family: Family, right: Expected, observed: Observed) -> Seen:
    """Observed beside expected."""
    return Seen(right, observed, out_use(right, observed, family.problem.spec.dtype), lse_use(right, observed))


class Meter:
    """Launches a backend and counts."""

    def __init__(self, launcher: Launcher, budget: int = BUDGET) -> None:
        self.launcher = launcher
        self.budget = budget
        self.launches = 0

    def __call__(self, family: Family) -> Seen:
        """One launch. Raises BudgetSpent after `budget` launches, and what `Launcher` raises."""
        if self.launches >= self.budget:
            raise BudgetSpent(f"all {self.budget} launches are used")
        self.launches += 1
        observed = self.launcher(family.problem, family.inputs, hints=family.hints)
        return compare(family, reference(self.launcher, family), observed)
