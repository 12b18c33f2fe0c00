"""The bundled backends with FP32 operands cut to tf32 by the tensor cores of a GPU: what their declared `u_operand`
allows is more, and elsewhere nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from sacts.conformance.adapter import Capabilities, Case, Gradients, Outputs, Saved
from sacts.reference.spec import DType

from . import sdpa
from .paged import adapter as paged

U_TF32 = 2.0**-10  # cut, not rounded, to 11 significant bits


def _declared(plain: Capabilities) -> Capabilities:
    """The same, but for products of FP32 operands."""
    fp32 = replace(plain.numerics_of(DType.FP32), u_operand=U_TF32)
    return replace(plain, numerics={**plain.numerics, DType.FP32: fp32})


class Triton(paged.Adapter):
    """The Triton backend."""

    name = "triton-tf32"
    input_precision = "tf32"
    capabilities = _declared(paged.Adapter.capabilities)


class Sdpa(sdpa.Adapter):
    """The dense fallback, forward and backward."""

    name = "sdpa-tf32"
    capabilities = _declared(sdpa.Adapter.capabilities)

    def run(self, case: Case, plan: Any = None) -> Outputs:
        """As the plain one does."""
        with _tf32():
            return super().run(case, plan)

    def backward(
        self, case: Case, saved: Saved, d_out: torch.Tensor, d_lse: torch.Tensor | None = None, plan: Any = None
    ) -> Gradients:
        """As the plain one does."""
        with _tf32():
            return super().backward(case, saved, d_out, d_lse, plan)


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
