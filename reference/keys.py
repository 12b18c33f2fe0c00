"""The keys and values that one request attends, read once from its pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .edges import Edges, row_kv_heads
from .paging import PagedCache, PageTable
from .spec import AttentionSpec, CandidateKind

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

SMALL = 64  # so few keys are copied and attended as a whole, however sparse
SLACK = 1.01  # for the rounding of a norm


class Keys(NamedTuple):
    """k [b, S, d_qk], v [b, S, d_vo], zero where no row attends; norm_k [b, S]; largest_v [b, d_vo]: max |v_j|."""

    k: Array
    v: Array
    norm_k: Array
    largest_v: Array


class KeyStore(NamedTuple):
    """K and V of the n keys that a request attends, by KV head: k [.., d_qk] and v [.., d_vo].

    t [n]: their logical positions, in order; place: index among them by t. `compact`: k [n * heads, d_qk] holds
    just these, as do v, norm_k [n * heads] and largest_v [heads, d_vo]; else k and v are the whole cache and `slots`
    (of K, of V) the places in it. `turned`: RoPE is already applied.
    """

    t: Ints
    place: Ints
    heads: int
    k: Array
    v: Array
    compact: bool
    slots: tuple[Ints, Ints]
    norm_k: Array
    largest_v: Array
    turned: bool

    def all(self, kv_heads: Ints) -> Keys:
        """Every key of a compact store, for the KV heads [b]; no copy where these are neighbours."""
        first, last = int(kv_heads[0]), int(kv_heads[-1])
        heads = slice(first, last + 1) if last - first + 1 == len(kv_heads) else kv_heads
        k, v, norm_k = (
            x.reshape(len(self.t), self.heads, *x.shape[1:]).swapaxes(0, 1)[heads]
            for x in (self.k, self.v, self.norm_k)
        )
        return Keys(k, v, norm_k, self.largest_v[heads])

    def some(self, key: Ints, kv_heads: Ints) -> Keys:
        """The keys `key` [b, S] of the KV heads [b]."""
        if self.compact:
            at = key * self.heads + kv_heads[:, None]
            return Keys(self.k.take(at, 0), self.v.take(at, 0), self.norm_k.take(at), self.largest_v[kv_heads])
        k, v = (
            x.take(slots[key] * self.heads + kv_heads[:, None], axis=0)
            for x, slots in zip((self.k, self.v), self.slots, strict=True)
        )
        return Keys(k, v, norm(k), largest(v))


def store_of(
    spec: AttentionSpec, k: PagedCache, v: PagedCache, table: PageTable, request: int, edges: Edges
) -> KeyStore:
    """Copy what one request attends, unless its rows name so different keys that copying each once would cost more.

    Raises LookupError for an attended page without data.
    """
    heads = spec.num_kv_heads
    attended = np.zeros(int(edges.t.max()) + 1, bool)
    attended[edges.t] = True
    t = np.flatnonzero(attended)
    place = np.cumsum(attended) - 1
    slots = _slots(k, table, request, t), _slots(v, table, request, t)
    if len(t) > SMALL and len(t) * heads > len(edges.t):
        flat_k, flat_v = (cache.data.reshape(-1, cache.data.shape[-1]) for cache in (k, v))
        nothing = np.zeros((0, 0))
        return KeyStore(t, place, heads, flat_k, flat_v, False, slots, nothing, nothing, False)
    used = np.zeros((len(t), heads), bool)
    used[place[edges.t], row_kv_heads(spec, edges.row)] = True
    data = [
        cache.data.reshape(-1, heads * cache.data.shape[-1]).take(slot, axis=0).reshape(len(t), heads, -1)
        for cache, slot in zip((k, v), slots, strict=True)
    ]
    for x in data:
        if not used.all():
            x[~used] = 0.0  # what stands there is junk
    norm_k, largest_v = norm(data[0]).ravel(), largest(data[1].swapaxes(0, 1))
    turned = spec.rope is not None and spec.candidate_kind is not CandidateKind.SEQUENCE
    if spec.rope is not None and turned:
        data[0] = scores.rotate(data[0], t[:, None], spec.rope)
    flat_k, flat_v = (x.reshape(len(t) * heads, -1) for x in data)
    return KeyStore(t, place, heads, flat_k, flat_v, True, slots, norm_k, largest_v, turned)


def _slots(cache: PagedCache, table: PageTable, request: int, t: Ints) -> Ints:
    """Index of each logical position among the slots of `cache.data`."""
    page, offset = np.divmod(t, table.page_size)
    physical = table.table[request, page]
    at = np.minimum(np.searchsorted(cache.pages, physical), max(len(cache.pages) - 1, 0))
    missing = cache.pages[at] != physical if len(cache.pages) else np.ones(len(t), bool)
    if missing.any():
        bad = int(np.argmax(missing))
        start = page[bad] * table.page_size
        raise LookupError(f"request {request}, position {start}: physical page {physical[bad]} holds no data")
    slots: Ints = at * table.page_size + offset
    return slots


def norm(x: Array) -> Array:
    """At least the Euclidean norm over the last axis: squares below the least normal number are made up for."""
    with np.errstate(over="ignore"):
        bound: Array = np.sqrt(np.einsum("...d,...d->...", x, x) * SLACK + x.shape[-1] * 1e-300)
    return bound


def largest(v: Array) -> Array:
    """max |v| over the last axis but one."""
    bound: Array = np.maximum(v.max(axis=-2), -v.min(axis=-2))
    return bound
