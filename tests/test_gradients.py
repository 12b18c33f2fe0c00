"""`backward` against torch float64 autograd over every pair of axis values, and the rules beside the values."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from dense_gradients import (
    AXES,
    BASE,
    Array,
    Problem,
    Tensor,
    after,
    compare,
    covering,
    differentiated,
    every_way,
    feasible,
    grad,
    leaves_of,
    lists_of,
    pairs_of,
    problem_of,
    row,
    table_of,
)
from dense_rows import kept, row_of

from sacts.reference.forward import Branch, Inputs, forward
from sacts.reference.gradients import backward_branches
from sacts.reference.paging import PagedCache
from sacts.reference.scores import soft_cap_slope
from sacts.reference.spec import (
    CandidateKind,
    Dropout,
    Epilogue,
    EpilogueKind,
)

CASES = covering()


@pytest.mark.parametrize("index", range(len(CASES)))
def test_backward_is_the_autograd_of_dense_attention_over_every_pair_of_axis_values(index: int) -> None:
    problem = problem_of(CASES[index], seed=index)
    leaves = differentiated(problem)
    for found in every_way(problem):
        compare(problem, found, leaves)


@pytest.mark.parametrize(("axis", "value"), [(axis, value) for axis in AXES for value in AXES[axis]])
def test_backward_is_the_autograd_of_dense_attention_for_every_axis_value_alone(axis: str, value: str) -> None:
    problem = problem_of({axis: value} | ({"epilogue": "gate"} if axis == "gate" else {}), seed=3)
    compare(problem, problem.backward(), differentiated(problem))


def test_the_cases_hold_every_feasible_pair() -> None:
    held = set().union(*map(pairs_of, CASES))
    for (axis, values), (other, more) in combinations(sorted(AXES.items()), 2):
        for value, second in product(values, more):
            choice = {axis: value, other: second}
            assert (((axis, value), (other, second)) in held) is feasible(choice), choice


@pytest.mark.parametrize("lengths", ["plain", "q_len > T", "zero"])
@pytest.mark.parametrize("density", ["sparse", "full"])
def test_a_row_without_an_edge_gives_its_d_lse_to_the_sink_and_nothing_to_anything_else(
    lengths: str, density: str
) -> None:
    choice = {"sink": "logits", "lengths": lengths, "density": density, "causal": "bottom right"}
    problem = problem_of(choice, seed=8)
    empty = [
        (token, head)
        for token, head in product(range(problem.spec.num_tokens), range(4))
        if not row_of(problem.spec, problem.lists, token, head // problem.spec.group_size)
    ]
    assert empty
    leaves = differentiated(problem)
    for found in every_way(problem):
        compare(problem, found, leaves)
        assert all((found.d_q.value[at] == 0).all() and (found.d_q.error[at] == 0).all() for at in empty)


def test_a_batch_without_any_edge_has_gradients_of_nothing() -> None:
    problem = problem_of({"sink": "logits", "buckets": "one way"}, seed=0)
    problem.lists = [[] for _ in problem.lists]
    found = problem.backward()
    assert found.d_k.value.shape == (0, 8)
    assert found.d_v.pages.cache.data.shape == (0, 4, 2, 6)
    assert not found.d_q.value.any()
    assert found.d_sink is not None
    assert found.d_buckets is not None
    assert problem.d_lse is not None
    np.testing.assert_array_equal(found.d_sink.value, problem.d_lse.sum(0))
    assert not found.d_buckets.value.any()


def test_positions_are_the_attended_keys_and_name_where_each_lies() -> None:
    problem = problem_of({"pages": "shared prefix", "causal": "bottom right", "window": "3"}, seed=5)
    spec, found = problem.spec, problem.backward()
    attended = {
        (spec.token_request[token], kv_head, edge.t)
        for token, kv_head in product(range(spec.num_tokens), range(spec.num_kv_heads))
        for edge in row_of(problem.spec, problem.lists, token, kv_head)
    }
    request, kv_head, t, page, offset = found.d_k.positions
    assert list(zip(request.tolist(), kv_head.tolist(), t.tolist(), strict=True)) == sorted(attended)
    np.testing.assert_array_equal(page, problem.table.table[request, t // spec.page_size])
    np.testing.assert_array_equal(offset, t % spec.page_size)
    assert found.d_v.positions is found.d_k.positions


def test_a_page_with_two_owners_or_two_offsets_says_how_many_references_it_sums() -> None:
    for pages in ("shared prefix", "one page at two offsets"):
        problem = problem_of({"pages": pages, "density": "full", "rope": "half split"}, seed=2)
        found = problem.backward()
        scattered = found.d_k.pages
        counted = Counter(zip(*(x.tolist() for x in (found.d_k.positions[3], found.d_k.positions[4])), strict=True))
        assert max(counted.values()) == 4, pages  # two references, two KV heads
        for (page, offset), references in counted.items():
            at = scattered.cache.pages.tolist().index(page)
            assert scattered.references[at, offset].sum() == references
        errors = found.d_k.page_errors.cache.data
        assert (errors[scattered.references > 0] > 0).all()
        assert (errors[scattered.references == 0] == 0).all()
        compare(problem, found, differentiated(problem))


def test_what_has_no_meaning_is_refused_by_name() -> None:
    problem = problem_of({}, seed=1)
    with pytest.raises(ValueError, match=r"d_out must be \(5, 4, 6\), got \(5, 4, 5\)"):
        replace(problem, d_out=problem.d_out[..., 1:]).backward()
    with pytest.raises(ValueError, match=r"d_lse must be \(5, 4\), got \(4, 5\)"):
        replace(problem, d_lse=np.zeros((4, 5))).backward()
    for name in ("d_out", "d_lse"):
        broken = np.array(getattr(problem, name))
        broken[3, 2] = np.nan
        with pytest.raises(ValueError, match=f"{name} must be finite, but is not at token 3, query head 2"):
            replace(problem, **{name: broken}).backward()
    low_bit = replace(problem.spec, epilogue=Epilogue(EpilogueKind.LOW_BIT, bits=8, scale=0.1))
    with pytest.raises(ValueError, match="epilogue low_bit has no gradient"):
        replace(problem, spec=low_bit).backward()
    gated = replace(problem.spec, epilogue=Epilogue(EpilogueKind.GATE))
    with pytest.raises(ValueError, match="gate must be given"):
        replace(problem, spec=gated).backward()


def test_relu_has_no_slope_at_zero() -> None:
    problem = problem_of({"epilogue": "relu"}, seed=1)
    problem.inputs.v.data[:] = 0.0
    found = problem.backward()
    assert not found.d_v.value.any()
    compare(problem, found, differentiated(problem))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_stands_in_slots_that_no_row_attends_changes_no_bit(poison: float) -> None:
    problem = problem_of({"causal": "bottom right", "window": "3", "rope": "half split", "dropout": "0.4"}, seed=2)
    clean = problem.backward()
    attended = np.zeros(problem.inputs.k.data.shape[:3], bool)
    _, kv_head, _, page, offset = clean.d_k.positions
    attended[page, offset, kv_head] = True
    assert 0.1 < attended.mean() < 0.9
    for cache in (problem.inputs.k, problem.inputs.v):
        cache.data[~attended] = poison
    found = problem.backward()
    for name in ("d_q", "d_k", "d_v"):
        for part in ("value", "error"):
            ours, theirs = getattr(getattr(found, name), part), getattr(getattr(clean, name), part)
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}.{part}")


@pytest.mark.parametrize("epilogue", ["none", "gate", "silu"])
def test_separate_branches_and_their_gates_have_the_gradients_of_the_gated_sum(epilogue: str) -> None:
    choices = ({"rope": "half split", "sink": "logits"}, {"kind": "multiset", "cap": "0.8", "window": "3"})
    problems = [problem_of(choice, seed) for seed, choice in enumerate(choices)]
    problems[1].inputs = problems[1].inputs._replace(q=problems[0].inputs.q)
    random, spec = np.random.default_rng(4), problems[0].spec
    gates = random.normal(size=(2, spec.num_tokens, spec.num_qo_heads))
    ending = AXES["epilogue"][epilogue].get("epilogue", Epilogue())
    gate = random.normal(size=(spec.num_tokens, spec.num_qo_heads, 1)) if epilogue == "gate" else None
    d_out, d_lse = problems[0].d_out, np.stack([random.normal(size=gates.shape[1:]) for _ in problems])
    branches = [Branch(p.spec, p.inputs, p.table, p.validated()) for p in problems]
    found = backward_branches(branches, gates, d_out, d_lse, ending, gate=gate)

    leaves = [leaves_of(replace(problem, gate=gate)) for problem in problems]
    gate_leaves = torch.tensor(gates, requires_grad=True)
    loss = sum((x.sum() * 0 for part in leaves for x in part if isinstance(x, Tensor)), torch.zeros(()))
    loss = loss + sum((x.sum() * 0 for part in leaves for x in (*part.k_read, *part.v_read)), torch.zeros(()))
    for token, head in product(range(spec.num_tokens), range(spec.num_qo_heads)):
        rows = [row(problem, part, token, head) for problem, part in zip(problems, leaves, strict=True)]
        out = sum((gate_leaves[b, token, head] * rows[b][0] for b in range(2)), torch.zeros(spec.head_dim_vo))
        of_gate = leaves[0].gate[token, head] if gate is not None else leaves[0].gate
        loss = loss + after(ending, out, of_gate) @ torch.tensor(d_out[token, head])
        for (_, lse), given in zip(rows, d_lse[:, token, head].tolist(), strict=True):
            loss = loss + (lse * given if lse is not None else 0)
    loss.backward()
    np.testing.assert_allclose(found.d_gates.value, grad(gate_leaves), rtol=1e-11, atol=1e-13)
    assert (found.d_gate is None) is (gate is None)
    if found.d_gate:
        np.testing.assert_allclose(found.d_gate.value, grad(leaves[0].gate), rtol=1e-11, atol=1e-13)
    for problem, gradients, part in zip(problems, found.branches, leaves, strict=True):
        compare(problem, gradients, part)
    assert np.isfinite(found.d_gates.error).all()
    assert (found.d_gates.error > 0).all()


def masks_of(problem: Problem) -> tuple[Array, Array]:
    """The factor of dropout of every edge [tokens, heads, T] (0: dropped, or no edge), as forward and as backward use
    it, of a single request: read off out and d_v, one key at a time.
    """
    spec, seq_len = problem.spec, problem.spec.seq_lens[0]
    by_forward, by_backward = (np.zeros((spec.num_tokens, spec.num_qo_heads, seq_len)) for _ in range(2))
    p = np.exp(-forward(spec, problem.inputs, problem.table, problem.validated()).lse)  # q = 0: P = 1 / edges
    for t in range(seq_len):
        page, offset = problem.table.table[0, t // spec.page_size], t % spec.page_size
        problem.inputs.v.data[:] = 0.0
        problem.inputs.v.data[page, offset] = 1.0
        by_forward[:, :, t] = forward(spec, problem.inputs, problem.table, problem.validated()).out[..., 0] / p
    for token, head in product(range(spec.num_tokens), range(spec.num_qo_heads)):
        d_out = np.zeros(problem.d_out.shape)
        d_out[token, head, 0] = 1.0
        d_v = replace(problem, d_out=d_out).backward().d_v.logical(0, seq_len)[0]
        by_backward[token, head] = d_v[:, head // spec.group_size, 0] / p[token, head]
    return by_forward, by_backward


@pytest.mark.parametrize("kind", ["set", "multiset", "sequence"])
def test_forward_and_backward_drop_the_same_edges_whatever_the_order_of_the_candidates(kind: str) -> None:
    """Each edge drops as a scalar Philox says; a reordered list changes nothing but where order is identity."""
    spec = replace(
        BASE,
        seq_lens=(11,),
        qo_lens=(3,),
        candidate_kind=CandidateKind(kind),
        dropout=Dropout(0.4, 2**40 + 3, (9,)),
    )
    table = table_of(spec, "distinct", np.random.default_rng(0))
    pages, random = np.arange(table.num_pages), np.random.default_rng(1)
    k, v = (PagedCache(pages, np.zeros((len(pages), 4, 2, d))) for d in (8, 6))
    problem = Problem(
        spec, table, Inputs(np.zeros((3, 4, 8)), k, v), lists_of(spec, random, 0.8), np.zeros((3, 4, 6)), None, None
    )
    draws = []
    for _ in range(2):
        expected = np.zeros((3, 4, 11))
        for token, head in product(range(3), range(4)):
            for edge in row_of(problem.spec, problem.lists, token, head // 2):
                expected[token, head, edge.t] = edge.copies * kept(spec, token, head, edge)
        by_forward, by_backward = masks_of(problem)
        np.testing.assert_allclose(by_forward, expected, rtol=1e-13, atol=0)
        np.testing.assert_allclose(by_backward, expected, rtol=1e-13, atol=0)
        assert 0.2 < (expected == 0).mean() < 0.8
        draws.append(expected)
        problem.lists = [entries[::-1] for entries in problem.lists]
    assert np.array_equal(*draws) is (kind != "sequence")


def test_the_slope_of_a_saturated_soft_cap_is_small_but_right() -> None:
    """Where 1 - tanh^2 in FP64 is 0: 4 e^-80 at z / c = 40."""
    x = np.array([-40.0, 0.0, 40.0, 1e308])
    found = soft_cap_slope(3.0 * np.minimum(x, 1e3), 3.0)
    np.testing.assert_allclose(found, [4 * math.exp(-80), 1.0, 4 * math.exp(-80), 0.0], rtol=1e-13)
    assert 1 - np.tanh(40.0) ** 2 == 0


def test_a_row_out_of_range_marks_what_it_attends_and_nothing_else() -> None:
    problem = problem_of({"buckets": "one way", "sink": "logits"}, seed=7)
    clean = problem.backward()
    problem.inputs.q[1, 0] *= 1e9
    for found in every_way(problem):
        assert np.isinf(found.d_q.error[1, 0]).all()
        assert np.isfinite(np.delete(found.d_q.error.reshape(20, 8), 4, axis=0)).all()
        touched = {edge.t for edge in row_of(problem.spec, problem.lists, 1, 0)}
        request, kv_head, t, *_ = found.d_k.positions
        expected = (request == 0) & (kv_head == 0) & np.isin(t, sorted(touched))
        assert 0 < expected.sum() < len(expected)
        for gradient in (found.d_k, found.d_v):
            assert np.array_equal(np.isinf(gradient.error).all(axis=1), expected)
            assert np.array_equal(np.isinf(gradient.error).any(axis=1), expected)
        assert found.d_sink is not None
        assert np.isinf(found.d_sink.error).tolist() == [True, False, False, False]
        assert found.d_buckets is not None
        assert np.isinf(found.d_buckets.error).any(axis=1).tolist() == [True, False, False, False]
    assert np.isfinite(clean.d_k.error).all()
