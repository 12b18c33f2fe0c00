"""Gradients of K and V: one sum for each (request, KV head, position) that some row attends, then one for each
physical slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .edges import Edges, row_kv_heads
from .estimates import LOST, SLACK, U
from .gradient_estimates import FLOOR, Columns, judge
from .groups import Group
from .paging import PageTable, Scattered, scatter
from .softmax import EdgeIndex
from .spec import AttentionSpec, CandidateKind

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


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


class KeyBound(NamedTuple):
    """The error of an entry's channel c is at most by_key [n] * channel [num_requests, num_kv_heads, dim] + floor."""

    by_key: Array
    channel: Array
    floor: float


@dataclass(frozen=True)
class KeyGradient:
    """The gradient of K or V at the positions that are attended; it is 0 at every other.

    value [n, dim], of K as the cache stores it (rotated back by the key's own position); `bound` spells out `error`.
    """

    positions: Positions
    value: Array
    bound: KeyBound
    num_kv_heads: int
    page_size: int

    @cached_property
    def error(self) -> Array:
        """[n, dim], a bound of the distance of `value` to the exact one: infinite where FP64 is too short, so that
        nothing may be judged by it.
        """
        by_key, channel, floor = self.bound
        error: Array = channel[self.positions.request, self.positions.kv_head]
        with np.errstate(over="ignore"):
            error *= by_key[:, None]
            error += floor
            if not np.isfinite(by_key.max(initial=0) * channel.max(initial=0) / U**2):  # else nothing overflowed
                judge(self.value, error)
        return error

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
    """The sums of one request while its groups are added: views of d_k and d_v, their values and their bounds.

    K is summed as the product sees it and rotated back at the end, but for a sequence, where the position of a key is
    its ordinal and differs from row to row.
    """

    def __init__(self, spec: AttentionSpec, places: _Places, mine: slice, gradients: Sequence[KeyGradient]) -> None:
        self.spec, self.positions, self.entry = spec, places.positions, places.entry
        self.values = [gradient.value[mine] for gradient in gradients]
        self.by_key = [gradient.bound.by_key[mine] for gradient in gradients]
        self.channels = [gradient.bound.channel[places.request] for gradient in gradients]
        self.in_order = spec.candidate_kind is not CandidateKind.SEQUENCE
        ends = np.searchsorted(self.positions.kv_head, range(spec.num_kv_heads + 1)).tolist()
        self.of_head = [slice(start, stop) for start, stop in pairwise(ends)]
        self.begun: set[tuple[int, int]] = set()  # (which, KV head) that hold a sum
        self.terms = _terms(spec)

    def entries(self, group: Group) -> Ints:
        """The entry of each key [b, S] of a group; of keys that no row attends, whatever."""
        kv_head = row_kv_heads(self.spec, group.rows[:, :1])
        found: Ints = self.entry[kv_head, group.t]
        return found

    def add(self, which: int, group: Group, weights: Array, rows: Array) -> None:
        """weights^T rows, of the rotated k (which = 0) or of v (1): weights [b, r * g, S], rows [b, r * g, dim]."""
        attended, total = np.asarray(group.edge.any(axis=1)), self.values[which]
        turn = None if which or self.in_order else self.spec.rope
        kv_heads = row_kv_heads(self.spec, group.rows[:, 0]).tolist()
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
        kv_head = row_kv_heads(self.spec, group.rows[:, 0])
        for total, largest, (by_row, floor, channel) in zip(self.by_key, self.channels, columns, strict=True):
            at_edges, least = (index.spread(x.reshape(-1, len(p))[index.rows].T) for x in (by_row, floor))
            weight = (p + LOST) * at_edges + least
            total += np.bincount(key, weight.ravel(), len(total))
            np.maximum.at(largest, kv_head, channel)

    def finish(self) -> None:
        """K rotated back."""
        d_k = self.values[0]
        if self.spec.rope and self.in_order:
            d_k[:] = scores.rotate_back(d_k, self.positions.t, self.spec.rope)


class _Places(NamedTuple):
    """What one request attends: entry [heads, T] is the place among its positions of each (KV head, t) that is."""

    request: int
    positions: Positions
    entry: Ints


def _places(spec: AttentionSpec, table: PageTable, request: int, edges: Edges) -> _Places:
    heads = spec.num_kv_heads
    used = np.zeros((heads, int(edges.t.max()) + 1), bool)
    used[row_kv_heads(spec, edges.row), edges.t] = True
    kv_head, t = np.nonzero(used)
    _, offset, page = table.locate(request, t)
    entry = (np.cumsum(used) - 1).reshape(used.shape)
    return _Places(request, Positions(np.full_like(t, request), kv_head, t, page, offset), entry)


def key_sums(
    spec: AttentionSpec, table: PageTable, edges: Edges
) -> tuple[dict[int, KeySums], KeyGradient, KeyGradient]:
    """The sums of each request that attends anything, and d_k and d_v, which these fill."""
    ends = np.searchsorted(edges.row, np.asarray(spec.qo_indptr) * spec.list_heads).tolist()
    places = [
        _places(spec, table, request, edges.part(start, stop))
        for request, (start, stop) in enumerate(pairwise(ends))
        if start < stop
    ]
    stops = np.cumsum([0, *(len(place.positions.t) for place in places)]).tolist()
    nothing = Positions(*[np.zeros(0, np.int64)] * 5)
    columns = zip(nothing, *(place.positions for place in places), strict=True)
    positions = Positions(*(np.concatenate(column) for column in columns))
    requests = (spec.num_requests, spec.num_kv_heads)
    floor = (abs(spec.sm_scale) + 1) * (_terms(spec) + 1) * FLOOR
    d_k, d_v = (
        KeyGradient(
            positions,
            np.zeros((stops[-1], dim)),
            KeyBound(np.zeros(stops[-1]), np.zeros((*requests, dim)), floor),
            spec.num_kv_heads,
            table.page_size,
        )
        for dim in (spec.head_dim_qk, spec.head_dim_vo)
    )
    sums = {
        place.request: KeySums(spec, place, slice(start, stop), (d_k, d_v))
        for place, (start, stop) in zip(places, pairwise(stops), strict=True)
    }
    return sums, d_k, d_v


def _terms(spec: AttentionSpec) -> int:
    """Products that may be added up for one key."""
    return max(spec.qo_lens, default=0) * spec.group_size
