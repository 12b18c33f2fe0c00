"""Quantised K or V as the modelled kernel reads it: codes and scales gathered by physical page, decoded by torch,
(code - zero point) * scale in FP32, then rounded to the format that the products take.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sacts.conformance.adapter import Case
from sacts.reference.spec import Codec, CodecFormat, DType

from .arithmetic import cast

FP8 = {
    CodecFormat.FP8_E4M3FN: torch.float8_e4m3fn,
    CodecFormat.FP8_E5M2: torch.float8_e5m2,
    CodecFormat.FP8_E4M3FNUZ: torch.float8_e4m3fnuz,
}


def coded_caches(case: Case) -> tuple[Coded | None, Coded | None]:
    """K and V of a case as codes, None where the spec has no codec."""
    spec = case.spec
    return (
        _coded(spec.k_codec, case.k_cache, case.k_scales, case.k_zeros),
        _coded(spec.v_codec, case.v_cache, case.v_scales, case.v_zeros),
    )


def _coded(codec: Codec | None, cache: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Coded | None:
    if codec is None:
        return None
    assert scales is not None
    return Coded(codec, cache.view(torch.uint8), scales, torch.zeros(1, 1, 1, 1) if zeros is None else zeros)


class Coded(NamedTuple):
    """A cache in codes: uint8 [pages, page_size, heads, dim], int4 packed along dim (two to a byte, the first in the
    low nibble); scales and zeros FP32 of the same axes, of size 1 where shared.
    """

    codec: Codec
    codes: Tensor
    scales: Tensor
    zeros: Tensor


def gathered(coded: Coded, page: Tensor, offset: Tensor, head: Tensor, dim: int, reconstructed: DType) -> Tensor:
    """K or V of the slots (page, offset, head), broadcast [R, K]: [R, K, dim] FP32."""
    codes = coded.codes[page, offset, head]
    if coded.codec.format is CodecFormat.INT4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., :dim]
    values = _decoded(codes, coded.codec.format)
    scale, zero = (_shared(x, page, offset, head) for x in (coded.scales, coded.zeros))
    return cast((values - zero) * scale, reconstructed)


def _decoded(codes: Tensor, form: CodecFormat) -> Tensor:
    if form is CodecFormat.INT4:
        return ((codes.int() + 8) % 16 - 8).float()
    return codes.contiguous().view(FP8.get(form, torch.int8)).float()


def _shared(x: Tensor, page: Tensor, offset: Tensor, head: Tensor) -> Tensor:
    """What stands for a slot where axes of size 1 are shared: [R, K, dim or 1]."""
    at = (
        torch.where(torch.tensor(size == 1), 0, index)
        for size, index in zip(x.shape[:3], (page, offset, head), strict=True)
    )
    return x[tuple(at)]
