"""The bundled Triton backend: normalises raw candidate lists in `plan`, computes in `run`.

On a GPU the kernels are compiled; where TRITON_INTERPRET is set when this module is imported, they run in the
interpreter on CPU tensors, compute in FP32 throughout, and torch makes the final cast.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from sacts.conformance.adapter import (
    NATIVE,
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
from sacts.reference.numerics import Numerics
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Codec,
    CodecFormat,
    DType,
    Epilogue,
    EpilogueKind,
    ScaleGranularity,
)

from . import kernels
from .plan import Plan, normalized, plan_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MERGE_ROWS = 16
LARGEST_HEAD_DIM = 1024  # padded; more does not fit into shared memory beside 16 slots
LARGEST_TURNED = 512  # padded; on a GPU: beyond it sines and cosines fill minutes of compilation, and registers spill
LARGEST_REACH = 1 << 16  # of relative buckets: their table holds a bias for each distance
TILE_BYTES = 64 << 10  # of K and V together in one tile: beyond it registers spill, and shared memory ends at 227 KiB
WIDE = 512  # channels of K and V, padded, beyond which the copies that a pipeline makes of a tile do not fit
STAGED_BYTES = 192 << 10  # of all tiles that are on their way


class Adapter:
    """Paged sparse attention, forward."""

    name = "triton"
    input_precision = "ieee"  # of FP32 operands of tl.dot
    capabilities = Capabilities(
        consumes=Consumes.RAW,
        plan_keeps=frozenset(("seq_lens", "kv_indptr", "kv_indices")),
        graph=True,
        determinism=dict.fromkeys(("out", "lse"), frozenset(Determinism) - {Determinism.SCHEDULE}),
        numerics={
            dtype: Numerics(
                p=DType.FP32 if INTERPRETED else dtype,
                out=dtype,
                merges_states=True,
                unit_p=True,
                # Operands of tl.dot have one dtype: K behind scale and RoPE, q behind RoPE, and V behind its scale.
                reconstructed=DType.FP32 if INTERPRETED else dtype,
                rotated=DType.FP32 if INTERPRETED else dtype,
                u_freq=2.0**-24,  # a table, rounded once
            )
            for dtype in DType
        },
    )

    def support(self, spec: AttentionSpec) -> Support:
        """Native for what the kernel was written for, refused with the reason otherwise; never another path."""
        for beyond, reason in (
            (_padded(spec.head_dim_qk) > LARGEST_HEAD_DIM, f"head_dim_qk above {LARGEST_HEAD_DIM}"),
            (_padded(spec.head_dim_vo) > LARGEST_HEAD_DIM, f"head_dim_vo above {LARGEST_HEAD_DIM}"),
            (
                not INTERPRETED and spec.rope and _padded(spec.head_dim_qk) > LARGEST_TURNED,
                f"not yet: rope over head_dim_qk above {LARGEST_TURNED} on a GPU",
            ),
            (spec.heads_per_list < spec.group_size, "not yet: candidate lists per query head"),
            (spec.epilogue.kind is EpilogueKind.GATE, "not yet: epilogue gate"),
            (spec.num_branches > 1, "not yet: gated branches"),
            (spec.buckets and spec.buckets.first[-1] > LARGEST_REACH, f"buckets beyond a distance of {LARGEST_REACH}"),
            (unread := _unread(spec.k_codec), f"not yet: k_codec {unread}"),
            (unread := _unread(spec.v_codec), f"not yet: v_codec {unread}"),
        ):
            if beyond:
                return refused(reason)
        return NATIVE

    def workspace_bytes(self, case: Case) -> int:
        """FP32 partial m, l and o of each output row and split; FP32 out under the interpreter."""
        spec, splits = case.spec, case.hints.num_splits
        rows = spec.num_tokens * spec.num_qo_heads
        partials = rows * splits * (spec.head_dim_vo + 2) if splits > 1 else 0
        return 4 * (partials + (rows * spec.head_dim_vo if INTERPRETED else 0))

    def plan(self, case: Case) -> Plan:
        """Normalise the raw lists on the device, and make the tables of the terms. Raises Refused as declared."""
        self._check(case.spec)
        return plan_of(case)

    def normalize(self, case: Case) -> Normalized:
        """The lists that `plan` makes, before empty rows get a token; a multiset with its repeats."""
        lists = normalized(case)
        if case.spec.candidate_kind is not CandidateKind.MULTISET:
            return Normalized(lists.kv_indptr, lists.kv_indices)
        named = torch.cat((lists.counts.new_zeros(1), lists.counts.cumsum(0)))[lists.kv_indptr.long()]
        return Normalized(named, lists.kv_indices.repeat_interleave(lists.counts))

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """Launch the attention kernel, and the merge kernel where rows are split. Raises Refused as declared."""
        spec, splits = case.spec, case.hints.num_splits
        self._check(spec)
        plan = plan or self.plan(case)
        if not spec.num_rows:
            return Outputs(case.out, case.lse, path="native")
        results = self._results(case)
        self._attend(case, plan, results)
        if splits > 1:
            rows = spec.num_tokens * spec.num_qo_heads
            kernels.merge_kernel[(-(-rows // MERGE_ROWS),)](
                *results,
                sinks_ptr=plan.tables.sinks,
                num_rows=rows,
                num_qo_heads=spec.num_qo_heads,
                num_splits=splits,
                HEAD_DIM_VO=spec.head_dim_vo,
                BLOCK_VO=_padded(spec.head_dim_vo),
                BLOCK_M=MERGE_ROWS,
                **_epilogue(spec.epilogue),
            )
        if INTERPRETED:
            case.out.copy_(results[0].view(case.out.shape))
        return Outputs(case.out, case.lse, path="native")

    def _results(self, case: Case) -> tuple[Tensor, ...]:
        """What the kernels write: out, lse, and partial m, l and o of split rows, in the workspace."""
        buffers = case.workspace.view(torch.float32)
        splits, out = case.hints.num_splits, case.out
        if INTERPRETED:
            out, buffers = buffers.split([case.out.numel(), buffers.numel() - case.out.numel()])
        parts = case.lse.numel() * splits if splits > 1 else 0
        return out, case.lse, *buffers.split([parts, parts, parts * case.spec.head_dim_vo])

    def _attend(self, case: Case, plan: Plan, results: tuple[Tensor, ...]) -> None:
        """Launch the attention kernel: a program for each candidate row and split."""
        spec, splits = case.spec, case.hints.num_splits
        kernels.attention_kernel[(spec.num_rows, splits)](
            case.q,
            _bits(case.k_cache),
            _bits(case.v_cache),
            case.page_table,
            case.seq_lens,
            plan.token_request,
            plan.token_position,
            plan.kv_indptr,
            plan.kv_indices,
            *results,
            window_left=spec.window_left,
            num_kv_heads=spec.num_kv_heads,
            num_splits=splits,
            **_terms(spec, plan),
            **_scales("k", case.k_scales, case.k_zeros),
            **_scales("v", case.v_scales, case.v_zeros),
            **_strides("q", case.q.stride()[:2]),
            **_strides("k", case.k_cache.stride()[:3]),
            **_strides("v", case.v_cache.stride()[:3]),
            stride_table=case.page_table.stride(0),
            SPLIT=splits > 1,
            BLOCK_N=_tile(spec, case.hints.kv_tile),
            INPUT_PRECISION=self.input_precision,
            **_shapes(spec),
            **_epilogue(spec.epilogue),
            **_options(spec, _tile(spec, case.hints.kv_tile)),
        )

    def _check(self, spec: AttentionSpec) -> None:
        """Raises Refused as declared."""
        support = self.support(spec)
        if support.status == "refused":
            raise Refused(support.reason)


def _padded(n: int) -> int:
    """The power of two from 16 on that holds n: what tl.dot and tl.arange take."""
    return max(16, 1 << (n - 1).bit_length())


def _shapes(spec: AttentionSpec) -> dict[str, Any]:
    """What the attention kernel is compiled for, but for tile, splits and epilogue."""
    return {
        "GROUP": spec.group_size,
        "HEAD_DIM_QK": spec.head_dim_qk,
        "HEAD_DIM_VO": spec.head_dim_vo,
        "BLOCK_QK": _padded(spec.head_dim_qk),
        "BLOCK_VO": _padded(spec.head_dim_vo),
        "BLOCK_M": _padded(spec.group_size),
        "PAGE_SIZE": spec.page_size,
        "BLOCK_SIZE": spec.block_size,
        "CAUSAL": spec.causal is not CausalRule.NONE,
        "WINDOW": spec.window_left >= 0,
        "K_CODEC": spec.k_codec.format.value if spec.k_codec else "none",
        "V_CODEC": spec.v_codec.format.value if spec.v_codec else "none",
        "UPCAST": INTERPRETED,
    }


def _tile(spec: AttentionSpec, hint: int) -> int:
    """Slots in a tile: the hint, on a GPU at most as many as leave shared memory for K and V of a tile."""
    if not INTERPRETED:
        fp32 = spec.dtype is DType.FP32 or spec.rope or spec.k_codec or spec.v_codec  # on their way to tl.dot
        size = 4 if fp32 else 2
        hint = min(hint, TILE_BYTES // (size * (_padded(spec.head_dim_qk) + _padded(spec.head_dim_vo))))
    return max(16, 1 << (max(hint, 1).bit_length() - 1))


def _options(spec: AttentionSpec, tile: int) -> dict[str, int]:
    """How a kernel is compiled: with as many tiles on their way at once, 3 at most, as shared memory holds of what they
    load; wide heads with more warps.
    """
    size = 4 if spec.dtype is DType.FP32 else 2
    k, v = (_loaded(codec, size) for codec in (spec.k_codec, spec.v_codec))
    partners = 2 if spec.rope else 1  # RoPE loads each channel with the one that turns with it
    loaded = tile * (partners * k * _padded(spec.head_dim_qk) + v * _padded(spec.head_dim_vo))
    if _padded(spec.head_dim_qk) + _padded(spec.head_dim_vo) > WIDE:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_stages": max(1, min(3, STAGED_BYTES // loaded))}


def _loaded(codec: Codec | None, size: int) -> int:
    """Bytes that one channel of a slot loads: what is stored, and a scale and zero point where channels have any."""
    if codec is None:
        return size
    by_channel = codec.granularity in (ScaleGranularity.CHANNEL, ScaleGranularity.PAGE_CHANNEL)
    return 1 + 4 * by_channel * (1 + codec.asymmetric)


def _unread(codec: Codec | None) -> str:
    """What of a codec the kernel cannot read, in words."""
    if codec is None:
        return ""
    if codec.format is CodecFormat.FP8_E4M3FNUZ:
        return codec.format
    if codec.nibble_axis != "dim":
        return f"{codec.format} packed along {codec.nibble_axis}"
    return "" if codec.low_nibble_first else f"{codec.format} with the high nibble first"


def _bits(cache: Tensor) -> Tensor:
    """A cache; of fp8 its bits, which the kernel decodes itself."""
    return cache.view(torch.uint8) if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else cache


def _strides(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Arguments: token and head of q; page, token and head of a cache; and the dim of scales."""
    axes = ("token", "head") if name == "q" else ("page", "token", "head", "dim")
    return {f"stride_{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=False)}


def _scales(name: str, scales: Tensor | None, zeros: Tensor | None) -> dict[str, Any]:
    """Arguments of one codec. Raises ValueError for zero points that do not lie as their scales do."""
    strides = (0, 0, 0, 0) if scales is None else shared_strides(scales)
    if scales is not None and zeros is not None and shared_strides(zeros) != strides:
        raise ValueError(f"{name}_zeros must have the strides of {name}_scales {strides}, got {shared_strides(zeros)}")
    return {
        f"{name}_scales_ptr": scales,
        f"{name}_zeros_ptr": zeros,
        f"{name.upper()}_CHANNELS": scales is not None and scales.shape[3] > 1,
        **_strides(f"{name}s", strides),
    }


def shared_strides(scales: Tensor) -> tuple[int, ...]:
    """Strides of scales [pages, page_size, heads, dim], 0 along the axes of size 1, which share one."""
    return tuple(0 if size == 1 else stride for size, stride in zip(scales.shape, scales.stride(), strict=True))


def _terms(spec: AttentionSpec, plan: Plan) -> dict[str, Any]:
    """Arguments of the terms. Logits are in units of log2; under a soft cap c tanh(z / c) only behind it."""
    tables, cap, dropout = plan.tables, spec.logits_soft_cap, spec.dropout
    return {
        "scale": spec.sm_scale / cap if cap else spec.sm_scale * math.log2(math.e),
        "cap_log2": cap * math.log2(math.e) if cap else None,
        "forced_ptr": plan.forced,
        "ordinals_ptr": plan.ordinals,
        "query_ordinals_ptr": plan.query_ordinals,
        "log2_counts_ptr": plan.log2_counts,
        "frequency_ptr": tables.frequency,
        "partner_ptr": tables.partner,
        "slopes_ptr": tables.slopes,
        "bucket_bias_ptr": tables.bucket_bias,
        "bucket_reach": spec.buckets.first[-1] if spec.buckets else 0,
        "sinks_ptr": tables.sinks,
        "dropout_ptr": tables.dropout,
        "keep_scale": 1.0 / (1.0 - dropout.p) if dropout else 1.0,
    }


def _epilogue(how: Epilogue) -> dict[str, Any]:
    """Arguments of an epilogue: its kind, the dtype of a cast or the function; step and largest code of low_bit."""
    kind = how.dtype or how.function or how.kind
    return {
        "EPILOGUE": "none" if kind is DType.FP32 else kind.value,
        "epilogue_step": how.scale or 1.0,
        "epilogue_largest": float((1 << (how.bits - 1)) - 1) if how.bits else 0.0,
    }
