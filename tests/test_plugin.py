"""The plugin under plain pytest: node ids, -k, -n 2, JUnit; nothing heavy before a tier is collected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TIER = "decode/fp16/kv:17/pattern:all\ndecode/bf16/kv:33/pattern:one\ndecode/fp16/kv:101/pattern:all\n"
MISBEHAVING = str(Path(__file__).parent / "adapters" / "misbehaving.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.cells").write_text(TIER)
    return tmp_path


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "mine.cells", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_cells_are_items_with_readable_ids(folder: Path) -> None:
    done = run_pytest(folder, "--collect-only", "-q", "--sacts-adapter=sdpa")
    assert "mine.cells::sdpa::decode/bf16/kv:33/pattern:one" in done.stdout
    assert "3 tests collected" in done.stdout


def test_expressions_processes_and_junit_work(folder: Path) -> None:
    arguments = ["-n", "2", "-k", "not bf16", "--junitxml=junit.xml", f"--sacts-adapter={MISBEHAVING}"]
    done = run_pytest(folder, *arguments)
    assert done.returncode == 1
    assert "ended the process with SIGSEGV" in done.stdout
    assert f"reproduce: sacts run --adapter {MISBEHAVING} decode/fp16/kv:101/pattern:all" in done.stdout
    suite = next(ElementTree.parse(folder / "junit.xml").iter("testsuite"))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")


def test_a_wrong_adapter_is_a_collection_error(folder: Path) -> None:
    done = run_pytest(folder, "--sacts-adapter=nothing")
    assert done.returncode == 2
    assert "no adapter 'nothing'" in done.stdout


def test_a_session_without_tiers_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n"
        "def test_light():\n"
        "    assert not {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "    assert 'sacts.conformance.plugin' in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "test_light.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
