"""What finds a fault: today's acceptance rules and the suite's gates, side by side on one launch: docs/detection.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sacts.matrices.cell import Cell
from sacts.reference.bounds import Expected, expected
from sacts.reference.formats import round_to
from sacts.reference.forward import Inputs, forward
from sacts.reference.generic_bounds import generic_rows
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType
from sacts.reports.records import PROVES

from .adapter import Backend
from .build import Problem, build
from .gates.intervals import largest, lse_use
from .gates.witnesses import used
from .launch import Launcher
from .probes.copies import copies
from .probes.inputs import RANDOM

Array = NDArray[np.float64]

WITNESS = "witness"
FLAT = 2.0**-6  # q of the flat inputs: logits are nearly equal


class Seen(NamedTuple):
    """One launch beside the truth: out and its reference [tokens, heads, d]; lse and its reference; `plain`: what a
    straightforward evaluation in the low precision gives.
    """

    dtype: DType
    out: Array
    right: Array
    lse: Array
    right_lse: Array
    plain: Array


def _allclose(seen: Seen) -> bool:
    return bool((np.abs(seen.out - seen.right) <= 1e-2 + 1e-2 * np.abs(seen.right)).all())


def _difference(seen: Seen) -> float:
    """DeepGEMM's calc_diff."""
    x, y = seen.out, seen.right
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def _twice(seen: Seen, more: float = 0.0) -> bool:
    """FlashAttention's rule: at most twice the error of a plain evaluation in the same precision."""
    allowed = 2 * np.abs(seen.plain - seen.right).max() + more
    return bool(np.abs(seen.out - seen.right).max() <= allowed)


def _twice_with_slack(seen: Seen) -> bool:
    right = round_to(seen.right, seen.dtype)
    there_and_back = round_to(round_to(right + 0.3, seen.dtype) - 0.3, seen.dtype)
    return _twice(seen, 2 * float(np.abs(there_and_back - right).max()))


def _flash_mla(seen: Seen) -> bool:
    error, lse_error = np.abs(seen.out - seen.right), np.abs(seen.lse - seen.right_lse)
    near = (error < 8e-4) | (error / (np.abs(seen.right) + 1e-6) < 2.01 / 128)
    near_lse = (lse_error < 1e-6) | (lse_error / (np.abs(seen.right_lse) + 1e-6) < 8.01 / 65536)
    return bool(near.all() and near_lse.all() and abs(_difference(seen)) <= 5e-6)


RULES: dict[str, Callable[[Seen], bool]] = {
    "allclose 1e-2": _allclose,
    "calc_diff 1e-3": lambda seen: _difference(seen) < 1e-3,
    "calc_diff 1e-5": lambda seen: _difference(seen) < 1e-5,
    "2x": _twice,
    "2x + atol": _twice_with_slack,
    "FlashMLA out + lse": _flash_mla,
}
GATES = ("A (out)", "A + B + C (out)", "ours, out + lse")


@dataclass(frozen=True)
class Trial:
    """Which rules and gates rejected one launch; `family`: Gaussian, flat, or `WITNESS`, whose probes are named."""

    fault: str
    family: str
    rejected: frozenset[str]


def plain_evaluation(problem: Problem, inputs: Inputs) -> Array:
    """Attention by three roundings to the dtype (logits, P, out), as a baseline in low precision computes it."""
    spec = problem.spec
    out = np.zeros((spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo))
    for row in generic_rows(spec, inputs, problem.table, problem.candidates, Numerics.default(spec.dtype)):
        logits = round_to(np.log(row.weights) + row.lse, spec.dtype)
        weights = np.exp(logits - logits.max())
        kept = row.mass / row.weights  # 1 / (1 - p) where dropout keeps the edge, 1 without dropout
        p = round_to(weights / weights.sum() * kept, spec.dtype)
        out[row.token, row.head] = round_to(p @ row.v, spec.dtype)
    return out


def judged(problem: Problem, inputs: Inputs, adapter: object, numerics: Numerics) -> frozenset[str]:
    """The rules and gates that reject what an adapter returns for generic inputs."""
    observed = Launcher(Backend(adapter), "cpu")(problem, inputs)
    assert observed.lse is not None
    spec, where = problem.spec, (inputs, problem.table, problem.candidates)
    right = forward(spec, *where)
    seen = Seen(spec.dtype, observed.out, right.out, observed.lse, right.lse, plain_evaluation(problem, inputs))
    rejected = {name for name, accepts in RULES.items() if not accepts(seen)}
    allowed = expected(spec, *where, numerics)
    if _outside(allowed, observed.out):
        rejected |= set(GATES)
    if (np.abs(observed.lse - allowed.lse) > allowed.lse_bound).any():
        rejected.add(GATES[2])
    for row in generic_rows(spec, *where, numerics):
        out, lse = observed.out[row.token, row.head], float(observed.lse[row.token, row.head])
        if not row.inside(out, None) or row.filtered(out).ratios().max() > 1:
            rejected |= set(GATES[1:])
        if abs(lse - row.lse) > row.lse_bound:
            rejected.add(GATES[2])
    return frozenset(rejected)


def witnessed(problem: Problem, fault: str, seed: int, adapter: FaultyAdapter) -> frozenset[str]:
    """The witness probes that reject a fault; it strikes one request of each copy."""
    found = set()
    for copy in copies(problem, adapter.numerics(adapter.make(fault, 0, seed))):
        if "random" in copy.judged:
            continue
        faulty = adapter.make(fault, seed % copy.problem.spec.num_requests, seed)
        observed = Launcher(Backend(faulty), "cpu")(copy.problem, copy.inputs)
        found |= {probe for probe in copy.judged if used(copy, observed, probe) > 1}
        if largest(lse_use(copy.expected, observed)) > 1:
            found.add(next(iter(copy.judged)))
    return frozenset(found)


def _outside(allowed: Expected, out: Array) -> bool:
    return bool(((out < allowed.out_lo) | (out > allowed.out_hi)).any())


class FaultyAdapter(NamedTuple):
    """How to make an adapter with a fault: its name, the request that has it, and a seed for the place."""

    make: Callable[[str, int, int], Any]
    numerics: Callable[[Any], Numerics]


def trials(cells: Mapping[str, Cell], count: int, adapter: FaultyAdapter) -> Iterator[Trial]:
    """`count` launches of each fault ("": none) on Gaussian and on flat inputs, the fault in one request of each;
    `cells`: the cell of each fault.
    """
    for fault, cell in cells.items():
        for seed in range(count):
            problem = build(cell, seed)
            faulty = adapter.make(fault, seed % problem.spec.num_requests, seed)
            inputs = RANDOM.inputs(problem)
            for family, q in (("Gaussian", inputs.q), ("flat", inputs.q * FLAT)):
                rejected = judged(problem, inputs._replace(q=q), faulty, adapter.numerics(faulty))
                yield Trial(fault, family, rejected)
            yield Trial(fault, WITNESS, witnessed(problem, fault, seed, adapter))


def table(found: Iterable[Trial]) -> str:
    """Share of launches rejected, in %, Gaussian / flat: a Markdown table with one row a fault, in their order."""
    by_fault: dict[str, dict[str, list[frozenset[str]]]] = {}
    for trial in found:
        by_fault.setdefault(trial.fault, {}).setdefault(trial.family, []).append(trial.rejected)
    columns = (*RULES, *GATES)
    lines = [f"| fault | {' | '.join(columns)} | {WITNESS} |", f"|---|{'---|' * len(columns)}---|"]
    for fault, families in by_fault.items():
        witness = families.pop(WITNESS)
        shares = [
            "/".join(f"{100 * np.mean([column in each for each in rejected]):.0f}" for rejected in families.values())
            for column in columns
        ]
        lines.append(f"| {fault or '**correct kernel**'} | {' | '.join(shares)} | {_best(witness)} |")
    return "\n".join(lines)


def _best(rejected: list[frozenset[str]]) -> str:
    """The probe that rejects most often, the first in the order of blame, and its share in %."""
    share = {probe: np.mean([probe in each for each in rejected]) for probe in PROVES}
    best = max(share, key=lambda probe: share[probe])
    return f"{best} {100 * share[best]:.0f}" if share[best] else "0"
