"""What each edge weighs in out, whatever the terms of the logit: the ground of margins beyond the plain row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sacts.reference import epilogues
from sacts.reference.forward import Inputs, evaluate, groups, kept
from sacts.reference.spec import EpilogueKind

from ..build import Problem
from ..draw import Array, Ints


class RowWeights(NamedTuple):
    """One output row (token, query head) and its keys in the order of the reference: t [k]; key [k]: what position
    terms and dropout use; repeats [k]: how often each counts; w [k]: the weight of one occurrence; factor [k]: a / (1 -
    p) of dropout, else 1; v [k, d_vo]; out [d_vo]: before the epilogue.
    """

    token: int
    qo_head: int
    t: Ints
    key: Ints
    repeats: Ints
    w: Array
    factor: Array
    v: Array
    out: Array

    def without_one(self) -> Array:
        """out, before the epilogue, where one occurrence of a key is lost, for each key: [k, d_vo]; a row that loses
        all its mass yields 0.
        """
        left = 1 - self.w
        some = left > 1e-12
        moved = self.w[:, None] * (self.out - self.factor[:, None] * self.v)
        return np.where(some[:, None], self.out + moved / np.where(some, left, 1.0)[:, None], 0.0)


def row_weights(problem: Problem, inputs: Inputs, token: int | None = None) -> Iterator[RowWeights]:
    """Each output row with an edge, in FP64; of one token only, where it is named."""
    spec = problem.spec
    for group in groups(spec, inputs, problem.table, problem.candidates):
        rows, factors = evaluate(spec, group), kept(spec, group)
        for b, r in np.ndindex(*group.rows.shape):
            row_token = int(group.rows[b, r]) // spec.list_heads
            if token not in (None, row_token):
                continue
            mine = group.edge[b, r]
            for g in range(spec.heads_per_list) if mine.any() else ():
                count = group.counts[b, r, mine]
                w = np.exp(group.z[b, r, g, mine] - rows.lse[b, r, g]) / count
                factor = np.ones(len(w)) if factors is None else factors[b, r, g, mine]
                keys = group.t[b, mine], group.key_position[b, mine], count
                yield RowWeights(
                    row_token, int(group.qo_heads[b, g]), *keys, w, factor, group.v[b, mine], rows.out[b, r, g]
                )


def finished(problem: Problem, inputs: Inputs, out: Array, row: RowWeights | None = None) -> Array:
    """out behind the epilogue: [..., d_vo] of one row, or of all tokens and query heads."""
    if problem.spec.epilogue.kind is EpilogueKind.GATE:
        assert inputs.gate is not None
        return out * (inputs.gate if row is None else inputs.gate[row.token, row.qo_head])
    return epilogues.apply(problem.spec.epilogue, out, np.zeros_like(out), None)[0]
