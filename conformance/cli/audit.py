"""`sacts audit`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from sacts.reports import records

from .common import (
    Device,
    Expression,
    Processes,
    Tier,
    cells_of,
    check_device,
    err,
    gpus,
    out,
    processes_for,
    tier_path,
    usage,
)


def audit(
    faults: Annotated[
        list[str] | None, typer.Argument(help="Faults by name; default: all.", show_default=False)
    ] = None,
    tier: Tier = "smoke",
    device: Device = "cpu",
    expression: Expression = "",
    processes: Processes = "",
    list_only: Annotated[bool, typer.Option("--list", help="Print the catalogue instead.")] = False,
) -> None:
    """Prove that the gates work: run every seeded fault, and see it killed by the right gate with the right place
    named. Faults of terms and codecs run on the cells that the catalogue names for them, whatever --tier and -k say.

    [bold]sacts audit[/]  all faults on the smoke tier

    [bold]sacts audit tail_slot_attended -k block[/]  one fault on some cells

    [bold]sacts run -a sacts.kernels_under_test.faults:tail_slot_attended[/]  see what a user would see
    """
    from sacts.kernels_under_test.faults import ModelFault, audited
    from sacts.reports import summary

    from ..audit import audit as compare
    from ..audit import judged as judge
    from ..session import Selection, SelectionError

    known = audited()
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
    check_device(device)
    if device != "cpu":
        elsewhere = [fault.name for fault in chosen if isinstance(fault, ModelFault)]
        if faults and elsewhere:
            usage(f"{', '.join(elsewhere)}: seeded in the modelled kernel, which runs on the cpu only, not on {device}")
        err.print(
            f"{len(elsewhere)} faults of the modelled kernel are left out: it runs on the cpu only", highlight=False
        )
        chosen = [fault for fault in chosen if fault.name not in elsewhere]
    path = tier_path(tier)
    cells_of(path)
    try:
        judged = judge(
            chosen,
            Selection(
                path,
                [],
                device,
                expression,
                processes=processes_for(processes, device),
                gpus=gpus() if device == "cuda" else 0,
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
