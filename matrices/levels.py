"""The model that tiers cover: of each axis the values that matter (levels), by name, and cells made of one level each.

Lengths are named by what they are beside a page or a tile, so that a row of levels means the same under any of these.
Values that hide what stands beside them (an empty pattern, a request without keys) and single cases (the example, the
64K lists) are no levels: they are cells of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from operator import itemgetter
from types import SimpleNamespace

from .axes import AXES
from .cell import Cell, CellError, read_value, value_text
from .constraints import CONSTRAINTS, Constraint

Row = Mapping[str, str]  # axis -> level

SECOND = 40  # keys of the request beside the one whose length is named
Lengths = tuple[int, ...]
KV_LENGTHS: dict[str, Callable[[int, int], Lengths]] = {
    "one": lambda page, tile: (1, SECOND),
    "page-1": lambda page, tile: (page - 1, SECOND),
    "page": lambda page, tile: (page, SECOND),
    "page+1": lambda page, tile: (page + 1, SECOND),
    "tile-1": lambda page, tile: (tile - 1, SECOND),
    "tile": lambda page, tile: (tile, SECOND),
    "tile+1": lambda page, tile: (tile + 1, SECOND),
    "alone": lambda page, tile: (90,),
    "ragged": lambda page, tile: (300, 9, 1, 17),
}
Q_LENGTHS: dict[str, Callable[[int], Lengths]] = {
    "none": lambda requests: (),
    "one": lambda requests: (1,) * requests,
    "two": lambda requests: (2,) * requests,
    "seventeen": lambda requests: (17, *(1,) * (requests - 1)),
    "ragged": lambda requests: (5, 3, 4, 1)[:requests],  # about a tile of 4 queries
}
# Levels of the axes whose values are not all levels; of the others every value is one.
CHOSEN: dict[str, tuple[str, ...]] = {
    "phase": ("decode", "prefill", "train"),
    "kv": tuple(KV_LENGTHS),
    "q": tuple(Q_LENGTHS),
    "heads": ("4-2", "4-4", "8-2", "7-1", "8-1"),
    "dim": ("64", "128", "80", "96", "192", "576"),
    "vdim": ("0", "64", "128", "512"),
    "page": ("16", "1", "64", "128"),
    "block": ("1", "16", "32"),
    "pattern": ("scattered", "clustered", "contiguous", "hot", "all", "one", "duplicates", "union"),
    "map": ("random", "shared", "alias", "identity", "high"),
    "window": ("-1", "5", "20"),
    "splits": ("1", "2", "8"),
    "tile": ("64", "16", "32", "128"),
    "cap": ("0", "20"),
    "dropout": ("0", "30"),
    "qtile": ("1", "4"),
    "qblock": ("1", "4"),
    "branches": ("1", "2"),
    "fallback": ("none",),
    "empty": ("zero", "force_self", "force_sink_token"),
}
LEVELS: dict[str, tuple[str, ...]] = {axis.name: CHOSEN.get(axis.name, axis.values or ()) for axis in AXES}
NAMED_BESIDE = {"kv": ("page", "tile"), "q": ("kv", "page", "tile")}  # what a level needs to become a value

UNEQUAL_DIMENSIONS = {(128, 64), (192, 128), (576, 512)}  # of q and K, and of V: the last two of latent attention

MODEL_CONSTRAINTS = (
    Constraint("a page before the last", ("kv", "page"), lambda c: 0 not in c.kv, "page-1 of pages of one token is 0"),
    Constraint(
        "dimensions that go together",
        ("dim", "vdim"),
        lambda c: (c.dim, c.vdim) in UNEQUAL_DIMENSIONS or (c.vdim == 0 and c.dim not in (192, 576)),
        "V has the dimension of K, or the pair is one of "
        + ", ".join(f"{k}/{v}" for k, v in sorted(UNEQUAL_DIMENSIONS)),
    ),
)


def values_of(row: Row) -> dict[str, object]:
    """The values of a row of levels, or of a part of it that holds what `NAMED_BESIDE` says."""
    by_name = {axis.name: axis for axis in AXES}
    values: dict[str, object] = {
        name: level if name in ("phase", "dtype") else read_value(by_name[name], level)
        for name, level in row.items()
        if name not in NAMED_BESIDE
    }
    if "kv" in row:
        page, tile = (int(row[axis]) for axis in NAMED_BESIDE["kv"])
        lengths = KV_LENGTHS[row["kv"]](page, tile)
        values["kv"] = lengths
        if "q" in row:
            values["q"] = Q_LENGTHS[row["q"]](len(lengths))
    return values


def cell_of(row: Row) -> Cell:
    """The cell of a full row. Raises CellError where a constraint forbids it."""
    values = values_of(row)
    for constraint in MODEL_CONSTRAINTS:
        if not constraint.holds(SimpleNamespace(**values)):  # type: ignore[arg-type]  # values by axis name
            raise CellError(constraint.because)
    return Cell(**values)  # type: ignore[arg-type]  # values by axis name


def levels_of(cell: Cell) -> dict[str, tuple[str, ...]]:
    """The levels that a cell has, by axis: none where its value is no level, several where names mean one length."""
    found = {
        name: tuple(level for level in levels if level == value_text(cell, name)) for name, levels in LEVELS.items()
    }
    found["kv"] = tuple(name for name, make in KV_LENGTHS.items() if make(cell.page, cell.tile) == cell.kv)
    found["q"] = tuple(name for name, make in Q_LENGTHS.items() if make(len(cell.kv)) == cell.q)
    return found


class Table:
    """A constraint over levels: `axes`, those that decide, and which of their combinations it allows."""

    def __init__(self, constraint: Constraint) -> None:
        self.name = constraint.name
        named = dict.fromkeys(name for axis in constraint.axes for name in (*NAMED_BESIDE.get(axis, ()), axis))
        if any(axis in ("kv", "q") for axis in constraint.axes):
            named = dict.fromkeys((*named, "phase"))
        self.axes = tuple(named)
        self.allowed = frozenset(
            levels
            for levels in product(*(LEVELS[axis] for axis in self.axes))
            if constraint.holds(_stub(dict(zip(self.axes, levels, strict=True))))  # type: ignore[arg-type]  # values by axis name
        )
        self._levels = itemgetter(*self.axes)
        self._parts: dict[tuple[int, ...], frozenset[tuple[str, ...]]] = {}

    def permits(self, row: Row) -> bool:
        """Whether some allowed combination has the levels of a row that may lack axes."""
        known = tuple(i for i, axis in enumerate(self.axes) if axis in row)
        if known not in self._parts:
            self._parts[known] = frozenset(tuple(levels[i] for i in known) for levels in self.allowed)
        return tuple(row[self.axes[i]] for i in known) in self._parts[known]

    def allows(self, whole: Row) -> bool:
        """`permits` of a full row."""
        return self._levels(whole) in self.allowed


def _stub(row: Row) -> SimpleNamespace:
    """What a constraint looks at: the axes that it names, and queries by request."""
    values = values_of(row)
    kv, q = values.get("kv", ()), values.get("q", ())
    return SimpleNamespace(**values, qo_lens=q or (1,) * len(kv))  # type: ignore[arg-type]  # values by axis name


TABLES = tuple(Table(constraint) for constraint in (*CONSTRAINTS, *MODEL_CONSTRAINTS))
