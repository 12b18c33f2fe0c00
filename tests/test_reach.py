"""What a run really covered, and on which GPU each process works."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from sacts.conformance.cli import app
from sacts.conformance.reach import reaches
from sacts.conformance.session import Selection
from sacts.conformance.worker import Worker
from sacts.matrices.cell import parse
from sacts.matrices.coverage import covered, feasible
from sacts.reports import html
from sacts.reports.records import Record, Verdict, blank

PLAIN, CAPPED = "decode/fp16/kv:1+40", "decode/bf16/kv:17+40/cap:20"
SEEN = Path(__file__).parent / "adapters" / "seen_gpu.py"


def record(cell: str, verdict: Verdict, status: str = "native", adapter: str = "a") -> Record:
    return msgspec.structs.replace(blank(adapter, "cpu", cell, 0, verdict), status=status)


def test_only_natively_judged_cells_count() -> None:
    judged = [
        record(PLAIN, Verdict.PASS),
        record(CAPPED, Verdict.FALLBACK, "fallback(dense)"),
        record(CAPPED, Verdict.REFUSED, "refused(not yet: cap)"),
        record(CAPPED, Verdict.UNTRUSTED),
        record(CAPPED, Verdict.CRASH),
        record(CAPPED, Verdict.PASS, "fallback(dense)"),
    ]
    (reach,) = reaches(judged)
    assert reach.covered == len(covered([parse(PLAIN)], 2)) > 0
    assert reach.feasible == len(feasible(2))
    assert "20" in reach.never["cap"]
    assert "bf16" in reach.never["dtype"] and "fp16" not in reach.never["dtype"]


def test_a_failure_counts_as_judged_and_adapters_count_apart() -> None:
    first, second = reaches([record(PLAIN, Verdict.PASS), record(CAPPED, Verdict.FAIL, adapter="b")])
    assert (first.adapter, second.adapter) == ("a", "b")
    assert "20" not in second.never["cap"]
    assert second.covered == len(covered([parse(CAPPED)], 2))


def test_a_cell_that_hides_what_stands_beside_it_counts_for_nothing() -> None:
    (reach,) = reaches([record("decode/fp16/kv:40+21/pattern:empty", Verdict.PASS)])
    assert reach.covered == 0


def test_a_level_counts_as_met_beside_a_length_that_is_none() -> None:
    (reach,) = reaches([record("decode/bf16/kv:777/cap:20", Verdict.PASS)])
    assert reach.covered == 0
    assert "20" not in reach.never["cap"]
    assert "one" in reach.never["kv"]


def test_the_page_says_what_was_covered() -> None:
    judged = [record(PLAIN, Verdict.PASS, adapter="<b>a</b>")]
    (reach,) = reaches(judged)
    page = html.render(judged, {}, lambda cell: {}, [reach])
    assert f"{reach.covered}&nbsp;of&nbsp;{reach.feasible}" in page
    assert "cap: 20" in page
    assert "<b>a</b>" not in page


def test_a_run_prints_what_was_covered(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["run", "-a", "sdpa", "decode/fp16/kv:17", "--report", str(tmp_path / "r")])
    assert f"pairs of levels judged natively, of {len(feasible(2))} feasible: sdpa 0" in said.stdout


@pytest.mark.parametrize(("visible", "gpu", "seen"), [("", 1, "1"), ("4,7", 1, "7"), ("4,7", 0, "4"), ("3", None, "3")])
def test_a_process_sees_its_own_gpu(visible: str, gpu: int | None, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Worker(str(SEEN), gpu=gpu) as worker:
        assert worker.judge(PLAIN).status == f"refused({seen})"


def test_processes_take_the_gpus_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes over two GPUs, as `-n auto` has it: each is seen."""
    from rich.console import Console

    from sacts.conformance.session import judge_all

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tier = tmp_path / "two.cells"
    tier.write_text("".join(f"decode/fp16/kv:{n}\n" for n in range(1, 9)))
    judged = judge_all(Selection(tier, [str(SEEN)], processes=2, gpus=2), Console(stderr=True))
    assert {each.status for each in judged} == {"refused(0)", "refused(1)"}


@pytest.mark.parametrize("wrong", ["0", "-1", "many", "1.5"])
def test_a_wrong_number_of_processes_is_a_usage_error(wrong: str) -> None:
    said = CliRunner().invoke(app, ["run", "-n", wrong, "decode/fp16/kv:17"])
    assert said.exit_code == 2
    assert "a number from 1 or auto" in said.output
