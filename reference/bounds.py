"""How much error each element may carry: gate A and the lse bound of GATES.md section 2.

The bounds are a priori: they follow from the inputs and the numerics contract, never from the observed result, and
hold for any order of tiles and splits. `Exactness` switches terms off where an input family makes them provably zero
(GATES section 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import epilogues
from .candidates import ValidatedCandidates
from .formats import FORMATS, format_of, round_to
from .forward import Group, Inputs, Rows, by_row, empty_result, evaluate, groups, kept
from .logit_bounds import (
    U32,
    accumulation,
    exponent_error,
    gamma,
    logit_error,
    reconstruction,
    weight_error,
    weight_rounding,
)
from .numerics import Accumulator, Numerics
from .paging import PageTable
from .spec import AttentionSpec, CandidateKind, CodecFormat, DType, Epilogue, EpilogueKind

Array = NDArray[np.float64]

U64 = 2.0**-53
FLUSH = 2.0**-126  # the smallest normal FP32: results below it may be flushed to zero
LEAST_DYADIC = 2.0**-14  # the smallest P that `dyadic_p` allows
MAX_RHO = 0.5  # beyond this relative error of the denominator there is no bound


@dataclass(frozen=True)
class Exactness:
    """What an input family proves about the arithmetic. `equal_logits`: all logits of a row are one number, so no
    rescale rounds, and every P of a row is the same number, so that they share one rounding error. `zero_logits`:
    that number is 0, so P = exp2(0) = 1 where the backend declares `unit_p`. `exact_sums`: every partial sum of P
    and of P V is a multiple of one power of two that FP32 holds. `one_key`: one key of each row carries the mass, all
    others together less than 2^-24, so that its P is 1 under `unit_p` and an error of its weight cancels against the
    denominator. `dyadic_p`: logits differ by whole octaves, no more than 14, so that P is a power of two, before
    rounding but for the logit's error, and after it exactly.
    """

    equal_logits: bool = False
    zero_logits: bool = False
    exact_sums: bool = False
    one_key: bool = False
    dyadic_p: bool = False


GENERIC = Exactness()


@dataclass(frozen=True)
class Expected:
    """What a result is judged by, per element.

    out [tokens, heads, d_vo]; `half_width`: B', the error allowed before the output rounding; `out_lo`, `out_hi`: the
    closed interval that a correct result lies in, out -+ B' rounded to the output format; lse and `lse_bound`
    [tokens, heads] (natural log); edges [tokens, heads]: keys attended by the row; trusted [tokens, heads]: False
    where no bound exists (the denominator's relative error may exceed one half).
    """

    out: Array
    half_width: Array
    out_lo: Array
    out_hi: Array
    lse: Array
    lse_bound: Array
    edges: NDArray[np.int64]
    trusted: NDArray[np.bool_]


def expected(
    spec: AttentionSpec,
    inputs: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    numerics: Numerics,
    exactness: Exactness = GENERIC,
    *,
    gate: Array | None = None,
) -> Expected:
    """Evaluate the reference and the allowance of every element for a backend with these numerics; `gate` as in
    `forward`.
    """
    out, lse = empty_result(spec)
    half_width, edges = np.zeros_like(out), np.zeros(lse.shape, np.int64)
    lse_bound, trusted = np.zeros_like(lse), np.full(lse.shape, True)
    if spec.sink_logits:
        lse_bound += log_error(1.0, lse, lse)
    exactness = _provable(spec, exactness)
    for group in groups(spec, inputs, table, candidates):
        rows = evaluate(spec, group)
        width, log_width, trust = allowance(spec, group, rows, numerics, exactness)
        for total, part in (
            (out, rows.out),
            (lse, rows.lse),
            (half_width, width),
            (edges, group.counts.sum(-1)[..., None]),
            (lse_bound, log_width),
            (trusted, trust),
        ):
            by_row(spec, total)[group.rows] = part
    half_width[~trusted], lse_bound[~trusted] = np.inf, np.inf
    gate = epilogues.gate_of(spec.epilogue, inputs.gate, gate)
    out, half_width, low, high = through_epilogue(spec.epilogue, out, half_width, gate, numerics)
    low, high = round_to(low, numerics.out), round_to(high, numerics.out)
    return Expected(out, half_width, low, high, lse, lse_bound, edges, trusted)


def _provable(spec: AttentionSpec, exactness: Exactness) -> Exactness:
    """What is left of a family's promise under the terms of a spec: a bias or a count makes logits differ, a sink
    moves the maximum, and dropout scales P.
    """
    if spec.alibi_slopes or spec.buckets or spec.candidate_kind is CandidateKind.MULTISET:
        return GENERIC
    if spec.sink_logits or spec.dropout:
        return replace(exactness, zero_logits=False, exact_sums=False, one_key=False, dyadic_p=False)
    return exactness


def through_epilogue(
    epilogue: Epilogue, out: Array, half_width: Array, gate: Array | None, numerics: Numerics
) -> tuple[Array, Array, Array, Array]:
    """out, half-width, and both ends of the interval after the epilogue, before the output rounding."""
    low, high = out - half_width, out + half_width
    if epilogue.kind is not EpilogueKind.NONE:
        out, _ = epilogues.apply(epilogue, out, np.zeros_like(out), gate)
        low, high = (round_to(x, numerics.epilogue) for x in (low, high))
        low, high = epilogues.interval(epilogue, low, high, gate, numerics.u_function)
        half_width = np.maximum(high - out, out - low)
    return out, half_width, low, high


class _Mass(NamedTuple):
    """What the edges of a group weigh: w_j, a_j / (1 - p), and eta_j, all 0 where there is no edge [b, r, g, S];
    `mean_eta` [b, r, g]: sum w_j eta_j, the sink's share included.

    `lone` [b, r, 1]: rows of one edge, whose weight is 1 whatever its logit. Numerator and denominator share what eta_j
    would be there, so that it is 0, and `apart` [b, r, g] is the relative error of what they do not share; `exponent`
    [b, r, g] is the error of the logit and of its way into lse, `logit` that of the logit. All 0 elsewhere.
    """

    w: Array
    factors: Array
    eta: Array
    mean_eta: Array
    lone: NDArray[np.bool_]
    apart: Array
    exponent: Array
    logit: Array


def _mass(spec: AttentionSpec, group: Group, top: Array, lse: Array, numerics: Numerics, exactness: Exactness) -> _Mass:
    edge = group.edge[:, :, None]
    s = np.where(edge, group.z, 0.0)
    w = np.exp(group.logits - lse[..., None])
    tiles = rescales(spec, group, numerics)
    sinks = np.asarray(spec.sink_logits or (0.0,) * spec.num_qo_heads)[group.qo_heads][:, None]
    lone, none = np.zeros((*edge.shape[:2], 1), bool), np.zeros(lse.shape)
    apart = exponent = logit = none
    if exactness.equal_logits:
        eta = _equal_weight_error(top, lse, numerics)
        if spec.sink_logits:
            eta = eta + numerics.u_exp + 10 * U32 * np.maximum(np.abs(top), np.abs(sinks))
        eta = np.where(edge, eta[..., None], 0.0)
    else:
        lone = (group.edge.sum(-1) == 1)[..., None] & (not spec.sink_logits)
        error = np.where(edge, logit_error(spec, group, numerics), 0.0)
        eta = np.where(edge & ~lone[..., None], weight_error(s, error, top, lse, tiles, numerics), 0.0)
        logit = np.where(lone, error.sum(-1), 0.0)
        apart, exponent = (np.where(lone, x, 0.0) for x in _lone_errors(spec, s.sum(-1), logit, lse, tiles, numerics))
    mean_eta = (w * eta).sum(-1)
    if spec.sink_logits:
        sink = np.broadcast_to(sinks, lse.shape)[..., None]
        eta_sink = weight_error(sink, U32 * np.abs(sink), top, lse, np.ones_like(tiles), numerics)
        mean_eta = mean_eta + (np.exp(sink - lse[..., None]) * eta_sink)[..., 0]
    factors = kept(spec, group)
    if factors is None:
        return _Mass(w, np.broadcast_to(edge * 1.0, w.shape), eta, mean_eta, lone, apart, exponent, logit)
    return _Mass(w, edge * factors, eta + 2 * U32 * edge, mean_eta, lone, apart, exponent, logit)


def _lone_errors(
    spec: AttentionSpec, s: Array, error: Array, lse: Array, tiles: NDArray[np.int64], numerics: Numerics
) -> tuple[Array, Array]:
    """Of the one edge of a row, [b, r, g]: what its numerator and denominator do not share, relative, and how far its
    logit comes into lse wrong, absolute. Products round apart, those of each rescale and of dropout too; so do merges
    from outputs and their lse. What the kernel computes with is the wrong logit, so its size counts: docs/bounds.md
    section 1.
    """
    far, size = np.abs(s) + error, np.abs(lse) + error
    apart = np.broadcast_to((16 + tiles + 2 * bool(spec.dropout)) * U32, lse.shape)
    if numerics.splits and not numerics.merges_states:
        apart = apart + 2 * numerics.u_exp + 8 * U32 * np.maximum(size, far)
    return apart, exponent_error(far[..., None], error[..., None], far, size, tiles, numerics)[..., 0]


def _one_key_error(group: Group, rows: Rows, mass: _Mass, top: Array, lse: Array, numerics: Numerics) -> Array:
    """sum w_j eta_j |v_ji - o_i|: numerator and denominator share the errors of the weights, so that what moves out
    is the distance of a value from it. Products round apart, and so do merges from outputs and their lse.
    """
    far = np.abs(group.v[:, None, None] - rows.out[..., None, :])
    apart = np.full(lse.shape, 16 * U32)
    if numerics.splits:
        apart = apart + 2 * numerics.u_exp + 8 * U32 * np.maximum(np.abs(lse), np.abs(top))
    moved: Array = ((mass.w * mass.eta)[..., None] * far).sum(-2) + apart[..., None] * np.abs(rows.out)
    return moved


def _equal_weight_error(top: Array, lse: Array, numerics: Numerics) -> Array:
    """eta of equal logits, which no rescale rounds: the exponential, and the merge of splits."""
    own = 0.0 if numerics.unit_p else numerics.u_exp
    from_lse = 0.0 if numerics.merges_states else 8 * U32
    return own + (from_lse * np.abs(lse) + numerics.u_exp + 4 * U32) * numerics.splits


def allowance(
    spec: AttentionSpec, group: Group, rows: Rows, numerics: Numerics, exactness: Exactness
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """B' [b, r, g, d_vo] before the output rounding, the lse bound [b, r, g], and where they hold; GATES.md section 2,
    and the reference's own error.
    """
    some = rows.state.l > 0
    l, lse, top = (np.where(some, x, empty) for x, empty in ((rows.state.l, 1.0), (rows.lse, 0.0), (rows.state.m, 0.0)))
    k = group.counts.sum(-1)[..., None]  # terms of a kernel that visits repeats one by one
    abs_v = np.abs(group.v)[:, None]
    mass = _mass(spec, group, top, lse, numerics, exactness)
    w, factors, eta, mean_eta, lone = mass[:5]

    part = FORMATS[numerics.partial]
    u_p, a_p = _cast_of_p(spec, mass, k, numerics, exactness)
    exact = exactness.exact_sums and numerics.unit_p
    largest_p = l if isinstance(numerics.p, CodecFormat) and not numerics.unit_p else 1.0  # P over l before its cast
    sums = np.zeros(k.shape) if exact else gamma(k)
    products = np.zeros(k.shape) if exact and _holds_sums(numerics) else accumulation(k, numerics)
    cast_l = (u_p + a_p * k / l) if numerics.l_sums_cast_p else np.zeros(l.shape)
    rescale = 0.0 if exactness.equal_logits and not spec.sink_logits else rescales(spec, group, numerics) * U32
    u_part, a_part = (part.u, part.a) if numerics.splits else (0.0, 0.0)

    v = reconstruction(spec.v_codec, numerics)

    rho = mean_eta + sums + cast_l
    trusted = (rho < MAX_RHO) & holds(spec, group, numerics)
    rho = np.where(trusted, rho, 0.0)
    abs_sum = (w * factors) @ abs_v  # A
    plain_sum = (factors * group.counts[:, :, None]) @ abs_v
    abs_out = np.abs(rows.out)
    if exactness.one_key:
        wrong_weights = _one_key_error(group, rows, mass, top, lse, numerics)
    else:
        wrong_weights = (w * factors * eta) @ abs_v + abs_out * mean_eta[..., None]
    half_width = (
        np.where(lone[..., None], mass.apart[..., None] * abs_out, wrong_weights)  # logits, exponential, rescale, merge
        + u_p[..., None] * (abs_out if exactness.equal_logits else abs_sum)  # cast of P: equal P share one error
        + (a_p * largest_p / l)[..., None] * (abs_out * k[..., None] if exactness.equal_logits else plain_sum)
        + ((products + rescale) * (1 + u_p))[..., None] * abs_sum  # accumulation of P V
        + (sums + 4 * U32 + cast_l)[..., None] * abs_out  # denominator
        + (u_part + v.u + 2 * numerics.u_operand) * abs_sum
        + (v.a * (w * factors).sum(-1))[..., None]  # V reconstructed from codes
        + a_part  # split partials
        + FLUSH * (2 + plain_sum / np.minimum(l, 1.0)[..., None])
    ) / (1 - rho)[..., None]
    if numerics.branched and numerics.partial is not DType.FP32:
        half_width = half_width + part.u * (abs_out + half_width) + part.a  # stored before it is gated
    own = rows.own_error
    own_out = U64 * abs_out if exactness.equal_logits and exactness.exact_sums else own.out
    log_width = mass.exponent + rho / (1 - rho) + log_error(l, np.abs(lse) + mass.logit, np.abs(top) + mass.logit)
    return (
        np.where(some[..., None], half_width + own_out, 0.0),
        np.where(some, log_width + own.lse, 0.0),
        (trusted & own.in_range) | ~some,
    )


def _cast_of_p(
    spec: AttentionSpec, mass: _Mass, k: NDArray[np.int64], numerics: Numerics, exactness: Exactness
) -> tuple[Array, Array]:
    """u_P and a_P by row, [b, r, 1]: 0 where every P is exactly 1, or a power of two."""
    p = weight_rounding(numerics)
    dyadic = exactness.dyadic_p and mass.eta.max(initial=0.0) < p.u / 2 and p.a < LEAST_DYADIC
    unit = np.full(k.shape, exactness.zero_logits or exactness.one_key or dyadic)
    if not spec.dropout:
        unit = unit | (mass.lone & (k == 1))
    unit &= numerics.unit_p
    return np.where(unit, 0.0, p.u), np.where(unit, 0.0, p.a)


def _holds_sums(numerics: Numerics) -> bool:
    """Whether the accumulator of P V holds what FP32 holds."""
    return numerics.accumulator is Accumulator.FP32


def holds(spec: AttentionSpec, group: Group, numerics: Numerics) -> NDArray[np.bool_]:
    """Where the declared formats hold what goes through them, [b, r, 1]: P raised by its offset and by what the maximum
    may lag, over 1 - p; K and q after RoPE, K and V from codes.
    """
    kept_share = 1 - spec.dropout.p if spec.dropout else 1.0
    fits = 2.0 ** (numerics.p_offset + numerics.lag) / kept_share <= format_of(numerics.p).max
    largest_k, largest_v, largest_q = (np.abs(x).max(axis=-1, initial=0.0) for x in (group.k, group.v, group.q))
    found = np.full((*group.counts.shape[:2], 1), fits)
    if spec.rope:
        largest = np.maximum(_of_row(group, largest_k), largest_q.max(axis=-1))
        found &= (largest * (1 + FORMATS[numerics.rotated].u) <= FORMATS[numerics.rotated].max)[..., None]
    for codec, sizes in ((spec.k_codec, largest_k), (spec.v_codec, largest_v)):
        if codec:
            form = FORMATS[numerics.reconstructed]
            found &= (_of_row(group, sizes) * (1 + form.u) <= form.max)[..., None]
    return found


def _of_row(group: Group, sizes: Array) -> Array:
    """The largest of the keys [b, S] that each row attends: [b, r]."""
    largest: Array = np.where(group.edge, sizes[:, None], 0.0).max(axis=-1, initial=0.0)
    return largest


def log_error(l: Array | float, lse: Array, top: Array) -> Array:
    """Of m + ln l, for an exact l: a logarithm, products with ln 2, a sum."""
    return 2 * (2.0**-21 + 4 * U32 * (np.abs(np.log(l)) + np.abs(lse) + np.abs(top))) + U32 * np.abs(lse)


def rescales(spec: AttentionSpec, group: Group, numerics: Numerics) -> NDArray[np.int64]:
    """R [b, r, 1]: tiles that can raise the running maximum, at most one per edge, and the sink."""
    k = group.counts.sum(-1)[..., None]
    slots = np.full(k.shape, spec.seq_lens[group.request]) if numerics.dense else group.slots[..., None]
    tiles: NDArray[np.int64] = np.minimum(k, -(-slots // numerics.min_tile)) + bool(spec.sink_logits)
    return tiles
