"""Paged sparse attention, backward, DESIGN section 4 and GATES.md section 3, each gradient with its own error.

From the candidates alone, under the masks and the dropout of the forward call, without a new selection: P = exp(z -
lse), D = sum_j P_j dP_j, dS_j = P_j (dP_j - D + d_lse) with dP_j = a_j d_out.v_j / (1 - p); then through the soft cap,
the scale and RoPE. lse is evaluated anew, in FP64: the gradient is the exact one at these inputs, whatever rounded out
and lse a backend is fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import epilogues, scores, softmax
from .candidates import ValidatedCandidates
from .edges import attended
from .epilogues import PulledBack
from .estimates import LOST, SLACK, U
from .forward import NO_EPILOGUE, Branch, forward, forward_branches, kept
from .gradient_estimates import (
    FLOOR,
    Estimated,
    RowBounds,
    judge,
    key_columns,
    query_error,
    row_bounds,
    value_columns,
)
from .groups import Group, Inputs, groups
from .key_gradients import KeyGradient, KeySums, key_sums
from .paging import PageTable
from .spec import AttentionSpec, Epilogue, EpilogueKind

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Gradients:
    """What `backward` yields; each has a `value` and an `error`, a bound of its distance to the exact gradient.

    d_q [num_tokens, num_qo_heads, head_dim_qk]; d_k, d_v: by attended position, see `KeyGradient`; d_sink
    [num_qo_heads] of the sink logits, d_buckets [num_qo_heads, buckets] of `RelativeBuckets.bias`, d_gate, shaped as
    the epilogue's gate: None where the spec has no such thing.
    """

    d_q: Estimated
    d_k: KeyGradient
    d_v: KeyGradient
    d_sink: Estimated | None = None
    d_buckets: Estimated | None = None
    d_gate: Estimated | None = None


def backward(
    spec: AttentionSpec,
    inputs: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    d_out: Array,
    d_lse: Array | None = None,
    *,
    gate: Array | None = None,
) -> Gradients:
    """The gradients that a backend must compute, of sum(d_out * out) + sum(d_lse * lse): d_out [num_tokens,
    num_qo_heads, head_dim_vo], behind the epilogue; d_lse [num_tokens, num_qo_heads] or None for 0; `gate` as in
    `forward`. A row without an edge has gradient 0 (its lse is the sink logit, where there is one).

    Raises what `forward` does, and ValueError for gradients of another shape or not finite, and for an epilogue
    without a gradient.
    """
    d_out, d_lse = _checked(spec, d_out, d_lse)
    plain = replace(spec, epilogue=NO_EPILOGUE)
    if spec.epilogue.kind in (EpilogueKind.NONE, EpilogueKind.CAST):
        before, before_error = d_out, np.zeros_like(d_out)  # not looked at
    else:
        result = forward(plain, inputs, table, candidates)
        before, before_error = result.out, result.out_error
    gate = epilogues.gate_of(spec.epilogue, inputs.gate, gate)
    pulled = epilogues.pull_back(spec.epilogue, before, before_error, d_out, gate)
    found = _backward(Branch(plain, inputs, table, candidates), pulled, d_lse)
    return replace(found, d_gate=_d_gate(pulled))


def _d_gate(pulled: PulledBack) -> Estimated | None:
    if pulled.d_gate is None or pulled.d_gate_error is None:
        return None
    return _judged(pulled.d_gate, pulled.d_gate_error)


def _checked(spec: AttentionSpec, d_out: Array, d_lse: Array | None) -> tuple[Array, Array]:
    shape = (spec.num_tokens, spec.num_qo_heads)
    d_lse = np.zeros(shape) if d_lse is None else d_lse
    for name, x, expected in (("d_out", d_out, (*shape, spec.head_dim_vo)), ("d_lse", d_lse, shape)):
        if x.shape != expected:
            raise ValueError(f"{name} must be {expected}, got {x.shape}")
        if not np.isfinite(x).all():
            token, head, *_ = np.argwhere(~np.isfinite(x))[0]
            raise ValueError(f"{name} must be finite, but is not at token {token}, query head {head}")
    return d_out.astype(np.float64, copy=False), d_lse.astype(np.float64, copy=False)


class _Sums(NamedTuple):
    """What rows add to: d_q and its error by candidate row [num_rows, g, d_qk]; by row and head [num_rows, g]: what
    the row adds to d_sink, with its error; d_buckets and its error [num_qo_heads, buckets]; terms: edges of the batch.
    """

    d_q: Array
    d_q_error: Array
    sink: Array
    sink_error: Array
    buckets: Array
    buckets_error: Array
    terms: int


def _backward(problem: Branch, pulled: PulledBack, d_lse: Array) -> Gradients:
    spec, inputs, table, candidates = problem
    edges = attended(spec, candidates)
    d_q, d_q_error = (np.zeros(inputs.q.shape) for _ in range(2))
    shape = np.shape(spec.buckets.bias) if spec.buckets else (0, 0)
    sink = d_lse.copy(), np.zeros(d_lse.shape)  # P_s of a row without an edge is 1
    of_q, of_q_error, of_sink, of_sink_error = (
        x.reshape(spec.num_rows, spec.heads_per_list, *x.shape[2:]) for x in (d_q, d_q_error, *sink)
    )
    by_bucket = np.zeros(shape), np.zeros(shape)
    sums = _Sums(of_q, of_q_error, of_sink, of_sink_error, *by_bucket, len(edges.t))
    keys, d_k, d_v = key_sums(spec, table, edges)
    for group in groups(spec, inputs, table, candidates, edges):
        at = group.rows[..., None] // spec.list_heads, group.qo_heads[:, None]
        of_rows = _OfRows(pulled.d_out[at], pulled.error[at], d_lse[at])
        with np.errstate(over="ignore", invalid="ignore"):
            _add(spec, group, of_rows, sums, keys[group.request])
    for part in keys.values():
        part.finish()
    d_buckets = _judged(sums.buckets, sums.buckets_error) if spec.buckets else None
    return Gradients(_judged(d_q, d_q_error), d_k, d_v, _sink(spec, sums), d_buckets)


def _judged(value: Array, error: Array) -> Estimated:
    judge(value, error)
    return Estimated(value, error)


class _OfRows(NamedTuple):
    """d_out, before the epilogue, and its error [b, r, g, d_vo]; d_lse [b, r, g]: of the rows of a group."""

    d_out: Array
    d_out_error: Array
    d_lse: Array


def _add(spec: AttentionSpec, group: Group, of_rows: _OfRows, sums: _Sums, keys: KeySums) -> None:
    """One group added to the sums."""
    d_out, d_out_error, d_lse = of_rows
    b, r, g, n = group.z.shape
    index = softmax.edge_index(group.edge.reshape(b * r, n), g)
    if not len(index.rows):
        return
    weights = _weights(spec, group, index)
    edges = _edge_gradients(spec, group, index, weights.p, d_out, d_lse)
    bounds = row_bounds(spec, group, weights.lse, d_out, d_out_error, d_lse)
    dense = _spread(edges.scratch, index, edges.d_z)
    d_q = (spec.sm_scale * (dense @ group.k)).reshape(group.q.shape)
    if spec.rope:
        d_q = scores.rotate_back(d_q, group.query_position[..., None], spec.rope)
    sums.d_q[group.rows], sums.d_q_error[group.rows] = d_q, query_error(spec, group, bounds)
    keys.add(0, group, dense, spec.sm_scale * group.q.reshape(b, r * g, -1))
    keys.add(1, group, _spread(dense, index, edges.dropped), d_out.reshape(b, r * g, -1))
    columns = (
        key_columns(spec, group, bounds, keys.terms),
        value_columns(spec, bounds, d_out, d_out_error, keys.terms),
    )
    keys.add_errors(group, index, weights.p, columns)
    if spec.sink_logits:
        _add_sink(group, weights.sink, d_lse - edges.d, bounds, sums)
    if spec.buckets:
        _add_buckets(spec, group, index, weights.p, edges.d_s, bounds, sums)


class _Weights(NamedTuple):
    """P [g, edges]; lse and the sink's own P [b, r, g]."""

    p: Array
    lse: Array
    sink: Array


def _weights(spec: AttentionSpec, group: Group, index: softmax.EdgeIndex) -> _Weights:
    b, r, g, n = group.z.shape
    m, l, p = softmax.weights_at(group.z.reshape(b * r, g, n), index)
    state = softmax.State(np.full((b * r, g), -np.inf), np.zeros((b * r, g)), np.zeros((b * r, g, 0)))
    state.m[index.rows], state.l[index.rows] = m.T, l.T
    sink = np.zeros((b, r, g))
    if spec.sink_logits:
        logit = np.broadcast_to(np.asarray(spec.sink_logits)[group.qo_heads][:, None], (b, r, g))
        state = softmax.with_sink(state, logit.reshape(b * r, g))
        sink = np.exp(logit - state.m.reshape(b, r, g)) / state.l.reshape(b, r, g)
    _, lse = softmax.finish(state)
    share = np.exp(m - state.m[index.rows].T) / state.l[index.rows].T
    return _Weights(p * index.spread(share), lse.reshape(b, r, g), sink)


class _EdgeGradients(NamedTuple):
    """At the edges [g, edges]: dS, dZ (behind the soft cap) and a P / (1 - p), which is the share of V; d [b, r, g]:
    D; scratch [b, r * g, S]: memory to use again.
    """

    d_s: Array
    d_z: Array
    dropped: Array
    d: Array
    scratch: Array


def _edge_gradients(
    spec: AttentionSpec, group: Group, index: softmax.EdgeIndex, p: Array, d_out: Array, d_lse: Array
) -> _EdgeGradients:
    b, r, g, _ = group.z.shape
    with np.errstate(over="ignore", invalid="ignore"):
        products = d_out.reshape(b, r * g, -1) @ group.v.swapaxes(1, 2)
    d_p, dropped, a = products.reshape(-1).take(index.at), p, kept(spec, group)
    if a is not None:
        factor = a.reshape(-1).take(index.at)
        d_p, dropped = d_p * factor, p * factor
    d = np.zeros((b * r, g))
    d[index.rows] = index.sums(p * d_p).T
    d_s = p * (d_p - index.spread((d - d_lse.reshape(-1, g))[index.rows].T))
    d_z = d_s
    if spec.logits_soft_cap:
        z = scores.logits(group.q, group.k, spec.sm_scale).reshape(-1).take(index.at)
        d_z = d_s * scores.soft_cap_slope(z, spec.logits_soft_cap)
    return _EdgeGradients(d_s, d_z, dropped, d.reshape(b, r, g), products)


def _spread(dense: Array, index: softmax.EdgeIndex, x: Array) -> Array:
    """`dense` [b, r * g, S] filled with x at the edges and 0 elsewhere."""
    dense.fill(0.0)
    dense.reshape(-1)[index.at] = x
    return dense


def _add_sink(group: Group, p: Array, d_lse_less_d: Array, bounds: RowBounds, sums: _Sums) -> None:
    """dSink gains P_s (d_lse - D) of each row."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = (p + LOST) * (bounds.d_lse_less_d * (bounds.p + 6 * U) + bounds.d) + FLOOR
    sums.sink[group.rows], sums.sink_error[group.rows] = p * d_lse_less_d, error


def _sink(spec: AttentionSpec, sums: _Sums) -> Estimated | None:
    if not spec.sink_logits:
        return None
    by_head = (x.reshape(spec.num_tokens, spec.num_qo_heads) for x in (sums.sink, sums.sink_error, np.abs(sums.sink)))
    value, error, sizes = (x.sum(axis=0) for x in by_head)
    return _judged(value, error + (spec.num_tokens + 2) * U * sizes)


def _add_buckets(
    spec: AttentionSpec,
    group: Group,
    index: softmax.EdgeIndex,
    p: Array,
    d_s: Array,
    bounds: RowBounds,
    sums: _Sums,
) -> None:
    """The gradient of a bucket is the sum of dS over the edges that it is added to."""
    assert spec.buckets is not None
    _, r, g, n = group.z.shape
    row, slot = np.divmod(index.at[0], g * n)
    distance = group.query_position.reshape(-1)[row] - group.key_position[row // r, slot]
    width = sums.buckets.shape[1]
    head = group.qo_heads[row // r].T
    place = (head * width + scores.bucket(spec.buckets, distance)).ravel()
    of_row = (bounds.d_s + bounds.size * sums.terms * U).reshape(-1, g)[index.rows].T
    with np.errstate(over="ignore", invalid="ignore"):
        weight = (p + LOST) * index.spread(of_row) + FLOOR
    for total, x in ((sums.buckets, d_s), (sums.buckets_error, weight)):
        total += np.bincount(place, x.ravel(), total.size).reshape(total.shape)


@dataclass(frozen=True)
class BranchGradients:
    """What `backward_branches` yields: the gradients of each branch, of the gates [branches, num_tokens,
    num_qo_heads], and of the epilogue's gate (None without one).
    """

    branches: tuple[Gradients, ...]
    d_gates: Estimated
    d_gate: Estimated | None = None


def backward_branches(
    branches: Sequence[Branch],
    gates: Array,
    d_out: Array,
    d_lse: Array | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    gate: Array | None = None,
) -> BranchGradients:
    """The gradients of `forward_branches`, whose arguments these are: d_out of the gated sum behind the epilogue; d_lse
    [branches, num_tokens, num_qo_heads] of each branch's own lse, or None for 0.

    Keys and values that branches share receive the sum of what each branch yields for them. Raises what
    `forward_branches` and `backward` do.
    """
    total, parts = forward_branches(branches, gates)
    d_lse = np.zeros(gates.shape) if d_lse is None else d_lse
    if d_lse.shape != gates.shape:
        raise ValueError(f"d_lse must be {gates.shape} (branches, tokens, query heads), got {d_lse.shape}")
    checked = [_checked(branch.spec, d_out, part) for branch, part in zip(branches, d_lse, strict=True)]
    pulled = epilogues.pull_back(epilogue, total.out, total.out_error, d_out, gate)
    found = []
    for branch, gate_b, (_, d_lse_b) in zip(branches, gates[..., None], checked, strict=True):
        scaled = gate_b * pulled.d_out
        error = np.abs(gate_b) * pulled.error + U * np.abs(scaled) + FLOOR
        found.append(_backward(branch, PulledBack(scaled, error), d_lse_b))
    d_gates = _gate_gradients(pulled, np.array([part.out for part in parts]), np.array([p.out_error for p in parts]))
    return BranchGradients(tuple(found), d_gates, _d_gate(pulled))


def _gate_gradients(pulled: PulledBack, out: Array, out_error: Array) -> Estimated:
    """sum_c d_out_c out_c of each branch: out and its error [branches, tokens, heads, d_vo]."""
    products = pulled.d_out * out
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(pulled.d_out) * out_error + np.abs(out) * pulled.error + pulled.error * out_error
        error += (out.shape[-1] + 2) * U * np.abs(products) + FLOOR
    return _judged(products.sum(-1), SLACK * error.sum(-1))
