"""Arguments of the kernels: what they are compiled for, and what a launch gives them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from sacts.conformance.adapter import Case
from sacts.reference.spec import (
    AttentionSpec,
    CausalRule,
    Codec,
    DType,
    Epilogue,
    Route,
)

from .limits import INTERPRETED, heads_of
from .plan import Plan
from .tables import padded


def shapes(spec: AttentionSpec, route: Route, q_tile: int) -> dict[str, Any]:
    """What the attention kernel is compiled for, but for tile, splits and epilogue."""
    heads = heads_of(spec, route)
    return {
        "GROUP": spec.heads_per_list,
        "LISTS": spec.lists_per_kv_head,
        "HEADS": heads,
        "HEAD_DIM_QK": spec.head_dim_qk,
        "HEAD_DIM_VO": spec.head_dim_vo,
        "BLOCK_QK": padded(spec.head_dim_qk),
        "BLOCK_VO": padded(spec.head_dim_vo),
        "BLOCK_PAIRS": padded(-(-spec.head_dim_qk // 2)) if spec.rope else 0,
        "BLOCK_M": padded(heads * q_tile),
        "PAGE_SIZE": spec.page_size,
        "BLOCK_SIZE": spec.block_size,
        "CAUSAL": spec.causal is not CausalRule.NONE,
        "WINDOW": spec.window_left >= 0,
        "K_CODEC": codec_of(spec.k_codec),
        "V_CODEC": codec_of(spec.v_codec),
        "UPCAST": INTERPRETED,
    }


def codec_of(codec: Codec | None) -> str:
    """What the kernels decode: a format, and of int4 along what two codes share a byte, and that the first is the high
    nibble, where it is not as usual.
    """
    if codec is None:
        return "none"
    return codec.format + "_token" * (codec.nibble_axis == "token") + "_high" * (not codec.low_nibble_first)


def of_slots(stored: Tensor) -> tuple[int, ...]:
    """Strides of the pages, tokens and heads of a cache [pages, page_size, heads, d], or of scratch [slots, d]."""
    return stored.stride()[:3] if stored.dim() == 4 else (0, stored.stride(0), 0)


def strides(name: str, laid: tuple[int, ...]) -> dict[str, int]:
    """Arguments: token and head of q; page, token and head of a cache; and the dim of scales."""
    axes = ("token", "head") if name == "q" else ("page", "token", "head", "dim")
    return {f"stride_{name}_{axis}": stride for axis, stride in zip(axes, laid, strict=False)}


def scales_of(name: str, scales: Tensor | None, zeros: Tensor | None, *, late: bool) -> dict[str, Any]:
    """Arguments of one codec, whose codes are scaled before the product, or behind it (`late`). Raises ValueError for
    zero points that do not lie as their scales do.
    """
    laid = (0, 0, 0, 0) if scales is None else shared_strides(scales)
    if scales is not None and zeros is not None and shared_strides(zeros) != laid:
        raise ValueError(f"{name}_zeros must have the strides of {name}_scales {laid}, got {shared_strides(zeros)}")
    return {
        f"{name}_scales_ptr": scales,
        f"{name}_zeros_ptr": zeros,
        f"{name.upper()}_CHANNELS": scales is not None and scales.shape[3] > 1,
        f"{name.upper()}_LATE": late,
        **strides(f"{name}s", laid),
    }


def shared_strides(scales: Tensor) -> tuple[int, ...]:
    """Strides of scales [pages, page_size, heads, dim], 0 along the axes of size 1, which share one."""
    return tuple(0 if size == 1 else stride for size, stride in zip(scales.shape, scales.stride(), strict=True))


def terms_of(spec: AttentionSpec, plan: Plan) -> dict[str, Any]:
    """Arguments of the terms. Logits are in units of log2; under a soft cap c tanh(z / c) only behind it."""
    tables, cap, dropout = plan.tables, spec.logits_soft_cap, spec.dropout
    return {
        "scale": spec.sm_scale / cap if cap else spec.sm_scale * math.log2(math.e),
        "cap_log2": cap * math.log2(math.e) if cap else None,
        "forced_ptr": plan.forced,
        "ordinals_ptr": plan.ordinals,
        "query_ordinals_ptr": plan.query_ordinals,
        "log2_counts_ptr": plan.log2_counts,
        "turns_ptr": tables.turns,
        "channels_ptr": tables.channels,
        "turns_low": tables.turns_low,
        "num_pairs": spec.rope.rotary_dim // 2 if spec.rope else 0,
        "slopes_ptr": tables.slopes,
        "bucket_bias_ptr": tables.bucket_bias,
        "bucket_reach": spec.buckets.first[-1] if spec.buckets else 0,
        "sinks_ptr": tables.sinks,
        "dropout_ptr": tables.dropout,
        "keep_scale": 1.0 / (1.0 - dropout.p) if dropout else 1.0,
    }


def epilogue_of(case: Case, *, of_sum: bool = False) -> dict[str, Any]:
    """Arguments of an epilogue: its kind, the dtype of a cast or the function; its gate; step and largest code of
    low_bit. Where there are branches only their sum has one (`of_sum`).
    """
    how = case.spec.epilogue if of_sum is (case.spec.num_branches > 1) else Epilogue()
    kind = how.dtype or how.function or how.kind
    return {
        "gate_ptr": case.gate,
        "EPILOGUE": "none" if kind is DType.FP32 else kind.value,
        "epilogue_step": how.scale or 1.0,
        "epilogue_largest": float((1 << (how.bits - 1)) - 1) if how.bits else 0.0,
    }
