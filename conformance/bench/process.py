"""Isolation: each adapter is timed in a killable process of its own, which is replaced after a crash, a hang or a
poisoned device context. A crash costs one row.
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
from typing import IO, TYPE_CHECKING

import msgspec

from sacts.reports.records import Verdict

from .records import Row, decode

if TYPE_CHECKING:
    from .child import Order

TAIL = 4000  # bytes of the child's standard error that are looked at
POISON = ("CUDA error", "illegal memory access", "device-side assert")


class Process:
    """Times scenarios with one adapter, one at a time; `limit`: seconds for each, compilation included."""

    def __init__(self, adapter: str, device: str, limit: float) -> None:
        self._adapter, self._device, self._limit = adapter, device, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._replies = -1
        self._buffer = b""
        self._stderr: IO[bytes] | None = None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def row(self, order: Order) -> Row:
        """The row of one scenario, whatever the adapter does."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        line = self._read()
        if not line:
            return self._lost(order, timed_out=line is None)
        row = decode(line)
        if any(word in row.sentence for word in POISON):
            self.close()
        return row

    def close(self) -> None:
        """End the child, by force."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None and self._stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._replies)
        self._stderr.close()
        self._process, self._stderr, self._buffer = None, None, b""

    def _start(self) -> None:
        read, write = os.pipe()
        environment = dict(os.environ)
        environment.pop("TRITON_INTERPRET", None)  # it binds when a kernel is decorated: only ever set in the child
        if self._device == "cpu":
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child, see close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sacts.conformance.bench.child", str(write), self._adapter, self._device],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=(write,),
            env=environment,
            start_new_session=True,
        )
        os.close(write)
        self._replies = read

    def _read(self) -> bytes | None:
        """The next line of the child; b"" where it ended, None where it took too long."""
        deadline = time.monotonic() + self._limit
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

    def _lost(self, order: Order, timed_out: bool) -> Row:
        """The row of a child that ended or hung; the next scenario gets a new one."""
        assert self._process is not None and self._stderr is not None
        if timed_out:
            verdict, sentence = Verdict.TIMEOUT, f"no row within {self._limit:g} s"
        else:
            code = self._process.wait()
            said = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            verdict, sentence = Verdict.CRASH, f"the process ended with {said}{self._last_words()}"
        self.close()
        return Row(
            scenario=order.scenario,
            adapter=self._adapter,
            device=self._device,
            verdict=verdict,
            sentence=sentence,
            tiny=order.tiny,
            hints=order.hints,
        )

    def _last_words(self) -> str:
        assert self._stderr is not None
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - TAIL))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        frames = [line.strip().replace("File ", "", 1) for line in lines if line.strip().startswith("File ")]
        if frames:
            return f"; it was at {frames[0]}"
        return f" ({lines[-1]})" if lines else ""
