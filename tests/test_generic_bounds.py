"""Gates B, C and D: no alarm for a right modelled kernel on Gaussian inputs, and what gate A cannot see is seen."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from term_problems import ARITHMETICS, SPECS, Problem, problem_of

from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.emulation.forward import forward as model_forward
from sacts.kernels_under_test.emulation.rows import by_token
from sacts.reference.candidates import CandidateLists
from sacts.reference.formats import round_to
from sacts.reference.generic_bounds import GenericRow, aggregated, bias, confidence, generic_rows
from sacts.reference.spec import CausalRule, DType

Array = NDArray[np.float64]

REPLICATES = int(os.environ.get("SACTS_CAMPAIGN", "1"))
NAMES = [name for name in SPECS if name not in ("RoPE, far", "sink", "cast", "silu", "sigmoid", "low bit")]
LONG = replace(SPECS["plain"], seq_lens=(512,), qo_lens=(8,), causal=CausalRule.NONE, head_dim_vo=64)


def run(problem: Problem, how: Arithmetic) -> tuple[Array, Array]:
    """out [tokens, heads, d] and lse of the model."""
    found = model_forward(problem.spec, problem.rows(how), how)
    out, lse = (by_token(problem.spec, x).double().numpy() for x in found)
    return out, lse


def rows_of(problem: Problem, how: Arithmetic) -> list[GenericRow]:
    return list(generic_rows(problem.spec, problem.inputs, problem.table, problem.lists, how.numerics))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", NAMES)
def test_a_right_kernel_raises_no_alarm(name: str, arithmetic: str) -> None:
    dtype, how = ARITHMETICS[arithmetic]
    for seed in range(REPLICATES):
        problem = problem_of(replace(SPECS[name], dtype=dtype), 100 + seed, 1.0)
        out, lse = run(problem, how)
        for row in rows_of(problem, how):
            if row.trusted:
                mine = row.token, row.head
                assert row.inside(out[mine], lse[mine]), mine
                assert row.filtered(out[mine]).ratios().max() <= 1, mine


def everything(problem: Problem, entries: list[int]) -> Problem:
    """Every row attends the same tokens."""
    rows = problem.spec.num_rows
    raw = CandidateLists(np.arange(rows + 1) * len(entries), np.tile(entries, rows))
    return replace(problem, raw=raw)


@cache
def long_problem(seed: int) -> Problem:
    return everything(problem_of(LONG, seed, 1.0), list(range(512)))


@pytest.mark.parametrize("seed", range(4))
def test_one_lost_candidate_of_512_is_seen_and_named(seed: int) -> None:
    """By lse in every row; by out in more rows than gate A, and there the filter that speaks is the lost one's."""
    how, problem = Arithmetic(), long_problem(seed)
    lost = 37 * (seed + 1)
    out, lse = run(everything(problem, [t for t in range(512) if t != lost]), how)
    allowed = problem.expected(how)
    by_a = ((out < allowed.out_lo) | (allowed.out_hi < out)).any(axis=-1)
    by_lse, by_filter, named = (np.zeros_like(by_a) for _ in range(3))
    for row in rows_of(problem, how):
        mine = row.token, row.head
        ratios = row.filtered(out[mine]).ratios()[:-1]
        by_lse[mine] = abs(lse[mine] - row.lse) > row.lse_bound
        by_filter[mine] = ratios.max() > 1
        named[mine] = row.t[ratios.argmax()] == lost
    assert by_lse.all()
    assert by_filter.mean() > by_a.mean() + 0.1
    assert named[by_filter].all()


def test_rows_together_show_what_no_row_shows_alone() -> None:
    """A gain of 2e-3 in every row, half the roundoff of bf16, with V of one sign."""
    problem, how = long_problem(7), Arithmetic()
    values = problem.inputs.v
    problem = replace(problem, inputs=problem.inputs._replace(v=replace(values, data=np.abs(values.data))))
    rows, (exact, _) = rows_of(problem, how), run(problem, replace(how, out=DType.FP32))
    together = []
    for gain in (0.0, 2e-3):
        out = round_to(exact * (1 + gain), how.out)
        mine = [(row, out[row.token, row.head]) for row in rows]
        filtered = [row.filtered(x) for row, x in mine]
        assert all(row.inside(x, None) for row, x in mine)
        assert max(each.ratios().max() for each in filtered) <= 1
        together.append(aggregated(filtered)[-1])
    assert together[0] <= 1
    assert together[1] > 1


def test_a_bias_of_lse_shows_over_many_rows() -> None:
    problem, how = long_problem(8), Arithmetic()
    rows, (_, lse) = rows_of(problem, how), run(problem, how)
    assert bias((row, float(lse[row.token, row.head])) for row in rows) < 0.1
    size = max(row.lse_bound for row in rows)
    assert bias((row, float(lse[row.token, row.head]) + size) for row in rows) > 1


def test_more_checks_ask_for_more_confidence() -> None:
    assert 8.3 < confidence(1e9) < 8.5
    assert confidence(1e12) > confidence(1e9)


def test_a_bound_is_narrower_than_gate_a() -> None:
    problem, how = long_problem(9), Arithmetic()
    allowed = problem.expected(how)
    shares = []
    for row in rows_of(problem, how):
        mine = row.token, row.head
        shares.append(row.half_width / allowed.half_width[mine])
        assert row.lse_bound < 0.6 * allowed.lse_bound[mine]
    assert np.max(shares) < 1
    assert np.median(shares) < 0.8
