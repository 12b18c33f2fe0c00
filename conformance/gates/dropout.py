"""Gate dropout: the keep mask is the one that logical coordinates draw, and it acts on the numerator alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sacts.reports.records import Finding, Gate

from ..launch import Observed
from ..probes.copies import Copy
from ..probes.dropout import mistakes
from .intervals import largest, lse_use
from .witnesses import Worst, judge_explained

ALIKE = 0.05  # distance to what a mistake yields / distance to what is right, up to which the mistake explains a result
WHOLE = 0.1  # edges by which the kept mass may be off a whole number


def judge_dropout(copies: Sequence[Copy], observed: Sequence[Observed], *, explained: bool = True) -> Finding | None:
    """Requirement: a_j = (x0 >= floor(p 2^32)), x0 drawn by (key, query, query head, request uid); the numerator has
    a_j / (1 - p), the denominator every edge. A wrong result that neither is a known mistake nor keeps whole edges
    under a right lse is left to the other gates, unless `explained` is False.
    """
    return judge_explained(
        Gate.DROPOUT, _explanation, "no other mask explains it", copies, observed, explained=explained
    )


def _explanation(copy: Copy, seen: Observed, worst: Worst) -> str:
    if not np.isfinite(seen.out).all():
        return ""
    nearest, best = ALIKE * float(np.linalg.norm(seen.out - copy.expected.out)), ""
    for wrong in mistakes(copy.problem, copy.inputs):
        distance = float(np.linalg.norm(seen.out - wrong.out))
        if distance < nearest:
            nearest, best = distance, wrong.words
    return f"as if {best}" if best else _other_mask(copy, seen, worst)


def _other_mask(copy: Copy, seen: Observed, worst: Worst) -> str:
    """Where lse says that all edges are right and each row of equal weights keeps a whole number of them, a row that
    keeps another number than the right mask does, the worst before others. Where none does it is no fault of the mask.
    """
    dropout, edges = copy.problem.spec.dropout, copy.expected.edges
    if not dropout or seen.lse is None or largest(lse_use(copy.expected, seen)) > 1:
        return ""
    equal = (edges > 0) & (np.abs(np.exp(-np.where(edges > 0, copy.expected.lse, 0.0)) * edges - 1) < 1e-6)
    kept, right = (np.median(x[..., ::2], axis=-1) * edges * (1 - dropout.p) for x in (seen.out, copy.expected.out))
    whole = np.rint(kept)
    if not ((np.abs(kept - whole) <= WHOLE) & (whole >= 0) & (whole <= edges))[equal].all():
        return ""
    other = np.argwhere(equal & (whole != np.rint(right))).tolist()
    if not other:
        return ""
    row = tuple(min(other, key=lambda at: at != [worst.token, worst.head]))
    numbers = f"of {int(edges[row])} edges {int(whole[row])} are kept, {int(np.rint(right[row]))} by the right mask"
    return f"in query token {row[0]}, query head {row[1]}, {numbers}; which, no known mistake tells"
