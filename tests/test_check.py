"""`sacts adapter check`: every convention declared wrongly on purpose is found by the contract cells and named."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from command import sacts

from sacts.conformance.adapter import Capabilities
from sacts.conformance.check import UNLOCKS, check
from sacts.conformance.messages import OPTIONAL_MEMBERS
from sacts.conformance.testing import run_conformance
from sacts.conformance.worker import Worker

FILE = Path(__file__).parent / "adapters" / "conventions.py"
TABLE = runpy.run_path(str(FILE))["TABLE"]
NO_CONVENTIONS = {"numerics", "determinism", "d_lse", "reads_saved", "plan_keeps", "graph", "fallback_numerics"}


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_declaration_is_found_and_named(name: str) -> None:
    with Worker(f"{FILE}:{name}") as worker:
        result = check(worker)
    assert not result.accepted
    assert result.observed == tuple(map(str, TABLE[name]))


def test_the_table_holds_every_convention() -> None:
    conventions = {field.name for field in fields(Capabilities)} - NO_CONVENTIONS
    assert {field for field, _, _ in TABLE.values()} == conventions


def test_a_right_declaration_is_accepted_and_what_is_missing_is_said() -> None:
    with Worker(f"{FILE}:Declared") as worker:
        result = check(worker)
    assert result.accepted
    assert result.observed is None
    assert result.missing == ("workspace_bytes", "plan", "normalize", "trace", "backward")
    assert set(UNLOCKS) == set(OPTIONAL_MEMBERS)


def test_the_command_prints_declared_and_observed(tmp_path: Path) -> None:
    done = sacts(tmp_path, "adapter", "check", f"{FILE}:ReadsHnd")
    assert done.returncode == 1
    assert "kv_layout: declared NHD, observed HND: so declared, all three cells pass" in done.stdout


def test_a_new_adapter_works_from_the_first_minute(tmp_path: Path) -> None:
    assert sacts(tmp_path, "adapter", "new", "mine").returncode == 0
    done = sacts(tmp_path, "adapter", "check", "mine.py", "--json")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["records"]) == 3
    again = sacts(tmp_path, "adapter", "new", "mine")
    assert again.returncode == 2
    assert "mine.py exists already; nothing was written" in again.stderr
    assert sacts(tmp_path, "adapter", "new", "not a name").returncode == 2
    test = (tmp_path / "test_mine.py").read_text()
    (tmp_path / "test_mine.py").write_text(test.replace('tier="smoke"', 'contains="kv:17"'))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in ran.stdout


def test_one_line_in_a_vendors_own_tests_fails_with_the_sentence() -> None:
    with pytest.raises(AssertionError, match="1 of 1 cells were not accepted") as raised:
        run_conformance(f"{FILE}:Base2", contains="decode/fp32/kv:16/")
    assert "the logarithm is base 2 where natural is declared" in str(raised.value)
    with pytest.raises(ValueError, match="no cell of smoke contains 'nothing'"):
        run_conformance("sdpa", contains="nothing")
