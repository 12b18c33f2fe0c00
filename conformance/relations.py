"""Relations: the same call said otherwise. A right backend gives the same result, under the names that the variant
has for its rows; a backend that promises more gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sacts.reference.candidates import CandidateLists, ValidatedCandidates
from sacts.reference.forward import Inputs
from sacts.reference.paging import PagedCache
from sacts.reference.spec import AttentionSpec, Dropout, Hints

from .build import Problem
from .launch import Observed

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Variant:
    """A call that must give what the original gives: token i of its result is token `tokens[i]` of the original's,
    query head h its query head `heads[h]` (empty: h), and out is `factor` times as large.
    """

    name: str
    problem: Problem
    inputs: Inputs
    hints: Hints
    tokens: Ints
    heads: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    factor: float = 1.0

    def undone(self, observed: Observed) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """out and lse of the variant under the names and in the size of the original, [tokens of the variant, ...]."""
        back = np.argsort(self.heads) if len(self.heads) else slice(None)
        return observed.out[:, back] / self.factor, None if observed.lse is None else observed.lse[:, back]


def repeated(problem: Problem, inputs: Inputs) -> Variant:
    """The same call once more."""
    return Variant("the same call again", problem, inputs, problem.hints, np.arange(problem.spec.num_tokens))


def chosen(problem: Problem, inputs: Inputs, requests: Sequence[int]) -> Variant:
    """Some requests only, in this order, over the same pool."""
    spec, order = problem.spec, list(requests)
    tokens = np.array(
        list(chain.from_iterable(range(spec.qo_indptr[n], spec.qo_indptr[n] + spec.qo_lens[n]) for n in order)),
        np.int64,
    )
    rows = (tokens[:, None] * spec.num_kv_heads + np.arange(spec.num_kv_heads)).ravel()
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
    names = ", ".join(map(str, order))
    return Variant(
        f"requests {names} in this order", smaller, inputs._replace(q=inputs.q[tokens]), problem.hints, tokens
    )


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
    caches = (PagedCache(cache.pages, cache.data[moved]) for cache in (inputs.k, inputs.v))
    variant = replace(
        problem,
        table=replace(problem.table, table=table, owned=owned),
        slot_request=problem.slot_request[moved],
        slot_token=problem.slot_token[moved],
    )
    tokens = np.arange(problem.spec.num_tokens)
    return Variant("pages at other addresses", variant, Inputs(inputs.q, *caches), problem.hints, tokens)


def shuffled(problem: Problem, inputs: Inputs, replicate: int) -> Variant:
    """The raw lists of a set in another order, padding included."""
    raw, draw = problem.raw, problem.draw("shuffle", replicate)
    parts = [raw.indices[a:b][draw.permutation(int(b - a))] for a, b in zip(raw.indptr, raw.indptr[1:], strict=False)]
    indices = np.concatenate([np.zeros(0, np.int64), *parts])
    variant = replace(problem, raw=CandidateLists(raw.indptr, indices))
    return Variant("lists in another order", variant, inputs, problem.hints, np.arange(problem.spec.num_tokens))


def scaled(problem: Problem, inputs: Inputs, factor: float = 2.0) -> Variant:
    """V times a power of two: out is as many times larger, to the bit."""
    larger = replace(inputs.v, data=factor * inputs.v.data)
    tokens = np.arange(problem.spec.num_tokens)
    return Variant("V scaled", problem, inputs._replace(v=larger), problem.hints, tokens, factor=factor)


def heads_reversed(problem: Problem, inputs: Inputs) -> Variant:
    """KV heads, with their query heads and lists, in the opposite order."""
    spec, raw, indptr = problem.spec, problem.raw, problem.candidates.indptr
    kv_heads = np.arange(spec.num_kv_heads)[::-1]
    heads = (kv_heads[:, None] * spec.group_size + np.arange(spec.group_size)).ravel()
    rows = (np.arange(spec.num_tokens)[:, None] * spec.num_kv_heads + kv_heads).ravel()
    new_indptr, indices, counts = _rows(indptr, rows, problem.candidates.indices, problem.candidates.counts)
    variant = replace(
        problem,
        raw=CandidateLists(*_rows(raw.indptr, rows, raw.indices)),
        candidates=ValidatedCandidates(new_indptr, indices, counts, problem.candidates.duplicates),
    )
    caches = (replace(cache, data=cache.data[:, :, kv_heads]) for cache in (inputs.k, inputs.v))
    tokens = np.arange(spec.num_tokens)
    return Variant("heads reversed", variant, Inputs(inputs.q[:, heads], *caches), problem.hints, tokens, heads)


def hinted(problem: Problem, inputs: Inputs, hints: Hints) -> Variant:
    """Other hints: they may change rounding, never the function."""
    name = f"{hints.num_splits} splits, tiles of {hints.kv_tile}"
    return Variant(name, problem, inputs, hints, np.arange(problem.spec.num_tokens))
