"""`sacts matrix`."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sacts.matrices import models, must_pass, shards, tiers
from sacts.matrices.axes import AXES, MEANINGS
from sacts.matrices.cell import value_text
from sacts.reports import records

from ..worker import Worker
from .common import (
    AsJson,
    DurationsOf,
    ModelOf,
    Tier,
    Where,
    adapter_names,
    cell_of,
    cells_of,
    check_adapters,
    durations_of,
    err,
    model_cells,
    out,
    read_model,
    tier_path,
    where_of,
)

app = typer.Typer(no_args_is_help=True, help="Look at the matrix: which cells exist, and in which tier.")


@app.command("list")
def list_cells(tier: Tier = "smoke", where: Where = "", model: ModelOf = None, as_json: AsJson = False) -> None:
    """Print the cell ids of a tier, one a line: what a .cells file holds.

    [bold]sacts matrix list --where "phase=decode and splits>1" > mine.cells[/]
    """
    ids = [cell.id for cell in where_of(model_cells(cells_of(tier_path(tier)), model), where)]
    print(json.dumps(ids, indent=1) if as_json else "\n".join(ids))


@app.command()
def show(cell: Annotated[str, typer.Argument(help="A cell id.")], as_json: AsJson = False) -> None:
    """Print what a cell is: the value of each axis, and what it means.

    [bold]sacts matrix show decode/fp16/kv:90+50/pattern:duplicates[/]
    """
    found = cell_of(cell)
    values = {axis.name: value_text(found, axis.name) for axis in AXES}
    if as_json:
        print(json.dumps(values, indent=1))
        return
    for axis in AXES:
        value = values[axis.name]
        default = " (default)" if getattr(found, axis.name) == axis.default else ""
        print(f"{axis.name} {value or '-'}{default}: {MEANINGS.get(axis.name, {}).get(value, axis.sentence)}")


@app.command()
def count(tier: Tier = "smoke", where: Where = "", model: ModelOf = None) -> None:
    """Print how many cells a tier has, by value of each axis that varies.

    [bold]sacts matrix count --where dtype=bf16[/]
    """
    cells = where_of(model_cells(cells_of(tier_path(tier)), model), where)
    print(f"{len(cells)} cells")
    cost = [shards.predicted(cell) for cell in cells]
    print(f"predicted: {sum(cost):.0f} iterations a launch of each cell, the dearest {max(cost):.0f}")
    for axis in AXES:
        times = Counter(value_text(cell, axis.name) for cell in cells)
        if len(times) > 1:
            print(f"{axis.name}: " + ", ".join(f"{value or '-'} {n}" for value, n in times.most_common()))


@app.command()
def diff(
    old: Annotated[str, typer.Argument(help="A tier by name, or a .cells file.")],
    new: Annotated[str, typer.Argument(help="Another.")],
) -> None:
    """Print the cells that only one of two tiers has, - of the old and + of the new. Exits 1 where they differ.

    [bold]sacts matrix diff old.cells smoke[/]
    """
    before, after = ([cell.id for cell in cells_of(tier_path(tier))] for tier in (old, new))
    lines = [f"- {cell}" for cell in before if cell not in set(after)]
    lines += [f"+ {cell}" for cell in after if cell not in set(before)]
    print("\n".join(lines) if lines else "the same cells")
    raise typer.Exit(records.EXIT_FAILURES if lines else records.EXIT_ACCEPTED)


@app.command()
def status(
    adapter: Annotated[
        str, typer.Option("--adapter", "-a", help="Whose status.", autocompletion=adapter_names)
    ] = "triton",
    tier: Tier = "smoke",
    where: Where = "",
    model: ModelOf = None,
    as_json: AsJson = False,
) -> None:
    """Print what an adapter declares for each cell of a tier: native, fallback(reason) or refused(reason). Nothing is
    run; sacts run holds it to that.

    [bold]sacts matrix status -a my_kernel.py -t terms[/]
    """
    check_adapters([adapter])
    cells = [cell.id for cell in where_of(model_cells(cells_of(tier_path(tier)), model), where)]
    with Worker(adapter) as worker:
        stated = worker.statuses(cells)
    if stated.error:
        err.print(stated.error, style="bold red", markup=False, highlight=False)
        raise typer.Exit(records.EXIT_INCOMPLETE)
    if as_json:
        print(json.dumps(stated.statuses, indent=1))
        return
    for said, times in Counter(stated.statuses.values()).most_common():
        print(f"{times} {said}")
    print("\n".join(f"{said:30} {cell}" for cell, said in stated.statuses.items()))


@app.command()
def coverage(
    tier: Tier = "smoke",
    strength: Annotated[int, typer.Option(min=1, max=3, help="Axes of a combination.")] = 2,
    missing: Annotated[int, typer.Option(min=0, help="How many uncovered combinations to print.")] = 10,
) -> None:
    """Count, exactly, which combinations of levels of so many axes some cell can have, and which of them a tier has.
    Cells with a value that is no level (an empty pattern, a request without keys) cover nothing.

    [bold]sacts matrix coverage -t smoke[/]
    """
    from sacts.matrices.coverage import coverage as counted

    found = counted(cells_of(tier_path(tier)), strength)
    share = 100 * len(found.covered) / len(found.feasible)
    print(f"{len(found.covered)} of {len(found.feasible)} feasible combinations of {strength} levels, {share:.1f} %")
    for each in found.missing[:missing]:
        print("missing: " + " ".join(f"{axis}={level}" for axis, level in each))


@app.command()
def generate(
    tier: Annotated[str, typer.Argument(help="pr: all feasible pairs; nightly: all feasible triples.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where to write; left out: the tier that ships.")] = None,
) -> None:
    """Make a tier anew, must-pass cells first, and count it by the exact checker. Exits 1, and writes nothing, where a
    feasible combination is missing.

    [bold]sacts matrix generate pr --out pr.cells[/]
    """
    from sacts.matrices import generate as made
    from sacts.matrices.coverage import coverage as counted

    if tier not in made.RECIPES:
        raise typer.BadParameter(f"no tier {tier!r} is generated; valid: {', '.join(made.RECIPES)}")
    recipe, must, began = made.RECIPES[tier], made.must_pass(), time.monotonic()
    cells = made.generated(recipe, must)
    seconds = time.monotonic() - began
    found = counted(cells, recipe.strength)
    said = f"{len(found.covered)} of {len(found.feasible)} feasible combinations of {recipe.strength} levels"
    text = made.file_text(tier, cells, must, said)
    print("\n".join(line for line in text.splitlines() if line.startswith("#")))
    print(f"{seconds:.1f} seconds")
    if found.missing:
        err.print(f"missing, among others: {found.missing[0]}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(records.EXIT_FAILURES)
    path = out or tiers.TIERS / f"{tier}.cells"
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


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
    model: ModelOf = None,
    durations: DurationsOf = None,
) -> None:
    """Print the jobs of a sharded run, each for sacts run --shard: a GitHub matrix, a GitLab parallel matrix, or the
    cells of every shard with what they are expected to cost.

    [bold]sacts matrix export --shards 4 --format github[/]
    """
    cells, seconds = model_cells(cells_of(tier_path(tier)), model), durations_of(durations)
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


@app.command("model")
def explain_model(
    config: Annotated[Path, typer.Argument(help="config.json of a model, as Hugging Face writes it.")],
    tier: Tier = "smoke",
) -> None:
    """Print what the fields of a config decide about each axis, and the cells of a tier that the model triggers.

    [bold]sacts matrix model config.json -t terms[/]
    """
    found, whole = read_model(config), cells_of(tier_path(tier))
    table = Table("axis", "cells that it triggers", "others", "decided by", title=found.name)
    for each in found.decisions:
        others = f"become {each.axis}:{each.brings}" if each.brings else "left out" if each.where else ""
        table.add_row(each.axis, each.where or "all", others, Text(each.because))
    out.print(table)
    print("undecided, the serving engine's: " + ", ".join(found.undecided))
    for refusal in found.refusals:
        print(f"refused: {refusal.message}")
    part = models.subset(found, whole)
    for because, times in part.left_out.items():
        print(f"left out {times}: {because}")
    print(
        f"{len(part.cells)} cells from {len(whole)} of {tier}" + (f", {part.twice} became alike" if part.twice else "")
    )
    print("\n".join(cell.id for cell in part.cells))


@app.command("must-pass")
def list_must_pass(
    cells: Annotated[bool, typer.Option("--cells", help="Print the tier file of its cells.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what the source article asks to be tested: each demand with its section, and the cells or the tests of the
    suite that meet it, or what it waits for. What waits is open, and counts as nothing.

    [bold]sacts run -t must-pass -a my_kernel.py[/]  the cells
    """
    demands = must_pass.load()
    if cells:
        print(must_pass.tier_text(demands), end="")
        return
    if as_json:
        listed = [asdict(each) | {"cells": [cell.id for cell in each.cells]} for each in demands]
        print(json.dumps(listed, indent=1))
        return
    table = Table("clause", "demand", "met by", title="must-pass", show_lines=True)
    for each in demands:
        met = "\n".join((*(cell.id for cell in each.cells), *each.tests)) or f"open: waits for {each.waits_for}"
        table.add_row(each.clause, Text(each.demand), Text(met))
    out.print(table)
    met_by = {name: sum(bool(getattr(each, name)) for each in demands) for name in must_pass.MEANS}
    number = len({cell for each in demands for cell in each.cells})
    print(
        f"{len(demands)} demands: {met_by['cells']} met by {number} cells, {met_by['tests']} by tests of the suite, "
        f"{met_by['waits_for']} open"
    )


@app.command("axes")
def list_axes() -> None:
    """Print every axis, its values, and what each means."""
    for axis in AXES:
        print(f"{axis.name}: {axis.sentence}" + (f" ({', '.join(axis.values)})" if axis.values else ""))
        for value, meaning in MEANINGS.get(axis.name, {}).items():
            print(f"    {value}: {meaning}")
