"""Gate layout: what must not matter does not. Poison in every slot that no row attends, in stale page-table columns
and in the workspace must leave every output bit as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.formats import FORMATS
from sacts.reference.forward import Inputs
from sacts.reference.spec import DType
from sacts.reports.records import Finding, Gate

from ..build import Problem
from ..launch import CLEAN, Launcher, Observed, Surroundings, place_of

Ints = NDArray[np.int64]

POISONS: dict[str, Callable[[DType], float]] = {
    "NaN": lambda dtype: np.nan,
    "Inf": lambda dtype: np.inf,
    "the largest finite value": lambda dtype: FORMATS[dtype].max,
}
_BYTES = {"NaN": 0xFF, "Inf": 0x7F, "the largest finite value": 0x00}


@dataclass(frozen=True)
class _Slots:
    """Poisonable places: which [n] (0: K, 1: V), and slot [n, 3] as (live page, offset, KV head)."""

    which: Ints
    slot: Ints

    def take(self, part: slice) -> _Slots:
        return _Slots(self.which[part], self.slot[part])

    def __len__(self) -> int:
        return len(self.which)


def _slots(problem: Problem) -> _Slots:
    slot = np.argwhere(~problem.needed)
    return _Slots(np.repeat([0, 1], len(slot)), np.concatenate((slot, slot)))


def _poison(inputs: Inputs, slots: _Slots, value: float) -> Inputs:
    caches = []
    for which, cache in enumerate((inputs.k, inputs.v)):
        data = cache.data.copy()
        page, offset, head = slots.slot[slots.which == which].T
        data[page, offset, head] = value
        caches.append(replace(cache, data=data))
    return inputs._replace(k=caches[0], v=caches[1])


def judge_layout(launcher: Launcher, problem: Problem, inputs: Inputs, clean: Observed) -> Finding | None:
    """Requirement: out and lse keep their bits whatever stands where no row attends."""
    for shift, (name, value) in enumerate(POISONS.items(), start=1):
        poisoned = value(problem.spec.dtype)
        surroundings = Surroundings(workspace_byte=_BYTES[name], stale_shift=shift, filler=poisoned)
        observed = launcher(problem, _poison(inputs, _slots(problem), poisoned), surroundings=surroundings)
        if changed := _changed(problem, clean, observed):
            source = _localise(launcher, problem, inputs, clean, poisoned, surroundings)
            return Finding(Gate.LAYOUT, changed, f"{changed}: its bits change when {name} stands in {source}")
    return None


def _changed(problem: Problem, clean: Observed, observed: Observed) -> str | None:
    """The first output row whose bits differ, or None."""
    differs = (clean.out_bits != observed.out_bits).any(axis=-1)
    if clean.lse_bits is not None and observed.lse_bits is not None:
        differs |= clean.lse_bits != observed.lse_bits
    if not differs.any():
        return None
    token, head = np.unravel_index(int(differs.argmax()), differs.shape)
    return place_of(problem.spec, int(token), int(head))


def _localise(
    launcher: Launcher, problem: Problem, inputs: Inputs, clean: Observed, value: float, surroundings: Surroundings
) -> str:
    """Name the one place whose content reaches the output, by halving: about log2(slots) launches."""

    def matters(slots: _Slots, around: Surroundings = CLEAN) -> bool:
        observed = launcher(problem, _poison(inputs, slots, value), surroundings=around)
        return _changed(problem, clean, observed) is not None

    slots = _slots(problem)
    none = slots.take(slice(0))
    if matters(none, Surroundings(workspace_byte=surroundings.workspace_byte)):
        return "the workspace"
    if matters(none, Surroundings(filler=surroundings.filler)):
        return "the room between the pages of a strided cache"
    if matters(none, Surroundings(stale_shift=surroundings.stale_shift)):
        return "stale columns of the page table (other pages)"
    while len(slots) > 1:
        half = len(slots) // 2
        first, second = slots.take(slice(half)), slots.take(slice(half, None))
        if matters(first):
            slots = first
        elif matters(second):
            slots = second
        else:
            return f"{len(slots)} unattended slots together"
    if not matters(slots):
        return "unattended slots and surroundings together"
    return f"{'KV'[int(slots.which[0])]} of {describe(problem, *map(int, slots.slot[0]))}"


def describe(problem: Problem, page: int, offset: int, head: int) -> str:
    """Whose a physical slot is, in words."""
    owner, position = int(problem.slot_request[page, offset]), int(problem.slot_token[page, offset])
    where = f"physical page {int(problem.pages[page])} offset {offset}, KV head {head}"
    if owner < 0:
        return f"{where} (no request's page)"
    tail = position >= problem.spec.seq_lens[owner]
    return f"{where} (request {owner}, token {position}, {'beyond T' if tail else 'not attended'})"
