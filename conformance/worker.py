"""Isolation: cells are judged in a killable child process, which is replaced after a crash, a hang or a poisoned
device context.

A crash, a hang, an exception or garbage costs one cell. `run` and `audit` both use it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from sacts.reports.records import Record, Verdict, blank

from .messages import (
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
from .process import ChildProcess, innermost

Reply = TypeVar("Reply")

GRACE = 5.0  # seconds between the child's own alarm, which leaves a traceback, and the kill
SUITE_LIMIT = 300.0  # seconds for the suite's own work between launches


@dataclass(frozen=True)
class Limits:
    """Seconds for one launch, and for the first launch of a spec, which may compile."""

    launch: float = 30.0
    first: float = 60.0


class Lost(NamedTuple):
    """How far a child had come: its last launch, the limit that held, and whether it was inside the launch."""

    launch: int
    limit: float
    inside: bool


class Worker:
    """Judges cells of one adapter on one device, one at a time; `gpu`: the only one that its process sees, by its place
    among those that are visible here; `fresh`: its process shares no start with others.
    """

    def __init__(
        self,
        adapter: str,
        device: str = "cpu",
        limits: Limits | None = None,
        gpu: int | None = None,
        fresh: bool = False,
    ) -> None:
        self.adapter = adapter
        self.device = device
        self.gpu = gpu
        self.fresh = fresh
        self.limits = limits or Limits()
        self._process: ChildProcess | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def judge(self, cell: str, replicate: int = 0, declare: Mapping[str, str] | None = None) -> Record:
        """The record of one cell, whatever the backend does; `declare`: conventions to declare otherwise."""
        answer = self._ask(Order(cell, replicate, dict(declare or {})), Judged)
        if isinstance(answer, Record):
            return answer
        if answer.last:
            self.close()
        return answer.record

    def describe(self) -> Described:
        """What the adapter declares."""
        answer = self._ask(Describe(), Described)
        return Described(error=answer.sentence) if isinstance(answer, Record) else answer

    def statuses(self, cells: Sequence[str]) -> Stated:
        """What `support` declares for these cells."""
        answer = self._ask(Ask(list(cells)), Stated)
        return Stated(error=answer.sentence) if isinstance(answer, Record) else answer

    def measure(self, cell: str, replicate: int = 0, repeats: int = 0) -> Measured:
        """How far results of one cell vary in this process; `repeats` 0: only a digest of each output."""
        answer = self._ask(Measure(cell, replicate, repeats), Measured)
        return Measured(error=answer.sentence) if isinstance(answer, Record) else answer

    def locate(self, cell: str, replicate: int, budget: int) -> Located:
        """Where the backend is wrong in one cell, with at most `budget` launches beyond the first two."""
        answer = self._ask(Locate(cell, replicate, budget), Located)
        return Located(error=answer.sentence) if isinstance(answer, Record) else answer

    def _ask(self, order: Order | Describe | Measure | Locate | Ask, reply: type[Reply]) -> Reply | Record:
        """The child's answer, or the record of its loss."""
        cell, replicate = getattr(order, "cell", ""), getattr(order, "replicate", 0)
        if self._process is None:
            limits = (str(self.limits.launch), str(self.limits.first))
            arguments = (self.adapter, self.device, *limits)
            self._process = ChildProcess("sacts.conformance.child", arguments, self.device, self.gpu, self.fresh)
        process = self._process
        process.send(msgspec.json.encode(order))
        launch, limit, inside = 0, SUITE_LIMIT, False
        while True:
            line = process.read(limit + GRACE)
            if not line:
                return self._lost(cell, replicate, Lost(launch, limit, inside), timed_out=line is None)
            message = msgspec.json.decode(line, type=Message)
            if isinstance(message, Started):
                launch, limit, inside = message.launch, message.limit, True
                continue
            if isinstance(message, Returned):
                limit, inside = SUITE_LIMIT, False
                continue
            assert isinstance(message, reply)
            return message

    def kill(self) -> None:
        """End the child under a thread that waits for its answer: that one gets the record of a loss."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the child, by force if need be."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _lost(self, cell: str, replicate: int, lost: Lost, timed_out: bool) -> Record:
        """The verdict on a child that ended or hung; the next cell gets a new one."""
        assert self._process is not None
        code = None if timed_out else self._process.wait()
        tail = self._process.said()
        self.close()
        verdict, sentence = _cause(code, tail, lost)
        return blank(self.adapter, self.device, cell, replicate, verdict, sentence)


def _cause(code: int | None, tail: str, lost: Lost) -> tuple[Verdict, str]:
    launch, limit = lost.launch, lost.limit
    where = innermost(tail)
    at = f"; it was at {where}" if where else ""
    if code is None or "Timeout (" in tail:
        if not lost.inside:
            return Verdict.SUITE_ERROR, f"the suite's own work took over {limit:g} s{at}"
        return Verdict.TIMEOUT, f"launch {launch} did not return within {limit:g} s{at}"
    if not launch:
        lines = tail.strip().splitlines()
        return (
            Verdict.CRASH,
            f"the process ended before the first launch ({lines[-1] if lines else f'exit code {code}'})",
        )
    if code < 0:
        return Verdict.CRASH, f"launch {launch} ended the process with {signal.Signals(-code).name}{at}"
    return Verdict.CRASH, f"launch {launch} ended the process with exit code {code}{at}"
