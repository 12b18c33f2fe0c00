"""`sacts determinism`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.progress import track
from rich.table import Table

from sacts.matrices.cell import CellError, parse
from sacts.reports import records

from ..messages import Measurement
from ..worker import Worker
from .common import PATIENT, AsJson, Device, adapter_names, check_device, err, out, usage

DEFAULT_CELLS = ("decode/bf16/kv:700+9+33/heads:8-2/splits:4", "prefill/fp16/kv:70+20/q:5+3/causal:bottom_right")
PROCESSES = 3


def determinism(
    cells: Annotated[list[str] | None, typer.Argument(help="Cell ids; default: two.", show_default=False)] = None,
    adapter: Annotated[
        str, typer.Option("--adapter", "-a", help="As for sacts run.", autocompletion=adapter_names)
    ] = "triton",
    device: Device = "cpu",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Launches of each repetition.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how far results vary: from run to run (under load on a GPU), between processes, with splits and tiles,
    with the rest of the batch, and with the place of pages; and whether the same call said otherwise (shifted logits,
    padding elsewhere, masked or repeated entries, a plan that outlives another spec) gives the same result. A broken
    promise or a result out of its bound exits 1.

    A backend promises levels by output in `capabilities.determinism`; without a promise the range must lie within the
    bound.

    [bold]sacts determinism -a my_kernel.py -d cuda --repeats 30[/]
    """
    from ..determinism import across_processes

    check_device(device)
    found: list[tuple[str, Measurement]] = []
    for cell in track(list(cells or DEFAULT_CELLS), "measuring", console=err):
        try:
            parse(cell)
        except CellError as error:
            usage(error)
        with Worker(adapter, device, PATIENT) as worker:
            measured = worker.measure(cell, repeats=repeats)
        processes = []
        for _ in range(PROCESSES):
            with Worker(adapter, device, PATIENT, fresh=True) as worker:
                processes.append(worker.measure(cell))
        for part in (measured, *processes):
            if part.error:
                err.print(f"sacts: {adapter}, {cell}: {part.error}", style="bold red", markup=False)
                raise typer.Exit(records.EXIT_INCOMPLETE)
        others = across_processes(processes[0].promises, [each.digests for each in processes])
        found += [(cell, each) for each in (*measured.measurements, *others)]
    if as_json:
        rows = [{"cell": cell, "kept": each.kept, **msgspec.structs.asdict(each)} for cell, each in found]
        print(msgspec.json.encode(rows).decode())
    else:
        _show(found)
    raise typer.Exit(records.EXIT_ACCEPTED if all(each.kept for _, each in found) else records.EXIT_FAILURES)


def _show(found: list[tuple[str, Measurement]]) -> None:
    table = Table("level", "output", "launches", "distinct", "range / bound", "promised", "", box=None)
    last = None
    for cell, each in found:
        if cell != last:
            table.add_row(f"[bold]{cell}[/]")
            last = cell
        said = (
            "" if each.kept else ("BROKEN: " if each.promised else "OUT OF BOUND: ") + f"{each.place}: {each.variant}"
        )
        use = "-" if each.level == "process-to-process" else f"{each.range_use:.2g}"
        table.add_row(
            each.level, each.output, str(each.launches), str(each.distinct), use, "yes" if each.promised else "", said
        )
    out.print(table)
