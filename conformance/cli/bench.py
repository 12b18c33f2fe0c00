"""`sacts bench`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sacts.reports import records

from .common import Device, adapter_names, check_adapters, check_device, err, out, usage

if TYPE_CHECKING:
    from ..bench.floors import Held
    from ..bench.records import Row

OURS = "triton"


def _scenario_names(incomplete: str) -> list[str]:
    from ..bench.scenarios import SCENARIOS

    return [name for name in SCENARIOS if name.startswith(incomplete)]


def bench(
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "-a",
            help="Installed name, module:attribute or path/to/file.py. Repeatable.",
            show_default=OURS,
            autocompletion=adapter_names,
        ),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also every peer that loads here, for comparison.")] = False,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help="Also this peer. Repeatable.", show_default=False)
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            "-s",
            help="Only this scenario; a trailing * takes all that begin so. Repeatable.",
            show_default="all",
            autocompletion=_scenario_names,
        ),
    ] = None,
    device: Device = "cuda",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The same shapes in small: whether all runs and is right, not how fast.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Of events, and of warm-ups, of a run that takes more than 1 ms.")
    ] = 2.0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for one scenario with one adapter, compilation included.")
    ] = 300.0,
    hint: Annotated[
        list[str] | None,
        typer.Option("--hint", metavar="NAME=VALUE", help="Hint in place of the scenario's. Repeatable."),
    ] = None,
    floors: Annotated[bool, typer.Option("--floors", help="Exit 1 where the bundled kernel misses a floor.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print scenarios, floors and peers, and time nothing.")] = False,
    report: Annotated[Path, typer.Option(help="Folder for bench.jsonl and bench.md.")] = Path("sacts-bench"),
) -> None:
    """Time adapters on equal inputs, beside ceilings of the same process, and judge what the timed runs wrote.

    Each adapter runs in a process of its own. Inputs are L2-cold: rotations of q, lists and pages. A rate counts the
    bytes or FLOPs that the lists need, never what the kernel moved, so a rate above the ceiling is a failure.

    [bold]sacts bench --peers --floors[/]  all scenarios, our kernels and every peer that loads, on a GPU

    [bold]sacts bench -a my_kernel.py -s 'decode-*'[/]  your kernel in the decode scenarios

    [bold]sacts bench -s decode-one --hint num_splits=8[/]  the same inputs under another hint

    [bold]sacts bench --tiny -d cpu -s decode-pages[/]  whether it runs, without a GPU
    """
    from sacts.kernels_under_test.peers import PEERS

    from ..bench import floors as acceptance
    from ..bench import records as rows_of

    if list_:
        _list(PEERS)
        raise typer.Exit(records.EXIT_ACCEPTED)
    unknown = [name for name in peer or [] if name not in PEERS]
    if unknown:
        usage(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    names = _scenarios(scenario or [])
    adapters = adapter or [OURS]
    hints = _hints(hint or [])
    check_adapters(adapters)
    check_device(device)
    if device == "cpu" and not tiny:
        usage("on cpu only --tiny sizes can be timed: full ones need tens of GiB of GPU memory")
    guests = {PEERS[name]: name for name in (PEERS if peers else peer or [])}
    rows: list[Row] = []
    for row in _rows(adapters, guests, names, device, tiny, seconds, timeout, hints):
        rows.append(row)
        held = acceptance.held(rows, OURS)
        rows_of.write(report, rows, _above(device, rows, held))  # again after each row: a long run may be ended
        if not err.is_terminal:
            err.print(" ".join(filter(None, rows_of.cells(row))), markup=False, highlight=False)
    _show(rows, held)
    out.print(f"{len(rows)} rows: bench.jsonl and bench.md in {report}", markup=False, highlight=False)
    raise typer.Exit(_exit_code(rows, held if floors else [], guests.values()))


def _scenarios(wanted: Sequence[str]) -> list[str]:
    """The scenarios that are named, or a usage error."""
    from ..bench.scenarios import SCENARIOS, named

    found: list[str] = []
    for name in wanted:
        many = [each for each in SCENARIOS if each.startswith(name[:-1])] if name.endswith("*") else []
        try:
            found += many or [named(name).name]
        except ValueError as error:
            usage(error)
    return list(dict.fromkeys(found)) or list(SCENARIOS)


def _hints(texts: Sequence[str]) -> dict[str, int | str]:
    """Hints by name, or a usage error."""
    from ..bench.child import hinted
    from ..bench.scenarios import SCENARIOS

    hints: dict[str, int | str] = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found:
            usage(f"--hint takes NAME=VALUE, got {text!r}")
        hints[name] = int(value) if value.isdecimal() else value
    try:
        hinted(next(iter(SCENARIOS.values())), hints)
    except (ValueError, TypeError) as error:
        usage(f"--hint: {error}")
    return hints


def _rows(
    adapters: Sequence[str],
    guests: dict[str, str],
    names: Sequence[str],
    device: str,
    tiny: bool,
    seconds: float,
    timeout: float,
    hints: dict[str, int | str],
) -> Iterator[Row]:
    """One row of each adapter and scenario, in the order of the adapters; a peer that does not load has one row."""
    import msgspec
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..bench.child import Order
    from ..bench.process import Process

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("time left"))
    whole = [*adapters, *guests]
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("timing", total=len(whole) * len(names))
        for adapter in whole:
            with Process(adapter, device, timeout) as process:
                for number, name in enumerate(names):
                    bar.update(task, description=f"{guests.get(adapter, adapter)} {name}")
                    row = process.row(Order(name, tiny, seconds, hints))
                    yield msgspec.structs.replace(row, adapter=guests.get(adapter, adapter))
                    bar.advance(task)
                    if row.verdict is records.Verdict.NOT_RUN:
                        bar.advance(task, len(names) - number - 1)
                        break


def _exit_code(rows: Sequence[Row], held: Sequence[Held], guests: Iterable[str]) -> int:
    """1 where a row failed or a floor was missed, 3 where one that was asked for could not be measured. A peer that
    does not load, or raises, is no failure of ours; one whose output is wrong is.
    """
    others = set(guests)
    verdicts = [row.verdict for row in rows if row.adapter not in others]
    wrong = any(row.verdict is records.Verdict.FAIL for row in rows)
    if wrong or set(verdicts) - records.ACCEPTED - records.INCOMPLETE or any(each.missed for each in held):
        return records.EXIT_FAILURES
    if set(verdicts) & records.INCOMPLETE or not rows or any(each.ratio is None for each in held):
        return records.EXIT_INCOMPLETE
    return records.EXIT_ACCEPTED


def _show(rows: Sequence[Row], held: Sequence[Held]) -> None:
    from rich.table import Table

    from ..bench.records import HEADERS, cells

    table = Table(*HEADERS, "floor", box=None, pad_edge=False)
    for row in rows:
        mine = [each for each in held if each.floor.scenario == row.scenario] if row.adapter == OURS else []
        style = "" if row.accepted else "bold red"
        table.add_row(*cells(row), "\n".join(each.words for each in mine), style=style)
    out.print(table)


def _above(device: str, rows: Sequence[Row], held: Sequence[Held]) -> Iterator[str]:
    """What stands above the table: versions, ceilings, floors."""
    from ..bench.records import rate_words
    from ..bench.scenarios import Bound
    from ..environment import environment

    yield f"# Bench of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"
    yield "; ".join(f"{name} {value}" for name, value in environment(device).items())
    yield ""
    for adapter in dict.fromkeys(row.adapter for row in rows):
        top = next((row.ceilings for row in rows if row.adapter == adapter and row.ceilings), None)
        if top is not None:
            copy, read = (rate_words(rate, Bound.BYTES) for rate in (top.copy, top.read))
            l2, gemm = rate_words(top.l2, Bound.BYTES), rate_words(top.gemm, Bound.FLOPS)
            yield f"- ceilings in the process of {adapter}: copy {copy}, read {read}, L2 {l2}, GEMM {gemm}"
    for each in held:
        yield f"- {each.floor.scenario} {each.words}"


def _list(peers: dict[str, str]) -> None:
    from ..bench.scenarios import FLOORS, SCENARIOS

    for each in SCENARIOS.values():
        out.print(f"{each.name}: {each.title}; bound by {each.bound}", markup=False, highlight=False)
        for floor in FLOORS:
            if floor.scenario == each.name:
                out.print(f"    floor: {floor.words}", markup=False, highlight=False)
    out.print(f"peers: {', '.join(peers)}", markup=False, highlight=False)
