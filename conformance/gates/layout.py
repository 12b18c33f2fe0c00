"""Gate layout: what must not matter does not. Poison in every slot that no row attends, in stale page-table columns,
between the pages of a view and in the workspace must leave every output bit as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.formats import FORMATS
from sacts.reference.forward import Inputs
from sacts.reference.spec import DType
from sacts.reports.records import Finding, Gate

from ..build import Problem
from ..contract import CLEAN, STALE_VALUE, Surroundings, place_of
from ..draw import Draw
from ..launch import Launcher, Observed

Ints = NDArray[np.int64]

KINDS = ("NaN", "+Inf", "-Inf", "the largest finite value", "an ordinary value")
ORDINARY = KINDS.index("an ordinary value")
_WORDS = np.array([0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x44800000])  # the kinds in FP32
TURN = 61  # words of junk before they repeat: prime, so that they fall on every place of a row
LAUNCHES = 2


@dataclass(frozen=True)
class Poison:
    """Poisonable places: which [n] (0: K, 1: V), slot [n, 3] as (live page, offset, KV head), kind [n] in KINDS."""

    which: Ints
    slot: Ints
    kind: Ints

    def take(self, part: slice) -> Poison:
        """A part of them."""
        return Poison(self.which[part], self.slot[part], self.kind[part])

    def __len__(self) -> int:
        return len(self.which)


def poison(problem: Problem, launch: int) -> Poison:
    """Every slot that no row attends: a kind drawn for it in one of two launches, an ordinary value in the other."""
    slot = np.argwhere(~problem.needed)
    kind = _kinds(problem.draw("poison"), 2 * len(slot), launch)
    return Poison(np.repeat([0, 1], len(slot)), np.concatenate((slot, slot)), kind)


def _kinds(draw: Draw, n: int, launch: int) -> Ints:
    """n kinds; each is ordinary in exactly one of the launches 0 and 1, so that a finite and a harsh value meet in
    every place, and a value that changes in place shows.
    """
    kind, turn = np.divmod(draw.permutation(n) % (2 * ORDINARY), 2)
    return np.where(turn == launch, kind, ORDINARY)


def poisoned(inputs: Inputs, places: Poison, dtype: DType) -> Inputs:
    """The values with poison in these places; an ordinary value is what the probe put there."""
    largest = FORMATS[dtype].max
    values = np.array([np.nan, np.inf, -np.inf, largest, 0.0])
    caches = []
    for which, cache in enumerate((inputs.k, inputs.v)):
        data = cache.data.copy()
        mine = (places.which == which) & (places.kind != ORDINARY)
        page, offset, head = places.slot[mine].T
        data[page, offset, head] = values[places.kind[mine]][:, None]
        caches.append(replace(cache, data=data))
    return inputs._replace(k=caches[0], v=caches[1])


def surroundings(problem: Problem, launch: int) -> Surroundings:
    """Junk of all kinds in the workspace, between pages and in scales that no row needs, and other pages in stale
    columns.
    """
    kind = _kinds(problem.draw("surroundings"), TURN, launch)
    filler = np.array([np.nan, np.inf, -np.inf, FORMATS[problem.spec.dtype].max, STALE_VALUE])[kind]
    return Surroundings(
        stale_shift=launch + 1,
        filler=tuple(filler.tolist()),
        workspace_words=tuple(_WORDS[kind].tolist()),
        scales=tuple(filler.tolist()),
    )


def launch_poisoned(launcher: Launcher, problem: Problem, inputs: Inputs, launch: int) -> Observed:
    """One launch with poison everywhere that must not matter."""
    values = poisoned(inputs, poison(problem, launch), problem.spec.dtype)
    return launcher(problem, values, surroundings=surroundings(problem, launch))


def judge_layout(launcher: Launcher, problem: Problem, inputs: Inputs, clean: Observed) -> Finding | None:
    """Requirement: out and lse keep their bits whatever stands where no row attends."""
    for launch in range(LAUNCHES):
        observed = launch_poisoned(launcher, problem, inputs, launch)
        if row := changed(clean, observed):
            where = place_of(problem.spec, *row)
            source = _localise(launcher, problem, inputs, clean, launch)
            return Finding(Gate.LAYOUT, where, f"{where}: its bits change when {source}")
    return None


def changed(one: Observed, other: Observed) -> tuple[int, int] | None:
    """Token and query head of the first output row whose bits differ, or None."""
    differs = (one.out_bits != other.out_bits).any(axis=-1)
    if one.lse_bits is not None and other.lse_bits is not None:
        differs |= one.lse_bits != other.lse_bits
    if not differs.any():
        return None
    token, head = np.unravel_index(int(differs.argmax()), differs.shape)
    return int(token), int(head)


def _localise(launcher: Launcher, problem: Problem, inputs: Inputs, clean: Observed, launch: int) -> str:
    """Name the one place whose content reaches the output, by halving: about log2(slots) launches."""

    def matters(places: Poison, around: Surroundings = CLEAN) -> bool:
        values = poisoned(inputs, places, problem.spec.dtype)
        return changed(clean, launcher(problem, values, surroundings=around)) is not None

    places, junk = poison(problem, launch), surroundings(problem, launch)
    none = places.take(slice(0))
    if matters(none, Surroundings(workspace_words=junk.workspace_words)):
        return "other junk stands in the workspace"
    if matters(none, Surroundings(filler=junk.filler)):
        return "other junk stands in the room between the pages of a strided cache"
    if matters(none, Surroundings(stale_shift=junk.stale_shift)):
        return "other pages stand in stale columns of the page table"
    if matters(none, Surroundings(scales=junk.scales)):
        return "other scales stand where no row attends what they belong to"
    while len(places) > 1:
        half = len(places) // 2
        first, second = places.take(slice(half)), places.take(slice(half, None))
        if matters(first):
            places = first
        elif matters(second):
            places = second
        else:
            return f"poison stands in {len(places)} unattended slots together"
    if not matters(places):
        return "poison stands in unattended slots and surroundings together"
    name = f"{'KV'[int(places.which[0])]} of {describe(problem, *map(int, places.slot[0]))}"
    return f"{KINDS[int(places.kind[0])]} stands in {name}"


def describe(problem: Problem, page: int, offset: int, head: int) -> str:
    """Whose a physical slot is, in words."""
    owner, position = int(problem.slot_request[page, offset]), int(problem.slot_token[page, offset])
    where = f"physical page {int(problem.pages[page])} offset {offset}, KV head {head}"
    if owner < 0:
        return f"{where} (no request's page)"
    tail = position >= problem.spec.seq_lens[owner]
    return f"{where} (request {owner}, token {position}, {'beyond T' if tail else 'not attended'})"
