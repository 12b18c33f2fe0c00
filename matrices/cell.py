"""A cell of the matrix and its id, e.g. `decode/bf16/kv:700+9+33/heads:8-2/splits:8`.

The id is canonical: `parse(cell.id) == cell`, and no other text parses to the same cell. It holds the size, is made of
`[A-Za-z0-9_:+./-]` so that shells and `-k` take it, and is the filter, the seed and the replay argument.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches

from .axes import AXES, Axis
from .constraints import CONSTRAINTS, Constraint


class CellError(ValueError):
    """An id or a combination that names no cell; the message says what was wrong and what is valid."""


@dataclass(frozen=True)
class Cell:
    """One point of the matrix; the fields are the axes of `axes.AXES`, in that order."""

    phase: str
    dtype: str
    kv: tuple[int, ...]
    q: tuple[int, ...] = ()
    heads: tuple[int, ...] = (4, 2)
    dim: int = 64
    vdim: int = 0
    page: int = 16
    block: int = 1
    pattern: str = "scattered"
    map: str = "random"
    cache: str = "contiguous"
    causal: str = "none"
    window: int = -1
    splits: int = 1
    tile: int = 64
    values: str = "gaussian"
    pos: str = "none"
    cap: int = 0
    sink: str = "off"
    dropout: int = 0
    kind: str = "set"
    empty: str = "zero"
    kcodec: str = "none"
    vcodec: str = "none"
    scales: str = "tensor"
    steps: str = "any"
    zeros: str = "off"
    epilogue: str = "none"
    exec: str = "eager"
    qtile: int = 1
    schedule: str = "static"
    route: str = "direct"
    format: str = "csr"
    qblock: int = 1
    fallback: str = "none"
    reduction: str = "atomic"
    lists: str = "kv_head"
    branches: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            value = getattr(self, axis.name)
            if axis.values is not None and value not in axis.values:
                raise CellError(f"axis {axis.name} has no value {value!r}; {_choices(str(value), axis.values)}")
            for number in value if isinstance(value, tuple) else (value,):
                if axis.values is None and (not isinstance(number, int) or not axis.holds(number)):
                    to = "" if axis.high is None else f" to {axis.high}"
                    raise CellError(f"axis {axis.name} takes integers from {axis.low}{to}, got {number!r}")
        if len(self.heads) != 2 or self.heads[0] % self.heads[1]:
            seen = _text(self.heads, "-")
            raise CellError(f"axis heads takes query heads - KV heads, a multiple of them, such as 4-2; got {seen}")
        for constraint in CONSTRAINTS:
            if not constraint.holds(self):
                raise CellError(_broken(self, constraint))

    @property
    def id(self) -> str:
        """The canonical id."""
        return "/".join([self.phase, self.dtype, *(part for axis in AXES[2:] if (part := _part(self, axis)))])

    @property
    def qo_lens(self) -> tuple[int, ...]:
        """Queries of each request."""
        return self.q or (1,) * len(self.kv)


assert [field.name for field in fields(Cell)] == [axis.name for axis in AXES]

_LISTS = {"kv": "+", "q": "+", "heads": "-"}


def _text(value: object, separator: str) -> str:
    return separator.join(map(str, value)) if isinstance(value, tuple) else str(value)


def value_text(cell: Cell, axis: str) -> str:
    """The value of one axis as an id writes it."""
    return _text(getattr(cell, axis), _LISTS.get(axis, ""))


def _part(cell: Cell, axis: Axis) -> str:
    return "" if getattr(cell, axis.name) == axis.default else f"{axis.name}:{value_text(cell, axis.name)}"


def _broken(cell: Cell, constraint: Constraint) -> str:
    """The values that exclude each other, and why."""
    values = {name: value_text(cell, name) for name in constraint.axes}
    if not any(values.values()):
        return constraint.because
    seen = " and ".join(f"{name}:{value}" if value else f"no {name}" for name, value in values.items())
    return f"{seen} exclude each other: {constraint.because}"


def _choices(wrong: str, valid: tuple[str, ...] | list[str]) -> str:
    near = get_close_matches(wrong, valid, n=1, cutoff=0.5)
    return (f"did you mean {str(near[0])!r}? " if near else "") + "valid: " + ", ".join(valid)


def axis_values(text: str) -> dict[str, str]:
    """The value of each axis of an id, as text, defaults included; empty for a text that is no id."""
    try:
        cell = parse(text)
    except CellError:
        return {}
    return {axis.name: value_text(cell, axis.name) or "-" for axis in AXES}


def parse(text: str) -> Cell:
    """The cell of an id. Raises CellError, naming the part that is wrong and what is valid there."""
    head, *parts = text.split("/")
    if not parts:
        raise CellError(f"{text!r} is no cell id: it starts PHASE/DTYPE/, such as decode/fp16/kv:17")
    dtype, *parts = parts
    by_name = {axis.name: axis for axis in AXES[2:]}
    values: dict[str, object] = {}
    for part in parts:
        name, colon, value = part.partition(":")
        if name not in by_name or not colon:
            raise CellError(f"{part!r} in {text!r} names no axis; {_choices(name, list(by_name))}")
        if name in values:
            raise CellError(f"axis {name} stands twice in {text!r}")
        values[name] = read_value(by_name[name], value)
    if "kv" not in values:
        raise CellError(f"{text!r} lacks the axis kv, such as kv:17")
    cell = Cell(phase=head, dtype=dtype, **values)  # type: ignore[arg-type]  # each value was read by its axis
    if cell.id != text:
        raise CellError(f"{text!r} is not canonical; write {cell.id}")
    return cell


def read_value(axis: Axis, text: str) -> object:
    """The value that an id writes as `text`. Raises CellError for what is no integer where the axis takes them."""
    if axis.values is not None:
        return text
    separator = _LISTS.get(axis.name)
    try:
        numbers = tuple(int(n) for n in (text.split(separator) if separator else [text]))
    except ValueError:
        raise CellError(f"axis {axis.name} takes integers, got {text!r}") from None
    return numbers if separator else numbers[0]
