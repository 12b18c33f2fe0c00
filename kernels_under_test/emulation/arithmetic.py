"""The arithmetic of the modelled kernel: formats, orders, exponentials, sums as tensor cores make them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sacts.reference.numerics import Accumulator, Numerics
from sacts.reference.spec import CodecFormat, DType

TORCH: dict[DType | CodecFormat, torch.dtype] = {
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.FP32: torch.float32,
    CodecFormat.FP8_E4M3FN: torch.float8_e4m3fn,
    CodecFormat.FP8_E5M2: torch.float8_e5m2,
}
LOG2E = math.log2(math.e)
FP8_MMA_K, FP8_BITS, PROMOTED = (
    32,
    13,
    128,
)  # of FP8 tensor cores: terms at once, fraction bits, terms per FP32 addition
MMA_K = 16  # terms that a tensor core aligns and adds at once
# A cubic for 2^f on [0, 1) with both ends exact: relative error below 1.1e-4, as in kernels that spare the SFU.
CUBIC = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)


@dataclass(frozen=True)
class Arithmetic:
    """How the model computes. Everything not named here is FP32, rounded to nearest.

    p, p_offset, out, partial, rotated, reconstructed, delta_from_p, scaled_d_s: as in `Numerics`. exp2: `exact`,
    `truncated` (to 23 bits) or `cubic`. fraction_bits: 0 for FP32 sums; else products are aligned to the largest of
    MMA_K terms and truncated to so many bits, as tensor cores do; fp8_mma: as FP8 tensor cores do. tf32: operands of
    products are rounded to 11 significant bits. tile, splits: slots per tile, parts of a row. order: seed of the order
    of tiles, 0 for that of the slots. lag: octaves by which the running maximum may stay behind. merge_outputs: splits
    are merged from normalised outputs and their lse.
    """

    p: DType | CodecFormat = DType.BF16
    out: DType = DType.BF16
    partial: DType = DType.FP32
    rotated: DType = DType.FP32
    reconstructed: DType = DType.FP32
    exp2: str = "exact"
    fraction_bits: int = 0
    tf32: bool = False
    p_offset: int = 0
    fp8_mma: bool = False
    l_sums_cast_p: bool = False
    tile: int = 64
    splits: int = 1
    order: int = 0
    lag: int = 0
    delta_from_p: bool = False
    scaled_d_s: bool = False
    merge_outputs: bool = False

    @property
    def p_backward(self) -> DType:
        """The format of P and dS in backward."""
        return self.p if isinstance(self.p, DType) else self.out

    @property
    def numerics(self) -> Numerics:
        """The contract that this arithmetic keeps."""
        return Numerics(
            p=self.p,
            p_offset=self.p_offset,
            accumulator=Accumulator.FP8_MMA if self.fp8_mma else Accumulator.FP32,
            out=self.out,
            partial=self.partial,
            rotated=self.rotated,
            reconstructed=self.reconstructed,
            u_exp=1.1e-4 if self.exp2 == "cubic" else 2.0**-22,
            u_operand=2.0**-11 if self.tf32 else 0.0,
            l_sums_cast_p=self.l_sums_cast_p,
            min_tile=self.tile,
            lag=self.lag,
            delta_from_p=self.delta_from_p,
            scaled_d_s=self.scaled_d_s,
            splits=self.splits > 1,
            merges_states=not self.merge_outputs,
            unit_p=True,
            u_freq=2.0**-21,
        )


def cast(x: Tensor, dtype: DType | CodecFormat) -> Tensor:
    """FP32 values rounded to a format, kept as FP32."""
    return x.to(TORCH[dtype]).float()


def exp2(x: Tensor, variant: str) -> Tensor:
    """2^x of FP32 values."""
    if variant == "truncated":
        return _truncated(torch.exp2(x.double()), 23).float()
    if variant == "cubic":
        whole = torch.floor(x.clamp(min=-1000.0))
        f = x.clamp(min=-1000.0) - whole
        c0, c1, c2, c3 = CUBIC
        return torch.ldexp(((c3 * f + c2) * f + c1) * f + c0, whole)
    return torch.exp2(x)


def product(a: Tensor, b: Tensor, arithmetic: Arithmetic) -> Tensor:
    """a [..., n, k] @ b [..., k, m] with FP32 sums, or as tensor cores add."""
    if arithmetic.tf32:
        a, b = (_significant(x, 11) for x in (a, b))
    if arithmetic.fp8_mma:
        total = torch.zeros((*a.shape[:-1], b.shape[-1]))
        for start in range(0, a.shape[-1], PROMOTED):
            part = slice(start, start + PROMOTED)
            total = total + _added_by_tensor_cores(a[..., part], b[..., part, :], FP8_MMA_K, FP8_BITS, FP8_BITS + 1)
        return total
    if arithmetic.fraction_bits:
        return _added_by_tensor_cores(a, b, MMA_K, arithmetic.fraction_bits, 24)
    return a @ b


def _added_by_tensor_cores(a: Tensor, b: Tensor, at_once: int, fraction_bits: int, kept: int) -> Tensor:
    """Each step aligns the total and so many products to the largest of them, cuts them, and keeps so many bits."""
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float64)
    for start in range(0, a.shape[-1], at_once):
        terms = a[..., start : start + at_once, None].double() * b[..., None, start : start + at_once, :].double()
        terms = torch.cat((terms, total[..., None, :]), dim=-2)
        top = terms.abs().amax(dim=-2, keepdim=True)
        unit = torch.ldexp(torch.ones_like(top), _exponent(top) - fraction_bits)
        total = _truncated((torch.trunc(terms / unit) * unit).sum(dim=-2), kept)
    return total.float()


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 x) of positive values; some small number for 0."""
    return torch.where(x > 0, torch.frexp(x)[1] - 1, -140).clamp(min=-140)


def _significant(x: Tensor, bits: int) -> Tensor:
    """FP32 values rounded to so many significant bits, to nearest."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits).float()


def _truncated(x: Tensor, bits: int) -> Tensor:
    """FP64 values cut to so many significant bits, towards zero."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(mantissa * 2.0**bits), exponent - bits)
