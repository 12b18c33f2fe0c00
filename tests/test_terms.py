"""Cells with terms beyond the plain row: their specs and lists are what the axes say, a right kernel passes them with
probes that could have failed, and a wrong term is found.

`SACTS_TERMS=30 pytest tests/test_terms.py -k right_kernel -rP` is the campaign: every arithmetic on every cell.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sacts.conformance import conventions
from sacts.conformance.adapter import PADDING, Backend, Capabilities, Case, Consumes, IndexSpace, Outputs
from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes import applicability, margins
from sacts.conformance.probes.copies import copies
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.faults import model_catalogue, seed
from sacts.matrices import tiers
from sacts.matrices.axes import AXES
from sacts.matrices.cell import CellError, parse
from sacts.matrices.constraints import CONSTRAINTS
from sacts.reference.forward import forward
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, DType
from sacts.reports.records import PROVES, Gate, Verdict

TERMS = [cell.id for cell in tiers.load(tiers.path_of("terms"))]
NEW = ("pos", "cap", "sink", "dropout", "kind", "empty", "epilogue")
REPLICATES = int(os.environ.get("SACTS_TERMS", "0"))  # of every arithmetic on every cell; 0: one each in turn
ARITHMETICS: tuple[dict[str, Any], ...] = (
    {},
    {"splits": 3, "tile": 16, "order": 5},
    {"fraction_bits": 25, "tile": 32},
    {"p": DType.FP32, "tile": 16},
    {"exp2": "truncated", "lag": 8, "tile": 16},
    {"splits": 2, "merge_outputs": True, "tile": 32},
)


def emulation(dtype: str, changes: dict[str, Any]) -> Adapter:
    return Adapter({DType(dtype): Arithmetic(**{"p": DType(dtype), "out": DType(dtype)} | changes)})


# --- axes and constraints


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis.name in NEW], ids=lambda axis: axis.name)
def test_the_tier_holds_each_value_of_each_new_axis_and_each_has_a_clause(axis: Any) -> None:
    seen = {getattr(parse(cell), axis.name) for cell in TERMS}
    assert len(seen) > 1
    assert axis.values is None or seen == set(axis.values)
    assert axis.clause.startswith("DESIGN section 4")


EXCLUDED = {
    "decode/fp16/kv:40/block:16/kind:multiset": "kind:multiset and block:16",
    "decode/fp16/kv:40/pattern:duplicates/kind:sequence": "kind:sequence and pattern:duplicates",
    "decode/fp16/kv:40/pattern:union/kind:sequence": "kind:sequence and pattern:union",
    "prefill/fp16/kv:3/q:4/empty:force_self": "empty:force_self and kv:3 and q:4",
    "decode/fp16/kv:40+0/empty:force_sink_token": "empty:force_sink_token and kv:40+0",
    "decode/fp16/kv:40/dim:65/pos:rope": "pos:rope and dim:65",
    "decode/fp16/kv:40/dim:66/pos:rope-interleaved": "pos:rope-interleaved and dim:66",
    "decode/fp16/kv:40/values:equal/pos:rope": "pos:rope and values:equal",
    "decode/fp16/kv:40/values:shifted/cap:30": "cap:30 and values:shifted",
    "decode/fp16/kv:40/values:shifted/sink:on": "sink:on and values:shifted",
}


@pytest.mark.parametrize("text", EXCLUDED)
def test_values_that_exclude_each_other_are_both_named(text: str) -> None:
    with pytest.raises(CellError, match=f"{EXCLUDED[text].replace('+', '.')} exclude each other: "):
        parse(text)


def test_constraints_have_names_of_their_own_and_tie_axes_that_exist() -> None:
    names = [constraint.name for constraint in CONSTRAINTS]
    assert len(set(names)) == len(names)
    assert {name for constraint in CONSTRAINTS for name in constraint.axes} <= {axis.name for axis in AXES}


def test_percent_of_dropout_ends_at_99() -> None:
    with pytest.raises(CellError, match="axis dropout takes integers from 0 to 99, got 100"):
        parse("decode/fp16/kv:40/dropout:100")


# --- specs and lists


def lists(cell: str) -> list[list[int]]:
    raw = build(parse(cell)).raw
    return [[x for x in raw.indices[a:b].tolist() if x != PADDING] for a, b in pairwise(raw.indptr)]


def test_a_multiset_repeats_every_third_entry_and_its_counts_reach_both_kinds_of_consumer() -> None:
    cell = "decode/bf16/kv:60+31/kind:multiset"
    plain, problem = lists("decode/bf16/kv:60+31"), build(parse(cell))
    for row, entries in enumerate(lists(cell)):
        times = Counter(entries)
        assert sorted(times.values(), reverse=True)[: -(-len(times) // 3)] == [3] * -(-len(times) // 3)
        assert len(times) == len(plain[row])
        for how in (Capabilities(), Capabilities(index_space=IndexSpace.PHYSICAL)):
            given = conventions.lists_for(problem, how)
            mine = given.indices[given.indptr[row] : given.indptr[row + 1]]
            assert sorted(Counter(mine.tolist()).values()) == sorted(times.values())
    assert Capabilities().consumes is Consumes.VALIDATED


def test_a_sequence_keeps_an_order_that_is_not_ascending() -> None:
    problem = build(parse("decode/fp16/kv:64/pattern:all/pos:rope/kind:sequence"))
    assert problem.candidates.indices.tolist() == problem.raw.indices.tolist()
    assert (np.diff(problem.candidates.indices) < 0).any()


def test_terms_leave_pages_and_lists_of_a_set_as_their_own_id_draws_them() -> None:
    problem = build(parse("decode/fp32/kv:60/pattern:all/splits:2/tile:16/pos:rope/cap:30/sink:on/dropout:25"))
    spec = problem.spec
    assert (spec.logits_soft_cap, spec.dropout and spec.dropout.p) == (30.0, 0.25)
    assert spec.rope
    assert len(set(spec.sink_logits)) == spec.num_qo_heads
    assert spec.dropout
    assert spec.dropout.request_uids != tuple(range(spec.num_requests))


# --- probes


def cases() -> list[tuple[str, int, int]]:
    if not REPLICATES:
        return [(cell, n % len(ARITHMETICS), 0) for n, cell in enumerate(TERMS)]
    return [(cell, a, r) for r in range(REPLICATES) for a in range(len(ARITHMETICS)) for cell in TERMS]


@pytest.mark.parametrize(("cell", "arithmetic", "replicate"), cases())
def test_a_right_kernel_passes_and_its_probes_could_have_failed(cell: str, arithmetic: int, replicate: int) -> None:
    parsed = parse(cell)
    backend = Backend(emulation(parsed.dtype, ARITHMETICS[arithmetic]))
    record = judge(Launcher(backend, "cpu"), "emulation", parsed, replicate)
    use = {name: round(told.use, 3) for name, told in record.probes.items() if told.use}
    print(f"{record.verdict} {cell} {ARITHMETICS[arithmetic]} {use}")
    assert record.verdict is Verdict.PASS or (REPLICATES and record.verdict is Verdict.UNTRUSTED), record.sentence
    assert set(record.probes) == set(PROVES)


@pytest.mark.parametrize("cell", ["decode/bf16/kv:700+9+33", "prefill/bf16/kv:40+9/q:12+3/causal:bottom_right"])
def test_the_margin_of_weights_is_that_of_equal_weights_where_they_are_equal(cell: str) -> None:
    problem = build(parse(cell))
    count = copies(problem, Numerics.default(problem.spec.dtype))[1]
    general = margins.of_weights(problem, count.inputs, count.expected)
    assert len(general.out) == len(count.margin["count"])
    assert (general.out > 1).all() == (count.margin["count"] > 1).all()
    assert count.lse_margin is not None
    assert np.allclose(np.sort(general.lse), np.sort(count.lse_margin), rtol=1e-9)


@pytest.mark.parametrize(
    "cell", [c for c in TERMS if "pattern:all" in c and "block" not in c and "epilogue" not in c][:6]
)
def test_a_lost_candidate_moves_out_as_the_margin_says(cell: str) -> None:
    """Each key of one row is left out of its list in turn; out and lse move at least as far as the margin counts on."""
    problem = build(parse(cell))
    count = copies(problem, Numerics.default(problem.spec.dtype))[1]
    given, table = count.inputs, problem.table
    whole = forward(problem.spec, given, table, problem.candidates)
    needed = margins.noticed(count.expected, problem.spec.dtype)
    least = least_lse = np.inf
    start, stop = problem.candidates.indptr[-2:]
    sequence = problem.spec.candidate_kind == "sequence"
    for at in [stop - 1] if sequence else range(start, stop):
        kept = np.arange(len(problem.candidates.indices)) != at
        shorter = np.concatenate((problem.candidates.indptr[:-1], [stop - 1]))
        fewer = type(problem.candidates)(shorter, problem.candidates.indices[kept], problem.candidates.counts[kept], 0)
        without = forward(problem.spec, given, table, fewer)
        own = slice(-problem.spec.group_size, None)
        moved = np.abs(without.out - whole.out)[-1, own] / needed[-1, own]
        least = min(least, float(moved.max(axis=-1).min()))
        least_lse = min(least_lse, float((np.abs(without.lse - whole.lse) / count.expected.lse_bound)[-1, own].min()))
    assert least >= count.margin["count"].min() * (1 - 1e-6)
    assert count.lse_margin is not None
    assert least_lse >= count.lse_margin.min() * (1 - 1e-6)
    if not sequence:
        assert least == pytest.approx(count.margin["count"][own].min(), rel=0.5)
        assert least_lse == pytest.approx(count.lse_margin[own].min(), rel=1e-6)


def test_where_out_hides_a_lost_candidate_lse_decides_whether_the_case_could_have_failed() -> None:
    """The farthest keys weigh too little for out in fp16, and enough for lse."""

    class WithoutLse(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            return replace(super().run(case), lse=None)

    cell = parse("prefill/fp16/kv:96+40/q:17+1/heads:7-1/dim:80/page:128/pattern:all/tile:128/pos:alibi/vcodec:int4")
    verdicts = [judge(Launcher(Backend(each()), "cpu"), "x", cell).verdict for each in (Adapter, WithoutLse)]
    assert verdicts == [Verdict.PASS, Verdict.UNTRUSTED]


# --- faults

ROPE, CAP = "decode/bf16/kv:70+33/pos:rope", "decode/bf16/kv:60+21/pattern:all/cap:2"
ALIBI, BUCKETS = "decode/fp32/kv:60/pattern:all/pos:alibi", "decode/fp32/kv:90/pattern:all/pos:buckets"
FOUND = {
    "soft_cap_after_the_mask": (CAP, Gate.LSE, "the denominator counts"),
    "soft_cap_without_its_factor": (CAP, Gate.TERMS, "tanh were not scaled back by the soft cap"),
    "rope_ignores_the_query_position": (ROPE, Gate.TERMS, "RoPE turned queries as if they stood at position 0"),
    "rope_with_the_other_layout": (ROPE, Gate.TERMS, "RoPE turned interleaved pairs"),
    "rope_by_index_in_the_list": (ROPE, Gate.TERMS, "RoPE turned keys by their place in the raw list"),
    "alibi_vanishes": (ALIBI, Gate.TERMS, "there were no ALiBi bias"),
    "alibi_of_another_head": (ALIBI, Gate.TERMS, "ALiBi slopes were read by the place of the head in its group"),
    "bucket_one_early": (BUCKETS, Gate.TERMS, "each bucket began one position too late"),
    "sink_in_every_split": (
        "decode/fp32/kv:120/pattern:all/splits:4/tile:16/sink:on",
        Gate.TERMS,
        "the sink joined 3 times",
    ),
    "sink_in_another_base": ("decode/bf16/kv:50+20/sink:on", Gate.TERMS, "the sink were read in base 2"),
    "repeats_without_weight": ("decode/bf16/kv:60+31/kind:multiset", Gate.TERMS, "repeats had no weight"),
    "epilogue_before_the_division": ("decode/bf16/kv:50/pattern:all/epilogue:silu", Gate.OUT, "allowed"),
}


@pytest.mark.parametrize("fault", FOUND)
def test_a_wrong_term_is_found_by_a_cell_of_the_tier_and_named(fault: str) -> None:
    cell, gate, words = FOUND[fault]
    assert cell in TERMS
    record = judge(Launcher(Backend(seed(model_catalogue()[fault])()), "cpu"), fault, parse(cell))
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is gate, record.sentence
    assert words in record.sentence


class Losing:
    """The emulation over lists whose first entry was overwritten by the second."""

    def __init__(self) -> None:
        self._right = Adapter()
        self.capabilities = self._right.capabilities

    def run(self, case: Case, plan: object = None) -> Outputs:
        indices, start = case.kv_indices.clone(), case.kv_indptr[:-1].long()
        indices[start] = indices[start + 1]
        return self._right.run(replace(case, kv_indices=indices))


@pytest.mark.parametrize("cell", [ROPE, CAP, ALIBI, "decode/bf16/kv:50+20/sink:on"])
def test_a_lost_candidate_is_not_blamed_on_the_terms(cell: str) -> None:
    record = judge(Launcher(Backend(Losing()), "cpu"), "losing", parse(cell))
    assert record.finding is not None
    assert record.finding.gate is Gate.COUNT, record.sentence
    assert "missing token" in record.sentence


def test_without_terms_their_gate_is_not_applicable() -> None:
    assert (
        judge(Launcher(Backend(Adapter()), "cpu"), "x", parse("decode/fp32/kv:40")).gates[Gate.TERMS]
        == "not applicable"
    )
    assert judge(Launcher(Backend(Adapter()), "cpu"), "x", parse(CAP)).gates[Gate.TERMS] == "pass"


WITNESSES = {
    "decode/bf16/kv:70+33/pos:rope": {"select", "comb"},
    "decode/bf16/kv:50+20/sink:on": {"select", "comb"},
    CAP: {"comb"},
    "decode/fp32/kv:90+40/pattern:all/dropout:25": {"comb"},
    "decode/fp32/kv:120/pattern:all/tile:16/kind:sequence": {"select", "cliff", "stair", "comb"},
    "decode/bf16/kv:50/pattern:all/epilogue:silu": set(),
}


@pytest.mark.parametrize("cell", WITNESSES)
def test_a_witness_is_made_where_it_keeps_its_meaning_and_only_there(cell: str) -> None:
    record = judge(Launcher(Backend(Adapter()), "cpu"), "x", parse(cell))
    told = {name: record.probes[name].said for name in applicability.SURVIVES}
    assert {name for name, said in told.items() if said == "judged"} - {"dither"} == WITNESSES[cell]
    assert "untrusted" not in told.values()


@pytest.mark.parametrize("cell", [c for c in TERMS if "rope" in c and "cap" not in c and "dropout" not in c])
def test_select_gives_the_turned_key_all_the_mass(cell: str) -> None:
    """Keys and query turned here, pair by pair, by complex numbers."""
    problem = build(parse(cell))
    for copy in copies(problem, Numerics.default(problem.spec.dtype)):
        for head, lane in copy.witness.lanes.items() if copy.witness else ():
            if lane.probe != "select":
                continue
            assert copy.witness
            spec, row = copy.problem.spec, copy.witness.rows[lane.kv_head]
            k = copy.inputs.k.data[row.page, row.offset, lane.kv_head]
            sequence = spec.candidate_kind == "sequence"
            place = np.arange(len(row.t)) if sequence else row.t
            own = len(row.t) - (row.t[-1] == spec.token_position[-1]) if sequence else spec.token_position[-1]
            z = spec.sm_scale * np.array([turned_product(spec, copy.inputs.q[-1, head], own, key, at)
                                          for key, at in zip(k, place, strict=True)])  # fmt: skip
            w = np.exp(z - z.max())
            assert z.argmax() == lane.target
            assert w.sum() - 1 < 2.0**-24


def turned_product(spec: AttentionSpec, q: Any, at_q: int, k: Any, at_k: int) -> float:
    assert spec.rope
    n = spec.rope.rotary_dim
    half_split = spec.rope.layout == "half_split"
    total = float(q[n:] @ k[n:])
    for i in range(n // 2):
        a, b = (i, i + n // 2) if half_split else (2 * i, 2 * i + 1)
        angle = (at_q - at_k) * spec.rope.base ** (-2 * i / n)
        total += (complex(q[a], q[b]) * complex(k[a], -k[b]) * complex(np.cos(angle), np.sin(angle))).real
    return total


def test_no_probe_is_said_to_survive_a_term_that_does_not_exist() -> None:
    known = {"rope", "logits_soft_cap", "alibi", "buckets", "sink_logits", "dropout", "k_codec", "v_codec", "multiset"}
    known |= {"sequence", "empty_row", "epilogue", "query_head_lists"}
    assert set().union(*applicability.SURVIVES.values()) <= known
    for cell in TERMS:
        assert applicability.terms_of(build(parse(cell)).spec)


def test_the_table_of_the_documentation_is_the_table_of_the_code() -> None:
    text = (Path(__file__).parent.parent / "docs" / "adapters.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ((?:`\w+`(?:, )?)+)", text, flags=re.MULTILINE))
    told = {name: set(re.findall(r"\w+", terms)) for names, terms in rows.items() for name in re.findall(r"\w+", names)}
    assert {name: told[name] for name in applicability.SURVIVES} == applicability.SURVIVES
