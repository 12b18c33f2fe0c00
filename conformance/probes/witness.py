"""The witness copy: the last query of one request, whose query heads each ask another question of the same K and V.

Dims of K: levels of the stair, levels of the cliff, +-1 codes. Channels of V: one-hot teeth, codes of the stair, codes
of the cliff. A query head picks its question with q alone, so that one copy carries as many witnesses as heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sacts.reference import scores
from sacts.reference.formats import round_to
from sacts.reference.forward import Inputs
from sacts.reference.spec import AttentionSpec

from ..build import Problem
from ..contract import STALE_VALUE
from ..draw import Array, Draw
from . import pointers
from . import stairs as steps
from .applicability import keeps_meaning
from .rows import RowSlots, added, last_rows

LEAST_DIM_QK, LEAST_DIM_VO = 16, 16
CODES = 2 * steps.PIECES  # the first dim of the codes; the first half of V holds the teeth


class Lane(NamedTuple):
    """What one query head asks: the probe, its KV head, the key that `select` selects (its place in the row), and which
    of the witness's rows is its own.
    """

    probe: str
    kv_head: int
    target: int = -1
    row: int = 0


@dataclass(frozen=True)
class Witness:
    """A witness copy: lanes by query head; per head that has a list its row, its levels of stair and cliff (None: does
    not fit), V of the row's keys [k, d_vo], and the probes that fit it.

    Rows of query heads that read one KV head share K and V. Their keys have one set of codes and of teeth, and of a
    stair and a cliff, which have dims and channels of their own, each is made for one of the rows.
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
    _fill(made, number, draw)
    for head in range(spec.list_heads):
        fit = [name for name in _ORDER if keeps_meaning(name, spec) and _FITS[name](made, head)]
        made.fitting.append(fit)
    for qo_head in range(spec.num_qo_heads):
        head = qo_head // spec.heads_per_list
        probes = made.fitting[head]
        if probes:
            turn = _turn(spec, qo_head, number)
            probe = probes[turn % len(probes)]
            if spec.lists_per_kv_head > 1 and _ORDER[turn % len(_ORDER)] in probes:
                probe = _ORDER[turn % len(_ORDER)]
            _ask(made, qo_head, head, probe, turn, draw)
    return made


def _turn(spec: AttentionSpec, qo_head: int, number: int) -> int:
    """Where in the order of questions a query head's turn is."""
    return qo_head + number * (2 if spec.num_qo_heads > 2 else spec.num_qo_heads)


def _fill(made: Witness, number: int, draw: Draw) -> None:
    """K and V of all rows."""
    spec = made.problem.spec
    for kv_head in range(spec.num_kv_heads):
        heads = range(kv_head * spec.lists_per_kv_head, (kv_head + 1) * spec.lists_per_kv_head)
        rows = [made.rows[head] for head in heads]
        keys = rows[0] if len(rows) == 1 else _united(rows)
        climbing = {_STAIR: heads[0], _CLIFF: heads[0]}
        if len(rows) > 1:  # whose turn it is to ask, the first of them
            climbing = {_ORDER[_turn(spec, head, number) % len(_ORDER)]: head for head in reversed(heads)}
        levels = {head: _climbs(made, head, number, draw, climbing) for head in heads}
        values = draw.signs((len(keys.t), spec.head_dim_vo))
        half, quarter = spec.head_dim_vo // 2, spec.head_dim_vo // 4
        values[:, :half] = pointers.teeth(keys, spec.page_size, half)
        made.inputs.v.data[keys.page, keys.offset, kv_head] = values
        for head, of_row in levels.items():
            row = made.rows[head]
            for climb, dims, channels in (
                (of_row[0], slice(0, steps.PIECES), slice(half, half + quarter)),
                (of_row[1], slice(steps.PIECES, CODES), slice(half + quarter, spec.head_dim_vo)),
            ):
                if climb is not None:
                    at = row.page, row.offset, kv_head
                    made.inputs.k.data[(*at, dims)] = steps.keys(climb.level, spec.sm_scale, spec.dtype)
                    made.inputs.v.data[(*at, channels)] = climb.codes
        made.stairs.extend(stair for stair, _ in levels.values())
        made.cliffs.extend(cliff for _, cliff in levels.values())
        made.values.extend(made.inputs.v.data[row.page, row.offset, kv_head] for row in rows)


def _united(rows: list[RowSlots]) -> RowSlots:
    """The keys of several rows of one query, each once, by logical position; as one tile."""
    slots = np.unique(np.concatenate([np.stack((row.t, row.page, row.offset), axis=-1) for row in rows]), axis=0)
    nothing = np.zeros(len(slots), np.int64)
    return RowSlots(slots[:, 0], slots[:, 1], slots[:, 2], tile=nothing, ahead=nothing, repeats=nothing + 1)


def _climbs(
    made: Witness, head: int, number: int, draw: Draw, climbing: Mapping[str, int]
) -> tuple[steps.Levels | None, steps.Levels | None]:
    """The stair and the cliff of a row, where it is the one that these are made for, and they fit it."""
    spec, row = made.problem.spec, made.rows[head]
    half, quarter = spec.head_dim_vo // 2, spec.head_dim_vo // 4
    bounds = steps.boundaries(row)
    climbs = keeps_meaning("stair", spec)
    stair = cliff = None
    if climbing.get(_STAIR) == head and row.tiles > 1 and climbs:
        stair = steps.stair(row, quarter, draw)
    at = bounds[-1 - (draw.integer(0, len(bounds)) + number) % len(bounds)] if bounds else 0
    if climbing.get(_CLIFF) == head and bounds and climbs:
        cliff = steps.cliff(row, at, spec.head_dim_vo - half - quarter, draw)
    return stair, cliff


def _ask(made: Witness, qo_head: int, head: int, probe: str, turn: int, draw: Draw) -> None:
    """Write the question of a query head, whose row is that of `head`, into its q."""
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
    made.lanes[qo_head] = Lane(probe, head // spec.lists_per_kv_head, target, head)


def _target(made: Witness, head: int, turn: int, draw: Draw) -> tuple[int, float]:
    """The place of the key to select, edges first, and the factor of its code. What no row attends gets the same code:
    if it joined, it would take its share.
    """
    row, k, codes = made.rows[head], made.inputs.k.data, _seen_codes(made, head)
    kv_head = head // made.problem.spec.lists_per_kv_head
    spread = _spread(made, head)
    tokens = np.roll(pointers.edge_tokens(row, made.problem.spec.page_size, draw), -turn).tolist()
    for target in [*tokens, *range(len(row.t))]:
        times = pointers.factor(codes, target, made.problem.spec.sm_scale, spread)
        if times is not None:
            own = k[row.page[target], row.offset[target], kv_head, CODES:]
            k[..., kv_head, CODES:][~made.problem.needed[..., kv_head]] = own
            return target, times
    return -1, 0.0


def _seen_codes(made: Witness, head: int) -> Array:
    """The codes of a row's keys as its query meets them, turned by RoPE: [k, d], 0 in the dims of the levels."""
    row, spec = made.rows[head], made.problem.spec
    codes = made.inputs.k.data[row.page, row.offset, head // spec.lists_per_kv_head].copy()
    codes[:, :CODES] = 0.0
    return scores.rotate(codes, row.ahead, spec.rope) if spec.rope else codes


def _spread(made: Witness, head: int) -> float:
    """How far other terms may raise a key, or the sink, above the selected one, in nats."""
    spec, row = made.problem.spec, made.rows[head]
    heads = range(head * spec.heads_per_list, (head + 1) * spec.heads_per_list)
    terms = max(float(np.ptp(added(spec, row, qo_head))) for qo_head in heads)
    return terms + max(0.0, *(spec.sink_logits[qo_head] for qo_head in heads if spec.sink_logits), 0.0)


def _selectable(made: Witness, head: int) -> bool:
    row = made.rows[head]
    if not len(row.t):
        return False
    codes, spread = _seen_codes(made, head), _spread(made, head)
    return any(pointers.factor(codes, j, made.problem.spec.sm_scale, spread) is not None for j in range(len(row.t)))


_STAIR, _CLIFF = "stair", "cliff"
_ORDER = ("select", _CLIFF, _STAIR, "comb")
_FITS: dict[str, Callable[[Witness, int], bool]] = {
    "select": _selectable,
    "cliff": lambda made, head: made.cliffs[head] is not None,
    "stair": lambda made, head: made.stairs[head] is not None,
    "comb": lambda made, head: len(made.rows[head].t) > 1,
}
