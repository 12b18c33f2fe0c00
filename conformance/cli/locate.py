"""`sacts locate`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.text import Text

from sacts.reports import records
from sacts.reports.records import Gate

from .common import PATIENT, AsJson, Device, adapter_names, cell_of, check_adapters, check_device, out, usage


def locate(
    cell: Annotated[str, typer.Argument(help="A cell id, as failures print it; /replicate:N may follow.")],
    adapter: Annotated[
        str,
        typer.Option(
            "--adapter",
            "-a",
            help="Installed name, module:attribute or path/to/file.py.",
            autocompletion=adapter_names,
        ),
    ],
    device: Device = "cpu",
    budget: Annotated[int, typer.Option(min=0, help="Extra launches that the search may use.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Say where a backend is wrong in one cell: row, token, page, tile, split, head, channel or request; where nothing
    is, which gradient is, and the edge that made it so.

    [bold]sacts locate decode/fp16/kv:90+50/pattern:duplicates -a my_kernel.py[/]
    """
    from ..worker import Worker

    name, _, replicate = cell.partition("/replicate:")
    if not (replicate or "0").isdecimal():
        usage(f"replicate:{replicate} in {cell!r} is no number")
    parsed = cell_of(name)
    check_adapters([adapter])
    check_device(device)
    with Worker(adapter, device, PATIENT) as worker:
        answer = worker.locate(parsed.id, int(replicate or 0), budget)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
    elif answer.error:
        out.print(Text(answer.error, "bold red"))
    elif answer.finding is None:
        fine = "the count and the random family lie within their bounds, drawn rows too, and poison changes no bit"
        out.print(Text(f"nothing is wrong: {fine}; gradients: {answer.gradients}", "green"))
    else:
        out.print(Text(f"[{answer.finding.gate}] {answer.finding.sentence}"))
        told = f"{answer.launches} launches beyond the two that showed the failure"
        out.print("from its lists, without a launch" if answer.finding.gate is Gate.INDEX else told, highlight=False)
    if answer.error:
        raise typer.Exit(records.EXIT_INCOMPLETE)
    raise typer.Exit(records.EXIT_FAILURES if answer.finding else records.EXIT_ACCEPTED)
