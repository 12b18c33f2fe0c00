"""Paged sparse attention, forward, DESIGN section 4: the function that a backend must compute, with its own error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import epilogues, philox, softmax
from .candidates import ValidatedCandidates
from .edges import EmptyRowError, attended, row_positions
from .estimates import Estimate, estimate
from .groups import Group, Inputs, groups
from .paging import PageTable
from .spec import AttentionSpec, Epilogue, EpilogueKind

__all__ = [
    "Branch",
    "EmptyRowError",
    "Forward",
    "Group",
    "Inputs",
    "Rows",
    "edges",
    "empty_result",
    "evaluate",
    "forward",
    "forward_branches",
    "groups",
]

NO_EPILOGUE = Epilogue()

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Forward:
    """out [num_tokens, num_qo_heads, head_dim_vo] and lse [num_tokens, num_qo_heads] (natural log); unpacks as these.

    `out_error`, `lse_error`: bounds of their distance to the exact result, shaped as they are. `in_range` [num_tokens,
    num_qo_heads]: False where FP64 is too short for the row, whose errors are then infinite: never judge by it.
    """

    out: Array
    lse: Array
    out_error: Array
    lse_error: Array
    in_range: NDArray[np.bool_]

    def __iter__(self) -> Iterator[Array]:
        return iter((self.out, self.lse))


class Rows(NamedTuple):
    """One group before the epilogue: the state with the sink, out [b, r, g, d_vo], lse [b, r, g], own error."""

    state: softmax.State
    out: Array
    lse: Array
    own_error: Estimate


def edges(spec: AttentionSpec, candidates: ValidatedCandidates) -> tuple[Ints, Ints, Ints]:
    """All edges after all masks and the empty-row rule: row index, logical position of the key, multiplicity."""
    return attended(spec, candidates)[:3]


def forward(
    spec: AttentionSpec,
    inputs: Inputs,
    table: PageTable,
    candidates: ValidatedCandidates,
    *,
    gate: Array | None = None,
) -> Forward:
    """The function that a backend must compute, equations (4)-(7) and DESIGN section 4. `gate`: in place of that of
    `inputs`.

    Raises LookupError where a table leads to a page without data, EmptyRowError as the empty-row rule says, ValueError
    for attended values that are not finite.
    """
    result = empty_result(spec)
    for group in groups(spec, inputs, table, candidates):
        rows = evaluate(spec, group)
        for total, part in (
            (result.out, rows.out),
            (result.lse, rows.lse),
            (result.out_error, rows.own_error.out),
            (result.lse_error, rows.own_error.lse),
            (result.in_range, rows.own_error.in_range),
        ):
            by_row(spec, total)[group.rows] = part
    gate = epilogues.gate_of(spec.epilogue, inputs.gate, gate)
    out, out_error = epilogues.apply(spec.epilogue, result.out, result.out_error, gate)
    return Forward(out, result.lse, out_error, result.lse_error, result.in_range)


def evaluate(spec: AttentionSpec, group: Group) -> Rows:
    """One group, before the epilogue."""
    state = softmax.edge_state(group.z, group.edge, group.v, kept(spec, group))
    if spec.sink_logits:
        state = softmax.with_sink(state, np.asarray(spec.sink_logits)[group.qo_heads][:, None])
    out, lse = softmax.finish(state)
    return Rows(state, out, lse, estimate(spec, group, out, lse))


def kept(spec: AttentionSpec, group: Group) -> Array | None:
    """a_j / (1 - p) of each edge: [b, r, g, S]."""
    if spec.dropout is None:
        return None
    uid = spec.dropout.request_uids[group.request] if spec.dropout.request_uids else group.request
    key = group.key_position[:, None, None]
    query = row_positions(spec)[group.rows][..., None, None]
    return philox.keep(spec.dropout, key, query, group.qo_heads[:, None, :, None], uid) / (1 - spec.dropout.p)


def by_row(spec: AttentionSpec, x: NDArray[np.generic]) -> NDArray[np.generic]:
    """A view of [num_tokens, num_qo_heads, ...] by candidate row: [num_rows, g, ...]."""
    return x.reshape(spec.num_rows, spec.heads_per_list, *x.shape[2:])


def empty_result(spec: AttentionSpec) -> Forward:
    """What a call without any edge yields: out 0, lse -inf or the sink logit; exact."""
    shape = (spec.num_tokens, spec.num_qo_heads)
    out = np.zeros((*shape, spec.head_dim_vo))
    lse = np.full(shape, -np.inf)
    if spec.sink_logits:
        lse[:] = spec.sink_logits
    return Forward(out, lse, np.zeros_like(out), np.zeros(shape), np.ones(shape, bool))


class Branch(NamedTuple):
    """One of several softmaxes over the same queries, with its own candidates (and masks, keys, sink); no epilogue."""

    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    candidates: ValidatedCandidates


def forward_branches(
    branches: Sequence[Branch], gates: Array, epilogue: Epilogue = NO_EPILOGUE, *, gate: Array | None = None
) -> tuple[Forward, list[Forward]]:
    """Separate branches: out = sum_b gates[b] * out_b, then the epilogue; also what each branch yields by itself.

    gates [branches, num_tokens, num_qo_heads]. The sum is no softmax: its lse is NaN, each branch keeps its own.
    Raises ValueError for a branch with an epilogue of its own or gates of another shape.
    """
    for index, branch in enumerate(branches):
        if branch.spec.epilogue.kind is not EpilogueKind.NONE:
            raise ValueError(f"branch {index} has the epilogue {branch.spec.epilogue.kind}; only the sum may have one")
    parts = [forward(*branch) for branch in branches]
    shape = (len(parts), *parts[0].lse.shape)
    if gates.shape != shape:
        raise ValueError(f"gates must be {shape} (branches, tokens, query heads), got {gates.shape}")
    sizes = np.abs(gates)[..., None]
    out = np.sum([gate_b[..., None] * part.out for gate_b, part in zip(gates, parts, strict=True)], axis=0)
    rounding = (len(parts) + 1) * 2.0**-53
    error = np.sum(
        [size * (part.out_error + rounding * np.abs(part.out)) for size, part in zip(sizes, parts, strict=True)], axis=0
    )
    out, error = epilogues.apply(epilogue, out, error, gate)
    lse = np.full(parts[0].lse.shape, np.nan)
    in_range = np.all([part.in_range for part in parts], axis=0)
    return Forward(out, lse, error, np.full_like(lse, np.inf), in_range), parts
