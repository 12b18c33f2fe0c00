"""`sacts doctor`."""

from __future__ import annotations

import json

import typer
from rich.text import Text

from sacts.reports import records

from .common import AsJson, out


def doctor(as_json: AsJson = False) -> None:
    """Look at versions, devices and the traps of Triton's interpreter, and say what to do.

    [bold]sacts doctor[/]
    """
    from ..examination import examine

    findings = examine()
    if as_json:
        print(
            json.dumps(
                [{"what": f.what, "seen": f.seen, "fine": f.fine, "advice": f.advice} for f in findings], indent=1
            )
        )
    else:
        for finding in findings:
            mark, style = ("ok ", "green") if finding.fine else ("!! ", "bold yellow")
            out.print(Text(f"{mark} {finding.what}: {finding.seen}", style))
            if finding.advice:
                out.print(Text(f"     {finding.advice}"))
    raise typer.Exit(records.EXIT_ACCEPTED if all(f.fine for f in findings) else records.EXIT_FAILURES)
