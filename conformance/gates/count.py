"""The count witness: a missing or doubled candidate is detected in one launch, and named by row and token, without a
look inside.

Logits are all equal, V holds +-1 codes, so out is the mean code and lse is ln k, almost to the bit. `localise` decodes
what is wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sacts.reference.bounds import Expected
from sacts.reference.forward import Inputs
from sacts.reference.spec import EpilogueKind, Hints
from sacts.reports.records import Finding, Gate

from ..build import Problem
from ..contract import place_of
from ..launch import Launcher, Observed
from ..localise.count import explain_count
from .intervals import largest, out_use


def judge_count(
    launcher: Launcher,
    problem: Problem,
    inputs: Inputs,
    expected: Expected,
    observed: Observed,
    hints: Hints,
    codes: NDArray[np.bool_],
) -> Finding | None:
    """Requirement: each row attends exactly its candidates, each once (set), and its denominator counts the same
    edges. `codes` [d_vo]: the channels that hold codes.
    """
    use = np.where(codes, out_use(expected, observed, problem.spec.dtype), 0.0)
    if largest(use) <= 1:
        return None
    token, head, channel = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
    place = place_of(problem.spec, token, head)
    k = int(expected.edges[token, head])
    seen = float(observed.out[token, head, channel])
    gate, strip = Gate.COUNT, None
    if not k or not np.isfinite(seen):
        words = f"channel {channel} is {seen:.7g}, " + (
            "must be finite" if k else "but the row has no edge: out must be 0"
        )
    elif problem.spec.v_codec or problem.spec.epilogue.kind is not EpilogueKind.NONE:
        # tomography needs one-hot V, which codes need not hold, and weights that show in out as they are
        low, high = (float(x[token, head, channel]) for x in (expected.out_lo, expected.out_hi))
        words = f"channel {channel} of the mean code is {seen:.7g}, allowed {low:.7g} to {high:.7g}"
    else:
        gate, words, strip = explain_count(launcher, problem, inputs, expected, observed, (token, head), hints)
    if not words:
        gate = Gate.MASS
        low, high = (float(x[token, head, channel]) for x in (expected.out_lo, expected.out_hi))
        words = (
            f"channel {channel} of the mean code is {seen:.7g}, allowed {low:.7g} to {high:.7g}, "
            "yet the decoded membership is right: the numerator does not weigh what the denominator counts"
        )
    rows = int((use > 1).any(axis=-1).sum())
    more = f" ({rows} of {use.shape[0] * use.shape[1]} output rows are wrong)" if rows > 1 else ""
    return Finding(gate, place, f"{place}: {words}{more}", use=float(use[token, head, channel]), strip=strip)
