"""Shards: a tier cut into parts that machines judge apart. Which cell lies in which part follows from the tier, the
number of parts and the durations alone, so every machine cuts alike.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sacts.reference.spec import ListsPer

from .axes import Execution, Phase
from .cell import Cell


class ShardError(ValueError):
    """A shard that does not exist, such as 5/4."""


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard(1, 1)
RUNS = {  # of a launch
    Execution.EAGER: 1,
    Execution.REUSE: 3,
    Execution.OVERWRITTEN: 4,
    Execution.SMALL_PLAN: 2,
    Execution.SMALL_WORKSPACE: 2,
    Execution.GRAPH: 3,
    Execution.DOUBLE_BUFFER: 6,
}
COST_AXES = ("phase", "kv", "q", "heads", "page", "splits", "tile")  # what `of_a_run` looks at, by level
RUNS_AXES = ("heads", "lists", "branches", "exec")  # what `runs_of` looks at


def parse(text: str) -> Shard:
    """A shard as it is written, `2/4`. Raises ShardError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.index <= shard.count:
        raise ShardError(f"a shard is written i/n with i from 1 to n, such as 2/4; got {text!r}")
    return shard


def of_a_run(cell: Cell) -> float:
    """Inner iterations of one run in the interpreter, of lists per KV head: programs (candidate rows x splits) x (1 +
    tiles of a split). A program costs about as much as one iteration of its loop (DESIGN section 10).
    """
    if cell.phase == Phase.INDEX:
        return 0.0
    tiles = -(-max(cell.kv) // max(16, cell.tile))
    return float(sum(cell.qo_lens) * cell.heads[1] * (cell.splits + tiles))


def runs_of(cell: Cell) -> int:
    """How many such runs a launch costs: those that it makes. Each branch has programs and a launch of its own; lists
    per query head are as many rows more.
    """
    rows = cell.heads[0] // cell.heads[1] if cell.lists == ListsPer.QUERY_HEAD else 1
    return rows * cell.branches**2 * RUNS[Execution(cell.exec)]


def predicted(cell: Cell) -> float:
    """Inner iterations of a launch."""
    return of_a_run(cell) * runs_of(cell)


def costs(cells: Sequence[Cell], seconds: Mapping[str, float]) -> list[float]:
    """What each cell costs: as recorded, by id; the others as predicted, on the scale of the recorded ones."""
    known = [cell for cell in cells if cell.id in seconds]
    guessed = sum(predicted(cell) for cell in known)
    scale = sum(seconds[cell.id] for cell in known) / guessed if guessed else 1.0
    return [seconds.get(cell.id, scale * predicted(cell)) for cell in cells]


def parts(cells: Sequence[Cell], count: int, seconds: Mapping[str, float] | None = None) -> list[list[Cell]]:
    """All parts, each in the order of the tier: the dearest cell goes to the part that costs least so far."""
    cost = dict(zip(cells, costs(cells, seconds or {}), strict=True))
    loads = [(0.0, index) for index in range(count)]
    chosen: list[set[Cell]] = [set() for _ in range(count)]
    for cell in sorted(cells, key=lambda cell: (-cost[cell], cell.id)):
        load, index = heapq.heappop(loads)
        chosen[index].add(cell)
        heapq.heappush(loads, (load + cost[cell], index))
    return [[cell for cell in cells if cell in part] for part in chosen]
