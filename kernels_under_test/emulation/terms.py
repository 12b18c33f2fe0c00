"""The terms of a logit, and dropout, as the modelled kernel computes them in FP32: written for itself, from the
specification's words, so that nothing is shared with what judges it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sacts.reference.spec import AttentionSpec, CandidateKind, Dropout, Nonlinearity, RelativeBuckets, RoPE, RopeLayout

from .arithmetic import TORCH, Arithmetic, cast, product

MASK32 = 0xFFFFFFFF


class Rows(NamedTuple):
    """R candidate rows of g query heads, each over K slots of its own.

    q [R, g, d_qk]; k [R, K, d_qk] and v [R, K, d_vo] (zero where no edge), FP32; edge [R, K]; counts [R, K];
    key_position [R, K] and query_position [R]: of RoPE and bias; dropout_query [R]: logical position; qo_head [R, g];
    uid [R]; slot [R, K]: where the key lies among the physical slots of its KV head; token [R, K]: logical position.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    edge: Tensor
    counts: Tensor
    key_position: Tensor
    query_position: Tensor
    dropout_query: Tensor
    qo_head: Tensor
    uid: Tensor
    slot: Tensor
    token: Tensor


def turned(x: Tensor, position: Tensor, rope: RoPE, sign: int = 1) -> Tensor:
    """RoPE in FP32: x [..., d] by its positions [...]; `sign` -1 turns back."""
    half = rope.rotary_dim // 2
    exponent = torch.arange(half, dtype=torch.float32) * (-2.0 / rope.rotary_dim)
    angle = position.float()[..., None] * torch.exp2(exponent * math.log2(rope.base))
    cos, sin = torch.cos(angle), sign * torch.sin(angle)
    rotary, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    if rope.layout is RopeLayout.INTERLEAVED:
        a, b = rotary[..., ::2], rotary[..., 1::2]
        both = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotary[..., :half], rotary[..., half:]
        both = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((both, rest), dim=-1)


class Logits(NamedTuple):
    """z [R, g, K] after all terms, -inf where there is no edge; capped [R, g, K]: tanh of the soft cap, if any; q and
    k as they went into the product.
    """

    z: Tensor
    capped: Tensor | None
    q: Tensor
    k: Tensor


def logits(spec: AttentionSpec, rows: Rows, arithmetic: Arithmetic) -> Logits:
    """All terms in their order: scale, soft cap, bias, ln(count), mask."""
    q, k = rows.q, rows.k
    if spec.rope:
        q = cast(turned(q, rows.query_position[:, None], spec.rope), arithmetic.rotated)
        k = cast(turned(k, rows.key_position, spec.rope), arithmetic.rotated)
    z = product(q, k.transpose(-1, -2), arithmetic) * spec.sm_scale
    capped = None
    if spec.logits_soft_cap:
        capped = torch.tanh(z / spec.logits_soft_cap)
        z = spec.logits_soft_cap * capped
    distance = rows.query_position[:, None] - rows.key_position
    if spec.alibi_slopes:
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32)[rows.qo_head]
        z = z - slopes[..., None] * distance.abs().float()[:, None]
    if spec.buckets:
        table = torch.tensor(spec.buckets.bias, dtype=torch.float32)
        z = z + table[rows.qo_head[..., None], bucket(spec.buckets, distance)[:, None]]
    if spec.candidate_kind is CandidateKind.MULTISET:
        z = z + torch.log(rows.counts.float())[:, None]
    return Logits(z.masked_fill(~rows.edge[:, None], float("-inf")), capped, q, k)


def bucket(buckets: RelativeBuckets, distance: Tensor) -> Tensor:
    """The bucket of each distance: the last whose least distance is not above it."""
    size = distance.abs() if buckets.bidirectional else distance.clamp(min=0)
    index = (size[..., None] >= torch.tensor(buckets.first)).sum(dim=-1) - 1
    return torch.where(distance < 0, index + len(buckets.first), index) if buckets.bidirectional else index


def keep_factor(spec: AttentionSpec, rows: Rows) -> Tensor | None:
    """a_j / (1 - p): [R, g, K]."""
    if spec.dropout is None:
        return None
    keep = kept(spec.dropout, rows.key_position[:, None], rows.dropout_query[:, None, None], rows.qo_head, rows.uid)
    return keep.float() * (1.0 / (1.0 - spec.dropout.p))


def kept(dropout: Dropout, key: Tensor, query: Tensor, qo_head: Tensor, uid: Tensor) -> Tensor:
    """Philox4x32-10, first word at least floor(p 2^32): [R, g, K]."""
    counter = [x.long() & MASK32 for x in torch.broadcast_tensors(key, query, qo_head[..., None], uid[:, None, None])]
    k0, k1 = dropout.seed & MASK32, dropout.seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) & MASK32 ^ counter[1] ^ k0,
            b & MASK32,
            (a >> 32) & MASK32 ^ counter[3] ^ k1,
            a & MASK32,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    keep: Tensor = counter[0] >= math.floor(dropout.p * 2**32)
    return keep


def epilogue(spec: AttentionSpec, out: Tensor, gate: Tensor | None) -> Tensor:
    """What is done to the merged output, in FP32."""
    how = spec.epilogue
    if gate is not None:
        return out * gate
    if how.dtype is not None:
        return out.to(TORCH[how.dtype]).float()
    if how.function is not None:
        functions = {
            Nonlinearity.RELU: torch.relu,
            Nonlinearity.SIGMOID: torch.sigmoid,
            Nonlinearity.TANH: torch.tanh,
            Nonlinearity.SILU: torch.nn.functional.silu,
        }
        return functions[how.function](out)
    if how.bits:
        largest = 2 ** (how.bits - 1) - 1
        return torch.clamp(torch.round(out / how.scale), -largest, largest) * how.scale
    return out
