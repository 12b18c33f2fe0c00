"""Relations: the same call said otherwise. A right backend gives the same result, under the names that the variant
has for its rows; a backend that promises more gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isclose, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sacts.matrices.cell import Cell
from sacts.reference.candidates import CandidateLists, ValidatedCandidates, lists_of, rows_of, validate
from sacts.reference.forward import Inputs
from sacts.reference.paging import PagedCache
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, Dropout, Hints, Route, Schedule

from .adapter import PADDING
from .build import Problem, build
from .launch import Observed

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Variant:
    """A call that must give what the original gives: token i of its result is token `tokens[i]` of the original's,
    query head h its query head `heads[h]` (empty: h), out is `factor` times as large, and `shift` is added to lse.
    `between`: another call that is planned and run after this one was planned, and before it runs.
    """

    name: str
    problem: Problem
    inputs: Inputs
    hints: Hints
    tokens: Ints
    heads: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    factor: float = 1.0
    shift: float = 0.0
    between: tuple[Problem, Inputs] | None = None

    def undone(self, observed: Observed) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """out and lse of the variant under the names and in the size of the original, [tokens of the variant, ...]."""
        back = np.argsort(self.heads) if len(self.heads) else slice(None)
        lse = None if observed.lse is None else observed.lse[:, back] - self.shift
        return observed.out[:, back] / self.factor, lse


def repeated(problem: Problem, inputs: Inputs) -> Variant:
    """The same call once more."""
    return Variant("the same call again", problem, inputs, problem.hints, np.arange(problem.spec.num_tokens))


def chosen(problem: Problem, inputs: Inputs, requests: Sequence[int]) -> Variant:
    """Some requests of the call only, in this order, each with all its branches, over the same pool."""
    spec, branches = problem.spec, range(problem.branches)
    order = [n * problem.branches + branch for n in requests for branch in branches]
    tokens = np.array(
        list(chain.from_iterable(range(spec.qo_indptr[n], spec.qo_indptr[n] + spec.qo_lens[n]) for n in order)),
        np.int64,
    )
    rows = (tokens[:, None] * spec.list_heads + np.arange(spec.list_heads)).ravel()
    raw, indptr = problem.raw, problem.candidates.indptr
    new_indptr, indices, counts = _rows(indptr, rows, problem.candidates.indices, problem.candidates.counts)
    kept = ValidatedCandidates(new_indptr, indices, counts, problem.candidates.duplicates)
    place = {request: place for place, request in enumerate(order)}
    owner = np.array([place.get(n, -1) for n in range(spec.num_requests)] + [-1])[problem.slot_request]
    smaller = replace(
        problem,
        spec=replace(
            spec,
            seq_lens=tuple(spec.seq_lens[n] for n in order),
            qo_lens=tuple(spec.qo_lens[n] for n in order),
            query_positions=tuple(spec.query_positions[t] for t in tokens) if spec.query_positions else (),
            query_ordinals=tuple(spec.query_ordinals[r] for r in rows) if spec.query_ordinals else (),
            dropout=_same_draws(spec, order),
        ),
        table=replace(
            problem.table, table=problem.table.table[order], owned=tuple(problem.table.owned[n] for n in order)
        ),
        raw=CandidateLists(*_rows(raw.indptr, rows, raw.indices)),
        candidates=kept,
        slot_request=owner,
    )
    names = ", ".join(map(str, requests))
    return Variant(f"requests {names} in this order", smaller, _rows_of(inputs, tokens), problem.hints, tokens)


def _rows_of(inputs: Inputs, tokens: Ints | slice, heads: Ints | slice = slice(None)) -> Inputs:
    """The values with some tokens or query heads only, in this order."""
    gate = None if inputs.gate is None else inputs.gate[tokens][:, heads]
    return inputs._replace(q=inputs.q[tokens][:, heads], gate=gate)


def _same_draws(spec: AttentionSpec, requests: Sequence[int]) -> Dropout | None:
    """Each request keeps the uid that its dropout is drawn for."""
    if spec.dropout is None:
        return None
    uids = spec.dropout.request_uids or tuple(range(spec.num_requests))
    return replace(spec.dropout, request_uids=tuple(uids[n] for n in requests))


def _rows(indptr: Ints, rows: Ints, *values: Ints) -> tuple[Ints, ...]:
    """The rows of a CSR in another order: indptr, and each of the values."""
    at = np.concatenate([np.zeros(0, np.int64), *(np.arange(indptr[row], indptr[row + 1]) for row in rows)])
    lengths = np.diff(indptr)[rows]
    return (np.concatenate(([0], np.cumsum(lengths))), *(each[at] for each in values))


def relabelled(problem: Problem, inputs: Inputs, replicate: int) -> Variant:
    """Every live page at another physical address, with the data and all owners."""
    order = problem.draw("relabel", replicate).permutation(len(problem.pages))  # page i moves to where order[i] is
    moved = np.argsort(order)
    number = dict(zip(problem.pages.tolist(), problem.pages[order].tolist(), strict=True))
    table = np.vectorize(lambda page: number.get(page, page), otypes=[np.int64])(problem.table.table)
    owned = tuple(frozenset(number[page] for page in pages) for pages in problem.table.owned)
    k, v = (PagedCache(cache.pages, cache.data[moved]) for cache in (inputs.k, inputs.v))
    variant = replace(
        problem,
        table=replace(problem.table, table=table, owned=owned),
        slot_request=problem.slot_request[moved],
        slot_token=problem.slot_token[moved],
        k_scales=problem.k_scales and problem.k_scales.at(moved, 0),
        v_scales=problem.v_scales and problem.v_scales.at(moved, 0),
    )
    tokens = np.arange(problem.spec.num_tokens)
    return Variant("pages at other addresses", variant, inputs._replace(k=k, v=v), problem.hints, tokens)


def shuffled(problem: Problem, inputs: Inputs, replicate: int) -> Variant:
    """The raw lists of a set in another order, padding included."""
    raw, draw = problem.raw, problem.draw("shuffle", replicate)
    parts = [raw.indices[a:b][draw.permutation(int(b - a))] for a, b in zip(raw.indptr, raw.indptr[1:], strict=False)]
    indices = np.concatenate([np.zeros(0, np.int64), *parts])
    variant = replace(problem, raw=CandidateLists(raw.indptr, indices))
    return Variant("lists in another order", variant, inputs, problem.hints, np.arange(problem.spec.num_tokens))


def scaled(problem: Problem, inputs: Inputs, factor: float = 2.0) -> Variant:
    """V times a power of two (of V in codes: its scales): out is as many times larger, to the bit."""
    larger = replace(inputs.v, data=factor * inputs.v.data)
    if problem.v_scales:
        scales = replace(problem.v_scales, scales=factor * problem.v_scales.scales)
        problem = replace(problem, v_scales=scales)
    tokens = np.arange(problem.spec.num_tokens)
    return Variant("V scaled", problem, inputs._replace(v=larger), problem.hints, tokens, factor=factor)


def heads_reversed(problem: Problem, inputs: Inputs) -> Variant:
    """KV heads, with their query heads and lists, in the opposite order."""
    spec, raw, indptr = problem.spec, problem.raw, problem.candidates.indptr
    kv_heads = np.arange(spec.num_kv_heads)[::-1]
    heads = (kv_heads[:, None] * spec.group_size + np.arange(spec.group_size)).ravel()
    lists = (kv_heads[:, None] * spec.lists_per_kv_head + np.arange(spec.lists_per_kv_head)).ravel()
    rows = (np.arange(spec.num_tokens)[:, None] * spec.list_heads + lists).ravel()
    new_indptr, indices, counts = _rows(indptr, rows, problem.candidates.indices, problem.candidates.counts)
    variant = replace(
        problem,
        raw=CandidateLists(*_rows(raw.indptr, rows, raw.indices)),
        k_scales=problem.k_scales and problem.k_scales.at(kv_heads, 2),
        v_scales=problem.v_scales and problem.v_scales.at(kv_heads, 2),
        candidates=ValidatedCandidates(new_indptr, indices, counts, problem.candidates.duplicates),
    )
    k, v = (replace(cache, data=cache.data[:, :, kv_heads]) for cache in (inputs.k, inputs.v))
    turned, tokens = _rows_of(inputs, slice(None), heads), np.arange(spec.num_tokens)
    return Variant("heads reversed", variant, turned._replace(k=k, v=v), problem.hints, tokens, heads)


def hinted(problem: Problem, inputs: Inputs, hints: Hints) -> Variant:
    """Other hints: they may change rounding, never the function."""
    how = (f"{hints.num_splits} splits, tiles of {hints.kv_tile}", hints.schedule, hints.route)
    name = ", ".join(each for each in how if each not in (Schedule.STATIC, Route.DIRECT))
    return Variant(name, problem, inputs, hints, np.arange(problem.spec.num_tokens))


# --- relations: inputs of an original, and variants of it that a right backend answers alike

QUERY, KEY = 8.0, 16.0  # of the channel that shifts logits, exact in every dtype
APPENDED = 3  # masked entries that join a list, at most


class Relation(NamedTuple):
    """`make`: the inputs of the original and its variants, none where the relation says nothing here. `raw`: only a
    consumer of raw lists sees a difference. `bits`: a backend that repeats its bits must repeat them here.
    """

    make: Callable[[Problem, Inputs], tuple[Inputs, list[Variant]]]
    raw: bool = False
    bits: bool = False


def logits_shifted(problem: Problem, inputs: Inputs) -> tuple[Inputs, list[Variant]]:
    """One channel of q and K adds the same number to every logit of the call: lse moves by it, out stays."""
    spec = problem.spec
    if spec.rope or spec.logits_soft_cap or spec.sink_logits or spec.k_codec:
        return inputs, []

    def with_key(size: float) -> Inputs:
        q, k = inputs.q.copy(), inputs.k.data.copy()
        q[..., 0], k[..., 0] = QUERY, size
        return inputs._replace(q=q, k=replace(inputs.k, data=k))

    return with_key(0.0), [
        replace(
            repeated(problem, with_key(size)),
            name=f"every logit {spec.sm_scale * QUERY * size:+.3g}",
            shift=spec.sm_scale * QUERY * size,
        )
        for size in (-KEY, KEY)
    ]


def padding_moved(problem: Problem, inputs: Inputs) -> tuple[Inputs, list[Variant]]:
    """Two sentinels at the head, in the middle and at the tail of every list."""
    rows = rows_of(problem.raw.indptr)
    real = problem.raw.indices != PADDING
    values, rows = problem.raw.indices[real], rows[real]
    lengths = np.bincount(rows, minlength=problem.spec.num_rows)
    ordinal = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
    every = np.repeat(np.arange(problem.spec.num_rows), 2)
    variants = []
    for name, place in (("head", 0 * lengths), ("middle", lengths // 2), ("tail", lengths)):
        order = np.lexsort((np.concatenate((ordinal, place[every] - 0.5)), np.concatenate((rows, every))))
        raw = lists_of(
            np.concatenate((rows, every))[order],
            np.concatenate((values, np.full(len(every), PADDING)))[order],
            problem.spec.num_rows,
        )
        variants.append(replace(_with_lists(problem, inputs, raw), name=f"padding at the {name}"))
    return inputs, variants


def masked_appended(problem: Problem, inputs: Inputs) -> tuple[Inputs, list[Variant]]:
    """Entries that the window or, in block lists, the causal rule hides whole, named behind the others."""
    spec = problem.spec
    if spec.candidate_kind is CandidateKind.SEQUENCE:
        return inputs, []
    rows, values = [rows_of(problem.raw.indptr)], [problem.raw.indices]
    for row in range(spec.num_rows):
        token = row // spec.list_heads
        position, request = spec.token_position[token], spec.token_request[token]
        first = np.arange(-(-spec.seq_lens[request] // spec.block_size)) * spec.block_size
        hidden = np.zeros(len(first), bool)
        if spec.causal is not CausalRule.NONE and spec.block_size > 1:
            hidden |= first > position
        if spec.window_left >= 0:
            hidden |= first + spec.block_size - 1 < position - spec.window_left
        named = problem.raw.indices[problem.raw.indptr[row] : problem.raw.indptr[row + 1]]
        more = np.setdiff1d(np.flatnonzero(hidden), named)[-APPENDED:]
        rows.append(np.full(len(more), row))
        values.append(more)
    if not sum(map(len, values[1:])):
        return inputs, []
    raw = lists_of(np.concatenate(rows), np.concatenate(values), spec.num_rows)
    return inputs, [replace(_with_lists(problem, inputs, raw), name="masked entries behind each list")]


def entries_repeated(problem: Problem, inputs: Inputs) -> tuple[Inputs, list[Variant]]:
    """Every list twice over: nothing changes in a set; in a multiset lse moves by ln 2; in a sequence it is an error,
    which `validate` raises.
    """
    rows = rows_of(problem.raw.indptr)
    raw = lists_of(np.tile(rows, 2), np.tile(problem.raw.indices, 2), problem.spec.num_rows)
    multiset = problem.spec.candidate_kind is CandidateKind.MULTISET
    variant = _with_lists(problem, inputs, raw)
    return inputs, [replace(variant, name="each list twice over", shift=log(2) if multiset else 0.0)]


def planned_early(problem: Problem, inputs: Inputs) -> tuple[Inputs, list[Variant]]:
    """Planned, then another spec planned and run, then run."""
    cell = problem.cell
    kv = (37, 5) if problem.spec.seq_lens != (37, 5) else (21,)
    other = build(Cell("decode", cell.dtype, kv, heads=cell.heads, dim=cell.dim, vdim=cell.vdim, page=cell.page))
    shapes = (other.spec.num_tokens, other.spec.num_qo_heads), (*other.slot_request.shape, other.spec.num_kv_heads)
    draw = other.draw("between")
    dims = cell.dim, cell.dim, other.spec.head_dim_vo
    q, k, v = (draw.signs((*shapes[part], dim)) for part, dim in zip((0, 1, 1), dims, strict=True))
    other = replace(other, spec=replace(other.spec, sm_scale=problem.spec.sm_scale))
    variant = replace(repeated(problem, inputs), name="another spec between plan and run")
    return inputs, [replace(variant, between=(other, other.inputs(q, k, v)))]


def _with_lists(problem: Problem, inputs: Inputs, raw: CandidateLists) -> Variant:
    candidates = validate(problem.spec, raw, problem.table, sentinels=(PADDING,))
    return repeated(replace(problem, raw=raw, candidates=candidates), inputs)


def scale_moved(problem: Problem, inputs: Inputs) -> tuple[Inputs, list[Variant]]:
    """sm_scale twice as large and q half: the same logits, unless a call of these shapes kept the scale of another."""
    spec = problem.spec
    if isclose(spec.sm_scale, spec.head_dim_qk**-0.5, rel_tol=1e-6):
        return inputs, []  # a backend that knows no other scale
    variant = repeated(
        replace(problem, spec=replace(spec, sm_scale=2 * spec.sm_scale)), inputs._replace(q=inputs.q / 2)
    )
    return inputs, [replace(variant, name="sm_scale twice as large, q half")]


RELATIONS = {
    "scale moved": Relation(scale_moved),
    "logit shift": Relation(logits_shifted),
    "padding position": Relation(padding_moved, raw=True),
    "masked entries": Relation(masked_appended),
    "repeated entries": Relation(entries_repeated, raw=True),
    "plan, other spec, run": Relation(planned_early, bits=True),
}
