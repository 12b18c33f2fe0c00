"""`sacts matrix`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from sacts.matrices import shards
from sacts.matrices.axes import AXES, MEANINGS

from .common import AsJson, DurationsOf, Tier, cells_of, durations_of, tier_path

app = typer.Typer(no_args_is_help=True, help="Look at the matrix: which cells exist, and in which tier.")


@app.command("list")
def list_cells(tier: Tier = "smoke", as_json: AsJson = False) -> None:
    """Print the cell ids of a tier, one a line.

    [bold]sacts matrix list | grep splits[/]
    """
    ids = [cell.id for cell in cells_of(tier_path(tier))]
    print(json.dumps(ids, indent=1) if as_json else "\n".join(ids))


class Form(StrEnum):
    """Of an export."""

    GITHUB = "github"
    GITLAB = "gitlab"
    JSON = "json"


@app.command()
def export(
    tier: Tier = "smoke",
    count: Annotated[int, typer.Option("--shards", min=1, help="Parts to cut the tier into.")] = 4,
    form: Annotated[Form, typer.Option("--format", help="For which system.")] = Form.JSON,
    durations: DurationsOf = None,
) -> None:
    """Print the jobs of a sharded run, each for sacts run --shard: a GitHub matrix, a GitLab parallel matrix, or the
    cells of every shard with what they are expected to cost.

    [bold]sacts matrix export --shards 4 --format github[/]
    """
    cells, seconds = cells_of(tier_path(tier)), durations_of(durations)
    parts = [part for part in shards.parts(cells, count, seconds) if part]
    names = [str(shards.Shard(n, len(parts))) for n in range(1, len(parts) + 1)]
    if form is Form.GITHUB:
        print(json.dumps({"shard": names}))
    elif form is Form.GITLAB:
        print("parallel:\n  matrix:\n    - SHARD: " + json.dumps(names))
    else:
        unit, cost = "seconds" if seconds else "iterations", dict(zip(cells, shards.costs(cells, seconds), strict=True))
        found = [
            {"shard": name, unit: round(sum(cost[cell] for cell in part), 1), "cells": [cell.id for cell in part]}
            for name, part in zip(names, parts, strict=True)
        ]
        print(json.dumps(found, indent=1))


@app.command("axes")
def list_axes() -> None:
    """Print every axis, its values, and what each means."""
    for axis in AXES:
        print(f"{axis.name}: {axis.sentence}" + (f" ({', '.join(axis.values)})" if axis.values else ""))
        for value, meaning in MEANINGS.get(axis.name, {}).items():
            print(f"    {value}: {meaning}")
