"""Cells drawn from the whole feasible space, also with values between the levels that tiers are made of: the one
strategy of cells, of `sacts fuzz` and of the tests.

Axes are drawn in a fixed order. A value stands where each constraint and the filter can still be met by what is drawn
later, so that few draws are rejected. Of each cell a coin decides whether numbers lie between the levels, and two dice
how many axes leave their default, one for terms and codecs and one for all else (as in swarm testing: Groce et al.,
2012), so that a backend that refuses most terms still gets cells of every other kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import shake_256
from itertools import count
from types import SimpleNamespace
from typing import Any

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from sacts.reference.spec import ListsPer

from . import filters
from .axes import AXES, Axis, Execution, Phase
from .cell import Cell, CellError, read_value, value_text
from .constraints import CONSTRAINTS, Constraint
from .levels import CHOSEN, KV_LENGTHS, Q_LENGTHS
from .shards import RUNS

Row = dict[str, Any]  # axis -> value, of a cell that is being made

COST = 80.0  # iterations of a launch, as of the tier pr: a third of a second in the interpreter
ELEMENTS = 2**21  # of K and V in all pages of the requests: what a cell's data costs whatever the backend is
HIGH_RATIO = 2  # between the dimensions of K and V where the smaller pool has 2^31 elements
REQUESTS, LONGEST, QUERIES = 4, 320, 20
BETWEEN = {
    "dim": (1, 288),
    "vdim": (1, 288),
    "page": (1, 160),
    "block": (1, 80),
    "window": (-1, 120),
    "splits": (1, 16),
    "tile": (1, 160),
    "cap": (0, 100),
    "dropout": (0, 99),
    "qtile": (1, QUERIES),
    "qblock": (1, QUERIES),
}  # of numbers that are no levels: from, to
FIRST = ("phase", "dtype", "pattern", "map", "cache", "exec", "heads", "splits", "tile", "page", "block", "dim", "vdim")
BY_NAME = {axis.name: axis for axis in AXES}
ORDER = tuple(dict.fromkeys((*(BY_NAME[name] for name in (*FIRST, "kv", "q")), *AXES)))
EXAMPLE_KV = (128,)  # the only one that map:example may have
TERMS = ("pos", "cap", "sink", "dropout", "kind", "empty", "kcodec", "vcodec", "scales", "steps", "zeros", "epilogue")
LEAVE_TERMS, LEAVE = (0, 2, 5), (1, 3, 6)  # of eight axes, how many leave their default
TRIES = 3  # draws of a value, before it is taken from the few that are known
BYTES = 2048  # behind one cell; it takes about 150
PATIENCE = 400  # draws in a row without a new cell, after which a space counts as exhausted
PHASES = (*(Phase.DECODE, Phase.PREFILL, Phase.TRAIN) * 3, Phase.INDEX)  # lists alone meet few axes


class NothingDrawn(ValueError):
    """A filter that no cell below the cost meets; the message says where drawing ended."""


class Space:
    """What may be drawn: the cells that a filter lets through, of at most `cost` predicted iterations. `stretch`:
    times the usual upper ends of numbers. Raises FilterError.
    """

    def __init__(self, where: str = "", cost: float = COST, stretch: int = 1) -> None:
        self.where, self.cost, self.stretch = where, cost, stretch
        self.keep = filters.parse(where)
        self.mentioned: dict[str, list[Any]] = {}
        for axis, sign, text in filters.compared(where):
            self.mentioned.setdefault(axis.name, []).extend(_near(axis, sign, text))
        self.stuck = ""  # where the last draw that was rejected ended

    def allows(self, row: Row, axis: str, value: object) -> bool:
        """Whether a cell that begins with `row` and this value may exist."""
        begun = {**row, axis: value}
        if self.keep(SimpleNamespace(**begun)) is False:  # type: ignore[arg-type]  # None where axes are missing
            return False
        if self.cost < float("inf") and not _is_cheap(begun, self.cost):
            return False
        return all(self._can_hold(each, begun) for each in _TIED.get(axis, ()))

    def _can_hold(self, constraint: Constraint, row: Row) -> bool:
        """Whether some values of the axes that are missing meet a constraint."""
        missing = next((axis for axis in _NEEDS[constraint.name] if axis.name not in row), None)
        if missing is None:
            return constraint.holds(_stub(row))  # type: ignore[arg-type]  # has the axes that it looks at
        return any(self._can_hold(constraint, {**row, missing.name: each}) for each in self.known(missing, row))

    def known(self, axis: Axis, row: Row) -> list[Any]:
        """The few values of an axis that are taken where drawing meets none: default, levels, what the filter names."""
        if axis.name == "kv":
            sizes = row.get("page", 16), row.get("tile", 64)
            found: list[Any] = [make(*sizes) for make in KV_LENGTHS.values()] + [(1,), EXAMPLE_KV]
        elif axis.name == "q":
            found = [make(len(row["kv"])) for make in Q_LENGTHS.values()]
        else:
            found = [read_value(axis, level) for level in CHOSEN.get(axis.name, axis.values or ())]
            found += axis.values or ()
        return list(dict.fromkeys((*self.mentioned.get(axis.name, ()), *found)))

    def ends(self, axis: str, low: int, high: int) -> tuple[int, int]:
        """From, to of a number: as far as `stretch` and what the filter names go."""
        named = [max(n) if isinstance(n, tuple) else int(n) for n in self.mentioned.get(axis, ())]
        high = max(high * self.stretch, *(2 * n for n in named), high)
        return low, min(high, BY_NAME[axis].high or high)


def _near(axis: Axis, sign: str, text: str) -> list[Any]:
    """Values of an axis at the edge of what a comparison lets through."""
    try:
        value = read_value(axis, text)
    except CellError:
        return []
    if axis.values is not None:
        return [value]
    if isinstance(value, tuple):
        if axis.name == "heads":
            return [value] if len(value) == 2 and sign in ("=", "!=") else [(n * 4, n) for n in (1, 2)]
        steps = (0, 1) if sign == ">" else (0, -1) if sign == "<" else (0,)
        return [(*(n + step for n in value),) for step in steps if min(value) + step >= 0]
    assert isinstance(value, int)
    return [n for n in (value, value + 1, value - 1) if axis.holds(n)]


def _stub(row: Row) -> SimpleNamespace:
    """What a constraint looks at."""
    return SimpleNamespace(**row, qo_lens=row.get("q") or (1,) * len(row.get("kv", ())))


def _needed(constraint: Constraint) -> tuple[Axis, ...]:
    """The axes that decide a constraint, in the order in which they are drawn."""
    names = {*constraint.axes} | ({"phase", "kv", "q"} if {"kv", "q"} & {*constraint.axes} else set())
    return tuple(axis for axis in ORDER if axis.name in names)


_NEEDS = {constraint.name: _needed(constraint) for constraint in CONSTRAINTS}
_TIED = {axis.name: tuple(constraint for constraint in CONSTRAINTS if axis in _NEEDS[constraint.name]) for axis in AXES}


# --- what a cell costs at least, while it is being made


def _is_cheap(row: Row, cost: float) -> bool:
    return least_cost(row) <= cost and least_elements(row) <= ELEMENTS and _high_ratio(row) <= HIGH_RATIO


def _high_ratio(row: Row) -> float:
    """How much larger the larger of the two pools of map:high is."""
    dim, vdim = row.get("dim", 0), row.get("vdim", 0)
    return max(dim, vdim) / min(dim, vdim) if row.get("map") == "high" and dim and vdim else 1.0


def _of_a_token(row: Row) -> float:
    """Iterations of one query token, but for its tiles and splits: lists x runs of a launch x the square of the
    branches.
    """
    heads = row.get("heads", (1, 1))
    lists = heads[0] if row.get("lists") == ListsPer.QUERY_HEAD else heads[1]
    return float(lists * RUNS[Execution(row.get("exec", "eager"))] * row.get("branches", 1) ** 2)


def _tiles(row: Row, longest: int) -> int:
    return -(-longest // max(16, int(row.get("tile", longest))))


def least_cost(row: Row) -> float:
    """`shards.predicted` of the cheapest cell with a query that begins so."""
    if row.get("phase") == Phase.INDEX:
        return 0.0
    kv = row.get("kv", ())
    tokens = sum(row.get("q") or (1,) * len(kv)) if "q" in row else len(kv) if row.get("phase") == "decode" else 0
    rows = tokens if "q" in row or (kv and row.get("phase") == "decode") else 1
    return float(rows * _of_a_token(row) * (row.get("splits", 1) + _tiles(row, max(kv, default=0))))


def least_elements(row: Row) -> int:
    """Elements of K and V in the pages of the requests, of the smallest cell that begins so."""
    page, dim = row.get("page", 1), row.get("dim", 1)
    pages = sum(-(-t // page) for t in row.get("kv", (1,)))
    return int(pages * page * row.get("heads", (1, 1))[1] * (dim + (row.get("vdim", 1) or dim)))


# --- the strategy


def cells(where: str = "", cost: float = COST, stretch: int = 1) -> st.SearchStrategy[Cell]:
    """Any cell that the filter lets through, of at most `cost` predicted iterations (`math.inf`: of any size);
    `stretch`: times the usual upper ends of numbers. Raises FilterError.
    """
    return _cells(Space(where, cost, stretch))


@st.composite
def _cells(draw: st.DrawFn, space: Space) -> Cell:
    row: Row = {}
    between, of_terms, of_others = draw(st.booleans()), draw(st.sampled_from(LEAVE_TERMS)), draw(st.sampled_from(LEAVE))
    for axis in ORDER:
        leave = of_terms if axis.name in TERMS else of_others
        row[axis.name] = _value(draw, space, axis, row, leave=leave, between=between)
    return Cell(**row)


def _value(draw: st.DrawFn, space: Space, axis: Axis, row: Row, *, leave: int, between: bool) -> object:
    """A value of one axis: of eight, `leave` leave the default, but one at most where nothing else is a level."""
    if CHOSEN.get(axis.name) == (axis.default,):
        leave = min(leave, 1)
    if axis.default is not None and draw(st.integers(0, 7)) >= leave and space.allows(row, axis.name, axis.default):
        return axis.default
    strategy = _strategy(space, axis, row, between)
    for _ in range(TRIES):
        value = draw(strategy)
        if space.allows(row, axis.name, value):
            return value
    left = [value for value in space.known(axis, row) if space.allows(row, axis.name, value)]
    if not left:
        beside = " ".join(
            f"{name}:{_text(name, value)}" for name, value in row.items() if value != BY_NAME[name].default
        )
        space.stuck = f"no value of {axis.name} is left beside {beside}"
        reject()
    return draw(st.sampled_from(left))


def _text(axis: str, value: object) -> str:
    return value_text(SimpleNamespace(**{axis: value}), axis)  # type: ignore[arg-type]  # the axis that is asked for


def _strategy(space: Space, axis: Axis, row: Row, between: bool) -> st.SearchStrategy[Any]:
    if axis.name == "phase":
        return st.sampled_from([phase.value for phase in PHASES])
    if axis.values:  # values that are no level, single cases among them, come up less often
        levels = CHOSEN.get(axis.name, axis.values)
        return st.sampled_from([value for value in (*levels * 2, *axis.values) if value != axis.default])
    if axis.name in _SIZES and between:
        return _SIZES[axis.name](space, row)
    if axis.name in BETWEEN and between:
        return st.one_of(
            st.sampled_from(space.known(axis, row)), st.integers(*space.ends(axis.name, *BETWEEN[axis.name]))
        )
    return st.sampled_from(space.known(axis, row))


def _heads(space: Space, row: Row) -> st.SearchStrategy[tuple[int, int]]:
    """1 to 4 KV heads, up to 9 query heads of each."""
    return st.tuples(st.integers(1, 9), st.integers(1, 4)).map(lambda drawn: (drawn[0] * drawn[1], drawn[1]))


def _kv(space: Space, row: Row) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths at edges of pages and tiles, short ones, any; as many requests and tiles as the cost lets be."""
    page, tile, splits, each = row["page"], row["tile"], row["splits"], _of_a_token(row)
    free = space.cost == float("inf") or row["phase"] == Phase.INDEX
    _, longest = space.ends("kv", 0, LONGEST)
    if not free:
        longest = max(1, min(longest, max(16, tile) * int(space.cost / each - splits)))
    requests = REQUESTS if free or row["phase"] != "decode" else max(1, int(space.cost / (each * (splits + 1))))
    edges = [n + step for size in (page, tile) for n in range(size, 4 * size, size) for step in (-1, 0, 1)]
    length = st.one_of(
        st.sampled_from(sorted({n for n in edges if 0 <= n <= longest} or {1})),
        st.integers(0, min(40, longest)),
        st.integers(0, longest),
    )
    return st.lists(length, min_size=1, max_size=min(REQUESTS, requests)).map(tuple)


def _q(space: Space, row: Row) -> st.SearchStrategy[tuple[int, ...]]:
    """None, one, two or any number of queries of each request, as many as the cost lets be."""
    kv = row["kv"]
    most = QUERIES * space.stretch
    if space.cost < float("inf") and row["phase"] != Phase.INDEX:
        tokens = space.cost / (_of_a_token(row) * (row["splits"] + _tiles(row, max(kv))))
        most = max(1, min(most, int(tokens) // len(kv)))
    one = st.one_of(st.integers(0, 2), st.integers(1, most))
    return st.tuples(*(one for _ in kv))


_SIZES: dict[str, Callable[[Space, Row], st.SearchStrategy[Any]]] = {"heads": _heads, "kv": _kv, "q": _q}


# --- a stream of cells, the same on every machine


def drawn(seed: int, where: str = "", cost: float = COST) -> Iterator[Cell]:
    """Distinct cells without end, or until `PATIENCE` draws in a row bring no new one. Which they are follows from the
    arguments and the version of Hypothesis alone: each draw has bytes of its own, a hash of the seed and its number.
    Raises FilterError, and NothingDrawn where not one is found.
    """
    space = Space(where, cost)
    found: list[Cell] = []

    @settings(database=None)
    @given(_cells(space))
    def take(cell: Cell) -> None:
        found.append(cell)

    seen: set[Cell] = set()
    last = 0
    for number in count():
        take.hypothesis.fuzz_one_input(shake_256(f"{seed}/{number}".encode()).digest(BYTES))  # type: ignore[attr-defined]
        while found:
            cell = found.pop()
            if cell not in seen:
                seen.add(cell)
                last = number
                yield cell
        if number - last >= PATIENCE:
            break
    if not seen:
        raise NothingDrawn(f"no cell of at most {cost:g} iterations matches {where!r}: {space.stuck}")
