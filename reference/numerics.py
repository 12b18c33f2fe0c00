"""The numerics contract: what a kernel declares about its arithmetic, so that its error can be bounded instead of
guessed.

A backend states formats, not tolerances; `bounds` turns them into an allowance for every element (GATES.md section
2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .spec import CodecFormat, DType


class Accumulator(StrEnum):
    """What sums of products are kept in: FP32 in any order, also by 16-bit tensor cores; or what FP8 tensor cores of
    Hopper and Ada keep, 13 fraction bits, promoted to FP32 after each 128 terms.
    """

    FP32 = "fp32"
    FP8_MMA = "fp8-mma"


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of one backend for one dtype.

    p: format that the probabilities P are cast to before P V, FP8 ones included; of P and dS in backward too, but FP8,
        where it is that of out. p_offset: octaves by which they are
        raised before that cast (FP8: so that small ones are not lost).
    out: format of the stored output. partial: format of split partial outputs.
    accumulator: of q.k, P V and the products of backward; l is summed in FP32.
    u_exp: relative error of the exponential (2^-22: ex2.approx, or a correctly rounded libm, scaled).
    u_operand: relative rounding of the operands of every product, forward and backward (0; tf32: 2^-11).
    l_sums_cast_p: the denominator adds the cast P, not the FP32 one.
    min_tile: the smallest number of slots between two rescales of the accumulator.
    splits: the backend may cut a row into splits and merge them where the hint names one.
    merges_states: splits are merged from un-normalised (m, l, o), not from normalised outputs and their lse.
    unit_p: where all logits of a row are equal, every P is exactly 1, before and after its cast. False for an
        exponential with exp(0) != 1, and for a backend that divides P by l before the cast.
    delta_from_p: backward takes D as sum P dP, not as sum d_out out. scaled_d_s: it multiplies dS by sm_scale before
        the cast, not the products behind it.
    branched: out is that of one of several branches, which is stored as a partial output before it is gated and added.
    lag: octaves by which the running maximum may stay behind the largest logit so far; seen in traces only.
    dense: tiles walk the whole KV range, not only the slots that the candidate entries name.

    Of terms that not every spec has (docs/bounds.md):
    reconstructed: format that K and V are rounded to after code * scale (FP32: no second rounding).
    rotated: format that q and K are rounded to after RoPE (FP32: none). u_freq: relative error of a RoPE frequency but
        the first, which is 1; u_angle: of position * frequency; u_sin: absolute error of sine and cosine.
    u_tanh: absolute error of the tanh of the soft cap.
    epilogue: format of the out that the epilogue reads. u_function: error of the epilogue's function, relative to the
        larger of |f(x)| and min(|x|, 1).
    gradient: format of d_q, d_k and d_v as backward returns them; None: that of `out`.
    """

    p: DType | CodecFormat
    out: DType
    partial: DType = DType.FP32
    u_exp: float = 2.0**-22
    u_operand: float = 0.0
    p_offset: int = 0
    accumulator: Accumulator = Accumulator.FP32
    l_sums_cast_p: bool = False
    min_tile: int = 16
    splits: bool = False
    merges_states: bool = False
    unit_p: bool = False
    dense: bool = False
    lag: float = 0.0
    delta_from_p: bool = False
    scaled_d_s: bool = False
    reconstructed: DType = DType.FP32
    rotated: DType = DType.FP32
    u_freq: float = 2.0**-19
    u_angle: float = 2.0**-23
    u_sin: float = 2.0**-21
    u_tanh: float = 2.0**-21
    epilogue: DType = DType.FP32
    u_function: float = 2.0**-20
    gradient: DType | None = None
    branched: bool = False

    @property
    def p_backward(self) -> DType:
        """The format that P and dS are cast to in backward."""
        return self.p if isinstance(self.p, DType) else self.out

    @classmethod
    def default(cls, dtype: DType) -> Numerics:
        """What is assumed of a backend that declares nothing: P and out in the dtype of the inputs, FP32 inside."""
        return cls(p=dtype, out=dtype)
