"""Gates A (out) and lse: every element lies in the interval that the bounds of GATES.md section 2 allow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sacts.reference.bounds import Expected
from sacts.reference.formats import half_spacing
from sacts.reference.spec import AttentionSpec, DType
from sacts.reports.records import Finding, Gate

from ..contract import place_of
from ..launch import Observed

Array = NDArray[np.float64]

LARGEST_USE = 1e30  # stands for infinity, which JSON cannot hold


def use_within(
    observed: Array, expected: Array, allowed: Array, rounding: Array | float, inside: NDArray[np.bool_]
) -> Array:
    """Observed error / allowed error per element, the final rounding taken off: at most 1 exactly where `inside`,
    which decides.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        use = np.maximum(np.abs(observed - expected) - rounding, 0.0) / allowed
    outside = np.where(np.isnan(use), LARGEST_USE, np.clip(use, 1 + 1e-9, LARGEST_USE))
    return np.where(inside, np.clip(np.nan_to_num(use, nan=0.0), 0.0, 1.0), outside)


def out_use(expected: Expected, observed: Observed, dtype: DType) -> Array:
    """[tokens, heads, d_vo]; 0 in rows without a bound. Non-finite values lie in no interval."""
    inside = (observed.out >= expected.out_lo) & (observed.out <= expected.out_hi)
    rounding = half_spacing(np.nan_to_num(observed.out), dtype)
    use = use_within(observed.out, expected.out, expected.half_width, rounding, inside)
    return np.where(expected.trusted[..., None], use, 0.0)


def lse_use(expected: Expected, observed: Observed) -> Array:
    """[tokens, heads]; 0 in rows without a bound, and everywhere where the backend has no lse."""
    if observed.lse is None:
        return np.zeros(expected.lse.shape)
    inside = (observed.lse >= expected.lse - expected.lse_bound) & (observed.lse <= expected.lse + expected.lse_bound)
    use = use_within(observed.lse, expected.lse, expected.lse_bound, 0.0, inside)
    return np.where(expected.trusted, use, 0.0)


def largest(use: Array) -> float:
    """The largest use; 0 for a launch without rows."""
    return float(use.max(initial=0.0))


def judge_lse(spec: AttentionSpec, expected: Expected, observed: Observed) -> Finding | None:
    """Requirement: lse = m + ln l, natural logarithm, -inf for a row without edges, within the lse bound."""
    use = lse_use(expected, observed)
    if largest(use) <= 1:
        return None
    assert observed.lse is not None
    token, head = np.unravel_index(int(use.argmax()), use.shape)
    place = place_of(spec, int(token), int(head))
    seen, right, allowed = (float(x[token, head]) for x in (observed.lse, expected.lse, expected.lse_bound))
    sentence = f"{place}: lse {seen:.7g}, expected {right:.7g} +- {allowed:.2g}{_diagnose_lse(expected, observed)}"
    return Finding(Gate.LSE, place, sentence, use=float(use[token, head]))


def _diagnose_lse(expected: Expected, observed: Observed) -> str:
    assert observed.lse is not None
    rows = np.isfinite(expected.lse) & (np.abs(expected.lse) > 0.1)
    for factor, words in (
        (1 / np.log(2), "base 2 where natural is declared"),
        (np.log(2), "natural where base 2 is declared"),
    ):
        if rows.any() and np.allclose(observed.lse[rows], expected.lse[rows] * factor, rtol=1e-4, atol=0):
            return f"; every row is {factor:.4f} times the expected value: the logarithm is {words}"
    return ""


def judge_out(spec: AttentionSpec, expected: Expected, observed: Observed) -> Finding | None:
    """Requirement (gate A): RN(o - B') <= out <= RN(o + B') for every element, RN rounding to the output format."""
    use = out_use(expected, observed, spec.dtype)
    if largest(use) <= 1:
        return None
    token, head, channel = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
    place = place_of(spec, token, head)
    at = token, head, channel
    wrong = int((use > 1).sum())
    sentence = (
        f"{place}, channel {channel}: out {observed.out[at]:.7g}, allowed {expected.out_lo[at]:.7g} to "
        f"{expected.out_hi[at]:.7g} ({wrong} of {use.size} elements are outside)"
    )
    return Finding(Gate.OUT, place, sentence, use=float(use[at]))
