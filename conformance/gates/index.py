"""The index gate: the lists that a backend makes of raw ones, item by item, before anything is computed from them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sacts.reference.spec import CandidateKind
from sacts.reports.records import Finding, Gate

from ..adapter import Normalized
from ..branches import rows_of_lists
from ..build import Problem
from ..contract import ContractBroken

Ints = NDArray[np.int64]


def judge_index(problem: Problem, made: Normalized) -> Finding | None:
    """Requirement: N(D, W, A, T) of each row, DESIGN section 4: a set in any order, a sequence in its own, a multiset
    with its repeats; each entry at the slot where the page table has it. Raises ContractBroken for what is no CSR.
    """
    spec = problem.spec
    indptr, indices = (_ints(x) for x in (made.kv_indptr, made.kv_indices))
    if indptr.shape != (spec.num_rows + 1,) or indptr[0] or (np.diff(indptr) < 0).any() or indptr[-1] > len(indices):
        raise ContractBroken(f"normalize: kv_indptr is no CSR of {spec.num_rows} rows with {len(indices)} entries")
    slots = None if made.slots is None else _ints(made.slots)
    if slots is not None and slots.shape != indices.shape:
        raise ContractBroken(f"normalize: slots has {len(slots)} entries, kv_indices {len(indices)}")
    order = np.argsort(rows_of_lists(spec, problem.branches))  # of the row's list among those of all branches
    for row in range(spec.num_rows):
        part = slice(int(indptr[order[row]]), int(indptr[order[row] + 1]))
        words = _entries(problem, row, indices[part])
        if not words and slots is not None:
            words = _slots(problem, row, indices[part], slots[part])
        if words:
            place = str(spec.row(row))
            return Finding(Gate.INDEX, place, f"{place}: {words}")
    return None


def _ints(x: object) -> Ints:
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x).astype(np.int64)


def _entries(problem: Problem, row: int, found: Ints) -> str:
    """What is wrong with the entries of a row, or nothing."""
    lists = problem.candidates
    some = slice(int(lists.indptr[row]), int(lists.indptr[row + 1]))
    right, counts = lists.indices[some], lists.counts[some]
    what = "block" if problem.spec.block_size > 1 else "token"
    if problem.spec.candidate_kind is CandidateKind.SEQUENCE:
        if len(found) != len(right):
            return f"{len(found)} entries, expected {len(right)}"
        wrong = np.flatnonzero(found != right)
        at = int(wrong[0]) if len(wrong) else 0
        return f"entry {at} is {what} {found[at]}, expected {right[at]}" if len(wrong) else ""
    names, first, times = np.unique(found, return_index=True, return_counts=True)
    expected = dict(zip(right.tolist(), counts.tolist(), strict=True))
    for i in np.argsort(first).tolist():
        name, n = int(names[i]), int(times[i])
        if name not in expected:
            return f"entry {first[i]} is {what} {name}, which is no candidate"
        if n != expected[name]:
            return f"{what} {name} stands {n} times, expected {expected[name]}"
    missing = sorted(set(expected) - set(names.tolist()))
    return f"{what} {missing[0]} is missing ({len(missing)} of {len(expected)} are)" if missing else ""


def _slots(problem: Problem, row: int, entries: Ints, slots: Ints) -> str:
    spec = problem.spec
    t = entries * spec.block_size
    table = problem.table.table[spec.token_request[row // spec.list_heads]]
    right = table[t // spec.page_size] * spec.page_size + t % spec.page_size
    wrong = np.flatnonzero(slots != right)
    if not len(wrong):
        return ""
    at = int(wrong[0])
    page, offset = divmod(int(right[at]), spec.page_size)
    return (
        f"entry {at}, token {t[at]}, is at slot {slots[at]}, expected {right[at]} "
        f"(logical page {t[at] // spec.page_size} -> physical page {page}, offset {offset})"
    )
