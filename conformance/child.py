"""The killable process: judges one cell after another, as `python -m sacts.conformance.child FD ADAPTER DEVICE LIMIT
FIRST`.

It reads one JSON order a line from standard input and writes JSON messages to file descriptor FD: `started` before
each launch (with its time limit), `judged` with the record. Whatever the adapter prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from sacts.matrices.axes import Execution
from sacts.matrices.cell import parse
from sacts.reports.records import Record, Verdict, blank

from . import conventions, determinism, gradient_determinism
from .adapter import Backend, Determinism, Refused
from .branches import told
from .contract import AdapterRaised, ContractBroken
from .device import CROWDED, WAITS, crowded, device_is_sound, release
from .gradients import judge_gradients
from .judge import judge
from .launch import Launcher
from .loading import AdapterError, load
from .localise.locate import locate
from .messages import (
    OPTIONAL_MEMBERS,
    Answer,
    Ask,
    Describe,
    Described,
    Judged,
    Locate,
    Located,
    Measure,
    Measured,
    Message,
    Order,
    Returned,
    Started,
    Stated,
)
from .status import status_of
from .worker import SUITE_LIMIT

_ANSWERS: dict[type, Callable[..., Answer]] = {
    Describe: Described,
    Ask: Stated,
    Measure: Measured,
    Locate: Located,
}


class Child:
    """One adapter on one device."""

    def __init__(self, replies: BinaryIO, adapter: str, device: str, limit: float, first_limit: float) -> None:
        self._replies = replies
        self._adapter = adapter
        self._device = device
        self._limit, self._first_limit = limit, first_limit
        self._launches = 0
        self._backend: Backend | None = None
        self._launchers: dict[str, Launcher] = {}

    def _send(self, message: Message) -> None:
        self._replies.write(msgspec.json.encode(message) + b"\n")
        self._replies.flush()

    def _started(self, first: bool) -> None:
        """Compilation happens in a spec's first launch, which has its own, longer limit."""
        limit = self._first_limit if first else self._limit
        self._launches += 1
        faulthandler.dump_traceback_later(limit, exit=True)
        self._send(Started(self._launches, limit))

    def _returned(self) -> None:
        faulthandler.dump_traceback_later(SUITE_LIMIT, exit=True)
        self._send(Returned())

    def serve(self, orders: BinaryIO) -> None:
        """Judge until the orders end."""
        for line in orders:
            order = msgspec.json.decode(line, type=Order | Describe | Measure | Locate | Ask)
            self._launches = 0
            if not isinstance(order, Order):
                self._send(self._answer(order))
                faulthandler.cancel_dump_traceback_later()
                continue
            record = self._judge(order)
            faulthandler.cancel_dump_traceback_later()
            sound = device_is_sound(self._device)
            if not sound:
                sentence = f"the launch left the device unusable: {record.sentence}"
                record = blank(self._adapter, self._device, order.cell, order.replicate, Verdict.CRASH, sentence)
            self._send(Judged(record, last=not sound))
            if not sound:
                return

    def _launcher(self, declare: dict[str, str | float | bool]) -> Launcher:
        self._backend = self._backend or load(self._adapter)
        key = str(sorted(declare.items()))
        if key not in self._launchers:
            backend = Backend(self._backend.adapter)
            for field, value in declare.items():
                backend.capabilities = conventions.declare(backend.capabilities, field, value)
            self._launchers[key] = Launcher(backend, self._device, self._started, on_return=self._returned)
        return self._launchers[key]

    def _answer(self, order: Describe | Measure | Locate | Ask) -> Answer:
        """The answer to what is no judgement; where the backend cannot give one, why."""
        try:
            if isinstance(order, Ask):
                return self._state(order)
            if isinstance(order, Measure):
                return self._measure(order)
            return self._locate(order) if isinstance(order, Locate) else self._describe()
        except AdapterError as error:
            why = str(error)
        except AdapterRaised as raised:
            why = f"{raised} raised {type(raised.__cause__).__name__}: {raised.__cause__}"
        except (ContractBroken, Refused) as error:
            why = f"{type(error).__name__}: {error}"
        return _ANSWERS[type(order)](error=why)

    def _describe(self) -> Described:
        backend = self._launcher({}).backend
        members = [name for name in OPTIONAL_MEMBERS if hasattr(backend.adapter, name)]
        return Described(conventions.described(backend.capabilities), members)

    def _state(self, order: Ask) -> Stated:
        launcher = self._launcher({})
        capabilities = launcher.backend.capabilities
        problems = {cell: conventions.problem_for(parse(cell), 0, capabilities) for cell in order.cells}
        return Stated({cell: str(status_of(launcher, x).support) for cell, x in problems.items()})

    def _measure(self, order: Measure) -> Measured:
        cell = parse(order.cell)
        launcher = self._launcher({}).executing(Execution(cell.exec))
        if not order.repeats:
            digests = determinism.digests(launcher, cell, order.replicate)
            digests |= gradient_determinism.digests(launcher, cell, order.replicate)
            level = Determinism.PROCESS_TO_PROCESS
            promises = {name: determinism.promised(launcher.backend, name, level) for name in digests}
            return Measured(digests=digests, promises=promises)
        found = determinism.measure(launcher, cell, order.replicate, order.repeats)
        return Measured(found + gradient_determinism.measure(launcher, cell, order.replicate, order.repeats))

    def _locate(self, order: Locate) -> Located:
        cell = parse(order.cell)
        launcher = self._launcher({}).executing(Execution(cell.exec))
        problem = conventions.problem_for(cell, order.replicate, launcher.backend.capabilities)
        try:
            found = locate(launcher, problem, budget=order.budget)
            if found:
                return Located(told(found.finding, problem.branches), found.launches)
            verdict = judge_gradients(launcher, problem, budget=order.budget)
        except ContractBroken as broken:
            return Located(told(broken.finding, problem.branches))
        return Located(verdict.finding, verdict.launches, gradients=verdict.said)

    def _judge(self, order: Order) -> Record:
        """Judged again after a while where other processes have the device's memory."""
        for seconds in WAITS:
            record = self._judged(order)
            if not crowded(record) or not device_is_sound(self._device):
                break
            release(self._device)
            time.sleep(seconds)
            self._returned()
        else:
            record = self._judged(order)
            if crowded(record):
                record = msgspec.structs.replace(record, sentence=f"{record.sentence}; {CROWDED}")
        release(self._device)
        return record

    def _judged(self, order: Order) -> Record:
        def failed(verdict: Verdict, sentence: str) -> Record:
            return blank(self._adapter, self._device, order.cell, order.replicate, verdict, sentence)

        try:
            return judge(self._launcher(order.declare), self._adapter, parse(order.cell), order.replicate)
        except AdapterError as error:
            return failed(Verdict.ERROR, str(error))
        except Exception as error:  # ours: a verdict of its own, never the adapter's
            traceback.print_exc()
            return failed(Verdict.SUITE_ERROR, f"{type(error).__name__}: {error}")


def main() -> None:
    """Serve the parent over the descriptors that it passed."""
    fd, adapter, device, limit, first_limit = sys.argv[1:]
    faulthandler.enable()
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(int(fd), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    Child(replies, adapter, device, float(limit), float(first_limit)).serve(orders)


if __name__ == "__main__":
    main()
