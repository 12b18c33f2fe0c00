"""Dense attention row by row from the definitions, differentiated by torch in float64: the second formulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from dense_rows import bucket_of, kept, row_of, turned
from numpy.typing import NDArray

from sacts.reference import groups as reference_groups
from sacts.reference import keys
from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.forward import Inputs
from sacts.reference.gradients import Gradients, backward
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
    ListsPer,
    Nonlinearity,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

Array = NDArray[np.float64]
Tensor = torch.Tensor

BASE = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=8,
    head_dim_vo=6,
    page_size=4,
    seq_lens=(13, 9),
    qo_lens=(2, 3),
    dtype=DType.FP32,
    sm_scale=0.37,
)
BUCKETS = RelativeBuckets((0, 1, 2, 4, 9), tuple(tuple(0.3 * h - 0.7 * b for b in range(5)) for h in range(4)))
BOTH_WAYS = RelativeBuckets((0, 3), tuple(tuple(0.5 * h - 0.9 * b for b in range(4)) for h in range(4)), True)

# Axis -> value -> fields of the spec; `pages`, `d_lse` and `gate` are no fields, but ways to build the problem.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "rope": {
        "none": {},
        "half split": {"rope": RoPE(8)},
        "interleaved, partial": {"rope": RoPE(6, 50.0, RopeLayout.INTERLEAVED)},
    },
    "cap": {"none": {}, "0.8": {"logits_soft_cap": 0.8}},
    "alibi": {"none": {}, "slopes": {"alibi_slopes": (0.5, 0.25, 0.125, 1.0)}},
    "buckets": {"none": {}, "one way": {"buckets": BUCKETS}, "both ways": {"buckets": BOTH_WAYS}},
    "sink": {"none": {}, "logits": {"sink_logits": (0.5, -3.0, 4.0, 0.0)}},
    "dropout": {"none": {}, "0.4": {"dropout": Dropout(0.4, 2**63 + 12345, (7, 2**32 - 1, 3))}},
    "kind": {kind: {"candidate_kind": CandidateKind(kind)} for kind in ("set", "multiset", "sequence")},
    "causal": {
        "none": {},
        "bottom right": {"causal": CausalRule.BOTTOM_RIGHT},
        "top left": {"causal": CausalRule.TOP_LEFT},
        "absolute": {"causal": CausalRule.ABSOLUTE},
    },
    "window": {"none": {}, "3": {"window_left": 3}},
    "empty": {rule: {"empty_row": EmptyRowRule(rule)} for rule in ("zero", "force_self", "force_sink_token")},
    "heads": {"GQA 2": {}, "MHA": {"num_kv_heads": 4}, "MQA": {"num_kv_heads": 1}},
    "lists": {"KV head": {}, "query head": {"lists": ListsPer.QUERY_HEAD}},
    "block": {"1": {}, "3": {"block_size": 3}},
    "page": {"4": {}, "1": {"page_size": 1}},
    "lengths": {
        "plain": {},
        "q_len > T": {"seq_lens": (3, 9), "qo_lens": (5, 11)},
        "zero": {"seq_lens": (0, 9, 5, 0), "qo_lens": (2, 0, 2, 0)},
    },
    "epilogue": {
        "none": {},
        "cast": {"epilogue": Epilogue(EpilogueKind.CAST, DType.BF16)},
        "gate": {"epilogue": Epilogue(EpilogueKind.GATE)},
        **{
            function: {"epilogue": Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity(function))}
            for function in Nonlinearity
        },
    },
    "pages": {"distinct": {}, "shared prefix": {}, "one page at two offsets": {}},
    "d_lse": {"given": {}, "none": {}},
    "gate": {"by channel": {}, "by head": {}},
    "density": {"sparse": {}, "full": {}},
}
Choice = Mapping[str, str]


def feasible(choice: Choice) -> bool:
    """A gate needs its epilogue; a forced token must be committed."""
    get = choice.get
    forced = get("empty") in ("force_self", "force_sink_token")
    return not (
        (get("epilogue", "gate") != "gate" and get("gate") == "by head")
        or (forced and get("lengths") == "zero")
        or (get("empty") == "force_self" and get("lengths") == "q_len > T")
    )


def pairs_of(choice: Choice) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(sorted(choice.items()), 2))


def covering() -> list[dict[str, str]]:
    """Choices of one value per axis that hold every feasible pair of values, greedily."""
    values = [(axis, value) for axis in AXES for value in AXES[axis]]
    missing = {pair for pair in combinations(sorted(values), 2) if pair[0][0] != pair[1][0] and feasible(dict(pair))}
    random, found = np.random.default_rng(0), []
    while missing:
        choice = dict(min(missing))
        for axis in random.permutation(sorted(AXES)).tolist():
            if axis not in choice:
                options = [choice | {axis: value} for value in AXES[axis] if feasible(choice | {axis: value})]
                choice = max(options, key=lambda option: len(pairs_of(option) & missing))
        missing -= pairs_of(choice)
        found.append(choice)
    return found


@dataclass
class Problem:
    spec: AttentionSpec
    table: PageTable
    inputs: Inputs
    lists: list[list[int]]
    d_out: Array
    d_lse: Array | None
    gate: Array | None

    def validated(self) -> ValidatedCandidates:
        raw = CandidateLists(np.cumsum([0, *map(len, self.lists)]), np.fromiter(chain(*self.lists), np.int64))
        return validate(self.spec, raw, self.table)

    def backward(self) -> Gradients:
        arguments = self.spec, self.inputs, self.table, self.validated()
        return backward(*arguments, self.d_out, self.d_lse, gate=self.gate)


def problem_of(choice: Choice, seed: int) -> Problem:
    fields = {key: value for axis, name in choice.items() for key, value in AXES[axis][name].items()}
    for name in ("seq_lens", "qo_lens"):
        fields.setdefault(name, getattr(BASE, name))
    if fields.get("causal") is CausalRule.ABSOLUTE:
        limits = [t for t, q in zip(fields["seq_lens"], fields["qo_lens"], strict=True) for _ in range(q)]
        fields["query_positions"] = tuple(max(0, t - 1 - 2 * i) for i, t in enumerate(limits))
    if "dropout" in fields:
        uids = fields["dropout"].request_uids
        fields["dropout"] = replace(fields["dropout"], request_uids=(uids * 2)[: len(fields["seq_lens"])])
    spec, random = replace(BASE, **fields), np.random.default_rng(seed)
    table = table_of(spec, choice.get("pages", "distinct"), random)
    pages = np.arange(table.num_pages)
    slots = (len(pages), spec.page_size, spec.num_kv_heads)
    tokens = (spec.num_tokens, spec.num_qo_heads)
    inputs = Inputs(
        random.normal(size=(*tokens, spec.head_dim_qk)),
        PagedCache(pages, random.normal(size=(*slots, spec.head_dim_qk))),
        PagedCache(pages, random.normal(size=(*slots, spec.head_dim_vo))),
    )
    d_lse = random.normal(size=tokens) if choice.get("d_lse") != "none" else None
    width = 1 if choice.get("gate") == "by head" else spec.head_dim_vo
    gated = spec.epilogue.kind is EpilogueKind.GATE
    gate = random.normal(size=(*tokens, width)) if gated else None
    lists = lists_of(spec, random, 1.0 if choice.get("density") == "full" else 0.4)
    return Problem(spec, table, inputs, lists, random.normal(size=(*tokens, spec.head_dim_vo)), d_lse, gate)


def table_of(spec: AttentionSpec, pages: str, random: np.random.Generator) -> PageTable:
    counts = [-(-t // spec.page_size) for t in spec.seq_lens]
    names = random.permutation(sum(counts) + 2)
    table = np.full((len(counts), max(counts) + 1), -7)
    for request, count in enumerate(counts):
        table[request, :count] = names[sum(counts[:request]) :][:count]
    long = [request for request, count in enumerate(counts) if count > 1]
    if pages == "shared prefix" and len(long) > 1:
        table[long[1], 0] = table[long[0], 0]
    if pages == "one page at two offsets" and long:
        table[long[0], 1] = table[long[0], 0]
    owned = tuple(frozenset(row[row >= 0].tolist()) for row in table)
    return PageTable(table, spec.page_size, sum(counts) + 2, owned)


def lists_of(spec: AttentionSpec, random: np.random.Generator, density: float) -> list[list[int]]:
    """Every fourth list is empty; sets and multisets name some entries twice or three times."""
    lists = []
    for request, position in zip(spec.token_request, spec.token_position, strict=True):
        tokens = spec.seq_lens[request]
        if spec.causal is not CausalRule.NONE and spec.block_size == 1:
            tokens = max(0, min(tokens, position + 1))
        entries = -(-tokens // spec.block_size)
        for _ in range(spec.num_qo_heads if spec.lists is ListsPer.QUERY_HEAD else spec.num_kv_heads):
            chosen = random.permutation(entries)[: math.ceil(density * entries)].tolist()
            if spec.candidate_kind is not CandidateKind.SEQUENCE:
                chosen += chosen[::2] + chosen[:1]
            lists.append(chosen if len(lists) % 4 != 3 else [])
    return lists


class Leaves(NamedTuple):
    """What autograd differentiates by; k and v: the pages, and what each request reads from them."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_read: list[Tensor]
    v_read: list[Tensor]
    sink: Tensor
    buckets: Tensor
    gate: Tensor


def leaves_of(problem: Problem) -> Leaves:
    spec, inputs = problem.spec, problem.inputs

    def leaf(x: object) -> Tensor:
        return torch.tensor(np.asarray(x, np.float64), requires_grad=True)

    q, k, v = leaf(inputs.q), leaf(inputs.k.data), leaf(inputs.v.data)
    read = []
    for cache in (k, v):
        of_requests = []
        for request, length in enumerate(spec.seq_lens):
            t = np.arange(length)
            page = problem.table.table[request, t // spec.page_size]
            of_requests.append(cache[torch.tensor(page), torch.tensor(t % spec.page_size)])
            of_requests[-1].retain_grad()
        read.append(of_requests)
    buckets = leaf(spec.buckets.bias if spec.buckets else 0.0)
    return Leaves(q, k, v, *read, leaf(spec.sink_logits), buckets, leaf(0.0 if problem.gate is None else problem.gate))


def row(problem: Problem, leaves: Leaves, token: int, head: int) -> tuple[Tensor, Tensor | None]:
    """out before the epilogue and lse of one row (None: minus infinity)."""
    spec, kv_head = problem.spec, head // problem.spec.group_size
    request, logits, values = spec.token_request[token], [], []
    listed = head if spec.lists is ListsPer.QUERY_HEAD else kv_head
    for edge in row_of(problem.spec, problem.lists, token, listed):
        q, k = leaves.q[token, head], leaves.k_read[request][edge.t, kv_head]
        if spec.rope:
            q, k = turned(q, edge.query, spec.rope), turned(k, edge.key, spec.rope)
        z = spec.sm_scale * (q @ k)
        if spec.logits_soft_cap:
            z = spec.logits_soft_cap * torch.tanh(z / spec.logits_soft_cap)
        if spec.alibi_slopes:
            z = z - spec.alibi_slopes[head] * abs(edge.query - edge.key)
        if spec.buckets:
            z = z + leaves.buckets[head, bucket_of(spec.buckets, edge.query - edge.key)]
        logits.append(z + math.log(edge.copies))
        values.append(kept(spec, token, head, edge) * leaves.v_read[request][edge.t, kv_head])
    if spec.sink_logits:
        logits.append(leaves.sink[head])
        values.append(torch.zeros(spec.head_dim_vo, dtype=torch.float64))
    if not logits:
        return torch.zeros(spec.head_dim_vo, dtype=torch.float64), None
    return torch.softmax(torch.stack(logits), 0) @ torch.stack(values), torch.logsumexp(torch.stack(logits), 0)


FUNCTIONS = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": torch.nn.functional.silu}


def after(epilogue: Epilogue, out: Tensor, gate: Tensor) -> Tensor:
    """A cast is written as autograd sees it."""
    if epilogue.kind is EpilogueKind.GATE:
        return out * gate
    return FUNCTIONS[epilogue.function](out) if epilogue.function else out


def differentiated(problem: Problem) -> Leaves:
    """The leaves with their gradients."""
    spec, leaves = problem.spec, leaves_of(problem)
    loss = sum((x.sum() * 0 for x in leaves if isinstance(x, Tensor)), torch.zeros(()))
    loss = loss + sum((x.sum() * 0 for x in (*leaves.k_read, *leaves.v_read)), torch.zeros(()))
    for token, head in product(range(spec.num_tokens), range(spec.num_qo_heads)):
        out, lse = row(problem, leaves, token, head)
        gate = leaves.gate[token, head] if leaves.gate.ndim else leaves.gate
        loss = loss + after(spec.epilogue, out, gate) @ torch.tensor(problem.d_out[token, head])
        if lse is not None and problem.d_lse is not None:
            loss = loss + lse * problem.d_lse[token, head]
    loss.backward()
    return leaves


def grad(x: Tensor) -> Array:
    assert x.grad is not None
    gradient: Array = x.grad.numpy()
    return gradient


def compare(problem: Problem, found: Gradients, leaves: Leaves) -> None:
    spec = problem.spec

    def close(ours: Array, theirs: Array, name: str) -> None:
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13, err_msg=name)

    close(found.d_q.value, grad(leaves.q), "d_q")
    for name, gradient, pages, read in (
        ("d_k", found.d_k, leaves.k, leaves.k_read),
        ("d_v", found.d_v, leaves.v, leaves.v_read),
    ):
        whole = np.zeros(tuple(pages.shape))
        whole[gradient.pages.cache.pages] = gradient.pages.cache.data
        close(whole, grad(pages), f"{name} by page")
        for request, length in enumerate(spec.seq_lens):
            close(gradient.logical(request, length)[0], grad(read[request]), f"{name} of request {request}")
    assert (found.d_sink is None) is (not spec.sink_logits)
    if found.d_sink:
        close(found.d_sink.value, grad(leaves.sink), "d_sink")
    assert (found.d_buckets is None) is (spec.buckets is None)
    if found.d_buckets:
        close(found.d_buckets.value, grad(leaves.buckets), "d_buckets")
    assert (found.d_gate is None) is (problem.gate is None)
    if found.d_gate:
        close(found.d_gate.value, grad(leaves.gate), "d_gate")


def every_way(problem: Problem) -> Iterator[Gradients]:
    """Dense; each row with its own keys; dense by few queries and heads at a time."""
    yield problem.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "SMALL", 0)
        patch.setattr(reference_groups, "SMALL", 0)
        patch.setattr(reference_groups, "DENSE_SHARE", 2)
        patch.setattr(reference_groups, "MAX_GATHERED", 200)
        yield problem.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_groups, "MAX_LOGITS", 100)
        yield problem.backward()
