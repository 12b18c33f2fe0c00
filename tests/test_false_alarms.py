"""No false alarm: right modelled kernels of many arithmetics are accepted on every cell of the smoke tier.

`SACTS_CAMPAIGN=44 pytest -n 14 -rP tests/test_false_alarms.py` judges 20,064 cells and prints the largest observed /
allowed of each gate.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from sacts.conformance.adapter import Backend
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.matrices import tiers
from sacts.reference.spec import CodecFormat, DType
from sacts.reports.records import Verdict

REPLICATES = int(os.environ.get("SACTS_CAMPAIGN", "0"))
CELLS = tiers.load(tiers.path_of("smoke"))
# p None: P in the dtype of the cell.
ARITHMETICS: dict[str, tuple[DType | CodecFormat | None, Arithmetic]] = {
    "FP32 P": (DType.FP32, Arithmetic()),
    "P in the dtype": (None, Arithmetic()),
    "P in bf16": (DType.BF16, Arithmetic(tile=16)),
    "P in fp16, cast P in l": (DType.FP16, Arithmetic(l_sums_cast_p=True, tile=128)),
    "3 splits, tiles in any order": (None, Arithmetic(splits=3, tile=16, order=3)),
    "8 splits, tiles in another order": (None, Arithmetic(splits=8, tile=16, order=11)),
    "merged outputs": (None, Arithmetic(splits=4, merge_outputs=True, tile=16)),
    "partials in bf16": (None, Arithmetic(splits=4, partial=DType.BF16, tile=32)),
    "cubic exp2": (None, Arithmetic(exp2="cubic", tile=32)),
    "truncated exp2, 8 octaves late": (None, Arithmetic(exp2="truncated", lag=8, tile=16)),
    "tensor cores of 25 bits": (None, Arithmetic(fraction_bits=25, tile=64)),
    "FP8 P, raised by 8 octaves": (CodecFormat.FP8_E4M3FN, Arithmetic(p_offset=8, tile=32)),
    "FP8 tensor cores": (CodecFormat.FP8_E4M3FN, Arithmetic(p_offset=8, fp8_mma=True, tile=64)),
    "FP8 P in e5m2, 8 octaves late": (CodecFormat.FP8_E5M2, Arithmetic(lag=8, tile=16)),
    "FP8 sums, P in the dtype": (None, Arithmetic(fp8_mma=True, splits=2, tile=32)),
    "tf32 operands": (None, Arithmetic(tf32=True, tile=32)),
    "tensor cores of 24 bits, 2 splits": (None, Arithmetic(fraction_bits=24, splits=2, tile=32)),
}
QUICK = ("FP8 tensor cores", "3 splits, tiles in any order", "tensor cores of 25 bits")


def backend_of(name: str) -> Backend:
    p, how = ARITHMETICS[name]
    fields = {dtype: {**how.__dict__, "p": p or dtype, "out": dtype} for dtype in DType}
    return Backend(Adapter({dtype: Arithmetic(**each) for dtype, each in fields.items()}))


def judged(name: str, replicates: range) -> tuple[Counter[Verdict], list[str], dict[str, float]]:
    launcher, verdicts, alarms, largest = Launcher(backend_of(name), "cpu"), Counter[Verdict](), [], dict[str, float]()
    for replicate in replicates:
        for cell in CELLS:
            record = judge(launcher, name, cell, replicate)
            verdicts[record.verdict] += 1
            if record.verdict not in (Verdict.PASS, Verdict.UNTRUSTED):
                alarms.append(f"{cell.id}, replicate {replicate}: {record.sentence}")
            for gate, use in record.use.items():
                largest[gate] = max(largest.get(gate, 0.0), use)
    return verdicts, alarms, largest


@pytest.mark.parametrize("name", ARITHMETICS if REPLICATES else QUICK)
def test_a_right_kernel_is_accepted(name: str) -> None:
    """One replicate of every cell for two arithmetics; the campaign takes them all."""
    verdicts, alarms, largest = judged(name, range(max(REPLICATES, 1)))
    print(f"\n{name}: {dict(verdicts)}, largest observed / allowed {largest}")
    assert not alarms, alarms[:3]
    weak = ARITHMETICS[name][1].fp8_mma  # sums of 13 bits hide one candidate of a few hundred
    assert verdicts[Verdict.PASS] > (0.7 if weak else 0.9) * verdicts.total()
    assert max(largest.values()) > 0.05
