"""Faults of single keys, values and pages of a row: (problem, random) -> (backend, check), or None where the cell
cannot show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
from seeded_carriers import Key, Looped, Seeded, Target, address, first, names_token, target

from sacts.conformance.adapter import Case
from sacts.conformance.build import Problem
from sacts.conformance.localise.clues import Kind
from sacts.conformance.localise.locate import Location


class _Keyed(Looped):
    def __init__(self, where: Target, change: Callable[[Case, list[Key]], list[Key]], batched: bool = False) -> None:
        self._where, self._change, self._batched = where, change, batched

    def keys(self, case: Case, row: int, keys: list[Key]) -> list[Key]:
        active = self._where.is_row(case, row) and (case.spec.num_requests > 1 or not self._batched)
        return self._change(case, keys) if active else keys


def _edge(where: Target, random: Random) -> int:
    return int(random.choice(where.mine.token.tolist()))


def dropped(problem: Problem, random: Random) -> Seeded | None:
    """One token of one row is skipped."""
    where = target(problem, random)
    if not where:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, masked=key.masked or key.t == t) for key in keys]

    return _Keyed(where, change), lambda found: names_token(found, where, t, Kind.MISSING)


def doubled(problem: Problem, random: Random) -> Seeded | None:
    """One token of one row counts twice."""
    where = target(problem, random)
    if not where:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return keys + [key for key in keys if key.t == t and not key.masked]

    return _Keyed(where, change), lambda found: names_token(found, where, t, Kind.REPEATED)


def replaced(problem: Problem, random: Random) -> Seeded | None:
    """One token of one row is read instead of another, which is no candidate."""
    where = target(problem, random)
    free = (
        [] if not where else sorted(set(range(problem.spec.seq_lens[where.request])) - set(where.mine.token.tolist()))
    )
    if not where or not free:
        return None
    t, other = _edge(where, random), random.choice(free)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        def at(key: Key) -> Key:
            request = _request_of(case, where)
            place = address(case, request, other, where.kv_head)
            return replace(key, k=place, v=place) if key.t == t else key

        return [at(key) for key in keys]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return (
            names_token(found, where, t, Kind.MISSING)
            and extra is not None
            and [(o.request, o.token) for o in extra.tokens] == [(where.request, other)]
        )

    return _Keyed(where, change), right


def _request_of(case: Case, where: Target) -> int:
    return int((case.page_table[:, 0] == where.page).nonzero()[0, 0])


def foreign(problem: Problem, random: Random) -> Seeded | None:
    """One token is read from another request's page, K and V."""
    where = target(problem, random)
    pages = np.unique(problem.pages[(problem.slot_request >= 0).any(axis=1)])
    outside = [] if not where else [int(p) for p in pages if p not in problem.table.owned[where.request]]
    if not where or not outside:
        return None
    t, page = _edge(where, random), random.choice(outside)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [
            replace(key, k=(page, *key.k[1:]), v=(page, *key.v[1:])) if key.t == t and not key.masked else key
            for key in keys
        ]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return (
            names_token(found, where, t, Kind.MISSING)
            and extra is not None
            and [(o.physical, o.offset) for o in extra.tokens] == [(page, t % problem.spec.page_size)]
            and extra.tokens[0].request != where.request
        )

    return _Keyed(where, change), right


def tail(problem: Problem, random: Random) -> Seeded | None:
    """The slot behind T is attended."""
    where = target(problem, random, edges=1)
    if not where or not problem.spec.seq_lens[where.request] % problem.spec.page_size:
        return None
    t = problem.spec.seq_lens[where.request]

    def change(case: Case, keys: list[Key]) -> list[Key]:
        at = address(case, _request_of(case, where), t, where.kv_head)
        return [*keys, Key(t, at, at)]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return where.named(found) and extra is not None and [o.token for o in extra.tokens] == [t]

    return _Keyed(where, change), right


def key_scale(problem: Problem, random: Random) -> Seeded | None:
    """One key is dequantised with a scale that is not its own."""
    where = target(problem, random, edges=3)
    if not where:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, scale=-2.0) if key.t == t else key for key in keys]

    return _Keyed(where, change), lambda found: names_token(found, where, t, Kind.WEIGHT, Kind.EXTRA, Kind.MISSING)


def exchanged_values(problem: Problem, random: Random) -> Seeded | None:
    """V of two tokens of a row is exchanged."""
    where = target(problem, random, edges=3)
    if not where:
        return None
    a, b = random.sample(where.mine.token.tolist(), 2)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        v = {key.t: key.v for key in keys}
        return [replace(key, v=v[{a: b, b: a}.get(key.t, key.t)]) if {a, b} <= set(v) else key for key in keys]

    def right(found: Location) -> bool:
        both = (Kind.EXCHANGED, Kind.WEIGHT)
        return names_token(found, where, a, *both) and names_token(found, where, b, *both)

    return _Keyed(where, change), right


def _page_fault(problem: Problem, random: Random, which: str) -> Seeded | None:
    """One logical page is read from another physical page: K, V or both."""
    where = target(problem, random, edges=3)
    if not where:
        return None
    size = problem.spec.page_size
    page = _edge(where, random) // size
    own = int(problem.table.table[where.request, page])
    other = random.choice([int(p) for p in problem.pages if p != own])
    lost = where.mine.token[where.mine.token // size == page].tolist()

    def change(case: Case, keys: list[Key]) -> list[Key]:
        def at(key: Key) -> Key:
            k, v = (other, *key.k[1:]), (other, *key.v[1:])
            return replace(key, k=k if "k" in which else key.k, v=v if "v" in which else key.v)

        return [at(key) if key.t // size == page and not key.masked else key for key in keys]

    def right(found: Location) -> bool:
        pages = {page for clue in found.clues for page in clue.pages}
        named = {o.token for clue in found.clues for o in clue.tokens if o.request == where.request}
        physical = {o.physical for clue in found.clues for o in clue.tokens}
        return where.named(found) and page in pages and bool(named & set(lost)) and (which == "k" or other in physical)

    return _Keyed(where, change), right


def page_of_both(problem: Problem, random: Random) -> Seeded | None:
    """The page table is off for one logical page."""
    return _page_fault(problem, random, "kv")


def page_of_v(problem: Problem, random: Random) -> Seeded | None:
    """V comes from another page than K."""
    return _page_fault(problem, random, "v")


def page_of_k(problem: Problem, random: Random) -> Seeded | None:
    """K comes from another page than V."""
    return _page_fault(problem, random, "k")


def head_of_v(problem: Problem, random: Random) -> Seeded | None:
    """V comes from another KV head."""
    where = target(problem, random)
    if not where or problem.spec.num_kv_heads < 2:
        return None
    other = (where.kv_head + 1) % problem.spec.num_kv_heads

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, v=(*key.v[:2], other)) for key in keys]

    def right(found: Location) -> bool:
        extra = first(found, Kind.EXTRA)
        return where.named(found) and extra is not None and {o.kv_head for o in extra.tokens} == {other}

    return _Keyed(where, change), right


def only_in_a_batch(problem: Problem, random: Random) -> Seeded | None:
    """A token is skipped, but only where other requests run beside."""
    where = target(problem, random)
    if not where or sum(n > 0 for n in problem.spec.qo_lens) < 2:
        return None
    t = _edge(where, random)

    def change(case: Case, keys: list[Key]) -> list[Key]:
        return [replace(key, masked=key.masked or key.t == t) for key in keys]

    def right(found: Location) -> bool:
        return names_token(found, where, t, Kind.MISSING) and first(found, Kind.BATCH) is not None

    return _Keyed(where, change, batched=True), right


def contaminated(problem: Problem, random: Random) -> Seeded | None:
    """A row also attends the first token of one other request, where that runs beside it."""
    where = target(problem, random)
    near = [] if not where else [n for n, t in enumerate(problem.spec.seq_lens) if t and n != where.request]
    if not where or not near or problem.cell.map == "shared":
        return None
    other = random.choice(near)
    page = int(problem.table.table[other, 0])

    def change(case: Case, keys: list[Key]) -> list[Key]:
        at = page, 0, where.kv_head
        return [*keys, Key(0, at, at)] if page in case.page_table[:, 0].tolist() else keys

    def right(found: Location) -> bool:
        extra, batch = first(found, Kind.EXTRA), first(found, Kind.BATCH)
        named = extra is not None and [(o.request, o.token) for o in extra.tokens] == [(other, 0)]
        return where.named(found) and named and batch is not None and batch.requests == (other,)

    return _Keyed(where, change, batched=True), right
