"""What a decoded row says, in words and as data: tokens, pages, tiles and splits whose weight is not theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from sacts.reference.formats import FORMATS
from sacts.reports.records import Gate, Strip

from ..build import Problem
from ..gates.intervals import LARGEST_USE
from .launches import Family
from .lists import whose
from .slots import Owner, name, owner_of
from .tomography import Decoded

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

NAMED = 4  # tokens named in a sentence
SCALED = 4  # logits from which a common factor is believed
STRIP_BINS = 128  # ranges of a probability strip


class Kind(StrEnum):
    """What a clue is about."""

    MISSING = "missing"
    REPEATED = "repeated"
    EXTRA = "extra"
    EXCHANGED = "exchanged"
    WEIGHT = "weight"
    PAGE = "page"
    TILE = "tile"
    SPLIT = "split"
    DENOMINATOR = "denominator"
    CHANNEL = "channel"
    MISPLACED = "misplaced"
    BATCH = "batch"
    EMPTY = "empty"
    LSE = "lse"
    SCALE = "scale"
    LAYOUT = "layout"
    INDEX = "index"
    LIST = "list"


@dataclass(frozen=True)
class Clue:
    """One statement about one output row. Of what it names, the numbers: `tokens`: slots; `tiles`, `splits`,
    `channels`; `pages`: logical pages of the row's request; `requests`: others that take part; `row`: another output
    row (token, query head).
    """

    kind: Kind
    words: str
    gate: Gate
    tokens: tuple[Owner, ...] = ()
    pages: tuple[int, ...] = ()
    tiles: tuple[int, ...] = ()
    splits: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    row: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Found:
    """The wrong slots of a decoded row: [n] each. `tile` -1 for a slot that is no edge; `times`: weight in units of
    what an edge of its kind has.
    """

    owners: list[Owner]
    observed: Array
    expected: Array
    tile: NDArray[np.int64]
    times: Array

    def some(self, which: Bools) -> list[int]:
        return np.flatnonzero(which).tolist()


@dataclass(frozen=True)
class Reading:
    """The clues of one decoded row, and its strip."""

    clues: tuple[Clue, ...] = ()
    strip: Strip | None = field(default=None, compare=False)


def read(family: Family, decoded: Decoded, token: int, qo_head: int) -> Reading:
    """Compare a decoded row with what it must be; no clue where nothing differs."""
    problem = family.problem
    strip = _strip(problem, decoded, token, qo_head)
    if not np.isfinite(decoded.first.observed).all():
        return Reading((Clue(Kind.WEIGHT, "its weights are not finite", Gate.COUNT),), strip)
    if vanished := _vanished(decoded):
        return Reading((vanished,), strip)
    if region := _regions(family, decoded, token):
        return Reading((region,), strip)
    found = _found(family, decoded, token)
    if scaled := _scaled(family, decoded, found):
        return Reading((scaled,), strip)
    clues = _of_tokens(family, decoded, found, token, qo_head)
    return Reading(tuple(clues) or _of_denominator(family, decoded), strip)


# --- the whole row


def _vanished(decoded: Decoded) -> Clue | None:
    """All weights are 0 under too large an lse: the denominator's fault, not the tokens'."""
    lse, k = decoded.lse, int(decoded.walk.count.sum())
    if decoded.first.observed.any() or not lse[0] > lse[1] + 1:
        return None
    words = (
        f"its {k} weights vanish under an lse of {lse[0]:.7g}, expected {lse[1]:.7g}: "
        f"the denominator counts more edges, the numerator {k}"
    )
    return Clue(Kind.DENOMINATOR, words, Gate.LSE)


def _of_denominator(family: Family, decoded: Decoded) -> tuple[Clue, ...]:
    """No slot is wrong by itself: is the sum of all?"""
    first, lse = decoded.first, decoded.lse
    k = int(decoded.walk.count.sum())
    right = float(first.expected.sum())
    if not k or abs(first.total - right) <= 0.25 / k + 2 * FORMATS[family.problem.spec.dtype].u:
        with np.errstate(over="ignore", invalid="ignore"):
            edges = k * float(np.exp(lse[0] - lse[1])) if family.equal else float(k)
        if not 0.5 < abs(edges - k) < np.inf:
            return ()
        words = f"its {k} weights are equal, but its lse means a denominator of {edges:.5g} edges"
        return (Clue(Kind.DENOMINATOR, words, Gate.LSE),)
    with np.errstate(over="ignore"):
        counted = f"; e^lse is {np.exp(lse[0]):.5g}" if family.equal and np.isfinite(lse[0]) else ""
    words = f"its {k} weights sum to {first.total:.5g}, expected {right:.5g}"
    if family.equal:
        words = (
            f"its {k} weights are equal but sum to {first.total:.5g}: the denominator counts "
            f"{k / first.total:.4g} edges, the numerator {k}{counted}"
        )
    return (Clue(Kind.DENOMINATOR, words, Gate.LSE),)


# --- tiles and splits


def _regions(family: Family, decoded: Decoded, token: int) -> Clue | None:
    """Where the wrong groups are whole splits, or two or more make up whole tiles, and nothing else is: say so."""
    problem, mine, first = family.problem, decoded.walk, decoded.first
    codes, own = _code(problem, first.groups.slots.at), _code(problem, mine.slots.at)
    order = np.argsort(codes)
    group = first.groups.group[order[np.searchsorted(codes[order], own)]]
    if mine.num_tiles < 2 or not first.off.any() or len(np.setdiff1d(np.flatnonzero(first.off), group)):
        return None
    off, splits = first.off[group], family.hints.num_splits
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(first.expected > 0, first.observed / (first.gain * first.expected), 1.0)[group]
    if splits > 1 and (clue := _whole(problem, decoded, off, ratio, Kind.SPLIT, token, splits)):
        return clue
    if len(np.unique(group[off])) < 2:
        return None  # one group may hold one wrong token
    return _whole(problem, decoded, off, ratio, Kind.TILE, token, mine.num_tiles)


def _code(problem: Problem, at: tuple[NDArray[np.int64], ...]) -> NDArray[np.int64]:
    return np.ravel_multi_index(at, (*problem.slot_request.shape, problem.spec.num_kv_heads))


def _whole(
    problem: Problem, decoded: Decoded, off: Bools, ratio: Array, kind: Kind, token: int, total: int
) -> Clue | None:
    """The clue where the wrong edges are whole parts, each with one ratio."""
    mine = decoded.walk
    part = mine.split if kind is Kind.SPLIT else mine.tile
    parts = np.unique(part[off]).tolist()
    if np.isin(part, parts)[~off].any() or len(parts) == len(np.unique(part)):
        return None
    seen = [ratio[part == p] for p in parts]
    if any(np.ptp(r) > 0.02 * max(1e-3, float(np.abs(r).max())) for r in seen):
        return None
    what = [
        f"{kind} {p}" + (" is missing" if r.max() == 0 else f" weighs {r.mean():.4g} times its share")
        for p, r in zip(parts, seen, strict=True)
    ]
    more = f" and {len(what) - NAMED} more" if len(what) > NAMED else ""
    words = f"{', '.join(what[:NAMED])}{more} (of {total} {kind}s)"
    lost = np.flatnonzero(off & (ratio == 0))
    if len(lost):
        first = name(problem, owner_of(problem, mine.slots, int(lost[0]), token), token)
        words += f": missing {first}, tile {mine.tile[lost[0]]}, and {len(lost) - 1} more"
    gate = Gate.COUNT if len(lost) == off.sum() else Gate.OUT
    tiles, splits = ((), tuple(parts)) if kind is Kind.SPLIT else (tuple(parts), ())
    return Clue(kind, words, gate, tiles=tiles, splits=splits)


# --- tokens


def _found(family: Family, decoded: Decoded, token: int) -> _Found:
    problem, mine = family.problem, decoded.walk
    order = np.lexsort((_position(problem, decoded, token), decoded.expected == 0))
    slots = decoded.slots.take(order)
    tiles = dict(zip(_code(problem, mine.slots.at).tolist(), mine.tile.tolist(), strict=True))
    counts = dict(zip(_code(problem, mine.slots.at).tolist(), mine.count.tolist(), strict=True))
    code = _code(problem, slots.at).tolist()
    expected = decoded.expected[order]
    unit = np.where(expected > 0, expected / [max(1, counts.get(c, 1)) for c in code], 1 / max(1, mine.count.sum()))
    return _Found(
        owners=[owner_of(problem, slots, i, token) for i in range(len(slots))],
        observed=decoded.observed[order],
        expected=expected,
        tile=np.array([tiles.get(c, -1) for c in code], np.int64),
        times=decoded.observed[order] / (decoded.gain * unit),
    )


def _position(problem: Problem, decoded: Decoded, token: int) -> NDArray[np.int64]:
    own = problem.position_in(problem.spec.token_request[token])[decoded.slots.page, decoded.slots.offset]
    return np.where(own >= 0, own, np.int64(1 << 40))


def _scaled(family: Family, decoded: Decoded, found: _Found) -> Clue | None:
    """Wrong weights that all mean logits (ln w + lse) of one multiple of the right ones."""
    coarse = 256 * FORMATS[family.problem.spec.dtype].a  # below it a weight has too few bits for a logarithm
    some = (found.observed > coarse) & (found.expected > coarse)
    if family.equal or some.sum() < SCALED or not np.isfinite(decoded.lse).all():
        return None
    seen, right = (np.log(w[some]) + lse for w, lse in zip((found.observed, found.expected), decoded.lse, strict=True))
    factor = float(seen @ right / (right @ right))
    error = 4 * FORMATS[family.problem.spec.dtype].u + 0.01 * np.abs(seen).max()
    if abs(factor - 1) < 0.02 or (np.abs(seen - factor * right) > error).any():
        return None
    words = f"its logits are {factor:.4g} times what they should be ({int(some.sum())} compared): the scale is wrong"
    return Clue(Kind.SCALE, words, Gate.LSE)


def _of_tokens(family: Family, decoded: Decoded, found: _Found, token: int, qo_head: int) -> list[Clue]:
    missing = (found.expected > 0) & (np.abs(found.times) < 0.2) & family.equal
    extra = (found.expected == 0) & (found.times > 0.2 if family.equal else found.observed > 0)
    other = (found.expected > 0) & ~missing
    if page := _of_page(family, decoded, found, missing, extra, token, qo_head):
        return [page]
    if pair := _exchanged(family, decoded, found, token):
        return [pair]
    whole = np.abs(found.times - np.rint(found.times)) <= 0.2
    repeated = other & whole & family.equal & (found.times > 1)
    clues = []
    for kind, verb, which in (
        (Kind.MISSING, "missing", missing),
        (Kind.REPEATED, "counted more than once:", repeated),
        (Kind.EXTRA, "attended without being a candidate:", extra),
        (Kind.WEIGHT, "wrong weight of", other & ~repeated),
    ):
        chosen = found.some(which)
        if kind is Kind.WEIGHT:
            chosen.sort(key=lambda i: -abs(found.observed[i] - decoded.gain * found.expected[i]))
        if chosen:
            clues.append(_clue(family, decoded, found, kind, verb, chosen, token))
    parts = [[found.owners[i] for i in found.some(which)] for which in (missing, extra)]
    if family.equal and not decoded.rest and (words := whose(family.problem, token, qo_head, *parts)):
        clues.append(Clue(Kind.LIST, words, Gate.COUNT))
    return clues


def _clue(
    family: Family, decoded: Decoded, found: _Found, kind: Kind, verb: str, chosen: list[int], token: int
) -> Clue:
    i = chosen[0]
    tile = f", tile {found.tile[i]}" if found.tile[i] >= 0 else ""
    words = f"{verb} {name(family.problem, found.owners[i], token)}{tile}, {_weight(family, decoded, found, i)}"
    rest = [_short(found.owners[j]) for j in chosen[1:NAMED]]
    more = f" and {len(chosen) - NAMED} more" if len(chosen) > NAMED else ""
    words += f"; also {', '.join(rest)}{more}" if rest else ""
    gate = Gate.COUNT if family.equal else Gate.OUT
    return Clue(
        kind,
        words,
        gate,
        tokens=tuple(found.owners[j] for j in chosen),
        pages=_pages(family.problem, [found.owners[j] for j in chosen], token),
        tiles=tuple(sorted({int(found.tile[j]) for j in chosen} - {-1})),
    )


def _short(owner: Owner) -> str:
    """Its position in the request that owns it; of nobody's, the physical place."""
    return str(owner.token) if owner.request >= 0 else f"physical page {owner.physical} offset {owner.offset}"


def _pages(problem: Problem, owners: list[Owner], token: int) -> tuple[int, ...]:
    request = problem.spec.token_request[token]
    return tuple(sorted({o.token // problem.spec.page_size for o in owners if o.request == request}))


def _weight(family: Family, decoded: Decoded, found: _Found, i: int) -> str:
    """Observed and expected weight: fractions of the edges counted where all logits are equal, else numbers with the
    logits that they mean, ln w + lse.
    """
    observed, right = float(found.observed[i]), float(found.expected[i])
    k = int(decoded.walk.count.sum())
    if family.equal:
        whole = round(k / decoded.gain)
        times = round(float(found.times[i]))
        exact = abs(k / decoded.gain - whole) < 0.01 * k and abs(found.times[i] - times) <= 0.2
        countable = whole * FORMATS[family.problem.spec.dtype].u < 0.5  # else k edges and k + 1 weigh the same
        seen = (f"{times}/{whole}" if countable else f"{times} x 1/{k}") if exact else f"{observed:.6g}"
        return f"weight {seen} instead of {f'{round(right * k)}/{k}' if right else 0}"
    words = f"weight {observed:.6g} instead of {right:.6g}"
    if observed > 0 and right > 0 and np.isfinite(decoded.lse).all():
        logits = (float(np.log(w)) + lse for w, lse in zip((observed, right), decoded.lse, strict=True))
        words += " (logit {:.5g} instead of {:.5g})".format(*logits)
    return words


def _exchanged(family: Family, decoded: Decoded, found: _Found, token: int) -> Clue | None:
    """Two edges of which each has the other's weight."""
    if family.equal or len(found.owners) != 2 or (found.tile < 0).any():
        return None
    swapped = decoded.gain * found.expected[::-1]
    if not np.allclose(found.observed, swapped, rtol=8 * FORMATS[family.problem.spec.dtype].u, atol=0):
        return None
    a, b = (name(family.problem, owner, token) for owner in found.owners)
    words = (
        f"{a}, tile {found.tile[0]}, and {b}, tile {found.tile[1]}, have each other's weights "
        f"({found.observed[0]:.6g} and {found.observed[1]:.6g})"
    )
    pages = _pages(family.problem, found.owners, token)
    tiles = tuple(sorted({int(t) for t in found.tile}))
    return Clue(Kind.EXCHANGED, words, Gate.OUT, tokens=tuple(found.owners), pages=pages, tiles=tiles)


def _of_page(
    family: Family, decoded: Decoded, found: _Found, missing: Bools, extra: Bools, token: int, qo_head: int
) -> Clue | None:
    """All edges of one logical page are missing, and the same offsets of one other physical page are read instead."""
    if missing.sum() < 2 or missing.sum() != extra.sum() or len(found.owners) != 2 * int(missing.sum()):
        return None
    size = family.problem.spec.page_size
    lost, read = ([found.owners[i] for i in found.some(which)] for which in (missing, extra))
    pages, physical = {o.token // size for o in lost}, {o.physical for o in read}
    same = sorted((o.offset, o.kv_head) for o in lost) == sorted((o.offset, o.kv_head) for o in read)
    if len(pages) != 1 or len(physical) != 1 or not same:
        return None
    page, other, first = pages.pop(), physical.pop(), read[0]
    whose = "of no request" if first.request < 0 else f"logical page {first.token // size} of request {first.request}"
    words = (
        f"logical page {page} is read from physical page {other} ({whose}) instead of {lost[0].physical}: "
        f"missing {name(family.problem, lost[0], token)} and {len(lost) - 1} more, "
        f"attended without being a candidate: {name(family.problem, first, token)} and {len(read) - 1} more"
    )
    tiles = tuple(sorted({int(t) for t in found.tile[missing]}))
    requests = () if first.request in (-1, family.problem.spec.token_request[token]) else (first.request,)
    return Clue(Kind.PAGE, words, Gate.COUNT, tuple(lost + read), (page,), tiles, requests=requests)


# --- the strip


def _drawable(weights: Array) -> Array:
    """Finite weights, whose sums JSON can hold."""
    return np.clip(np.nan_to_num(weights), -LARGEST_USE, LARGEST_USE)


def _strip(problem: Problem, decoded: Decoded, token: int, qo_head: int) -> Strip:
    """The decoded row by the request's own positions, tails included, in at most STRIP_BINS ranges. Decoded slots have
    their own weight, the others their share of what these leave of their group.
    """
    shape = (*problem.slot_request.shape, problem.spec.num_kv_heads)
    mine, first = decoded.walk, decoded.first
    right = np.zeros(shape)
    np.add.at(right, mine.slots.at, mine.count / max(1, int(mine.count.sum())))
    slots, group, count = first.groups.slots, first.groups.group, len(first.observed)
    seen, known = np.zeros(shape), np.zeros(shape, bool)
    seen[decoded.slots.at], known[decoded.slots.at] = _drawable(decoded.observed), True
    left = ~known[slots.at]
    share = right[slots.at] * left
    of_group = np.bincount(group, weights=share, minlength=count)
    even = 1 / np.maximum(np.bincount(group, weights=left, minlength=count), 1)
    whole = _drawable(first.observed)
    mass = whole - np.bincount(group, weights=seen[slots.at], minlength=count)
    mass = np.where(np.abs(mass) > 2 * FORMATS[problem.spec.dtype].u * np.abs(whole), mass, 0.0)  # else its rounding
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(of_group[group] > 0, mass[group] * share / of_group[group], mass[group] * even[group])
    seen[slots.at] = np.where(left, shares, seen[slots.at])
    position = problem.position_in(problem.spec.token_request[token])
    own = np.zeros(shape, bool)
    own[..., qo_head // problem.spec.group_size] = position >= 0
    where = np.broadcast_to(position[..., None], shape)[own]
    step = max(1, -(-(int(where.max(initial=0)) + 1) // STRIP_BINS))
    observed, expected = (np.bincount(where // step, weights=x[own]) for x in (seen, right))
    first_tokens = (np.arange(len(observed)) * step).tolist()
    return Strip(first_tokens, step, observed.tolist(), expected.tolist(), float(seen[~own].sum()))
