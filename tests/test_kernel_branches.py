"""Gated branches in the bundled kernels: against the FP64 reference and against each branch by itself, their plan and
workspace, and that a call without branches launches what it did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import branched_kernels
import compiled_kernels
import numpy as np
import pytest
import torch

from sacts.conformance.adapter import Backend, Case, Refused
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.rows import branches_of
from sacts.kernels_under_test.paged import adapter as paged
from sacts.kernels_under_test.paged import branches, gather, kernels, merge
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.paged.plan import plan_of
from sacts.kernels_under_test.paged.workspace import workspace_of
from sacts.matrices.cell import parse
from sacts.reference.costs import workspace_bytes
from sacts.reference.spec import EmptyRowRule, FallbackReason, Route

CELL = "decode/bf16/kv:60+40/branches:2"
CELLS = {  # and how far out and lse may lie from the reference
    "decode/fp32/kv:70+9/heads:4-1/splits:3/tile:16/sink:on/epilogue:silu/branches:3": (1e-5, 1e-5),
    "prefill/bf16/kv:20+9/q:2+1/heads:2-1/dim:80/causal:bottom_right/pos:rope/branches:2": (0.1, 1e-4),
    "decode/fp32/kv:40/dropout:30/kind:multiset/lists:query_head/branches:2": (1e-5, 1e-5),
}


def case_of(cell: str, **hints: Any) -> Case:
    problem, launcher = build(parse(cell)), Launcher(Backend(Adapter()), "cpu")
    return launcher.case(problem, RANDOM.inputs(problem), replace(problem.hints, **hints))


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What the kernels did in each cell, in the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, branched_kernels.__file__, *CELLS]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return {each["cell"]: each for each in map(json.loads, done.stdout.splitlines())}


# --- what is computed


@pytest.mark.parametrize("cell", CELLS)
def test_out_is_the_gated_sum_and_each_branch_keeps_its_lse(said: dict[str, Any], cell: str) -> None:
    far_out, far_lse = CELLS[cell]
    assert said[cell]["out"] < far_out
    assert said[cell]["lse"] < far_lse


@pytest.mark.parametrize("cell", CELLS)
def test_each_branch_has_the_bits_and_the_trace_of_a_call_of_its_own(said: dict[str, Any], cell: str) -> None:
    assert said[cell]["own_lse"] and said[cell]["own_trace"]


@pytest.mark.parametrize("cell", CELLS)
def test_schedules_and_routes_yield_the_same_bits_of_branches(said: dict[str, Any], cell: str) -> None:
    assert len(said[cell]["bits"]) == 5 and len(set(said[cell]["bits"].values())) == 1


@pytest.mark.parametrize("cell", CELLS)
def test_the_exact_workspace_of_branches_is_enough_and_one_byte_less_is_refused(
    said: dict[str, Any], cell: str
) -> None:
    exact, larger, less = said[cell]["sized"]
    assert exact["broken"] is None and larger["broken"] is None and exact["sum"] == larger["sum"]
    assert less["untouched"] and less["refused"].endswith(f"{exact['asked']} bytes needed, {exact['asked'] - 1} given")


# --- plan and workspace


@pytest.mark.parametrize(
    "cell",
    [
        "decode/bf16/kv:60+40/pattern:empty/empty:force_self/branches:3",
        "decode/fp16/kv:60+40/pos:rope/kind:sequence/branches:2",
        "decode/bf16/kv:60+40/kind:multiset/branches:2",
        "prefill/bf16/kv:40+9/q:4+2/block:16/causal:bottom_right/empty:force_sink_token/branches:2",
    ],
)
def test_the_plan_of_branches_is_that_of_each_branch_one_behind_another(cell: str) -> None:
    case = case_of(cell)
    whole = plan_of(case)
    parts = []
    for each in branches_of(replace(case, gates=None)):
        first, last = int(each.kv_indptr[0]), int(each.kv_indptr[-1])
        own = replace(each, kv_indptr=each.kv_indptr - first, kv_indices=each.kv_indices[first:last])
        parts.append(plan_of(own))
    lengths = torch.cat([part.kv_indptr.diff() for part in parts])
    assert torch.equal(whole.kv_indptr.diff(), lengths)
    tables = "forced", "ordinals", "query_ordinals", "log2_counts", "token_position"
    for name in ("kv_indices", *tables):
        together = [getattr(part, name) for part in parts]
        if together[0] is None:
            assert getattr(whole, name) is None
        else:
            assert torch.equal(getattr(whole, name), torch.cat(together)), name
    requests = torch.cat([part.tasks.columns.request for part in parts])
    assert torch.equal(whole.tasks.columns.request, requests)


def test_lists_are_normalised_for_every_branch() -> None:
    case = case_of("decode/bf16/kv:60+40/pattern:duplicates/branches:3")
    found = Adapter().normalize(case)
    assert len(found.kv_indptr) == case.spec.num_lists + 1
    for row in range(case.spec.num_lists):
        raw = case.kv_indices[case.kv_indptr[row] : case.kv_indptr[row + 1]]
        own = found.kv_indices[found.kv_indptr[row] : found.kv_indptr[row + 1]]
        assert own.tolist() == sorted({t for t in raw.tolist() if t >= 0})


def test_a_forbidden_empty_row_is_named_with_its_branch() -> None:
    case = case_of("decode/bf16/kv:60+40/branches:2")
    rows = case.spec.num_rows
    lengths = case.kv_indptr.diff()
    lengths[rows + 1 :] = 0
    kv_indptr = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    cut = replace(case, kv_indptr=kv_indptr, kv_indices=case.kv_indices[: int(kv_indptr[-1])])
    forbidding = replace(cut, spec=replace(cut.spec, empty_row=EmptyRowRule.FORBID))
    with pytest.raises(Refused, match=r"request 0, query 0, KV head 1\)?, branch 1, has no edge"):
        plan_of(forbidding)


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize(
    "cell",
    [
        CELL,
        "decode/fp32/kv:150+9/heads:7-1/splits:3/tile:16/branches:3",
        "decode/bf16/kv:40+21/heads:8-2/pattern:one/window:5/empty:force_self/lists:query_head/branches:2",
    ],
)
def test_the_workspace_of_branches_is_what_the_reference_counts(
    monkeypatch: pytest.MonkeyPatch, cell: str, route: Route, interpreted: bool
) -> None:
    monkeypatch.setattr(paged, "INTERPRETED", interpreted)
    case = case_of(cell, route=route)
    spec = case.spec
    fp32_out = 4 * spec.num_tokens * spec.num_qo_heads * spec.head_dim_vo if interpreted else 0
    asked = Adapter().workspace_bytes(case)
    assert asked == workspace_bytes(spec, case.hints, len(case.kv_indices)) + fp32_out
    outputs = spec.num_branches * spec.num_tokens * spec.num_qo_heads
    if route is Route.DIRECT and case.hints.num_splits == 1:
        assert asked - fp32_out == sum(4 for _ in range(outputs * (spec.head_dim_vo + 1)))
    space = workspace_of(replace(case, workspace=torch.empty(asked, dtype=torch.uint8)), fp32_out=interpreted)
    assert space.branch_out is not None and space.branch_out.numel() == outputs * spec.head_dim_vo
    assert space.branch_lse is not None and space.branch_lse.numel() == outputs


# --- what is launched


class Heard:
    """In place of a kernel: what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.given: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Heard:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.given.append(dict(zip(self.kernel.arg_names, arguments, strict=False)) | named)


KERNELS = (
    (kernels, "attention_kernel"),
    (merge, "merge_kernel"),
    (gather, "gather_kernel"),
    (branches, "gated_sum_kernel"),
)


def heard(monkeypatch: pytest.MonkeyPatch, cell: str) -> tuple[Case, dict[str, list[dict[str, Any]]]]:
    """A run, and what each kernel would have been launched with."""
    found = {name: Heard(getattr(module, name)) for module, name in KERNELS}
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, found[name])
    case, adapter = case_of(cell), Adapter()
    case = replace(case, workspace=torch.empty(adapter.workspace_bytes(case), dtype=torch.uint8))
    adapter.run(case)
    return case, {name: each.given for name, each in found.items()}


def test_a_call_without_branches_launches_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = heard(monkeypatch, "decode/bf16/kv:90+40/splits:2/tile:16/epilogue:silu")
    (attention,), (merged,) = given["attention_kernel"], given["merge_kernel"]
    assert attention["num_tokens"] is None and not given["gated_sum_kernel"]
    assert attention["EPILOGUE"] == merged["EPILOGUE"] == "silu"
    assert attention["lse_ptr"] is merged["lse_ptr"] is case.lse


def test_the_epilogue_is_that_of_the_sum_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = heard(monkeypatch, "decode/bf16/kv:90+40/splits:2/tile:16/epilogue:silu/branches:2")
    (attention,), (merged,), (added,) = given["attention_kernel"], given["merge_kernel"], given["gated_sum_kernel"]
    assert attention["EPILOGUE"] == merged["EPILOGUE"] == "none" and added["EPILOGUE"] == "silu"
    assert attention["num_tokens"] == case.spec.num_tokens
    assert attention["out_ptr"].dtype == merged["out_ptr"].dtype == torch.float32
    assert added["gates_ptr"] is case.gates


def test_branches_are_served_natively_and_by_the_fallback() -> None:
    spec = case_of(CELL).spec
    assert Adapter().support(spec).status == "native"
    assert Adapter().falls_back(spec, FallbackReason.WORKSPACE).status == "fallback"


def test_the_kernels_of_branches_compile_for_a_gpu() -> None:
    cells = (
        "decode/bf16/kv:90+40/splits:2/tile:16/epilogue:silu/branches:2",
        "prefill/fp16/kv:20+9/q:3+2/dim:80/branches:3",
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, compiled_kernels.__file__, "plain", *cells]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    names = [(each["cell"], each["kernel"]) for each in compiled]
    assert [names.count((cell, "gated_sum_kernel")) for cell in cells] == [1, 1]
    assert np.max([each["shared"] for each in compiled]) <= 227 << 10
