"""Records: versioned, validated on reading, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sacts.reports import records
from sacts.reports.records import EXIT_ACCEPTED, EXIT_FAILURES, EXIT_INCOMPLETE, Record, RecordError, Verdict, blank


def record(verdict: Verdict = Verdict.PASS, cell: str = "decode/fp16/kv:1", adapter: str = "a") -> Record:
    return blank(adapter, "cpu", cell, 0, verdict, "says <b>so</b>")


def test_records_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "records.jsonl"
    written = [record(verdict, cell) for verdict in Verdict for cell in ("b", "a")]
    records.write(path, written)
    assert sorted(records.read(path), key=str) == sorted(written, key=str)


def test_the_file_does_not_depend_on_the_order_of_judging(tmp_path: Path) -> None:
    several = [record(cell=cell, adapter=adapter) for cell in "cab" for adapter in "yx"]
    records.write(tmp_path / "one", several)
    records.write(tmp_path / "two", several[::-1])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records.write(path, [record()])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        records.write(path, [record(), Record(**{"suite": object()} | fields())])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["records.jsonl"]


def fields() -> dict[str, object]:
    return {"adapter": "a", "device": "cpu", "cell": "c", "verdict": Verdict.PASS}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "fine"}, "Invalid enum value 'fine'"),
        ({"schema": 99}, "record schema 99, this suite reads 1"),
        ({"cell": 3}, "Expected `str`, got `int`"),
        ({"verdict": None}, "Expected `str`, got `null`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "records.jsonl"
    good = json.loads(records.encode(record()))
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(RecordError, match=r"records.jsonl line 2") as raised:
        records.read(path)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict.PASS, Verdict.FALLBACK, Verdict.REFUSED], EXIT_ACCEPTED),
        ([Verdict.PASS, Verdict.FAIL], EXIT_FAILURES),
        ([Verdict.CRASH, Verdict.NOT_RUN], EXIT_FAILURES),
        ([Verdict.TIMEOUT], EXIT_FAILURES),
        ([Verdict.ERROR], EXIT_FAILURES),
        ([Verdict.PASS, Verdict.NOT_RUN], EXIT_INCOMPLETE),
        ([Verdict.PASS, Verdict.UNTRUSTED], EXIT_INCOMPLETE),
        ([Verdict.SUITE_ERROR], EXIT_INCOMPLETE),
        ([], EXIT_INCOMPLETE),
    ],
)
def test_exit_codes(verdicts: list[Verdict], code: int) -> None:
    assert records.exit_code(record(verdict) for verdict in verdicts) == code
