"""A model's config.json in the style of Hugging Face: its fields, looked up by any of their names and checked.

A field that is null counts as absent. Fields of `text_config` come before those beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A config that says no model; the message names the file and the field, what it holds and what was expected."""


@dataclass(frozen=True)
class Field:
    """A field that a config has: its name as it stands there, inside which object, and its value."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


@dataclass(frozen=True)
class Config:
    """The fields of one file. `source`: what messages call it; `parts`: prefix of names and fields, the first first."""

    source: str
    parts: tuple[tuple[str, Mapping[str, Any]], ...]

    def find(self, *names: str) -> Field | None:
        """The first of these fields that is there; a dot leads into an object (`sparse_config.block_size`)."""
        for prefix, fields in self.parts:
            for name in names:
                found = self._inside(fields, prefix, name)
                if found is not None:
                    return Field(prefix + name, found)
        return None

    def integer(self, *names: str, low: int = 1) -> Field | None:
        """A field that must be an integer from `low`. Raises ModelError for anything else."""
        return self._checked(
            self.find(*names),
            lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low,
            f"an integer from {low}",
        )

    def number(self, *names: str, low: float = 0.0, high: float = float("inf")) -> Field | None:
        """A field that must be a number from `low` to `high`. Raises ModelError for anything else."""
        return self._checked(
            self.find(*names),
            lambda v: isinstance(v, int | float) and not isinstance(v, bool) and low <= v <= high,
            f"a number from {low:g}" + ("" if high == float("inf") else f" to {high:g}"),
        )

    def flag(self, *names: str) -> Field | None:
        """A field that must be true or false. Raises ModelError for anything else."""
        return self._checked(self.find(*names), lambda v: isinstance(v, bool), "true or false")

    def text(self, *names: str) -> Field | None:
        """A field that must be text. Raises ModelError for anything else."""
        return self._checked(self.find(*names), lambda v: isinstance(v, str), "text")

    def texts(self, *names: str) -> Field | None:
        """A field that must be a list of texts. Raises ModelError for anything else."""
        return self._checked(
            self.find(*names),
            lambda v: isinstance(v, list) and bool(v) and all(isinstance(each, str) for each in v),
            "a list of texts",
        )

    def error(self, message: str) -> ModelError:
        """An error that names the file."""
        return ModelError(f"{self.source}: {message}")

    def _inside(self, fields: Mapping[str, Any], prefix: str, name: str) -> Any:
        outer, dot, inner = name.partition(".")
        value = fields.get(outer)
        if not dot or value is None:
            return value
        if not isinstance(value, dict):
            raise self.error(f"{prefix}{outer} must be an object, got {value!r}")
        return self._inside(value, f"{prefix}{outer}.", inner)

    def _checked(self, field: Field | None, valid: Any, expected: str) -> Field | None:
        if field is not None and not valid(field.value):
            raise self.error(f"{field.name} must be {expected}, got {field.value!r}")
        return field


def read(path: Path) -> Config:
    """The config of a file. Raises ModelError for one that cannot be read, is no JSON, or is no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: is no text in UTF-8") from None
    except (ValueError, RecursionError) as error:  # beside what is no JSON: numbers and nesting beyond Python's limits
        raise ModelError(f"{path}: is no JSON: {error}") from None
    return config_of(found, str(path))


def config_of(found: object, source: str = "config") -> Config:
    """The config of a decoded file. Raises ModelError for what is no object."""
    if not isinstance(found, dict):
        raise ModelError(f"{source}: a config is a JSON object, got {type(found).__name__}")
    text = found.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ModelError(f"{source}: text_config must be an object, got {text!r}")
    outer = ("", found)
    return Config(source, (("text_config.", text), outer) if text else (outer,))
