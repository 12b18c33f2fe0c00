"""Whether our rows hold the floors of the acceptance list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .records import Row
from .scenarios import FLOORS, Against, Floor


@dataclass(frozen=True)
class Held:
    """A floor and the ratio that was measured; None: what it compares was not."""

    floor: Floor
    ratio: float | None
    why: str = ""

    @property
    def missed(self) -> bool:
        """Whether it was measured and is below."""
        return self.ratio is not None and self.ratio < self.floor.least

    @property
    def words(self) -> str:
        """What the table prints."""
        if self.ratio is None:
            return f"{self.floor.words}: not measured ({self.why})"
        return f"{self.floor.words}: {'MISSED' if self.missed else 'held'}, {self.ratio:.3g}x"


def held(rows: Sequence[Row], ours: str) -> list[Held]:
    """All floors of the scenarios that were run; `ours`: the adapter that must hold them. A peer's rate is the best of
    all adapters whose names begin with its own. Tiny rows hold none: they are no measurements.
    """
    by_place = {(row.scenario, row.adapter): row for row in rows if not row.tiny}
    scenarios = {row.scenario for row in rows if not row.tiny}
    return [_held(floor, by_place, ours) for floor in FLOORS if floor.scenario in scenarios]


def _held(floor: Floor, rows: Mapping[tuple[str, str], Row], ours: str) -> Held:
    mine = _timed(rows.get((floor.scenario, ours)))
    if mine is None:
        return Held(floor, None, f"no accepted times of {ours}")
    if floor.against is Against.COPY:
        return Held(floor, mine.best / mine.ceiling)
    if floor.against is Against.SCENARIO:
        others = [_timed(rows.get((floor.other, ours)))]
    else:
        peers = [name for scenario, name in rows if scenario == floor.scenario and name.startswith(floor.other)]
        others = [_timed(rows[floor.scenario, name]) for name in peers]
    ratios = [_ratio(floor, mine, other) for other in others if other is not None]
    return Held(floor, min(ratios)) if ratios else Held(floor, None, f"no accepted times of {floor.other}")


def _ratio(floor: Floor, mine: Row, other: Row) -> float:
    """How much faster ours is; of a floor that asks for both, the worse of eager and replayed."""
    if floor.time:
        return (other.work / other.best) / (mine.work / mine.best)
    if not floor.replays:
        return mine.best / other.best
    pairs = [(mine.rate(), other.rate())]
    if mine.replayed and other.replayed:
        pairs.append((mine.rate(replayed=True), other.rate(replayed=True)))
    return min(own / theirs for own, theirs in pairs)


def _timed(row: Row | None) -> Row | None:
    return row if row is not None and row.accepted and row.eager is not None else None
