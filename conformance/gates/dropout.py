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
    """The kept edges of the worst row, where lse says that its edges are the right ones and each weighs the same."""
    spec = copy.problem.spec
    same = largest(lse_use(copy.expected, seen)) <= 1 and seen.lse is not None
    row = worst.token, worst.head
    k = int(copy.expected.edges[row])
    share = np.exp(-copy.expected.lse[row])
    if not same or not spec.dropout or not k or abs(share * k - 1) > 1e-6:
        return ""
    seen_kept, right = (float(np.median(x[row][::2])) * k * (1 - spec.dropout.p) for x in (seen.out, copy.expected.out))
    if abs(seen_kept - round(seen_kept)) > WHOLE or not 0 <= round(seen_kept) <= k:
        return ""
    return f"of {k} edges {round(seen_kept)} are kept, {round(right)} by the right mask; which, no known mistake tells"
