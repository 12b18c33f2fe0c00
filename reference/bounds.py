"""How much error each element may carry: gate A and the lse bound of GATES.md section 2.

The bounds are a priori: they follow from the inputs and the numerics contract, never from the observed result, and
hold for any order of tiles and splits. `Exactness` switches terms off where an input family makes them provably zero
(GATES section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import epilogues, scores
from .candidates import ValidatedCandidates
from .formats import FORMATS, round_to
from .forward import Group, Inputs, Rows, by_row, empty_result, evaluate, groups
from .numerics import Numerics
from .paging import PageTable
from .spec import AttentionSpec, DType, EpilogueKind

Array = NDArray[np.float64]

U64 = 2.0**-53
U32 = FORMATS[DType.FP32].u
FLUSH = 2.0**-126  # the smallest normal FP32: results below it may be flushed to zero
MAX_RHO = 0.5  # beyond this relative error of the denominator there is no bound


@dataclass(frozen=True)
class Exactness:
    """What an input family proves about the arithmetic. `equal_logits`: all logits of a row are one number, so no
    rescale rounds, and every P of a row is the same number, so that they share one rounding error. `zero_logits`:
    that number is 0, so P = exp2(0) = 1 where the backend declares `unit_p`. `exact_sums`: every partial sum of P
    and of P V is an integer that FP32 holds.
    """

    equal_logits: bool = False
    zero_logits: bool = False
    exact_sums: bool = False


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


def gamma(n: NDArray[np.int64] | int) -> Array:
    """Accumulation of n terms: |fl(sum) - sum| <= gamma(n) * sum |terms| for any FP32 order, rounded to nearest or to
    zero, and for 16-bit tensor cores from Ampere on (GATES.md section 2).
    """
    return (np.asarray(n, np.float64) + 2) * 2.0**-23


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
    for group in groups(spec, inputs, table, candidates):
        rows = evaluate(spec, group)
        width, log_width, trust = _allowance(spec, group, rows, numerics, exactness)
        for total, part in (
            (out, rows.out),
            (lse, rows.lse),
            (half_width, width),
            (edges, group.counts.sum(-1)[..., None]),
            (lse_bound, log_width),
            (trusted, trust & (group.counts.max(-1, initial=0) <= 1)[..., None]),
        ):
            by_row(spec, total)[group.rows] = part
    trusted &= _derived(spec)
    half_width[~trusted], lse_bound[~trusted] = np.inf, np.inf
    out, _ = epilogues.apply(spec.epilogue, out, half_width, gate)
    low, high = (round_to(x, numerics.out) for x in (out - half_width, out + half_width))
    return Expected(out, half_width, low, high, lse, lse_bound, edges, trusted)


def _derived(spec: AttentionSpec) -> bool:
    """Whether the bounds cover every term of the spec: GATES.md section 8 lists those still to be derived."""
    underived = (
        spec.rope,
        spec.logits_soft_cap,
        spec.alibi_slopes,
        spec.buckets,
        spec.sink_logits,
        spec.dropout,
        spec.epilogue.kind is not EpilogueKind.NONE,
    )
    return not any(underived)


def _allowance(
    spec: AttentionSpec, group: Group, rows: Rows, numerics: Numerics, exactness: Exactness
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """B' [b, r, g, d_vo] before the output rounding, the lse bound [b, r, g], and where they hold; GATES.md section 2,
    and the reference's own error.
    """
    edge = (group.counts > 0)[:, :, None]
    some = rows.state.l > 0
    l = np.where(some, rows.state.l, 1.0)
    lse = np.where(some, rows.lse, 0.0)
    s = np.where(edge, group.logits, 0.0)
    w = np.where(edge, np.exp(group.logits - lse[..., None]), 0.0)
    k = group.counts.sum(-1)[..., None]  # terms of a kernel that visits repeats one by one
    abs_v = np.abs(group.v)[:, None]
    largest = np.abs(s).max(axis=-1, initial=0.0)

    eta = np.where(edge, _weight_error(spec, group, s, lse, largest, k, numerics, exactness), 0.0)
    p, part = FORMATS[numerics.p], FORMATS[numerics.partial]
    u_p, a_p = (0.0, 0.0) if exactness.zero_logits and numerics.unit_p else (p.u, p.a)
    sums = np.zeros(k.shape) if exactness.exact_sums and numerics.unit_p else gamma(k)
    cast_l = (u_p + a_p * k / l) if numerics.l_sums_cast_p else np.zeros(l.shape)
    rescale = 0.0 if exactness.equal_logits else _rescales(spec, group, k, numerics) * U32
    u_part, a_part = (part.u, part.a) if numerics.splits else (0.0, 0.0)

    mean_eta = (w * eta).sum(-1)
    rho = mean_eta + sums + cast_l
    trusted = rho < MAX_RHO
    rho = np.where(trusted, rho, 0.0)
    abs_sum = w @ abs_v  # A
    plain_sum = np.where(edge, 1.0, 0.0) @ abs_v
    abs_out = np.abs(rows.out)
    half_width = (
        (w * eta) @ abs_v
        + abs_out * mean_eta[..., None]  # logits, exponential, rescale, merge
        + u_p * (abs_out if exactness.equal_logits else abs_sum)  # cast of P: equal P share one rounding error
        + (a_p / l)[..., None] * (abs_out * k[..., None] if exactness.equal_logits else plain_sum)
        + ((sums + rescale) * (1 + u_p))[..., None] * abs_sum  # accumulation of P V
        + (sums + 4 * U32 + cast_l)[..., None] * abs_out  # denominator
        + u_part * abs_sum
        + a_part  # split partials
        + FLUSH * (2 + plain_sum / np.minimum(l, 1.0)[..., None])
    ) / (1 - rho)[..., None]
    log_error = 2 * (2.0**-21 + 4 * U32 * (np.abs(np.log(l)) + np.abs(lse) + largest)) + U32 * np.abs(lse)
    lse_bound = rho / (1 - rho) + log_error
    own = rows.own_error
    own_out = U64 * abs_out if exactness.equal_logits and exactness.exact_sums else own.out
    return (
        np.where(some[..., None], half_width + own_out, 0.0),
        np.where(some, lse_bound + own.lse, 0.0),
        (trusted & own.in_range) | ~some,
    )


def _rescales(spec: AttentionSpec, group: Group, k: NDArray[np.int64], numerics: Numerics) -> NDArray[np.int64]:
    """R: tiles that can raise the running maximum, at most one per edge."""
    slots = np.full(k.shape, spec.seq_lens[group.request]) if numerics.dense else group.slots[..., None]
    return np.minimum(k, -(-slots // numerics.min_tile))


def _weight_error(
    spec: AttentionSpec,
    group: Group,
    s: Array,
    lse: Array,
    largest: Array,
    k: NDArray[np.int64],
    numerics: Numerics,
    exactness: Exactness,
) -> Array:
    """eta [b, r, g, S]: relative error of each un-normalised weight."""
    merge_size = np.maximum(np.abs(lse), largest)[..., None]
    if exactness.equal_logits:
        from_lse = 0.0 if numerics.merges_states else 8 * U32
        merge = from_lse * np.abs(lse)[..., None] + numerics.u_exp + 4 * U32
        own = 0.0 if numerics.unit_p else numerics.u_exp
        return np.broadcast_to(own + merge * numerics.splits, s.shape)
    products = scores.logits(np.abs(group.q), np.abs(group.k), spec.sm_scale)  # S
    largest = largest[..., None]
    logit = (gamma(group.q.shape[-1]) + 2 * numerics.u_operand) * products + 2 * U32 * np.abs(s)
    rescales = _rescales(spec, group, k, numerics)[..., None]
    eta: Array = (
        logit
        + 4 * U32 * (np.abs(s) + largest)
        + numerics.u_exp
        + rescales * (numerics.u_exp + 2 * U32)
        + 6 * U32 * largest
    )
    return eta + (numerics.u_exp + 8 * U32 * merge_size + 4 * U32 if numerics.splits else 0.0)
