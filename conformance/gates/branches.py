"""Gate merge, of branches: with gates of all sizes and signs out is the gated sum of the branches' own outputs, then
the epilogue. What each branch yields by itself has passed the other gates: one launch for each, its gate 1, others 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sacts.reference import epilogues
from sacts.reference.bounds import Expected, expected
from sacts.reference.branch_bounds import gated
from sacts.reference.formats import round_to
from sacts.reference.forward import Inputs
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType, Epilogue, EpilogueKind
from sacts.reports.records import Finding, Gate

from .. import sample
from ..branches import drawn_gates, rows_of_lists, tokens_of
from ..build import Problem
from ..contract import place_of
from ..launch import Launcher, Observed
from .intervals import largest, lse_use, out_use
from .layout import poison, poisoned, surroundings
from .terms import ALIKE

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Judged(NamedTuple):
    """The largest observed / allowed, and what is wrong."""

    use: float
    finding: Finding | None


class _Call(NamedTuple):
    """A launch with drawn gates [tokens, heads, branches]: what each branch must yield before the epilogue, what the
    sum must be, and what came back.
    """

    problem: Problem
    gates: Array
    parts: list[Expected]
    right: Expected
    seen: Observed


def judge_gated(launcher: Launcher, problem: Problem, inputs: Inputs, exact: Ints | None = None) -> Judged:
    """Requirement: out = epilogue(sum_b gate_b out_b), each element in the interval that the errors of all branches
    allow, and the lse of each branch is its own whatever the gates. Poison stands wherever no branch attends.

    q must be one in all branches. `exact`: candidate rows of which some branch is evaluated, with all branches; None:
    all rows.
    """
    spec = problem.spec
    numerics = launcher.backend.numerics(spec.dtype, problem.hints, problem.branches)
    parts = _parts(problem, inputs, numerics, exact)
    gates = drawn_gates((*parts[0].lse.shape, problem.branches), problem.draw("gates"))
    right = gated(parts, gates, numerics, spec.epilogue)
    values = poisoned(inputs, poison(problem, 0), spec.dtype)
    seen = launcher.gated(problem, values, gates, surroundings=surroundings(problem, 0))
    call = _Call(problem, gates, parts, right, seen)
    use = out_use(right, seen, spec.dtype)
    finding = _of_out(call, use) if largest(use) > 1 else None
    log_use = np.stack([lse_use(part, _of_branch(seen, branch)) for branch, part in enumerate(parts)], axis=-1)
    if finding is None and largest(log_use) > 1:
        finding = _of_lse(call, log_use)
    return Judged(max(largest(use), largest(log_use)), finding)


def _parts(problem: Problem, inputs: Inputs, numerics: Numerics, exact: Ints | None) -> list[Expected]:
    """What each branch must yield, before the epilogue; without a bound in rows beyond the sample."""
    spec, some, rows = problem.spec, problem, None
    if exact is not None:
        lists = rows_of_lists(spec, problem.branches).reshape(problem.branches, -1)
        rows = np.sort(lists[:, np.isin(lists, exact).any(axis=0)].ravel())
        some = sample.only(problem, rows)
    plain = replace(spec, epilogue=Epilogue())
    whole = expected(plain, inputs, problem.table, some.candidates, numerics)
    if rows is not None:
        judged = np.isin(np.arange(spec.num_rows), rows).reshape(spec.num_tokens, spec.list_heads)
        whole.trusted[~judged.repeat(spec.heads_per_list, axis=1)] = False
    tokens = [tokens_of(spec, problem.branches, branch) for branch in range(problem.branches)]
    return [Expected(*(getattr(whole, f.name)[mine] for f in fields(Expected))) for mine in tokens]


def _of_branch(seen: Observed, branch: int) -> Observed:
    if seen.lse is None:
        return seen
    return replace(seen, lse=seen.lse[..., branch])


def _place(problem: Problem, token: int, head: int, branch: int | None = None) -> str:
    """A row of the call, or of one branch, in the judge's names of requests, which the record turns into the cell's."""
    own = tokens_of(problem.spec, problem.branches, branch or 0)[token]
    place = place_of(problem.spec, int(own), head)
    return place if branch is not None else place.replace(", query ", ", all branches, query ", 1)


def _of_out(call: _Call, use: Array) -> Finding:
    token, head, channel = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
    at = token, head, channel
    place, words = _place(call.problem, token, head), _explanation(call)
    wrong = int((use > 1).sum())
    sentence = (
        f"{place}, channel {channel}: out {call.seen.out[at]:.7g}, allowed {call.right.out_lo[at]:.7g} to "
        f"{call.right.out_hi[at]:.7g} ({wrong} of {use.size} elements are outside) where branches that are right by "
        f"themselves are gated and added{f': the result is as if {words}' if words else ''}"
    )
    return Finding(Gate.MERGE, place, sentence, use=float(use[at]))


def _of_lse(call: _Call, use: Array) -> Finding:
    assert call.seen.lse is not None
    token, head, branch = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
    place, part = _place(call.problem, token, head, branch), call.parts[branch]
    sentence = (
        f"{place}: lse {call.seen.lse[token, head, branch]:.7g}, expected {part.lse[token, head]:.7g} +- "
        f"{part.lse_bound[token, head]:.2g}, right where one gate is 1 and wrong where gates have other sizes"
    )
    return Finding(Gate.MERGE, place, sentence, use=float(use[token, head, branch]))


def _explanation(call: _Call) -> str:
    """The mistake whose result lies nearest to what came back, if that is near enough."""
    some = call.right.trusted
    nearest, best = ALIKE * _apart(call.seen.out[some], call.right.out[some]), ""
    for words, out in _mistakes(call):
        if (distance := _apart(call.seen.out[some], out[some])) < nearest:
            nearest, best = distance, words
    return best


def _apart(one: Array, other: Array) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(one - other), nan=np.inf).max(initial=0.0))


def _mistakes(call: _Call) -> Iterator[tuple[str, Array]]:
    """Ways to gate and add wrongly, in words, and the out that each yields."""
    gates, epilogue = call.gates, call.problem.spec.epilogue
    outs = np.stack([part.out for part in call.parts], axis=-1)
    mass = np.exp(np.stack([part.lse for part in call.parts], axis=-1) - _top(call.parts)[..., None])
    for words, weights in (
        *_other_gates(call),
        ("the gates weighed the numerators of one softmax", gates * _shares(mass)),
        ("the gates were factors of the mass in one softmax", _shares(gates * mass)),
        ("all branches were one softmax, without gates", _shares(mass)),
    ):
        yield words, _finished(epilogue, (weights[..., None, :] * outs).sum(-1))
    if epilogue.kind is not EpilogueKind.NONE:
        yield "the epilogue came before the sum", (gates[..., None, :] * _finished(epilogue, outs)).sum(-1)
        yield "there were no epilogue", (gates[..., None, :] * outs).sum(-1)


def _other_gates(call: _Call) -> Iterator[tuple[str, Array]]:
    """Other numbers in place of the gates."""
    gates, spec = call.gates, call.problem.spec
    heads = np.arange(spec.num_qo_heads)
    for words, order in (
        ("the head before", heads - 1),
        ("the head behind", (heads + 1) % len(heads)),
        ("the first head", 0 * heads),
        ("the first head of the group", heads // spec.group_size * spec.group_size),
        ("the place of the head in its group", heads % spec.group_size),
    ):
        yield f"the gates were those of {words}", gates[:, order]
    for shift in range(1, call.problem.branches):
        yield f"the gates were those of the branch {shift} before", np.roll(gates, shift, axis=2)
    yield "the gates were those of the token before", np.roll(gates, 1, axis=0)
    yield "the gates were those of the token behind", np.roll(gates, -1, axis=0)
    yield "the gates were those of the first token", np.broadcast_to(gates[:1], gates.shape)
    flat = gates.ravel()
    yield "the gates lay branch by branch", np.moveaxis(flat.reshape(np.roll(gates.shape, 1)), 0, 2)
    yield "there were no gates", np.ones_like(gates)
    yield "the gates had no sign", np.abs(gates)
    yield "the gates were divided by their sum", _shares(gates)
    for dtype in (DType.BF16, DType.FP16):
        yield f"the gates were rounded to {dtype}", round_to(gates, dtype)


def _shares(x: Array) -> Array:
    """Parts of their sum over the branches, 0 where that is 0."""
    total = x.sum(-1, keepdims=True)
    shares: Array = x / np.where(total == 0, 1.0, total)
    return shares


def _top(parts: list[Expected]) -> Array:
    """The largest lse of all branches, 0 where none has an edge: [tokens, heads]."""
    top = np.max([part.lse for part in parts], axis=0)
    finite: Array = np.where(np.isfinite(top), top, 0.0)
    return finite


def _finished(epilogue: Epilogue, out: Array) -> Array:
    return epilogues.apply(epilogue, out, np.zeros_like(out), None)[0]
