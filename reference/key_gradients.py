"""Gradients of K and V: one sum for each (request, KV head, position) that some row attends, then one for each
physical slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .edges import Edges
from .estimates import LOST, SLACK, U
from .gradient_estimates import FLOOR, Columns, judge
from .groups import Group
from .paging import PageTable, Scattered, scatter
from .softmax import EdgeIndex
from .spec import AttentionSpec, CandidateKind

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Pair = tuple[Array, Array]


class Positions(NamedTuple):
    """What some row attends after all masks, each (request, KV head, logical position t) once, in this order; `page`
    and `offset`: the physical slot it is read from. [n] each.

    Two entries may have one physical slot: a shared prefix, or a page at several logical offsets.
    """

    request: Ints
    kv_head: Ints
    t: Ints
    page: Ints
    offset: Ints


@dataclass(frozen=True)
class KeyGradient:
    """The gradient of K or V at the positions that are attended; it is 0 at every other.

    value [n, dim], of K behind RoPE, as the cache stores it (rotated back by the key's own position), and `error`
    [n, dim], a bound of its distance to the exact one: infinite where FP64 is too short, never judge by it.
    """

    positions: Positions
    value: Array
    error: Array
    num_kv_heads: int
    page_size: int

    def logical(self, request: int, seq_len: int) -> tuple[Array, Array]:
        """Value and error of one request at every logical position, 0 where nothing attends: [seq_len, heads, dim]."""
        mine = self.positions.request == request
        at = self.positions.t[mine], self.positions.kv_head[mine]
        value, error = (np.zeros((seq_len, self.num_kv_heads, self.value.shape[-1])) for _ in range(2))
        value[at], error[at] = self.value[mine], self.error[mine]
        return value, error

    @cached_property
    def pages(self) -> Scattered:
        """The gradient of the physical pages: each slot holds the sum over all its references. A page that is not among
        them has gradient 0.
        """
        return self._scattered(self.value)

    @cached_property
    def page_errors(self) -> Scattered:
        """The error of `pages`."""
        summed = self._scattered(self.error)
        several = np.maximum(summed.references - 1, 0)[..., None]
        if several.any():
            sizes = self._scattered(np.abs(self.value)).cache.data
            summed.cache.data[:] += SLACK * several * U * sizes
        return summed

    def _scattered(self, values: Array) -> Scattered:
        _, kv_head, _, page, offset = self.positions
        return scatter(page, offset, kv_head, values, self.page_size, self.num_kv_heads)


class KeySums:
    """The sums of one request while its groups are added: views of the batch's values and errors, (d_k, d_v) each.

    K is summed as the product sees it and rotated back at the end, but for a sequence, where the position of a key is
    its ordinal and differs from row to row.
    """

    def __init__(self, spec: AttentionSpec, places: _Places, values: Pair, errors: Pair) -> None:
        self.spec, self.positions, self.entry = spec, places.positions, places.entry
        self.values, self.errors = values, errors
        self.by_key = tuple(np.zeros(len(value)) for value in values)
        self.channels = tuple(np.zeros((spec.num_kv_heads, value.shape[1])) for value in values)
        self.in_order = spec.candidate_kind is not CandidateKind.SEQUENCE
        ends = np.searchsorted(self.positions.kv_head, range(spec.num_kv_heads + 1)).tolist()
        self.of_head = [slice(start, stop) for start, stop in pairwise(ends)]
        self.begun: set[tuple[int, int]] = set()  # (which, KV head) that hold a sum
        self.terms = spec.qo_lens[places.request] * spec.group_size

    def entries(self, group: Group) -> Ints:
        """The entry of each key [b, S] of a group; of keys that no row attends, whatever."""
        kv_head = group.rows[:, :1] % self.spec.num_kv_heads
        found: Ints = self.entry[kv_head, group.t]
        return found

    def add(self, which: int, group: Group, weights: Array, rows: Array) -> None:
        """weights^T rows, of the rotated k (which = 0) or of v (1): weights [b, r * g, S], rows [b, r * g, dim]."""
        attended, total = np.asarray(group.edge.any(axis=1)), self.values[which]
        turn = None if which or self.in_order else self.spec.rope
        kv_heads = (group.rows[:, 0] % self.spec.num_kv_heads).tolist()
        for b, (kv_head, entry, some) in enumerate(zip(kv_heads, self.entries(group), attended, strict=True)):
            mine = self.of_head[kv_head]
            whole = self.in_order and len(entry) == mine.stop - mine.start and some.all()
            part = (rows[b].T @ weights[b]).T  # faster than weights.T @ rows, which BLAS packs badly
            if whole and (which, kv_head) not in self.begun:
                total[mine] = part
            else:
                part = scores.rotate_back(part, group.key_position[b], turn) if turn else part
                total[entry[some]] += part[some]
            self.begun.add((which, kv_head))

    def add_errors(self, group: Group, index: EdgeIndex, p: Array, columns: tuple[Columns, Columns]) -> None:
        """P [g, edges] of a group, and how much error a unit of it carries to K and to V."""
        per_row, n = group.z.shape[2] * group.z.shape[3], group.z.shape[3]
        row, slot = np.divmod(index.at[0], per_row)
        key = self.entries(group).reshape(-1)[row // group.edge.shape[1] * n + slot]
        key = np.broadcast_to(key, p.shape).ravel()
        kv_head = group.rows[:, 0] % self.spec.num_kv_heads
        for total, largest, (by_row, floor, channel) in zip(self.by_key, self.channels, columns, strict=True):
            at_edges, least = (index.spread(x.reshape(-1, len(p))[index.rows].T) for x in (by_row, floor))
            weight = (p + LOST) * at_edges + least
            total += np.bincount(key, weight.ravel(), len(total))
            np.maximum.at(largest, kv_head, channel)

    def finish(self) -> None:
        """K rotated back, and the errors of both."""
        d_k = self.values[0]
        if self.spec.rope and self.in_order:
            d_k[:] = scores.rotate_back(d_k, self.positions.t, self.spec.rope)
        floor = (abs(self.spec.sm_scale) + 1) * (self.terms + 1) * FLOOR
        for value, error, by_key, channel in zip(self.values, self.errors, self.by_key, self.channels, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                for mine, of_channel in zip(self.of_head, channel, strict=True):
                    terms = np.array([by_key[mine], np.full(len(by_key[mine]), floor)])
                    np.matmul(terms.T, np.array([of_channel, np.ones_like(of_channel)]), out=error[mine])
                if not np.isfinite(by_key.max() * channel.max() / U**2):  # else no value can have overflowed
                    judge(value, error)


class _Places(NamedTuple):
    """What one request attends: entry [heads, T] is the place among its positions of each (KV head, t) that is."""

    request: int
    positions: Positions
    entry: Ints


def _places(spec: AttentionSpec, table: PageTable, request: int, edges: Edges) -> _Places:
    heads = spec.num_kv_heads
    used = np.zeros((heads, int(edges.t.max()) + 1), bool)
    used[edges.row % heads, edges.t] = True
    kv_head, t = np.nonzero(used)
    _, offset, page = table.locate(request, t)
    entry = (np.cumsum(used) - 1).reshape(used.shape)
    return _Places(request, Positions(np.full_like(t, request), kv_head, t, page, offset), entry)


def key_sums(
    spec: AttentionSpec, table: PageTable, edges: Edges
) -> tuple[dict[int, KeySums], KeyGradient, KeyGradient]:
    """The sums of each request that attends anything, and d_k and d_v, which these fill."""
    ends = np.searchsorted(edges.row, np.asarray(spec.qo_indptr) * spec.num_kv_heads).tolist()
    places = [
        _places(spec, table, request, edges.part(start, stop))
        for request, (start, stop) in enumerate(pairwise(ends))
        if start < stop
    ]
    stops = np.cumsum([0, *(len(place.positions.t) for place in places)]).tolist()
    nothing = Positions(*[np.zeros(0, np.int64)] * 5)
    columns = zip(nothing, *(place.positions for place in places), strict=True)
    positions = Positions(*(np.concatenate(column) for column in columns))
    d_k, d_v = (
        KeyGradient(positions, np.zeros(shape), np.empty(shape), spec.num_kv_heads, table.page_size)
        for shape in ((stops[-1], spec.head_dim_qk), (stops[-1], spec.head_dim_vo))
    )
    sums = {}
    for place, (start, stop) in zip(places, pairwise(stops), strict=True):
        values, errors = ((d_k.value, d_v.value), (d_k.error, d_v.error))
        mine = slice(start, stop)
        sums[place.request] = KeySums(
            spec, place, (values[0][mine], values[1][mine]), (errors[0][mine], errors[1][mine])
        )
    return sums, d_k, d_v
