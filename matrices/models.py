"""The part of the matrix that a model triggers, and which fields of its config decided that.

A decision ties one axis. A cell that breaks it is brought to the model's value where every layer of the model has it
(heads, head dimension, dtype, soft cap, sinks), and left out where the model has no such thing (ALiBi beside RoPE).
What no field decides (pages, splits, tiles, which entries are selected) is the serving engine's, and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import configs, filters
from .axes import AXES
from .cell import Cell, CellError, read_value
from .configs import Config
from .decisions import RULES, Decision, Refusal


@dataclass(frozen=True)
class Model:
    """What a config says: its `model_type`, one decision for each axis that it ties, and what has no cell."""

    name: str
    decisions: tuple[Decision, ...]
    refusals: tuple[Refusal, ...]

    @property
    def undecided(self) -> tuple[str, ...]:
        """Axes that no field decides."""
        tied = {decision.axis for decision in self.decisions}
        return tuple(axis.name for axis in AXES if axis.name not in tied)


@dataclass(frozen=True)
class Subset:
    """The cells that a model triggers, in the order of the tier; `left_out`: how many cells of the tier are not among
    them, by what forbade them; `twice`: how many became a cell that was there already.
    """

    cells: tuple[Cell, ...]
    left_out: dict[str, int]
    twice: int


def load(path: Path) -> Model:
    """The model of a config.json. Raises ModelError."""
    return model_of(configs.read(path))


def model_of(config: Config) -> Model:
    """The model of a config. Raises ModelError for a field that is missing or has a wrong value."""
    found = [each for rule in RULES for each in rule(config)]
    name = config.text("model_type")
    return Model(
        name=name.value if name else "no model_type",
        decisions=tuple(each for each in found if isinstance(each, Decision)),
        refusals=tuple(each for each in found if isinstance(each, Refusal)),
    )


def subset(model: Model, cells: Sequence[Cell]) -> Subset:
    """The cells of a tier that the model triggers, each once."""
    refused = [refusal.message for refusal in model.refusals if refusal.whole]
    if refused:
        return Subset((), {message: len(cells) for message in refused[:1]}, 0)
    kept, left_out = [], Counter[str]()
    rules = [(decision, filters.parse(decision.where)) for decision in model.decisions]
    for cell in cells:
        breaks = [decision for decision, holds in rules if not holds(cell)]
        forbidden = next((decision for decision in breaks if not decision.brings), None)
        if forbidden:
            left_out[f"{forbidden.where}: {forbidden.because}"] += 1
            continue
        try:
            kept.append(replace(cell, **{each.axis: _read(each) for each in breaks}))  # type: ignore[arg-type]  # values by axis name
        except CellError as error:
            left_out[str(error)] += 1
    once = tuple(dict.fromkeys(kept))
    return Subset(once, dict(left_out), len(kept) - len(once))


def _read(decision: Decision) -> object:
    return read_value(next(axis for axis in AXES if axis.name == decision.axis), decision.brings)
