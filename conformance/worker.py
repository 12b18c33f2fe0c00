"""Isolation: cells are judged in a killable child process, which is replaced after a crash, a hang or a poisoned
device context.

A crash, a hang, an exception or garbage costs one cell. `run` and `audit` both use it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from sacts.reports.records import Record, Verdict

if TYPE_CHECKING:
    from .child import Ask, Describe, Described, Locate, Located, Measure, Measured, Order, Stated

Reply = TypeVar("Reply")

GRACE = 5.0  # seconds between the child's own alarm, which leaves a traceback, and the kill
SUITE_LIMIT = 300.0  # seconds for the suite's own work between launches
TAIL = 4000  # bytes of the child's standard error that are looked at


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
    among those that are visible here.
    """

    def __init__(self, adapter: str, device: str = "cpu", limits: Limits | None = None, gpu: int | None = None) -> None:
        self.adapter = adapter
        self.device = device
        self.gpu = gpu
        self.limits = limits or Limits()
        self._process: subprocess.Popen[bytes] | None = None
        self._replies = -1
        self._buffer = b""
        self._stderr: IO[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # the child's temporary files, gone with it

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def judge(self, cell: str, replicate: int = 0, declare: Mapping[str, str] | None = None) -> Record:
        """The record of one cell, whatever the backend does; `declare`: conventions to declare otherwise."""
        from .child import Judged, Order

        answer = self._ask(Order(cell, replicate, dict(declare or {})), Judged)
        if isinstance(answer, Record):
            return answer
        if answer.last:
            self.close()
        return answer.record

    def describe(self) -> Described:
        """What the adapter declares."""
        from .child import Describe, Described

        answer = self._ask(Describe(), Described)
        return Described(error=answer.sentence) if isinstance(answer, Record) else answer

    def statuses(self, cells: Sequence[str]) -> Stated:
        """What `support` declares for these cells."""
        from .child import Ask, Stated

        answer = self._ask(Ask(list(cells)), Stated)
        return Stated(error=answer.sentence) if isinstance(answer, Record) else answer

    def measure(self, cell: str, replicate: int = 0, repeats: int = 0) -> Measured:
        """How far results of one cell vary in this process; `repeats` 0: only a digest of each output."""
        from .child import Measure, Measured

        answer = self._ask(Measure(cell, replicate, repeats), Measured)
        return Measured(error=answer.sentence) if isinstance(answer, Record) else answer

    def locate(self, cell: str, replicate: int, budget: int) -> Located:
        """Where the backend is wrong in one cell, with at most `budget` launches beyond the first two."""
        from .child import Locate, Located

        answer = self._ask(Locate(cell, replicate, budget), Located)
        return Located(error=answer.sentence) if isinstance(answer, Record) else answer

    def _ask(self, order: Order | Describe | Measure | Locate | Ask, reply: type[Reply]) -> Reply | Record:
        """The child's answer, or the record of its loss."""
        from .child import Message, Returned, Started

        cell, replicate = getattr(order, "cell", ""), getattr(order, "replicate", 0)
        self._send(order)
        launch, limit, inside = 0, SUITE_LIMIT, False
        while True:
            line = self._read(limit + GRACE)
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

    def _send(self, order: Order | Describe | Measure | Locate | Ask) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """End the child under a thread that waits for its answer: that one gets the record of a loss."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the child, by force if need be."""
        if self._process is None:
            return
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._replies)
        if self._stderr is not None:
            self._stderr.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process, self._stderr, self._folder, self._buffer = None, None, None, b""

    def _said(self) -> str:
        """The end of what the child wrote to standard error."""
        assert self._stderr is not None
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - TAIL))
        return self._stderr.read().decode(errors="replace")

    def _start(self) -> None:
        read, write = os.pipe()
        environment = dict(os.environ)
        environment.pop("TRITON_INTERPRET", None)  # it binds when a kernel is decorated: only ever set in the child
        if self.device == "cpu":
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        if self.gpu is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[self.gpu] if visible[0] else str(self.gpu)
        self._folder = tempfile.TemporaryDirectory(prefix="sacts-", ignore_cleanup_errors=True)
        environment["TMPDIR"] = self._folder.name
        limits = (str(self.limits.launch), str(self.limits.first))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child, see close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sacts.conformance.child", str(write), self.adapter, self.device, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=(write,),
            env=environment,
            start_new_session=True,
        )
        os.close(write)
        self._replies = read

    def _read(self, seconds: float) -> bytes | None:
        """The next line of the child; b"" where it ended, None where it took too long."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self._replies, 65536)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _lost(self, cell: str, replicate: int, lost: Lost, timed_out: bool) -> Record:
        """The verdict on a child that ended or hung; the next cell gets a new one."""
        from .judge import blank

        assert self._process is not None
        code = None if timed_out else self._process.wait()
        tail = self._said()
        self.close()
        verdict, sentence = _cause(code, tail, lost)
        return blank(self.adapter, self.device, cell, replicate, verdict, sentence)


def _cause(code: int | None, tail: str, lost: Lost) -> tuple[Verdict, str]:
    launch, limit = lost.launch, lost.limit
    where = _innermost(tail)
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


def _innermost(tail: str) -> str:
    """The innermost frame of the last faulthandler dump in `tail`: file, line and function."""
    _, found, dump = tail.rpartition("most recent call first")
    frames = [line.strip() for line in dump.splitlines() if line.strip().startswith("File ")]
    return frames[0].replace("File ", "", 1) if found and frames else ""
