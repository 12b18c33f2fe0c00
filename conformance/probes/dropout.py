"""Dropout: is the keep mask the one that (key, query, query head, request uid) draw, and is it kept off the
denominator?

All logits are equal. V is 1 in even channels, whose out is then the kept mass (kept edges) / (k (1 - p)), and +-1 codes
in odd ones, which tell masks of equal mass apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sacts.reference import philox
from sacts.reference.bounds import Exactness, Expected
from sacts.reference.formats import round_to
from sacts.reference.forward import Inputs
from sacts.reference.spec import Dropout
from sacts.reports.records import PROVES

from ..adapter import PADDING
from ..build import Problem
from ..draw import Array, Ints
from .inputs import Probe
from .margins import CERTAIN, noticed
from .weights import RowWeights, finished, row_weights


def suits(problem: Problem) -> bool:
    """Whether edges are dropped."""
    return problem.spec.dropout is not None


def _inputs(problem: Problem) -> Inputs:
    spec, draw = problem.spec, problem.draw("dropout")
    slots = (*problem.slot_request.shape, spec.num_kv_heads)
    k = round_to(draw.normal((*slots, spec.head_dim_qk)), spec.dtype)
    v = draw.signs((*slots, spec.head_dim_vo))
    v[..., ::2] = 1.0
    return problem.inputs(np.zeros((spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk)), k, v)


DROPOUT = Probe("dropout", PROVES["dropout"], lambda problem: Exactness(equal_logits=True), _inputs)


def of_dropout(problem: Problem, inputs: Inputs, expected: Expected) -> Array:
    """One edge of a row that is kept though it is dropped, or dropped though it is kept, where it shows least."""
    needed, found = noticed(expected, problem.spec.dtype), []
    p = problem.spec.dropout.p if problem.spec.dropout else 0.0
    for row in row_weights(problem, inputs):
        other = np.where(row.factor > 0, 0.0, 1 / (1 - p))
        turned = row.out + (row.w * row.repeats * (other - row.factor))[:, None] * row.v
        moved = np.abs(finished(problem, inputs, turned, row) - finished(problem, inputs, row.out, row))
        times = (moved / needed[row.token, row.qo_head]).max(axis=-1)
        found.append(min(float(times.min()), CERTAIN))
    return np.array(found)


class Wrong(NamedTuple):
    """A way to drop wrongly, in words, and the out that it yields [tokens, heads, d_vo], 0 in rows without an edge."""

    words: str
    out: Array


def mistakes(problem: Problem, inputs: Inputs) -> Iterator[Wrong]:
    """Ways to draw the mask by something else, and ways to use the right one wrongly."""
    spec, rows = problem.spec, list(row_weights(problem, inputs))
    dropout = spec.dropout
    assert dropout is not None
    shape = (spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo)
    for words, numerator in _USES.items():
        out = np.zeros(shape)
        for row in rows:
            out[row.token, row.qo_head] = numerator(row, dropout.p)
        yield Wrong(words, finished(problem, inputs, out))
    for words, counter in _COUNTERS.items():
        out = np.zeros(shape)
        for row in rows:
            keep = philox.keep(dropout, *counter(problem, row, _own(problem, row)))
            out[row.token, row.qo_head] = (row.w * row.repeats * keep / (1 - dropout.p)) @ row.v
        yield Wrong(f"the keep mask were drawn by {words}", finished(problem, inputs, out))


def _kept(row: RowWeights) -> Array:
    """Weight of each key that is kept, all its repeats together."""
    kept: Array = row.w * row.repeats * (row.factor > 0)
    return kept


_USES: dict[str, Callable[[RowWeights, float], Array]] = {
    "dropped edges were missing in the denominator too": lambda row, p: _kept(row) @ row.v / (1 - p) / _sum(row),
    "dropped edges were missing everywhere, without 1 / (1 - p)": lambda row, p: _kept(row) @ row.v / _sum(row),
    "the factor 1 / (1 - p) were missing": lambda row, p: _kept(row) @ row.v,
    "the factor 1 / (1 - p) were there twice": lambda row, p: _kept(row) @ row.v / (1 - p) ** 2,
    "no edge were dropped": lambda row, p: (row.w * row.repeats) @ row.v,
    "no edge were dropped, yet all scaled by 1 / (1 - p)": lambda row, p: (row.w * row.repeats) @ row.v / (1 - p),
    "the dropped edges were kept and the others dropped": lambda row, p: (
        (row.w * row.repeats * (row.factor == 0)) @ row.v / (1 - p)
    ),
}


def _sum(row: RowWeights) -> float:
    return float(_kept(row).sum()) or 1.0


class _Own(NamedTuple):
    """The right counter of a row: key [k], query, head, uid; and the request."""

    key: Ints
    query: int
    head: int
    uid: int
    request: int


def _own(problem: Problem, row: RowWeights) -> _Own:
    spec = problem.spec
    request = spec.token_request[row.token]
    dropout: Dropout | None = spec.dropout
    uids = dropout.request_uids if dropout and dropout.request_uids else range(spec.num_requests)
    return _Own(row.key, spec.token_position[row.token], row.qo_head, uids[request], request)


def _place(row: RowWeights) -> Array:
    """The place of each key among those of the row, in the order of their positions."""
    return np.argsort(np.argsort(row.t)).astype(np.float64)


def _listed(problem: Problem, row: RowWeights) -> Array:
    """The place of each key in the raw list, repeats and padding left out."""
    spec, raw = problem.spec, problem.raw
    index = spec.row_of(row.token, row.qo_head)
    entries = raw.indices[raw.indptr[index] : raw.indptr[index + 1]]
    tokens = (entries[entries != PADDING][:, None] * spec.block_size + np.arange(spec.block_size)).ravel()
    place = {token: at for at, token in enumerate(dict.fromkeys(tokens.tolist()))}
    return np.array([place.get(token, 0) for token in row.t.tolist()], np.float64)


def _slot(problem: Problem, row: RowWeights, request: int) -> Array:
    page, offset = np.divmod(row.t, problem.spec.page_size)
    slot: Array = problem.table.table[request, page] * problem.spec.page_size + offset
    return slot


_Counter = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]
_COUNTERS: dict[str, Callable[[Problem, RowWeights, _Own], _Counter]] = {
    "the place of the key among those of the row": lambda p, row, own: (_place(row), own.query, own.head, own.uid),
    "the place of the key in the raw list": lambda p, row, own: (_listed(p, row), own.query, own.head, own.uid),
    "the logical position of the key": lambda p, row, own: (row.t, own.query, own.head, own.uid),
    "the physical slot of the key": lambda p, row, own: (_slot(p, row, own.request), own.query, own.head, own.uid),
    "the place of the request in the batch": lambda p, row, own: (own.key, own.query, own.head, own.request),
    "the request alone, without its uid": lambda p, row, own: (own.key, own.query, own.head, 0),
    "the query's place in its request": lambda p, row, own: (
        own.key,
        row.token - p.spec.qo_indptr[own.request],
        own.head,
        own.uid,
    ),
    "the query's place in the batch": lambda p, row, own: (own.key, row.token, own.head, own.uid),
    "the KV head": lambda p, row, own: (own.key, own.query, own.head // p.spec.group_size, own.uid),
    "the place of the query head in its group": lambda p, row, own: (
        own.key,
        own.query,
        own.head % p.spec.group_size,
        own.uid,
    ),
    "key and query in each other's place": lambda p, row, own: (own.query, own.key, own.head, own.uid),
}
