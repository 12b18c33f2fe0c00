"""Candidate lists of each query head's own: the reference against repeated KV heads, the cells, and what must fail."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from seeded_places import FAULTS as PLACES
from term_problems import ARITHMETICS, BASE, MULTISET, SEQUENCE, problem_of
from test_gradient_places import campaign

from sacts.conformance import sample
from sacts.conformance.adapter import Backend, Case, Normalized
from sacts.conformance.build import Problem, build, last_query
from sacts.conformance.contract import place_of
from sacts.conformance.gradient_determinism import measure
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.localise.locate import locate
from sacts.conformance.probes.copies import Copy, copies
from sacts.conformance.probes.dither import LEAST_KEYS
from sacts.conformance.probes.inputs import RANDOM
from sacts.conformance.relations import chosen, heads_reversed
from sacts.kernels_under_test import sdpa
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.faults import ModelFault, model_catalogue, seed
from sacts.matrices.cell import CellError, parse
from sacts.reference.bounds import expected
from sacts.reference.candidates import ValidatedCandidates, fixed_sinks, local_window, serve_rows
from sacts.reference.costs import work
from sacts.reference.forward import Inputs, forward
from sacts.reference.gradients import backward
from sacts.reference.paging import PagedCache
from sacts.reference.spec import (
    AttentionSpec,
    CausalRule,
    Dropout,
    DType,
    EmptyRowRule,
    Hints,
    ListsPer,
    RoPE,
    Row,
)
from sacts.reports.records import Gate, Record, Verdict

Array = NDArray[np.float64]

PER_QUERY_HEAD = {"lists": ListsPer.QUERY_HEAD}
SPECS = {
    "plain": replace(BASE, **PER_QUERY_HEAD),
    "MQA, long": replace(BASE, num_kv_heads=1, seq_lens=(700, 0, 45), causal=CausalRule.NONE, **PER_QUERY_HEAD),
    "as many KV heads": replace(BASE, num_kv_heads=4, **PER_QUERY_HEAD),
    "RoPE, window, sink": replace(BASE, rope=RoPE(16), window_left=30, sink_logits=(0.0, 1, -2, 3), **PER_QUERY_HEAD),
    "multiset, cap, ALiBi": replace(
        MULTISET, logits_soft_cap=5.0, alibi_slopes=(0.5, 0.1, 0.02, 0.0), **PER_QUERY_HEAD
    ),
    "sequence, RoPE, dropout": replace(SEQUENCE, rope=RoPE(32), dropout=Dropout(0.3, 5), **PER_QUERY_HEAD),
    "forced": replace(
        BASE, empty_row=EmptyRowRule.FORCE_SINK_TOKEN, seq_lens=(150, 1, 45), window_left=2, **PER_QUERY_HEAD
    ),
}
CELLS = (
    "decode/bf16/kv:90+40/lists:query_head",
    "decode/fp16/kv:300+90/heads:8-2/lists:query_head",
    "decode/bf16/kv:127+40/heads:8-1/pattern:clustered/tile:16/lists:query_head",
    "decode/bf16/kv:65+40/heads:7-1/page:1/pattern:hot/lists:query_head",
    "decode/bf16/kv:200+150/pattern:duplicates/splits:2/exec:reuse/lists:query_head",
    "prefill/fp32/kv:90/q:3/block:16/pattern:all/causal:bottom_right/lists:query_head",
    "train/bf16/kv:90+40/q:2+1/lists:query_head",
    "train/fp16/kv:130+40/q:5+1/heads:8-2/causal:bottom_right/lists:query_head",
)
TERMS = (
    "prefill/bf16/kv:65+40/q:3+2/heads:8-1/window:20/pos:rope/lists:query_head",
    "decode/fp16/kv:90+40/pos:alibi/sink:on/lists:query_head",
    "decode/fp16/kv:90+40/pattern:union/kind:multiset/lists:query_head",
    "decode/fp32/kv:90+40/dropout:30/kind:sequence/lists:query_head",
    "decode/bf16/kv:90+40/kcodec:int8/vcodec:fp8_e4m3fn/scales:page_head/lists:query_head",
    "decode/bf16/kv:90+40/pattern:one/window:5/empty:force_self/lists:query_head",
    "train/fp32/kv:90+40/q:2+2/map:shared/sink:on/dropout:30/lists:query_head",
)
SEEDS = int(os.environ.get("SACTS_LOCALISE", "0"))
PLACED = (
    "decode/bf16/kv:330+60/heads:8-2/tile:16/lists:query_head",
    "decode/fp32/kv:260+50/pattern:all/splits:2/tile:32/lists:query_head",
    "prefill/fp16/kv:40+9/q:4+2/causal:bottom_right/lists:query_head",
)
IN_CI = ("dropped", "doubled", "foreign", "page_of_v", "split_lost", "heads_exchanged", "lse_of_one_row")
FAULTS = [fault for fault in model_catalogue().values() if fault.problem == "lists of query heads"]


def judged(adapter: Any, cell: str) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell))


def with_repeated_heads(spec: AttentionSpec, inputs: Inputs) -> tuple[AttentionSpec, Inputs]:
    """The same call by the old rule: each query head has a KV head of its own, with its group's data."""
    k, v = (PagedCache(cache.pages, np.repeat(cache.data, spec.group_size, axis=2)) for cache in (inputs.k, inputs.v))
    return replace(spec, num_kv_heads=spec.num_qo_heads, lists=ListsPer.KV_HEAD), Inputs(inputs.q, k, v)


# --- the reference


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_lists_of_query_heads_are_lists_over_repeated_kv_heads(spec: AttentionSpec) -> None:
    problem = problem_of(spec, seed=3, size=1.0)
    where = problem.table, problem.lists
    mha, inputs = with_repeated_heads(spec, problem.inputs)
    found, right = forward(spec, problem.inputs, *where), forward(mha, inputs, *where)
    np.testing.assert_allclose(found.out, right.out, rtol=0, atol=4e-15)
    np.testing.assert_allclose(found.lse, right.lse, rtol=4e-15, atol=0)
    assert (found.in_range == right.in_range).all()
    assert np.abs(found.out).max() > 0.1
    numerics = ARITHMETICS["bf16"][1].numerics
    bound, other = expected(spec, problem.inputs, *where, numerics), expected(mha, inputs, *where, numerics)
    for name in ("half_width", "lse_bound"):
        np.testing.assert_allclose(getattr(bound, name), getattr(other, name), rtol=1e-5)  # each holds its own error
    for name in ("edges", "trusted"):
        assert (getattr(bound, name) == getattr(other, name)).all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradients_of_a_kv_head_are_the_sum_over_its_query_heads_own_lists(spec: AttentionSpec) -> None:
    problem, random = problem_of(spec, seed=4, size=1.0), np.random.default_rng(4)
    mha, inputs = with_repeated_heads(spec, problem.inputs)
    shape = (spec.num_tokens, spec.num_qo_heads)
    d_out, d_lse = random.normal(size=(*shape, spec.head_dim_vo)), random.normal(size=shape)
    found = backward(spec, problem.inputs, problem.table, problem.lists, d_out, d_lse)
    right = backward(mha, inputs, problem.table, problem.lists, d_out, d_lse)
    np.testing.assert_allclose(found.d_q.value, right.d_q.value, rtol=1e-12, atol=1e-13)
    for mine, theirs in ((found.d_k, right.d_k), (found.d_v, right.d_v)):
        for request, length in enumerate(spec.seq_lens):
            value, error = mine.logical(request, length)
            parts, errors = theirs.logical(request, length)
            by_group = (length, spec.num_kv_heads, spec.group_size, parts.shape[-1])
            np.testing.assert_allclose(value, parts.reshape(by_group).sum(axis=2), rtol=1e-12, atol=1e-12)
            apart = np.abs(value - parts.reshape(by_group).sum(axis=2))
            assert (apart <= error + errors.reshape(by_group).sum(axis=2)).all()
            assert error.max(initial=0.0) < 1e-9
        assert np.abs(mine.value).max() > 0.1


def test_a_row_is_a_query_head_and_reads_the_kv_head_of_its_group() -> None:
    spec = SPECS["plain"]
    assert (spec.list_heads, spec.heads_per_list, spec.lists_per_kv_head, spec.num_rows) == (4, 1, 2, 36)
    assert [spec.row(i) for i in (4, 7)] == [Row(0, 1, 0, 0), Row(0, 1, 1, 3)]
    assert [spec.row_of(*divmod(i, 4)) for i in range(36)] == list(range(36))
    assert str(spec.row(7)) == "row (request 0, query 1, query head 3)" == place_of(spec, 1, 3)
    assert (BASE.list_heads, BASE.heads_per_list, BASE.lists_per_kv_head, BASE.num_rows) == (2, 2, 1, 18)
    assert [BASE.row_of(1, head) for head in range(4)] == [2, 2, 3, 3]
    assert place_of(BASE, 1, 3) == "row (request 0, query 1, KV head 1), query head 3"
    with pytest.raises(ValueError, match="query_ordinals must name 36 rows, got 18"):
        replace(SEQUENCE, query_ordinals=(1,) * 18, **PER_QUERY_HEAD)


def test_windows_sinks_and_shared_lists_have_a_list_for_each_query_head() -> None:
    spec = SPECS["plain"]
    for wide, narrow in (
        (local_window(spec, 3), local_window(BASE, 3)),
        (fixed_sinks(spec, 2), fixed_sinks(BASE, 2)),
    ):
        rows = [wide.indices[a:b].tolist() for a, b in pairwise(wide.indptr)]
        of_group = [narrow.indices[a:b].tolist() for a, b in pairwise(narrow.indptr)]
        assert rows == [entries for entries in of_group for _ in range(2)]
    with pytest.raises(ValueError, match="blocks of 4 queries x 4 query heads need as many lists, got 0"):
        serve_rows(spec, ValidatedCandidates(np.zeros(1, np.int64), *(np.zeros(0, np.int64),) * 2, 0), 4)  # type: ignore[arg-type]  # a CSR with counts


def test_work_counts_the_keys_of_each_query_head_once() -> None:
    spec = SPECS["plain"]
    problem = problem_of(spec, seed=3, size=1.0)
    mha = replace(spec, num_kv_heads=4, lists=ListsPer.KV_HEAD)
    assert work(spec, Hints(), problem.lists) == work(mha, Hints(), problem.lists)


# --- cells


def lists_of(problem: Problem) -> list[set[int]]:
    lists = problem.candidates
    return [set(lists.indices[a:b].tolist()) for a, b in pairwise(lists.indptr)]


def test_a_cell_draws_a_list_for_each_query_head_and_needs_what_any_of_them_attends() -> None:
    problem = build(parse("decode/fp16/kv:60+40/heads:8-2/lists:query_head"))
    rows = lists_of(problem)
    assert len(rows) == 16
    assert all(a != b for group in (rows[:4], rows[4:8]) for a in group for b in group if a is not b)
    for request in range(2):
        position = problem.position_in(request)
        for head in range(2):
            mine = position[problem.needed[..., head] & (position >= 0)]
            assert set(mine.tolist()) == set().union(*rows[8 * request + 4 * head : 8 * request + 4 * head + 4])


def test_the_axis_is_refused_where_it_could_say_nothing() -> None:
    with pytest.raises(CellError, match="lists:query_head and heads:4-4 exclude each other: as many query heads as KV"):
        parse("decode/fp16/kv:60/heads:4-4/lists:query_head")


@pytest.mark.parametrize("cell", [*CELLS, *TERMS])
def test_a_right_kernel_passes_and_every_probe_of_it_could_have_failed(cell: str) -> None:
    record = judged(Adapter(), cell)
    assert record.verdict is Verdict.PASS, record.sentence
    said = {name: probe.said for name, probe in record.probes.items()}
    assert "untrusted" not in said.values(), said
    assert said["random"] == said["count"] == "judged"


def test_a_sample_of_rows_is_one_of_query_heads_and_the_others_keep_their_invariants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample, "EXACT_EDGES", 400)
    cell = "prefill/bf16/kv:90+40/q:9+2/heads:8-2/causal:bottom_right/lists:query_head"
    record = judged(Adapter(), cell)
    assert record.verdict is Verdict.PASS, record.sentence
    assert record.samples["exact"].of == 88
    assert 0 < len(record.samples["exact"].rows) < 44


@pytest.mark.parametrize("cell", CELLS)
def test_the_dense_fallback_serves_the_plain_ones(cell: str) -> None:
    record = judged(sdpa.Adapter(), cell)
    assert record.verdict is Verdict.FALLBACK, record.sentence


def witness_of(cell: str) -> Copy:
    problem = build(parse(cell))
    (made,) = (copy for copy in copies(problem, Backend(Adapter()).numerics(DType.BF16, problem.hints)) if copy.witness)
    return made


def test_all_four_witnesses_stand_beside_each_other_in_one_kv_head() -> None:
    """What one row's design puts into shared keys must leave the logits of the others as they were meant."""
    made = witness_of("decode/bf16/kv:365+90/heads:4-1/lists:query_head")
    assert made.witness
    assert {lane.probe for lane in made.witness.lanes.values()} == {"select", "cliff", "stair", "comb"}
    assert all(margin.min() > 1 for margin in made.margin.values())
    spec, k, q = made.problem.spec, made.inputs.k.data, made.inputs.q[-1]
    for head, lane in made.witness.lanes.items():
        row = made.witness.rows[lane.row]
        logits = spec.sm_scale * k[row.page, row.offset, lane.kv_head] @ q[head]
        octaves = (logits - logits.max()) / np.log(2)
        weights = np.exp2(octaves)
        if lane.probe == "select":
            assert octaves.argmax() == lane.target
            assert weights.sum() - 1 < 2.0**-24
        elif lane.probe in ("cliff", "stair"):
            np.testing.assert_allclose(octaves, np.rint(octaves), atol=1e-6)
            assert {"cliff": 10, "stair": 3}[lane.probe] <= -octaves.min() <= 12
            jump = [octaves[row.tile <= tile].max() for tile in range(row.tiles)]
            assert jump[-1] - jump[0] > 2
        else:
            assert len(set(np.round(octaves, 6))) > len(row.t) / 2
        assert (made.witness.values[lane.row] == made.inputs.v.data[row.page, row.offset, lane.kv_head]).all()


def test_each_list_has_channels_of_its_own_whose_mean_lies_beside_a_midpoint() -> None:
    problem = build(parse("decode/bf16/kv:90+60/heads:8-2/lists:query_head"))
    count = copies(problem, Backend(Adapter()).numerics(DType.BF16, problem.hints))[1]
    margin = count.margin["dither"]
    rows = count.expected.edges >= LEAST_KEYS
    assert margin.shape == (int(rows.sum()),) == (16,)
    assert margin.min() > 1


@pytest.mark.parametrize("cell", CELLS[-2:])
def test_witnesses_of_gradients_are_made_where_lists_may_differ(cell: str) -> None:
    record = judged(Adapter(), cell)
    said = {name: record.probes[name].said for name in ("gradients", "bw_value", "bw_dk", "bw_const", "bw_null")}
    assert said.pop("bw_null") == "not applicable"
    assert set(said.values()) == {"judged"}


def test_a_last_query_keeps_the_lists_of_its_query_heads() -> None:
    problem = build(parse("prefill/bf16/kv:65+33/q:3+2/causal:bottom_right/lists:query_head"))
    assert lists_of(last_query(problem, 0, "x")) == lists_of(problem)[8:12]


# --- relations


def test_relations_move_the_lists_with_their_query_heads() -> None:
    problem = build(parse("prefill/bf16/kv:65+33/q:3+2/heads:8-2/lists:query_head"))
    inputs = RANDOM.inputs(problem)
    right = forward(problem.spec, inputs, problem.table, problem.candidates)
    for variant in (heads_reversed(problem, inputs), chosen(problem, inputs, [1, 0])):
        other = variant.problem
        found = forward(other.spec, variant.inputs, other.table, other.candidates)
        heads = variant.heads if len(variant.heads) else np.arange(8)
        np.testing.assert_allclose(found.out, right.out[variant.tokens][:, heads], rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(found.lse, right.lse[variant.tokens][:, heads], rtol=1e-13)


def test_gradients_are_compared_slot_by_slot_whatever_the_batch() -> None:
    found = measure(Launcher(Backend(Adapter()), "cpu"), parse("train/fp32/kv:40+21/q:2+1/lists:query_head"), 0, 2)
    assert len(found) == 12
    assert max(measurement.range_use for measurement in found) < 0.1  # of what an order of additions explains


# --- what must fail


@pytest.mark.parametrize(
    ("fault", "cell"), [(f, cell) for f in FAULTS for cell in f.cells], ids=lambda x: getattr(x, "name", x)
)
def test_a_wrong_list_is_caught_and_the_query_head_is_named(fault: ModelFault, cell: str) -> None:
    assert judged(Adapter(), cell).verdict is Verdict.PASS
    record = judged(seed(fault)(), cell)
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert str(record.finding.gate) in fault.gates
    assert re.search(fault.place, record.sentence), record.sentence


class Listing(Adapter):
    """The model with the lists that it makes of raw ones: of each row, or of the first row of its KV head."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first = first

    def normalize(self, case: Case) -> Normalized:
        step = case.spec.lists_per_kv_head if self.first else 1
        raw = [case.kv_indices[a:b] for a, b in pairwise(case.kv_indptr.tolist())]
        rows = [torch.unique(raw[i // step * step]) for i in range(len(raw))]
        rows = [entries[entries >= 0] for entries in rows]
        indptr = torch.tensor([0, *map(len, rows)]).cumsum(0)
        return Normalized(indptr, torch.cat(rows))


def test_the_index_gate_names_the_query_head_whose_list_is_another_ones() -> None:
    cell = "index/bf16/kv:90+40/q:2+2/pattern:duplicates/lists:query_head"
    assert judged(Listing(), cell).verdict is Verdict.PASS
    record = judged(Listing(first=True), cell)
    assert record.finding is not None
    assert record.finding.gate is Gate.INDEX
    assert re.match(r"row \(request 0, query 0, query head 1\)", record.sentence), record.sentence


class Unmasked(Adapter):
    """Keys of the whole group weigh nothing, yet their values are multiplied by it: legal where they are finite."""

    def run(self, case: Case, plan: Any = None) -> Any:
        outputs = super().run(case)
        spec = case.spec
        for request, length in enumerate(spec.seq_lens):
            t = torch.arange(length)
            page = case.page_table[request, t // spec.page_size].long()
            values = case.v_cache[page, t % spec.page_size].float()
            for row in range(spec.num_rows):
                place = spec.row(row)
                if place.request == request:
                    group = row // spec.group_size * spec.group_size
                    start, stop = case.kv_indptr[group], case.kv_indptr[group + spec.group_size]
                    named = case.kv_indices[start:stop].unique().long()
                    token, head = divmod(row, spec.num_qo_heads)
                    case.out[token, head] += (0.0 * values[named[named >= 0], place.kv_head]).sum(0)
        return outputs


def test_a_kernel_may_load_what_other_query_heads_of_the_group_attend_and_nothing_else() -> None:
    """Poison stands where no query head of the group looks, so that values of the union stay finite."""
    cell = "decode/fp16/kv:60+40/heads:8-2/lists:query_head"
    assert judged(Unmasked(), cell).verdict is Verdict.PASS
    problem = build(parse(cell))
    rows = lists_of(problem)
    assert any(rows[0] - rows[1])


def placed(name: str, numbers: range) -> tuple[int, list[str]]:
    """Faults seeded, and the sentences of those that were not named right."""
    tried, wrong = 0, []
    for cell in PLACED:
        problem = build(parse(cell))
        for number in numbers:
            if seeded := PLACES[name](problem, Random(f"{cell} {number}")):
                backend, right = seeded
                found = locate(Launcher(Backend(backend), "cpu"), problem)
                assert found is not None
                tried += 1
                wrong += [] if right(found) else [f"{name} {cell} {number}: {found.finding.sentence}"]
    return tried, wrong


@pytest.mark.parametrize("name", IN_CI)
def test_a_fault_of_known_place_is_named_in_the_row_of_a_query_head(name: str) -> None:
    tried, wrong = placed(name, range(1))
    assert tried
    assert not wrong


@pytest.mark.skipif(not SEEDS, reason="set SACTS_LOCALISE=N for N seeds of each fault on each cell")
def test_the_campaign_names_95_percent() -> None:
    """But for the query of another head, which yields no other row where lists differ: its row is named, no more."""
    results = [placed(name, range(SEEDS)) for name in PLACES if name != "query_of_another_head"]
    tried, wrong = sum(n for n, _ in results), [words for _, each in results for words in each]
    print(f"\n{tried} faults, {len(wrong)} not named right")
    print("\n".join(wrong))
    assert len(wrong) <= 0.05 * tried


def test_the_edge_that_spoils_a_gradient_is_named_in_the_row_of_a_query_head() -> None:
    cells = "prefill/fp16/kv:90+45/q:7+4/dim:32/map:shared/causal:bottom_right", "decode/bf16/kv:300/heads:4-1/dim:32"
    tally, launches, wrong = campaign(range(max(1, SEEDS)), [f"{cell}/lists:query_head" for cell in cells])
    assert not wrong
    assert tally["named"] > 3 * tally["within the bounds of the random copy"]
    assert max(launches) <= 20
