"""Rows: what was timed and judged, as JSON lines that are validated when they are read, and as a table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sacts.reports.records import ACCEPTED, RecordError, Verdict, replace_file

from .ceilings import Ceilings
from .scenarios import Bound
from .timing import Times

SCHEMA = 1
TOO_GOOD = 1.05  # times the ceiling; more is no measurement of this work


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario with one adapter. Times in ms; `work`: bytes or FLOPs of a call, as `bound` says; `replayed`: by
    graph replay, None where the backend declares none; `loaded`: bytes of K and V that reach the processors where every
    candidate row loads its own, 0 where rows share; `checked`: rows of timed outputs that were judged; `hints`: as they
    were given.
    """

    schema: int = SCHEMA
    scenario: str
    adapter: str
    device: str
    verdict: Verdict
    sentence: str = ""
    bound: Bound = Bound.BYTES
    tiny: bool = False
    work: float = 0.0
    loaded: float = 0.0
    eager: Times | None = None
    replayed: Times | None = None
    plan: float | None = None
    ceilings: Ceilings | None = None
    rotations: int = 0
    checked: int = 0
    path: str | None = None
    workspace: int = 0
    hints: dict[str, int | str] = {}

    @property
    def accepted(self) -> bool:
        """Whether it does not count against the adapter."""
        return self.verdict in ACCEPTED

    @property
    def ceiling(self) -> float:
        """What the rate is compared with: the copy, or the product; 0 where nothing was measured."""
        if self.ceilings is None:
            return 0.0
        return self.ceilings.copy if self.bound is Bound.BYTES else self.ceilings.gemm

    def rate(self, replayed: bool = False) -> float:
        """Work per second of the median run, 0 where there is none."""
        times = self.replayed if replayed else self.eager
        return self.work / (times.median * 1e-3) if times else 0.0

    @property
    def l2_share(self) -> float:
        """What is loaded per second, of what the L2 delivers; 0 where that is not known."""
        known = self.ceilings is not None and self.ceilings.l2 and self.work
        return self.loaded * self.best / self.work / self.ceilings.l2 if self.ceilings and known else 0.0

    @property
    def best(self) -> float:
        """The larger of both rates: what the kernel does where no host holds it up."""
        return max(self.rate(), self.rate(replayed=True))


def too_good(row: Row) -> str:
    """Why a row is faster than its work allows, empty where it is not. Requirement: no more bytes a second than both
    bandwidths of the same process, no more FLOPs than its product, with TOO_GOOD for their own spread.
    """
    if row.ceilings is None:
        return ""
    most = row.ceilings.bandwidth if row.bound is Bound.BYTES else row.ceilings.gemm
    if row.best <= TOO_GOOD * most:
        return ""
    return (
        f"{rate_words(row.best, row.bound)} where the ceiling is {rate_words(most, row.bound)}: "
        "work was dropped, or the data was in the cache"
    )


def rate_words(rate: float, bound: Bound) -> str:
    """A rate as it is printed."""
    return f"{rate * 1e-9:.4g} GB/s" if bound is Bound.BYTES else f"{rate * 1e-12:.4g} TFLOP/s"


def encode(row: Row) -> bytes:
    """One JSON object, without a line end."""
    return msgspec.json.encode(row)


def decode(line: bytes | str) -> Row:
    """Read and validate one line. Raises RecordError."""
    try:
        row = msgspec.json.decode(line, type=Row)
    except msgspec.DecodeError as error:
        raise RecordError(f"not a row of a bench: {error}") from None
    if row.schema != SCHEMA:
        raise RecordError(f"bench schema {row.schema}, this suite reads {SCHEMA}")
    return row


def write(folder: Path, rows: Sequence[Row], lines: Iterable[str]) -> None:
    """bench.jsonl and bench.md, each renamed into place when complete; `lines`: what stands above the table."""
    replace_file(folder / "bench.jsonl", b"".join(encode(row) + b"\n" for row in rows))
    table = [HEADERS, ["---"] * len(HEADERS), *(cells(row) for row in rows)]
    text = "\n".join([*lines, "", *("| " + " | ".join(line) + " |" for line in table), ""])
    replace_file(folder / "bench.md", text.encode())


def read(path: Path) -> list[Row]:
    """The rows of a file. Raises RecordError naming the line."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append(decode(line))
        except RecordError as error:
            raise RecordError(f"{path.name} line {number}: {error}") from None
    return rows


HEADERS = [
    "scenario",
    "adapter",
    "eager ms",
    "P95",
    "P99",
    "replayed ms",
    "plan ms",
    "rate",
    "of ceiling",
    "checked",
    "verdict",
]


def _ms(times: float | None) -> str:
    return "" if times is None else f"{times:.4g}"


def cells(row: Row) -> list[str]:
    """A row as the table prints it, one text a column of HEADERS; the sentence goes with the verdict."""
    eager, replayed = row.eager, row.replayed
    fewer = f" ({eager.events} events)" if eager and eager.events < 1000 else ""
    share = f"{100 * row.best / row.ceiling:.1f} %" if row.best and row.ceiling else ""
    if row.bound is Bound.FLOPS and row.l2_share:
        share += f", L2 {100 * row.l2_share:.1f} %"
    sentence = row.sentence.replace("|", "/").replace("\n", " ")
    return [
        row.scenario,
        row.adapter,
        (_ms(eager.median) if eager else "") + fewer,
        _ms(eager.p95) if eager else "",
        _ms(eager.p99) if eager else "",
        _ms(replayed.median) if replayed else "",
        _ms(row.plan),
        rate_words(row.best, row.bound) if row.best else "",
        share,
        f"{row.checked} rows" if row.checked else "",
        row.verdict.value + (f": {sentence}" if sentence else ""),
    ]
