"""Levels of determinism of d_q, d_k and d_v, measured like those of out and lse. Atomic additions come in any order:
without a promise two runs may lie as far apart as that can bring them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sacts.matrices.cell import Cell
from sacts.reference.edges import row_kv_heads
from sacts.reference.forward import edges
from sacts.reference.spec import Hints

from .adapter import Determinism
from .backward_launch import Call, ObservedGradients, launch_backward
from .build import Problem
from .contract import place_of
from .conventions import problem_for
from .determinism import LEVELS, SPLITS, busy, promised
from .gates.gradients import Bounds, bounds_of
from .launch import Launcher
from .messages import Measurement
from .probes.gradients import GradientCopy, random_copy
from .relations import Variant

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

OUTPUTS = ("d_q", "d_k", "d_v")


@dataclass(frozen=True)
class _Run:
    """What one launch gave of an output, under the original's names: values [n, dim] of the rows `at` [n]."""

    at: Ints
    values: Array


def measure(launcher: Launcher, cell: Cell, replicate: int, repeats: int) -> list[Measurement]:
    """Every level but that of other processes, on the random values of a cell; nothing for a backend without backward,
    nor of branches.

    Run to run, the range of an element is held to `Allowed.run_to_run`; at the other levels, where a backend may also
    tile otherwise, to the width of its interval.
    """
    if not launcher.backend.has_backward or cell.branches > 1:
        return []
    copy, first = _first(launcher, cell, replicate)
    problem, numerics = copy.problem, launcher.backend.numerics(copy.problem.spec.dtype, Hints(num_splits=max(SPLITS)))
    bounds = bounds_of(problem, copy.inputs, copy.call, numerics)
    found = []
    for level, variants in LEVELS.items():
        with busy(launcher.device) if level == Determinism.RUN_TO_RUN else nullcontext():
            runs = [(v, _launched(launcher, copy.call, v)) for v in variants(problem, copy.inputs, repeats)]
        for output in OUTPUTS:
            parts = [_under_original_names(problem, variant, output, seen) for variant, seen in runs]
            wants = promised(launcher.backend, output, level)
            found.append(_measured(problem, bounds, level, output, getattr(first, output), parts, wants))
    return found


def digests(launcher: Launcher, cell: Cell, replicate: int) -> dict[str, str]:
    """A hash of the bits of each gradient, to be compared with that of another process."""
    if not launcher.backend.has_backward or cell.branches > 1:
        return {}
    _, first = _first(launcher, cell, replicate)
    return {name: blake2b(getattr(first, name).tobytes(), digest_size=16).hexdigest() for name in OUTPUTS}


def _first(launcher: Launcher, cell: Cell, replicate: int) -> tuple[GradientCopy, ObservedGradients]:
    copy = random_copy(problem_for(cell, replicate, launcher.backend.capabilities), launcher.backend)
    return copy, launch_backward(launcher, copy.problem, copy.inputs, copy.call)


def _launched(launcher: Launcher, call: Call, variant: Variant) -> ObservedGradients:
    """The variant, fed what the original is, under its own names."""
    fields = {name: getattr(call, name)[variant.tokens] for name in ("d_out", "d_lse", "out", "lse")}
    return launch_backward(launcher, variant.problem, variant.inputs, replace(call, **fields), hints=variant.hints)


def _under_original_names(problem: Problem, variant: Variant, output: str, seen: ObservedGradients) -> _Run:
    """Of d_k and d_v the slots that no other request of the original adds to."""
    spec = problem.spec
    if output == "d_q":
        at = (variant.tokens[:, None] * spec.num_qo_heads + np.arange(spec.num_qo_heads)).ravel()
        return _Run(at, seen.d_q.reshape(len(at), -1))
    token, own, _ = _attended(problem)
    tokens, theirs, keys = _attended(variant.problem)
    request = np.asarray(spec.token_request, np.int64)[variant.tokens[tokens]]
    here = _slots(problem, request, keys)
    others = np.unique(own[~np.isin(token, variant.tokens)])
    _, where = np.unique(here, return_index=True)
    where = where[~np.isin(here[where], others)]
    values: Array = getattr(seen, output)
    return _Run(here[where], values.reshape(-1, values.shape[-1])[theirs[where]])


def _attended(problem: Problem) -> tuple[Ints, Ints, tuple[Ints, Ints]]:
    """Of each edge: its token, its slot among the live ones, and (KV head, logical position)."""
    spec = problem.spec
    row, t, _ = edges(spec, problem.candidates)
    token, head = row // spec.list_heads, row_kv_heads(spec, row)
    return token, _slots(problem, np.asarray(spec.token_request, np.int64)[token], (head, t)), (head, t)


def _slots(problem: Problem, request: Ints, keys: tuple[Ints, Ints]) -> Ints:
    spec, (head, t) = problem.spec, keys
    page, offset = np.divmod(t, spec.page_size)
    live = np.searchsorted(problem.pages, problem.table.table[request, page])
    slots: Ints = (live * spec.page_size + offset) * spec.num_kv_heads + head
    return slots


def _measured(
    problem: Problem, bounds: Bounds, level: str, output: str, first: Array, runs: list[_Run], wants: bool
) -> Measurement:
    values = first.reshape(-1, first.shape[-1])
    low, high, seen = values.copy(), values.copy(), [{row.tobytes()} for row in values]
    for run in runs:
        low[run.at], high[run.at] = np.minimum(low[run.at], run.values), np.maximum(high[run.at], run.values)
        for at, row in zip(run.at.tolist(), np.ascontiguousarray(run.values), strict=True):
            seen[at].add(row.tobytes())
    of = bounds.allowed[output]
    width = of.run_to_run if level == Determinism.RUN_TO_RUN else of.high - of.low
    with np.errstate(invalid="ignore", divide="ignore"):
        use = np.where(high > low, (high - low) / width.reshape(values.shape), 0.0)
    counts = np.array([len(each) for each in seen])
    return Measurement(
        level=str(level),
        output=output,
        launches=len(runs) + 1,
        distinct=int(counts.max(initial=1)),
        range_use=float(np.nan_to_num(use, nan=0.0, posinf=1e30).max(initial=0.0)),
        place=_place(problem, output, int(np.argmax(counts > 1))) if (counts > 1).any() else "",
        promised=wants,
    )


def _place(problem: Problem, output: str, row: int) -> str:
    spec = problem.spec
    if output == "d_q":
        return place_of(spec, *divmod(row, spec.num_qo_heads))
    slot, head = divmod(row, spec.num_kv_heads)
    page, offset = divmod(slot, spec.page_size)
    owner, token = int(problem.slot_request[page, offset]), int(problem.slot_token[page, offset])
    return f"request {owner}, token {token}, KV head {head}"
