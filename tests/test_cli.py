"""The command line: exit codes, and messages that name what was wrong and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import sacts, sacts_apart

from sacts.reports import records
from sacts.reports.records import Verdict, blank

VERDICTS = {20: Verdict.FALLBACK, 21: Verdict.FALLBACK, 104: Verdict.FAIL}
MISBEHAVING = str(Path(__file__).parent / "adapters" / "misbehaving.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-a", "tritn"], "no adapter 'tritn'; did you mean 'triton'? installed: sdpa, triton"),
        (["run", "-a", "nowhere.py"], "adapter 'nowhere.py': there is no file nowhere.py"),
        (["run", "-a", "no_module:x"], "adapter 'no_module:x': there is no module no_module"),
        (["run", "-t", "smok"], "no tier 'smok'; did you mean 'smoke'?"),
        (["matrix", "list", "-t", "smok"], "no tier 'smok'; did you mean 'smoke'?"),
        (["run", "-d", "gpu"], "device 'gpu' is not usable here"),
        (["run", "-k", "nothing"], "no cell of smoke.cells matches -k 'nothing'; see sacts matrix list"),
        (["run", "-k", "a and"], "Wrong expression passed to '-k': a and"),
        (
            ["run", "decode/fp16/kv:17/patern:all"],
            "'patern:all' in 'decode/fp16/kv:17/patern:all' names no axis; did you mean 'pattern'?",
        ),
        (["run", "decode/fp16/kv:17/patern:all"], "nearest cell of smoke: decode/fp16/kv:17/pattern:all"),
        (["run", "decode/fp15/kv:17"], "axis dtype has no value 'fp15'; did you mean 'fp16'?"),
        (["audit", "tail_slot"], "no seeded fault 'tail_slot'; did you mean 'tail_slot_attended'?"),
        (
            ["audit", "-d", "meta", "delta_missing"],
            "seeded in the modelled kernel, which runs on the cpu only",
        ),
        (["run", "--nonsense"], "No such option"),
    ],
)
def test_bad_usage_exits_2_and_says_what_is_valid(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = sacts(tmp_path, *arguments)
    assert done.returncode == records.EXIT_USAGE
    assert words in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_bad_tier_file_names_its_line(tmp_path: Path) -> None:
    tier = tmp_path / "mine.cells"
    tier.write_text("# mine\ndecode/fp16/kv:3\ndecode/fp16/kv:x\n")
    done = sacts(tmp_path, "run", "-t", str(tier))
    assert done.returncode == records.EXIT_USAGE
    assert "mine.cells line 3: axis kv takes integers, got 'x'" in done.stderr


def test_four_bad_cells_are_four_verdicts(tmp_path: Path) -> None:
    tier = tmp_path / "mine.cells"
    tier.write_text("".join(f"decode/fp16/kv:{n}/pattern:all\n" for n in (20, 101, 102, 103, 104, 21)))
    limits = ["--timeout", "2", "--compile-timeout", "2"]
    done = sacts_apart(tmp_path, "run", "-t", str(tier), "-a", MISBEHAVING, "-n", "2", *limits)
    assert done.returncode == records.EXIT_FAILURES
    judged = records.read(tmp_path / "sacts-report" / "records.jsonl")
    bad = {record.cell: record.verdict for record in judged if not record.accepted}
    assert len(judged) == 6
    assert bad == {
        "decode/fp16/kv:101/pattern:all": Verdict.CRASH,
        "decode/fp16/kv:102/pattern:all": Verdict.TIMEOUT,
        "decode/fp16/kv:103/pattern:all": Verdict.ERROR,
        "decode/fp16/kv:104/pattern:all": Verdict.FAIL,
    }
    for cell in bad:
        assert f"reproduce: sacts run --adapter {MISBEHAVING} {cell}" in done.stdout
    assert "2 of 6" in done.stdout


def test_a_printed_reproducer_runs_that_case_alone(tmp_path: Path) -> None:
    done = sacts(tmp_path, "run", "-a", "sdpa", "decode/fp16/kv:17/pattern:all/replicate:2")
    assert done.returncode == records.EXIT_ACCEPTED
    (record,) = records.read(tmp_path / "sacts-report" / "records.jsonl")
    assert (record.cell, record.replicate) == ("decode/fp16/kv:17/pattern:all", 2)


def test_an_adapter_file_in_the_users_folder_is_judged(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --nonsense\n")
    (tmp_path / "mine.py").write_text("from sacts.kernels_under_test.sdpa import Adapter as Mine\n")
    for name in ("mine.py:Mine", "mine:Mine"):
        done = sacts_apart(tmp_path, "run", "-a", name, "-k", "kv:17")
        assert done.returncode == records.EXIT_ACCEPTED, done.stderr
        assert "1 fallback" in done.stdout


def test_matrix_list_prints_ids_that_parse_and_the_axes(tmp_path: Path) -> None:
    listed = sacts(tmp_path, "matrix", "list").stdout.splitlines()
    assert "decode/fp16/kv:128/page:64/pattern:example/map:example" in listed
    assert json.loads(sacts(tmp_path, "matrix", "list", "--json").stdout) == listed
    axes = sacts(tmp_path, "matrix", "axes").stdout
    assert "window: window_left" in axes
    assert "    huge: logits up to about +-300" in axes


def test_explain_says_what_a_cell_is_and_what_is_launched(tmp_path: Path) -> None:
    told = sacts(tmp_path, "explain", "decode/fp16/kv:90+50/pattern:duplicates").stdout
    assert "duplicates in the raw lists  " in told
    assert "count: each row attends exactly its candidates, each once" in told
    facts = json.loads(sacts(tmp_path, "explain", "decode/fp16/kv:600/splits:8", "--json").stdout)
    assert facts["sizes"]["candidate rows"] == 2
    assert any(probe.startswith("merge:") for probe in facts["probes"])
    wrong = sacts(tmp_path, "explain", "decode/fp16/kv:17/patern:all")
    assert wrong.returncode == records.EXIT_USAGE
    assert "nearest cell of smoke: decode/fp16/kv:17/pattern:all" in wrong.stderr


def test_doctor_looks_at_versions_traps_and_devices(tmp_path: Path) -> None:
    done = sacts(tmp_path, "doctor", "--json")
    signs = {sign["what"]: sign for sign in json.loads(done.stdout)}
    assert done.returncode == records.EXIT_ACCEPTED
    assert signs["torch"]["fine"]
    assert "bf16 arithmetic" in signs
    assert "pass on decode/bf16/kv:17/pattern:all" in signs["device cpu"]["seen"]


@pytest.mark.parametrize(
    ("lengths", "arguments", "code"),
    [
        ((20, 104), (), 1),
        ((20, 104), ("-a", "sdpa"), 0),
        ((20, 104), ("-a", "gone.py"), 125),
        ((20, 21), (), 128),
        ((20, 21), ("--all",), 0),
    ],
)
def test_replay_exits_as_git_bisect_wants(
    tmp_path: Path, lengths: tuple[int, ...], arguments: tuple[str, ...], code: int
) -> None:
    judged = [blank(MISBEHAVING, "cpu", f"decode/fp16/kv:{n}/pattern:all", 0, VERDICTS[n]) for n in lengths]
    records.write(tmp_path / "records.jsonl", judged)
    assert sacts(tmp_path, "replay", "records.jsonl", *arguments).returncode == code


def test_replay_refuses_what_is_no_record_file(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("{}\n")
    done = sacts(tmp_path, "replay", "records.jsonl")
    assert done.returncode == 128
    assert "records.jsonl line 1: not a record" in done.stderr
    assert sacts(tmp_path, "replay", "nowhere.jsonl").returncode == 128


def test_the_catalogue_is_listed_without_running_it(tmp_path: Path) -> None:
    listed = sacts(tmp_path, "audit", "--list").stdout
    assert "tail_slot_attended: slots of the last block beyond T are not masked" in listed
