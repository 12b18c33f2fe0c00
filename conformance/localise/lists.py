"""Whose candidate list a row uses in place of its own, where query heads that read one KV head have their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from sacts.reference.forward import edges

from ..build import Problem
from .slots import Owner


def whose(problem: Problem, token: int, qo_head: int, missing: Sequence[Owner], extra: Sequence[Owner]) -> str:
    """Where a row that lacks some of its keys, or has others too, has just those of another query head's list, or of
    all lists of its KV head together: say so. Empty where not.
    """
    spec = problem.spec
    if spec.lists_per_kv_head == 1 or not (missing or extra):
        return ""
    own = spec.token_request[token], qo_head // spec.group_size
    if any((slot.request, slot.kv_head) != own for slot in extra):
        return ""
    of_head = _by_head(problem, token)
    seen = (of_head[qo_head] - {slot.token for slot in missing}) | {slot.token for slot in extra}
    return next(
        (f"its keys are those of {words}" for words, keys in _others(problem, qo_head, of_head) if keys == seen), ""
    )


def _by_head(problem: Problem, token: int) -> list[set[int]]:
    """Logical positions that each query head of a token attends."""
    spec = problem.spec
    row, t, _ = edges(spec, problem.candidates)
    ends = np.searchsorted(row, spec.row_of(token, 0) + np.arange(spec.num_qo_heads + 1))
    return [set(t[start:stop].tolist()) for start, stop in pairwise(ends.tolist())]


def _others(problem: Problem, qo_head: int, of_head: Sequence[set[int]]) -> Iterator[tuple[str, set[int]]]:
    group = problem.spec.group_size
    first = qo_head // group * group
    mine = range(first, first + group)
    for head in (*mine, *range(problem.spec.num_qo_heads)):
        if head != qo_head:
            yield f"the list of query head {head}", of_head[head]
    yield f"the lists of query heads {first} to {mine[-1]} together", set().union(*of_head[first : mine[-1] + 1])
