"""The page of a run: one self-contained HTML file, no network. What adapters say is escaped; colour is never the only
sign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from .records import ACCEPTED, INCOMPLETE, PROVES, Reach, Record, Strip, Verdict, exit_code, replace_file, reproduce

SIGNS = {
    Verdict.PASS: "P",
    Verdict.FALLBACK: "B",
    Verdict.REFUSED: "R",
    Verdict.FAIL: "F",
    Verdict.ERROR: "E",
    Verdict.CRASH: "C",
    Verdict.TIMEOUT: "T",
    Verdict.UNTRUSTED: "U",
    Verdict.NOT_RUN: "N",
    Verdict.SUITE_ERROR: "S",
}
WORST_FIRST = tuple(v for v in Verdict if v not in ACCEPTED) + tuple(v for v in Verdict if v in ACCEPTED)
WORDS = {0: "accepted", 1: "not accepted", 3: "incomplete"}
STRIP_WIDTH, STRIP_HEIGHT = 640, 60
DEFAULT_AXES = ("pattern", "dtype")


def kind(verdict: Verdict) -> str:
    """The class of a verdict in the style sheet: good, open or bad."""
    return "good" if verdict in ACCEPTED else "open" if verdict in INCOMPLETE else "bad"


@dataclass(frozen=True)
class Bar:
    """One token range of a probability strip, in SVG units: observed bar, expected mark, and what it says."""

    x: float
    width: float
    height: float
    mark: float
    wrong: bool
    title: str


def bars(strip: Strip) -> list[Bar]:
    """The probability row as bars; wrong ones differ from what is expected by more than a tenth of an edge."""
    top = max(*strip.observed, *strip.expected, 1e-30)
    width = STRIP_WIDTH / len(strip.first)
    edge = min((e for e in strip.expected if e > 0), default=top)
    rows = zip(strip.first, strip.observed, strip.expected, strict=True)
    return [
        Bar(
            x=round(i * width, 2),
            width=round(max(width - 0.5, 0.5), 2),
            height=round(STRIP_HEIGHT * max(seen, 0.0) / top, 2),
            mark=round(STRIP_HEIGHT * right / top, 2),
            wrong=abs(seen - right) > 0.1 * edge,
            title=f"token {first}{f' to {first + strip.step - 1}' if strip.step > 1 else ''}: "
            f"weight {seen:.4g}, expected {right:.4g}",
        )
        for i, (first, seen, right) in enumerate(rows)
    ]


def _uses(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Per adapter, device and gate: the largest observed / allowed, and the cell that shows it."""
    rows = []
    for adapter, device in sorted({(r.adapter, r.device) for r in records}):
        mine = [r for r in records if (r.adapter, r.device) == (adapter, device)]
        for gate in sorted({gate for r in mine for gate in r.use}):
            worst = max((r for r in mine if gate in r.use), key=lambda r: r.use[gate])
            rows.append(
                {"adapter": adapter, "device": device, "gate": gate, "use": worst.use[gate], "cell": worst.cell}
            )
    return rows


def _probes(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Each probe, what it proves, and in how many cells it was judged, untrusted, not applicable."""
    said = {name: Counter(r.probes[name].said for r in records if name in r.probes) for name in PROVES}
    return [(name, PROVES[name], ", ".join(f"{n} {word}" for word, n in each.items())) for name, each in said.items()]


def render(
    records: Sequence[Record],
    environment: Mapping[str, str],
    axes_of: Callable[[str], Mapping[str, str]],
    reaches: Sequence[Reach] = (),
) -> str:
    """The page as text. `axes_of` gives the axis values of a cell id, for the heat map; `reaches`: what each adapter
    was judged on natively.
    """
    ordered = sorted(records, key=lambda r: (r.adapter, r.device, r.cell, r.replicate))
    points = [{"adapter": r.adapter, "verdict": r.verdict, "axes": dict(axes_of(r.cell))} for r in ordered]
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html.jinja")
    return template.render(
        records=ordered,
        failures=[r for r in ordered if not r.accepted],
        counts=[
            (adapter, device, Counter(r.verdict for r in ordered if (r.adapter, r.device) == (adapter, device)))
            for adapter, device in sorted({(r.adapter, r.device) for r in ordered})
        ],
        uses=_uses(ordered),
        reaches=reaches,
        points=points,
        probes=_probes(ordered),
        axes=list(points[0]["axes"]) if points else [],
        default_axes=DEFAULT_AXES,
        signs=SIGNS,
        worst_first=WORST_FIRST,
        kinds={verdict: kind(verdict) for verdict in Verdict},
        environment=environment,
        word=WORDS[exit_code(ordered)],
        bars=bars,
        reproduce=reproduce,
        strip_width=STRIP_WIDTH,
        strip_height=STRIP_HEIGHT,
    )


def write(
    path: Path,
    records: Sequence[Record],
    environment: Mapping[str, str],
    axes_of: Callable[[str], Mapping[str, str]],
    reaches: Sequence[Reach] = (),
) -> None:
    """Write the page, renamed into place when complete."""
    replace_file(path, render(records, environment, axes_of, reaches).encode())
