"""The command line, and the composition root: the only module that may import every room."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from sacts.matrices import tiers
from sacts.matrices.cell import Cell, parse
from sacts.reports import records

from . import loading

app = typer.Typer(
    name="sacts",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Sparse Attention Conformance Test Suite: is this kernel exactly the function that its interface names?",
    epilog="Exit codes: 0 accepted, 1 failures, 2 usage, 3 incomplete or an error of the suite itself.",
)
matrix = typer.Typer(no_args_is_help=True, help="Look at the matrix: which cells exist, and in which tier.")
app.add_typer(matrix, name="matrix")

out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

DEFAULT_ADAPTERS = ["triton", "sdpa"]
Tier = Annotated[str, typer.Option("--tier", "-t", help="A tier by name, or the path of a .cells file.")]


def usage(message: object) -> NoReturn:
    """Say what was wrong and exit 2."""
    err.print(f"sacts: {message}", style="bold red", markup=False, highlight=False)
    raise typer.Exit(records.EXIT_USAGE)


def _tier_path(tier: str) -> Path:
    try:
        return tiers.path_of(tier)
    except tiers.TierError as error:
        usage(error)


def _cells(path: Path) -> list[Cell]:
    try:
        return tiers.load(path)
    except tiers.TierError as error:
        usage(error)


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        usage(
            f"device {device!r} is not usable here: {str(error).splitlines()[0]}; --device takes cpu, cuda, cuda:1, ..."
        )


def _check_adapters(adapters: list[str]) -> None:
    for adapter in adapters:
        try:
            loading.check(adapter)
        except loading.AdapterError as error:
            usage(error)


def _processes(requested: int | None, device: str) -> int:
    """One per core on the CPU; one on a GPU, where launches share the device."""
    return requested or ((os.cpu_count() or 1) if device == "cpu" else 1)


@contextmanager
def _tier_of(ids: list[str], path: Path) -> Iterator[tuple[Path, str, int]]:
    """A tier file with just these cells (any cell of the matrix), the expression that selects replicates, and their
    number.
    """
    if not ids:
        yield path, "", 1
        return
    chosen, terms, replicates = [], [], 1
    for text in ids:
        name, _, replicate = text.partition("/replicate:")
        try:
            parse(name)
            number = int(replicate or 0)
        except ValueError as error:
            near = get_close_matches(name, [cell.id for cell in _cells(path)], n=1)
            usage(f"{error}" + (f"; nearest cell of {path.stem}: {near[0]}" if near else ""))
        chosen.append(name)
        if replicate:
            terms.append(f"({name} and replicate:{number})")
            replicates = max(replicates, number + 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "selected.cells"
        file.write_text("\n".join(dict.fromkeys(chosen)) + "\n", encoding="utf-8")
        _cells(file)
        yield file, " or ".join(terms), replicates


@app.command()
def run(
    cells: Annotated[
        list[str] | None, typer.Argument(help="Cell ids; default: the whole tier.", show_default=False)
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "-a",
            help="Installed name, module:attribute or path/to/file.py. Repeatable.",
            show_default="triton, sdpa",
        ),
    ] = None,
    tier: Tier = "smoke",
    device: Annotated[
        str, typer.Option("--device", "-d", help="Any torch device; on cpu Triton runs in its interpreter.")
    ] = "cpu",
    expression: Annotated[
        str, typer.Option("-k", help="Only cells whose id matches, as in pytest: 'bf16 and not splits'.")
    ] = "",
    processes: Annotated[
        int | None, typer.Option("-n", min=1, help="Cells judged at a time.", show_default="cores; 1 on a GPU")
    ] = None,
    replicates: Annotated[int, typer.Option(min=1, help="Draw each cell's data this many times.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one launch.")] = 30.0,
    compile_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a spec's first launch, which may compile.")
    ] = 60.0,
    report: Annotated[Path, typer.Option(help="Folder for records.jsonl.")] = Path("sacts-report"),
) -> None:
    """Judge adapters on a tier, or on single cells.

    [bold]sacts run[/]  the bundled kernels on the smoke tier, on this machine

    [bold]sacts run -a my_kernel.py[/]  your adapter: a file with run(case, plan=None) -> Outputs

    [bold]sacts run -a triton -d cuda -k "prefill and bf16"[/]  a part of the tier, on a GPU

    [bold]sacts run -a triton decode/fp16/kv:17/pattern:all[/]  one cell, as failures print it
    """
    from .session import Selection, SelectionError, judge_all
    from .worker import Limits

    adapters = adapter or DEFAULT_ADAPTERS
    _check_adapters(adapters)
    _check_device(device)
    with _tier_of(cells or [], _tier_path(tier)) as (path, chosen, needed):
        _cells(path)
        both = f"({chosen}) and ({expression})" if chosen and expression else chosen or expression
        selection = Selection(
            path,
            adapters,
            device,
            both,
            max(replicates, needed),
            _processes(processes, device),
            Limits(timeout, compile_timeout),
        )
        try:
            judged = judge_all(selection, err)
        except SelectionError as error:
            usage(error)
    from sacts.reports import summary

    summary.show(out, judged)
    target = report / "records.jsonl"
    records.write(target, judged)
    code = records.exit_code(judged)
    word = {records.EXIT_ACCEPTED: "accepted", records.EXIT_FAILURES: "not accepted"}.get(code, "incomplete")
    out.print(f"{word}; {len(judged)} records in {target}", markup=False, highlight=False)
    raise typer.Exit(code)


@matrix.command("list")
def list_cells(
    tier: Tier = "smoke", axes: Annotated[bool, typer.Option("--axes", help="Explain the axes instead.")] = False
) -> None:
    """Print the cell ids of a tier, one a line; or what each axis means.

    [bold]sacts matrix list | grep splits[/]
    """
    if not axes:
        for cell in _cells(_tier_path(tier)):
            print(cell.id)
        return
    from sacts.matrices.axes import AXES, MAPS, PATTERNS, VALUES

    meanings = {"pattern": PATTERNS, "map": MAPS, "values": VALUES}
    for axis in AXES:
        print(f"{axis.name}: {axis.sentence}" + (f" ({', '.join(axis.values)})" if axis.values else ""))
        for value, meaning in meanings.get(axis.name, {}).items():
            print(f"    {value}: {meaning}")


@app.command()
def audit(
    faults: Annotated[
        list[str] | None, typer.Argument(help="Faults by name; default: all.", show_default=False)
    ] = None,
    tier: Tier = "smoke",
    device: Annotated[str, typer.Option("--device", "-d", help="Any torch device.")] = "cpu",
    expression: Annotated[str, typer.Option("-k", help="Only cells whose id matches.")] = "",
    processes: Annotated[
        int | None, typer.Option("-n", min=1, help="Cells judged at a time.", show_default="cores")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Print the catalogue instead.")] = False,
) -> None:
    """Prove that the gates work: run every seeded fault, and see it killed by the right gate with the right place
    named.

    [bold]sacts audit[/]  all faults on the smoke tier

    [bold]sacts audit tail_slot_attended -k block[/]  one fault on some cells

    [bold]sacts run -a sacts.kernels_under_test.faults:tail_slot_attended[/]  see what a user would see
    """
    from sacts.kernels_under_test.faults import catalogue
    from sacts.reports import summary

    from .audit import audit as compare
    from .session import Selection, SelectionError, judge_all
    from .worker import Limits

    known = catalogue()
    for name in faults or []:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            usage(
                f"no seeded fault {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; see sacts audit --list")
            )
    chosen = [known[name] for name in faults or known]
    if list_only:
        for fault in chosen:
            print(f"{fault.name}: {fault.stands_for} [{', '.join(fault.gates)}]")
        return
    _check_device(device)
    path = _tier_path(tier)
    _cells(path)
    names = [fault.adapter for fault in chosen]
    try:
        judged = judge_all(
            Selection(
                path, names, device, expression, processes=_processes(processes, device), limits=Limits(10.0, 60.0)
            ),
            err,
        )
    except SelectionError as error:
        usage(error)
    outcomes = compare(chosen, judged)
    summary.show_audit(out, outcomes)
    broken = any(record.verdict in records.INCOMPLETE for record in judged)
    missed = not all(outcome.caught for outcome in outcomes)
    raise typer.Exit(records.EXIT_INCOMPLETE if broken else records.EXIT_FAILURES if missed else records.EXIT_ACCEPTED)


def main() -> None:
    """Entry point of `sacts`."""
    try:
        app()
    except BrokenPipeError:
        sys.exit(records.EXIT_ACCEPTED)
