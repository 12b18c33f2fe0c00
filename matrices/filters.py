"""Filters on axes, `phase=decode and splits>1`: `=` and `!=` compare a value as ids write it, `<`, `<=`, `>`, `>=`
numbers (of a list, its largest); `and`, `or`, `not` and parentheses as usual.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from difflib import get_close_matches

from .axes import AXES, Axis
from .cell import Cell, value_text

Filter = Callable[[Cell], bool | None]  # of what lacks an axis, as a cell that is being made does: None, both may be
Comparison = tuple[Axis, str, str]  # axis, sign, value as text

_TOKEN = re.compile(r"\s*(?:(?P<mark>[()])|(?P<word>[A-Za-z0-9_.+:-]+)|(?P<sign><=|>=|!=|=|<|>))")
_ORDER: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_BY_NAME = {axis.name: axis for axis in AXES}


class FilterError(ValueError):
    """A filter that cannot be read; the message says where, and what is valid there."""


def parse(text: str) -> Filter:
    """The filter of an expression; an empty one lets everything through. Raises FilterError."""
    return _read(text)[0]


def compared(text: str) -> tuple[Comparison, ...]:
    """The comparisons of an expression, in its order. Raises FilterError."""
    return _read(text)[1]


def _read(text: str) -> tuple[Filter, tuple[Comparison, ...]]:
    if not text.strip():
        return lambda cell: True, ()
    reader = _Reader(text)
    found = reader.either()
    if reader.token:
        raise FilterError(f"{reader.here()} is left over in {text!r}: join comparisons by and, or")
    return found, tuple(reader.compared)


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.token = text, 0, ""
        self.compared: list[Comparison] = []
        self.advance()

    def here(self) -> str:
        return f"{self.token!r}" if self.token else "the end"

    def advance(self) -> str:
        """Step over the token; returns it."""
        before, rest = self.token, self.text[self.at :]
        found = _TOKEN.match(rest)
        if found is None and rest.strip():
            raise FilterError(f"cannot read {rest.strip()!r} in {self.text!r}")
        self.token = found.group().strip() if found else ""
        self.at += found.end() if found else len(rest)
        return before

    def either(self) -> Filter:
        """a or b"""
        left = self.both()
        while self.token == "or":
            self.advance()
            left = _or(left, self.both())
        return left

    def both(self) -> Filter:
        """a and b"""
        left = self.one()
        while self.token == "and":
            self.advance()
            left = _and(left, self.one())
        return left

    def one(self) -> Filter:
        """not a, (a), or a comparison"""
        if self.token == "not":
            self.advance()
            return _not(self.one())
        if self.token == "(":
            self.advance()
            inside = self.either()
            if self.token != ")":
                raise FilterError(f"expected ) before {self.here()} in {self.text!r}")
            self.advance()
            return inside
        return self.comparison()

    def comparison(self) -> Filter:
        name = self.advance()
        if name not in _BY_NAME:
            near = get_close_matches(name, _BY_NAME, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FilterError(f"{name!r} in {self.text!r} is no axis; {hint}valid: {', '.join(_BY_NAME)}")
        sign = self.advance()
        if sign not in (*_ORDER, "=", "!="):
            raise FilterError(
                f"expected =, !=, <, <=, > or >= after {name} in {self.text!r}, got {sign or 'the end'!r}"
            )
        value = self.advance()
        self.compared.append((_BY_NAME[name], sign, value))
        if sign in _ORDER:
            return _ordered(_BY_NAME[name], _ORDER[sign], value)
        return _equal(_BY_NAME[name], value, wanted=sign == "=")


def _or(left: Filter, right: Filter) -> Filter:
    def holds(cell: Cell) -> bool | None:
        both = left(cell), right(cell)
        return True if True in both else None if None in both else False

    return holds


def _and(left: Filter, right: Filter) -> Filter:
    def holds(cell: Cell) -> bool | None:
        both = left(cell), right(cell)
        return False if False in both else None if None in both else True

    return holds


def _not(inner: Filter) -> Filter:
    def holds(cell: Cell) -> bool | None:
        found = inner(cell)
        return None if found is None else not found

    return holds


def _equal(axis: Axis, value: str, *, wanted: bool) -> Filter:
    if axis.values is not None and value not in axis.values:
        near = get_close_matches(value, axis.values, n=1, cutoff=0.5)
        hint = f"did you mean {str(near[0])!r}? " if near else ""
        raise FilterError(f"axis {axis.name} has no value {value!r}; {hint}valid: {', '.join(axis.values)}")
    return lambda cell: (value_text(cell, axis.name) == value) is wanted if hasattr(cell, axis.name) else None


def _ordered(axis: Axis, compare: Callable[[int, int], bool], value: str) -> Filter:
    if axis.values is not None:
        raise FilterError(f"axis {axis.name} has no order: compare it by = or !=")
    if not re.fullmatch(r"-?\d+", value):
        raise FilterError(f"axis {axis.name} is compared with a number, got {value or 'nothing'!r}")

    def holds(cell: Cell) -> bool | None:
        if not hasattr(cell, axis.name):
            return None
        found = getattr(cell, axis.name)
        largest = max(found, default=0) if isinstance(found, tuple) else found
        return compare(largest, int(value))

    return holds
