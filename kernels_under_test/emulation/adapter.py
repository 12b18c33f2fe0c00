"""The model as a backend: a raw consumer that serves every forward term on the CPU, and its gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sacts.conformance.adapter import (
    NATIVE,
    Capabilities,
    Case,
    Consumes,
    Gradients,
    Outputs,
    Refused,
    Saved,
    Support,
    Trace,
)
from sacts.reference.spec import AttentionSpec, DType

from . import backward as model
from .arithmetic import Arithmetic
from .dequantise import coded_caches
from .forward import added, attended, forward, normalised
from .rows import branches_of, by_row, by_token, rows_of
from .terms import Rows
from .trace import trace


class Adapter:
    """Judged like any other; `arithmetic` decides what it rounds; a row is split as often as it or the hint says."""

    name = "emulation"

    def __init__(self, arithmetic: dict[DType, Arithmetic] | None = None) -> None:
        self.arithmetic = arithmetic or {dtype: Arithmetic(p=dtype, out=dtype) for dtype in DType}
        self.capabilities = Capabilities(
            consumes=Consumes.RAW,
            numerics={dtype: each.numerics for dtype, each in self.arithmetic.items()},
            d_lse=True,
        )

    def support(self, spec: AttentionSpec) -> Support:
        """Every row."""
        return NATIVE

    def run(self, case: Case, plan: Any = None) -> Outputs:
        """Forward of all rows at once, branch after branch."""
        spec, arithmetic = case.spec, self._arithmetic(case)
        if case.gates is not None:
            parts = [normalised(attended(each.spec, self._rows(each), arithmetic)) for each in branches_of(case)]
            outs, lses = ([by_token(spec, x) for x in of] for of in zip(*parts, strict=True))
            out, lse = added(spec, outs, case.gates, arithmetic), torch.stack(lses, dim=-1)
        else:
            gate = None if case.gate is None else by_row(spec, case.gate)
            found = forward(spec, self._rows(case), arithmetic, gate)
            out, lse = (by_token(spec, x) for x in found)
        case.out.copy_(out)
        case.lse.copy_(lse)
        return Outputs(case.out, case.lse, path=str(NATIVE))

    def trace(self, case: Case, plan: Any = None) -> Trace:
        """Logits and running states of all rows."""
        return trace(case.spec, self._rows(case), self._arithmetic(case))

    def _rows(self, case: Case) -> Rows:
        return rows_of(case, *coded_caches(case), self.arithmetic[case.spec.dtype].reconstructed)

    def _arithmetic(self, case: Case) -> Arithmetic:
        arithmetic = self.arithmetic[case.spec.dtype]
        return replace(arithmetic, splits=max(arithmetic.splits, case.hints.num_splits))

    def backward(
        self, case: Case, saved: Saved, d_out: torch.Tensor, d_lse: torch.Tensor | None = None, plan: Any = None
    ) -> Gradients:
        """Gradients of all rows at once, added up slot by slot in FP32, then rounded. Raises Refused for branches."""
        if case.spec.num_branches > 1:
            raise Refused("not yet: gradients of gated branches")
        spec, rows, arithmetic = case.spec, self._rows(case), self.arithmetic[case.spec.dtype]
        given = (saved.out, saved.lse, d_out, torch.zeros_like(saved.lse) if d_lse is None else d_lse)
        out, lse, d_o, d_l = (by_row(spec, x) for x in given)
        found = model.backward(spec, rows, model.Saved(out, lse), d_o, d_l, arithmetic)
        made = case.gradients
        assert made is not None
        made.d_q.copy_(by_token(spec, found.d_q))
        slots, slot = rows.slot.unique(return_inverse=True)
        for cache, d in ((made.d_k, found.d_k), (made.d_v, found.d_v)):
            total = model.scattered(d, slot, len(slots), arithmetic.order, case.hints.reduction)
            cache.view(-1, d.shape[-1])[slots] = total.to(cache.dtype)
        if made.d_sink is not None:
            made.d_sink.copy_(by_token(spec, found.d_sink).sum(dim=0))
        return made
