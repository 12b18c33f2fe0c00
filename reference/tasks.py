"""Task tables: rows cut into tasks (row, start, end, split) with a stable row identity. Seed 5.1 and 7.4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import CandidateLists

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TaskTable:
    """`row`, `start`, `end`, `split` [tasks]: task i works on indices[start[i] : end[i]], the part number split[i] of
    list row[i]. The order of the tasks is a schedule and means nothing; `row` says where the result belongs.
    """

    row: Ints
    start: Ints
    end: Ints
    split: Ints
    num_rows: int

    def ordered(self, order: ArrayLike) -> TaskTable:
        """The same tasks in another order."""
        at = np.asarray(order, np.int64)
        return TaskTable(self.row[at], self.start[at], self.end[at], self.split[at], self.num_rows)


def task_indptr(lengths: ArrayLike, entries_per_task: int) -> Ints:
    """First task of each row, and the number of tasks: the prefix sum of ceil(k_i / R); a row without entries has no
    task (its output still has to be written). Raises ValueError for R < 1.
    """
    if entries_per_task < 1:
        raise ValueError(f"a task needs at least 1 entry, got {entries_per_task}")
    return np.concatenate(([0], np.cumsum(-(-np.asarray(lengths, np.int64) // entries_per_task))))


def to_tasks(lists: CandidateLists, entries_per_task: int) -> TaskTable:
    """Cut every row into tasks of at most `entries_per_task` entries. Raises ValueError for fewer than 1."""
    first = task_indptr(np.diff(lists.indptr), entries_per_task)
    row = np.repeat(np.arange(len(first) - 1), np.diff(first))
    split = np.arange(first[-1]) - first[row]
    start = lists.indptr[row] + split * entries_per_task
    end = np.minimum(start + entries_per_task, lists.indptr[row + 1])
    return TaskTable(row, start, end, split, len(first) - 1)


def from_tasks(tasks: TaskTable, indices: Ints) -> CandidateLists:
    """The lists that the tasks work on together, whatever their order.

    Raises ValueError, naming row and split, where tasks overlap, leave entries out, or name no row.
    """
    order = np.lexsort((tasks.split, tasks.row))
    row, start, end, split = (x[order] for x in (tasks.row, tasks.start, tasks.end, tasks.split))
    bad = (row < 0) | (row >= tasks.num_rows) | (end < start) | (start != np.concatenate(([0], end))[: len(start)])
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"row {row[i]}, split {split[i]}: [{start[i]}, {end[i]}) does not continue at "
            f"{end[i - 1] if i else 0} within {tasks.num_rows} rows"
        )
    covered = int(end[-1]) if len(end) else 0
    if covered != len(indices):
        raise ValueError(f"the tasks end at entry {covered} of {len(indices)}")
    lengths = np.zeros(tasks.num_rows, np.int64)
    np.add.at(lengths, row, end - start)
    return CandidateLists(np.concatenate(([0], np.cumsum(lengths))), indices)
