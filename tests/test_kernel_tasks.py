"""The bundled kernels' task table against the reference's, plans and workspaces that do not fit, and equal bits of
schedules and routes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import launched_kernels
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacts.conformance.adapter import Backend, Case, Refused
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged import adapter as paged
from sacts.kernels_under_test.paged import branches, gather, kernels, merge
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.paged.tasks import Rows, Tasks, shuffled, tasks_of
from sacts.kernels_under_test.paged.workspace import needed_bytes
from sacts.matrices.cell import parse
from sacts.reference.costs import workspace_bytes
from sacts.reference.spec import Hints, Route, Schedule
from sacts.reference.tasks import TaskTable, from_tasks

# --- the table


def table_of(lengths: list[int], block_size: int, hints: Hints, tile: int) -> tuple[Tasks, list[list[int]]]:
    indptr = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    rows = Rows(indptr[:-1], indptr.diff(), block_size, torch.zeros(len(lengths), dtype=torch.int32))
    tasks = tasks_of(rows, hints.num_splits, tile, schedule=hints.schedule)
    assert tasks.table.dtype == torch.int32
    return tasks, tasks.table[:, :4].tolist()


def random_lengths(seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    return [int(n) for n in draw.integers(0, draw.choice([3, 20, 100], 12) + 1)]


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("block_size", [1, 4])
def test_tasks_cover_each_list_once_whatever_their_order(schedule: Schedule, block_size: int) -> None:
    for seed in range(20):
        lengths = random_lengths(seed)
        _, table = table_of(lengths, block_size, Hints(num_splits=seed % 5 + 1, schedule=schedule), 16)
        slots = np.cumsum([0, *lengths]) * block_size
        row, start, end, split = np.array(table).T
        whole = TaskTable(row, slots[row] + start, slots[row] + end, split, len(lengths))
        assert from_tasks(whole, np.arange(slots[-1])).indptr.tolist() == slots.tolist()
        assert sorted({int(r) for r in row}) == list(range(len(lengths)))


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_rows_are_cut_at_tiles_into_no_more_parts_than_they_have_tiles(splits: int) -> None:
    for seed in range(20):
        lengths = random_lengths(seed)
        tasks, table = table_of(lengths, 1, Hints(num_splits=splits), 16)
        parts = {row: [task for task in table if task[0] == row] for row in range(len(lengths))}
        for row, length in enumerate(lengths):
            tiles = -(-length // 16)
            assert len(parts[row]) <= max(1, min(splits, tiles))
            assert [split for _, _, _, split in parts[row]] == list(range(len(parts[row])))
            assert all(start % 16 == 0 for _, start, _, _ in parts[row])
            sizes = [-(-(end - start) // 16) for _, start, end, _ in parts[row]]
            assert max(sizes) == -(-tiles // splits)
            assert sizes[:-1] == sizes[:1] * (len(sizes) - 1)
        several = [row for row in parts if len(parts[row]) > 1]
        assert (tasks.split_rows.tolist(), tasks.parts.tolist()) == (several, [len(parts[row]) for row in several])
        assert tasks.longest == max(-(-length // 16) for length in lengths)


def test_the_cut_of_a_row_depends_on_no_other_row() -> None:
    hints = Hints(num_splits=3)
    alone = [table_of([length], 1, hints, 16)[1] for length in (70, 0, 200)]
    _, table = table_of([70, 0, 200], 1, hints, 16)
    assert [[[0, *task[1:]] for task in table if task[0] == row] for row in range(3)] == alone


def test_a_shuffled_order_is_made_of_the_number_of_tasks_alone() -> None:
    cpu = torch.device("cpu")
    for n in (0, 1, 2, 50, 5000):
        order = shuffled(n, cpu)
        assert order.sort().values.tolist() == list(range(n))
        torch.manual_seed(n)
        assert torch.equal(shuffled(n, cpu), order)
    fixed = (order == torch.arange(5000)).sum()
    neighbours = (order.diff().abs() == 1).sum()
    assert fixed < 10 and neighbours < 20
    hints = Hints(num_splits=2, schedule=Schedule.SHUFFLED)
    _, table = table_of([40] * 9, 1, hints, 16)
    _, static = table_of([40] * 9, 1, Hints(num_splits=2), 16)
    assert table != static and sorted(table) == static


# --- plans and workspaces that do not fit


def case_of(cell: str, hints: Hints | None = None) -> Case:
    problem, launcher = build(parse(cell)), Launcher(Backend(adapter := Adapter()), "cpu")
    case = launcher.case(problem, RANDOM.inputs(problem), hints or problem.hints)
    return replace(case, workspace=torch.empty(adapter.workspace_bytes(case), dtype=torch.uint8))


CELL = "decode/bf16/kv:40+21/splits:2/tile:32"
KERNELS = (
    (kernels, "attention_kernel"),
    (merge, "merge_kernel"),
    (gather, "gather_kernel"),
    (branches, "gated_sum_kernel"),
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cell": "decode/bf16/kv:40+21+33/splits:2/tile:32"}, r"rows: planned for 4, got 6"),
        ({"cell": "decode/bf16/kv:40+30/splits:2/tile:32"}, r"(kv_indices: planned for \d+, got \d+|spec.seq_lens)"),
        ({"more": 3}, r"entries of kv_indices: planned for \d+, got \d+"),
        ({"hints": {"num_splits": 4}}, r"hint num_splits: planned for 2, got 4"),
        ({"hints": {"kv_tile": 16}}, r"hint kv_tile: planned for 32, got 16"),
        ({"hints": {"schedule": Schedule.SHUFFLED}}, r"hint schedule: planned for static, got shuffled"),
        ({"hints": {"route": Route.GATHER}}, r"hint route: planned for direct, got gather"),
        ({"spec": {"window_left": 7}}, r"spec.window_left: planned for -1, got 7"),
    ],
)
def test_a_plan_of_another_case_is_refused_by_what_differs(change: dict[str, Any], words: str) -> None:
    adapter, case = Adapter(), case_of(CELL)
    plan = adapter.plan(case)
    other = case_of(change.get("cell", CELL))
    other = replace(other, hints=replace(other.hints, **change.get("hints", {})))
    other = replace(other, spec=replace(other.spec, **change.get("spec", {})))
    if "more" in change:
        longer = torch.nn.functional.pad(other.kv_indices, (0, change["more"]))
        other = replace(other, kv_indices=longer)
    with pytest.raises(Refused, match=f"the plan was made for another case: .*{words}"):
        adapter.run(other, plan)
    with pytest.raises(Refused, match="another case"):
        adapter.trace(other, plan)


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize(
    "cell",
    [
        "decode/bf16/kv:40+21",
        "decode/fp32/kv:150+9/heads:7-1/splits:3/tile:16",
        "prefill/fp16/kv:40+9/q:4+2/block:16/causal:bottom_right/splits:2/tile:16",
        "decode/bf16/kv:40+21/dim:80/pattern:empty/empty:force_self",
        "decode/bf16/kv:40+21/heads:8-2/pattern:one/window:5/empty:force_self/lists:query_head",
        "decode/bf16/kv:60+40/dim:80/pattern:all/kcodec:int4/vcodec:fp8_e4m3fn/scales:page_channel/zeros:on",
    ],
)
@pytest.mark.parametrize("interpreted", [False, True])
def test_the_workspace_is_what_the_reference_counts(
    monkeypatch: pytest.MonkeyPatch, cell: str, route: Route, interpreted: bool
) -> None:
    monkeypatch.setattr(paged, "INTERPRETED", interpreted)
    problem = build(parse(cell))
    case = case_of(cell, replace(problem.hints, route=route))
    spec = case.spec
    fp32_out = 4 * spec.num_tokens * spec.num_qo_heads * spec.head_dim_vo if interpreted else 0
    asked = Adapter().workspace_bytes(case)
    assert asked == workspace_bytes(spec, case.hints, len(case.kv_indices)) + fp32_out


class Operations(TorchDispatchMode):
    """The operations that torch performs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **kwargs or {})


class Unlaunched:
    """In place of a kernel."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Unlaunched:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.launches += 1


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(
    "cell",
    [
        "decode/bf16/kv:150+9/splits:2/tile:32",
        "prefill/bf16/kv:60+25/q:3+2/epilogue:gate/lists:query_head",
        "decode/fp32/kv:60+1/dim:80/pattern:all/pos:rope/dropout:25/kind:sequence",
        "decode/fp32/kv:60+40/cache:strided/kcodec:fp8_e5m2/vcodec:int8/scales:page_head",
        "decode/bf16/kv:90+40/splits:2/tile:16/epilogue:silu/branches:3",
    ],
)
def test_run_allocates_nothing_and_reads_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch, cell: str, route: Route, schedule: Schedule
) -> None:
    launched = [Unlaunched() for _ in KERNELS]
    for (module, name), stub in zip(KERNELS, launched, strict=True):
        monkeypatch.setattr(module, name, stub)
    adapter = Adapter()
    case = case_of(cell, replace(build(parse(cell)).hints, route=route, schedule=schedule))
    plan = adapter.plan(case)
    with Operations() as performed:
        adapter.run(case, plan)
    assert performed.names <= {"aten.slice", "aten.view", "aten.detach"}  # views
    gathers = route is not Route.DIRECT
    assert [stub.launches for stub in launched] == [1, int("splits" in cell), int(gathers), int("branches" in cell)]


class Recorder(Unlaunched):
    """In place of a kernel: keeps what it was launched with."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.given.append({"q": arguments[0], **named})


def test_a_run_of_the_same_case_repeats_its_launches_and_one_of_another_case_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "attention_kernel", recorder := Recorder())
    adapter, case = Adapter(), case_of("prefill/bf16/kv:60+25/q:3+2/epilogue:gate")
    assert case.gate is not None
    plan = adapter.plan(case)
    other = replace(case, q=case.q.clone(), gate=case.gate.clone())
    for each in (case, case, other, case):
        adapter.run(each, plan)
    assert [given["q"] is case.q for given in recorder.given] == [True, True, False, True]
    assert [given["gate_ptr"] is other.gate for given in recorder.given] == [False, False, True, False]
    assert adapter.counters()["native"] == 4
    launched = len(recorder.given)
    Adapter().run(case, plan)  # another adapter may launch another kernel
    Adapter().run(case, plan)
    assert len(recorder.given) == launched + 2


# --- what is launched

PACKED = "decode/fp32/kv:41+30/dim:80/kcodec:int4/vcodec:int4/scales:page_channel/zeros:on"
PACKED_BLOCKS = "decode/bf16/kv:32+9/heads:2-1/block:16/pattern:all/tile:16/kcodec:int4/vcodec:int4/scales:page"
CELLS = (
    "decode/bf16/kv:150+9+40/splits:3/tile:16",
    "prefill/fp16/kv:40+9/q:4+2/block:16/causal:bottom_right/splits:2/tile:16",
    "decode/bf16/kv:40+21/pattern:empty",
    "decode/bf16/kv:90+9/heads:8-2/splits:2/tile:32/epilogue:gate/lists:query_head",
    "decode/fp32/kv:60+40/pattern:all/kcodec:int4/vcodec:fp8_e4m3fn/scales:page/zeros:on",
    PACKED,
    PACKED_BLOCKS,
)


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, launched_kernels.__file__, *CELLS]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return {said["cell"]: said for said in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("cell", CELLS)
def test_schedules_and_routes_yield_the_same_bits(launched: dict[str, Any], cell: str) -> None:
    bits = launched[cell]["bits"]
    assert list(bits) == [
        "static direct",
        "shuffled direct",
        "persistent direct",
        "persistent gather",
        "persistent gather_heads",
    ]
    assert len(set(bits.values())) == 1, bits


def test_queries_of_a_tile_load_nothing_that_none_of_them_sees(launched: dict[str, Any]) -> None:
    assert launched["between_windows"]["found"] == [True, True]


def test_the_widest_window_hides_nothing_from_queries_before_the_first_key(launched: dict[str, Any]) -> None:
    assert launched["widest_window"]["found"] == [True, True]


def test_heads_that_lie_beyond_32_bits_are_gathered_from_where_they_lie(launched: dict[str, Any]) -> None:
    assert launched["far_heads"]["found"] == 1


def test_heads_of_a_list_get_the_same_from_one_program_and_from_several(launched: dict[str, Any]) -> None:
    assert launched["parts_of_heads"]["found"] == [5, True, [1, 3]]


def test_rows_that_see_no_key_are_zero_whatever_stands_in_v(launched: dict[str, Any]) -> None:
    assert launched["before_the_first_key"]["found"] == [True, True, 8]


def test_a_page_table_without_a_page_is_not_read(launched: dict[str, Any]) -> None:
    assert launched["without_pages"]["found"] == [True, True]


def test_tiles_that_are_copied_and_tiles_that_are_loaded_yield_the_same_bits(launched: dict[str, Any]) -> None:
    assert launched["copied_and_loaded"]["found"] == [[True, True, True]] * 4


@pytest.mark.parametrize("cell", [cell for cell in CELLS if "kcodec" not in cell])
def test_a_row_whose_keys_are_nan_is_nan_and_not_empty(launched: dict[str, Any], cell: str) -> None:
    assert launched[cell]["nans"] == [True, True]


@pytest.mark.parametrize("cell", [PACKED, PACKED_BLOCKS])
def test_however_two_codes_share_a_byte_the_bits_are_the_same(launched: dict[str, Any], cell: str) -> None:
    bits = launched[cell]["packings"]
    assert len(bits) == 12
    assert len(set(bits.values())) == 1, bits


@pytest.mark.parametrize("packed", ["dim", "token"])
def test_scratch_holds_the_bytes_that_two_tokens_share_for_each(packed: str) -> None:
    case = case_of("decode/bf16/kv:40+21/dim:80/kcodec:int4/vcodec:int8")
    codec = case.spec.k_codec
    assert codec is not None
    spec = replace(case.spec, k_codec=replace(codec, nibble_axis=packed))
    case = replace(case, spec=spec, hints=replace(case.hints, route=Route.GATHER))
    slots, k = len(case.kv_indices), 40 if packed == "dim" else 80
    asked = needed_bytes(case, fp32_out=False)
    assert asked == workspace_bytes(spec, case.hints, slots) == -(-slots * k // 16) * 16 + slots * 80


@pytest.mark.parametrize("cell", CELLS)
def test_the_exact_workspace_is_enough_and_one_byte_less_is_refused(launched: dict[str, Any], cell: str) -> None:
    for exact, larger, less in launched[cell]["sized"]:
        assert exact["broken"] is None and larger["broken"] is None
        assert exact["sum"] == larger["sum"]
        asked = exact["asked"]
        assert less == {
            "asked": asked,
            "refused": f"workspace: {asked} bytes needed, {asked - 1} given",
            "untouched": True,
        }
