"""Shards partition a tier, whatever the number; their merge is the whole run, or is refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from command import sacts
from hypothesis import given
from hypothesis import strategies as st

from sacts.matrices import shards, tiers
from sacts.matrices.cell import Cell, parse
from sacts.matrices.shards import Shard, ShardError
from sacts.reports import records
from sacts.reports.records import Record, Verdict
from sacts.reports.shards import Manifest, MergeError, load, merge, read_durations, write, write_durations

SMOKE = tiers.load(tiers.path_of("smoke"))
SECONDS = st.dictionaries(st.sampled_from([cell.id for cell in SMOKE]), st.floats(0.001, 1000.0))


@given(st.integers(1, 60), SECONDS)
def test_shards_partition_a_tier(count: int, seconds: Mapping[str, float]) -> None:
    parts = shards.parts(SMOKE, count, seconds)
    assert len(parts) == count
    assert sorted(SMOKE.index(cell) for part in parts for cell in part) == list(range(len(SMOKE)))
    for part in parts:
        assert part == sorted(part, key=SMOKE.index)
    assert parts == shards.parts(SMOKE, count, dict(reversed(seconds.items())))


@given(st.integers(1, 12), SECONDS)
def test_no_shard_costs_more_than_the_mean_and_one_cell(count: int, seconds: Mapping[str, float]) -> None:
    cost = dict(zip(SMOKE, shards.costs(SMOKE, seconds), strict=True))
    loads = [sum(cost[cell] for cell in part) for part in shards.parts(SMOKE, count, seconds)]
    assert max(loads) <= sum(loads) / count + max(cost.values()) + 1e-6


def test_unknown_durations_are_on_the_scale_of_the_known() -> None:
    cells = [parse("decode/fp16/kv:64"), parse("decode/fp16/kv:640"), parse("decode/fp16/kv:6400")]
    known = shards.predicted(cells[0])
    costs = shards.costs(cells, {cells[0].id: 3.0})
    assert costs == [3.0, 3.0 * shards.predicted(cells[1]) / known, 3.0 * shards.predicted(cells[2]) / known]
    assert costs[0] < costs[1] < costs[2]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2", ""])
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ShardError, match="a shard is written i/n"):
        shards.parse(text)


def test_shards_are_read_as_they_are_written() -> None:
    assert str(shards.parse("2/4")) == "2/4"
    assert shards.parse("2/4") == Shard(2, 4)


# --- merging


def run_of(folder: Path, cells: list[Cell], index: int, count: int, **changes: object) -> Path:
    """A folder as a shard's run leaves it."""
    manifest = Manifest(
        suite="1",
        tier="smoke",
        whole=[cell.id for cell in SMOKE],
        cells=[cell.id for cell in cells],
        index=index,
        count=count,
        adapters=["a", "b"],
        device="cpu",
        replicates=2,
        environment={"torch": "2"},
    )
    manifest = msgspec.structs.replace(manifest, **changes)
    found = [
        Record(suite="1", adapter=adapter, device="cpu", cell=cell, replicate=replicate, verdict=Verdict.PASS)
        for adapter in manifest.adapters
        for cell in manifest.cells
        for replicate in range(manifest.replicates)
    ]
    records.write(folder / "records.jsonl", found)
    write(folder, manifest)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    parts = shards.parts(SMOKE, 3)
    return [run_of(tmp_path / f"part-{n}", part, n, 3) for n, part in enumerate(parts, start=1)]


def test_the_merge_of_all_shards_is_the_whole(folders: list[Path]) -> None:
    manifest, found = merge(folders[::-1])
    assert (manifest.index, manifest.count, manifest.cells) == (1, 1, [cell.id for cell in SMOKE])
    assert len({(r.adapter, r.cell, r.replicate) for r in found}) == len(found) == 4 * len(SMOKE)


def without_a_record(folder: Path) -> None:
    found = records.read(folder / "records.jsonl")
    records.write(folder / "records.jsonl", found[1:])


def with_a_record_twice(folder: Path) -> None:
    found = records.read(folder / "records.jsonl")
    records.write(folder / "records.jsonl", [*found, found[0]])


def with_a_foreign_record(folder: Path) -> None:
    found = records.read(folder / "records.jsonl")
    records.write(folder / "records.jsonl", [*found, msgspec.structs.replace(found[0], cell="decode/fp16/kv:1")])


def changed(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        write(folder, msgspec.structs.replace(load(folder)[0], **changes))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_a_record, r"part-2: case a, .* is missing"),
        (with_a_record_twice, r"part-2: case a, .* is there 2 times"),
        (with_a_foreign_record, r"case a, decode/fp16/kv:1, 0 belongs to no part of this run"),
        (changed(suite="2"), "has another suite than .*: 2 instead of 1"),
        (changed(tier="pr"), "has another tier than .*: pr instead of smoke"),
        (changed(whole=["decode/fp16/kv:1"]), "has other cells in its tier than"),
        (changed(adapters=["a"]), "has another adapters than"),
        (changed(device="cuda"), "has another device than"),
        (changed(replicates=1), "has another replicates than"),
        (changed(index=3), "shard 2/3 is missing"),
        (changed(index=1), "shard 1/3 is there 2 times"),
        (lambda folder: (folder / "run.json").unlink(), "has no run.json"),
        (lambda folder: (folder / "run.json").write_text("{}"), "run.json: "),
    ],
)
def test_what_is_no_shard_of_the_run_is_refused(
    folders: list[Path], change: Callable[[Path], object], words: str
) -> None:
    change(folders[1])
    with pytest.raises(MergeError, match=words):
        merge(folders)


def test_a_gap_is_refused(folders: list[Path]) -> None:
    with pytest.raises(MergeError, match="shard 2/3 is missing"):
        merge([folders[0], folders[2]])


def test_the_environments_of_shards_stand_side_by_side(folders: list[Path]) -> None:
    changed(environment={"torch": "3"})(folders[1])
    assert merge(folders)[0].environment == {"torch": "2 | 3"}


def test_durations_are_read_as_they_are_written(tmp_path: Path) -> None:
    write_durations(tmp_path, {"b": 1.0, "a": 2.5})
    assert read_durations(tmp_path / "durations.json") == {"a": 2.5, "b": 1.0}
    (tmp_path / "none.json").write_text("[1]")
    with pytest.raises(MergeError, match="holds no durations"):
        read_durations(tmp_path / "none.json")


# --- the command line


def test_two_shards_are_judged_apart_and_merged(tmp_path: Path) -> None:
    tier = tmp_path / "mine.cells"
    tier.write_text("decode/fp16/kv:3\ndecode/fp16/kv:90\ndecode/bf16/kv:17\n")
    for n in (1, 2):
        done = sacts(
            tmp_path, "run", "-t", "mine.cells", "-a", "sdpa", "-n", "1", "--shard", f"{n}/2", "--report", f"p{n}"
        )
        assert done.returncode == 0, done.stderr
    done = sacts(tmp_path, "report", "merge", "p1", "p2", "--report", "whole")
    assert done.returncode == 0, done.stderr
    assert len(records.read(tmp_path / "whole" / "records.jsonl")) == 3
    assert set(read_durations(tmp_path / "whole" / "durations.json")) == set(tier.read_text().split())
    assert (tmp_path / "whole" / "report.html").is_file()
    again = sacts(tmp_path, "report", "merge", "p1", "--report", "again")
    assert again.returncode == records.EXIT_USAGE
    assert "shard 2/2 is missing" in again.stderr
    assert not (tmp_path / "again").exists()
    shutil.rmtree(tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--shard", "3/2"], "a shard is written i/n with i from 1 to n, such as 2/4; got '3/2'"),
        (["run", "--shard", "1/2", "-k", "bf16"], "--shard cuts a whole tier"),
        (["run", "--shard", "99/99", "-a", "sdpa"], f"shard 99/99 of smoke is empty: it has {len(SMOKE)} cells"),
        (["run", "--shard", "1/2", "--durations", "nowhere.json"], "holds no durations"),
        (["report", "merge", "nowhere"], "nowhere has no run.json"),
    ],
)
def test_bad_usage_exits_2_and_says_what_is_valid(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = sacts(tmp_path, *arguments)
    assert done.returncode == records.EXIT_USAGE
    assert words in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_export_names_every_shard(tmp_path: Path) -> None:
    found = json.loads(sacts(tmp_path, "matrix", "export", "--shards", "3").stdout)
    assert [each["shard"] for each in found] == ["1/3", "2/3", "3/3"]
    assert sorted(cell for each in found for cell in each["cells"]) == sorted(cell.id for cell in SMOKE)
    assert all(each["iterations"] > 0 for each in found)
    github = json.loads(sacts(tmp_path, "matrix", "export", "--shards", "3", "--format", "github").stdout)
    assert github == {"shard": ["1/3", "2/3", "3/3"]}
    gitlab = sacts(tmp_path, "matrix", "export", "--shards", "3", "--format", "gitlab").stdout
    assert gitlab.splitlines() == ["parallel:", "  matrix:", '    - SHARD: ["1/3", "2/3", "3/3"]']
    few = json.loads(sacts(tmp_path, "matrix", "export", "--shards", "99", "--format", "github").stdout)
    assert few["shard"][-1] == f"{len(SMOKE)}/{len(SMOKE)}"
