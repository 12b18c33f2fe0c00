"""Gate terms: position coding, soft cap, bias, sink, repeats and epilogue are the ones that the spec names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sacts.reference.candidates import ValidatedCandidates, validate
from sacts.reference.forward import Inputs, forward
from sacts.reference.scores import rotate
from sacts.reference.spec import AttentionSpec, CandidateKind, Epilogue, EpilogueKind, RelativeBuckets, RopeLayout
from sacts.reports.records import Finding, Gate

from ..adapter import PADDING
from ..build import Problem
from ..contract import place_of
from ..launch import Observed
from ..probes.copies import Copy
from .intervals import lse_use, out_use

Array = NDArray[np.float64]

ALIKE = 0.05  # distance to what a mistake yields / distance to what is right, up to which the mistake explains a result


def judge_terms(copies: Sequence[Copy], observed: Sequence[Observed]) -> Finding | None:
    """Requirement: the logit has the terms of the spec, each with its own head's numbers, by logical positions, in
    their order. A wrong result of the random probe that no known mistake explains is left to the other gates.
    """
    for copy, seen in zip(copies, observed, strict=True):
        if "random" not in copy.judged or copy.rows is not None or not np.isfinite(seen.out).all():
            continue
        use = np.maximum(
            out_use(copy.expected, seen, copy.problem.spec.dtype).max(axis=-1), lse_use(copy.expected, seen)
        )
        if use.max(initial=0.0) <= 1:
            continue
        if words := _explanation(copy, seen):
            token, head = (int(i) for i in np.unravel_index(int(use.argmax()), use.shape))
            place = place_of(copy.problem.spec, token, head)
            return Finding(Gate.TERMS, place, f"{place}: the result is as if {words}", use=float(use[token, head]))
    return None


def _explanation(copy: Copy, seen: Observed) -> str:
    problem, best = copy.problem, ""
    nearest = ALIKE * _apart(seen, copy.expected.out, copy.expected.lse)
    for wrong in _mistakes(problem, copy.inputs):
        out, lse = forward(wrong.spec, wrong.inputs, problem.table, wrong.candidates)
        distance = _apart(seen, out, lse)
        if distance < nearest:
            nearest, best = distance, wrong.words
    return best


class _Wrong(NamedTuple):
    """What a backend might compute instead."""

    words: str
    spec: AttentionSpec
    inputs: Inputs
    candidates: ValidatedCandidates


def _apart(seen: Observed, out: Array, lse: Array) -> float:
    far = float(np.linalg.norm(seen.out - out))
    if seen.lse is None:
        return far
    both = np.isfinite(lse) & np.isfinite(seen.lse)
    if (np.isfinite(lse) != np.isfinite(seen.lse)).any():
        return math.inf
    return math.hypot(far, float(np.linalg.norm(seen.lse[both] - lse[both])))


def _mistakes(problem: Problem, inputs: Inputs) -> Iterator[_Wrong]:
    """Mistakes about the terms that the spec has."""
    spec, lists = problem.spec, problem.candidates
    if spec.candidate_kind is CandidateKind.MULTISET:
        yield _Wrong("repeats had no weight", spec, inputs, replace(lists, counts=np.ones_like(lists.counts)))
    if spec.rope:
        positions = np.asarray(spec.token_position, np.int64)[:, None]
        for words, moved in (
            ("at position 0", -positions),
            ("one position on", np.ones_like(positions)),
            ("one position too early", -np.ones_like(positions)),
        ):
            q = rotate(inputs.q, moved, spec.rope)
            yield _Wrong(f"RoPE turned queries as if they stood {words}", spec, inputs._replace(q=q), lists)
        yield from _by_raw_place(problem, inputs)
    for words, changed in (
        *_of_rope(spec),
        *_of_bias(spec),
        *_of_cap_and_sink(spec, problem.hints.num_splits),
        *_of_epilogue(spec),
    ):
        yield _Wrong(words, changed, inputs, lists)


def _by_raw_place(problem: Problem, inputs: Inputs) -> Iterator[_Wrong]:
    spec = problem.spec
    if spec.candidate_kind is not CandidateKind.SET or spec.block_size > 1 or problem.candidates.duplicates:
        return
    ordinals = tuple(t for t in spec.token_position for _ in range(spec.list_heads))
    placed = replace(spec, candidate_kind=CandidateKind.SEQUENCE, query_ordinals=ordinals)
    lists = validate(placed, problem.raw, problem.table, sentinels=(PADDING,))
    yield _Wrong("RoPE turned keys by their place in the raw list", placed, inputs, lists)


def _of_rope(spec: AttentionSpec) -> Iterator[tuple[str, AttentionSpec]]:
    if spec.rope is None:
        return
    yield "there were no RoPE", replace(spec, rope=None)
    halves = spec.rope.layout is RopeLayout.HALF_SPLIT
    other = RopeLayout.INTERLEAVED if halves else RopeLayout.HALF_SPLIT
    yield f"RoPE turned {other} pairs", replace(spec, rope=replace(spec.rope, layout=other))
    if spec.rope.rotary_dim < spec.head_dim_qk:
        yield "RoPE turned all channels", replace(spec, rope=replace(spec.rope, rotary_dim=spec.head_dim_qk))
    if spec.candidate_kind is CandidateKind.SET:
        by_place = replace(spec, candidate_kind=CandidateKind.SEQUENCE)
        yield "RoPE turned keys and query by their place among those of the row", by_place
        own = replace(by_place, query_ordinals=tuple(t for t in spec.token_position for _ in range(spec.list_heads)))
        yield "RoPE turned keys by their place among those of the row", own
    elif spec.candidate_kind is CandidateKind.SEQUENCE:
        ordinals = tuple(t for t in spec.token_position for _ in range(spec.list_heads))
        yield "RoPE turned queries by their logical position", replace(spec, query_ordinals=ordinals)


def _of_bias(spec: AttentionSpec) -> Iterator[tuple[str, AttentionSpec]]:
    heads, group = range(spec.num_qo_heads), spec.group_size
    others = (
        ("the head before", [h - 1 for h in heads]),
        ("the first head", [0 for _ in heads]),
        ("the place of the head in its group", [h % group for h in heads]),
        ("the KV head", [h // group for h in heads]),
    )
    if spec.alibi_slopes:
        yield "there were no ALiBi bias", replace(spec, alibi_slopes=())
        yield "the ALiBi bias had the other sign", replace(spec, alibi_slopes=tuple(-x for x in spec.alibi_slopes))
        for words, order in others:
            slopes = tuple(spec.alibi_slopes[h] for h in order)
            yield f"ALiBi slopes were read by {words}", replace(spec, alibi_slopes=slopes)
    if spec.buckets:
        yield "there were no bias by buckets", replace(spec, buckets=None)
        for words, order in others:
            bias = tuple(spec.buckets.bias[h] for h in order)
            yield f"the bias by buckets were read by {words}", replace(spec, buckets=replace(spec.buckets, bias=bias))
        for words, step in (("late", 1), ("early", -1)):
            first = (0, *(max(0, n + step) for n in spec.buckets.first[1:]))
            moved = RelativeBuckets(first, spec.buckets.bias, spec.buckets.bidirectional)
            yield f"each bucket began one position too {words}", replace(spec, buckets=moved)


def _of_cap_and_sink(spec: AttentionSpec, splits: int) -> Iterator[tuple[str, AttentionSpec]]:
    if spec.logits_soft_cap:
        yield "there were no soft cap", replace(spec, logits_soft_cap=0.0)
        inside = replace(spec, logits_soft_cap=1.0, sm_scale=spec.sm_scale / spec.logits_soft_cap)
        yield "tanh were not scaled back by the soft cap", inside
    if spec.sink_logits:
        yield "there were no sink", replace(spec, sink_logits=())
        for words, factor, times in (
            ("were read in base 2", math.log(2.0), 1),
            ("were scaled as base 2", 1 / math.log(2.0), 1),
            ("were scaled by sm_scale", spec.sm_scale, 1),
            *((f"joined {times} times", 1.0, times) for times in range(2, splits + 2)),
        ):
            sinks = tuple(factor * s + math.log(times) for s in spec.sink_logits)
            yield f"the sink {words}", replace(spec, sink_logits=sinks)
        rolled = spec.sink_logits[-1:] + spec.sink_logits[:-1]
        yield "the sink were that of the head before", replace(spec, sink_logits=rolled)


def _of_epilogue(spec: AttentionSpec) -> Iterator[tuple[str, AttentionSpec]]:
    if spec.epilogue.kind is not EpilogueKind.NONE:
        yield "there were no epilogue", replace(spec, epilogue=Epilogue())
