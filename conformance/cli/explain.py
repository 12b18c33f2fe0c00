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
    print("probes, all in one launch, which is made twice")
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
        "query tokens": spec.num_tokens // problem.branches,
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
    from sacts.reference.numerics import Numerics
    from sacts.reports.records import PROVES

    from ..build import build
    from ..gates.layout import KINDS
    from ..probes import gradients
    from ..probes.copies import copies

    problem = build(cell)
    made = copies(problem, Numerics.default(problem.spec.dtype))
    carried = {probe for copy in made for probe in copy.judged if len(copy.margin[probe])} | {"random", "count"}
    carried |= gradients.carried(problem) if problem.branches == 1 else set()
    probes = [f"{name}: {proves}" for name, proves in PROVES.items() if name in carried]
    probes += [f"{name}: not applicable here" for name in PROVES if name not in carried]
    kinds = ", ".join(KINDS[:-1])
    probes.append(
        f"layout: no output bit differs between the launches: each slot that no row attends holds {kinds} in one, "
        f"{KINDS[-1]} in the other"
    )
    if problem.branches > 1:
        probes.append(
            f"branches: all probes in {problem.branches} launches, each with the gates of one branch 1 and all others 0"
        )
        probes.append("merge: one launch more, with drawn gates: out is their sum of what the branches yield")
    if cell.splits > 1:
        probes.append("merge: only after a failure, again with one split: what passes then is the merge's fault")
    return probes
