"""Several problems in one launch: nothing of a problem changes because others stand beside it."""

from __future__ import annotations

import numpy as np
import pytest

from sacts.conformance.adapter import Backend
from sacts.conformance.batch import cut, join, join_inputs
from sacts.conformance.build import Problem, build, last_query
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import COUNT, RANDOM
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices import tiers
from sacts.matrices.cell import parse
from sacts.reference.bounds import expected
from sacts.reference.forward import edges, forward
from sacts.reference.numerics import Numerics

SMOKE = [cell.id for cell in tiers.load(tiers.path_of("smoke"))]


def parts_of(cell: str) -> list[Problem]:
    problem = build(parse(cell))
    queried = [n for n, length in enumerate(problem.spec.qo_lens) if length]
    return [problem, problem, last_query(problem, queried[-1], "a")]


@pytest.mark.parametrize("cell", SMOKE)
def test_a_joined_problem_means_what_its_parts_mean(cell: str) -> None:
    parts = parts_of(cell)
    whole = join(parts)
    inputs = [probe.inputs(part) for probe, part in zip((RANDOM, COUNT, RANDOM), parts, strict=True)]
    together = forward(
        whole.spec, join_inputs(whole, list(zip(parts, inputs, strict=True))), whole.table, whole.candidates
    )
    alone = [forward(p.spec, i, p.table, p.candidates) for p, i in zip(parts, inputs, strict=True)]
    assert np.array_equal(together.out, np.concatenate([each.out for each in alone]))
    assert np.array_equal(together.lse, np.concatenate([each.lse for each in alone]))


@pytest.mark.parametrize("cell", SMOKE)
def test_each_copy_has_pages_of_its_own_and_the_first_keeps_its_own(cell: str) -> None:
    parts = parts_of(cell)
    whole = join(parts)
    owned, request = [], 0
    for part in parts:
        mine = whole.table.owned[request : request + part.spec.num_requests]
        owned.append(frozenset[int]().union(*mine))
        request += part.spec.num_requests
        assert [len(pages) for pages in mine] == [len(pages) for pages in part.table.owned]
    assert sum(map(len, owned)) == len(frozenset().union(*owned))
    first = parts[0].spec.num_requests
    assert whole.table.owned[:first] == parts[0].table.owned
    assert whole.needed.sum() == sum(part.needed.sum() for part in parts)
    for row, pages in zip(whole.table.table, whole.table.owned, strict=True):
        assert not set(row[len(pages) :].tolist()) & pages
        assert set(row.tolist()) <= set(whole.pages.tolist())
    if "map:high" in cell:
        page_elements = whole.spec.page_size * whole.spec.num_kv_heads * whole.spec.head_dim_qk
        assert min(map(min, owned)) * page_elements >= 2**31


@pytest.mark.parametrize("cell", [cell for cell in SMOKE if cell.startswith("prefill")])
def test_the_last_query_keeps_its_position_and_its_edges(cell: str) -> None:
    problem = build(parse(cell))
    spec = problem.spec
    for request, length in enumerate(spec.qo_lens):
        if not length:
            continue
        copy = last_query(problem, request, "x")
        token = spec.qo_indptr[request + 1] - 1
        assert copy.spec.token_position == (spec.token_position[token],)
        rows, t, _ = edges(spec, problem.candidates)
        mine = rows // spec.num_kv_heads == token
        own_rows, own_t, _ = edges(copy.spec, copy.candidates)
        assert np.array_equal(own_t, t[mine])
        assert np.array_equal(own_rows, rows[mine] % spec.num_kv_heads)


def test_what_comes_back_is_cut_at_the_right_tokens() -> None:
    parts = parts_of("prefill/fp16/kv:6+20+30/q:9+0+4/pattern:all/causal:bottom_right")
    whole = join(parts)
    inputs = [probe.inputs(part) for probe, part in zip((RANDOM, COUNT, RANDOM), parts, strict=True)]
    launcher = Launcher(Backend(Adapter()), "cpu")
    observed = launcher(whole, join_inputs(whole, list(zip(parts, inputs, strict=True))))
    for part, values, seen in zip(parts, inputs, cut(observed, parts), strict=True):
        right = expected(part.spec, values, part.table, part.candidates, Numerics.default(part.spec.dtype))
        assert ((seen.out >= right.out_lo) & (seen.out <= right.out_hi)).all()
