"""The constants of a spec's terms as the kernels read them: tensors, so that their values compile nothing anew."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sacts.reference.spec import AttentionSpec, Dropout, RelativeBuckets, RoPE, RopeLayout

LOG2E = math.log2(math.e)


def padded(n: int) -> int:
    """The power of two from 16 on that holds n: what tl.dot and tl.arange take."""
    return max(16, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class Tables:
    """None: the spec has no such term. FP32 unless said; what is added to logits is in units of log2.

    `turns` [positions, 2, pairs], the first of position `turns_low`: cosines and sines of RoPE; `channels` int32
    [2, padded pairs]: see `paired_channels`; `slopes`, `sinks` [num_qo_heads]; `bucket_bias` [num_qo_heads,
    2 reach + 1]: by pos_q - t, clamped to +-reach; `dropout` int64 [2 + num_requests]: seed, threshold, uids.
    """

    turns: Tensor | None = None
    channels: Tensor | None = None
    turns_low: int = 0
    slopes: Tensor | None = None
    bucket_bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: Tensor | None = None


def tables_of(spec: AttentionSpec, device: torch.device) -> Tables:
    """The tables of a spec."""

    def octaves(values: tuple[float, ...]) -> Tensor | None:
        return torch.tensor([x * LOG2E for x in values], dtype=torch.float32, device=device) if values else None

    channels = paired_channels(spec.rope, spec.head_dim_qk) if spec.rope else None
    low, high = positions_of(spec) if spec.rope else (0, 0)
    bias = bias_by_distance(spec.buckets) if spec.buckets else None
    dropout = dropout_words(spec.dropout, spec.num_requests) if spec.dropout else None
    return Tables(
        turns=turns_of(spec.rope, low, high, device) if spec.rope else None,
        channels=None if channels is None else channels.to(device),
        turns_low=low,
        slopes=octaves(spec.alibi_slopes),
        bucket_bias=None if bias is None else bias.to(device),
        sinks=octaves(spec.sink_logits),
        dropout=None if dropout is None else dropout.to(device),
    )


def positions_of(spec: AttentionSpec) -> tuple[int, int]:
    """The least and the largest position, or ordinal, by which a query or a key may turn."""
    queries = spec.query_ordinals or spec.token_position
    return min(0, *queries, 0), max(0, *spec.seq_lens, *queries)


def turns_bytes(spec: AttentionSpec) -> int:
    """Of the table of RoPE: 0 without."""
    if not spec.rope:
        return 0
    low, high = positions_of(spec)
    return (high - low + 1) * spec.rope.rotary_dim * 4


def turns_of(rope: RoPE, low: int, high: int, device: torch.device) -> Tensor:
    """Cosines and sines at each position from low to high, FP32 [positions, 2, pairs]: made in FP64, rounded once."""
    pair = torch.arange(rope.rotary_dim // 2, dtype=torch.float64, device=device)
    position = torch.arange(low, high + 1, dtype=torch.float64, device=device)
    angle = position[:, None] * rope.base ** (-2.0 * pair / rope.rotary_dim)
    return torch.stack((angle.cos().float(), angle.sin().float()), dim=1)


def paired_channels(rope: RoPE, head_dim: int) -> Tensor:
    """The first and the second channel of each pair that turns, then those that stay, two by two; -1: none. int32
    [2, n], n a power of two, 16 at least.
    """
    pair = torch.arange(rope.rotary_dim // 2)
    if rope.layout is RopeLayout.HALF_SPLIT:
        first, second = pair, pair + rope.rotary_dim // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    stay = torch.arange(rope.rotary_dim, head_dim)
    both = [torch.cat((first, stay[0::2])), torch.cat((second, stay[1::2]))]
    width = padded(-(-head_dim // 2))
    return torch.stack([torch.nn.functional.pad(x, (0, width - len(x)), value=-1) for x in both]).int()


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
