"""Runs of shards and their merge: what a run was of, and whether several are the whole, each case once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from .records import Record, read, replace_file

MANIFEST, RECORDS, DURATIONS = "run.json", "records.jsonl", "durations.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run judged. `tier`: its name and every cell id of it, in order; `cells`: those of this shard, part `index`
    of `count`; `environment`: versions and device, in words.
    """

    suite: str
    tier: str
    whole: list[str]
    cells: list[str]
    index: int
    count: int
    adapters: list[str]
    device: str
    replicates: int
    environment: dict[str, str]


class MergeError(ValueError):
    """Runs that are not one run; the message names the folder and what does not fit."""


def write(folder: Path, manifest: Manifest) -> None:
    """Beside the records."""
    replace_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def write_durations(folder: Path, seconds: dict[str, float]) -> None:
    """Seconds of each cell, by id: what `--durations` balances shards by; no result depends on it."""
    rounded = {cell: round(each, 3) for cell, each in sorted(seconds.items())}
    replace_file(folder / DURATIONS, msgspec.json.format(msgspec.json.encode(rounded), indent=1) + b"\n")


def read_durations(path: Path) -> dict[str, float]:
    """Raises MergeError for a file that is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError) as error:
        raise MergeError(f"{path} holds no durations: {error}") from None


def load(folder: Path) -> tuple[Manifest, list[Record]]:
    """A run's folder. Raises MergeError where something is missing, RecordError for a line that is no record."""
    for name in (MANIFEST, RECORDS):
        if not (folder / name).is_file():
            raise MergeError(f"{folder} has no {name}: it is no folder that sacts run --report has written")
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise MergeError(f"{folder / MANIFEST}: {error}") from None
    return manifest, read(folder / RECORDS)


def merge(folders: Sequence[Path]) -> tuple[Manifest, list[Record]]:
    """One run out of its shards. Raises MergeError for other versions, tiers, adapters, devices or replicates, for a
    shard that is missing or there twice, and for cases that are missing, twice, or of another shard.
    """
    runs = [(folder, *load(folder)) for folder in folders]
    first = runs[0][1]
    for folder, manifest, _ in runs:
        for name in ("suite", "tier", "whole", "adapters", "device", "replicates", "count"):
            mine, other = getattr(first, name), getattr(manifest, name)
            if mine != other:
                said = "" if name == "whole" else f": {_words(other)} instead of {_words(mine)}"
                what = "other cells in its tier" if name == "whole" else f"another {name}"
                raise MergeError(f"{folder} has {what} than {folders[0]}{said}")
    _each_once([manifest.index for _, manifest, _ in runs], range(1, first.count + 1), f"shard {{}}/{first.count}")
    _each_once([cell for _, manifest, _ in runs for cell in manifest.cells], first.whole, "cell {}")
    records = []
    for folder, manifest, mine in runs:
        found = [(record.adapter, record.cell, record.replicate) for record in mine]
        wanted = list(_cases(manifest))
        _each_once(found, wanted, f"{folder}: case {{}}")
        records += mine
    environment = {
        name: " | ".join(dict.fromkeys(manifest.environment.get(name, "?") for _, manifest, _ in runs))
        for name in first.environment
    }
    whole = msgspec.structs.replace(first, cells=first.whole, index=1, count=1, environment=environment)
    return whole, records


def _cases(manifest: Manifest) -> Iterator[tuple[str, str, int]]:
    for adapter in manifest.adapters:
        for cell in manifest.cells:
            for replicate in range(manifest.replicates):
                yield adapter, cell, replicate


def _each_once(found: Sequence[object], wanted: Sequence[object], words: str) -> None:
    times = Counter(found)
    for each in wanted:
        if times[each] != 1:
            said = "is missing" if not times[each] else f"is there {times[each]} times"
            raise MergeError(f"{words.format(_words(each))} {said}")
    foreign = [each for each in times if each not in set(wanted)]
    if foreign:
        raise MergeError(f"{words.format(_words(foreign[0]))} belongs to no part of this run")


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
