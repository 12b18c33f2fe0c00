"""Records: what was judged and what came out. A leaf: everything else may import it, it imports nothing of ours.

One case is one JSON line, versioned, and validated when it is read.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import msgspec

SCHEMA = 1


class Verdict(StrEnum):
    """What became of one cell."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"  # the adapter raised
    CRASH = "crash"
    TIMEOUT = "timeout"
    FALLBACK = "fallback"  # declared, and right
    REFUSED = "refused"  # declared, and honoured
    UNTRUSTED = "untrusted"  # the case could not have failed
    NOT_RUN = "not-run"
    SUITE_ERROR = "suite-error"  # our own fault


ACCEPTED = frozenset({Verdict.PASS, Verdict.FALLBACK, Verdict.REFUSED})
INCOMPLETE = frozenset({Verdict.NOT_RUN, Verdict.SUITE_ERROR, Verdict.UNTRUSTED})

EXIT_ACCEPTED, EXIT_FAILURES, EXIT_USAGE, EXIT_INCOMPLETE = 0, 1, 2, 3


class Gate(StrEnum):
    """The layers of blame, in their order: the first that fails is named, later ones are not blamed for it."""

    CONTRACT = "contract"
    INDEX = "index"  # of adapters that normalize: the lists that they make
    TERMS = "terms"  # position coding, soft cap, bias, sink, repeats, epilogue
    DROPOUT = "dropout"  # the keep mask and where it acts
    COUNT = "count"
    ADDRESS = "address"  # the value at a key's address
    SCALE = "scale"  # of quantised KV: each code with its own scale and zero point
    LAYOUT = "layout"
    LOGITS = "logits"  # of adapters that trace: logits and running maxima
    LSE = "lse"
    MASS = "mass"  # numerator against denominator
    RESCALE = "rescale"  # the online softmax when its maximum rises
    PAIRING = "pairing"  # each weight with the value of its own key
    OUT = "out"
    SHARP = "sharp"  # out and lse, held to what independent errors add up to
    CANDIDATE = "candidate"  # the part of one candidate in the error of a row
    COMMON = "common"  # what all rows have in common: a gain, a bias
    MERGE = "merge"  # of splits, and of gated branches
    GRADIENTS = "gradients"  # d_q, d_k, d_v and d_sink, from a right out and lse
    DETERMINISM = "determinism"  # a promise of equal bits
    REUSE = "reuse"  # right by itself, wrong behind another run in the same memory


PROVES = {
    "count": "each row attends exactly its candidates, each once: with equal logits, out is their mean code and lse is "
    "ln k",
    "select": "a row whose one key carries all the mass returns that key's value to the last bit, at page edges first",
    "scale": "each page, head, token and channel of quantised K and V is decoded with its own scale and zero point, as "
    "the granularity says",
    "dropout": "the keep mask is the one that key, query, query head and request uid draw, and the denominator keeps "
    "every edge",
    "random": "every output and lse element lies within the error that its own inputs allow",
    "dither": "the numerator weighs what the denominator counts: a relative error of 1e-5 flips a bit of out",
    "cliff": "a rise of ten octaves at a tile's edge rescales sums and accumulator alike",
    "stair": "as the maximum climbs from tile to tile every octave is counted, and P is its power of two",
    "comb": "P meets the V of its own key: each channel of out shows the weights of a few keys",
    "gradients": "every element of d_q, d_k, d_v and d_sink lies within the error that its own inputs and the fed out "
    "and lse allow",
    "bw_value": "each row adds its P d_out to d_v of its own keys, once, in an accumulator that rounds nothing: with "
    "2^m equal weights and integers the sums are known to the bit",
    "bw_dk": "each edge adds its own dS to d_q and d_k, scaled, once: q and K are orthogonal integers, so that only dS "
    "and the other operand decide",
    "bw_const": "D takes away the mean of dP: where all V are equal d_q and d_k vanish",
    "bw_null": "no contribution is lost or doubled: keys in quadruples and opposite d_out cancel everywhere",
}  # what each probe proves, in the order in which failures are looked at


class ProbeResult(msgspec.Struct, frozen=True):
    """What one probe did in a case. `said`: `judged`, `untrusted` (its fault could not have shown in some of its rows,
    `rows` says in how many of how many) or `not applicable`; `use`: its largest observed / allowed.
    """

    said: str
    rows: str = ""
    use: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """Candidate rows (token * list_heads + head) that were judged, of how many with an edge."""

    rows: list[int]
    of: int


class Reach(msgspec.Struct, frozen=True):
    """What an adapter was judged on natively: combinations of `strength` levels, of so many feasible ones; `never`: by
    axis, the levels that no natively judged cell has.
    """

    adapter: str
    device: str
    strength: int
    covered: int
    feasible: int
    never: dict[str, list[str]]


class Strip(msgspec.Struct, frozen=True):
    """A decoded probability row, by logical position: each entry covers `step` tokens from `first`; `elsewhere` is the
    weight of slots that are not the row's own.
    """

    first: list[int]
    step: int
    observed: list[float]
    expected: list[float]
    elsewhere: float = 0.0


class Finding(msgspec.Struct, frozen=True):
    """Why a cell failed: the gate, the place in the field's words, and the sentence. `use` is observed error /
    allowed error where the gate measures one.
    """

    gate: Gate
    place: str
    sentence: str
    use: float | None = None
    strip: Strip | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One judged case. `converted`: what of the cell the backend did not see, as it declared. `use`: the largest
    observed / allowed by gate; `gates`: what each gate said, `pass`, `fail`, `not offered` (the backend has no
    such output), `not applicable` or `not reached`. `probes`: what each probe did, by name. `samples`: the
    rows that were chosen where not all were, by what they were judged by.
    """

    schema: int = SCHEMA
    suite: str
    adapter: str
    device: str
    cell: str
    replicate: int = 0
    verdict: Verdict
    status: str = ""
    converted: list[str] = []
    sentence: str = ""
    finding: Finding | None = None
    gates: dict[str, str] = {}
    use: dict[str, float] = {}
    probes: dict[str, ProbeResult] = {}
    samples: dict[str, Sample] = {}

    @property
    def accepted(self) -> bool:
        """Whether the verdict accepts the case."""
        return self.verdict in ACCEPTED


def blank(adapter: str, device: str, cell_id: str, replicate: int, verdict: Verdict, sentence: str = "") -> Record:
    """A record of a cell about which nothing but the verdict is known."""
    return Record(
        suite=version("sacts"),
        adapter=adapter,
        device=device,
        cell=cell_id,
        replicate=replicate,
        verdict=verdict,
        sentence=sentence,
    )


def reproduce(record: Record) -> str:
    """The one line that runs this case again."""
    device = "" if record.device == "cpu" else f" --device {record.device}"
    replicate = f"/replicate:{record.replicate}" if record.replicate else ""
    return f"sacts run --adapter {shlex.quote(record.adapter)}{device} {record.cell}{replicate}"


def describe(record: Record) -> str:
    """A record in a sentence, with the line that reproduces it."""
    gate = f" [{record.finding.gate}]" if record.finding else ""
    return f"{record.verdict}{gate}: {record.sentence}\n  reproduce: {reproduce(record)}"


class RecordError(ValueError):
    """A line that is no record of this schema."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """One JSON object, without a line end."""
    return _encoder.encode(record)


def decode(line: bytes | str) -> Record:
    """Read and validate one line. Raises RecordError, saying what is wrong and where."""
    try:
        record = _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise RecordError(f"not a record: {error}") from None
    if record.schema != SCHEMA:
        raise RecordError(f"record schema {record.schema}, this suite reads {SCHEMA}")
    return record


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines, ordered by adapter, device, cell and replicate; renamed into place when complete."""
    ordered = sorted(records, key=lambda r: (r.adapter, r.device, r.cell, r.replicate))
    replace_file(path, b"".join(encode(record) + b"\n" for record in ordered))


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file under a temporary name and rename it into place; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        whole = Path(folder) / path.name
        whole.write_bytes(content)
        whole.replace(path)


def read(path: Path) -> list[Record]:
    """The records of a file. Raises RecordError naming the line."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            records.append(decode(line))
        except RecordError as error:
            raise RecordError(f"{path.name} line {number}: {error}") from None
    return records


def exit_code(records: Iterable[Record]) -> int:
    """0 accepted, 1 failures, 3 incomplete (also when nothing was judged)."""
    verdicts = {record.verdict for record in records}
    if verdicts - ACCEPTED - INCOMPLETE:
        return EXIT_FAILURES
    return EXIT_INCOMPLETE if verdicts & INCOMPLETE or not verdicts else EXIT_ACCEPTED
