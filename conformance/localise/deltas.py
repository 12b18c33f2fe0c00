"""Is it D, or d_lse, that makes dS wrong? Read from d_k of a launch in which one row has a d_out."""

from __future__ import annotations

import numpy as np

from sacts.reference.forward import edges

from ..backward_launch import ObservedGradients
from ..probes.gradients import GradientCopy, attended_edges

NEAR = 0.02  # a factor is named where the rest lies within this part of the vector


def deltas(copy: GradientCopy, row: tuple[int, int]) -> tuple[float, float]:
    """D of a row and its d_lse."""
    return float(copy.call.d_out[row] @ copy.call.out[row]), float(copy.call.d_lse[row])


def called(copy: GradientCopy, row: tuple[int, int], by: float) -> set[str]:
    """What would make dS wrong by this much."""
    delta, d_lse = deltas(copy, row)
    names = {
        "D is not subtracted": delta,
        "D is subtracted twice": -delta,
        "d_lse is not added": -d_lse,
        "d_lse is subtracted": -2 * d_lse,
    }
    return {words for words, value in names.items() if abs(by - value) < NEAR / 2 * abs(value)}


def another_row(copy: GradientCopy, row: tuple[int, int]) -> tuple[int, int] | None:
    """Another output row with edges, of the same KV head where there is one."""
    spec, call = copy.problem.spec, copy.call
    tokens, _, _ = edges(spec, copy.problem.candidates)
    rows = [(int(t) // spec.list_heads, int(t) % spec.list_heads * spec.heads_per_list) for t in np.unique(tokens)]
    found = [(token, head + i) for token, head in rows for i in range(spec.heads_per_list)]
    return next((each for each in found if each != row and call.out[each].any()), None)


def wrong_delta(part: GradientCopy, seen: ObservedGradients, row: tuple[int, int]) -> float | None:
    """c of dS_j - right = P_j c, read from d_k; None where that does not hold."""
    spec, (token, head), edge = part.problem.spec, row, attended_edges(part.problem, part.inputs, part.call)
    mine, _ = at = edge.of(token, head)
    q = part.inputs.q[token, head]
    page, offset, kv_head = (x[mine] for x in edge.slot)
    d_s = seen.d_k[page, offset, kv_head] @ q / (spec.sm_scale * (q @ q))
    p, off = edge.p[at], d_s - edge.d_s[at]
    by = float(p @ off / (p @ p))
    return by if np.linalg.norm(off - by * p) < 5 * NEAR * np.linalg.norm(off) else None
