"""Which tiles are copied by descriptions of K and V, and which are loaded slot by slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sacts.conformance.adapter import Backend, Case
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged import copies
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.paged.copies import DESCRIPTION_BYTES, aligned, copied, describable
from sacts.matrices.cell import parse
from sacts.reference.spec import Hints, Route

PLAIN = "prefill/bf16/kv:60+40/q:3+2/page:64/block:32"


def case_of(cell: str) -> Case:
    problem = build(parse(cell))
    return Launcher(Backend(Adapter()), "cpu").case(problem, RANDOM.inputs(problem), problem.hints)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "copies", lambda device: True)


@pytest.mark.parametrize(
    ("cell", "tile", "right"),
    [
        (PLAIN, 32, True),
        (PLAIN, 16, True),
        (PLAIN, 64, False),  # of two entries
        ("prefill/bf16/kv:60+40/q:3+2/page:32/block:32", 32, False),  # of several pages
        ("prefill/bf16/kv:64+40/q:3+2/page:64/block:32", 32, True),
        ("prefill/bf16/kv:65+40/q:3+2/page:64/block:32", 32, False),
        ("decode/bf16/kv:60+40/page:64/block:32", 32, False),
        ("prefill/fp32/kv:60+40/q:3+2/dim:192/vdim:128/page:64/block:32", 32, True),
        ("prefill/bf16/kv:60+40/q:3+2/dim:576/vdim:512/page:64/block:32", 32, False),
        ("prefill/bf16/kv:60+40/q:3+2/page:64/block:32/causal:bottom_right", 32, True),
        ("prefill/bf16/kv:60+40/q:3+2/page:64/block:32/causal:bottom_right/window:16", 32, False),
        ("prefill/bf16/kv:60+40/q:3+2/page:64/block:32/pos:alibi/cap:20/sink:on/dropout:30", 32, True),
        ("prefill/bf16/kv:60+40/q:3+2/page:64/block:32/pos:rope", 32, False),
        ("prefill/bf16/kv:60+40/q:3+2/page:64/block:32/empty:force_self", 32, False),
        ("prefill/bf16/kv:60+40/q:3+2/page:64/block:32/kcodec:int8", 32, False),
        ("prefill/bf16/kv:60+40/q:3+2/page:64/block:32/vcodec:int8", 32, False),
    ],
)
def test_tiles_in_one_piece_of_contiguous_values_are_copied(able: None, cell: str, tile: int, right: bool) -> None:
    assert copied(case_of(cell), tile) is right


def test_tiles_that_a_description_cannot_hold_are_loaded(able: None) -> None:
    case = case_of("prefill/bf16/kv:500/q:3/page:512/block:512")
    assert [copied(case, tile) for tile in (256, 512)] == [True, False]


def test_scratch_has_no_page_to_describe() -> None:
    spec = build(parse(PLAIN)).spec
    assert [describable(spec, Hints(route=route)) for route in (Route.DIRECT, Route.GATHER, Route.GATHER_HEADS)] == [
        True,
        False,
        False,
    ]


def test_without_the_instruction_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "copies", lambda device: False)
    assert not copied(case_of(PLAIN), 32)
    assert Adapter().plan(case_of(PLAIN + "/tile:32")).descriptions is None


def test_the_plan_has_memory_for_two_descriptions_in_each_program(able: None) -> None:
    plan = Adapter().plan(case_of(PLAIN + "/tile:32"))
    assert plan.descriptions is not None
    assert plan.descriptions.numel() == 2 * DESCRIPTION_BYTES * plan.tasks.num_tasks


def test_programs_that_share_a_task_have_memory_each(able: None) -> None:
    plan = Adapter().plan(case_of("prefill/fp32/kv:60/q:3/heads:128-1/dim:256/page:64/block:32/tile:32"))
    assert plan.descriptions is not None
    assert plan.descriptions.numel() == 2 * DESCRIPTION_BYTES * plan.tasks.num_tasks * 2


BYTES = torch.zeros(8 * 64 * 2 * 64 + 16, dtype=torch.bfloat16)
CACHE = BYTES[:-16].view(8, 64, 2, 64)


@pytest.mark.parametrize(
    ("cache", "right"),
    [
        (CACHE, True),
        (CACHE[1:, :, :, :32], True),
        (CACHE.transpose(1, 2), True),
        (BYTES[8:-8].view(8, 64, 2, 64), True),
        (BYTES[4:-12].view(8, 64, 2, 64), False),  # 8 bytes on
        (CACHE[..., ::2], False),
        (CACHE.view(8, 64, 1, 128).transpose(2, 3), False),
        (BYTES[: 8 * 64 * 2 * 60].view(8, 64, 2, 60), False),  # heads 120 bytes apart
    ],
    ids=["whole", "part", "hnd", "16 bytes on", "8 bytes on", "every second channel", "channels apart", "60 channels"],
)
def test_addresses_and_strides_are_multiples_of_16_bytes(cache: torch.Tensor, right: bool) -> None:
    case = case_of(PLAIN)
    assert CACHE.data_ptr() % 16 == 0
    assert aligned(replace(case, k_cache=CACHE, v_cache=CACHE))
    assert aligned(replace(case, k_cache=cache, v_cache=CACHE)) is right
    assert aligned(replace(case, k_cache=CACHE, v_cache=cache)) is right
