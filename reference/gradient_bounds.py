"""How much error each element of a gradient may carry: GATES.md section 3, docs/bounds.md section 10.

For a backward that recomputes P = exp(s - lse) from the saved lse, takes D = sum d_out * out from the saved out, and
dS = P (dP - D + d_lse). What it is fed may be wrong: in isolation by the rounding of the fed out and lse, which is
known exactly, end to end by their own bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .bounds import FLUSH, rescales
from .candidates import ValidatedCandidates
from .edges import attended
from .formats import FORMATS, round_to
from .forward import evaluate, kept
from .gradients import Gradients, backward
from .groups import Group, Inputs, groups
from .key_gradients import KeyGradient, KeySums, key_sums
from .logit_bounds import (
    U32,
    Rounding,
    accumulation,
    gamma,
    logit_error,
    pair_norms,
    reconstruction,
    rounding,
)
from .numerics import Numerics
from .paging import PageTable, scatter
from .spec import AttentionSpec, DType, EpilogueKind
from .turn_bounds import by_key, converted, turn_errors, turned, with_pairs

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_ETA = 0.5  # beyond this relative error of a weight there is no bound


class FedErrors(NamedTuple):
    """|fed - exact| of what backward is fed: out [num_tokens, num_qo_heads, head_dim_vo] (before the epilogue) and lse
    [num_tokens, num_qo_heads].
    """

    out: Array
    lse: Array


@dataclass(frozen=True)
class Allowed:
    """One gradient, per element: its value, the error allowed before the output rounding (infinite: no bound), the
    closed interval after it, and how far two runs of a backend that adds in any order may lie apart.
    """

    value: Array
    half_width: Array
    low: Array
    high: Array
    run_to_run: Array


@dataclass(frozen=True)
class ExpectedGradients:
    """d_q [num_tokens, num_qo_heads, head_dim_qk]; d_k and d_v [pages, page_size, num_kv_heads, dim] of the physical
    `pages` [pages] that some row attends: slots that no row attends, there and elsewhere, have gradient exactly 0;
    d_sink [num_qo_heads], always FP32, None without sink logits.
    """

    d_q: Allowed
    d_k: Allowed
    d_v: Allowed
    pages: Ints
    d_sink: Allowed | None


def expected_gradients(
    spec: AttentionSpec,
    inputs: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    d_out: Array,
    numerics: Numerics,
    fed: FedErrors,
    *,
    d_lse: Array | None = None,
) -> ExpectedGradients:
    """The gradients, and the allowance of every element, for a backend with these numerics. An epilogue is no part of
    it: d_out is the gradient before it, and of a spec with another than a cast nothing has a bound.
    """
    exact = backward(spec, inputs, table, candidates, d_out, d_lse)
    edges = attended(spec, candidates)
    keys, d_k, d_v = key_sums(spec, table, edges)
    given = _Given(d_out, np.zeros(d_out.shape[:2]) if d_lse is None else d_lse, *fed)
    sums = _Sums(
        q=_QueryTerms(*(np.zeros(inputs.q.shape) for _ in range(3))),
        k=_KeyTerms(np.zeros(d_k.value.shape), np.zeros(d_k.value.shape), np.zeros(len(d_k.value))),
        v=_KeyTerms(np.zeros(d_v.value.shape), np.zeros(d_v.value.shape), np.zeros(len(d_v.value))),
        sink=np.zeros((3, spec.num_tokens, spec.num_qo_heads)),
    )
    if spec.sink_logits:
        alone = np.broadcast_to(spec.sink_logits, given.d_lse.shape)
        sums.sink[:] = _sink_terms(alone, alone, given.d_lse, 0.0, fed.lse, numerics)
    offsets = {request: int((d_k.positions.request < request).sum()) for request in keys}
    with np.errstate(over="ignore", invalid="ignore"):
        for group in groups(spec, inputs, table, candidates, edges):
            _add(spec, group, numerics, given, keys[group.request], offsets[group.request], sums)
        return _finish(spec, numerics, exact, sums)


class _Given(NamedTuple):
    """By token and head: d_out, d_lse, and the errors of the fed out and lse."""

    d_out: Array
    d_lse: Array
    out_error: Array
    lse_error: Array


class _QueryTerms(NamedTuple):
    """By token, head and channel: error but for accumulation, of accumulation, and the size of what is added by each
    tile, times the number of tiles but one.
    """

    error: Array
    accumulation: Array
    spread: Array


class _KeyTerms(NamedTuple):
    """By attended position and channel: error but for accumulation, and the sum of sizes; by position: terms."""

    error: Array
    sizes: Array
    terms: Array


class _Sums(NamedTuple):
    """`sink` [3, tokens, heads]: error of what each row adds, its size, 1 where it adds."""

    q: _QueryTerms
    k: _KeyTerms
    v: _KeyTerms
    sink: Array


class _Edges(NamedTuple):
    """By edge [b, r, g, S], 0 elsewhere: P g (g the slope of the soft cap), P a / (1 - p), |dZ|, the relative error of
    P, X (the error of dZ but for that of D), what rounding dZ to its format adds, how large a computed dZ may be, and
    the visits of a kernel that visits repeats one by one; by row [b, r, g]: error of D, error of the fed lse, lse,
    D - d_lse.
    """

    steep: Array
    dropped: Array
    d_z: Array
    eta: Array
    x: Array
    rounded: Array
    reach: Array
    visits: Array
    d_error: Array
    lse_error: Array
    lse: Array
    delta: Array


def _edges(spec: AttentionSpec, group: Group, numerics: Numerics, given: _Given) -> _Edges:
    at = group.rows[..., None] // spec.list_heads, group.qo_heads[:, None]
    d_out, d_lse, out_error, lse_error = (x[at] for x in given)
    rows, edge = evaluate(spec, group), group.edge[:, :, None]
    lse = np.where(rows.state.l > 0, rows.lse, 0.0)
    p = np.exp(group.logits - lse[..., None])
    factors = kept(spec, group)
    a = edge * (1.0 if factors is None else factors)
    d_p, size = a * scores.logits(d_out, group.v, 1.0), a * scores.logits(np.abs(d_out), np.abs(group.v), 1.0)
    delta = (p * d_p).sum(-1)
    d_s = np.abs(p * (d_p - (delta - d_lse)[..., None]))

    error = np.where(edge, logit_error(spec, group, numerics), 0.0)
    largest = np.abs(np.where(edge, group.z, 0.0)) + np.abs(lse)[..., None]
    eta = np.where(edge, _relative(error + 4 * U32 * (largest + 1) + numerics.u_exp + lse_error[..., None]), 0.0)
    terms, v = group.v.shape[-1], reconstruction(spec.v_codec, numerics)
    operands = (v.u + 2 * numerics.u_operand) * size + v.a * a * np.abs(d_out).sum(-1)[..., None]
    d_p_error = operands + (accumulation(terms, numerics) + 2 * U32) * (size + operands)
    if numerics.delta_from_p:
        edges = group.counts.sum(-1)[..., None]
        of_p = p * (eta * np.abs(d_p) + (1 + eta) * d_p_error)
        d_error = (of_p + accumulation(edges, numerics)[..., None] * (p * np.abs(d_p) + of_p)).sum(-1)
    else:
        d_error = (np.abs(d_out) * (out_error + gamma(terms) * (np.abs(rows.out) + out_error))).sum(-1)

    added = np.abs(d_p) + (np.abs(delta) + np.abs(d_lse))[..., None]
    visits = np.broadcast_to(group.counts[:, :, None] * 1.0, p.shape)
    x = d_s * eta + p * (1 + eta) * (d_p_error + 4 * U32 * added) + FLUSH * visits * (added + 2)
    of_delta = p * (1 + eta) * d_error[..., None]
    slope = edge.astype(np.float64)
    if spec.logits_soft_cap:
        z = scores.logits(group.q, group.k, spec.sm_scale)
        slope = edge * scores.soft_cap_slope(np.where(edge, z, 0.0), spec.logits_soft_cap)
        wrong = error / spec.logits_soft_cap  # of tanh, so of 1 - tanh^2 twice that
        x = x * slope + (d_s + x + of_delta) * (wrong * (2 + wrong) + 4 * U32)
    cast, d_z = rounding(numerics.p_backward), d_s * slope
    computed = d_z + x + of_delta * slope
    most = FORMATS[numerics.p_backward].max  # no bound beyond what the cast holds
    if numerics.scaled_d_s:
        most, cast = most / abs(spec.sm_scale), Rounding(cast.u + U32, cast.a / abs(spec.sm_scale))
    rounded = np.where(computed * (1 + cast.u) < most, cast.u * computed + cast.a * visits, np.inf)
    reach = computed + rounded
    return _Edges(p * slope, p * a, d_z, eta, x, rounded, reach, visits, d_error, lse_error, lse, delta - d_lse)


def _relative(eta: Array) -> Array:
    """The relative error of e^x for an x wrong by eta; infinite where there is no bound."""
    wrong: Array = np.where(eta < MAX_ETA, eta * (1 + eta), np.inf)
    return wrong


def _add(
    spec: AttentionSpec, group: Group, numerics: Numerics, given: _Given, keys: KeySums, offset: int, sums: _Sums
) -> None:
    """One group added to the sums."""
    edges = _edges(spec, group, numerics, given)
    at = group.rows[..., None] // spec.list_heads, group.qo_heads[:, None]
    for total, part in zip(sums.q, _query_terms(spec, group, numerics, edges), strict=True):
        total[at] = part
    d_out = np.abs(given.d_out[at])
    _add_keys(sums.k, group, keys, offset, _key_terms(spec, group, numerics, edges))
    _add_keys(sums.v, group, keys, offset, _value_terms(spec, group, numerics, edges, d_out))
    if spec.sink_logits:
        sink = np.asarray(spec.sink_logits)[group.qo_heads][:, None]
        sums.sink[:, *at] = _sink_terms(sink, edges.lse, edges.delta, edges.d_error, edges.lse_error, numerics)


def _sink_terms(
    sink: Array, lse: Array, delta: Array, d_error: Array | float, lse_error: Array, numerics: Numerics
) -> Array:
    """Of what each row adds to d_sink, P_s (d_lse - D): error, size, 1."""
    p = np.exp(sink - lse)
    size = p * np.abs(delta)
    own = _relative(numerics.u_exp + U32 * (9 * np.abs(sink) + 8 * np.abs(lse) + 8) + lse_error)
    flushed = FLUSH * (np.abs(delta) + d_error + 2)
    return np.array([size * own + p * (1 + own) * d_error + flushed, size, np.ones_like(size)])


def _query_terms(spec: AttentionSpec, group: Group, numerics: Numerics, e: _Edges) -> _QueryTerms:
    """Of d_q [b, r, g, d_qk]. The error of D is shared by a row: it meets the sum of P' K, not of its sizes."""
    scale, k, shared = abs(spec.sm_scale), np.abs(group.k)[:, None], e.d_error[..., None]
    sizes = e.reach @ k
    operands = _operand_errors(spec, group, numerics, e.reach, sizes)
    alone = (e.x + shared * e.steep * e.eta + e.rounded) @ k
    error = scale * (alone + shared * np.abs(e.steep @ group.k[:, None]) + operands)
    sizes = scale * (sizes + operands)
    tiles = rescales(spec, group, numerics)[..., None]
    terms = group.counts.sum(-1)[..., None, None]
    flushed = (1 + scale) * FLUSH * (terms + 1)
    parts = [error, (accumulation(terms, numerics) + tiles * U32) * sizes + flushed, np.maximum(tiles - 1, 0) * sizes]
    if spec.rope:
        back = [turned(spec.rope, x, group.query_position[..., None]) for x in parts]
        norm = converted(pair_norms(spec.rope, group.k), _rotated(spec, numerics))
        turns = scale * turn_errors(spec.rope, group, numerics, e.reach, norm, of_key=False)
        back[0] = with_pairs(spec.rope, back[0], turns)
        parts = back
    return _QueryTerms(*parts)


def _key_terms(spec: AttentionSpec, group: Group, numerics: Numerics, e: _Edges) -> tuple[Array, Array]:
    """Of d_k [b, S, d_qk]: error but for accumulation, and sum of sizes."""
    scale, cast, b = abs(spec.sm_scale), _rotated(spec, numerics), len(group.q)
    q = group.q.reshape(b, -1, group.q.shape[-1])
    alone = e.x + e.steep * (1 + e.eta) * e.d_error[..., None] + e.rounded
    error, sizes = (by_key(x) @ np.abs(q) for x in (alone, e.reach))
    operands = (2 * numerics.u_operand + cast.u) * sizes + cast.a * by_key(e.reach).sum(-1)[..., None]
    error, sizes = scale * (error + operands), scale * (sizes + operands)
    if spec.rope:
        norm = converted(pair_norms(spec.rope, q), cast)
        turns = scale * turn_errors(spec.rope, group, numerics, e.reach, norm, of_key=True)
        error, sizes = (turned(spec.rope, each, group.key_position) for each in (error, sizes))
        error = with_pairs(spec.rope, error, turns)
    return error, sizes


def _value_terms(spec: AttentionSpec, group: Group, numerics: Numerics, e: _Edges, d_out: Array) -> tuple[Array, Array]:
    """Of d_v [b, S, d_vo], likewise: d_out [b, r, g, d_vo], sizes."""
    cast, dropout, share = rounding(numerics.p_backward), 2 * U32, 1 - spec.dropout.p if spec.dropout else 1.0
    own = e.eta + dropout * (1 + e.eta) if spec.dropout else e.eta
    alone = e.dropped * (own + cast.u * (1 + own)) + (cast.a + FLUSH) * e.visits / share
    rows = d_out.reshape(len(d_out), -1, d_out.shape[-1])
    error, sizes = (by_key(x) @ rows for x in (alone, e.dropped + alone))
    return error + 2 * numerics.u_operand * sizes, sizes


def _rotated(spec: AttentionSpec, numerics: Numerics) -> Rounding:
    """Of q and K on their way into a product: nothing where the kernel does not turn them."""
    return rounding(numerics.rotated) if spec.rope else Rounding(0.0, 0.0)


def _operand_errors(spec: AttentionSpec, group: Group, numerics: Numerics, reach: Array, sizes: Array) -> Array:
    """Of d_q [b, r, g, d_qk] without the scale: what operands that are converted add; `sizes` = reach |K|."""
    cast, k = _rotated(spec, numerics), reconstruction(spec.k_codec, numerics)
    total = reach.sum(-1)[..., None]
    error: Array = (2 * numerics.u_operand + cast.u) * sizes + cast.a * total
    if spec.k_codec:
        wrong = k.u * sizes + k.a * total
        if spec.rope:  # rounded before it is turned: each channel by what its pair has
            pairs = k.u * (reach @ pair_norms(spec.rope, group.k)[:, None]) + 2 * k.a * total
            for channels in scores.pairs(spec.rope):
                wrong[..., channels] = pairs
        error += (1 + cast.u + 2 * numerics.u_operand) * wrong
    return error


def _add_keys(total: _KeyTerms, group: Group, keys: KeySums, offset: int, part: tuple[Array, Array]) -> None:
    terms = group.counts.sum(axis=1) * group.q.shape[2]
    for b, (entry, some) in enumerate(zip(keys.entries(group), np.asarray(group.edge.any(axis=1)), strict=True)):
        mine = offset + entry[some]
        total.error[mine] += part[0][b][some]
        total.sizes[mine] += part[1][b][some]
        total.terms[mine] += terms[b][some]


def _atomic(terms: Array, numerics: Numerics) -> Array:
    """Relative error of a sum of so many terms, each of which may be a partial sum that an atomic adds."""
    return accumulation(terms, numerics) + terms * U32


def _finish(spec: AttentionSpec, numerics: Numerics, exact: Gradients, sums: _Sums) -> ExpectedGradients:
    trusted = spec.epilogue.kind in (EpilogueKind.NONE, EpilogueKind.CAST)

    def allowed(value: Array, error: Array, own: Array, spread: Array, dtype: DType = numerics.out) -> Allowed:
        half_width = error + 4 * U32 * (np.abs(value) + error) + own
        half_width = np.where(np.isfinite(half_width) & trusted, half_width, np.inf)
        low, high = (round_to(x, dtype) for x in (value - half_width, value + half_width))
        out = FORMATS[dtype]
        runs = 2 * U32 * spread + 2 * out.u * (np.abs(value) + half_width) + 2 * out.a
        return Allowed(value, half_width, low, high, runs)

    def of_pages(gradient: KeyGradient, terms: _KeyTerms) -> Allowed:
        _, head, _, page, offset = gradient.positions
        error, sizes, count = (
            scatter(page, offset, head, x, gradient.page_size, spec.num_kv_heads).cache.data
            for x in (terms.error, terms.sizes, terms.terms[:, None])
        )
        own, value = gradient.page_errors.cache.data, gradient.pages.cache.data
        flushed = (1 + abs(spec.sm_scale)) * FLUSH * count
        return allowed(value, error + _atomic(count, numerics) * sizes + flushed, own, count * sizes)

    q = sums.q
    d_sink = None
    if exact.d_sink is not None:
        error, sizes, rows = sums.sink.sum(axis=1)
        error = error + _atomic(rows, numerics) * (sizes + error)
        d_sink = allowed(exact.d_sink.value, error, exact.d_sink.error, rows * sizes, DType.FP32)
    d_q = allowed(exact.d_q.value, q.error + q.accumulation, exact.d_q.error, q.spread)
    pages = exact.d_k.pages.cache.pages
    return ExpectedGradients(d_q, of_pages(exact.d_k, sums.k), of_pages(exact.d_v, sums.v), pages, d_sink)
