"""Which copies of a cell's requests travel in one launch, and which elements of their output each probe judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference.bounds import GENERIC, Exactness, Expected, expected
from sacts.reference.forward import Inputs, edges
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec

from .. import sample
from ..build import Problem, last_query
from . import applicability, dropout, margins, scale
from .inputs import COUNT, RANDOM, Probe, dithered
from .rows import plain
from .witness import Witness, suits, witness

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

WITNESS_COPIES = 2  # of one launch at most, each of another request

_EXACTNESS = {"select": Exactness(one_key=True), "stair": Exactness(dyadic_p=True)}


@dataclass(frozen=True)
class Copy:
    """Requests on pages of their own with the values of one or more probes. `judged`: by probe, the elements of out
    that it decides about [tokens, heads, d_vo]; `margin`: by probe, for each row that it is made for, the smallest
    change of out that its target fault would cause / the smallest that is noticed. `request`: the cell's request that a
    witness copy is of. `rows`: the candidate rows that `expected` evaluates, None: all; it holds the others to
    invariants. `lse_margin`: of the count probe, the same of lse.
    """

    problem: Problem
    inputs: Inputs
    expected: Expected
    judged: Mapping[str, Bools]
    margin: Mapping[str, Array]
    witness: Witness | None = None
    request: int = 0
    rows: Ints | None = None
    lse_margin: Array | None = None

    @property
    def fitting(self) -> set[str]:
        """The probes that some row of a witness copy could be asked."""
        return set().union(*self.witness.fitting) if self.witness else set()


def copies(problem: Problem, numerics: Numerics) -> list[Copy]:
    """The random and the count copy of all requests, then a witness copy of the request that attends most, and of the
    next one where the first has fewer query heads than questions.
    """
    rows = sample.exact_rows(problem)
    made = [_random(problem, numerics, rows), _count(problem, numerics, rows)]
    if dropout.suits(problem):
        made.append(_dropout(problem, numerics, rows))
    if scale.suits(problem):
        made.append(_scale(problem, numerics, rows))
    if suits(problem):
        for number, request in enumerate(busiest(problem)):
            made.append(_witness(problem, request, number, numerics))
            if problem.spec.num_qo_heads >= len(made[-1].fitting):
                break
    return made


def _judged(problem: Problem, probe: Probe, numerics: Numerics, rows: Ints | None) -> tuple[Inputs, Expected, Expected]:
    """A probe's inputs, what they must give in these candidate rows (None: all), and that with what all other rows must
    satisfy.
    """
    inputs = probe.inputs(problem)
    exactness = probe.exactness(problem)
    if rows is None:
        right = _expected(problem, inputs, numerics, exactness)
        return inputs, right, right
    right = _expected(sample.only(problem, rows), inputs, numerics, exactness)
    return inputs, right, sample.with_invariants(problem, inputs, numerics, rows, right, plain(problem.spec))


def values_of(problem: Problem, probe: Probe, numerics: Numerics) -> tuple[Inputs, Expected]:
    """A probe's inputs, and what they must give."""
    inputs = probe.inputs(problem)
    return inputs, _expected(problem, inputs, numerics, probe.exactness(problem))


def _expected(problem: Problem, inputs: Inputs, numerics: Numerics, exactness: Exactness) -> Expected:
    return expected(problem.spec, inputs, problem.table, problem.candidates, numerics, exactness)


def _everything(spec: AttentionSpec) -> Bools:
    return np.ones((spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo), bool)


def _random(problem: Problem, numerics: Numerics, rows: Ints | None) -> Copy:
    inputs, right, whole = _judged(problem, RANDOM, numerics, rows)
    judged = {"random": _everything(problem.spec)}
    return Copy(problem, inputs, whole, judged, {"random": margins.of_random(right)}, rows=rows)


def _count(problem: Problem, numerics: Numerics, rows: Ints | None) -> Copy:
    inputs, right, whole = _judged(problem, COUNT, numerics, rows)
    hair = np.broadcast_to(dithered(problem), right.out.shape)
    if not applicability.terms_of(problem.spec):
        loss = margins.of_count(right, ~hair)
    else:
        loss = margins.of_weights(problem if rows is None else sample.only(problem, rows), inputs, right)
    margin = {"count": loss.out}
    judged = {"count": ~hair}
    if hair.any():
        margin["dither"], judged["dither"] = margins.of_dither(problem, right, hair), hair
    return Copy(problem, inputs, whole, judged, margin, rows=rows, lse_margin=loss.lse)


def _scale(problem: Problem, numerics: Numerics, rows: Ints | None) -> Copy:
    inputs, right, whole = _judged(problem, scale.SCALE, numerics, rows)
    some = problem if rows is None else sample.only(problem, rows)
    margin = {"scale": scale.of_scale(some, inputs, right)}
    return Copy(problem, inputs, whole, {"scale": _everything(problem.spec)}, margin, rows=rows)


def _dropout(problem: Problem, numerics: Numerics, rows: Ints | None) -> Copy:
    inputs, right, whole = _judged(problem, dropout.DROPOUT, numerics, rows)
    some = problem if rows is None else sample.only(problem, rows)
    margin = {"dropout": dropout.of_dropout(some, inputs, right)}
    return Copy(problem, inputs, whole, {"dropout": _everything(problem.spec)}, margin, rows=rows)


def busiest(problem: Problem) -> list[int]:
    """The requests with the most edges in the row of their last query, at most WITNESS_COPIES; none without edges."""
    spec = problem.spec
    rows, _, _ = edges(spec, problem.candidates)
    count = np.bincount(rows // spec.list_heads, minlength=spec.num_tokens)
    last = {n: int(count[spec.qo_indptr[n + 1] - 1]) for n, length in enumerate(spec.qo_lens) if length}
    chosen = sorted((n for n in last if last[n]), key=lambda n: (-last[n], n))
    return chosen[:WITNESS_COPIES]


def _witness(problem: Problem, request: int, number: int, numerics: Numerics) -> Copy:
    made = witness(last_query(problem, request, "witness", number), number)
    right = _expected(made.problem, made.inputs, numerics, GENERIC)
    judged: dict[str, Bools] = {}
    for name in dict.fromkeys(lane.probe for lane in made.lanes.values()):
        mask = np.zeros(right.out.shape, bool)
        mask[-1, [head for head, lane in made.lanes.items() if lane.probe == name]] = True
        judged[name] = mask
        if name in _EXACTNESS:
            sharp = _expected(made.problem, made.inputs, numerics, _EXACTNESS[name])
            right = _where(mask, sharp, right)
    return Copy(made.problem, made.inputs, right, judged, margins.of_witness(made, right), made, request)


def _where(mask: Bools, some: Expected, others: Expected) -> Expected:
    """`some` in the rows that `mask` [tokens, heads, d_vo] names, `others` elsewhere."""
    row = mask.any(axis=-1)
    return replace(
        others,
        **{
            name: np.where(mask if getattr(some, name).ndim == 3 else row, getattr(some, name), getattr(others, name))
            for name in ("half_width", "out_lo", "out_hi", "lse_bound", "trusted")
        },
    )
