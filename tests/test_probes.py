"""The probes: their values are exact, right kernels pass them, and where their fault could not show they say so."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sacts.conformance import tensors
from sacts.conformance.adapter import Backend, Case, Determinism, Outputs
from sacts.conformance.build import build
from sacts.conformance.draw import Draw
from sacts.conformance.gates.layout import ORDINARY, poison, surroundings
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes import dither, stairs
from sacts.conformance.probes.copies import copies
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.matrices import tiers
from sacts.matrices.cell import parse
from sacts.reference.formats import FORMATS
from sacts.reference.numerics import Numerics
from sacts.reference.spec import DType
from sacts.reports.records import PROVES, Gate, Record, Verdict

SMOKE = [cell.id for cell in tiers.load(tiers.path_of("smoke"))]
CLIMB = "decode/bf16/kv:200/pattern:all/tile:32"
REPLICATES = int(os.environ.get("SACTS_PROBES", "0"))  # of every arithmetic on every cell; 0: one each in turn
ARITHMETICS: tuple[dict[str, Any], ...] = (
    {},
    {"exp2": "cubic"},
    {"exp2": "truncated", "fraction_bits": 25},
    {"lag": 8, "order": 3, "tile": 16},
    {"splits": 4, "tile": 32, "order": 1},
    {"splits": 3, "tile": 16, "merge_outputs": True},
    {"l_sums_cast_p": True, "tile": 16, "splits": 2},
    {"p": DType.FP32},
    {"p": DType.FP16, "lag": 8, "splits": 8, "tile": 16},
)


def emulation(dtype: DType, changes: dict[str, Any]) -> Adapter:
    return Adapter({dtype: Arithmetic(**{"p": dtype, "out": dtype} | changes)})


def judged(adapter: object, cell: str, replicate: int = 0) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell), replicate)


def cases() -> list[tuple[str, int, int]]:
    if not REPLICATES:
        return [(cell, n % len(ARITHMETICS), 0) for n, cell in enumerate(SMOKE)]
    return [(cell, a, r) for r in range(REPLICATES) for a in range(len(ARITHMETICS)) for cell in SMOKE]


@pytest.mark.parametrize(("cell", "arithmetic", "replicate"), cases())
def test_a_right_kernel_passes_every_probe(cell: str, arithmetic: int, replicate: int) -> None:
    record = judged(emulation(parse(cell).dtype, ARITHMETICS[arithmetic]), cell, replicate)  # type: ignore[arg-type]
    assert record.verdict in (Verdict.PASS, Verdict.UNTRUSTED), record.sentence
    assert set(record.probes) == set(PROVES)
    assert max(told.use for told in record.probes.values()) <= 1


@pytest.mark.parametrize("cell", SMOKE)
def test_witness_values_are_exact_in_the_dtype(cell: str) -> None:
    problem = build(parse(cell))
    for copy in copies(problem, Numerics.default(problem.spec.dtype)):
        for array in (copy.inputs.q, copy.inputs.k.data, copy.inputs.v.data):
            assert np.array_equal(tensors.to_numpy(tensors.to_torch(array, problem.spec.dtype, "cpu")), array)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("k", [3, 4, 17, 64, 255, 1000, 4097])
def test_dithered_means_lie_so_near_a_midpoint_that_a_gain_of_1e_5_flips_them(dtype: DType, k: int) -> None:
    v = dither.values(k, k, 16, dtype, Draw("dither", dtype, k))
    rounded = {True: torch.float16, False: torch.bfloat16}[dtype is DType.FP16]

    def out(gain: float) -> list[float]:
        means = [math.fsum(channel) / k * (1 + gain) for channel in v.T.tolist()]
        return torch.tensor(means, dtype=torch.float64).to(rounded).tolist()  # type: ignore[no-any-return]

    small = dtype is DType.BF16 and k == 3  # one step of the format there is more than a hair
    assert small or out(1e-5) != out(0) != out(-1e-5)
    assert out(2.5e-7) == out(0) == out(-2.5e-7) or k > 4000
    sums = np.cumsum(v.astype(np.float32)[::-1], axis=0, dtype=np.float32)[-1]
    assert sums.tolist() == [math.fsum(channel) for channel in v.T.tolist()]


def test_levels_are_whole_octaves_in_every_dtype() -> None:
    level = np.arange(13)
    for dtype in DType:
        pieces = stairs.keys(level, 0.09375, dtype)
        assert np.abs(pieces.sum(axis=-1) * 0.09375 / math.log(2.0) + level).max() < 1e-5


def climbing(cell: str, probe: str, skipped: int | None) -> np.ndarray[Any, Any]:
    """A naive online softmax over the witness row, tile by tile, in FP64; one rise may leave o as it is."""
    problem = build(parse(cell))
    copy = copies(problem, Numerics.default(problem.spec.dtype))[-1]
    assert copy.witness is not None
    ((head, lane),) = ((h, each) for h, each in copy.witness.lanes.items() if each.probe == probe)
    row, spec = copy.witness.rows[lane.kv_head], problem.spec
    k, v = (c.data[row.page, row.offset, lane.kv_head] for c in (copy.inputs.k, copy.inputs.v))
    z = spec.sm_scale * (k @ copy.inputs.q[-1, head])
    m, l, o, rises = -math.inf, 0.0, np.zeros(spec.head_dim_vo), 0
    for tile in range(row.tiles):
        mine = row.tile == tile
        top = max(m, z[mine].max())
        shrink = math.exp(m - top)
        rises += bool(l) and top > m + 1e-3
        p = np.exp(z[mine] - top)
        keep = bool(l) and top > m + 1e-3 and rises == skipped
        l, o, m = shrink * l + p.sum(), (1.0 if keep else shrink) * o + p @ v[mine], top
    wrong = (o / l < copy.expected.out_lo[-1, head]) | (o / l > copy.expected.out_hi[-1, head])
    rounded = FORMATS[spec.dtype].u * np.abs(o / l)
    outside = np.abs(o / l - np.clip(o / l, copy.expected.out_lo[-1, head], copy.expected.out_hi[-1, head]))
    return np.asarray(wrong & (outside > rounded))


@pytest.mark.parametrize("probe", ["cliff", "stair"])
def test_each_rise_that_is_not_rescaled_leaves_the_bound(probe: str) -> None:
    assert not climbing(CLIMB, probe, None).any()
    for rise in range(1, 2 if probe == "cliff" else 7):
        assert climbing(CLIMB, probe, rise).any(), rise


@pytest.mark.parametrize("cell", SMOKE)
def test_select_gives_one_key_the_mass_and_comb_gives_every_key_a_share(cell: str) -> None:
    problem = build(parse(cell))
    for copy in copies(problem, Numerics.default(problem.spec.dtype)):
        for head, lane in copy.witness.lanes.items() if copy.witness else ():
            assert copy.witness is not None
            row = copy.witness.rows[lane.kv_head]
            k = copy.inputs.k.data[row.page, row.offset, lane.kv_head]
            w = np.exp(problem.spec.sm_scale * (k @ copy.inputs.q[-1, head]) - copy.expected.lse[-1, head])
            if lane.probe == "select":
                assert w[lane.target] > 1 - 2.0**-24
            elif lane.probe == "comb":
                assert w.max() < 0.9 or len(w) < 8


@pytest.mark.parametrize("cell", SMOKE)
def test_every_unattended_slot_holds_poison_in_one_launch_and_an_ordinary_value_in_the_other(cell: str) -> None:
    problem = build(parse(cell))
    first, second = poison(problem, 0), poison(problem, 1)
    assert np.array_equal(first.slot, second.slot)
    assert ((first.kind == ORDINARY) != (second.kind == ORDINARY)).all()
    assert len(first) == 2 * (~problem.needed).sum()
    assert not problem.needed[tuple(first.slot.T)].any()
    assert surroundings(problem, 0) != surroundings(problem, 1)


def test_a_right_backend_is_launched_twice_forward_and_once_backward() -> None:
    launches: list[bool] = []
    launcher = Launcher(Backend(emulation(DType.BF16, {})), "cpu", launches.append)
    assert judge(launcher, "x", parse(CLIMB)).verdict is Verdict.PASS
    assert len(launches) == 3


def test_a_probe_whose_fault_could_not_show_is_untrusted_and_the_record_says_in_how_many_rows() -> None:
    adapter = emulation(DType.BF16, {})
    assert judged(adapter, CLIMB).probes["dither"].said == "judged"
    numerics = {DType.BF16: replace(adapter.capabilities.numerics[DType.BF16], unit_p=False)}
    adapter.capabilities = replace(adapter.capabilities, numerics=numerics)
    told = judged(adapter, CLIMB).probes["dither"]
    assert (told.said, told.rows) == ("untrusted", "4 of 4")
    assert judged(adapter, "decode/bf16/kv:2/pattern:all").probes["dither"].said == "not applicable"


class Bent:
    """The emulation with its outputs bent."""

    def __init__(self, bend: Any) -> None:
        self._right = emulation(DType.BF16, {})
        self.capabilities, self._bend, self._runs = self._right.capabilities, bend, 0

    def run(self, case: Case, plan: object = None) -> Outputs:
        self._runs += 1
        outputs = self._right.run(case)
        self._bend(case, outputs, self._runs)
        return outputs


def test_a_fault_of_large_batches_is_found_and_its_company_named() -> None:
    def bend(case: Case, outputs: Outputs, run: int) -> None:
        if case.spec.num_requests > 2:
            outputs.out[1] = 0

    record = judged(Bent(bend), CLIMB)
    assert record.verdict is Verdict.FAIL
    assert "(only in the company of 3 requests)" in record.sentence


def test_a_backend_that_breaks_its_promise_to_be_deterministic_is_named() -> None:
    def bend(case: Case, outputs: Outputs, run: int) -> None:
        if run == 2:
            outputs.out[0, 0, 0] = torch.nextafter(outputs.out[0, 0, 0], torch.tensor(9.0, dtype=torch.bfloat16))

    bent = Bent(bend)
    bent.capabilities = replace(bent.capabilities, determinism={"out": frozenset({Determinism.RUN_TO_RUN})})
    record = judged(bent, CLIMB)
    assert record.finding is not None
    assert record.finding.gate is Gate.DETERMINISM
    assert "out has 2 distinct results in 2 launches" in record.sentence
    assert judged(Bent(bend), CLIMB).verdict is Verdict.PASS


def test_a_gate_whose_probes_do_not_fit_is_not_applicable() -> None:
    record = judged(emulation(DType.FP16, {}), "decode/fp16/kv:40/pattern:one")
    assert record.gates[Gate.RESCALE] == record.gates[Gate.MASS] == "not applicable"
    assert record.gates[Gate.ADDRESS] == "pass"
