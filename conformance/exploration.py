"""Exploration: cells from a stream, judged one after another in isolation until time or number is up; what the adapter
serves natively comes first, what it refuses by declaration is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from threading import Event

from sacts.matrices.cell import Cell
from sacts.matrices.coverage import Tuple, covered, feasible
from sacts.reports.records import Record

from .reach import STRENGTH, natively_judged
from .worker import Limits, Worker

BATCH = 48  # cells that an adapter is asked about at a time
POLL = 0.5  # seconds between looks at the clock
NATIVE, REFUSED = "native", "refused"


@dataclass
class Explored:
    """What has come out so far. `drawn`: cells that the adapter was asked about; `refused`: those of them that it
    refused by declaration, by status; `pairs`: of so many `feasible` pairs of levels, those judged natively;
    `exhausted`: the stream ended.
    """

    feasible: frozenset[Tuple]
    records: list[Record] = field(default_factory=list)
    drawn: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    pairs: set[Tuple] = field(default_factory=set)
    exhausted: bool = False

    @property
    def failed(self) -> list[Record]:
        """What was not accepted, in the order in which it came."""
        return [record for record in self.records if not record.accepted]

    def add(self, record: Record) -> None:
        """Take a record in."""
        self.records.append(record)
        self.pairs |= covered(natively_judged([record]), STRENGTH) & self.feasible


@dataclass(frozen=True)
class Explorer:
    """How cells are judged: an adapter on a device, so many at a time, spread over `gpus` GPUs; for `seconds`, or until
    `count` are judged, or until `stop` is set, whichever comes first.
    """

    adapter: str
    device: str = "cpu"
    processes: int = 1
    limits: Limits = field(default_factory=Limits)
    gpus: int = 0
    seconds: float = float("inf")
    count: int | None = None
    stop: Event = field(default_factory=Event)

    def explore(self, cells: Iterator[Cell], tell: Callable[[Explored], None] = lambda found: None) -> Explored:
        """Judge cells of a stream; `tell` is called after each, and twice a second. In which order cells start depends
        on the stream and on what the adapter declares, never on time. What still runs at the end is waited for; at a
        `stop` it is dropped.
        """
        found, deadline = Explored(feasible(STRENGTH)), time.monotonic() + self.seconds
        with ExitStack() as stack:
            scout, *workers = (stack.enter_context(self._worker(number)) for number in range(-1, self.processes))
            free: SimpleQueue[Worker] = SimpleQueue()
            for worker in workers:
                free.put(worker)
            pool = stack.enter_context(ThreadPoolExecutor(self.processes))
            queue = islice(self._ordered(cells, scout, found), self.count)
            running: set[Future[Record]] = set()
            while not self.stop.is_set():
                while len(running) < self.processes and time.monotonic() < deadline and not self.stop.is_set():
                    if (cell := next(queue, None)) is None:
                        break
                    running.add(pool.submit(_judge, free, cell.id))
                done, running = wait(running, POLL, FIRST_COMPLETED)
                for each in done:
                    found.add(each.result())
                tell(found)
                if not (running or done):
                    break
            _drop(running, workers)
        return found

    def _worker(self, number: int) -> Worker:
        gpu = number % self.gpus if self.gpus > 1 and number >= 0 else None
        return Worker(self.adapter, self.device, self.limits, gpu)

    def _ordered(self, cells: Iterator[Cell], scout: Worker, found: Explored) -> Iterator[Cell]:
        """Batch by batch: native cells, fallbacks, and the first cell of each refusal, as one that computes all the
        same is a lie.
        """
        while not self.stop.is_set() and (batch := list(islice(cells, BATCH))):
            stated = scout.statuses([cell.id for cell in batch]).statuses
            found.drawn += len(batch)
            fallbacks, first = [], []
            for cell in batch:
                said = stated.get(cell.id, NATIVE)  # of a batch that it could not be asked about, all are judged
                if said.startswith(REFUSED):
                    found.refused[said] += 1
                    first += [cell] if found.refused[said] == 1 else []
                elif said == NATIVE:
                    yield cell
                else:
                    fallbacks.append(cell)
            yield from (*fallbacks, *first)
        found.exhausted = not self.stop.is_set()


def _judge(free: SimpleQueue[Worker], cell: str) -> Record:
    worker = free.get()
    try:
        return worker.judge(cell)
    finally:
        free.put(worker)


def _drop(running: set[Future[Record]], workers: list[Worker]) -> None:
    """End the children until no thread waits for one: a thread may just be starting its own."""
    while running:
        for worker in workers:
            worker.kill()
        running = wait(running, POLL).not_done
