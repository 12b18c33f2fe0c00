"""`sacts replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from sacts.reports import records
from sacts.reports.records import INCOMPLETE, Record, RecordError, blank

from .common import Device, err, out

GOOD, BAD, NOT_JUDGED, USAGE = 0, 1, 125, 128


def replay(
    file: Annotated[Path, typer.Argument(help="A records.jsonl, as `sacts run` writes it.")],
    everything: Annotated[bool, typer.Option("--all", help="Also what was accepted.")] = False,
    adapter: Annotated[str, typer.Option("--adapter", "-a", help="Another adapter than the recorded one.")] = "",
    device: Device = "",
) -> None:
    """Judge again what a run did not accept. The exit codes are made for git bisect run.

    0 good, 1 bad, 125 it could not be judged here, 128 usage.

    [bold]git bisect run sacts replay /tmp/sacts-report/records.jsonl[/]
    """
    chosen = [record for record in _read(file) if everything or not record.accepted]
    if not chosen:
        _usage(f"{file} holds no record that was not accepted; --all replays the accepted ones")
    judged = [_judge(record, adapter or record.adapter, device or record.device) for record in chosen]
    for record in judged:
        style = "green" if record.accepted else "bold red"
        out.print(Text(f"{record.adapter}  {record.cell}  {record.verdict}  {record.sentence}", style))
    if any(not r.accepted and r.verdict not in INCOMPLETE for r in judged):
        raise typer.Exit(BAD)
    raise typer.Exit(NOT_JUDGED if any(r.verdict in INCOMPLETE for r in judged) else GOOD)


def _read(file: Path) -> list[Record]:
    try:
        return records.read(file)
    except OSError as error:
        _usage(f"cannot read {file}: {error.strerror}")
    except RecordError as error:
        _usage(error)


def _judge(record: Record, adapter: str, device: str) -> Record:
    from .. import loading
    from ..worker import Worker

    try:
        loading.check(adapter)
    except loading.AdapterError as error:
        return blank(adapter, device, record.cell, record.replicate, records.Verdict.NOT_RUN, str(error))
    with Worker(adapter, device) as worker:
        return worker.judge(record.cell, record.replicate)


def _usage(message: object) -> NoReturn:
    err.print(f"sacts: {message}", style="bold red", markup=False, highlight=False)
    raise typer.Exit(USAGE)
