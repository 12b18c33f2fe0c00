"""Cells with quantised KV: what the case holds is what the reference judges, poison reaches codes and scales, and each
mistake about scales is caught and named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sacts.conformance.adapter import Backend, Capabilities, Case, KVLayout, Outputs
from sacts.conformance.batch import join, join_inputs
from sacts.conformance.build import Problem, build, last_query
from sacts.conformance.codes import NotOnGrid
from sacts.conformance.contract import CLEAN, ContractBroken, Surroundings
from sacts.conformance.gates.layout import surroundings
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes import margins, scale
from sacts.conformance.probes.copies import copies
from sacts.conformance.probes.inputs import COUNT, RANDOM
from sacts.conformance.relations import heads_reversed, relabelled, scaled
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.faults import cell_catalogue, model_catalogue, seed
from sacts.matrices import tiers
from sacts.matrices.axes import AXES
from sacts.matrices.cell import Cell, CellError, parse
from sacts.reference.spec import CodecFormat, DType
from sacts.reports.records import Gate, Verdict

CELLS = [cell.id for cell in tiers.load(tiers.path_of("codecs"))]
REPLICATES = int(os.environ.get("SACTS_TERMS", "0"))  # of every arithmetic on every cell; 0: one each in turn
ARITHMETICS: tuple[dict[str, Any], ...] = (
    {},
    {"reconstructed": DType.BF16},
    {"splits": 3, "tile": 16, "order": 5, "reconstructed": DType.FP16},
    {"fraction_bits": 25, "tile": 32},
    {"p": DType.FP32, "tile": 16},
)
PAGES = "decode/bf16/kv:100/pattern:all/kcodec:int8/vcodec:int8/scales:page/steps:power_of_two"
NIBBLES = "decode/fp16/kv:70/block:16/pattern:all/kcodec:int4/vcodec:int4/scales:page/steps:power_of_two/zeros:on"


def problem(cell: str) -> Problem:
    return build(parse(cell))


class Watching:
    """The emulation; `look` sees each case before it runs."""

    def __init__(self, look: Callable[[Case], Case | None], **capabilities: Any) -> None:
        self._right, self._look = Adapter(), look
        self.capabilities = replace(self._right.capabilities, **capabilities)

    def run(self, case: Case, plan: object = None) -> Outputs:
        seen = self._look(case) or case
        return self._right.run(seen)


def launched(cell: str, around: Surroundings = CLEAN, **capabilities: Any) -> tuple[Problem, Any, Case]:
    """The problem, the random inputs, and the case that a backend of these capabilities gets."""
    found, seen = problem(cell), list[Case]()

    class Looking:
        def run(self, case: Case, plan: object = None) -> Outputs:
            seen.append(case)
            return Outputs(torch.zeros_like(case.out), torch.zeros_like(case.lse))

    backend = Looking()
    backend.capabilities = Capabilities(**capabilities)  # type: ignore[attr-defined]
    inputs = RANDOM.inputs(found)
    Launcher(Backend(backend), "cpu")(found, inputs, surroundings=around)
    return found, inputs, seen[0]


def decoded(codes: torch.Tensor, form: CodecFormat, dim: int) -> torch.Tensor:
    """What the codes of a cache stand for without scale, by torch alone."""
    if form is not CodecFormat.INT4:
        return codes.double()
    both = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)[..., :dim].long()
    return torch.where(both > 7, both - 16, both).double()


# --- the case


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("cell", [c for c in CELLS if "high" not in c])
def test_codes_and_scales_of_a_case_are_exactly_the_values_that_are_judged(cell: str, hnd: bool) -> None:
    found, inputs, case = launched(cell, kv_layout=KVLayout.HND if hnd else KVLayout.NHD)
    for name, cache, values in (("k", case.k_cache, inputs.k.data), ("v", case.v_cache, inputs.v.data)):
        codec = getattr(found.spec, f"{name}_codec")
        scales, zeros = getattr(case, f"{name}_scales"), getattr(case, f"{name}_zeros")
        if codec is None:
            assert scales is None
            assert zeros is None
            continue
        assert (zeros is not None) == codec.asymmetric
        assert scales.dtype == torch.float32
        live = torch.from_numpy(found.pages)
        pages = cache.view(torch.uint8)[live].view(cache.dtype)
        own = [x if len(x) == 1 else x[live] for x in (scales, torch.zeros(1, 1, 1, 1) if zeros is None else zeros)]
        back = (decoded(pages, codec.format, values.shape[-1]) - own[1].double()) * own[0].double()
        assert np.array_equal((back.transpose(1, 2) if hnd else back).numpy(), values)


@pytest.mark.parametrize(
    ("cell", "dtypes", "bytes_of_64"),
    [
        (PAGES, (torch.int8, torch.int8), 64),
        (NIBBLES, (torch.uint8, torch.uint8), 32),
        ("decode/fp32/kv:9/kcodec:fp8_e5m2/vcodec:fp8_e4m3fn", (torch.float8_e5m2, torch.float8_e4m3fn), 64),
    ],
)
def test_a_cache_of_codes_has_the_dtype_of_its_format(cell: str, dtypes: Any, bytes_of_64: int) -> None:
    _, _, case = launched(cell)
    assert (case.k_cache.dtype, case.v_cache.dtype) == dtypes
    assert case.k_cache.shape[-1] == bytes_of_64


def test_codes_of_one_form_are_packed_into_one_tensor_where_that_is_declared() -> None:
    _, _, case = launched(PAGES, packed_kv=True)
    assert case.kv_cache is not None
    assert case.kv_cache.dtype is torch.int8
    assert launched("decode/bf16/kv:60/kcodec:int8/vcodec:fp8_e5m2", packed_kv=True)[2].kv_cache is None


def test_scales_of_a_strided_cache_are_a_view_too() -> None:
    _, _, case = launched("decode/fp32/kv:50+20/cache:strided/kcodec:int8/vcodec:fp8_e4m3fn/scales:page_head/zeros:on")
    assert case.k_scales is not None
    assert case.k_zeros is not None
    for each in (case.k_cache, case.v_cache, case.k_scales, case.k_zeros):
        assert not each.is_contiguous()


def test_a_value_that_no_code_stands_for_is_refused_not_quantised_again() -> None:
    found = problem(PAGES)
    inputs = RANDOM.inputs(found)
    v = inputs.v.data.copy()
    v[tuple(np.argwhere(found.needed)[0])] += 1e-3
    with pytest.raises(NotOnGrid, match="no code of int8"):
        Launcher(Backend(Adapter()), "cpu")(found, inputs._replace(v=replace(inputs.v, data=v)))


def test_a_backend_that_changes_a_scale_breaks_the_contract() -> None:
    def spoil(case: Case) -> None:
        assert case.v_scales is not None
        case.v_scales[case.page_table[0, 0].long()] *= 2

    found = problem(PAGES)
    with pytest.raises(ContractBroken, match="changed its input v_scales"):
        Launcher(Backend(Watching(spoil)), "cpu")(found, RANDOM.inputs(found))


# --- poison


def test_scales_and_zero_points_that_no_row_needs_are_poisoned() -> None:
    cell = "decode/fp32/kv:48+20/kcodec:int8/vcodec:int8/scales:token_head/zeros:on"
    found, _, case = launched(cell, surroundings(problem(cell), 0))
    assert case.k_scales is not None
    assert case.k_zeros is not None
    live = torch.from_numpy(found.pages)
    for each in (case.k_scales, case.k_zeros):
        idle = each[live].numpy()[~found.needed]
        assert np.isnan(idle).any()
        assert np.isposinf(idle).any()
        assert np.isfinite(each[live].numpy()[found.needed]).all()


@pytest.mark.parametrize(("form", "which"), [("fp8_e4m3fn", "isnan"), ("fp8_e5m2", "isnan"), ("fp8_e5m2", "isinf")])
def test_unattended_codes_of_fp8_hold_nan_and_where_there_is_one_infinity(form: str, which: str) -> None:
    found = problem(f"decode/bf16/kv:60+20/vcodec:{form}/scales:page")
    assert found.v_scales
    values = RANDOM.inputs(found).v.data.copy()
    values[~found.needed] = np.resize([np.nan, np.inf, -np.inf], values[~found.needed].shape)
    codes = torch.from_numpy(found.v_scales.codes(values, found.needed))
    floats = codes.view(torch.float8_e5m2 if "e5m2" in form else torch.float8_e4m3fn).float().numpy()
    assert getattr(np, which)(floats[~found.needed]).any()
    assert np.isfinite(floats[found.needed]).all()


# --- scales of a problem


@pytest.mark.parametrize("cell", CELLS)
def test_neighbours_have_scales_that_are_apart(cell: str) -> None:
    found = problem(cell)
    for name in ("k_scales", "v_scales"):
        own = getattr(found, name)
        if own is None:
            continue
        for axis in (1, 2, 3):
            ratio = np.abs(np.diff(np.log2(own.scales), axis=axis))
            assert (ratio > 0.6).all()
        if own.scales.shape[0] > 1 and "int4" not in cell:
            for request in range(found.spec.num_requests):
                used = found.table.table[request, : -(-found.spec.seq_lens[request] // found.spec.page_size)]
                levels = np.log2(own.scales[np.searchsorted(found.pages, used), 0, 0, 0])
                first_owner = found.slot_request[np.searchsorted(found.pages, used), 0] == request
                assert (np.abs(np.diff(levels))[first_owner[1:] & first_owner[:-1]] > 0.6).all()
    if found.k_scales and found.v_scales and found.k_scales.codec.format is found.v_scales.codec.format:
        assert (found.k_scales.scales != found.v_scales.scales).all()


@pytest.mark.parametrize("cell", [PAGES, NIBBLES, CELLS[0], CELLS[2]])
def test_joined_problems_keep_the_scales_of_each(cell: str) -> None:
    first = problem(cell)
    second = last_query(first, 0, "again")
    whole = join([first, second])
    inputs = join_inputs(whole, [(each, RANDOM.inputs(each)) for each in (first, second)])
    for scales, cache in ((whole.k_scales, inputs.k), (whole.v_scales, inputs.v)):
        assert scales
        assert np.array_equal(scales.cache(whole.pages, cache.data, whole.needed).reconstruct().data[whole.needed],
                              cache.data[whole.needed])  # fmt: skip


@pytest.mark.parametrize("cell", [PAGES, "decode/fp32/kv:64+40/kcodec:int8/vcodec:fp8_e4m3fn/scales:page_head"])
def test_pages_and_heads_that_move_take_their_scales_along(cell: str) -> None:
    found = problem(cell)
    inputs = RANDOM.inputs(found)
    for variant in (relabelled(found, inputs, 0), heads_reversed(found, inputs)):
        for scales, cache in (
            (variant.problem.k_scales, variant.inputs.k),
            (variant.problem.v_scales, variant.inputs.v),
        ):
            assert scales
            scales.cache(variant.problem.pages, cache.data, np.ones_like(found.needed))


@pytest.mark.parametrize("cell", [PAGES, NIBBLES])
def test_v_scaled_by_two_is_its_scales_doubled_with_the_same_codes(cell: str) -> None:
    found = problem(cell)
    inputs, backend = RANDOM.inputs(found), Backend(Adapter())
    variant = scaled(found, inputs)
    assert found.v_scales
    assert variant.problem.v_scales
    one, two = found.v_scales, variant.problem.v_scales
    codes = [s.codes(i.v.data, found.needed) for s, i in ((one, inputs), (two, variant.inputs))]
    assert np.array_equal(*codes)
    first = Launcher(backend, "cpu")(found, inputs)
    out, _ = variant.undone(Launcher(backend, "cpu")(variant.problem, variant.inputs))
    assert np.array_equal(out, first.out)


# --- the tier and the witness


@pytest.mark.parametrize("name", ["kcodec", "vcodec", "scales", "steps", "zeros"])
def test_the_tier_holds_each_value(name: str) -> None:
    axis = next(axis for axis in AXES if axis.name == name)
    assert {getattr(parse(cell), name) for cell in CELLS} == set(axis.values or ())


@pytest.mark.parametrize(
    "text", ["decode/fp16/kv:9/scales:page", "decode/fp16/kv:9/steps:power_of_two", "decode/fp16/kv:9/zeros:on",
             "decode/fp16/kv:9/kcodec:fp8_e5m2/zeros:on", "decode/fp16/kv:9/values:equal/kcodec:int8"],
)  # fmt: skip
def test_what_only_codes_have_is_refused_without_them(text: str) -> None:
    with pytest.raises(CellError, match="exclude each other"):
        parse(text)


def cases() -> list[tuple[str, int, int]]:
    if not REPLICATES:
        return [(cell, n % len(ARITHMETICS), 0) for n, cell in enumerate(CELLS)]
    return [(cell, a, r) for r in range(REPLICATES) for a in range(len(ARITHMETICS)) for cell in CELLS]


@pytest.mark.parametrize(("cell", "arithmetic", "replicate"), cases())
def test_a_right_kernel_passes_and_its_probes_could_have_failed(cell: str, arithmetic: int, replicate: int) -> None:
    parsed, changes = parse(cell), ARITHMETICS[arithmetic]
    dtype = DType(parsed.dtype)
    backend = Backend(Adapter({dtype: Arithmetic(**{"p": dtype, "out": dtype} | changes)}))
    record = judge(Launcher(backend, "cpu"), "emulation", parsed, replicate)
    use = {name: round(told.use, 3) for name, told in record.probes.items() if told.use}
    print(f"{record.verdict} {cell} {changes} {use}")
    assert record.verdict is Verdict.PASS or (REPLICATES and record.verdict is Verdict.UNTRUSTED), record.sentence
    assert record.probes["scale"].said == "judged" or REPLICATES or "reconstructed" in changes


CAUGHT = {
    fault.name: (fault.problem, fault.place) for fault in cell_catalogue().values() if "scale" in fault.outputs
} | {
    "scale_of_the_next_page": (PAGES, "K and V were decoded with the scales of the physical page behind"),
    "scale_of_another_head": (
        "decode/fp16/kv:40/pattern:all/kcodec:fp8_e4m3fn/vcodec:int8/scales:token_head",
        "K and V were decoded with the scales of the first KV head",
    ),
    "nibbles_swapped": (
        "decode/fp32/kv:60/pattern:all/kcodec:int8/vcodec:int4/scales:channel/zeros:on",
        "as if the two codes of a byte were swapped",
    ),
    "int4_without_its_sign": (NIBBLES, "as if integer codes were read without their sign"),
    "e5m2_read_as_e4m3": ("decode/bf16/kv:60/pattern:all/kcodec:fp8_e5m2/scales:page", "fp8 codes were read as e4m3fn"),
    "zero_point_ignored": (NIBBLES, "K and V were decoded with no zero points"),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_mistake_about_scales_is_caught_at_the_gate_scale_and_named(name: str) -> None:
    cell, words = CAUGHT[name]
    fault = {**model_catalogue(), **cell_catalogue()}[name]
    record = judge(Launcher(Backend(seed(fault)()), "cpu"), name, parse(cell))
    assert record.verdict is Verdict.FAIL
    assert record.finding is not None
    assert record.finding.gate is Gate.SCALE, record.sentence
    assert words in record.sentence
    assert record.gates[Gate.COUNT] == "pass"


@pytest.mark.parametrize("which", ["k", "v"])
def test_one_page_with_the_scale_of_another_is_named(which: str) -> None:
    def spoil(case: Case) -> Case:
        changed = getattr(case, f"{which}_scales").clone()
        page, before = case.page_table[:, 3].long(), case.page_table[:, 2].long()
        changed[page] = changed[before]
        return replace(case, **{f"{which}_scales": changed})

    cell = PAGES.replace("bf16", "fp32")
    record = judge(Launcher(Backend(Watching(spoil)), "cpu"), "spoilt", parse(cell))
    assert record.finding is not None
    assert record.finding.gate is Gate.SCALE, record.sentence
    page = int(problem(cell).table.table[0, 3])
    assert f"{which.upper()} of physical page {page} were decoded with the scales of the" in record.sentence


def test_the_margin_of_a_scale_is_what_a_kernel_with_that_mistake_shows() -> None:
    """A scale twice too large in one page, by the emulation itself: it leaves the bound as often as the margin says."""
    found = problem(PAGES)
    inputs = scale.SCALE.inputs(found)
    right = Launcher(Backend(Adapter()), "cpu")(found, inputs)
    moved = []
    for page in found.table.table[0, :7].tolist():

        def spoil(case: Case, page: int = page) -> Case:
            assert case.v_scales is not None
            changed = case.v_scales.clone()
            changed[page] *= 2
            return replace(case, v_scales=changed)

        wrong = Launcher(Backend(Watching(spoil)), "cpu")(found, inputs)
        moved.append(float(np.abs(wrong.out - right.out).max()))
    assert min(moved) > 0.03
    expected = copies(found, Backend(Adapter()).numerics(DType.BF16, found.hints))[2].expected
    needed = margins.noticed(expected, DType.BF16)
    assert min(moved) > scale.of_scale(found, inputs, expected).min() * needed.min() > needed.min()


def test_a_cell_without_codes_has_no_scale_probe_and_the_scales_follow_the_id() -> None:
    plain = problem("decode/bf16/kv:60")
    assert plain.k_scales is plain.v_scales is None
    assert not scale.suits(plain)
    first, again, other = problem(PAGES), problem(PAGES), build(parse(PAGES), 1)
    assert first.k_scales
    assert again.k_scales
    assert other.k_scales
    assert np.array_equal(first.k_scales.scales, again.k_scales.scales)
    assert not np.array_equal(first.k_scales.scales, other.k_scales.scales)
    assert isinstance(first.cell, Cell)
    assert COUNT.exactness(first).exact_sums
    assert not COUNT.exactness(problem(PAGES.replace("/steps:power_of_two", ""))).exact_sums
