"""`sacts fuzz`."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from sacts.matrices.cell import Cell, axis_values
from sacts.matrices.filters import FilterError
from sacts.reports import failures, records
from sacts.reports.records import Record

from .common import Device, Processes, adapter_names, check_adapters, check_device, err, gpus, out, processes_for, usage

if TYPE_CHECKING:
    from ..exploration import Explored

MINUTES = 5.0
LINE = 30.0  # seconds between lines where there is no terminal
REASONS = 6  # refusals that are named at the end
SAVED = 60.0  # seconds between writes of what was not accepted so far
RECORDS, FAILURES = "records.jsonl", "failures.cells"


def fuzz(
    adapter: Annotated[
        str, typer.Option("--adapter", "-a", help="As for sacts run.", autocompletion=adapter_names)
    ] = "triton",
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="How long to go on.", show_default=f"{MINUTES:g}; none where --count is given"),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="How many cells to judge.", show_default="as many as there is time for")
    ] = None,
    where: Annotated[
        str, typer.Option("--where", help="Only cells whose axes match: 'phase=decode and (splits>1 or dtype=bf16)'.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Which cells, in which order.")] = 0,
    cost: Annotated[
        float,
        typer.Option(
            min=1.0, help="Iterations that a launch of a cell may cost; one takes about 4 ms in Triton's interpreter."
        ),
    ] = 80.0,
    device: Device = "cpu",
    processes: Processes = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one launch.")] = 30.0,
    compile_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a spec's first launch, which may compile.")
    ] = 60.0,
    report: Annotated[Path, typer.Option(help=f"Folder for {RECORDS}, report.html, junit.xml and {FAILURES}.")] = Path(
        "sacts-report"
    ),
) -> None:
    """Look for failures where no tier looks: draw cells from the whole feasible space, also with lengths, dimensions,
    pages, windows and tiles between those of the tiers, and judge each in isolation as sacts run does.

    The same seed, filter and adapter give the same cells in the same order; time only decides how many of them are
    judged. Cells that the adapter refuses are counted, and the first of each reason is run. Ctrl-C ends the search and
    writes what was judged. What is not accepted stands in failures.cells by its id: paste it, or run the file.

    [bold]sacts fuzz -a my_kernel.py --minutes 10[/]

    [bold]sacts fuzz -a my_kernel.py --where "phase=decode and splits>1" --seed 7[/]  another corner, other cells

    [bold]sacts run -a my_kernel.py -t sacts-report/failures.cells[/]  the failures again
    """
    from ..environment import environment
    from ..exploration import Explorer
    from ..worker import Limits

    check_adapters([adapter])
    check_device(device)
    cells = _stream(seed, where, cost)
    _check_loads(adapter, device)
    said = f"sacts fuzz --adapter {shlex.quote(adapter)} --device {device} --seed {seed}"
    said += f" --cost {cost:g}" + (f" --where {shlex.quote(where)}" if where else "")
    seconds = 60 * (minutes if minutes is not None else MINUTES if count is None else float("inf"))
    with _stopped_by_the_user() as stop, _Teller(err, report, said, seconds, count) as teller:
        explorer = Explorer(
            adapter,
            device,
            processes_for(processes, device),
            Limits(timeout, compile_timeout),
            gpus() if device == "cuda" else 0,
            seconds,
            count,
            stop,
        )
        found = explorer.explore(cells, teller)
    code = _write(report, found.records, said, environment(device))
    _tell_the_end(found, seed, stop.is_set())
    word = {records.EXIT_ACCEPTED: "accepted", records.EXIT_FAILURES: "not accepted"}.get(code, "incomplete")
    out.print(f"{word}; {len(found.records)} records in {report}", markup=False, highlight=False)
    if found.failed:
        again = f"sacts run --adapter {shlex.quote(adapter)}" + (f" --device {device}" if device != "cpu" else "")
        out.print(f"again: {again} -t {shlex.quote(str(report / FAILURES))}", markup=False, highlight=False)
    raise typer.Exit(code)


def _stream(seed: int, where: str, cost: float) -> Iterator[Cell]:
    """The cells, or a usage error where a filter cannot be read or nothing meets it."""
    from sacts.matrices import strategies

    try:
        cells = strategies.drawn(seed, where, cost)
        return chain([next(cells)], cells)
    except (FilterError, strategies.NothingDrawn) as error:
        usage(error)


def _check_loads(adapter: str, device: str) -> None:
    from ..worker import Worker

    with Worker(adapter, device) as worker:
        if error := worker.describe().error:
            err.print(f"sacts: {error}", style="bold red", markup=False, highlight=False)
            raise typer.Exit(records.EXIT_INCOMPLETE)


@contextmanager
def _stopped_by_the_user() -> Iterator[Event]:
    """An event that the first Ctrl-C sets; the second one ends the process as usual."""
    stop = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Teller:
    """Progress: one line that is kept up to date on a terminal, a line now and then elsewhere; and what was not
    accepted so far on disk, so that a lost process does not lose it.
    """

    console: Console
    report: Path
    made_by: str
    seconds: float
    count: int | None
    began: float = field(default_factory=time.monotonic)
    told: float = 0.0
    saved: float = 0.0
    bad: int = 0

    def __enter__(self) -> _Teller:
        columns = BarColumn(12), TextColumn("{task.description}", markup=False)
        self._progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._progress.start()
        self._task = self._progress.add_task("drawing cells", total=1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, found: Explored) -> None:
        """Say how far it is."""
        passed, failed = time.monotonic() - self.began, found.failed
        parts = [passed / self.seconds, len(found.records) / self.count if self.count else 0.0]
        words = f"{self._left(passed, max(parts))} left: {len(found.records)} judged, {len(failed)} not accepted, "
        words += f"{found.refused.total()} refused, pairs {len(found.pairs)} of {len(found.feasible)}"
        self._progress.update(self._task, description=words, completed=max(parts))
        if not self.console.is_terminal and passed - self.told >= LINE:
            self.told = passed
            self.console.print(words, markup=False, highlight=False)
        if len(failed) > self.bad and (not self.bad or passed - self.saved >= SAVED):
            self.saved, self.bad = passed, len(failed)
            records.write(self.report / RECORDS, found.records)
            failures.write(self.report / FAILURES, found.records, self.made_by)

    def _left(self, passed: float, part: float) -> str:
        left = passed * (1 - part) / part if 0 < part < 1 else 0.0
        return f"{int(left) // 60}:{int(left) % 60:02}"


def _write(report: Path, judged: list[Record], made_by: str, found: dict[str, str]) -> int:
    """All files and the summary; the exit code."""
    from sacts.reports import html, junit, summary

    from ..reach import reaches

    covered = reaches(judged)
    records.write(report / RECORDS, judged)
    failures.write(report / FAILURES, judged, made_by)
    junit.write(report / "junit.xml", judged)
    html.write(report / "report.html", judged, found | {"drawn by": made_by}, axis_values, covered)
    summary.show(out, judged, covered)
    return records.exit_code(judged)


def _tell_the_end(found: Explored, seed: int, interrupted: bool) -> None:
    most = found.refused.most_common(REASONS)
    refused = ", ".join(f"{times} {said}" for said, times in most)
    refused += (
        f", {found.refused.total() - sum(times for _, times in most)} others" if len(found.refused) > REASONS else ""
    )
    words = f"seed {seed}: {found.drawn} cells drawn, {len(found.records)} judged"
    words += f"; refused by declaration, the first of each run: {refused}" if refused else ""
    words += "; ended by the user" if interrupted else "; that is every cell that matches" if found.exhausted else ""
    out.print(words, markup=False, highlight=False)
