"""Copies of a cell's requests for backward: random values, and witnesses whose gradients are known to the bit or are 0.

A witness needs the plain row: no term of the logit but sm_scale * q.k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sacts.reference.candidates import CandidateLists, validate
from sacts.reference.edges import row_kv_heads
from sacts.reference.formats import FORMATS, round_to
from sacts.reference.forward import Inputs, edges
from sacts.reference.spec import AttentionSpec, CandidateKind, DType

from ..adapter import PADDING, Backend
from ..backward_launch import Call, call_of
from ..build import Problem, last_query
from ..draw import Draw
from ..gates.gradients import OUTPUTS, Bounds, bounds_of
from .copies import busiest
from .inputs import RANDOM
from .margins import CERTAIN

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
U32 = 2.0**-24
NOT_ROUNDED = 2.0**-30  # a mean of at most 2^20 numbers +-1 that a 16-bit format does not hold is further off
LADDER = 2  # octaves by which d_out of one channel goes beyond the precision of the output format


@dataclass(frozen=True)
class GradientCopy:
    """One problem with the values of backward. `judged`: by probe, the outputs that it decides about; `margin`: by
    probe, the smallest change that its target fault would cause / the smallest that is noticed, for each edge or row.
    `of`: what of the cell a witness of fewer requests is made of, in words.
    """

    problem: Problem
    inputs: Inputs
    call: Call
    bounds: Bounds
    judged: Mapping[str, tuple[str, ...]]
    margin: Mapping[str, Array]
    of: str = ""


@dataclass(frozen=True)
class Edges:
    """What each edge of a plain problem is: token, KV head, and its slot (live page, offset) [E]; first [E]: the first
    of the g query heads that its row serves; p and d_s [E, g].
    """

    token: Ints
    head: Ints
    page: Ints
    offset: Ints
    first: Ints
    p: Array
    d_s: Array

    @property
    def slot(self) -> tuple[Ints, Ints, Ints]:
        """An index into arrays [L, page_size, KV heads]."""
        return self.page, self.offset, self.head

    def of(self, token: int, qo_head: int) -> tuple[Ints, Ints]:
        """The edges of an output row, an index into p and d_s."""
        lane = qo_head - self.first
        mine = np.flatnonzero((self.token == token) & (lane >= 0) & (lane < self.p.shape[1]))
        return mine, lane[mine]


def copies(problem: Problem, backend: Backend) -> list[GradientCopy]:
    """The random copy of all requests; where the row is plain, the value witness of all, and two of one last query."""
    made = [random_copy(problem, backend)]
    if _has_witnesses(problem):
        made.append(replace(_value(problem, backend), of="all requests, lists cut to 2^m edges"))
        for request, alone, paired in _last_queries(problem):
            of = f"the last query of request {request}"
            made.append(replace(_const(alone, backend), of=of))
            if _in_quadruples(paired):
                made.append(replace(_null(paired, backend), of=of))
    return made


def carried(problem: Problem) -> set[str]:
    """The probes of `copies`."""
    found = {"gradients"} | ({"bw_value", "bw_dk"} if _has_witnesses(problem) else set())
    for _, _, paired in _last_queries(problem) if _has_witnesses(problem) else ():
        found |= {"bw_const", *(["bw_null"] if _in_quadruples(paired) else [])}
    return found


def _has_witnesses(problem: Problem) -> bool:
    return is_plain(problem.spec) and bool(problem.needed.any())


def _last_queries(problem: Problem) -> Iterator[tuple[int, Problem, Problem]]:
    """The request whose last query attends most, that query alone, and the same with 2^m edges where possible."""
    for request in busiest(problem)[:1]:
        alone = last_query(problem, request, "backward")
        yield request, alone, _whole_powers(alone)


def is_plain(spec: AttentionSpec) -> bool:
    """Whether a logit is sm_scale * q.k and nothing else, of values that are stored as they are."""
    terms = spec.rope, spec.logits_soft_cap, spec.alibi_slopes, spec.buckets, spec.sink_logits, spec.dropout
    stored = spec.k_codec, spec.v_codec
    plain = not any(terms) and not any(stored) and not spec.empty_row.forces
    return plain and spec.candidate_kind is CandidateKind.SET and min(spec.head_dim_qk, spec.head_dim_vo) >= 4


def _rows(spec: AttentionSpec, dim: int | None = None) -> tuple[int, ...]:
    return (spec.num_tokens, spec.num_qo_heads) if dim is None else (spec.num_tokens, spec.num_qo_heads, dim)


def random_copy(problem: Problem, backend: Backend) -> GradientCopy:
    """All requests with the cell's numeric family, d_out and d_lse normal."""
    spec, draw, inputs = problem.spec, problem.draw("gradients"), RANDOM.inputs(problem)
    d_out = round_to(draw.normal(_rows(spec, spec.head_dim_vo)), spec.dtype)
    d_lse = round_to(draw.normal(_rows(spec)), DType.FP32)
    call = call_of(problem, inputs, backend, d_out, d_lse)
    bounds = bounds_of(problem, inputs, call, backend.numerics(spec.dtype, problem.hints))
    rejects = np.concatenate([((of.low > 0) | (of.high < 0)).ravel() for of in bounds.allowed.values()])
    margin = np.where(rejects, CERTAIN, 0.0) if problem.needed.any() else np.zeros(0)
    return GradientCopy(problem, inputs, call, bounds, {"gradients": OUTPUTS}, {"gradients": margin})


def attended_edges(problem: Problem, inputs: Inputs, call: Call) -> Edges:
    """P and dS of every edge of a plain problem, in FP64."""
    spec = problem.spec
    row, t, _ = edges(spec, problem.candidates)
    token, head = row // spec.list_heads, row_kv_heads(spec, row)
    logical, offset = np.divmod(t, spec.page_size)
    request = np.asarray(spec.token_request, np.int64)[token]
    page = np.searchsorted(problem.pages, problem.table.table[request, logical])
    k, v = (cache.data[page, offset, head] for cache in (inputs.k, inputs.v))
    shape = (spec.num_rows, spec.heads_per_list)
    q, d_out = (x.reshape(*shape, x.shape[-1])[row] for x in (inputs.q, call.d_out))
    z = spec.sm_scale * np.einsum("egd,ed->eg", q, k)
    top = np.full(shape, -np.inf)
    np.maximum.at(top, row, z)
    p = np.exp(z - top[row])
    p /= _sums(row, p, shape)[row]
    d_p = np.einsum("egd,ed->eg", d_out, v)
    delta = _sums(row, p * d_p, shape) - call.d_lse.reshape(shape)
    first = row % spec.list_heads * spec.heads_per_list
    return Edges(token, head, page, offset, first, p, p * (d_p - delta[row]))


def _sums(row: Ints, x: Array, shape: tuple[int, int]) -> Array:
    total = np.zeros(shape)
    np.add.at(total, row, x)
    return total


# --- lists with 2^m edges


def _whole_powers(problem: Problem) -> Problem:
    """The same problem with lists cut so that each row attends 2^m tokens, where its entries allow it."""
    spec = problem.spec
    row, t, _ = edges(spec, problem.candidates)
    ends = np.searchsorted(row, np.arange(spec.num_rows + 1))
    lists = [_cut(t[a:b] // spec.block_size, spec.block_size) for a, b in pairwise(ends)]
    indptr = np.cumsum([0, *map(len, lists)])
    raw = CandidateLists(indptr, np.concatenate([np.zeros(0, np.int64), *lists]))
    return replace(problem, raw=raw, candidates=validate(spec, raw, problem.table, sentinels=(PADDING,)))


def _cut(entries: Ints, block_size: int) -> Ints:
    """2^m of the entries that are attended whole; all where there is none."""
    entry, times = np.unique(entries, return_counts=True)
    whole = entry[times == block_size]
    return whole[: 1 << (len(whole).bit_length() - 1)] if len(whole) else entry


def _counts(problem: Problem) -> Ints:
    """Edges of each candidate row."""
    row, _, _ = edges(problem.spec, problem.candidates)
    return np.bincount(row, minlength=problem.spec.num_rows)


def _power(counts: Ints) -> bool:
    some = counts[counts > 0]
    return bool((some & (some - 1) == 0).all())


def _in_quadruples(problem: Problem) -> bool:
    """Whether the query heads of a KV head share one list, so that their d_k and d_v may cancel, and it is of 4^m keys
    or of a multiple by a power of two.
    """
    spec, last = problem.spec, _counts(problem)[-problem.spec.list_heads :]
    if spec.heads_per_list < spec.group_size:
        return False
    return bool((last > 0).any() and (last % 4 == 0).all()) and _power(last)


# --- witnesses


def _orthogonal(problem: Problem, draw: Draw) -> tuple[Array, Array]:
    """q of +-1 in the first half of the channels, K in the second half: every logit is exactly 0."""
    spec = problem.spec
    half = spec.head_dim_qk // 2
    q, k = np.zeros(_rows(spec, spec.head_dim_qk)), np.zeros((*problem.needed.shape, spec.head_dim_qk))
    q[..., :half] = draw.signs(q[..., :half].shape)
    k[..., half:] = draw.signs(k[..., half:].shape)
    return q, k


def _value(problem: Problem, backend: Backend) -> GradientCopy:
    """V is +-1 in even channels and 0 in odd ones; d_out has one even channel, so that dS has few bits; its odd ones
    reach d_v alone: +-1, or a ladder of octaves that an accumulator of the output format cannot add up.
    """
    problem = _whole_powers(problem)
    spec, draw = problem.spec, problem.draw("gradients", "value")
    q, k = _orthogonal(problem, draw)
    v = np.zeros((*problem.needed.shape, spec.head_dim_vo))
    v[..., ::2] = draw.signs(v[..., ::2].shape)
    d_out = np.zeros(_rows(spec, spec.head_dim_vo))
    token, head = np.indices(_rows(spec))
    channel = 2 * ((token * spec.num_qo_heads + head) % (spec.head_dim_vo // 2))
    d_out[token, head, channel] = draw.signs(_rows(spec))
    d_out[..., 1::4] = draw.signs(d_out[..., 1::4].shape)
    step = draw.permutation(d_out[..., 3::4].size).reshape(d_out[..., 3::4].shape)
    steps = min(FORMATS[spec.dtype].precision, 11) + LADDER
    d_out[..., 3::4] = draw.signs(step.shape) * np.exp2(step % steps)
    inputs = problem.inputs(q, k, v)
    call = call_of(problem, inputs, backend, d_out, np.zeros(_rows(spec)))
    bounds, edge = _sharp(problem, inputs, call, backend), attended_edges(problem, inputs, call)
    judged = {"bw_value": ("d_v",), "bw_dk": ("d_k", "d_q")}
    margin = {
        "bw_value": _lost(problem, edge, bounds, {"d_v": (edge.p, d_out)}),
        "bw_dk": np.minimum(
            *(_lost(problem, edge, bounds, _products(problem, inputs, edge, x)) for x in ("d_k", "d_q"))
        ),
    }
    return GradientCopy(problem, inputs, call, bounds, judged, margin)


def _products(problem: Problem, inputs: Inputs, edge: Edges, output: str) -> dict[str, tuple[Array, Array]]:
    return {output: (problem.spec.sm_scale * edge.d_s, inputs.q if output == "d_k" else inputs.k.data)}


def _lost(problem: Problem, edge: Edges, bounds: Bounds, parts: Mapping[str, tuple[Array, Array]]) -> Array:
    """Of each edge that adds anything to the outputs of `parts`, in the channel that shows it best: what is missing
    there without it, as a multiple of what is noticed.
    """
    spec, best, adds = problem.spec, np.zeros(edge.p.shape), np.zeros(edge.p.shape, bool)
    heads = edge.first[:, None] + np.arange(spec.heads_per_list)
    for output, (weight, operand) in parts.items():
        noticed = bounds.noticed(output)
        at_slot, at_row = edge.slot, (edge.token[:, None], heads)
        needed = noticed[at_row] if output == "d_q" else noticed[at_slot][:, None]
        value = operand[at_slot][:, None] if output == "d_q" else operand[at_row]
        part = np.abs(weight[..., None] * value)
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.nan_to_num(part / needed, posinf=CERTAIN)
        best, adds = np.maximum(best, times.max(axis=-1)), adds | (part > 0).any(axis=-1)
    lost: Array = np.minimum(np.where(adds, best, CERTAIN), CERTAIN).ravel()
    return lost


def _sharp(problem: Problem, inputs: Inputs, call: Call, backend: Backend) -> Bounds:
    """The bounds, without what the casts of P and dS cost where those are exact: P is a power of two and its error less
    than half of what moves its cast, dS has no more bits than the format, and the fed out is not rounded.
    """
    numerics = backend.numerics(problem.spec.dtype, problem.hints)
    plain = bounds_of(problem, inputs, call, numerics)
    counts, least = _counts(problem), FORMATS[numerics.p_backward].u / 4
    eta = numerics.u_exp + 16 * U32 * (1 + np.log(max(1, int(counts.max(initial=1)))))
    if numerics.p_backward is DType.FP32 or not _power(counts) or eta > least or not backend.capabilities.reads_saved:
        return plain
    sharp = bounds_of(problem, inputs, call, replace(numerics, p=DType.FP32))
    edge = attended_edges(problem, inputs, call)
    d_s = edge.d_s * (problem.spec.sm_scale if numerics.scaled_d_s else 1.0)
    exact = bool((round_to(d_s, numerics.p_backward) == d_s).all() and (call.errors.out < NOT_ROUNDED).all())
    return replace(plain, allowed={**plain.allowed, **(sharp.allowed if exact else {"d_v": sharp.allowed["d_v"]})})


def _const(problem: Problem, backend: Backend) -> GradientCopy:
    """Equal V and d_out of their signs: dP is one number, D takes it away, and d_q = d_k = 0."""
    spec, draw, inputs = problem.spec, problem.draw("gradients", "const"), RANDOM.inputs(problem)
    row = draw.signs((spec.head_dim_vo,))
    v = np.broadcast_to(row, inputs.v.data.shape).copy()
    inputs = problem.inputs(inputs.q, inputs.k.data, v)
    d_out = np.zeros(_rows(spec, spec.head_dim_vo))
    d_out[-1] = row
    call = call_of(problem, inputs, backend, d_out, np.zeros(_rows(spec)))
    bounds = bounds_of(problem, inputs, call, backend.numerics(spec.dtype, problem.hints))
    edge = attended_edges(problem, inputs, call)
    missing = replace(edge, d_s=edge.p * (d_out[edge.token, 0] * row).sum(axis=-1)[:, None])
    parts = _products(problem, inputs, missing, "d_k")
    margin = _lost(problem, missing, bounds, parts)[edge.token.repeat(spec.heads_per_list) == spec.num_tokens - 1]
    best = np.array([margin.max(initial=0.0)]) if len(margin) else margin
    return GradientCopy(problem, inputs, call, bounds, {"bw_const": OUTPUTS}, {"bw_const": best})


def _null(problem: Problem, backend: Backend) -> GradientCopy:
    """Keys (V, K), (-V, -K), (V, -K), (-V, K) and equal weights: out and d_q vanish; neighbouring query heads have one
    q and opposite d_out: d_k and d_v vanish.
    """
    spec, draw = problem.spec, problem.draw("gradients", "null")
    q, k = _orthogonal(problem, draw)
    v = np.zeros((*problem.needed.shape, spec.head_dim_vo))
    row, t, _ = edges(spec, problem.candidates)
    owner = spec.token_request[-1]
    for head in range(spec.num_kv_heads):
        mine = t[row == (spec.num_tokens - 1) * spec.num_kv_heads + head]
        page, offset = np.divmod(mine, spec.page_size)
        at = np.searchsorted(problem.pages, problem.table.table[owner, page]), offset, head
        quads = len(mine) // 4
        v[at] = np.repeat(draw.signs((quads, spec.head_dim_vo)), 4, axis=0) * np.tile([1, -1, 1, -1], quads)[:, None]
        k[at] = np.repeat(k[at][::4], 4, axis=0) * np.tile([1, -1, -1, 1], quads)[:, None]
    d_out = np.zeros(_rows(spec, spec.head_dim_vo))
    d_out[-1, :, 0] = 1.0
    grouped, queries = (x[-1].reshape(spec.num_kv_heads, spec.group_size, -1) for x in (d_out, q))
    pairs = spec.group_size // 2
    grouped[:, 1 : 2 * pairs : 2] *= -1
    queries[:, 1 : 2 * pairs : 2] = queries[:, 0 : 2 * pairs : 2]
    if spec.group_size % 2 and pairs:
        grouped[:, -1] = 0.0
    inputs = problem.inputs(q, k, v)
    call = call_of(problem, inputs, backend, d_out, np.zeros(_rows(spec)))
    bounds, edge = _sharp(problem, inputs, call, backend), attended_edges(problem, inputs, call)
    parts = _products(problem, inputs, edge, "d_k") | _products(problem, inputs, edge, "d_q")
    margin = _lost(problem, edge, bounds, parts | {"d_v": (edge.p, d_out)})
    return GradientCopy(problem, inputs, call, bounds, {"bw_null": OUTPUTS}, {"bw_null": margin})


PROBES: tuple[str, ...] = ("gradients", "bw_value", "bw_dk", "bw_const", "bw_null")
