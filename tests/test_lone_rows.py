"""Rows of one edge: its weight is 1 whatever its logit, so that out has a bound where the logit has none.

Two formulations judge the rule: the modelled kernel on logits of any size, and a softmax in FP32 written here, whose
logits are off by all that they may be, visit by visit. Faults of values and addresses leave the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from term_problems import ARITHMETICS, SPECS, Problem, problem_of
from test_lightest_keys import COMPILED

from sacts.conformance.adapter import Backend
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import TORCH, Arithmetic
from sacts.kernels_under_test.emulation.forward import forward as model_forward
from sacts.kernels_under_test.emulation.rows import by_token
from sacts.kernels_under_test.faults import ModelFault, seed
from sacts.matrices.cell import parse
from sacts.reference.bounds import MAX_RHO, Expected, expected
from sacts.reference.candidates import CandidateLists
from sacts.reference.forward import by_row, groups
from sacts.reference.logit_bounds import logit_error
from sacts.reference.numerics import Numerics
from sacts.reference.paging import PagedCache
from sacts.reference.spec import CandidateKind, Dropout, DType, RoPE
from sacts.reports.records import Gate, Verdict

Array = NDArray[np.float64]

NAMES = [name for name, spec in SPECS.items() if not spec.sink_logits]
TURNED = Arithmetic(rotated=DType.BF16, reconstructed=DType.BF16, tile=16)


def lone(problem: Problem, visits: int = 0) -> Problem:
    """The same with the first key of each list alone; in a multiset named so often, or 1 to 3 times."""
    rows = [problem.raw.indices[start:end][:1].tolist() for start, end in pairwise(problem.raw.indptr)]
    if problem.spec.candidate_kind is CandidateKind.MULTISET:
        rows = [row * (visits or 1 + n % 3) for n, row in enumerate(rows)]
    ends = np.cumsum([0, *map(len, rows)])
    return replace(problem, raw=CandidateLists(ends, np.array([t for row in rows for t in row], np.int64)))


def logit_errors(problem: Problem, numerics: Numerics) -> Array:
    """E of each row's one edge, [tokens, heads]; 0 in rows without."""
    spec = problem.spec
    found = np.zeros((spec.num_tokens, spec.num_qo_heads))
    for group in groups(spec, problem.inputs, problem.table, problem.lists):
        error = np.where(group.edge[:, :, None], logit_error(spec, group, numerics), 0.0)
        by_row(spec, found)[group.rows] = error.sum(axis=-1)
    return found


def outside(allowed: Expected, out: Array, lse: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows whose out is outside, and whose lse is."""
    inside = ((allowed.out_lo <= out) & (out <= allowed.out_hi)).all(axis=-1)
    with np.errstate(invalid="ignore"):
        near = (np.abs(lse - allowed.lse) <= allowed.lse_bound) | (lse == allowed.lse)
    return ~inside, ~near


def modelled(problem: Problem, how: Arithmetic) -> tuple[Array, Array]:
    out, lse = (by_token(problem.spec, x) for x in model_forward(problem.spec, problem.rows(how), how))
    return out.double().numpy(), lse.double().numpy()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", NAMES)
def test_a_right_kernel_never_leaves_the_bound_of_a_lone_edge_however_large_its_logit(
    name: str, arithmetic: str
) -> None:
    dtype, how = ARITHMETICS[arithmetic]
    for seed_, size in enumerate((1.0, 30.0, 1000.0)):
        problem = lone(problem_of(replace(SPECS[name], dtype=dtype), seed_, size))
        allowed = problem.expected(how)
        assert allowed.edges.max() >= 1
        assert allowed.trusted.all()
        assert np.isfinite(allowed.lse_bound).all()
        for wrong in outside(allowed, *modelled(problem, how)):
            assert not wrong.any()


@dataclass(frozen=True)
class Softmax:
    """FP32 throughout but for P: how the visits of one key are put together."""

    p: DType
    splits: int  # visits are dealt out in turn
    merges_states: bool
    l_sums_cast_p: bool = False

    @property
    def numerics(self) -> Numerics:
        return Numerics(
            self.p,
            DType.FP32,
            rotated=DType.BF16,
            splits=self.splits > 1,
            merges_states=self.merges_states,
            l_sums_cast_p=self.l_sums_cast_p,
            min_tile=1,
        )

    def __call__(self, s: Array, v: Array, factor: float) -> tuple[Array, float]:
        """s [visits]: the logits as computed; v [d_vo]; factor: a / (1 - p) of dropout."""
        parts = [self._split(s[n :: self.splits], v, factor) for n in range(self.splits) if len(s[n :: self.splits])]
        if self.merges_states:
            m = max(part[0] for part in parts)
            scales = [np.exp(part[0] - m) for part in parts]
            l = sum((a * part[1] for a, part in zip(scales, parts, strict=True)), np.float32(0))
            o = sum((a * part[2] for a, part in zip(scales, parts, strict=True)), np.zeros_like(parts[0][2]))
            return (o / l).astype(np.float64), float(m + np.log(l))
        lses = [np.float32(m + np.log(l)) for m, l, _ in parts]
        top = max(lses)
        lse = np.float32(top + np.log(sum((np.exp(x - top) for x in lses), np.float32(0))))
        out = sum(
            (np.exp(x - lse) * (o / l) for x, (_, l, o) in zip(lses, parts, strict=True)), np.zeros_like(v, np.float32)
        )
        return out.astype(np.float64), float(lse)

    def _split(self, s: Array, v: Array, factor: float) -> tuple[np.float32, np.float32, NDArray[np.float32]]:
        m, l, o = np.float32(-np.inf), np.float32(0), np.zeros(len(v), np.float32)
        for x in s.astype(np.float32):
            raised = max(m, x)
            scale, p = np.exp(m - raised), np.exp(x - raised)
            weight = _cast(np.float32(p * np.float32(factor)), self.p)
            l = scale * l + (_cast(p, self.p) if self.l_sums_cast_p else p)
            o, m = scale * o + weight * v.astype(np.float32), raised
        return m, l, o


def _cast(x: np.float32, dtype: DType) -> np.float32:
    return np.float32(torch.tensor(x).to(TORCH[dtype]).float().item())


SOFTMAXES = {
    "bf16 P": Softmax(DType.BF16, 1, True),
    "fp16 P, cast P in l": Softmax(DType.FP16, 1, True, l_sums_cast_p=True),
    "fp32 P, 3 states merged": Softmax(DType.FP32, 3, True),
    "fp32 P, 3 outputs merged": Softmax(DType.FP32, 3, False),
    "bf16 P, 2 outputs merged": Softmax(DType.BF16, 2, False),
}
VISITS = 20


@cache
def visited(dropped: bool) -> Problem:
    """BF16 behind RoPE with logits of hundreds, one key visited VISITS times in each row."""
    spec = replace(SPECS["multiset"], rope=RoPE(32), dropout=Dropout(0.3, 11) if dropped else None)
    return lone(problem_of(spec, 3, 300.0), VISITS)


def wrong_logits(error: float) -> Iterator[Array]:
    """What the visits may be off by: all alike, apart as far as can be, ever larger, at random."""
    random = np.random.default_rng(0)
    yield np.full(VISITS, error)
    yield np.full(VISITS, -error)
    yield error * np.resize([1, -1], VISITS)
    yield error * np.linspace(-1, 1, VISITS)
    for _ in range(2):
        yield error * random.uniform(-1, 1, VISITS)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_visits_whose_logits_err_by_all_that_they_may_stay_within_the_bound(name: str, dropped: bool) -> None:
    how, problem = SOFTMAXES[name], visited(dropped)
    spec = problem.spec
    allowed = expected(spec, problem.inputs, problem.table, problem.lists, how.numerics)
    errors = logit_errors(problem, how.numerics)
    used = np.zeros(2)
    for token, head in np.argwhere(allowed.edges > 0)[::3]:
        row = token * spec.list_heads + head // spec.heads_per_list
        t = int(problem.raw.indices[problem.raw.indptr[row]])
        request = spec.token_request[token]
        at = problem.table.table[request, t // spec.page_size], t % spec.page_size, head // spec.group_size
        value, right = problem.inputs.v.data[at], allowed.out[token, head]
        factor = float(right @ value / (value @ value))
        s = allowed.lse[token, head] - np.log(VISITS)
        for wrong in wrong_logits(float(errors[token, head])):
            out, lse = how(s + wrong, value, factor)
            reach = allowed.half_width[token, head] + 2.0**-24 * np.abs(right)
            use = (np.abs(out - right) / reach).max()
            used = np.maximum(used, [use, abs(lse - allowed.lse[token, head]) / allowed.lse_bound[token, head]])
    assert (used <= 1).all()
    assert used[1] > 0.95
    assert used[0] > (0.05 if how.p is DType.BF16 else 1e-4)
    assert errors.max() > 10


def next_slot(problem: Problem) -> Problem:
    v = problem.inputs.v
    return replace(problem, inputs=problem.inputs._replace(v=PagedCache(v.pages, np.roll(v.data, -1, axis=1))))


def other_page(problem: Problem) -> Problem:
    return replace(problem, table=replace(problem.table, table=np.roll(problem.table.table, 1, axis=1)))


def other_head(problem: Problem) -> Problem:
    v = problem.inputs.v
    return replace(problem, inputs=problem.inputs._replace(v=PagedCache(v.pages, v.data[:, :, ::-1].copy())))


def scale_twice(problem: Problem) -> Problem:
    v = problem.inputs.v
    return replace(problem, inputs=problem.inputs._replace(v=PagedCache(v.pages, 1.02 * v.data)))


@pytest.mark.parametrize("fault", [next_slot, other_page, other_head, scale_twice], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["RoPE", "RoPE of a sequence", "dropout"])
def test_a_wrong_value_of_a_lone_edge_is_seen_where_its_logit_has_no_bound(
    name: str, fault: Callable[[Problem], Problem]
) -> None:
    spec = replace(SPECS[name], rope=RoPE(32))
    problem = lone(problem_of(spec, 4, 100.0))
    allowed = problem.expected(TURNED)
    unbounded = (allowed.edges > 0) & (np.expm1(logit_errors(problem, TURNED.numerics)) >= MAX_RHO)
    assert unbounded.sum() > 20
    wrong, _ = outside(allowed, *modelled(fault(problem), TURNED))
    assert (wrong & unbounded).sum() > 0.5 * unbounded.sum()


BF16 = "decode/bf16/kv:65+40/dim:192/vdim:128/pattern:one"
CELLS = {  # and where a value saturates that is seen
    f"{BF16}/values:huge/pos:rope-interleaved/kcodec:int8/vcodec:int8/scales:head": 2,
    f"{BF16}/values:heavy/pos:rope/kcodec:int8/scales:head": 8,
}


def saturating(limit: int) -> type:
    fault = ModelFault(
        name=f"values_saturate_at_{limit}",
        stands_for="values pass through a narrow format without a scale",
        file="rows.py",
        find="v=values,",
        replace=f"v=values.clamp(-{limit}, {limit}),",
        problem="",
        outputs=("out",),
    )
    found: type = seed(fault)
    return found


def verdict_of(adapter: type, cell: str) -> tuple[Verdict, str]:
    record = judge(Launcher(Backend(adapter(COMPILED)), "cpu"), "emulation", parse(cell))
    return record.verdict, record.finding.gate if record.finding else ""


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_of_lone_edges_whose_logits_have_no_bound_passes_and_can_fail(cell: str) -> None:
    """No probe but `random` has such values: where it has no bound, only the model's backward tells."""
    assert verdict_of(Adapter, cell) == (Verdict.PASS, "")
    assert verdict_of(saturating(CELLS[cell]), cell) == (Verdict.FAIL, Gate.OUT)
