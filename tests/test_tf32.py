"""Backends that cut FP32 operands declare it; without tensor cores they are as right as the plain ones."""

from __future__ import annotations

import pytest
import torch

from sacts.conformance.adapter import Backend
from sacts.conformance.loading import load
from sacts.conformance.worker import Worker
from sacts.matrices.cell import parse
from sacts.reference.spec import DType
from sacts.reports.records import ACCEPTED

CELLS = ("decode/fp32/kv:90+50", "prefill/fp32/kv:33+9/q:3+2/block:16/pattern:all/causal:bottom_right")


@pytest.mark.parametrize("name", ["Triton", "Sdpa"])
def test_what_is_cut_is_declared_for_fp32_alone(name: str) -> None:
    backend: Backend = load(f"sacts.kernels_under_test.tf32:{name}")
    declared = {dtype: backend.capabilities.numerics_of(dtype).u_operand for dtype in DType}
    assert declared == {DType.FP32: 2.0**-10, DType.BF16: 0.0, DType.FP16: 0.0}


@pytest.mark.parametrize("name", ["Triton", "Sdpa"])
def test_without_tensor_cores_the_wider_bounds_hold_too(name: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with Worker(f"sacts.kernels_under_test.tf32:{name}", "cpu") as worker:
        records = [worker.judge(parse(cell).id) for cell in CELLS]
    assert {record.verdict for record in records} <= ACCEPTED
    assert torch.backends.cuda.matmul.allow_tf32 is before
