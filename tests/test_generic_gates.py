"""Gates B, C and D in `sacts run`: each sees a seeded fault that no other gate sees; ties and shifts they leave."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from sacts.conformance import sample
from sacts.conformance.adapter import Backend, Case, Outputs
from sacts.conformance.build import build
from sacts.conformance.gates import generic
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.localise.locate import locate
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test import faults
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices.axes import VALUES
from sacts.matrices.cell import parse
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType
from sacts.reports.records import Gate, Record, Verdict, decode, encode

FAULTS = faults.drawn_catalogue()
LOST = 77


def judged(adapter: object, cell: str) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell))


@cache
def faulty(name: str) -> Record:
    module = importlib.import_module(f"{faults.patched(FAULTS[name], 'emulation')}.adapter")
    return judged(module.Adapter(), FAULTS[name].problem)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_at_the_one_gate_that_is_sharp_enough(name: str) -> None:
    record, (gate,) = faulty(name), FAULTS[name].outputs
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate == gate
    assert {each for each, use in record.use.items() if use > 1} == {gate}
    assert set(generic.GATES) | {Gate.OUT, Gate.LSE} <= set(record.use)
    assert "fail" not in {record.gates[each] for each in Gate if each != gate}
    assert judged(Adapter(), FAULTS[name].problem).verdict is Verdict.PASS


def test_what_they_say_names_the_element_and_the_gain() -> None:
    assert re.search(
        r"channel 63: out \S+, allowed \S+ to \S+ where the errors of different candidates are independent",
        faulty("last_channel_of_v_saturates").sentence,
    )
    assert "a gain in 128 output rows, more than rounding explains" in faulty("p_truncated").sentence


def test_the_candidate_that_is_named_is_one_that_was_spoilt() -> None:
    record = faulty("long_row_of_v_halved")
    problem = build(parse(record.cell))
    found = re.search(r"KV head (\d)\).*out holds less of token (\d+) \(logical page \d+\)", record.sentence)
    assert found is not None
    head, token = int(found[1]), int(found[2])
    page, offset = divmod(token, problem.spec.page_size)
    live = np.searchsorted(problem.pages, problem.table.table[0, page])
    assert np.linalg.norm(RANDOM.inputs(problem).v.data[live, offset, head]) > 10.4


def test_a_lost_candidate_beyond_the_sharp_bound_is_named_with_it() -> None:
    """One key of 600 whose V counts for less, in the random copy only."""

    class Losing(Adapter):
        def run(self, case: Case, plan: object = None) -> Outputs:
            page = case.page_table[0, LOST // 16].long()
            if case.q[0].any():
                v = case.v_cache.clone()
                v[page, LOST % 16, 1] *= 0.4
                case = replace(case, v_cache=v)
            return super().run(case, plan)

    record = judged(Losing(), "decode/bf16/kv:600/pattern:all")
    assert record.finding is not None
    assert record.finding.gate in (Gate.SHARP, Gate.CANDIDATE)
    assert f"out holds less of token {LOST} " in record.sentence


@pytest.mark.parametrize("values", VALUES)
def test_only_independent_inputs_are_held_to_independent_errors(values: str) -> None:
    suffix = "" if values == "gaussian" else f"/values:{values}"
    suffix += "/kcodec:int8" if values == "scale_edges" else ""
    record = judged(Adapter(), f"decode/bf16/kv:100{suffix}")
    applies = values in ("gaussian", "huge")
    assert [record.gates[gate] == "pass" for gate in generic.GATES] == [applies] * 3
    assert [gate in record.use for gate in generic.GATES] == [applies] * 3


def test_rows_without_an_edge_leave_nothing_to_hold() -> None:
    record = judged(Adapter(), "decode/fp16/kv:40+21/pattern:empty")
    assert [record.gates[gate] for gate in generic.GATES] == ["not applicable"] * 3


def test_a_sample_is_in_the_record_and_survives_its_line() -> None:
    cell = "prefill/bf16/kv:300/q:32/pattern:all"
    record = judged(Adapter(), cell)
    chosen = record.samples["candidate"]
    assert chosen.of == 64
    assert {0, 1, 62, 63} <= set(chosen.rows)
    assert len(chosen.rows) < 64
    cost = 2 * 300 * 64**2 * len(chosen.rows)
    assert cost <= generic.FILTER_WORK < cost + 2 * 300 * 64**2
    assert decode(encode(record)) == record
    assert judged(Adapter(), cell).samples == record.samples


def test_a_sample_takes_what_tells_most_first() -> None:
    problem = build(parse("prefill/bf16/kv:70+9+40/q:7+0+5/pattern:all/causal:bottom_right"))
    lengths = sample.row_lengths(problem)
    order = sample.by_priority(problem, lengths)
    assert sorted(order) == list(range(problem.spec.num_rows))
    assert order[:2].tolist() == [0, 23]
    assert lengths[order[:4]].max() == lengths.max()
    assert lengths[order[:4]].min() == lengths.min()
    assert {12, 13, 22, 23, 0, 1, 14, 15} <= set(order[:8].tolist())
    boundary = {int(k) for k in lengths if (k + 1) % 16 <= 2 or (k + 1) % 64 <= 2}
    assert boundary <= {int(lengths[row]) for row in order[: 8 + len(boundary)]}
    cost = np.full(len(lengths), 10)
    assert sample.affordable(order, cost, 65).tolist() == sorted(order[:6].tolist())
    assert len(sample.affordable(order, cost, 0)) == sample.ALWAYS


def test_some_rows_have_the_bounds_that_they_have_among_all() -> None:
    problem = build(parse("prefill/bf16/kv:40+9/q:12+3/causal:bottom_right"))
    numerics = Numerics.default(DType.BF16)
    whole = generic.bounds(problem, RANDOM.inputs(problem), numerics)
    some = generic.bounds(problem, RANDOM.inputs(problem), numerics, np.array([3, 8]))
    assert whole is not None
    assert some is not None
    by_place = {(row.token, row.head): row for row in whole.rows}
    assert {row.token * 2 + row.head // 2 for row in some.rows} == {3, 8}
    for row in some.rows:
        right = by_place[row.token, row.head]
        np.testing.assert_array_equal(row.half_width, right.half_width)
        assert row.lse_bound == right.lse_bound


def test_the_cheap_filter_of_a_gain_is_the_last_of_all_filters() -> None:
    problem = build(parse("decode/bf16/kv:90"))
    bounds = generic.bounds(problem, RANDOM.inputs(problem), Numerics(p=DType.BF16, out=DType.BF16, l_sums_cast_p=True))
    assert bounds is not None
    for row in bounds.rows:
        out = row.out * 1.01 + 0.003
        for one, all_ in zip(row.gained(out), row.filtered(out), strict=True):
            np.testing.assert_allclose(one, all_[-1:], rtol=1e-9)


@pytest.mark.parametrize("name", FAULTS)
def test_locate_says_what_the_drawn_rows_say(name: str) -> None:
    module = importlib.import_module(f"{faults.patched(FAULTS[name], 'emulation')}.adapter")
    found = locate(Launcher(Backend(module.Adapter()), "cpu"), build(parse(FAULTS[name].problem)))
    assert found is not None
    assert found.finding.gate == FAULTS[name].outputs[0]
    assert found.finding.use is not None
    assert found.finding.use > 1
