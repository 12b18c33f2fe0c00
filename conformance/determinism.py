"""Determinism as named levels: what a backend promises for each output, measured by launching the same call in other
ways. Without a promise a result may vary within its bound; with one its bits may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sacts.matrices.cell import Cell
from sacts.reference.bounds import Expected, expected
from sacts.reference.forward import Inputs
from sacts.reference.numerics import Numerics
from sacts.reference.spec import CandidateKind, DType, Hints, Route, Schedule

from .adapter import Backend, Consumes, Determinism
from .build import Problem
from .contract import place_of
from .conventions import problem_for
from .launch import Launcher, Observed
from .messages import Measurement
from .probes.applicability import terms_of
from .probes.inputs import RANDOM
from .relations import RELATIONS, Variant, chosen, heads_reversed, hinted, relabelled, repeated, scaled, shuffled

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

SPLITS, TILES = (1, 2, 3, 5), (16, 32, 128)  # of the schedule, each varied alone
LOAD = 2048  # side of the matrices that keep a GPU busy while it is measured


def _repeats(problem: Problem, inputs: Inputs, repeats: int) -> Iterator[Variant]:
    for _ in range(repeats):
        yield repeated(problem, inputs)


def _schedules(problem: Problem, inputs: Inputs, repeats: int) -> Iterator[Variant]:
    for splits in SPLITS:
        yield hinted(problem, inputs, replace(problem.hints, num_splits=splits))
    for tile in TILES:
        yield hinted(problem, inputs, replace(problem.hints, kv_tile=tile))
    for schedule in Schedule:
        yield hinted(problem, inputs, replace(problem.hints, schedule=schedule))
    for route in Route:
        yield hinted(problem, inputs, replace(problem.hints, route=route))


def _batches(problem: Problem, inputs: Inputs, repeats: int) -> Iterator[Variant]:
    requests = range(problem.num_calls)
    yield chosen(problem, inputs, requests[::-1])
    for request in requests:
        if problem.spec.qo_lens[request * problem.branches]:
            yield chosen(problem, inputs, [request])


def _placements(problem: Problem, inputs: Inputs, repeats: int) -> Iterator[Variant]:
    for replicate in range(repeats):
        yield relabelled(problem, inputs, replicate)
        if problem.spec.candidate_kind is not CandidateKind.SEQUENCE:
            yield shuffled(problem, inputs, replicate)


def _exact(problem: Problem, inputs: Inputs, repeats: int) -> Iterator[Variant]:
    subnormal = problem.spec.dtype is DType.FP16  # small outputs may be
    if "epilogue" not in terms_of(problem.spec) and not subnormal:
        yield scaled(problem, inputs)


def _heads(problem: Problem, inputs: Inputs, repeats: int) -> Iterator[Variant]:
    if not terms_of(problem.spec) & {"alibi", "buckets", "sink_logits", "dropout"}:  # numbers of the heads themselves
        yield heads_reversed(problem, inputs)


EXACT = "V scaled by 2"  # equal bits, whatever a backend promises: GATES.md section 6
HEADS = "heads reversed"  # equal bits where batch-invariance is promised: what else a launch computes may not matter
LEVELS: dict[str, Callable[[Problem, Inputs, int], Iterator[Variant]]] = {
    Determinism.RUN_TO_RUN: _repeats,
    Determinism.SCHEDULE: _schedules,
    Determinism.BATCH_INVARIANT: _batches,
    Determinism.PLACEMENT_INVARIANT: _placements,
}


def measure(launcher: Launcher, cell: Cell, replicate: int, repeats: int) -> list[Measurement]:
    """Every level but that of other processes (see `digests`), on the random probe of a cell."""
    problem = problem_for(cell, replicate, launcher.backend.capabilities)
    inputs = RANDOM.inputs(problem)
    numerics = launcher.backend.numerics(problem.spec.dtype, Hints(num_splits=max(SPLITS)), problem.branches)
    allowed = expected(problem.spec, inputs, problem.table, problem.candidates, numerics)
    first = launcher(problem, inputs)
    found = []
    for level, variants in {**LEVELS, EXACT: _exact, HEADS: _heads}.items():
        with busy(launcher.device) if level == Determinism.RUN_TO_RUN else nullcontext():
            runs = [(launcher(v.problem, v.inputs, hints=v.hints), v) for v in variants(problem, inputs, repeats)]
        if not runs:
            continue
        width = widths(allowed)
        found += [measured(launcher.backend, problem, width, level, name, first, runs) for name in outputs(first)]
    return [*found, *_related(launcher, problem, (inputs, first), numerics)]


def _related(
    launcher: Launcher, problem: Problem, original: tuple[Inputs, Observed], numerics: Numerics
) -> Iterator[Measurement]:
    """The relations that take a launch of their own: each variant beside its original, apart by no more than both of
    them may err.
    """
    sees_lists = launcher.backend.capabilities.consumes is Consumes.RAW
    sequence = problem.spec.candidate_kind is CandidateKind.SEQUENCE
    for name, relation in RELATIONS.items():
        if sequence and name == "repeated entries":  # an error of the lists, not another call
            continue
        inputs, variants = relation.make(problem, original[0])
        if not variants or (relation.raw and not sees_lists):
            continue
        first = original[1] if inputs is original[0] else launcher(problem, inputs)
        runs = [(_launched(launcher, variant), variant) for variant in variants]
        calls = [(problem, inputs), *((each.problem, each.inputs) for each in variants)]
        width = widths(*(expected(p.spec, i, p.table, p.candidates, numerics) for p, i in calls))
        for output in outputs(first):
            bits = relation.bits and promised(launcher.backend, output, Determinism.RUN_TO_RUN)
            each = measured(launcher.backend, problem, width, name, output, first, runs)
            yield msgspec.structs.replace(each, promised=bits)


def _launched(launcher: Launcher, variant: Variant) -> Observed:
    call = partial(launcher, variant.problem, variant.inputs, hints=variant.hints)
    return call(between=partial(launcher, *variant.between)) if variant.between else call()


def widths(*calls: Expected) -> dict[str, Array]:
    """How far results of one call, or of several that must give the same, may lie apart, by output."""
    low, high = (np.array([getattr(each, end) for each in calls]) for end in ("out_lo", "out_hi"))
    return {"out": high.max(axis=0) - low.min(axis=0), "lse": 2 * np.max([each.lse_bound for each in calls], axis=0)}


def outputs(observed: Observed) -> tuple[str, ...]:
    """The outputs that a backend has."""
    return ("out",) if observed.lse is None else ("out", "lse")


def measured(
    backend: Backend,
    problem: Problem,
    width: Mapping[str, Array],
    level: str,
    output: str,
    first: Observed,
    runs: list[tuple[Observed, Variant]],
) -> Measurement:
    """One output at one level: `first` and variants of it, whose rows are some of its rows; `width`: see `widths`."""
    values, _ = _of(first, output)
    low, high, seen = values.copy(), values.copy(), [{row.tobytes()} for row in _by_row(values)]
    heads, farthest, name = problem.spec.num_qo_heads, 0.0, ""
    for observed, variant in runs:
        out, lse = variant.undone(observed)
        found, tokens = out if output == "out" else lse, variant.tokens
        assert found is not None
        low[tokens], high[tokens] = np.minimum(low[tokens], found), np.maximum(high[tokens], found)
        apart = _use(found, values[tokens], width[output][tokens])
        farthest, name = max((farthest, name), (apart, variant.name))
        places = (tokens[:, None] * heads + np.arange(heads)).ravel()
        for at, row in zip(places.tolist(), _by_row(found), strict=True):
            seen[at].add(row.tobytes())
    counts = np.array([len(each) for each in seen])
    place = place_of(problem.spec, *divmod(int(np.argmax(counts > 1)), heads)) if (counts > 1).any() else ""
    return Measurement(
        level=str(level),
        output=output,
        launches=len(runs) + 1,
        distinct=int(counts.max(initial=1)),
        range_use=_use(high, low, width[output]),
        place=place,
        promised=promised(backend, output, level),
        variant=name if place else "",
    )


def _use(one: Array, other: Array, width: Array) -> float:
    """The largest distance over what is allowed; 0 where both values are the same infinity."""
    with np.errstate(invalid="ignore", divide="ignore"):
        use = np.where(one != other, np.abs(one - other) / width, 0.0)
    return float(np.nan_to_num(use, nan=0.0, posinf=1e30).max(initial=0.0))


def promised(backend: Backend, output: str, level: str) -> bool:
    """Whether the adapter declares a level for an output, or everybody must keep it."""
    level = str(Determinism.BATCH_INVARIANT) if level == HEADS else level
    return level == EXACT or level in backend.capabilities.determinism.get(output, frozenset())


def _of(observed: Observed, output: str) -> tuple[Array, Ints]:
    if output == "out":
        return observed.out, observed.out_bits
    assert observed.lse is not None and observed.lse_bits is not None
    return observed.lse, observed.lse_bits


def _by_row(values: Array) -> Array:
    """[tokens * heads, ...]; FP64 holds every value of an output, so equal bytes are equal bits."""
    return np.ascontiguousarray(values.reshape(values.shape[0] * values.shape[1], -1))


def digests(launcher: Launcher, cell: Cell, replicate: int) -> dict[str, str]:
    """A hash of the bits of each output, to be compared with that of another process."""
    problem = problem_for(cell, replicate, launcher.backend.capabilities)
    observed = launcher(problem, RANDOM.inputs(problem))
    return {name: blake2b(_of(observed, name)[1].tobytes(), digest_size=16).hexdigest() for name in outputs(observed)}


def across_processes(backend_promises: dict[str, bool], found: list[dict[str, str]]) -> list[Measurement]:
    """The level of other processes, from the digests that each of them gave; the range is not known, only bits are."""
    return [
        Measurement(
            level=str(Determinism.PROCESS_TO_PROCESS),
            output=name,
            launches=len(found),
            distinct=len({each[name] for each in found}),
            range_use=0.0,
            place="",
            promised=backend_promises[name],
        )
        for name in found[0]
    ]


def busy(device: str) -> AbstractContextManager[None]:
    """Other work on a GPU, so that blocks do not run in the same order each time."""
    return _busy_stream(device) if device.startswith("cuda") else nullcontext()


@contextmanager
def _busy_stream(device: str) -> Iterator[None]:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x = torch.ones(LOAD, LOAD, device=device)
        for _ in range(200):
            x = x @ x * (1 / LOAD)
    yield
    stream.synchronize()
