"""Traces of the bundled kernels: a right one lies within the bounds of every tile, of a wrong one the tile is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import traced_kernels

from sacts.conformance.build import build
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged.tasks import Rows, Tasks, tasks_of
from sacts.kernels_under_test.paged.trace import splits_of
from sacts.matrices.cell import parse
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType, Schedule
from sacts.reference.tile_bounds import row_group, row_logits

RIGHT = (
    "decode/bf16/kv:40+21",
    "decode/bf16/kv:150+9/splits:2/tile:32/schedule:shuffled",
    "decode/fp32/kv:60+40/pattern:all/tile:16/pos:rope/cap:30/sink:on",
    "prefill/bf16/kv:40+9/q:4+2/block:16/causal:bottom_right/tile:16/schedule:persistent",
    "decode/fp32/kv:60+31/tile:16/pos:buckets/kind:multiset",
    "decode/bf16/kv:40+21/pattern:empty/empty:force_self",
    "decode/fp16/kv:60/heads:7-1/tile:16",
    "decode/bf16/kv:70+40/heads:8-2/splits:2/tile:16/epilogue:gate/lists:query_head",
    "decode/bf16/kv:70+40/splits:3/tile:16/kcodec:int8/vcodec:fp8_e4m3fn/scales:page_head/route:gather_heads",
    "decode/bf16/kv:70/tile:16/kcodec:fp8_e4m3fn/vcodec:int8/scales:page",
    "prefill/bf16/kv:40+9/q:4+2/page:64/block:16/causal:bottom_right/tile:16",  # copied by descriptions
)
RISING = "decode/fp32/kv:200/pattern:all/tile:32"
FAULTS = {
    "sm_scale_missing": ("decode/bf16/kv:40+21", r"logits: row .* the logit of token \d+ is .*; tile 0, "),
    "last_tile_dropped": (RISING, r"count: row .* never visits token 192; tile 6, logical page 12 -> "),
    "mask_after_exp": (
        "decode/bf16/kv:40+21",
        r"(logits: row .* the running maximum|lse: row .* m \+ ln l) is .*, expected .*; tile 0$",
    ),
    "merge_without_rescale": ("decode/fp32/kv:100/pattern:all/splits:2/tile:32", r"right"),
}


Found = dict[tuple[str, str], str]


def named(fault: str) -> str:
    return f"sacts.kernels_under_test.faults:{fault}"


ASKED = (
    *(("triton", cell) for cell in RIGHT),
    *((named(fault), cell) for fault, (cell, _) in FAULTS.items()),
    (named("accumulator_not_rescaled"), RISING),
)


@pytest.fixture(scope="module")
def found() -> Found:
    """What the trace of each adapter shows in its cell."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, traced_kernels.__file__, *(word for asked in ASKED for word in asked)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return dict(zip(ASKED, done.stdout.splitlines(), strict=True))


def test_the_trace_of_the_kernel_is_within_its_bounds_in_every_tile(found: Found) -> None:
    assert {cell: found["triton", cell] for cell in RIGHT} == dict.fromkeys(RIGHT, "right")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_layer_and_the_tile_of_a_seeded_fault_are_named(found: Found, fault: str) -> None:
    cell, sentence = FAULTS[fault]
    shown = found[named(fault), cell]
    assert re.match(sentence, shown), shown


def test_the_first_tile_whose_maximum_rises_is_named_where_the_accumulator_stays(found: Found) -> None:
    """Against the logits of the reference."""
    shown = found[named("accumulator_not_rescaled"), RISING]
    problem = build(parse(RISING))
    where = problem.spec, RANDOM.inputs(problem), problem.table, problem.candidates
    for row in range(problem.spec.num_rows):
        group = row_group(*where, row)
        assert group is not None
        logits = row_logits(problem.spec, group, Numerics.default(DType.FP32)).value
        tops = np.stack([logits[:, start : start + 32].max(axis=1) for start in range(0, 200, 32)], axis=1)
        rises = (np.diff(np.maximum.accumulate(tops, axis=1), axis=1) > 0).any(axis=0)
        if rises.any():
            break
    tile = 1 + int(rises.argmax())
    assert shown.startswith(f"rescale: {problem.spec.row(row)}"), shown
    assert re.search(rf": o / l in channel \d+ is .*; tile {tile}$", shown), shown


def test_each_tile_of_a_trace_belongs_to_the_split_that_visits_it() -> None:
    lengths = [0, 70, 5, 33]
    indptr = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    tasks: Tasks = tasks_of(Rows(indptr[:-1], indptr.diff(), 1, torch.zeros(4)), 3, 16, schedule=Schedule.SHUFFLED)
    assert splits_of(tasks, 1, 4, 5).tolist() == [
        [-1, -1, -1, -1, -1],
        [0, 0, 1, 1, 2],
        [0, -1, -1, -1, -1],
        [0, 1, 2, -1, -1],
    ]
