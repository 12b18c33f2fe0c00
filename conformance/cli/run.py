"""`sacts run`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from sacts.matrices import shards
from sacts.matrices.cell import Cell, axis_values
from sacts.reports import records

from . import ladder
from .common import (
    CellIds,
    Device,
    DurationsOf,
    Expression,
    ModelOf,
    Processes,
    ShardOf,
    Tier,
    Where,
    adapter_names,
    cell_of,
    cells_of,
    check_adapters,
    check_device,
    durations_of,
    err,
    gpus,
    model_cells,
    out,
    processes_for,
    shard_of,
    tier_path,
    usage,
    where_of,
)

DEFAULT_ADAPTERS, DEFAULT_TIER = ["triton", "sdpa"], "smoke"


@contextmanager
def _tier_of(
    ids: list[str], path: Path, whole: list[Cell], part: shards.Shard, seconds: dict[str, float]
) -> Iterator[tuple[Path, str, int]]:
    """A tier file with just these cells (any cell of the matrix), or with a shard of the `whole`; the expression that
    selects replicates, and their number.
    """
    if not ids:
        mine = shards.parts(whole, part.count, seconds)[part.index - 1]
        if not mine:
            usage(f"shard {part} of {path.stem} is empty: it has {len(whole)} cells")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / path.name
            file.write_text("\n".join(cell.id for cell in mine) + "\n", encoding="utf-8")
            yield file, "", 1
        return
    chosen, terms, replicates = [], [], 1
    for text in ids:
        name, _, replicate = text.partition("/replicate:")
        if not (replicate or "0").isdecimal():
            usage(f"replicate:{replicate} in {text!r} is no number")
        number = int(replicate or 0)
        chosen.append(cell_of(name, path).id)
        if replicate:
            terms.append(f"({name} and replicate:{number})")
            replicates = max(replicates, number + 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "selected.cells"
        file.write_text("\n".join(dict.fromkeys(chosen)) + "\n", encoding="utf-8")
        cells_of(file)
        yield file, " or ".join(terms), replicates


def run(
    cells: CellIds = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "-a",
            help="Installed name, module:attribute or path/to/file.py. Repeatable.",
            show_default="triton, sdpa",
            autocompletion=adapter_names,
        ),
    ] = None,
    tier: Tier = DEFAULT_TIER,
    device: Device = "cpu",
    expression: Expression = "",
    where: Where = "",
    model: ModelOf = None,
    processes: Processes = "",
    replicates: Annotated[int, typer.Option(min=1, help="Draw each cell's data this many times.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one launch.")] = 30.0,
    compile_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a spec's first launch, which may compile.")
    ] = 60.0,
    rung: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="In place of a tier: the first N rungs of the ladder, fixed candidates first, each built on the last.",
            show_default=False,
        ),
    ] = None,
    shard: ShardOf = "1/1",
    durations: DurationsOf = None,
    report: Annotated[Path, typer.Option(help="Folder for records.jsonl, report.html and junit.xml.")] = Path(
        "sacts-report"
    ),
) -> None:
    """Judge adapters on a tier, or on single cells.

    [bold]sacts run[/]  the bundled kernels on the smoke tier, on this machine

    [bold]sacts run -a my_kernel.py[/]  your adapter: a file with run(case, plan=None) -> Outputs

    [bold]sacts run -a triton -d cuda -k "prefill and bf16"[/]  a part of the tier, on a GPU

    [bold]sacts run -a my_kernel.py --model config.json[/]  the part of the tier that a model triggers

    [bold]sacts run -a my_kernel.py --rung 3[/]  while a kernel grows: fixed candidates, random pages, ragged lists

    [bold]sacts run -a triton decode/fp16/kv:17/pattern:all[/]  one cell, as failures print it
    """
    from ..session import Selection, SelectionError, judge_all
    from ..worker import Limits

    adapters = adapter or DEFAULT_ADAPTERS
    check_adapters(adapters)
    check_device(device)
    part = shard_of(shard)
    if part != shards.WHOLE and (cells or expression):
        usage("--shard cuts a whole tier: leave cells and -k away and say --where, or name a .cells file with --tier")
    if cells and (where or model):
        usage("--where and --model narrow a tier: leave them away where cells are named")
    if rung and (cells or tier != DEFAULT_TIER):
        usage("--rung N takes the cells of the ladder: leave --tier and cells away")
    rungs = ladder.rungs_of(rung) if rung else ()
    source = ladder.LADDER if rung else tier_path(tier)
    named = [cell for each in rungs for cell in each.cells] if rung else cells_of(source)
    whole = where_of(model_cells(named, model), where)
    if not whole:
        usage(f"no cell of {source.name} matches --where {where!r}; see sacts matrix count")
    with _tier_of(cells or [], source, whole, part, durations_of(durations)) as (path, chosen, needed):
        mine = [cell.id for cell in cells_of(path)]
        both = f"({chosen}) and ({expression})" if chosen and expression else chosen or expression
        drawn = max(replicates, needed)
        cases = len(adapters) * (len(cells) * replicates if cells else len(mine) * drawn)
        selection = Selection(
            path,
            adapters,
            device,
            both,
            drawn,
            min(processes_for(processes, device), cases),
            Limits(timeout, compile_timeout),
            gpus() if device == "cuda" else 0,
        )
        try:
            seconds: dict[str, float] = {}
            judged = judge_all(selection, err, seconds)
        except SelectionError as error:
            usage(error)
    from sacts.reports import html, junit, summary
    from sacts.reports.shards import Manifest, write, write_durations

    from ..environment import environment
    from ..reach import reaches

    found = environment(device)
    if not (cells or expression):
        manifest = Manifest(
            suite=version("sacts"),
            tier=source.stem if rung else tier,
            whole=[cell.id for cell in whole],
            cells=mine,
            index=part.index,
            count=part.count,
            adapters=adapters,
            device=device,
            replicates=replicates,
            environment=found,
        )
        write(report, manifest)
        write_durations(report, seconds)
    covered = reaches(judged)
    summary.show(out, judged, covered)
    if rungs:
        ladder.show(rungs, judged)
    code = records.exit_code(judged)
    word = {records.EXIT_ACCEPTED: "accepted", records.EXIT_FAILURES: "not accepted"}.get(code, "incomplete")
    records.write(report / "records.jsonl", judged)
    junit.write(report / "junit.xml", judged)
    html.write(report / "report.html", judged, found, axis_values, covered)
    files = "records.jsonl, junit.xml and report.html"
    out.print(f"{word}; {len(judged)} records: {files} in {report}", markup=False, highlight=False)
    raise typer.Exit(code)
