"""The terminal summary: counts, how much of each bound was used, and each failure in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .records import ACCEPTED, INCOMPLETE, Reach, Record, Verdict, describe


def _style(verdict: Verdict) -> str:
    return "green" if verdict in ACCEPTED else "yellow" if verdict in INCOMPLETE else "bold red"


def failure(record: Record) -> RenderableType:
    """One failure as a block of text; what adapters say is text, never markup."""
    return Text.assemble((f"{record.adapter}  {record.cell}\n  ", "bold"), (describe(record), _style(record.verdict)))


def table(records: Sequence[Record]) -> Table:
    """One line per adapter: verdicts, and the largest observed / allowed of each gate."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("adapter", "device", "accepted", "verdicts", "largest observed / allowed"):
        result.add_column(column, overflow="fold")
    for adapter, device in sorted({(r.adapter, r.device) for r in records}):
        mine = [r for r in records if (r.adapter, r.device) == (adapter, device)]
        counts = Counter(r.verdict for r in mine)
        verdicts = Text(", ").join(Text(f"{n} {v}", _style(v)) for v, n in sorted(counts.items()))
        accepted = f"{sum(r.accepted for r in mine)} of {len(mine)}"
        result.add_row(Text(adapter), Text(device), accepted, verdicts, Text(_largest(mine)))
    return result


def _largest(records: Sequence[Record]) -> str:
    gates = sorted({gate for r in records for gate in r.use})
    return ", ".join(f"{gate} {max(r.use.get(gate, 0.0) for r in records):.2g}" for gate in gates) or "-"


def show(console: Console, records: Sequence[Record], reaches: Sequence[Reach] = ()) -> None:
    """Print failures, then the table, then what was really covered."""
    bad = [r for r in records if not r.accepted]
    console.print(Group(*(failure(r) for r in bad), *([Text()] if bad else []), table(records)))
    if reaches:
        each = ", ".join(f"{reach.adapter} {reach.covered}" for reach in reaches)
        console.print(Text(f"pairs of levels judged natively, of {reaches[0].feasible} feasible: {each}"))


class FaultOutcome(Protocol):
    """What the audit table shows of one seeded fault."""

    @property
    def fault(self) -> Named:
        """The catalogue entry."""

    @property
    def cells(self) -> int:
        """Cells that ran."""

    @property
    def kills(self) -> int:
        """Cells that failed with a gate of the catalogue."""

    @property
    def misnamed(self) -> tuple[Record, ...]:
        """Cells that failed with another one."""

    @property
    def shown(self) -> Record | None:
        """The record to quote."""

    @property
    def caught(self) -> bool:
        """Whether all is as catalogued."""


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """The name."""


def show_audit(console: Console, outcomes: Sequence[FaultOutcome]) -> None:
    """Each fault with its kills and one sentence; misses and wrong names in full; the count last."""
    for outcome in outcomes:
        word = "caught" if outcome.caught else "MISSED" if not outcome.kills else "MISNAMED"
        line = f"{word:8} {outcome.fault.name}: {outcome.kills} of {outcome.cells} cells"
        line += f", {len(outcome.misnamed)} named otherwise" if outcome.misnamed else ""
        console.print(Text(line, "green" if outcome.caught else "bold red"))
        for record in (*([outcome.shown] if outcome.shown else []), *(() if outcome.caught else outcome.misnamed)):
            console.print(Text(f"         {record.cell}\n         {describe(record).splitlines()[0]}", "dim"))
    caught = sum(outcome.caught for outcome in outcomes)
    console.print(f"{caught} of {len(outcomes)} seeded faults caught, by the right gate, with the right place named")
