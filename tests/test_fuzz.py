"""`sacts fuzz`: what is wrong for an odd combination only is found, a crash costs one cell, ids reproduce, Ctrl-C keeps
what was judged.
"""

from __future__ import annotations

import signal
import subprocess
import time
from itertools import islice
from pathlib import Path

import pytest
from command import SACTS, sacts
from typer.testing import CliRunner

from sacts.conformance.cli import app
from sacts.matrices import strategies, tiers
from sacts.matrices.cell import Cell, parse
from sacts.reports import failures, records
from sacts.reports.records import Finding, Gate, Record, Verdict, blank

ODD = str(Path(__file__).parent / "adapters" / "odd.py")
WHERE = "phase=decode and window>0 and pattern=all and values=gaussian and exec=eager and heads=6-3"


def expected(cell: Cell) -> Verdict:
    """What the odd adapter makes of a cell that it does not refuse."""
    if cell.window % 5 == 2:
        return Verdict.CRASH
    return Verdict.FAIL if cell.window % 2 and cell.heads[1] == 3 and any(cell.kv) else Verdict.FALLBACK


def test_odd_failures_are_found_and_reproduce_by_their_ids(tmp_path: Path) -> None:
    done = sacts(tmp_path, "fuzz", "-a", ODD, "--count", "16", "--where", WHERE, "--seed", "8", "-n", "1")
    assert done.returncode == records.EXIT_FAILURES, done.stderr
    judged = {record.cell: record for record in records.read(tmp_path / "sacts-report" / "records.jsonl")}
    assert len(judged) == 16
    served = {cell: each for cell, each in judged.items() if each.verdict is not Verdict.REFUSED}
    assert {cell: each.verdict for cell, each in served.items()} == {cell: expected(parse(cell)) for cell in served}
    assert {Verdict.CRASH, Verdict.FAIL, Verdict.FALLBACK} <= {each.verdict for each in judged.values()}
    assert {*judged} <= {cell.id for cell in islice(strategies.drawn(8, WHERE), 480)}
    bad = {cell: each.verdict for cell, each in judged.items() if not each.accepted}
    path = tmp_path / "sacts-report" / "failures.cells"
    assert {cell.id for cell in tiers.load(path)} == {*bad}
    assert "refused by declaration" in done.stdout
    assert (tmp_path / "sacts-report" / "junit.xml").is_file()
    assert (tmp_path / "sacts-report" / "report.html").is_file()
    again = sacts(tmp_path, "run", "-a", ODD, "-t", str(path), "-n", "1", "--report", "again")
    assert again.returncode == records.EXIT_FAILURES, again.stderr
    assert {r.cell: r.verdict for r in records.read(tmp_path / "again" / "records.jsonl")} == bad


def test_ctrl_c_ends_the_search_and_keeps_what_was_judged(tmp_path: Path) -> None:
    command = [*SACTS, "fuzz", "-a", ODD, "--where", WHERE, "--minutes", "9", "-n", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    report, deadline = tmp_path / "sacts-report", time.monotonic() + 120
    while not (report / "failures.cells").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, wrong = process.communicate(timeout=60)
    assert process.returncode == records.EXIT_FAILURES, wrong
    judged = records.read(report / "records.jsonl")
    assert {r.cell for r in judged if not r.accepted} == {cell.id for cell in tiers.load(report / "failures.cells")}
    assert all(r.verdict is expected(parse(r.cell)) for r in judged if r.verdict is not Verdict.REFUSED)
    assert "ended by the user" in said
    assert {path.name for path in report.iterdir()} == {"failures.cells", "junit.xml", "records.jsonl", "report.html"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--where", "pge=3"], "did you mean 'page'"),
        (["--where", "page=64 and pattern=case64k"], "no value of page is left beside"),
        (["-a", "tritn"], "did you mean 'triton'"),
        (["-d", "gpu"], "device 'gpu' is not usable here"),
        (["-n", "0"], "-n takes a number from 1 or auto"),
        (["--count", "0"], "--count"),
        (["--minutes", "0"], "--minutes"),
        (["--cost", "0"], "--cost"),
    ],
)
def test_bad_usage_exits_2_and_says_what_is_valid(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, ["fuzz", *arguments])
    assert said.exit_code == records.EXIT_USAGE
    assert words in said.output
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_does_not_load_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    done = sacts(tmp_path, "fuzz", "-a", "broken.py", "--count", "3")
    assert done.returncode == records.EXIT_INCOMPLETE
    assert "a_module_that_is_not_there" in done.stderr
    assert not (tmp_path / "sacts-report").exists()


def record(length: int, verdict: Verdict, sentence: str = "") -> Record:
    finding = Finding(Gate.COUNT, "row 0", sentence) if verdict is Verdict.FAIL else None
    made = blank("a", "cpu", f"decode/fp16/kv:{length}", 0, verdict, sentence)
    return Record(**{name: getattr(made, name) for name in made.__struct_fields__} | {"finding": finding})


def test_failures_stand_first_each_in_one_line_that_a_tier_takes(tmp_path: Path) -> None:
    judged = [
        record(1, Verdict.UNTRUSTED, "this case could not have failed"),
        record(2, Verdict.PASS),
        record(3, Verdict.FAIL, "row 0 # lost\n\x1b[31mtoken 3\u2028" + "x" * 999),
        record(3, Verdict.FAIL, "again"),
    ]
    path = tmp_path / "failures.cells"
    failures.write(path, judged, "sacts fuzz")
    head, first, second = path.read_text(encoding="utf-8").splitlines()
    assert head == "# Made by: sacts fuzz"
    assert first.startswith("decode/fp16/kv:3  # fail [count]: row 0 # lost [31mtoken 3 xxx")
    assert len(first) < 400
    assert second == "decode/fp16/kv:1  # untrusted: this case could not have failed"
    assert [cell.kv for cell in tiers.load(path)] == [(3,), (1,)]


def test_where_nothing_failed_no_old_list_of_failures_stays(tmp_path: Path) -> None:
    path = tmp_path / "failures.cells"
    path.write_text("decode/fp16/kv:1\n")
    failures.write(path, [record(2, Verdict.PASS)], "sacts fuzz")
    assert not path.exists()
