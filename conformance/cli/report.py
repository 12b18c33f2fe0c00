"""`sacts report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sacts.matrices.cell import axis_values
from sacts.reports import html, junit, records, shards, summary

from ..reach import reaches
from .common import out, usage

app = typer.Typer(no_args_is_help=True, help="Work with what runs have written.")


@app.callback()
def _commands() -> None:
    """So that `merge` stays a command of its own."""


@app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders that sacts run --shard i/n has written.")],
    report: Annotated[Path, typer.Option(help="Folder for the files of the whole.")] = Path("sacts-report"),
) -> None:
    """Join the shards of a run. Refused where a shard or a case is missing or there twice, or where versions, tiers,
    adapters, devices or replicates differ. Exits as the whole run would have.

    [bold]sacts report merge shard-1 shard-2 --report whole[/]
    """
    try:
        manifest, judged = shards.merge(folders)
    except (shards.MergeError, records.RecordError) as error:
        usage(error)
    seconds: dict[str, float] = {}
    for folder in folders:
        if (folder / shards.DURATIONS).is_file():
            seconds |= shards.read_durations(folder / shards.DURATIONS)
    shards.write(report, manifest)
    shards.write_durations(report, seconds)
    records.write(report / shards.RECORDS, judged)
    junit.write(report / "junit.xml", judged)
    covered = reaches(judged)
    html.write(report / "report.html", judged, manifest.environment, axis_values, covered)
    summary.show(out, judged, covered)
    out.print(f"{len(folders)} shards, {len(judged)} records, in {report}", markup=False, highlight=False)
    raise typer.Exit(records.exit_code(judged))
