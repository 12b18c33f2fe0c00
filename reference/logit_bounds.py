"""How far a kernel's logits and weights may lie from the exact ones, term by term: docs/bounds.md.

Absolute errors of logits, relative errors of weights; first order, second order where a first one may be large.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import scores
from .formats import FORMATS, format_of
from .groups import Group
from .numerics import Accumulator, Numerics
from .spec import AttentionSpec, CandidateKind, Codec, DType, RoPE

Array = NDArray[np.float64]

U32 = FORMATS[DType.FP32].u


def gamma(n: Array | NDArray[np.int64] | int) -> Array:
    """Accumulation of n terms: |fl(sum) - sum| <= gamma(n) * sum |terms| for any FP32 order, rounded to nearest or to
    zero, and for 16-bit tensor cores from Ampere on (GATES.md section 2).
    """
    return (np.asarray(n, np.float64) + 2) * 2.0**-23


def accumulation(n: Array | NDArray[np.int64] | int, numerics: Numerics) -> Array:
    """gamma(n) of sums of products in the declared accumulator. FP8 tensor cores add 32 products to what they have,
    all cut to 13 fraction bits of the largest (GATES.md section 2).
    """
    if numerics.accumulator is Accumulator.FP32:
        return gamma(n)
    n = np.asarray(n, np.float64)
    return np.ceil(np.minimum(n, 128) / 32) * 34 * 2.0**-13 + np.ceil(n / 128) * U32


class Rounding(NamedTuple):
    """Relative and absolute error of rounding to a format: |fl(x) - x| <= u |x| + a."""

    u: float
    a: float


def rounding(dtype: DType) -> Rounding:
    """Of a cast from FP32; none where the format is FP32 itself."""
    return Rounding(0.0, 0.0) if dtype is DType.FP32 else Rounding(FORMATS[dtype].u, FORMATS[dtype].a)


def weight_rounding(numerics: Numerics) -> Rounding:
    """Of P as it enters P V."""
    fmt = format_of(numerics.p)
    return Rounding(fmt.u, fmt.a * 2.0**-numerics.p_offset)


def reconstruction(codec: Codec | None, numerics: Numerics) -> Rounding:
    """Of an element of quantised K or V: (code - zero point) * scale rounds in FP32, then to `reconstructed`."""
    if codec is None:
        return Rounding(0.0, 0.0)
    cast = rounding(numerics.reconstructed)
    return Rounding(U32 + cast.u, FORMATS[DType.FP32].a + cast.a)


def logit_error(spec: AttentionSpec, group: Group, numerics: Numerics) -> Array:
    """E_j: |computed - exact| of each logit with all its terms, before the exponential: [b, r, g, S]."""
    scale = abs(spec.sm_scale)
    products = scores.logits(np.abs(group.q), np.abs(group.k), scale)  # S_j
    terms = list(_added(spec, group))
    z = scores.logits(group.q, group.k, spec.sm_scale) if terms or spec.logits_soft_cap else group.z
    error = (accumulation(group.q.shape[-1], numerics) + 2 * numerics.u_operand) * products + 2 * U32 * np.abs(z)
    if spec.k_codec:
        error += _reconstruction_error(spec, group, numerics, products)
    if spec.rope:
        error += _turn_error(spec.rope, scale, group, numerics)
        error += _rotated_error(rounding(numerics.rotated), scale, products, group)
    if spec.logits_soft_cap:
        error, z = _capped(spec.logits_soft_cap, error, z, numerics)
    for term in terms:
        error = error + 2 * U32 * np.abs(z) + 7 * U32 * np.abs(term)
        z = z + term
    return error


def _added(spec: AttentionSpec, group: Group) -> list[Array]:
    """What is added to the logit after the soft cap: bias, and ln(count) of a multiset."""
    terms = []
    if spec.alibi_slopes or spec.buckets:
        distance = group.query_position[..., None] - group.key_position[:, None]
        terms.append(scores.bias(spec, distance, group.qo_heads))
    if spec.candidate_kind is CandidateKind.MULTISET:
        terms.append(np.log(np.maximum(group.counts, 1))[:, :, None])
    return terms


def _reconstruction_error(spec: AttentionSpec, group: Group, numerics: Numerics, products: Array) -> Array:
    """Of K reconstructed from codes. RoPE turns what was rounded, so that a pair errs by its norm: the sizes of turned
    channels may cancel where those of the channels that were rounded do not.
    """
    cast, scale = reconstruction(spec.k_codec, numerics), abs(spec.sm_scale)
    sizes = np.abs(group.q).sum(-1)[..., None]
    if spec.rope:
        norm_q, norm_k = pair_norms(spec.rope, group.q), pair_norms(spec.rope, group.k)
        rest = slice(spec.rope.rotary_dim, None)
        still = scores.logits(np.abs(group.q[..., rest]), np.abs(group.k[..., rest]), scale)
        products = scores.logits(norm_q, norm_k, scale) + still
        sizes = 1.5 * sizes  # at most sqrt(2) of them before they were turned
    error: Array = cast.u * products + cast.a * scale * sizes
    return error


def _rotated_error(cast: Rounding, scale: float, products: Array, group: Group) -> Array:
    """Of rounding q and K to a format after RoPE: absolute where they are subnormal there."""
    error: Array = 2 * cast.u * products
    if cast.a:
        depth = group.q.shape[-1]
        sizes = np.abs(group.q).sum(-1)[..., None] + np.abs(group.k).sum(-1)[:, None, None]
        error = error + cast.a * scale * (sizes * (1 + cast.u) + cast.a * depth)
    return error


def _turn_error(rope: RoPE, scale: float, group: Group, numerics: Numerics) -> Array:
    """Of RoPE in FP32: a pair of q and one of K with norms r and s, turned by angles wrong by a and b and by sines
    wrong by e, have a product wrong by at most r s (|a - b| + 2 e + second order).

    A wrong frequency turns q and K alike: only their distance counts. The rounding of position * frequency does not.
    """
    wrong = angle_errors(rope, group, numerics)
    norm_q, norm_k = pair_norms(rope, group.q), pair_norms(rope, group.k)
    error: Array = (
        scores.logits(norm_q * wrong.frequency, norm_k, scale) * wrong.distance
        + scores.logits(norm_q * wrong.rounding, norm_k, scale) * wrong.farthest
        + 2 * wrong.sine * scores.logits(norm_q, norm_k, scale)
    )
    return error * (1 + wrong.second_order)


class AngleErrors(NamedTuple):
    """Of the angles of RoPE: per unit of distance by a wrong frequency, per unit of position by rounding [pairs];
    `sine`: of a turned vector of norm 1 by sine, cosine and products; distance, farthest, second_order [b, r, 1, S].
    """

    frequency: Array
    rounding: Array
    sine: float
    distance: Array
    farthest: Array
    second_order: Array


def angle_errors(rope: RoPE, group: Group, numerics: Numerics) -> AngleErrors:
    """What turning adds to the errors of a logit or a gradient: docs/bounds.md section 4."""
    frequency = scores.frequencies(rope)
    wrong = numerics.u_freq * frequency
    wrong[0] = 0.0  # base^0 is 1 in any arithmetic
    key, query = group.key_position[:, None, None], group.query_position[..., None, None]
    sine, farthest = 2 * numerics.u_sin + 3 * U32, np.abs(key) + np.abs(query)
    second_order = (numerics.u_freq + numerics.u_angle) * farthest + sine
    return AngleErrors(wrong, numerics.u_angle * frequency, sine, np.abs(query - key), farthest, second_order)


def pair_norms(rope: RoPE, x: Array) -> Array:
    """Norm of each pair of channels that turn together: x [..., d] -> [..., pairs]."""
    first, second = scores.pairs(rope)
    return np.hypot(x[..., first], x[..., second])


def _capped(cap: float, error: Array, z: Array, numerics: Numerics) -> tuple[Array, Array]:
    """Through c * tanh(z / c): the slope is sech^2 <= min(1, 4 e^(-2|x|)), taken where it is largest within the error;
    division, product and tanh round.
    """
    nearest = np.maximum(np.abs(z) - error, 0.0) / cap
    slope = np.minimum(1.0, 4 * np.exp(-2 * nearest))
    capped = scores.soft_cap(z, cap)
    return error * slope + cap * numerics.u_tanh + 4 * U32 * np.abs(capped), capped


def weight_error(
    s: Array, error: Array, top: Array, lse: Array, rescales: NDArray[np.int64], numerics: Numerics
) -> Array:
    """eta [b, r, g, S]: relative error of each un-normalised weight e^(s_j - m): s masked logits, `error` of them,
    top, lse and rescales [b, r, g].
    """
    with np.errstate(over="ignore"):
        relative: Array = np.expm1(exponent_error(s, error, top, lse, rescales, numerics))
    return relative  # of e^x for an x wrong by so much, which may be large where the weight is small


def exponent_error(
    s: Array, error: Array, top: Array, lse: Array, rescales: NDArray[np.int64], numerics: Numerics
) -> Array:
    """Absolute error of the logarithm of each un-normalised weight, [b, r, g, S]; arguments as in `weight_error`.

    Every running maximum that a weight meets lies between its own logit and the final one, so their larger size
    stands for M of GATES.md section 2: a far smaller logit elsewhere in the row costs nothing.
    """
    size = np.maximum(np.abs(s), np.abs(top)[..., None])
    eta: Array = (
        error
        + 4 * U32 * (np.abs(s) + size)
        + numerics.u_exp
        + rescales[..., None] * (numerics.u_exp + 2 * U32)
        + 6 * U32 * size
    )
    if numerics.splits:
        eta = eta + numerics.u_exp + 8 * U32 * np.maximum(np.abs(lse)[..., None], size) + 4 * U32
    return eta
