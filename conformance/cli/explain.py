"""`sacts explain`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from sacts.matrices.axes import AXES, MEANINGS
from sacts.matrices.cell import Cell, axis_values

from .common import AsJson, cell_of


def explain(
    cell: Annotated[str, typer.Argument(help="A cell id, as failures and `sacts matrix list` print it.")],
    as_json: AsJson = False,
) -> None:
    """Say what a cell is: its axes, its sizes, what is launched and what each probe proves.

    [bold]sacts explain decode/fp16/kv:600/splits:8[/]
    """
    parsed = cell_of(cell)
    axes, sizes, probes = _axes(parsed), _sizes(parsed), _probes(parsed)
    if as_json:
        print(json.dumps({"cell": parsed.id, "axes": axes, "sizes": sizes, "probes": probes}, indent=1))
        return
    print(parsed.id)
    for axis in axes:
        print(f"  {axis['name']:8} {axis['value']:14} {axis['meaning']}")
    print("sizes")
    for name, number in sizes.items():
        print(f"  {name:28} {number}")
    print("launches, in this order")
    for probe in probes:
        print(f"  {probe}")


def _axes(cell: Cell) -> list[dict[str, str]]:
    values = axis_values(cell.id)
    return [
        {
            "name": axis.name,
            "value": values[axis.name],
            "meaning": MEANINGS.get(axis.name, {}).get(values[axis.name], axis.sentence),
        }
        for axis in AXES
    ]


def _sizes(cell: Cell) -> dict[str, Any]:
    from sacts.reference.forward import edges

    from ..build import build

    problem = build(cell)
    spec = problem.spec
    rows, _, _ = edges(spec, problem.candidates)
    return {
        "query tokens": spec.num_tokens,
        "candidate rows": spec.num_rows,
        "raw entries": len(problem.raw.indices),
        "validated entries": len(problem.candidates.indices),
        "duplicates in the raw lists": problem.candidates.duplicates,
        "edges after all masks": len(rows),
        "pages in the pool": problem.table.num_pages,
        "pages with data": len(problem.pages),
        "slots that must not matter": int((~problem.needed).sum()),
    }


def _probes(cell: Cell) -> list[str]:
    from ..gates.layout import POISONS
    from ..probes.inputs import COUNT, RANDOM

    probes = [f"{probe.name}: {probe.proves}" for probe in (COUNT, RANDOM)]
    probes += [
        f"layout: no output bit changes when {name} stands in every slot that no row attends" for name in POISONS
    ]
    if cell.splits > 1:
        probes.append("merge: only after a failure, again with one split: what passes then is the merge's fault")
    return probes
