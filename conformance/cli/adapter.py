"""`sacts adapter`."""

from __future__ import annotations

import json
import keyword
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from sacts.reports import records

from .common import AdapterName, AsJson, Device, check_adapters, check_device, out, usage

if TYPE_CHECKING:
    from ..check import Check

app = typer.Typer(no_args_is_help=True, help="Write an adapter for your backend, and check its contract.")
TEMPLATES = Path(__file__).parent.parent / "templates"


@app.command()
def new(name: Annotated[str, typer.Argument(help="A Python name, such as my_kernel.")]) -> None:
    """Write a working skeleton, NAME.py, and its own test, test_NAME.py, into this folder.

    [bold]sacts adapter new my_kernel && sacts adapter check my_kernel.py[/]
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        usage(f"{name!r} is no Python name: letters, digits and _, not a digit first")
    files = {f"{name}.py": "adapter.py.txt", f"test_{name}.py": "test_adapter.py.txt"}
    for file in files:
        if Path(file).exists():
            usage(f"{file} exists already; nothing was written")
    for file, template in files.items():
        Path(file).write_text(
            (TEMPLATES / template).read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8"
        )
    print(f"wrote {' and '.join(files)}")
    print(f"next: sacts adapter check {name}.py, then put your kernel into run(), then sacts run -a {name}.py")


@app.command()
def check(adapter: AdapterName, device: Device = "cpu", as_json: AsJson = False) -> None:
    """Judge three tiny cells, name a wrongly declared convention, and say what each optional member would unlock.

    [bold]sacts adapter check my_kernel.py[/]
    """
    from ..check import check as check_contract
    from ..worker import Worker

    check_adapters([adapter])
    check_device(device)
    with Worker(adapter, device) as worker:
        result = check_contract(worker)
    if as_json:
        print(json.dumps(asdict(result) | {"records": msgspec.to_builtins(result.records)}, indent=1, default=str))
    else:
        _show(adapter, result)
    raise typer.Exit(records.EXIT_ACCEPTED if result.accepted else records.EXIT_FAILURES)


def _show(adapter: str, result: Check) -> None:
    from ..check import UNLOCKS

    if result.error:
        out.print(Text(result.error, "bold red"))
        return
    for record in result.records:
        style = "green" if record.accepted else "bold red"
        out.print(Text(f"{record.verdict:9} {record.cell}", style))
        if not record.accepted:
            out.print(Text(f"          {records.describe(record).splitlines()[0]}"))
    if result.observed:
        field, declared, observed = result.observed
        out.print(Text(f"{field}: declared {declared}, observed {observed}: so declared, all three cells pass", "bold"))
    elif not result.accepted:
        out.print("no other declaration of one convention makes the cells pass: look at the sentences above")
    out.print(Text("declared: " + ", ".join(f"{name} {value}" for name, value in result.conventions.items())))
    for name in result.missing:
        out.print(Text(f"not there: {name}; it would unlock {UNLOCKS[name]}"))
    if result.accepted:
        out.print(Text(f"the contract holds; next: sacts run -a {adapter}", "green"))
