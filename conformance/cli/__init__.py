"""The command line, and the composition root: the only place that may import every room."""

from __future__ import annotations

import sys

import typer

from sacts.reports import records

from . import adapter, audit, bench, detect, determinism, doctor, explain, fuzz, locate, matrix, replay, report, run

app = typer.Typer(
    name="sacts",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Sparse Attention Conformance Test Suite: is this kernel exactly the function that its interface names?",
    epilog="Exit codes: 0 accepted, 1 failures, 2 usage, 3 incomplete or an error of the suite itself.",
)
for module in (run, bench, fuzz, audit, detect, determinism, explain, locate, doctor, replay):
    name = module.__name__.rpartition(".")[2]
    app.command(name)(getattr(module, name))
app.add_typer(adapter.app, name="adapter")
app.add_typer(matrix.app, name="matrix")
app.add_typer(report.app, name="report")


def main() -> None:
    """Entry point of `sacts`."""
    try:
        app()
    except BrokenPipeError:
        sys.exit(records.EXIT_ACCEPTED)
