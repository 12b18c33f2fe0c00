"""Gate scale: quantised K and V are decoded with their own scales and zero points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sacts.reports.records import Finding, Gate

from .. import sample
from ..draw import Array
from ..launch import Observed
from ..probes.copies import Copy
from ..probes.scale import mistakes, single_pages
from .witnesses import Worst, judge_explained

ALIKE = 0.05  # distance to what a mistake yields / distance to what is right, up to which the mistake explains a result
LIKELIER = 0.5  # so much nearer must a mistake about one page be than one about all
PAGES = 16  # of a row that are looked at one by one


def judge_scale(copies: Sequence[Copy], observed: Sequence[Observed], *, explained: bool = True) -> Finding | None:
    """Requirement: each element of K and V is (code - zero point) * scale with the scale and zero point of its own
    page, head, token and channel, as the codec's granularity says. Where a wrong result is no mistake about these it is
    left to the other gates, unless `explained` is False.
    """
    return judge_explained(
        Gate.SCALE, _explanation, "no scale of a neighbour explains it", copies, observed, explained=explained
    )


def _explanation(copy: Copy, seen: Observed, worst: Worst) -> str:
    """The mistake that yields what was observed in the rows of the worst token: of all scales, which must then explain
    all rows, or of one page.
    """
    if not np.isfinite(seen.out).all():
        return ""
    spec, token = copy.problem.spec, worst.token
    tokens = slice(token, token + 1)
    row = sample.only(copy.problem, np.arange(token * spec.list_heads, (token + 1) * spec.list_heads))
    live = np.flatnonzero(row.needed.any(axis=(1, 2)))[:PAGES]
    best, nearest = "", ALIKE * _apart(copy, seen, copy.expected.out, tokens)
    for wrong in mistakes(row):
        distance = _apart(copy, seen, wrong.result(row, copy.inputs).out, tokens)
        if distance < nearest and _explains_all(copy, seen, wrong.words):
            best, nearest = wrong.words, distance
    for wrong in (each for name in ("v", "k") for each in single_pages(row, name, live)):
        distance = _apart(copy, seen, wrong.result(row, copy.inputs).out, tokens)
        if distance < LIKELIER * nearest:
            best, nearest = wrong.words, distance
    return f"as if {best}" if best else ""


def _explains_all(copy: Copy, seen: Observed, words: str) -> bool:
    """Whether a mistake of all scales explains what was observed in every row."""
    wrong = next(each for each in mistakes(copy.problem) if each.words == words)
    apart = _apart(copy, seen, copy.expected.out, slice(None))
    return _apart(copy, seen, wrong.result(copy.problem, copy.inputs).out, slice(None)) < ALIKE * apart


def _apart(copy: Copy, seen: Observed, out: Array, tokens: slice) -> float:
    return float(np.linalg.norm((seen.out - out)[tokens]))
