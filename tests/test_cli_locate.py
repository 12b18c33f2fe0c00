"""`sacts locate` answers in a sentence, an exit code, or JSON, whatever the backend does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sacts.conformance.cli import app

SKELETON = Path(__file__).parent.parent / "conformance" / "templates" / "adapter.py.txt"
CELL = "prefill/bf16/kv:70/q:5/pattern:all/causal:bottom_right/window:16"
WINDOW = """            if spec.window_left >= 0:
                seen &= t >= position - spec.window_left
"""
CRASH = "import os\n\n\ndef run(case, plan=None):\n    os._exit(7)\n"


def located(folder: Path, source: str, *options: str) -> tuple[int, str]:
    file = folder / "mine.py"
    file.write_text(source, encoding="utf-8")
    result = CliRunner().invoke(app, ["locate", CELL, "-a", str(file), *options])
    return result.exit_code, result.output


def test_it_names_the_tokens_of_a_forgotten_window(tmp_path: Path) -> None:
    source = SKELETON.read_text(encoding="utf-8")
    assert source.count(WINDOW) == 1
    code, said = located(tmp_path, source.replace(WINDOW, ""), "--json")
    answer = json.loads(said)
    assert code == 1
    assert (
        "attended without being a candidate: token 0 (logical page 0 -> physical page " in answer["finding"]["sentence"]
    )
    assert 0 < answer["launches"] <= 20


def test_it_says_that_a_right_backend_is_right(tmp_path: Path) -> None:
    code, said = located(tmp_path, SKELETON.read_text(encoding="utf-8"))
    assert code == 0
    assert "nothing is wrong" in said


def test_a_crash_ends_only_its_own_process(tmp_path: Path) -> None:
    code, said = located(tmp_path, CRASH)
    assert code == 3
    assert "ended the process with exit code 7" in said


@pytest.mark.parametrize(
    ("cell", "words"), [(f"{CELL}/replicate:x", "replicate:x"), ("decode/fp16", "lacks the axis kv")]
)
def test_a_wrong_cell_is_a_usage_error(cell: str, words: str) -> None:
    result = CliRunner().invoke(app, ["locate", cell, "-a", "triton"])
    assert result.exit_code == 2
    assert words in result.output
