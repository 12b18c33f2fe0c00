"""The model as a backend: a raw consumer that serves every forward term on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sacts.conformance.adapter import NATIVE, Capabilities, Case, Consumes, Outputs, Support, Trace
from sacts.reference.spec import AttentionSpec, DType

from .arithmetic import Arithmetic
from .forward import forward
from .rows import by_token, rows_of
from .trace import trace


class Adapter:
    """Judged like any other; `arithmetic` decides what it rounds; a row is split as often as it or the hint says."""

    name = "emulation"

    def __init__(self, arithmetic: dict[DType, Arithmetic] | None = None) -> None:
        self.arithmetic = arithmetic or {dtype: Arithmetic(p=dtype, out=dtype) for dtype in DType}
        self.capabilities = Capabilities(
            consumes=Consumes.RAW, numerics={dtype: each.numerics for dtype, each in self.arithmetic.items()}
        )

    def support(self, spec: AttentionSpec) -> Support:
        """Every row."""
        return NATIVE

    def run(self, case: Case, plan: Any = None) -> Outputs:
        """Forward of all rows at once."""
        out, lse = forward(case.spec, rows_of(case), self._arithmetic(case))
        case.out.copy_(by_token(case.spec, out))
        case.lse.copy_(by_token(case.spec, lse))
        return Outputs(case.out, case.lse, path=str(NATIVE))

    def trace(self, case: Case, plan: Any = None) -> Trace:
        """Logits and running states of all rows."""
        return trace(case.spec, rows_of(case), self._arithmetic(case))

    def _arithmetic(self, case: Case) -> Arithmetic:
        arithmetic = self.arithmetic[case.spec.dtype]
        return replace(arithmetic, splits=max(arithmetic.splits, case.hints.num_splits))
