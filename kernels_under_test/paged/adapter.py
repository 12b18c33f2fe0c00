"""The bundled Triton backend: normalises raw candidate lists in `plan`, computes in `run`.

On a GPU the kernels are compiled; where TRITON_INTERPRET is set when this module is imported, they run in the
interpreter on CPU tensors, compute in FP32 throughout, and torch makes the final cast.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from sacts.conformance.adapter import (
    NATIVE,
    PADDING,
    Capabilities,
    Case,
    Consumes,
    Determinism,
    Normalized,
    Outputs,
    Refused,
    Support,
    refused,
)
from sacts.kernels_under_test.served import unserved
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, CausalRule, DType

from . import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MERGE_ROWS = 16


@dataclass(frozen=True)
class Plan:
    """Normalised lists and where each query token stands; holds while the spec and the lists of its case do."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    token_request: torch.Tensor
    token_position: torch.Tensor


class Adapter:
    """Paged sparse attention, forward."""

    name = "triton"
    input_precision = "ieee"  # of FP32 operands of tl.dot
    capabilities = Capabilities(
        consumes=Consumes.RAW,
        plan_keeps=frozenset(("kv_indptr", "kv_indices")),
        graph=True,
        determinism=dict.fromkeys(("out", "lse"), frozenset(Determinism) - {Determinism.SCHEDULE}),
        numerics={
            dtype: Numerics(p=DType.FP32 if INTERPRETED else dtype, out=dtype, merges_states=True, unit_p=True)
            for dtype in DType
        },
    )

    def support(self, spec: AttentionSpec) -> Support:
        """Native for what the kernel was written for, refused with the reason otherwise; never another path."""
        for holds, reason in (
            (
                _is_power_of_two(spec.head_dim_qk) and spec.head_dim_qk >= 16,
                "head_dim_qk is not a power of two from 16",
            ),
            (
                _is_power_of_two(spec.head_dim_vo) and spec.head_dim_vo >= 16,
                "head_dim_vo is not a power of two from 16",
            ),
            (not unserved(spec), unserved(spec)),
        ):
            if not holds:
                return refused(reason)
        return NATIVE

    def workspace_bytes(self, case: Case) -> int:
        """FP32 partial m, l and o of each output row and split; FP32 out under the interpreter."""
        spec, splits = case.spec, case.hints.num_splits
        rows = spec.num_tokens * spec.num_qo_heads
        partials = rows * splits * (spec.head_dim_vo + 2) if splits > 1 else 0
        return 4 * (partials + (rows * spec.head_dim_vo if INTERPRETED else 0))

    def plan(self, case: Case) -> Plan:
        """Normalise the raw lists on the device: drop padding, sort each row, remove duplicates."""
        spec, device = case.spec, case.q.device
        lengths = case.kv_indptr.diff()
        rows = torch.repeat_interleave(torch.arange(spec.num_rows, device=device), lengths)
        real = case.kv_indices != PADDING
        keys = torch.unique((rows[real] << 32) + case.kv_indices[real])
        kv_indptr = torch.zeros(spec.num_rows + 1, dtype=torch.int32, device=device)
        kv_indptr[1:] = torch.bincount(keys >> 32, minlength=spec.num_rows).cumsum(0)
        return Plan(
            kv_indptr=kv_indptr,
            kv_indices=(keys & 0xFFFFFFFF).to(torch.int32),
            token_request=torch.tensor(spec.token_request, dtype=torch.int32, device=device),
            token_position=torch.tensor(spec.token_position, dtype=torch.int32, device=device),
        )

    def normalize(self, case: Case) -> Normalized:
        """The lists of `plan`."""
        plan = self.plan(case)
        return Normalized(plan.kv_indptr, plan.kv_indices)

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """Launch the attention kernel, and the merge kernel where rows are split. Raises Refused as declared."""
        spec, splits = case.spec, case.hints.num_splits
        support = self.support(spec)
        if support.status == "refused":
            raise Refused(support.reason)
        plan = plan or self.plan(case)
        if not spec.num_rows:
            return Outputs(case.out, case.lse, path="native")
        buffers = case.workspace.view(torch.float32)
        heads = spec.num_tokens * spec.num_qo_heads
        if INTERPRETED:
            out, buffers = buffers.split([case.out.numel(), buffers.numel() - case.out.numel()])
        else:
            out = case.out
        partial = [0, 0, 0] if splits == 1 else [heads * splits, heads * splits, heads * splits * spec.head_dim_vo]
        partial_m, partial_l, partial_o = buffers.split(partial)
        kernels.attention_kernel[(spec.num_rows, splits)](
            case.q,
            case.k_cache,
            case.v_cache,
            case.page_table,
            case.seq_lens,
            plan.token_request,
            plan.token_position,
            plan.kv_indptr,
            plan.kv_indices,
            out,
            case.lse,
            partial_m,
            partial_l,
            partial_o,
            spec.sm_scale * math.log2(math.e),
            spec.window_left,
            spec.num_kv_heads,
            splits,
            *case.q.stride()[:2],
            *case.k_cache.stride()[:3],
            *case.v_cache.stride()[:3],
            case.page_table.stride(0),
            GROUP=spec.group_size,
            HEAD_DIM_QK=spec.head_dim_qk,
            HEAD_DIM_VO=spec.head_dim_vo,
            PAGE_SIZE=spec.page_size,
            BLOCK_SIZE=spec.block_size,
            CAUSAL=spec.causal is not CausalRule.NONE,
            WINDOW=spec.window_left >= 0,
            SPLIT=splits > 1,
            BLOCK_M=max(16, 1 << (spec.group_size - 1).bit_length()),
            BLOCK_N=max(16, 1 << (case.hints.kv_tile.bit_length() - 1)),
            UPCAST=INTERPRETED,
            INPUT_PRECISION=self.input_precision,
        )
        if splits > 1:
            kernels.merge_kernel[(-(-heads // MERGE_ROWS),)](
                out, case.lse, partial_m, partial_l, partial_o, heads, splits, spec.head_dim_vo, MERGE_ROWS
            )
        if INTERPRETED:
            case.out.copy_(out.view(case.out.shape))
        return Outputs(case.out, case.lse, path="native")


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
