"""The witness copy: the last query of one request, whose query heads each ask another question of the same K and V.

Dims of K: levels of the stair, levels of the cliff, +-1 codes. Channels of V: one-hot teeth, codes of the stair, codes
of the cliff. A query head picks its question with q alone, so that one copy carries as many witnesses as heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sacts.reference import scores
from sacts.reference.formats import round_to
from sacts.reference.forward import Inputs

from ..build import Problem
from ..draw import Array, Draw
from ..launch import STALE_VALUE
from . import pointers
from . import stairs as steps
from .applicability import keeps_meaning
from .rows import RowSlots, added, last_rows

LEAST_DIM_QK, LEAST_DIM_VO = 16, 16
CODES = 2 * steps.PIECES  # the first dim of the codes; the first half of V holds the teeth


class Lane(NamedTuple):
    """What one query head asks: the probe, its KV head, the key that `select` selects (its place in the row)."""

    probe: str
    kv_head: int
    target: int = -1


@dataclass(frozen=True)
class Witness:
    """A witness copy: lanes by query head; per KV head its row, its levels of stair and cliff (None: does not fit),
    V of the row's keys [k, d_vo], and the probes that fit it.
    """

    problem: Problem
    inputs: Inputs
    lanes: dict[int, Lane]
    rows: list[RowSlots]
    stairs: list[steps.Levels | None]
    cliffs: list[steps.Levels | None]
    values: list[Array]
    fitting: list[list[str]]


def suits(problem: Problem) -> bool:
    """Whether witness copies mean anything here: terms that leave some probe its meaning, and room for codes."""
    spec = problem.spec
    return (
        any(keeps_meaning(name, spec) for name in _ORDER)
        and spec.head_dim_qk >= LEAST_DIM_QK
        and spec.head_dim_vo >= LEAST_DIM_VO
    )


def witness(problem: Problem, number: int) -> Witness:
    """The witness copy `number` of a problem whose last token it asks: lanes and boundaries turn with the number."""
    spec, draw = problem.spec, problem.draw("witness", number)
    slots = (*problem.slot_request.shape, spec.num_kv_heads)
    k, v = np.zeros((*slots, spec.head_dim_qk)), np.full((*slots, spec.head_dim_vo), STALE_VALUE)
    k[..., CODES:] = draw.signs((*slots, spec.head_dim_qk - CODES))
    q = np.zeros((spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk))
    made = Witness(problem, problem.inputs(q, k, v), {}, last_rows(problem), [], [], [], [])
    for head, row in enumerate(made.rows):
        _fill_row(made, head, row, number, draw)
        fit = [name for name in _ORDER if keeps_meaning(name, spec) and _FITS[name](made, head)]
        made.fitting.append(fit)
    for qo_head in range(spec.num_qo_heads):
        head = qo_head // spec.group_size
        probes = made.fitting[head]
        if probes:
            turn = qo_head + number * (2 if spec.num_qo_heads > 2 else spec.num_qo_heads)
            _ask(made, qo_head, head, probes[turn % len(probes)], turn, draw)
    return made


def _fill_row(made: Witness, head: int, row: RowSlots, number: int, draw: Draw) -> None:
    """K and V of one KV head's row."""
    spec = made.problem.spec
    half, quarter = spec.head_dim_vo // 2, spec.head_dim_vo // 4
    bounds = steps.boundaries(row)
    climbs = keeps_meaning("stair", spec)
    stair = steps.stair(row, quarter, draw) if row.tiles > 1 and climbs else None
    at = bounds[-1 - (draw.integer(0, len(bounds)) + number) % len(bounds)] if bounds else 0
    cliff = steps.cliff(row, at, spec.head_dim_vo - half - quarter, draw) if bounds and climbs else None
    values = draw.signs((len(row.t), spec.head_dim_vo))
    values[:, :half] = pointers.teeth(row, spec.page_size, half)
    at_row = row.page, row.offset, head
    for levels, dims, channels in (
        (stair, slice(0, steps.PIECES), slice(half, half + quarter)),
        (cliff, slice(steps.PIECES, CODES), slice(half + quarter, None)),
    ):
        if levels is not None:
            made.inputs.k.data[(*at_row, dims)] = steps.keys(levels.level, spec.sm_scale, spec.dtype)
            values[:, channels] = levels.codes
    made.inputs.v.data[at_row] = values
    made.stairs.append(stair)
    made.cliffs.append(cliff)
    made.values.append(values)


def _ask(made: Witness, qo_head: int, head: int, probe: str, turn: int, draw: Draw) -> None:
    spec = made.problem.spec
    q = made.inputs.q[-1, qo_head]
    target = -1
    if probe == "stair":
        q[: steps.PIECES] = 1.0
    elif probe == "cliff":
        q[steps.PIECES : CODES] = 1.0
    elif probe == "comb":
        q[CODES:] = round_to(pointers.generic(spec.head_dim_qk - CODES, spec.sm_scale, draw), spec.dtype)
    else:
        target, times = _target(made, head, turn // len(_ORDER), draw)
        q[:] = round_to(times * _seen_codes(made, head)[target], spec.dtype)
    made.lanes[qo_head] = Lane(probe, head, target)


def _target(made: Witness, head: int, turn: int, draw: Draw) -> tuple[int, float]:
    """The place of the key to select, edges first, and the factor of its code. What no row attends gets the same code:
    if it joined, it would take its share.
    """
    row, k, codes = made.rows[head], made.inputs.k.data, _seen_codes(made, head)
    spread = _spread(made, head)
    tokens = np.roll(pointers.edge_tokens(row, made.problem.spec.page_size, draw), -turn).tolist()
    for target in [*tokens, *range(len(row.t))]:
        times = pointers.factor(codes, target, made.problem.spec.sm_scale, spread)
        if times is not None:
            own = k[row.page[target], row.offset[target], head, CODES:]
            k[..., head, CODES:][~made.problem.needed[..., head]] = own
            return target, times
    return -1, 0.0


def _seen_codes(made: Witness, head: int) -> Array:
    """The codes of a row's keys as its query meets them, turned by RoPE: [k, d], 0 in the dims of the levels."""
    row, spec = made.rows[head], made.problem.spec
    codes = made.inputs.k.data[row.page, row.offset, head].copy()
    codes[:, :CODES] = 0.0
    return scores.rotate(codes, row.ahead, spec.rope) if spec.rope else codes


def _spread(made: Witness, head: int) -> float:
    """How far other terms may raise a key, or the sink, above the selected one, in nats."""
    spec, row = made.problem.spec, made.rows[head]
    heads = range(head * spec.group_size, (head + 1) * spec.group_size)
    terms = max(float(np.ptp(added(spec, row, qo_head))) for qo_head in heads)
    return terms + max(0.0, *(spec.sink_logits[qo_head] for qo_head in heads if spec.sink_logits), 0.0)


def _selectable(made: Witness, head: int) -> bool:
    row = made.rows[head]
    if not len(row.t):
        return False
    codes, spread = _seen_codes(made, head), _spread(made, head)
    return any(pointers.factor(codes, j, made.problem.spec.sm_scale, spread) is not None for j in range(len(row.t)))


_ORDER = ("select", "cliff", "stair", "comb")
_FITS: dict[str, Callable[[Witness, int], bool]] = {
    "select": _selectable,
    "cliff": lambda made, head: made.cliffs[head] is not None,
    "stair": lambda made, head: made.stairs[head] is not None,
    "comb": lambda made, head: len(made.rows[head].t) > 1,
}
