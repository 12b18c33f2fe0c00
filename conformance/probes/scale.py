"""Quantised KV: do each page, head, token and channel have their own scale, K and V each?

K is +-kappa and V +-kappa on both sides of every scale: neighbouring groups reach the same values by codes an octave or
more apart, so that a neighbour's scale makes them wrong by that much, and no code can hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from sacts.reference.bounds import GENERIC, Expected
from sacts.reference.formats import decode_table, round_to
from sacts.reference.forward import Forward, Inputs, forward
from sacts.reference.paging import PagedCache
from sacts.reference.spec import CodecFormat, DType
from sacts.reports.records import PROVES

from ..build import Problem
from ..codes import Codes, Scales
from ..draw import Array, Ints
from .inputs import Probe
from .margins import CERTAIN, noticed

Reading = Callable[[Codes], Array]

KAPPA = {CodecFormat.INT4: 0.5}  # |value| of K and V; other formats, and what is stored as it is: 1
SPREAD = 1.0  # |logit| in nats, of a plain row
RATIO = 1.5  # of a wrong scale to the right one, at least: neighbours are apart by 2 / (1 + codes.MANTISSA) or more
INVISIBLE = 1e-12  # a change of out in FP64 that is none
GROUPS = 12  # of K and of V whose margins are computed


def suits(problem: Problem) -> bool:
    """Whether K or V is stored in codes."""
    return bool(problem.k_scales or problem.v_scales)


def _inputs(problem: Problem) -> Inputs:
    """Each key has one sign for all its channels: its logit is +-SPREAD. V is kappa in even channels, which show V's
    scales, and carries the key's sign in odd ones, which show the weights, and so K's.
    """
    spec, draw = problem.spec, problem.draw("scale")
    slots = (*problem.slot_request.shape, spec.num_kv_heads, 1)
    sign = draw.signs(slots)
    k_size, v_size = (KAPPA.get(codec.format, 1.0) if codec else 1.0 for codec in (spec.k_codec, spec.v_codec))
    k = np.broadcast_to(k_size * sign, (*slots[:-1], spec.head_dim_qk))
    v = v_size * np.where(np.arange(spec.head_dim_vo) % 2 == 0, 1.0, sign)
    q = np.full((spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk), SPREAD / (spec.sm_scale * k_size * k.shape[-1]))
    return problem.inputs(round_to(q, spec.dtype), k, v)


SCALE = Probe("scale", PROVES["scale"], lambda problem: GENERIC, _inputs)


class Wrong(NamedTuple):
    """A way to decode wrongly, in words; scales and zero points in place of the right ones, None: the right ones.
    `read`: the values of codes of each format before zero point and scale, where they are read wrongly.
    """

    words: str
    k: Scales | None = None
    v: Scales | None = None
    read: Mapping[CodecFormat, Reading] = MappingProxyType({})

    def result(self, problem: Problem, inputs: Inputs) -> Forward:
        """out and lse of a kernel that does so."""
        caches = []
        for own, wrong, cache in ((problem.k_scales, self.k, inputs.k), (problem.v_scales, self.v, inputs.v)):
            if own is None or (wrong is None and own.codec.format not in self.read):
                caches.append(cache)
                continue
            codes, stored, by = own.codes(cache.data, problem.needed), own.codec.format, wrong or own
            read = self.read.get(stored, decode_table(stored).__getitem__)
            data = np.nan_to_num((read(codes) - by.zeros) * by.scales)
            caches.append(PagedCache(cache.pages, np.where(problem.needed[..., None], data, cache.data)))
        k, v = caches
        return forward(problem.spec, inputs._replace(k=k, v=v), problem.table, problem.candidates)


def _of(words: str, name: str, wrong: Scales) -> Wrong:
    """A mistake about the scales of "k" or "v" alone."""
    return Wrong(words, k=wrong) if name == "k" else Wrong(words, v=wrong)


def of_scale(problem: Problem, inputs: Inputs, expected: Expected) -> Array:
    """One group that is decoded with a scale RATIO times too large or too small, or without its zero point, where it
    shows least: for GROUPS groups of K and of V that some row attends. In out; a mistake that moves every logit of each
    row alike leaves out as it is, and shows in lse alone.
    """
    found = []
    for name in ("k", "v"):
        own: Scales | None = getattr(problem, f"{name}_scales")
        if own is None:
            continue
        groups = np.argwhere(~own.idle(problem.needed))
        for at in groups[problem.draw("scale groups", name).permutation(len(groups))[:GROUPS]]:
            wrong = (_of("", name, each) for each in _of_group(own, tuple(at.tolist())))
            margins = [_margin(expected, each.result(problem, inputs), problem.spec.dtype) for each in wrong]
            found.append(min(*margins, CERTAIN))
    return np.array(found)


def _margin(expected: Expected, wrong: Forward, dtype: DType) -> float:
    moved = np.abs(wrong.out - expected.out)
    if moved.max(initial=0.0) > INVISIBLE:
        return float((moved / noticed(expected, dtype)).max(initial=0.0))
    some = np.isfinite(expected.lse)
    return float((np.abs(wrong.lse[some] - expected.lse[some]) / expected.lse_bound[some]).max(initial=0.0))


def _of_group(own: Scales, at: tuple[int, ...]) -> Iterator[Scales]:
    step = 2.0 if own.codec.power_of_two else RATIO
    for ratio in (step, 1 / step):
        scales = own.scales.copy()
        scales[at] *= ratio
        yield replace(own, scales=scales)
    if own.codec.asymmetric:
        zeros = own.zeros.copy()
        zeros[at] = 0.0
        yield replace(own, zeros=zeros)


# --- what a wrong result looks like


def mistakes(problem: Problem) -> Iterator[Wrong]:
    """Ways to mistake all scales of K, of V, or of both at once."""
    found = {name: list(_mistaken(problem, name)) for name in ("k", "v")}
    for name, others in (("k", "v"), ("v", "k")):
        for words, wrong in found[name]:
            yield _of(f"{name.upper()} were decoded with {words}", name, wrong)
            for same, other in found[others] if name == "k" else ():
                if same == words:
                    yield Wrong(f"K and V were decoded with {words}", k=wrong, v=other)
    yield from (Wrong(words, read=read) for words, read in _MISREAD.items())


def _swapped(codes: Codes) -> Array:
    pairs = codes.shape[-1] // 2 * 2
    moved = codes.copy()
    moved[..., 0:pairs:2], moved[..., 1:pairs:2] = codes[..., 1:pairs:2], codes[..., 0:pairs:2]
    return np.asarray(decode_table(CodecFormat.INT4)[moved])


_INTEGERS, _FP8 = (CodecFormat.INT8, CodecFormat.INT4), (CodecFormat.FP8_E4M3FN, CodecFormat.FP8_E5M2)
_MISREAD: dict[str, dict[CodecFormat, Reading]] = {
    "the two codes of a byte were swapped": {CodecFormat.INT4: _swapped},
    "integer codes were read without their sign": {each: lambda codes: codes.astype(np.float64) for each in _INTEGERS},
    "fp8 codes were read as e4m3fn": {CodecFormat.FP8_E5M2: lambda codes: decode_table(_FP8[0])[codes]},
    "fp8 codes were read as e5m2": {CodecFormat.FP8_E4M3FN: lambda codes: decode_table(_FP8[1])[codes]},
    "fp8 codes were read as int8": {each: lambda codes: decode_table(CodecFormat.INT8)[codes] for each in _FP8},
    "int8 codes were read as e4m3fn": {CodecFormat.INT8: lambda codes: decode_table(_FP8[0])[codes]},
}


def _mistaken(problem: Problem, name: str) -> Iterator[tuple[str, Scales]]:
    own: Scales | None = getattr(problem, f"{name}_scales")
    other: Scales | None = getattr(problem, "v_scales" if name == "k" else "k_scales")
    if own is None:
        return
    if own.scales.shape[0] > 1:
        for words, pages in _other_pages(problem):
            yield words, own.at(pages, 0)
    for axis, noun in ((1, "token of the page"), (2, "KV head"), (3, "channel")):
        if own.scales.shape[axis] > 1:
            for step, which in ((1, "before"), (-1, "behind")):
                moved = (np.roll(x, step, axis) for x in (own.scales, own.zeros))
                yield f"the scales of the {noun} {which}", Scales(own.codec, *moved)
            first = np.zeros(own.scales.shape[axis], np.int64)
            yield f"the scales of the first {noun}", own.at(first, axis)
    if other is not None and other.scales.shape == own.scales.shape:
        yield f"the scales of {'V' if name == 'k' else 'K'}", replace(own, scales=other.scales)
    yield "no scale at all", replace(own, scales=np.ones_like(own.scales))
    if own.codec.asymmetric:
        yield "no zero points", replace(own, zeros=np.zeros_like(own.zeros))
        yield "the opposite zero points", replace(own, zeros=-own.zeros)


def _other_pages(problem: Problem) -> Iterator[tuple[str, Ints]]:
    """Which live page lends its scales to each live page; its own where the other holds no data."""
    pages, every = problem.pages, np.arange(len(problem.pages))

    def lent(other: Ints) -> Ints:
        at = np.clip(np.searchsorted(pages, other), 0, len(pages) - 1)
        return np.where(pages[at] == other, at, every)

    yield "the scales of the physical page before", lent(pages - 1)
    yield "the scales of the physical page behind", lent(pages + 1)
    request, logical = problem.slot_request[:, 0], problem.slot_token[:, 0] // problem.spec.page_size
    table, owned = problem.table.table, request >= 0
    for words, step in (("the scales of the logical page before", -1), ("the scales of the logical page behind", 1)):
        beside = table[request, np.clip(logical + step, 0, table.shape[1] - 1)]
        yield words, np.where(owned & (logical + step >= 0), lent(beside), every)
    yield "the scales of the page whose physical number is their logical one", np.where(owned, lent(logical), every)


def single_pages(problem: Problem, name: str, live: Ints) -> Iterator[Wrong]:
    """Ways to mistake the scales of one live page alone."""
    own: Scales | None = getattr(problem, f"{name}_scales")
    if own is None or own.scales.shape[0] == 1:
        return
    for words, wrong in _mistaken(problem, name):
        for page in live.tolist():
            scales, zeros = own.scales.copy(), own.zeros.copy()
            scales[page], zeros[page] = wrong.scales[page], wrong.zeros[page]
            text = f"{name.upper()} of physical page {int(problem.pages[page])} were decoded with {words}"
            yield _of(text, name, Scales(own.codec, scales, zeros))
