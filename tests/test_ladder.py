"""The ladder: each rung adds one thing to the one below, and what is not judged is not held."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sacts.conformance.cli import app
from sacts.conformance.cli.ladder import first_missed, told
from sacts.kernels_under_test.faults import catalogue
from sacts.matrices import shards
from sacts.matrices.ladder import RUNGS, Rung, up_to
from sacts.reports.records import Record, Verdict, blank

ADDED = {
    "random pages": {"map"},
    "ragged": {"kv"},
    "split": {"splits"},
    "quantised": {"kcodec", "vcodec", "scales"},
    "selector": {"pattern"},
    "graph": {"exec"},
}


@pytest.mark.parametrize(("below", "rung"), list(pairwise(RUNGS)), ids=lambda rung: rung.name)
def test_the_first_cell_of_a_rung_is_that_of_the_rung_below_but_for_what_it_adds(below: Rung, rung: Rung) -> None:
    first, before = rung.cells[0], below.cells[0]
    differing = {f.name for f in fields(first) if getattr(first, f.name) != getattr(before, f.name)}
    assert differing == ADDED[rung.name]


def test_rungs_are_small_and_none_has_a_cell_of_another() -> None:
    cells = [cell for rung in RUNGS for cell in rung.cells]
    assert len(set(cells)) == len(cells)
    assert max(map(shards.predicted, cells)) <= 200
    assert [rung.number for rung in RUNGS] == list(range(1, len(RUNGS) + 1))


def test_a_rung_that_is_not_there_is_answered_with_those_that_are() -> None:
    assert [rung.name for rung in up_to(2)] == ["fixed candidates", "random pages"]
    done = CliRunner().invoke(app, ["run", "--rung", "9"])
    assert done.exit_code == 2
    with pytest.raises(ValueError, match="no rung 9; rungs: 1 fixed candidates, 2 random pages"):
        up_to(9)
    assert CliRunner().invoke(app, ["run", "--rung", "2", "--tier", "terms"]).exit_code == 2


def said(verdicts: dict[int, Verdict]) -> list[Record]:
    """A record of each cell: pass, or the verdict of its rung."""
    return [
        blank("x", "cpu", cell.id, 0, verdicts.get(rung.number, Verdict.PASS)) for rung in RUNGS for cell in rung.cells
    ]


def test_the_lowest_rung_that_fails_is_named() -> None:
    records = said({4: Verdict.FAIL, 6: Verdict.CRASH})
    assert first_missed(RUNGS, records) == RUNGS[3]
    assert told("x", RUNGS, records) == "x misses rung 4, split: mend it first, the later ones build on it"
    assert told("x", RUNGS, said({})) == "x holds all 7 rungs"


def test_what_is_refused_or_was_never_run_is_not_held() -> None:
    refused = told("x", RUNGS, said({7: Verdict.REFUSED}))
    assert refused == "x stands below rung 7, graph: a cell of it is refused, so not judged"
    lost = [record for record in said({}) if record.cell != RUNGS[1].cells[1].id]
    assert first_missed(RUNGS, lost) == RUNGS[1]
    twice = [*said({}), blank("x", "cpu", RUNGS[2].cells[0].id, 1, Verdict.FAIL)]
    assert first_missed(RUNGS, twice) == RUNGS[2]


def test_a_seeded_fault_falls_on_the_rung_that_adds_what_it_breaks(tmp_path: Path) -> None:
    fault = "last_split_forgotten"
    assert fault in catalogue()
    adapter = f"sacts.kernels_under_test.faults:{fault}"
    done = CliRunner().invoke(
        app, ["run", "-a", adapter, "--rung", "4", "-n", "1", "--report", str(tmp_path / "report")]
    )
    assert done.exit_code == 1, done.output
    assert "misses rung 4, split" in " ".join(done.output.split())
