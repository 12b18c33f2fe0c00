"""An exact backend for the tests of the bench, and how it can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from fake_peers import attention
from torch import Tensor

from sacts.conformance.adapter import Capabilities, Case, Outputs
from sacts.reference.numerics import Numerics
from sacts.reference.spec import CausalRule, DType

Edit = Callable[[Tensor, int], Tensor]


class Exact:
    """FP64, row by row, P kept whole: everything that an exact sum promises holds. `edit(t, row)`: what becomes of the
    attended positions of a row.
    """

    capabilities = Capabilities(numerics={DType.BF16: Numerics(p=DType.FP32, out=DType.BF16, unit_p=True)})

    def __init__(self, edit: Edit = lambda t, row: t) -> None:
        self._edit = edit

    def run(self, case: Case, plan: object = None) -> Outputs:
        spec, indptr = case.spec, case.kv_indptr.tolist()
        k, v = decoded(case)
        for row in range(spec.num_rows):
            token, head = divmod(row, spec.num_kv_heads)
            request = spec.token_request[token]
            entries = case.kv_indices[indptr[row] : indptr[row + 1]].long()
            t = (entries[:, None] * spec.block_size + torch.arange(spec.block_size)).flatten()
            last = spec.seq_lens[request] - 1 if spec.causal is CausalRule.NONE else spec.token_position[token]
            t = self._edit(t[t <= last], row)
            where = case.page_table[request, t // spec.page_size].long(), t % spec.page_size, head
            heads = slice(head * spec.group_size, (head + 1) * spec.group_size)
            out, lse = attention(case.q[token, heads][None], k[where][:, None], v[where][:, None], spec.sm_scale)
            case.out[token, heads], case.lse[token, heads] = out[0].bfloat16(), lse[0].float()
        return Outputs(case.out, case.lse)


def decoded(case: Case) -> tuple[Tensor, Tensor]:
    """K and V in FP64."""
    k, v = case.k_cache.float().double(), case.v_cache.float().double()
    return (k if case.k_scales is None else k * case.k_scales), (v if case.v_scales is None else v * case.v_scales)


class WithoutLse(Exact):
    """The same, which keeps its lse for itself."""

    def run(self, case: Case, plan: object = None) -> Outputs:
        return replace(super().run(case), lse=None)


class OtherRotation(Exact):
    """Returns the output of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self._before: tuple[Tensor, Tensor] | None = None

    def run(self, case: Case, plan: object = None) -> Outputs:
        super().run(case)
        mine = case.out.clone(), case.lse.clone()
        before, self._before = self._before or mine, mine
        return Outputs(*before)


class Once(Exact):
    """Writes its output in its first call of each case only."""

    def __init__(self) -> None:
        super().__init__()
        self._done: set[int] = set()

    def run(self, case: Case, plan: object = None) -> Outputs:
        if case.out.data_ptr() not in self._done:
            self._done.add(case.out.data_ptr())
            super().run(case)
        return Outputs(case.out, case.lse)
