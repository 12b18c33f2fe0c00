"""Children that start at once: a server imports what a child needs, then forks one for each request.

A forked child is as separate as one that was started afresh: it has a session, descriptors, an environment and a
temporary folder of its own, and is killed with all that it started. It shares with the server only what was read while
modules were imported, so a server is good for one environment; another gets a server of its own. It never imports an
adapter and is used on the CPU only: it must neither break with what it starts nor fork the context of a device.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import NoReturn

PER_CHILD = ("TMPDIR", "PYTEST_CURRENT_TEST")  # differ from child to child, and no import depends on them
START = 120.0  # seconds for the imports and the fork; then it is started in another way
LOST = -signal.SIGKILL  # the exit code of a child whose watcher was killed


class Forked:
    """A child, as `subprocess.Popen` has it: the leader of its own session, with a number that stays its own until
    `release`.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid, self._control, self._code = pid, control, LOST
        self._waits = True

    def wait(self) -> int:
        """The exit code once it has ended; negative: the signal that ended it."""
        if self._waits:
            self._code, self._waits = int(_line(self._control) or LOST), False
        return self._code

    def release(self) -> None:
        """Let the system have its number, once it has ended."""
        self._control.close()


class Server:
    """The server of one module, in the environment of its start."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=dict(environment),
                start_new_session=True,
            )

    def fork(self, stdin: int, reply: int, stderr: int, request: Sequence[object]) -> Forked | None:
        """A child with these descriptors; None where the server has ended, as where an import fails, or hangs."""
        ours, theirs = socket.socketpair()
        ours.settimeout(START)
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            socket.send_fds(self._requests, [b"f"], [stdin, reply, stderr, theirs.fileno()])
            theirs.close()
            ours.sendall(json.dumps(request).encode() + b"\n")
            if pid := _line(ours):
                ours.settimeout(None)
                return Forked(int(pid), ours)
        ours.close()
        self._process.kill()
        return None

    def close(self) -> None:
        """End the server; its children go on."""
        self._requests.close()
        self._process.wait()


_servers: dict[str, Server] = {}  # by what a module may have read while it was imported: the last one
_lock = Lock()


def fork(
    module: str, arguments: Sequence[str], descriptors: tuple[int, int, int], environment: Mapping[str, str]
) -> Forked | None:
    """`python -m module REPLY arguments` in a forked child; `descriptors`: its standard input, the one that it replies
    on, its standard error. None where this system or the server cannot: start it in another way.
    """
    if sys.platform != "linux":
        return None
    shared = {name: text for name, text in environment.items() if name not in PER_CHILD}
    key = json.dumps([module, shared], sort_keys=True)
    with _lock:
        if key not in _servers:
            while _servers:
                _servers.popitem()[1].close()
            _servers[key] = Server(module, shared)
        return _servers[key].fork(*descriptors, [arguments, environment, str(Path.cwd())])


def _line(control: socket.socket) -> bytes:
    """The next line; empty where the other side has ended."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while not found.endswith(b"\n"):
            if not (part := control.recv(4096)):
                return b""
            found += part
    return found


# --- in the server


def _alone() -> bool:
    """Whether this is the only thread: a lock that another holds would stay locked in a forked child."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _serve(requests: socket.socket) -> list[int]:
    """Fork until the client ends; returns in the children only, with their descriptors."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for watchers
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
        if not message or not _alone():
            os._exit(0)
        if not os.fork():
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(descriptors)
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(descriptors: Sequence[int]) -> None:
    """Fork the child, in which this returns, and tell how it ended; its number stays taken until the client lets go, so
    that a late kill meets nobody else.
    """
    if not (pid := os.fork()):
        return
    *others, control = descriptors
    for descriptor in others:  # the client sees the end of the child as the end of its replies
        os.close(descriptor)
    with socket.socket(fileno=control) as client, contextlib.suppress(OSError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        client.sendall(b"%d\n" % code)
        client.recv(1)
    os._exit(0)


def _become(descriptors: Sequence[int]) -> list[str]:
    """Make this child what a fresh process would be; its arguments."""
    stdin, reply, stderr, control = descriptors
    os.setsid()
    with socket.socket(fileno=control) as client:
        arguments, environment, folder = json.loads(_line(client))
        client.sendall(b"%d\n" % os.getpid())
    for descriptor, number in ((stdin, 0), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if not sys.flags.safe_path:
        sys.path[0] = folder  # as of `python -m`
    sys.path_importer_cache.clear()  # of entries that are relative
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in a fresh process, from the system: else every child draws the same
    return [str(reply), *arguments]


def main() -> NoReturn:
    """Serve the client on the descriptor that it passed; each child runs the module and ends."""
    descriptor, module = sys.argv[1:]
    run = importlib.import_module(module).main
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")
    gc.freeze()  # else a collection in a child copies every page
    descriptors = _serve(socket.socket(fileno=int(descriptor)))
    sys.argv = [module, *_become(descriptors)]
    run()
    sys.exit()


if __name__ == "__main__":
    main()
