"""What the parent orders of a child and what it is answered, one JSON message a line; quick to import."""

from __future__ import annotations

import msgspec

from sacts.reports.records import Finding, Record

BUDGET = 20  # launches that a localisation may use
OPTIONAL_MEMBERS = ("capabilities", "support", "workspace_bytes", "plan", "normalize", "trace", "backward")


class Measurement(msgspec.Struct, frozen=True):
    """One output at one level. `distinct`: the most different results that any row had; `range_use`: the largest
    distance of two launches over what the bound allows; `place`: the first row that differs, and `variant` the call
    that lies farthest from the original, or empty.
    """

    level: str
    output: str
    launches: int
    distinct: int
    range_use: float
    place: str
    promised: bool
    variant: str = ""

    @property
    def kept(self) -> bool:
        """Whether a promise, if there is one, held; without one the range must lie within the bound."""
        return self.distinct == 1 if self.promised else self.range_use <= 1


class Order(msgspec.Struct, tag="judge"):
    """Judge this cell; `declare`: conventions to declare otherwise than the adapter does."""

    cell: str
    replicate: int = 0
    declare: dict[str, str | float | bool] = {}


class Describe(msgspec.Struct, tag="describe"):
    """Say what the adapter declares."""


class Described(msgspec.Struct, tag="described"):
    """The conventions that an adapter declares, as text, and which optional members it has; or why it did not load."""

    conventions: dict[str, str] = {}
    members: list[str] = []
    error: str = ""


class Measure(msgspec.Struct, tag="measure"):
    """Measure the determinism of this cell."""

    cell: str
    replicate: int = 0
    repeats: int = 5


class Measured(msgspec.Struct, tag="measured"):
    """What was measured in this process, a digest of each output, and which of them promise the same bits in others; or
    why there is nothing.
    """

    measurements: list[Measurement] = []
    digests: dict[str, str] = {}
    promises: dict[str, bool] = {}
    error: str = ""


class Locate(msgspec.Struct, tag="locate"):
    """Say where the backend is wrong in this cell, with at most `budget` launches beyond the first two."""

    cell: str
    replicate: int = 0
    budget: int = BUDGET


class Located(msgspec.Struct, tag="located"):
    """What was found. `finding` None: nothing is wrong, or it could not be judged, and `error` says why. `launches`:
    extra ones, beyond those that show a failure. `gradients`: what the gate of gradients said, where it was asked.
    """

    finding: Finding | None = None
    launches: int = 0
    error: str = ""
    gradients: str = ""


class Ask(msgspec.Struct, tag="ask"):
    """Say what `support` declares for these cells."""

    cells: list[str]


class Stated(msgspec.Struct, tag="stated"):
    """The declared status of each cell, in words, or why there is none."""

    statuses: dict[str, str] = {}
    error: str = ""


class Started(msgspec.Struct, tag="started"):
    """A launch begins; it must end within `limit` seconds."""

    launch: int
    limit: float


class Returned(msgspec.Struct, tag="returned"):
    """The launch came back; what follows is the suite's own work."""


class Judged(msgspec.Struct, tag="judged"):
    """The cell is done. `last`: the process cannot go on (a poisoned device context) and ends now."""

    record: Record
    last: bool = False


Answer = Described | Measured | Located | Stated
Message = Started | Returned | Judged | Answer
