"""The bench: times and percentiles on a fake clock, records, floors, isolation, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from sacts.conformance.bench import floors, records, timing
from sacts.conformance.bench.ceilings import Ceilings
from sacts.conformance.bench.child import Order
from sacts.conformance.bench.process import Process
from sacts.conformance.bench.records import Row, too_good
from sacts.conformance.bench.scenarios import FLOORS, SCENARIOS, Against, Bound
from sacts.conformance.bench.timing import Times
from sacts.conformance.cli import app
from sacts.kernels_under_test.peers import PEERS
from sacts.reports.records import EXIT_FAILURES, EXIT_USAGE, RecordError, Verdict

# --- times


class FakeClock:
    """Each run takes what `ms` says of the number of runs before it."""

    warm_ups, least, most = 100, 20, 1000

    def __init__(self, ms: Callable[[int], float]) -> None:
        self._ms, self.runs = ms, 0

    def events(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        found = []
        for run in runs:
            run()
            found.append(self._ms(self.runs))
            self.runs += 1
        return found


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 2, 20, 99, 1000])
def test_percentiles_are_values_that_were_measured(share: float, count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count)
    expected = np.quantile(values, share, method="inverted_cdf")
    assert timing.percentile(values.tolist(), share) == expected


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no times"):
        timing.percentile([], 0.5)


def test_short_runs_have_a_hundred_warm_ups_and_a_thousand_events_in_turn() -> None:
    seen: list[int] = []
    clock = FakeClock(lambda n: 0.5 if n < 104 else 0.2 + 0.001 * (n - 104))
    times = timing.measure([lambda i=i: seen.append(i) for i in range(4)], clock, seconds=0.001)
    assert (times.warm_ups, times.events) == (100, 1000)
    assert seen == [n % 4 for n in range(1104)]
    assert (times.median, times.p95, times.p99) == pytest.approx((0.2 + 0.499, 0.2 + 0.949, 0.2 + 0.989))


@pytest.mark.parametrize(("ms", "seconds", "events", "warm_ups"), [(10, 1, 100, 100), (50, 1, 20, 20), (500, 1, 20, 3)])
def test_long_runs_take_the_time_that_there_is_and_say_so(
    ms: float, seconds: float, events: int, warm_ups: int
) -> None:
    times = timing.measure([lambda: None] * 3, FakeClock(lambda n: ms), seconds)
    assert (times.events, times.warm_ups, times.median) == (events, warm_ups, ms)


def test_a_replay_of_several_calls_is_divided_by_their_number() -> None:
    times = timing.measure([lambda: None], FakeClock(lambda n: 0.6), 1.0, per_run=12)
    assert times.median == pytest.approx(0.05)
    assert times.warm_ups == 9 * 12


def test_a_plan_is_timed_until_the_device_is_done() -> None:
    done: list[str] = []
    timing.plan_ms(lambda: done.append("plan"), lambda: done.append("wait"))
    assert done == ["wait", *["plan", "wait"] * timing.PLANS]


# --- rows


def row(scenario: str, adapter: str, ms: float, *, replayed: float | None = None, work: float = 1e9) -> Row:
    times = [None if each is None else Times(each, each, each, 1000, 100) for each in (ms, replayed)]
    return Row(
        scenario=scenario,
        adapter=adapter,
        device="cuda",
        verdict=Verdict.PASS,
        work=work,
        eager=times[0],
        replayed=times[1],
        ceilings=Ceilings(4e12, 3.8e12, 7e14),
        bound=SCENARIOS[scenario].bound,
    )


def test_too_good_to_be_true_is_a_finding() -> None:
    assert too_good(row("decode-pages", "triton", 0.25)) == ""
    assert "5000 GB/s where the ceiling is 4000 GB/s" in too_good(row("decode-pages", "triton", 0.2))
    assert "4e+04 GB/s" in too_good(row("decode-pages", "triton", 0.26, replayed=0.025))
    assert too_good(row("prefill-16k", "triton", 1, work=6e11)) == ""
    assert "where the ceiling is 700 TFLOP/s" in too_good(row("prefill-16k", "triton", 1, work=8e11))


def test_loads_are_a_share_of_what_the_l2_delivers() -> None:
    fields = {"loaded": 3e9, "ceilings": Ceilings(4e12, 4e12, 7e14, l2=6e12)}
    found = msgspec.structs.replace(row("prefill-per-token", "triton", 1.0, work=7e10), **fields)
    assert found.l2_share == pytest.approx(0.5)
    assert records.cells(found)[8] == "10.0 %, L2 50.0 %"
    assert row("prefill-per-token", "triton", 1.0).l2_share == 0


def test_the_l2_kernel_reads_every_byte_that_is_counted() -> None:
    code = "from sacts.conformance.bench.l2 import reading; read, size = reading('cpu'); print(size, read().tolist())"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    blocks, programs, rounds = 4, 3, 5
    sums = [4096 * sum((program + turn * programs) % blocks for turn in range(rounds)) for program in range(programs)]
    assert done.stdout.strip() == f"{programs * rounds * 4096 * 4} {sums}"


def test_rows_survive_their_file(tmp_path: Path) -> None:
    rows = [row("decode-pages", "triton", 0.3, replayed=0.28), row("prefill-16k", "a|b.py", 1.5)]
    records.write(tmp_path, rows, ["# Bench"])
    assert records.read(tmp_path / "bench.jsonl") == rows
    table = (tmp_path / "bench.md").read_text()
    assert "| decode-pages | triton | 0.3 | 0.3 | 0.3 | 0.28 |  | 3571 GB/s | 89.3 % |  | pass |" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.jsonl", "bench.md"]


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"schema": 9, "scenario": "a", "adapter": "b"}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    good = records.encode(row("decode-pages", "triton", 0.3)).decode()
    (tmp_path / "bench.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(RecordError, match=r"bench\.jsonl line 2"):
        records.read(tmp_path / "bench.jsonl")


def test_a_row_of_another_schema_is_refused() -> None:
    fields = json.loads(records.encode(row("decode-pages", "triton", 0.3)))
    with pytest.raises(RecordError, match="bench schema 9, this suite reads 1"):
        records.decode(json.dumps({**fields, "schema": 9}))


# --- floors


def ratio_of(scenario: str, other: str, *rows: Row) -> float | None:
    return next(
        each.ratio
        for each in floors.held(rows, "triton")
        if each.floor.scenario == scenario and each.floor.other == other
    )


def test_every_floor_names_a_scenario_and_what_it_compares_with() -> None:
    for floor in FLOORS:
        assert floor.scenario in SCENARIOS
        names = {Against.COPY: [""], Against.PEER: list(PEERS), Against.SCENARIO: list(SCENARIOS)}[floor.against]
        assert floor.other in names
    assert {floor.other for floor in FLOORS if floor.against is Against.PEER} <= PEERS.keys()


def test_floors_compare_the_better_of_eager_and_replayed() -> None:
    ours, theirs = row("decode-pages", "triton", 0.5, replayed=0.25), row("decode-pages", "flashinfer", 0.2)
    assert ratio_of("decode-pages", "", ours) == 1.0
    assert ratio_of("decode-pages", "flashinfer", ours, theirs) == pytest.approx(0.8)


def test_the_best_kernel_of_a_peer_counts() -> None:
    peers = [row("decode-pages", "flashinfer", 0.3), row("decode-pages", "flashinfer-tensor-cores", 0.2)]
    assert ratio_of("decode-pages", "flashinfer", row("decode-pages", "triton", 0.25), *peers) == pytest.approx(0.8)


def test_batch_one_must_hold_eager_and_replayed() -> None:
    ours, theirs = (
        row("decode-one", "triton", 0.04, replayed=0.01),
        row("decode-one", "flashinfer", 0.02, replayed=0.01),
    )
    (found,) = (each for each in floors.held([ours, theirs], "triton") if each.floor.replays)
    assert (found.ratio, found.missed) == (0.5, True)
    assert "MISSED, 0.5x" in found.words


def test_codes_are_compared_by_time() -> None:
    rows = [row("decode-pages", "triton", 0.32, work=2e9), row("decode-int8-page", "triton", 0.2, work=1e9)]
    assert ratio_of("decode-int8-page", "decode-pages", *rows) == pytest.approx(1.6)


def test_a_failed_row_holds_no_floor() -> None:
    wrong = records.decode(records.encode(row("decode-pages", "triton", 0.25)).replace(b'"pass"', b'"fail"'))
    assert [each.ratio for each in floors.held([wrong], "triton")] == [None, None]
    assert floors.held([row("prefill-16k-paged", "triton", 1)], "triton") == []


# --- isolation

CRASHING = """
import ctypes
from sacts.kernels_under_test.peers.gathered import Adapter as Right

class Adapter(Right):
    def run(self, case, plan=None):
        if case.spec.block_size == 1:
            ctypes.string_at(1)
        return super().run(case, plan)
"""


def test_a_crash_costs_one_row(tmp_path: Path) -> None:
    adapter = tmp_path / "crashing.py"
    adapter.write_text(CRASHING)
    names = ["decode-pages", "decode-tokens", "decode-blocks"]
    with Process(str(adapter), "cpu", 60) as process:
        rows = [process.row(Order(name, tiny=True, seconds=0.01)) for name in names]
    assert [each.verdict for each in rows] == [Verdict.PASS, Verdict.CRASH, Verdict.PASS]
    assert rows[1].scenario == "decode-tokens"
    assert rows[1].sentence.startswith("the process ended with SIGSEGV; it was at ")


def test_what_takes_too_long_is_killed() -> None:
    with Process("sdpa", "cpu", 0.1) as process:
        lost = process.row(Order("decode-pages", tiny=True))
    assert (lost.verdict, lost.sentence) == (Verdict.TIMEOUT, "no row within 0.1 s")


# --- command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-s", "decode-page", "-d", "cpu"], "no scenario 'decode-page'; did you mean 'decode-pages'?"),
        (["-s", "x*", "-d", "cpu"], "no scenario 'x*'"),
        (["--peer", "flash", "-d", "cpu"], "no peer 'flash'; there are flashinfer"),
        (["-a", "tritn", "-d", "cpu"], "no adapter 'tritn'; did you mean 'triton'?"),
        (["-d", "cpu"], "on cpu only --tiny sizes can be timed"),
        (["-d", "gpu"], "device 'gpu' is not usable here"),
        (["--hint", "splits", "-d", "cpu"], "--hint takes NAME=VALUE, got 'splits'"),
        (["--hint", "splits=2", "-d", "cpu"], "no hint 'splits'; there are num_splits"),
        (["--hint", "schedule=best", "-d", "cpu"], "'best' is not a valid Schedule"),
        (["--hint", "num_splits=-1", "-d", "cpu"], "hint num_splits must be at least 1, or 0 for any, got -1"),
    ],
)
def test_bad_usage_exits_2_and_says_what_is_valid(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments, "--report", str(tmp_path / "report")])
    assert done.exit_code == EXIT_USAGE
    assert words in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_list_names_scenarios_floors_and_peers() -> None:
    done = CliRunner().invoke(app, ["bench", "--list"])
    assert done.exit_code == 0
    for words in (*SCENARIOS, *PEERS, "floor: >= 0.85x copy"):
        assert words in done.stdout


def test_a_wrong_backend_fails_the_command_and_a_missing_peer_does_not(tmp_path: Path) -> None:
    adapter = tmp_path / "wrong.py"
    adapter.write_text(CRASHING.replace("ctypes.string_at(1)", "case.kv_indices[-1] -= 1"))
    wanted = ["-a", str(adapter), "--peer", "flashinfer", "-s", "decode-tokens", "-s", "decode-pages"]
    done = CliRunner().invoke(app, ["bench", *wanted, "--tiny", "-d", "cpu", "--report", str(tmp_path / "report")])
    assert done.exit_code == EXIT_FAILURES
    rows = records.read(tmp_path / "report" / "bench.jsonl")
    assert [each.verdict for each in rows] == [Verdict.FAIL, Verdict.PASS, Verdict.NOT_RUN]
    assert rows[0].bound is Bound.BYTES


def test_the_bundled_kernel_runs_tiny_and_is_right(tmp_path: Path) -> None:
    wanted = ["-s", "decode-pages", "--tiny", "-d", "cpu", "--report", str(tmp_path / "report")]
    done = CliRunner().invoke(app, ["bench", *wanted])
    assert done.exit_code == 0, done.stderr
    (only,) = records.read(tmp_path / "report" / "bench.jsonl")
    assert (only.adapter, only.path, only.verdict) == ("triton", "native", Verdict.PASS)
    assert only.plan is not None and only.ceilings is not None
