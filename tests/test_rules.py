"""What surrounds one softmax: empty rows, epilogues, separate branches, orders that mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from sacts.reference import epilogues
from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.forward import Branch, EmptyRowError, Forward, Inputs, edges, forward, forward_branches
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Dropout,
    DType,
    EmptyRowRule,
    Epilogue,
    EpilogueKind,
    Nonlinearity,
    RoPE,
    Row,
)

Array = NDArray[np.float64]

SPEC = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=8,
    head_dim_vo=4,
    page_size=4,
    seq_lens=(16, 12),
    qo_lens=(2, 1),
    dtype=DType.BF16,
    sm_scale=0.4,
)
TABLE = PageTable(np.arange(8).reshape(2, 4), 4, 8, (frozenset(range(4)), frozenset(range(4, 8))))
LISTS = [[3, 0, 9, 14], [1, 2], [15], [0, 5, 6], [11, 4], [7, 8, 3]]


def inputs_of(spec: AttentionSpec, seed: int = 0) -> Inputs:
    random, pages = np.random.default_rng(seed), np.arange(8)
    return Inputs(
        random.normal(size=(spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk)),
        PagedCache(pages, random.normal(size=(8, 4, spec.num_kv_heads, spec.head_dim_qk))),
        PagedCache(pages, random.normal(size=(8, 4, spec.num_kv_heads, spec.head_dim_vo))),
    )


def lists_of(spec: AttentionSpec, lists: list[list[int]]) -> ValidatedCandidates:
    raw = CandidateLists(np.cumsum([0, *map(len, lists)]), np.fromiter(chain(*lists), np.int64))
    return validate(spec, raw, TABLE)


def run(spec: AttentionSpec, lists: list[list[int]] = LISTS, gate: Array | None = None) -> Forward:
    return forward(spec, inputs_of(spec), TABLE, lists_of(spec, lists), gate=gate)


# --- empty rows


EMPTY = [[3, 0], [], [15], [0, 5], [], [7]]


def test_forbidden_empty_rows_are_refused_by_name_before_anything_is_read() -> None:
    spec = replace(SPEC, empty_row=EmptyRowRule.FORBID)
    with pytest.raises(
        EmptyRowError, match=r"row \(request 0, query 0, KV head 1\): has no edge.* \(and 1 more\)"
    ) as error:
        edges(spec, lists_of(spec, EMPTY))
    assert error.value.rows == [Row(0, 0, 1), Row(1, 0, 0)]
    assert np.isfinite(run(spec).lse).all()


@pytest.mark.parametrize(("rule", "t"), [(EmptyRowRule.FORCE_SELF, (14, 11)), (EmptyRowRule.FORCE_SINK_TOKEN, (0, 0))])
def test_a_forced_token_stands_past_all_masks_and_its_value_is_the_output(
    rule: EmptyRowRule, t: tuple[int, int]
) -> None:
    spec = replace(SPEC, empty_row=rule, causal=CausalRule.BOTTOM_RIGHT, window_left=5)
    lists = [[13], [1, 2], [15], [15], [0, 1], [7]]  # the window leaves nothing of [1, 2] and [0, 1]
    found, v = run(spec, lists), inputs_of(spec).v.data.reshape(2, 16, 2, 4)
    np.testing.assert_allclose(found.out[0, 2:], np.repeat(v[0, t[0], 1][None], 2, axis=0), rtol=1e-15)
    np.testing.assert_allclose(found.out[2, :2], np.repeat(v[1, t[1], 0][None], 2, axis=0), rtol=1e-15)
    rows, positions, counts = edges(spec, lists_of(spec, lists))
    assert [(1, t[0]), (4, t[1])] == [
        (r, p) for r, p in zip(rows.tolist(), positions.tolist(), strict=True) if r in (1, 4)
    ]
    assert rows.tolist() == sorted(rows.tolist())
    assert (counts == 1).all()


def test_a_query_that_is_not_committed_cannot_be_forced_to_attend_itself() -> None:
    spec = replace(SPEC, empty_row=EmptyRowRule.FORCE_SELF, causal=CausalRule.ABSOLUTE, query_positions=(0, 1, 12))
    with pytest.raises(EmptyRowError, match=r"request 1, query 0, KV head 0\): .* not committed"):
        edges(spec, lists_of(spec, [[0], [0], [1], [0], [], [7]]))
    with pytest.raises(EmptyRowError, match="T = 0 leaves no sink token"):
        spec = replace(SPEC, empty_row=EmptyRowRule.FORCE_SINK_TOKEN, seq_lens=(16, 0))
        edges(spec, lists_of(spec, [[3], [0], [15], [0], [], []]))


def test_an_empty_row_under_a_sink_is_zero_with_the_sink_as_lse() -> None:
    found = run(replace(SPEC, sink_logits=(1.0, 2.0, 3.0, -4.0)), EMPTY)
    assert found.lse[0, 2:].tolist() == [3.0, -4.0]
    assert found.lse[2, :2].tolist() == [1.0, 2.0]
    assert (found.out[0, 2:] == 0).all()
    assert (found.out_error[0, 2:] == 0).all()


# --- epilogues


PLAIN = run(SPEC)
EPILOGUES: dict[str, tuple[Epilogue, Callable[[Array], Array]]] = {
    "cast": (
        Epilogue(EpilogueKind.CAST, dtype=DType.BF16),
        lambda x: torch.from_numpy(x).to(torch.bfloat16).double().numpy(),
    ),
    "relu": (
        Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.RELU),
        lambda x: torch.relu(torch.from_numpy(x)).numpy(),
    ),
    "sigmoid": (
        Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SIGMOID),
        lambda x: torch.sigmoid(torch.from_numpy(x)).numpy(),
    ),
    "tanh": (
        Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.TANH),
        lambda x: torch.tanh(torch.from_numpy(x)).numpy(),
    ),
    "silu": (
        Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.SILU),
        lambda x: torch.nn.functional.silu(torch.from_numpy(x)).numpy(),
    ),
    "int4": (
        Epilogue(EpilogueKind.LOW_BIT, bits=4, scale=0.05),
        lambda x: torch.fake_quantize_per_tensor_affine(torch.from_numpy(x).float(), 0.05, 0, -7, 7).double().numpy(),
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("function", "low", "high", "ends"),
    [
        (Nonlinearity.RELU, -np.inf, np.inf, (-1e-3, np.inf)),
        (Nonlinearity.RELU, -np.inf, -2.0, (-1e-3, 1e-3)),
        (Nonlinearity.SILU, -np.inf, np.inf, (-0.27846454 - 1e-3, np.inf)),
        (Nonlinearity.SILU, -np.inf, -2.0, (-2 / (1 + np.e**2) - 1e-3, 1e-3)),
        (Nonlinearity.SIGMOID, -np.inf, np.inf, (-1e-3, 1 + 1e-3)),
        (Nonlinearity.TANH, -np.inf, np.inf, (-1 - 1e-3, 1 + 1e-3)),
    ],
)
def test_an_end_at_infinity_is_the_limit_of_a_function(
    function: Nonlinearity, low: float, high: float, ends: tuple[float, float]
) -> None:
    epilogue = Epilogue(EpilogueKind.NONLINEAR, function=function)
    found = epilogues.interval(epilogue, np.full((1, 1, 1), low), np.full((1, 1, 1), high), None, 1e-3)
    np.testing.assert_allclose([float(end.item()) for end in found], ends, rtol=1e-7)


@pytest.mark.filterwarnings("error")
def test_a_row_without_a_bound_has_one_behind_a_gate_of_0_alone() -> None:
    epilogue, gate = Epilogue(EpilogueKind.GATE), np.array([[[2.0], [-0.5], [0.0]]])
    unbounded = np.full((1, 3, 4), np.inf)
    low, high = epilogues.interval(epilogue, -unbounded, unbounded, gate, 0.0)
    assert low[0, :, 0].tolist() == [-np.inf, -np.inf, 0.0]
    assert high[0, :, 0].tolist() == [np.inf, np.inf, 0.0]
    _, error = epilogues.apply(epilogue, np.ones((1, 3, 4)), unbounded, gate)
    assert error[0, :, 0].tolist() == [np.inf, np.inf, 0.0]


@pytest.mark.parametrize("name", EPILOGUES)
def test_an_epilogue_acts_on_the_merged_output_and_leaves_lse(name: str) -> None:
    epilogue, formula = EPILOGUES[name]
    found = run(replace(SPEC, epilogue=epilogue))
    np.testing.assert_allclose(found.out, formula(PLAIN.out), rtol=1e-7 if name == "int4" else 1e-14)
    assert (found.out != PLAIN.out).any()
    np.testing.assert_array_equal(found.lse, PLAIN.lse)


def test_a_gate_multiplies_each_element_or_each_head() -> None:
    spec = replace(SPEC, epilogue=Epilogue(EpilogueKind.GATE))
    gate = np.random.default_rng(1).normal(size=PLAIN.out.shape)
    np.testing.assert_array_equal(run(spec, gate=gate).out, PLAIN.out * gate)
    np.testing.assert_array_equal(run(spec, gate=gate[..., :1]).out, PLAIN.out * gate[..., :1])
    with pytest.raises(ValueError, match="must be given"):
        run(spec)
    with pytest.raises(ValueError, match=r"gate must be \(3, 4, 4\) or \(3, 4, 1\)"):
        run(spec, gate=gate[:, :, :2])
    with pytest.raises(ValueError, match="must be None"):
        run(SPEC, gate=gate)


def test_an_error_that_may_cross_a_rounding_boundary_is_the_distance_of_both_sides() -> None:
    spec = AttentionSpec(1, 1, 8, 4, 4, (16, 12), (1, 0), DType.BF16, 0.4)
    inputs = inputs_of(spec)
    inputs.v.data[:] = np.array([0.5, 0.5 + 1e-15, 0.5 + 1e-3, 7.0])
    low_bit = replace(spec, epilogue=Epilogue(EpilogueKind.LOW_BIT, bits=8, scale=1.0))
    found = forward(low_bit, inputs, TABLE, lists_of(spec, [[1, 2, 3]]))
    assert (found.out_error[0, 0] > 0.9).tolist() == [True, True, False, False]
    assert found.out_error[0, 0, 2:].tolist() == [0, 0]


# --- branches


def test_branches_keep_their_own_softmax_and_are_gated_and_added() -> None:
    sparse, window = replace(SPEC, candidate_kind=CandidateKind.MULTISET), replace(SPEC, window_left=3)
    every = [list(range(t)) for t in (16, 16, 16, 16, 12, 12)]
    branches = [
        Branch(sparse, inputs_of(SPEC), TABLE, lists_of(sparse, [[1, 1, 4]] * 6)),
        Branch(window, inputs_of(SPEC), TABLE, lists_of(window, every)),
    ]
    gates = np.random.default_rng(2).normal(size=(2, 3, 4))
    total, parts = forward_branches(branches, gates)
    np.testing.assert_allclose(total.out, np.einsum("bth,bthd->thd", gates, [part.out for part in parts]), rtol=1e-14)
    np.testing.assert_array_equal(parts[1].lse, forward(*branches[1]).lse)
    assert np.isnan(total.lse).all()
    merged = run(sparse, [[1, 1, 4, *mine] for mine in every])
    assert np.abs(total.out - merged.out).max() > 0.1
    squashed, _ = forward_branches(branches, gates, Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.TANH))
    np.testing.assert_allclose(squashed.out, np.tanh(total.out), rtol=1e-15)


def test_a_branch_with_an_epilogue_of_its_own_and_gates_of_another_shape_are_refused() -> None:
    branch = Branch(SPEC, inputs_of(SPEC), TABLE, lists_of(SPEC, LISTS))
    squashed = replace(SPEC, epilogue=Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity.TANH))
    with pytest.raises(ValueError, match="branch 1 has the epilogue nonlinear; only the sum may have one"):
        forward_branches([branch, branch._replace(spec=squashed)], np.ones((2, 3, 4)))
    with pytest.raises(ValueError, match=r"gates must be \(1, 3, 4\)"):
        forward_branches([branch], np.ones((1, 3, 2)))


# --- what order and identity mean


TERMS = replace(
    SPEC, rope=RoPE(8), alibi_slopes=(0.1, 0.2, 0.3, 0.4), dropout=Dropout(0.3, 11), sink_logits=(0.0, 1.0, 2.0, 3.0)
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_the_order_of_a_set_or_multiset_means_nothing(data: st.DataObject) -> None:
    spec = replace(TERMS, candidate_kind=data.draw(st.sampled_from((CandidateKind.SET, CandidateKind.MULTISET))))
    shuffled = [data.draw(st.permutations(row)) for row in LISTS]
    found, right = run(spec, shuffled), run(spec)
    np.testing.assert_array_equal(found.out, right.out)
    np.testing.assert_array_equal(found.lse, right.lse)


def test_the_order_of_a_sequence_means_something_where_ordinals_are_used_and_only_there() -> None:
    plain = replace(SPEC, candidate_kind=CandidateKind.SEQUENCE)
    turned = replace(plain, rope=RoPE(8))
    backwards = [row[::-1] for row in LISTS]
    np.testing.assert_allclose(run(plain, backwards).out, run(plain).out, rtol=1e-13)
    assert np.abs(run(turned, backwards).out - run(turned).out).max() > 1e-3


def test_dropout_follows_the_request_uid_when_the_batch_is_reordered() -> None:
    spec = replace(SPEC, qo_lens=(1, 1), seq_lens=(12, 12), dropout=Dropout(0.5, 3, (41, 42)))
    swapped = replace(spec, dropout=Dropout(0.5, 3, (42, 41)))
    inputs, lists = inputs_of(spec), [[0, 3, 4, 7, 9, 11]] * 4
    first = forward(spec, inputs, TABLE, lists_of(spec, lists))
    other_table = replace(TABLE, table=TABLE.table[::-1], owned=TABLE.owned[::-1])
    second = forward(swapped, inputs._replace(q=inputs.q[::-1]), other_table, lists_of(spec, lists))
    np.testing.assert_array_equal(second.out[::-1], first.out)
    stayed = forward(spec, inputs._replace(q=inputs.q[::-1]), other_table, lists_of(spec, lists))
    assert (stayed.out[::-1] != first.out).any()


def test_dropout_averages_to_the_undropped_output() -> None:
    total = np.mean([run(replace(SPEC, dropout=Dropout(0.4, seed))).out for seed in range(200)], axis=0)
    assert np.abs(total - PLAIN.out).max() < 0.45
    np.testing.assert_array_equal(run(replace(SPEC, dropout=Dropout(0.4, 1))).lse, PLAIN.lse)


# --- an independent implementation where its semantics meet ours


@pytest.mark.parametrize("causal", CausalRule)
def test_torch_sdpa_in_float64_agrees(causal: CausalRule) -> None:
    """Causal as torch's own flag: top left; bottom right where q_len = T, so that both coincide."""
    length = 12 if causal is CausalRule.BOTTOM_RIGHT else 5
    placed = tuple(range(3, 8)) * 2 if causal is CausalRule.ABSOLUTE else ()
    spec = replace(SPEC, seq_lens=(12, 12), qo_lens=(length, length), causal=causal, query_positions=placed)
    lists = [
        list(range(12 if causal is CausalRule.NONE else position + 1))
        for position in spec.token_position
        for _ in range(spec.num_kv_heads)
    ]
    inputs = inputs_of(spec)
    found = forward(spec, inputs, TABLE, lists_of(spec, lists))
    q = torch.from_numpy(inputs.q).reshape(2, length, 4, 8).transpose(1, 2)
    k, v = (
        torch.from_numpy(cache.data).reshape(2, 16, 2, -1)[:, :12].transpose(1, 2) for cache in (inputs.k, inputs.v)
    )
    mask = torch.ones(length, 12, dtype=torch.bool).tril(3) if causal is CausalRule.ABSOLUTE else None
    right = torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal in (CausalRule.TOP_LEFT, CausalRule.BOTTOM_RIGHT),
        scale=spec.sm_scale,
        enable_gqa=True,
    )
    np.testing.assert_allclose(found.out, right.transpose(1, 2).reshape(found.out.shape).numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("soft_cap", [0.0, 0.75])
def test_the_reference_attention_of_onnx_agrees(soft_cap: float) -> None:
    """Operator Attention-24 in float64: mask, scale, soft cap, GQA and an empty row."""
    spec = replace(SPEC, seq_lens=(12, 12), qo_lens=(3, 3), sm_scale=0.25, logits_soft_cap=soft_cap)
    random = np.random.default_rng(5)
    lists = [random.permutation(12)[: int(random.integers(0, 9))].tolist() for _ in range(spec.num_rows)]
    lists[4] = []
    inputs = inputs_of(spec)
    mask = (
        np.array([np.isin(np.arange(12), row) for row in lists]).reshape(2, 3, 2, 12).swapaxes(1, 2).repeat(2, axis=1)
    )
    k, v = (cache.data.reshape(2, 16, 2, -1)[:, :12].swapaxes(1, 2) for cache in (inputs.k, inputs.v))
    feeds = {"Q": inputs.q.reshape(2, 3, 4, 8).swapaxes(1, 2), "K": k, "V": v, "M": mask}
    node = onnx.helper.make_node("Attention", [*feeds], ["Y"], scale=0.25, softcap=soft_cap)
    double, boolean = onnx.TensorProto.DOUBLE, onnx.TensorProto.BOOL
    values = [onnx.helper.make_tensor_value_info(x, boolean if x == "M" else double, None) for x in (*feeds, "Y")]
    graph = onnx.helper.make_graph([node], "attention", values[:-1], values[-1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)])
    right = ReferenceEvaluator(model).run(None, feeds)[0]
    found = forward(spec, inputs, TABLE, lists_of(spec, lists))
    np.testing.assert_allclose(found.out, right.swapaxes(1, 2).reshape(found.out.shape), rtol=0, atol=1e-14)
