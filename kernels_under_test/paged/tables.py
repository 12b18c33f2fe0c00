"""The constants of a spec's terms as the kernels read them: tensors, so that their values compile nothing anew."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sacts.reference.spec import AttentionSpec, Dropout, RelativeBuckets, RoPE, RopeLayout

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Tables:
    """None: the spec has no such term. FP32 unless said; what is added to logits is in units of log2.

    `frequency`, `partner` (int32) [head_dim_qk]: by which each channel turns and with which, see `turned_channels`;
    `slopes`, `sinks` [num_qo_heads]; `bucket_bias` [num_qo_heads, 2 reach + 1]: by pos_q - t, clamped to +-reach;
    `dropout` int64 [2 + num_requests]: seed, threshold, uids.
    """

    frequency: Tensor | None = None
    partner: Tensor | None = None
    slopes: Tensor | None = None
    bucket_bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: Tensor | None = None


def tables_of(spec: AttentionSpec, device: torch.device) -> Tables:
    """The tables of a spec."""

    def octaves(values: tuple[float, ...]) -> Tensor | None:
        return torch.tensor([x * LOG2E for x in values], dtype=torch.float32, device=device) if values else None

    frequency, partner = turned_channels(spec.rope, spec.head_dim_qk) if spec.rope else (None, None)
    bias = bias_by_distance(spec.buckets) if spec.buckets else None
    dropout = dropout_words(spec.dropout, spec.num_requests) if spec.dropout else None
    return Tables(
        frequency=None if frequency is None else frequency.to(device),
        partner=None if partner is None else partner.to(device),
        slopes=octaves(spec.alibi_slopes),
        bucket_bias=None if bias is None else bias.to(device),
        sinks=octaves(spec.sink_logits),
        dropout=None if dropout is None else dropout.to(device),
    )


def turned_channels(rope: RoPE, head_dim: int) -> tuple[Tensor, Tensor]:
    """Frequency [head_dim] FP32, negative in the first channel of a pair, 0 in channels that stay; the channel that
    each turns with, int32.
    """
    channel, half = torch.arange(head_dim), rope.rotary_dim // 2
    if rope.layout is RopeLayout.HALF_SPLIT:
        second, pair, partner = channel >= half, channel % half, (channel + half) % rope.rotary_dim
    else:
        second, pair, partner = channel % 2 == 1, channel // 2, channel ^ 1
    frequency = rope.base ** (-2.0 * pair.double() / rope.rotary_dim)
    turns = channel < rope.rotary_dim
    frequency = torch.where(turns, torch.where(second, frequency, -frequency), 0.0)
    return frequency.float(), torch.where(turns, partner, channel).int()


def bias_by_distance(buckets: RelativeBuckets) -> Tensor:
    """[num_qo_heads, 2 reach + 1]: the bias at each distance from -reach to reach, the least of the last bucket, beyond
    which it does not change.
    """
    first, distance = torch.tensor(buckets.first), torch.arange(-buckets.first[-1], buckets.first[-1] + 1)
    size = distance.abs() if buckets.bidirectional else distance.clamp(min=0)
    bucket = torch.searchsorted(first, size, right=True) - 1
    if buckets.bidirectional:
        bucket = torch.where(distance < 0, bucket + len(first), bucket)
    return (torch.tensor(buckets.bias, dtype=torch.float64)[:, bucket] * LOG2E).float()


def dropout_words(dropout: Dropout, num_requests: int) -> Tensor:
    """int64 [2 + num_requests]: the seed's 64 bits, floor(p 2^32), and the uid of each request."""
    seed = dropout.seed - (1 << 64 if dropout.seed >> 63 else 0)
    return torch.tensor([seed, math.floor(dropout.p * 2**32), *(dropout.request_uids or range(num_requests))])
