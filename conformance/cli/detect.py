"""`sacts detect`."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.progress import track

from sacts.matrices.cell import CellError, parse

from .common import err, usage

DEFAULT_CELL = "decode/bf16/kv:4089+4089+4089+4089/heads:4-1/dim:128/pattern:all/splits:4"


def detect(
    faults: Annotated[
        list[str] | None, typer.Argument(help="Faults by name; default: all, and none.", show_default=False)
    ] = None,
    cell: Annotated[str, typer.Option("--cell", help="The cell that the faults strike.")] = DEFAULT_CELL,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Launches of each fault and input family.")] = 2,
    list_only: Annotated[bool, typer.Option("--list", help="Print the faults instead.")] = False,
) -> None:
    """Compare today's acceptance rules with the suite's gates: in which share of launches does each reject a fault that
    strikes one request?

    The faults strike a modelled kernel on the CPU, on Gaussian and on flat inputs (two numbers in %); the last column
    names the witness probe that sees it best. A Markdown table goes to the output.

    [bold]sacts detect --trials 30[/]  the table of docs/detection.md

    [bold]sacts detect "drop one" --cell decode/bf16/kv:505/dim:128/pattern:all[/]  one row of it
    """
    from sacts.kernels_under_test.faults.detection import AXES, OneFault, names

    from ..detection import FaultyAdapter, table
    from ..detection import trials as run

    known = ("", *names())
    for name in faults or []:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            usage(f"no fault {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; see sacts detect --list"))
    if list_only:
        print("\n".join(names()))
        return
    try:
        where = parse(cell)
    except CellError as error:
        usage(error)
    adapter = FaultyAdapter(OneFault, lambda made: made.capabilities.numerics_of(made.dtype))
    chosen = faults or known
    cells = {fault: replace(where, **AXES.get(fault, {})) for fault in chosen}  # type: ignore[arg-type]  # axes by name
    found = track(run(cells, trials, adapter), "detecting", 3 * trials * len(chosen), console=err)
    print(table(found))
