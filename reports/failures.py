"""The cells that a run did not accept, as a tier file: each id with its sentence as a comment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .records import INCOMPLETE, Record, replace_file

WIDEST = 300  # characters of a sentence


def render(records: Sequence[Record], made_by: str) -> str:
    """Failures, then what could not be judged, each in the order of `records`; empty where all were accepted."""
    bad: dict[str, Record] = {}
    for record in sorted((r for r in records if not r.accepted), key=lambda r: r.verdict in INCOMPLETE):
        bad.setdefault(record.cell, record)
    if not bad:
        return ""
    return "\n".join((f"# Made by: {made_by}", *(f"{cell}  # {_sentence(record)}" for cell, record in bad.items()), ""))


def _sentence(record: Record) -> str:
    """Verdict, gate and sentence in one line; what adapters say may be long or hold line ends."""
    gate = f" [{record.finding.gate}]" if record.finding else ""
    words = " ".join("".join(c if c.isprintable() else " " for c in record.sentence).split())
    return f"{record.verdict}{gate}: {words if len(words) <= WIDEST else words[: WIDEST - 3] + '...'}"


def write(path: Path, records: Sequence[Record], made_by: str) -> None:
    """Write the file, renamed into place when complete; where all were accepted there is none."""
    text = render(records, made_by)
    if text:
        replace_file(path, text.encode())
    else:
        path.unlink(missing_ok=True)
