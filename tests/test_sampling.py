"""Long shapes: a sample of rows is judged exactly, all others are held to invariants, and the record says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from test_false_alarms import ARITHMETICS, backend_of

from sacts.conformance import sample
from sacts.conformance.adapter import Backend, Case, Outputs
from sacts.conformance.build import build
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.copies import copies
from sacts.conformance.probes.inputs import COUNT, RANDOM, Probe
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices import tiers
from sacts.matrices.cell import parse
from sacts.reference.bounds import Expected
from sacts.reference.forward import forward
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType
from sacts.reports import html
from sacts.reports.records import Gate, Record, Verdict

CELL = "prefill/bf16/kv:90+40/q:20+9/dim:32/pattern:all/causal:bottom_right"
LIMIT = 1500


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "EXACT_EDGES", LIMIT)


def judged(adapter: object, cell: str = CELL) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell))


def sampled() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    rows = sample.exact_rows(build(parse(CELL)))
    assert rows is not None
    return rows


def unsampled_token() -> int:
    """A token none of whose rows is in the sample."""
    return next(token for token in range(29) if not {2 * token, 2 * token + 1} & set(sampled().tolist()))


class Wrong(Adapter):
    """Wrong in one token of the cell's own requests, in copies with queries that are not 0, in the others, or both."""

    def __init__(self, token: int, spoil: Callable[[Outputs, int], object], copies: str = "random count") -> None:
        super().__init__()
        self.token, self.spoil, self.copies = token, spoil, copies

    def run(self, case: Case, plan: object = None) -> Outputs:
        outputs = super().run(case, plan)
        for start, name in ((0, "random"), (29, "count")):
            if name in self.copies and case.spec.num_tokens > start:
                self.spoil(outputs, start + self.token)
        return outputs


def test_the_sample_holds_the_ends_of_every_request_and_head_and_stays_within_its_limit() -> None:
    problem = build(parse(CELL))
    lengths, rows = sample.row_lengths(problem), sampled()
    assert {0, 1, 38, 39, 40, 41, 56, 57} <= set(rows.tolist())
    assert 2 * lengths[rows].sum() <= LIMIT
    assert len(rows) < len(lengths) / 2
    assert sample.exact_rows(problem, 10**6) is None


@pytest.mark.parametrize("probe", [RANDOM, COUNT])
def test_sampled_rows_are_judged_as_ever_and_the_others_contain_the_truth(probe: Probe) -> None:
    problem = build(parse(CELL))
    made = {next(iter(copy.judged)): copy for copy in copies(problem, Numerics.default(DType.BF16))}
    copy = made[probe.name]
    right = forward(problem.spec, copy.inputs, problem.table, problem.candidates)
    exact = np.zeros(problem.spec.num_rows, bool)
    exact[sampled()] = True
    exact = np.repeat(exact.reshape(29, 2), 2, axis=1)
    np.testing.assert_array_equal(copy.expected.out[exact], right.out[exact])
    np.testing.assert_array_equal(copy.expected.lse[exact], right.lse[exact])
    assert ((copy.expected.out_lo <= right.out) & (right.out <= copy.expected.out_hi))[~exact].all()
    assert (np.abs(copy.expected.lse - right.lse) <= copy.expected.lse_bound)[~exact].all()
    assert (copy.expected.edges > 0).all()
    narrow = copy.expected.lse_bound[~exact] < 1 / copy.expected.edges[~exact]
    assert narrow.all() == (probe is COUNT)
    assert len(copy.margin[probe.name]) == exact.sum()


def test_what_out_lies_between_is_the_least_and_the_largest_value_of_the_request() -> None:
    """By a loop over every key of request 1, its lists being whole."""
    problem = build(parse(CELL))
    copy = copies(problem, Numerics.default(DType.BF16))[0]
    pages = np.searchsorted(problem.pages, problem.table.table[1, :3])
    keys = [copy.inputs.v.data[pages[t // 16], t % 16, 1] for t in range(40)]
    token = next(token for token in range(20, 29) if 2 * token + 1 not in sampled())
    low, high = np.min(keys, axis=0), np.max(keys, axis=0)
    expected: Expected = copy.expected
    for mine, value, sign in ((expected.out_lo, low, -1), (expected.out_hi, high, 1)):
        past = sign * (mine[token, 2] - value)
        assert (past >= 0).all()
        assert (past <= 0.05 * np.abs(keys).max()).all()


@pytest.mark.parametrize("name", ARITHMETICS)
def test_a_right_kernel_stays_within_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "EXACT_EDGES", 40)
    launcher = Launcher(backend_of(name), "cpu")
    cells = tiers.load(tiers.path_of("smoke"))
    for cell in (*cells[2::9], parse(CELL)):
        record = judge(launcher, name, cell)
        assert record.verdict in (Verdict.PASS, Verdict.UNTRUSTED), (cell.id, record.sentence)


def test_the_record_says_how_many_rows_were_judged_exactly() -> None:
    record = judged(Adapter())
    assert record.verdict is Verdict.PASS
    assert record.samples["exact"].rows == sampled().tolist()
    assert record.samples["exact"].of == 58
    assert "exact" not in judged(Adapter(), "decode/bf16/kv:60").samples
    page = html.render([record], {}, lambda cell: {"pattern": "all", "dtype": "bf16"})
    assert f"exact: {len(sampled())} of 58 rows" in page


def bend(outputs: Outputs, token: int) -> None:
    outputs.out[token] *= 1.1


def test_a_small_fault_in_a_sampled_row_is_found_and_in_another_it_is_not_judged() -> None:
    token = int(sampled()[-3]) // 2
    record = judged(Wrong(token, bend, "random"))
    assert record.finding is not None
    assert record.finding.gate is Gate.OUT
    unseen = judged(Wrong(unsampled_token(), bend, "random"))
    assert unseen.verdict is Verdict.PASS
    assert not {2 * unsampled_token(), 2 * unsampled_token() + 1} & set(unseen.samples["exact"].rows)


def lose_one(outputs: Outputs, token: int) -> None:
    """lse of equal logits with one key less."""
    assert outputs.lse is not None
    outputs.lse[token, 1] = (outputs.lse[token, 1].exp() - 1).log()


INVARIANTS: dict[str, tuple[Callable[[Outputs, int], object], str, Gate]] = {
    "NaN": (lambda outputs, token: outputs.out[token, 0, 5].fill_(float("nan")), "random", Gate.OUT),
    "infinite lse": (lambda outputs, token: outputs.lse[token, 0].fill_(float("inf")), "random", Gate.LSE),
    "an empty row's lse": (lambda outputs, token: outputs.lse[token, 0].fill_(float("-inf")), "random", Gate.LSE),
    "a stale value": (lambda outputs, token: outputs.out[token, 0, 5].fill_(40.0), "random", Gate.OUT),
    "lse in base 2": (lambda outputs, token: outputs.lse[token, 0].mul_(1.4427), "count", Gate.LSE),
    "one key lost": (lose_one, "count", Gate.LSE),
}


@pytest.mark.parametrize("name", INVARIANTS)
def test_a_fault_in_a_row_outside_the_sample_is_found_by_an_invariant(name: str) -> None:
    spoil, where, gate = INVARIANTS[name]
    record = judged(Wrong(unsampled_token(), spoil, where))
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is gate
    assert f"(request 0, query {unsampled_token()}, KV head 0)" in record.finding.place
