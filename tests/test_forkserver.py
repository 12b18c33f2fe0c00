"""Children of the server are as separate as processes that were started afresh; where it cannot serve, others are."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sacts.conformance import forkserver
from sacts.conformance.process import ChildProcess

MODULE = """
import json, os, sys, tempfile
import numpy as np
def facts(arguments):
    return {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "folder": tempfile.gettempdir(),
            "environment": dict(os.environ), "cwd": os.getcwd(), "arguments": arguments, "draw": np.random.random(),
            "descriptors": sorted(os.listdir("/proc/self/fd")), "imported": IMPORTED}
IMPORTED = [os.getpid(), os.environ.get("IMPORTED_WITH")]
def main():
    reply, *arguments = sys.argv[1:]
    out = os.fdopen(int(reply), "w")
    print(json.dumps(facts(arguments)), file=out, flush=True)
    for line in sys.stdin:
        print("heard " + line.strip(), file=sys.stderr, flush=True)
        exec(line)
        print(line.strip(), file=out, flush=True)
if __name__ == "__main__":
    main()
"""
Start = Callable[..., ChildProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a child of the module above; all are ended."""
    (tmp_path / "told.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = list[ChildProcess]()

    def starting(*arguments: str, **options: Any) -> ChildProcess:
        made.append(ChildProcess("told", arguments, options.pop("device", "cpu"), **options))
        return made[-1]

    yield starting
    for child in made:
        child.close()


def facts(child: ChildProcess) -> dict[str, Any]:
    found = json.loads(child.read(60) or b"{}")
    assert isinstance(found, dict)
    return found


def gone(pid: int) -> bool:
    """Whether the process has ended, waited for or not."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_children_share_the_import_and_nothing_else(start: Start) -> None:
    seen = [facts(start("a", str(n))) for n in range(2)]
    assert seen[0]["imported"] == seen[1]["imported"]
    assert seen[0]["imported"][0] not in {os.getpid(), seen[0]["pid"], seen[1]["pid"]}
    for name in ("pid", "session", "folder", "draw"):
        assert seen[0][name] != seen[1][name], name
    for n, each in enumerate(seen):
        assert each["session"] == each["pid"]
        assert each["arguments"] == ["a", str(n)]
        assert each["folder"] == each["environment"]["TMPDIR"]
        assert each["environment"]["TRITON_INTERPRET"] == "1"
        assert each["cwd"] == str(Path.cwd())
    assert seen[0]["descriptors"] == seen[1]["descriptors"]


def test_a_child_has_no_descriptor_that_a_fresh_one_has_not(start: Start) -> None:
    """Else it holds pipes of others open, whose end then goes unseen."""
    assert len(facts(start())["descriptors"]) == len(facts(start(fresh=True))["descriptors"])


def test_another_environment_gets_a_server_of_its_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import may have read it."""
    before = facts(start())["imported"]
    monkeypatch.setenv("IMPORTED_WITH", "this")
    after = facts(start())["imported"]
    assert after[0] != before[0]
    assert (before[1], after[1]) == (None, "this")
    assert len(forkserver._servers) == 1


def test_a_child_imports_from_the_folder_that_it_is_started_in(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [facts(start())]
    for n in range(2):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "mine.py").write_text(f"NUMBER = {n}")
        monkeypatch.chdir(folder)
        child = start()
        seen.append(facts(child))
        child.send(b"import mine; print(mine.NUMBER, file=out, flush=True)")
        assert child.read(60) == b"%d" % n
        assert seen[-1]["cwd"] == str(folder)
    assert len({each["imported"][0] for each in seen}) == 1


@pytest.mark.parametrize("options", [{"fresh": True}, {"device": "cuda"}, {"device": "cuda:1"}])
def test_a_child_on_a_device_and_a_fresh_one_are_not_forked(start: Start, options: dict[str, Any]) -> None:
    seen = facts(start(**options))
    assert seen["parent"] == os.getpid()
    assert seen["imported"][0] == seen["pid"]


@pytest.mark.parametrize(
    ("order", "code"), [("os._exit(7)", 7), ("os.abort()", -signal.SIGABRT), ("sys.exit(3)", 3), ("1/0", 1)]
)
def test_the_exit_code_is_the_child_s(start: Start, order: str, code: int) -> None:
    child = start()
    facts(child)
    child.send(order.encode())
    assert child.read(60) == b""
    assert child.wait() == child.wait() == code
    assert f"heard {order}" in child.said()
    assert ("ZeroDivisionError" in child.said()) == (order == "1/0")


def test_the_number_of_a_child_that_ended_is_not_given_to_another(start: Start) -> None:
    child = start()
    pid = facts(child)["pid"]
    child.send(b"os._exit(0)")
    assert child.wait() == 0
    assert Path(f"/proc/{pid}").exists()
    child._process.release()
    deadline = time.monotonic() + 10
    while (taken := Path(f"/proc/{pid}").exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not taken


def test_a_child_is_killed_with_all_that_it_started_and_the_others_go_on(start: Start) -> None:
    child, other = start(), start()
    facts(child), facts(other)
    child.send(b"import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=out, flush=True)")
    grandchild = int(child.read(60) or 0)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert gone(grandchild)
    other.send(b"pass")
    assert other.read(60) == b"pass"


def test_the_server_is_lost_and_children_are_started_all_the_same(start: Start) -> None:
    first = start()
    server = facts(first)["imported"][0]
    os.kill(server, signal.SIGKILL)
    assert gone(server)
    first.send(b"pass")
    assert first.read(60) == b"pass"
    seen = facts(start())
    assert seen["parent"] == os.getpid()


def test_a_module_that_does_not_load_says_so_itself(start: Start, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("raise RuntimeError('cannot be loaded')\n")
    child = start()
    assert child.read(60) == b""
    assert child.wait() == 1
    assert "cannot be loaded" in child.said()


def test_an_import_that_hangs_in_the_server_costs_a_wait(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "START", 0.5)
    hangs = "import sys, time\nif 'forkserver' in sys.argv[0]: time.sleep(600)\n"
    (tmp_path / "told.py").write_text(hangs + MODULE)
    for _ in range(2):
        assert facts(start())["parent"] == os.getpid()


def test_a_server_with_another_thread_forks_nothing(start: Start, tmp_path: Path) -> None:
    """A lock that the thread holds would stay locked in the child."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "told.py").write_text(thread + MODULE)
    seen = facts(start())
    assert seen["parent"] == os.getpid()


def test_elsewhere_than_on_linux_children_are_started(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver.sys, "platform", "darwin")
    assert facts(start())["parent"] == os.getpid()
