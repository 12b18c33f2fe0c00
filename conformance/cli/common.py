"""What the commands share: consoles, options, and usage errors that say what is valid."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from sacts.matrices import filters, models, shards, tiers
from sacts.matrices.cell import Cell, CellError, parse
from sacts.matrices.configs import ModelError
from sacts.reports import records
from sacts.reports.shards import MergeError, read_durations

from .. import loading
from ..worker import Limits

PATIENT = Limits(launch=120.0, first=300.0)  # where the suite works for long between launches
WIDE = 240  # columns where no terminal says otherwise
out = Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, soft_wrap=True)


def adapter_names(incomplete: str) -> list[str]:
    """Completion of installed adapters."""
    return [name for name in loading.names() if name.startswith(incomplete)]


def _cell_ids(incomplete: str) -> list[str]:
    return [cell.id for name in tiers.names() for cell in tiers.load(tiers.path_of(name)) if incomplete in cell.id]


Tier = Annotated[
    str,
    typer.Option("--tier", "-t", help="A tier by name, or the path of a .cells file.", autocompletion=tiers.names),
]
Device = Annotated[str, typer.Option("--device", "-d", help="Any torch device; on cpu Triton runs in its interpreter.")]
Expression = Annotated[
    str, typer.Option("-k", help="Only cells whose id matches, as in pytest: 'bf16 and not splits'.")
]
Processes = Annotated[
    str,
    typer.Option(
        "-n",
        metavar="N|auto",
        help="Cells judged at a time; auto: one on each core, or each GPU; on cuda they spread over all GPUs.",
        show_default="cores; 1 on a GPU",
    ),
]
AdapterName = Annotated[
    str,
    typer.Argument(
        help="Installed name, module:attribute or path/to/file.py[:attribute].", autocompletion=adapter_names
    ),
]
CellIds = Annotated[
    list[str] | None,
    typer.Argument(help="Cell ids; default: the whole tier.", show_default=False, autocompletion=_cell_ids),
]
Where = Annotated[
    str, typer.Option("--where", help="Only cells whose axes match: 'phase=decode and (splits>1 or dtype=bf16)'.")
]
ModelOf = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="CONFIG",
        help="config.json of a model: only the cells that it triggers; why, says sacts matrix model.",
        show_default=False,
    ),
]
ShardOf = Annotated[
    str, typer.Option("--shard", metavar="I/N", help="Part I of N of the tier; join with sacts report merge.")
]
DurationsOf = Annotated[
    Path | None,
    typer.Option(help="durations.json of an earlier run, to balance shards: one file for all.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def usage(message: object) -> NoReturn:
    """Say what was wrong and exit 2."""
    err.print(f"sacts: {message}", style="bold red", markup=False, highlight=False)
    raise typer.Exit(records.EXIT_USAGE)


def where_of(cells: list[Cell], text: str) -> list[Cell]:
    """The cells that a filter lets through, or a usage error."""
    try:
        keep = filters.parse(text)
    except filters.FilterError as error:
        usage(error)
    return [cell for cell in cells if keep(cell)]


def read_model(path: Path) -> models.Model:
    """The model of a config, or a usage error that names the field."""
    try:
        return models.load(path)
    except ModelError as error:
        usage(error)


def model_cells(cells: list[Cell], path: Path | None) -> list[Cell]:
    """The cells that a model triggers, all where none is named; what has no cell is said. A usage error where none is
    left.
    """
    if path is None:
        return cells
    model = read_model(path)
    for refusal in model.refusals:
        err.print(f"{path.name} refused: {refusal.message}", style="yellow", markup=False, highlight=False)
    found = models.subset(model, cells)
    if not found.cells:
        usage(f"{path} triggers no cell of this tier; see sacts matrix model {path}")
    return list(found.cells)


def shard_of(text: str) -> shards.Shard:
    """A shard, or a usage error."""
    try:
        return shards.parse(text)
    except shards.ShardError as error:
        usage(error)


def durations_of(path: Path | None) -> dict[str, float]:
    """Recorded seconds by cell id, none where no file is given, or a usage error."""
    try:
        return read_durations(path) if path else {}
    except MergeError as error:
        usage(error)


def tier_path(tier: str) -> Path:
    """The file of a tier, or a usage error."""
    try:
        return tiers.path_of(tier)
    except tiers.TierError as error:
        usage(error)


def cell_of(text: str, path: Path | None = None) -> Cell:
    """The cell of an id, or a usage error with the nearest id of a tier."""
    try:
        return parse(text)
    except CellError as error:
        path = path or tier_path("smoke")
        near = get_close_matches(text, [cell.id for cell in cells_of(path)], n=1)
        usage(f"{error}" + (f"; nearest cell of {path.stem}: {near[0]}" if near else ""))


def cells_of(path: Path) -> list[Cell]:
    """The cells of a tier file, or a usage error that names its line."""
    try:
        return tiers.load(path)
    except tiers.TierError as error:
        usage(error)


def check_device(device: str) -> None:
    """A usage error for a device that torch cannot use here."""
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        usage(
            f"device {device!r} is not usable here: {str(error).splitlines()[0]}; --device takes cpu, cuda, cuda:1, ..."
        )


def check_adapters(adapters: list[str]) -> None:
    """A usage error for a name that can name no adapter."""
    for adapter in adapters:
        try:
            loading.check(adapter)
        except loading.AdapterError as error:
            usage(error)


def processes_for(requested: str, device: str) -> int:
    """One per core on the CPU; one on a GPU, where launches share the device, unless `auto` asks for one on each."""
    if requested not in ("", "auto"):
        if not requested.isdecimal() or not int(requested):
            usage(f"-n takes a number from 1 or auto, got {requested!r}")
        return int(requested)
    if device == "cpu":
        return os.cpu_count() or 1
    return gpus() if requested and device == "cuda" else 1


def gpus() -> int:
    """GPUs that torch sees."""
    import torch

    return max(1, torch.cuda.device_count())
