"""The bench: what is timed is cold and right, figures are counted independently, and faults are seen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from bench_adapters import Edit, Exact, Once, OtherRotation, WithoutLse

from sacts.conformance.adapter import Backend, Capabilities, KVLayout
from sacts.conformance.bench import ceilings, child, inputs, scenarios
from sacts.conformance.bench.child import Order, Timer
from sacts.conformance.bench.records import Row
from sacts.conformance.bench.scenarios import SCENARIOS, Bound, Scenario, Sizes
from sacts.kernels_under_test.peers.needs import NUMERICS
from sacts.reference import costs
from sacts.reference.candidates import ValidatedCandidates
from sacts.reference.spec import Hints
from sacts.reports.records import Verdict

NAMES = list(SCENARIOS)
SLOW = ("prefill-16k", "prefill-32k", "prefill-32k-paged")  # twins of prefill-16k-paged; for other backends elsewhere


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings are not what these tests are about."""
    monkeypatch.setattr(ceilings, "measure", lambda device, clock: ceilings.Ceilings(1e9, 1e9, 1e12))


def timed(adapter: Any, name: str) -> Row:
    return Timer("mine", Backend(adapter), "cpu").row(Order(name, tiny=True, seconds=0.01))


def prepared(name: str, layout: KVLayout = KVLayout.NHD) -> inputs.Prepared:
    backend = Backend(Exact())
    backend.capabilities = Capabilities(kv_layout=layout)
    return inputs.prepare(SCENARIOS[name], True, "cpu", backend)


# --- judging


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW])
def test_an_exact_backend_passes_every_scenario(name: str) -> None:
    row = timed(Exact(), name)
    assert (row.verdict, row.sentence) == (Verdict.PASS, "")
    assert row.checked >= 3 * row.rotations - 3
    assert row.rotations >= 3


DROPS: dict[str, Edit] = {
    "one of the first row is dropped": lambda t, row: t[1:] if row == 0 else t,
    "one of the last row is doubled": lambda t, row: torch.cat((t, t[-1:])) if row == 5 else t,
    "one is replaced by its neighbour": lambda t, row: torch.cat((t[:-1], (t[-1:] + 1) % 96)) if row == 0 else t,
}


@pytest.mark.parametrize("fault", DROPS)
@pytest.mark.parametrize("name", ["decode-pages", "decode-tokens", "decode-int8-page", "decode-fp8-head"])
def test_a_wrong_candidate_is_seen(fault: str, name: str) -> None:
    row = timed(Exact(DROPS[fault]), name)
    assert row.verdict is Verdict.FAIL
    assert "eager, rotation 0, query token " in row.sentence


LONG = replace(
    SCENARIOS["decode-pages"], tiny=Sizes((8192,), (1,), (264,), 16, 16, num_qo_heads=4, num_kv_heads=2, head_dim=32)
)


@pytest.mark.parametrize("lost", [2111, 4223])
def test_one_candidate_of_4224_shows_in_the_output_alone(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    monkeypatch.setitem(SCENARIOS, "decode-pages", LONG)
    without: Edit = lambda t, row: torch.cat((t[:lost], t[lost + 1 :]))  # noqa: E731
    row = timed(WithoutLse(without), "decode-pages")
    assert (row.verdict, " out " in row.sentence) == (Verdict.FAIL, True)


def test_of_a_backend_that_promises_no_exact_weights_a_lost_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCENARIOS, "decode-pages", LONG)
    adapter = WithoutLse(lambda t, row: t[16:])
    adapter.capabilities = Capabilities(numerics=NUMERICS)
    row = timed(adapter, "decode-pages")
    assert (row.verdict, " out " in row.sentence) == (Verdict.FAIL, True)


def test_a_right_row_of_4224_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCENARIOS, "decode-pages", LONG)
    assert timed(WithoutLse(), "decode-pages").verdict is Verdict.PASS


def test_the_output_of_another_rotation_is_seen() -> None:
    assert timed(OtherRotation(), "decode-pages").verdict is Verdict.FAIL


def test_an_output_that_only_the_first_call_wrote_is_seen() -> None:
    row = timed(Once(), "decode-pages")
    assert row.verdict is Verdict.FAIL
    assert "nan" in row.sentence


def test_an_adapter_that_raises_costs_its_row_in_words() -> None:
    class Raising(Exact):
        def run(self, case: Any, plan: object = None) -> Any:
            raise RuntimeError("no such kernel\nand more")

    row = timed(Raising(), "decode-pages")
    assert (row.verdict, row.sentence) == (Verdict.ERROR, "RuntimeError: no such kernel")


# --- inputs


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_sorted_unique_and_as_long_as_the_scenario_says(name: str) -> None:
    scenario, sizes = SCENARIOS[name], SCENARIOS[name].tiny
    for case in prepared(name).cases:
        spec, indptr = case.spec, case.kv_indptr.tolist()
        rows = [case.kv_indices[a:b].tolist() for a, b in pairwise(indptr)]
        for index, entries in enumerate(rows):
            row = spec.row(index)
            last = spec.seq_lens[row.request] - 1
            if scenario.causal:
                last = spec.token_position[index // spec.num_kv_heads]
                assert last // spec.block_size in entries
            assert entries == sorted(set(entries))
            assert len(entries) == min(sizes.entries[row.request], last // spec.block_size + 1)
            assert entries[0] >= 0 and entries[-1] * spec.block_size <= last
        by_token = [rows[at : at + spec.num_kv_heads] for at in range(0, len(rows), spec.num_kv_heads)]
        assert all(len({*map(tuple, each)}) == 1 for each in by_token) or not scenario.shared
        assert all(each == by_token[at // sizes.query_block * sizes.query_block] for at, each in enumerate(by_token))


def test_lists_of_kv_heads_differ_where_each_has_its_own() -> None:
    case = prepared("decode-pages-head").cases[0]
    rows = case.kv_indices.view(-1, 2, 3)
    assert (rows[:, 0] != rows[:, 1]).any()


@pytest.mark.parametrize("name", NAMES)
def test_no_rotation_reads_what_another_reads(name: str) -> None:
    cases = prepared(name).cases
    for attribute in ("q", "kv_indices", "page_table", "out", "lse"):
        held = [getattr(case, attribute) for case in cases]
        assert len({each.data_ptr() for each in held}) == len(cases)
    for attribute in ("q", "page_table"):
        assert len({getattr(case, attribute).float().numpy().tobytes() for case in cases}) == len(cases)
    pages = [set(case.page_table.flatten().tolist()) for case in cases]
    uneven = len(set(cases[0].spec.seq_lens)) > 1  # stale columns name page 0
    assert uneven or all(not (a & b) for n, a in enumerate(pages) for b in pages[:n])


@pytest.mark.parametrize("name", NAMES)
def test_a_full_scenario_reads_four_times_the_l2_before_it_reads_anything_again(name: str) -> None:
    scenario = SCENARIOS[name]
    spec, sizes = scenario.spec(False), scenario.full
    rotations, copies = inputs.rotations_of(spec, sizes)
    item = 1 if scenario.codec else 2
    touched = sum(
        min(t, q * n * sizes.block_size) for t, q, n in zip(sizes.seq_lens, sizes.qo_lens, sizes.entries, strict=True)
    )
    moved = touched * sizes.num_kv_heads * sizes.head_dim * 2 * item
    assert moved == inputs.touched_bytes(spec, sizes)
    assert moved * (copies if copies > 1 else 1) >= 4 * 50e6
    assert copies in (1, rotations)


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("name", ["decode-pages", "decode-pages-head"])
def test_pages_lie_as_the_scenario_says_whatever_the_backend_calls_them(name: str, layout: KVLayout) -> None:
    case = prepared(name, layout).cases[0]
    cache = case.k_cache.transpose(1, 2) if layout is KVLayout.HND else case.k_cache
    _, token, head, dim = cache.stride()
    assert (head > token) is SCENARIOS[name].hnd
    assert dim == 1


def test_the_same_scenario_has_the_same_data_again() -> None:
    first, second = (prepared("decode-int8-page").cases[1] for _ in range(2))
    for name in ("q", "k_cache", "v_cache", "k_scales", "page_table", "kv_indices"):
        assert torch.equal(getattr(first, name), getattr(second, name))


# --- bytes and FLOPs


@pytest.mark.parametrize("name", NAMES)
def test_work_is_what_the_cost_model_counts_from_the_lists(name: str) -> None:
    made = prepared(name)
    case, spec = made.cases[0], made.spec
    indices = case.kv_indices.numpy().astype(np.int64)
    lists = ValidatedCandidates(case.kv_indptr.numpy().astype(np.int64), indices, np.ones(len(indices), np.int64), 0)
    counted = costs.work(spec, Hints(), lists)
    if made.scenario.causal:
        last = np.repeat(np.repeat(spec.token_position, spec.num_kv_heads), np.diff(lists.indptr))
        edges = int(np.clip(last + 1 - indices * spec.block_size, 0, spec.block_size).sum())
        assert made.cost.flops == 4 * edges * spec.head_dim_qk * spec.group_size
        return
    assert made.cost.flops == counted.flops
    codec = spec.k_codec
    pages = len(np.unique(indices[: int(lists.indptr[1])])) if codec else 0
    assert made.cost.kv_bytes - counted.kv <= 2 * 4 * pages * spec.num_requests * 2 * spec.head_dim_qk
    assert (made.cost.kv_bytes > counted.kv) is (codec is not None)
    assert inputs.work_of(made) == (made.cost.kv_bytes if made.scenario.bound is Bound.BYTES else made.cost.flops)


@pytest.mark.parametrize(
    ("name", "edges", "item"),
    [
        ("decode-pages", 64 * 8 * 264 * 16, 2),
        ("decode-blocks", 64 * 8 * 33 * 128, 2),
        ("decode-tokens", 64 * 8 * 2048, 2),
        ("decode-one", 8 * 264 * 16, 2),
        ("decode-ragged", 8 * 64 * (800 + 255 * 32), 2),
        ("decode-even", 8 * 64 * (800 + 255 * 32), 2),
    ],
)
def test_bytes_of_full_scenarios_by_hand(name: str, edges: int, item: int) -> None:
    scenario: Scenario = SCENARIOS[name]
    spec = scenario.spec(False)
    cost = inputs.cost_of(spec, edges, scenario.full)
    assert cost.kv_bytes == edges * 2 * 128 * item
    assert cost.flops == edges * 4 * 128 * 4
    draws = torch.Generator().manual_seed(1)
    assert inputs.draw_lists(spec, scenario.full, True, draws).attended == edges


def test_scales_are_counted_once_a_page() -> None:
    scenario = SCENARIOS["decode-int8-page-channel"]
    cost = inputs.cost_of(scenario.spec(False), 0, scenario.full)
    assert cost.kv_bytes == 64 * 264 * 8 * 128 * 4 * 2


# --- hints


def test_hints_replace_those_of_the_scenario() -> None:
    hinted = child.hinted(SCENARIOS["decode-one"], {"num_splits": 8, "schedule": "persistent"})
    assert (hinted.hints.num_splits, hinted.hints.schedule.value) == (8, "persistent")
    assert SCENARIOS["decode-one"].hints.num_splits == 0
    with pytest.raises(ValueError, match="no hint 'splits'; there are num_splits"):
        child.hinted(SCENARIOS["decode-one"], {"splits": 8})


def test_an_unknown_scenario_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'decode-pages'"):
        scenarios.named("decode-page")
