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
from .logit_bounds import U32, angle_errors, gamma, logit_error, operand_error, pair_norms, reconstruction, rounding
from .numerics import Numerics
from .paging import PageTable, scatter
from .spec import AttentionSpec, DType, EpilogueKind, RoPE

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
    """By edge [b, r, g, S], 0 elsewhere: P, P a / (1 - p), the slope of the soft cap, |dZ|, eta, and X, the error of dZ
    but for what is coherent over a row; by row [b, r, g]: error of D, error of the fed lse, factor of second order,
    lse, D - d_lse.
    """

    p: Array
    dropped: Array
    slope: Array
    d_z: Array
    eta: Array
    x: Array
    d_error: Array
    lse_error: Array
    second: Array
    lse: Array
    delta: Array


def _edges(spec: AttentionSpec, group: Group, numerics: Numerics, given: _Given) -> _Edges:
    at = group.rows[..., None] // spec.num_kv_heads, group.qo_heads[:, None]
    d_out, d_lse, out_error, lse_error = (x[at] for x in given)
    rows, edge = evaluate(spec, group), group.edge[:, :, None]
    lse = np.where(rows.state.l > 0, rows.lse, 0.0)
    p = np.exp(group.logits - lse[..., None])
    factors = kept(spec, group)
    a = edge * (1.0 if factors is None else factors)
    d_p, size = a * scores.logits(d_out, group.v, 1.0), a * scores.logits(np.abs(d_out), np.abs(group.v), 1.0)
    delta = (p * d_p).sum(-1)
    d_s = p * (d_p - (delta - d_lse)[..., None])

    error = np.where(edge, logit_error(spec, group, numerics), 0.0)
    eta = edge * (
        error + 4 * U32 * (np.abs(np.where(edge, group.z, 0.0)) + np.abs(lse)[..., None]) + numerics.u_exp + 4 * U32
    )
    terms = group.v.shape[-1]
    v = reconstruction(spec.v_codec, numerics)
    d_p_error = (gamma(terms) + 2 * U32 + v.u) * size + v.a * a * np.abs(d_out).sum(-1)[..., None]
    d_error = (np.abs(d_out) * (out_error + gamma(terms) * np.abs(rows.out))).sum(-1)
    added = np.abs(d_p) + (np.abs(delta) + np.abs(d_lse))[..., None]
    x = np.abs(d_s) * eta + p * (1 + eta) * (d_p_error + 4 * U32 * added) + FLUSH * edge * (added + 1)
    slope: Array = edge.astype(np.float64)
    if spec.logits_soft_cap:
        z = scores.logits(group.q, group.k, spec.sm_scale)
        slope = edge * scores.soft_cap_slope(np.where(edge, z, 0.0), spec.logits_soft_cap)
        wrong = error / spec.logits_soft_cap  # of tanh, so of 1 - tanh^2 twice that
        x = x * slope + np.abs(d_s) * (wrong * (2 + wrong) + 4 * U32)
    u_p = FORMATS[numerics.p].u
    second = 1 + eta.max(-1, initial=0.0) + 2 * u_p + lse_error
    second = np.where(eta.max(-1, initial=0.0) + lse_error < MAX_ETA, second, np.inf)
    return _Edges(p, p * a, slope, np.abs(d_s) * slope, eta, x, d_error, lse_error, second, lse, delta - d_lse)


def _add(
    spec: AttentionSpec, group: Group, numerics: Numerics, given: _Given, keys: KeySums, offset: int, sums: _Sums
) -> None:
    """One group added to the sums."""
    edges = _edges(spec, group, numerics, given)
    at = group.rows[..., None] // spec.num_kv_heads, group.qo_heads[:, None]
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
    own = numerics.u_exp + U32 * (9 * np.abs(sink) + 8 * np.abs(lse) + 8) + lse_error
    return np.array([size * own + p * d_error, size, np.ones_like(size)])


def _query_terms(spec: AttentionSpec, group: Group, numerics: Numerics, e: _Edges) -> _QueryTerms:
    """Of d_q [b, r, g, d_qk]."""
    scale, cast, k = abs(spec.sm_scale), rounding(numerics.p), np.abs(group.k)[:, None]
    edge = group.edge[:, :, None] * 1.0
    steep, sizes = e.p * e.slope, scale * (e.d_z @ k)
    coherent = np.abs(steep @ group.k[:, None]) + (steep * e.eta) @ k
    error = (
        scale * (e.x @ k + cast.a * (edge @ k) + e.d_error[..., None] * coherent)
        + (cast.u + operand_error(spec, numerics)) * sizes
        + e.lse_error[..., None] * sizes
        + _absolute(spec, numerics) * scale * e.d_z.sum(-1)[..., None]
    )
    tiles = rescales(spec, group, numerics)[..., None]
    terms = group.counts.sum(-1)[..., None, None]
    parts = [error * e.second[..., None], (gamma(terms) + tiles * U32) * sizes, np.maximum(tiles - 1, 0) * sizes]
    if spec.rope:
        turned = [_turned(spec.rope, x, group.query_position[..., None]) for x in parts]
        turns = scale * _turn_errors(spec.rope, group, numerics, e.d_z, group.k, of_key=False)
        turned[0] = _with_pairs(spec.rope, turned[0], turns)
        parts = turned
    return _QueryTerms(*parts)


def _key_terms(spec: AttentionSpec, group: Group, numerics: Numerics, e: _Edges) -> tuple[Array, Array]:
    """Of d_k [b, S, d_qk]: error but for accumulation, and sum of sizes."""
    scale, cast, b = abs(spec.sm_scale), rounding(numerics.p), len(group.q)
    x = (e.x + e.p * e.slope * e.d_error[..., None] + e.d_z * (e.lse_error + cast.u)[..., None]) * e.second[..., None]
    x = x + cast.a * group.edge[:, :, None] + operand_error(spec, numerics) * e.d_z
    q = np.abs(group.q).reshape(b, -1, group.q.shape[-1])
    error, sizes = (scale * (each.reshape(b, q.shape[1], -1).swapaxes(1, 2) @ q) for each in (x, e.d_z))
    if spec.rope:
        turns = scale * _turn_errors(spec.rope, group, numerics, e.d_z, group.q, of_key=True)
        error, sizes = (_turned(spec.rope, each, group.key_position) for each in (error, sizes))
        error = _with_pairs(spec.rope, error, turns)
    return error, sizes


def _value_terms(spec: AttentionSpec, group: Group, numerics: Numerics, e: _Edges, d_out: Array) -> tuple[Array, Array]:
    """Of d_v [b, S, d_vo], likewise: d_out [b, r, g, d_vo], sizes."""
    cast, b = rounding(numerics.p), len(group.q)
    dropout = 2 * U32 if spec.dropout else 0.0
    x = e.dropped * (e.eta + e.lse_error[..., None] + cast.u + dropout) * e.second[..., None]
    x = x + (cast.a + FLUSH) * group.edge[:, :, None] / (1 - spec.dropout.p if spec.dropout else 1.0)
    rows = d_out.reshape(b, -1, d_out.shape[-1])
    error, sizes = (each.reshape(b, rows.shape[1], -1).swapaxes(1, 2) @ rows for each in (x, e.dropped))
    return error, sizes


def _add_keys(total: _KeyTerms, group: Group, keys: KeySums, offset: int, part: tuple[Array, Array]) -> None:
    terms = group.counts.sum(axis=1) * group.q.shape[2]
    for b, (entry, some) in enumerate(zip(keys.entries(group), np.asarray(group.edge.any(axis=1)), strict=True)):
        mine = offset + entry[some]
        total.error[mine] += part[0][b][some]
        total.sizes[mine] += part[1][b][some]
        total.terms[mine] += terms[b][some]


def _absolute(spec: AttentionSpec, numerics: Numerics) -> float:
    """Absolute error of an element of K as it enters the product with dZ."""
    return (rounding(numerics.rotated).a if spec.rope else 0.0) + reconstruction(spec.k_codec, numerics).a


def _turned(rope: RoPE, x: Array, position: NDArray[np.int64]) -> Array:
    """A bound of each channel [..., d] after a turn by the positions [...]."""
    first, second = scores.pairs(rope)
    angle = position[..., None] * scores.frequencies(rope)
    cos, sin = np.abs(np.cos(angle)), np.abs(np.sin(angle))
    turned = np.array(x)
    turned[..., first] = cos * x[..., first] + sin * x[..., second]
    turned[..., second] = cos * x[..., second] + sin * x[..., first]
    return turned


def _with_pairs(rope: RoPE, x: Array, by_pair: Array) -> Array:
    """x [..., d] + what each pair of channels may be off by [..., rotary_dim / 2]."""
    for channels in scores.pairs(rope):
        x[..., channels] += by_pair
    return x


def _turn_errors(rope: RoPE, group: Group, numerics: Numerics, d_z: Array, operand: Array, *, of_key: bool) -> Array:
    """How far the pairs of a gradient may be off since angles are: of d_q [b, r, g, pairs] by the keys, or (of_key) of
    d_k [b, S, pairs] by the queries. As for a logit, a wrong frequency counts by the distance only.
    """
    norm, wrong = pair_norms(rope, operand), angle_errors(rope, group, numerics)
    total = np.zeros(())
    for weights, by_pair in (
        (d_z * wrong.distance, wrong.frequency),
        (d_z * wrong.farthest, wrong.rounding),
        (2 * wrong.sine * d_z, np.ones_like(wrong.frequency)),
    ):
        if of_key:
            b, _, _, n = d_z.shape
            total = total + (weights.reshape(b, -1, n).swapaxes(1, 2) @ norm.reshape(b, -1, norm.shape[-1])) * by_pair
        else:
            total = total + (weights @ norm[:, None]) * by_pair
    return total * (1 + float(wrong.second_order.max(initial=0.0)))


def _accumulation(terms: Array) -> Array:
    """Relative error of a sum of so many terms, each of which may be a partial sum that an atomic adds."""
    return (terms + 2) * 2.0**-23 + terms * U32


def _finish(spec: AttentionSpec, numerics: Numerics, exact: Gradients, sums: _Sums) -> ExpectedGradients:
    cast = rounding(numerics.p)
    trusted = spec.epilogue.kind in (EpilogueKind.NONE, EpilogueKind.CAST)

    def allowed(value: Array, error: Array, own: Array, spread: Array, dtype: DType = numerics.out) -> Allowed:
        half_width = error + 4 * U32 * np.abs(value) + own
        half_width = np.where(np.isfinite(half_width) & trusted, half_width, np.inf)
        low, high = (round_to(x, dtype) for x in (value - half_width, value + half_width))
        out = FORMATS[dtype]
        runs = 2 * U32 * spread * (1 + cast.u) + 2 * out.u * np.abs(value) + 2 * out.a
        return Allowed(value, half_width, low, high, runs)

    def of_pages(gradient: KeyGradient, terms: _KeyTerms) -> Allowed:
        _, head, _, page, offset = gradient.positions
        error, sizes, count = (
            scatter(page, offset, head, x, gradient.page_size, spec.num_kv_heads).cache.data
            for x in (terms.error, terms.sizes, terms.terms[:, None])
        )
        own, value = gradient.page_errors.cache.data, gradient.pages.cache.data
        return allowed(value, error + _accumulation(count) * sizes, own, count * sizes)

    q = sums.q
    d_sink = None
    if exact.d_sink is not None:
        error, sizes, rows = sums.sink.sum(axis=1)
        error = error + _accumulation(rows) * sizes
        d_sink = allowed(exact.d_sink.value, error, exact.d_sink.error, rows * sizes, DType.FP32)
    d_q = allowed(exact.d_q.value, q.error + q.accumulation, exact.d_q.error, q.spread)
    pages = exact.d_k.pages.cache.pages
    return ExpectedGradients(d_q, of_pages(exact.d_k, sums.k), of_pages(exact.d_v, sums.v), pages, d_sink)
