"""`sacts matrix`."""

from __future__ import annotations

import json

import typer

from sacts.matrices.axes import AXES, MEANINGS

from .common import AsJson, Tier, cells_of, tier_path

app = typer.Typer(no_args_is_help=True, help="Look at the matrix: which cells exist, and in which tier.")


@app.command("list")
def list_cells(tier: Tier = "smoke", as_json: AsJson = False) -> None:
    """Print the cell ids of a tier, one a line.

    [bold]sacts matrix list | grep splits[/]
    """
    ids = [cell.id for cell in cells_of(tier_path(tier))]
    print(json.dumps(ids, indent=1) if as_json else "\n".join(ids))


@app.command("axes")
def list_axes() -> None:
    """Print every axis, its values, and what each means."""
    for axis in AXES:
        print(f"{axis.name}: {axis.sentence}" + (f" ({', '.join(axis.values)})" if axis.values else ""))
        for value, meaning in MEANINGS.get(axis.name, {}).items():
            print(f"    {value}: {meaning}")
