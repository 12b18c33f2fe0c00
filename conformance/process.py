"""A process of the suite's own that can be killed with all that it started: it takes orders as lines on standard input
and answers in lines on a descriptor of its own, so that whatever an adapter prints is not taken for an answer.
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
from collections.abc import Sequence

from . import forkserver
from .forkserver import Forked

TAIL = 4000  # bytes of its standard error that are looked at


class ChildProcess:
    """`python -m module DESCRIPTOR arguments`, for a device; `gpu`: the only one that it sees, by its place among those
    that are visible here; `fresh`: shares no start with other children, not the seed of hashes nor the places of
    libraries in memory. Its temporary files go with it.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], device: str, gpu: int | None = None, fresh: bool = False
    ) -> None:
        stdin, orders = os.pipe()
        self._replies, replies = os.pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="sacts-", ignore_cleanup_errors=True)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child, see close()
        environment = _environment(device, gpu) | {"TMPDIR": self._folder.name}
        descriptors = (stdin, replies, self._stderr.fileno())
        forks = device == "cpu" and not fresh
        forked = forkserver.fork(module, arguments, descriptors, environment) if forks else None
        self._process: Forked | subprocess.Popen[bytes] = forked or subprocess.Popen(
            [sys.executable, "-m", module, str(replies), *arguments],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=(replies,),
            env=environment,
            start_new_session=True,
        )
        os.close(stdin)
        os.close(replies)
        self._orders, self._buffer = os.fdopen(orders, "wb"), b""

    def send(self, order: bytes) -> None:
        """Hand it one line; a child that has ended takes none, and says nothing."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(order + b"\n")
            self._orders.flush()

    def read(self, seconds: float) -> bytes | None:
        """Its next line; b"" where it ended, None where it took too long."""
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

    def wait(self) -> int:
        """The exit code of a child that has ended; negative: the signal that ended it."""
        return self._process.wait()

    def kill(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def said(self) -> str:
        """The end of what it wrote to standard error."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - TAIL))
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """End it, by force if need be, and what it left behind."""
        self.kill()
        self._process.wait()
        if isinstance(self._process, Forked):
            self._process.release()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        os.close(self._replies)
        self._stderr.close()
        self._folder.cleanup()


def _environment(device: str, gpu: int | None) -> dict[str, str]:
    found = dict(os.environ)
    found.pop("TRITON_INTERPRET", None)  # it binds when a kernel is decorated: only ever set in the child
    if device == "cpu":
        found |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if gpu is not None:
        visible = found.get("CUDA_VISIBLE_DEVICES", "").split(",")
        found["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible[0] else str(gpu)
    return found


def innermost(tail: str) -> str:
    """The innermost frame of the last faulthandler dump in `tail`: file, line and function; empty without one."""
    _, found, dump = tail.rpartition("most recent call first")
    frames = [line.strip() for line in dump.splitlines() if line.strip().startswith("File ")]
    return frames[0].replace("File ", "", 1) if found and frames else ""
