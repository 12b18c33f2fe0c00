"""A crash, a hang, an exception, garbage: one cell each, and the cells after it are judged."""

import tempfile
from pathlib import Path

import pytest

from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.loading import load
from sacts.conformance.worker import Limits, Lost, Worker, _cause
from sacts.matrices.cell import parse
from sacts.reports.records import Gate, Verdict

ADAPTER = str(Path(__file__).parent / "adapters" / "misbehaving.py")


def cell(length: int) -> str:
    return f"decode/fp16/kv:{length}/pattern:all"


@pytest.fixture(scope="module")
def worker() -> Worker:
    with Worker(ADAPTER, limits=Limits(launch=2.0, first=2.0)) as started:
        yield started


@pytest.mark.parametrize(
    ("length", "verdict", "words"),
    [
        (101, Verdict.CRASH, "launch 1 ended the process with SIGSEGV; it was at"),
        (102, Verdict.TIMEOUT, "launch 1 did not return within 2 s; it was at"),
        (103, Verdict.ERROR, "run(case) raised RuntimeError: no such kernel"),
        (104, Verdict.FAIL, "out has shape (1, 1, 64), expected (1, 4, 64)"),
        (105, Verdict.FAIL, "channel 0 is nan, must be finite"),
        (106, Verdict.CRASH, "launch 1 ended the process with exit code 7"),
    ],
)
def test_one_bad_cell_costs_one_verdict(worker: Worker, length: int, verdict: Verdict, words: str) -> None:
    record = worker.judge(cell(length))
    assert record.verdict is verdict
    assert words in record.sentence
    assert worker.judge(cell(20)).verdict is Verdict.FALLBACK


def test_a_hang_names_the_line_it_hangs_in(worker: Worker) -> None:
    assert "misbehaving.py" in worker.judge(cell(102)).sentence


def test_the_wrong_shape_is_a_contract_finding(worker: Worker) -> None:
    finding = worker.judge(cell(104)).finding
    assert finding is not None
    assert (finding.gate, finding.place) == (Gate.CONTRACT, "out")


def test_an_adapter_that_does_not_load_is_an_error_not_a_crash(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import a_module_that_is_not_there\n")
    with Worker(str(broken)) as worker:
        record = worker.judge(cell(20))
    assert record.verdict is Verdict.ERROR
    assert "a_module_that_is_not_there" in record.sentence


def test_a_file_without_run_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with Worker(str(empty)) as worker:
        assert "has no callable `run(case, plan=None)`" in worker.judge(cell(20)).sentence


def test_what_a_child_leaves_in_the_temporary_folder_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded fault is a patched copy of a backend, and the child is killed, not ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    worker = Worker("sacts.kernels_under_test.faults:last_tile_dropped")
    assert worker.judge("decode/fp16/kv:17/pattern:all").verdict is not Verdict.SUITE_ERROR
    assert list(tmp_path.glob("*/sacts-fault-*"))
    worker.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("inside", "verdict", "words"),
    [
        (True, Verdict.TIMEOUT, "launch 3 did not return within 30 s"),
        (False, Verdict.SUITE_ERROR, "the suite's own work took over 30 s"),
    ],
)
def test_time_beside_launches_is_the_suite_s_own(inside: bool, verdict: Verdict, words: str) -> None:
    assert _cause(None, "", Lost(3, 30.0, inside)) == (verdict, words)


@pytest.mark.parametrize("length", [20, 103])
def test_each_launch_begins_and_ends(length: int) -> None:
    """Also one whose adapter raises."""
    said: list[str] = []
    launcher = Launcher(
        load(ADAPTER), "cpu", lambda first: said.append("begins"), on_return=lambda: said.append("ends")
    )
    judge(launcher, "x", parse(cell(length)))
    assert said
    assert said == ["begins", "ends"] * (len(said) // 2)
