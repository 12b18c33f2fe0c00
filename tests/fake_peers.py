"""Stand-ins for the libraries of the peers: their interfaces as published, computed naively in FP64 on the CPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out as q [n, heads, d] and natural lse [n, heads] over k, v [t, kv_heads, d]; mask [n, heads, t]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("nhd,thd->nht", q.double(), k) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    p = (logits - logits.amax(-1, keepdim=True)).exp()  # not normalised, so that equal weights are exactly 1
    return torch.einsum("nht,thd->nhd", p, v) / p.sum(-1, keepdim=True), logits.logsumexp(-1)


class Wrapper:
    """Both wrappers of FlashInfer: lists of whole pages, all full."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        self.layout = kv_layout

    def attend(
        self, q: Tensor, caches: tuple[Tensor, Tensor], qo_indptr: list[int], out: Tensor, lse: Tensor, scale: float
    ) -> None:
        """out, and lse to the base 2, of requests whose queries begin at `qo_indptr`."""
        for request in range(len(qo_indptr) - 1):
            pages = self.indices[self.indptr[request] : self.indptr[request + 1]].long()
            k, v = (x[pages] for x in caches)
            k, v = (x.transpose(1, 2) if self.layout == "HND" else x for x in (k, v))
            some = slice(qo_indptr[request], qo_indptr[request + 1])
            found, natural = attention(q[some], k.flatten(0, 1), v.flatten(0, 1), scale)
            out[some], lse[some] = found.to(out.dtype), (natural / math.log(2)).float()

    def check(self, heads: tuple[int, int], unit: int, last: Tensor) -> None:
        """What the plan named, for `run` to be held to."""
        assert (last == unit).all()
        self.heads, self.unit = heads, unit

    def seen(self, caches: tuple[Tensor, Tensor]) -> None:
        """The caches must have the pages and heads that were planned."""
        expected = (self.heads[1], self.unit) if self.layout == "HND" else (self.unit, self.heads[1])
        assert all(tuple(x.shape[1:3]) == expected for x in caches)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, qo: int, kv: int, dim: int, unit: int, **common: Any
    ) -> None:
        self.indptr, self.indices, self.scale = indptr.tolist(), indices, common["sm_scale"]
        self.check((qo, kv), unit, last)

    def run(
        self, q: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor, lse: Tensor, return_lse: bool, **scales: float
    ) -> None:
        self.seen(caches)
        k, v = (x.float() * scales.get(name, 1.0) for x, name in zip(caches, ("k_scale", "v_scale"), strict=True))
        assert q.shape[1] == self.heads[0]
        self.attend(q, (k, v), list(range(len(self.indptr))), out, lse, self.scale)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        qo: int,
        kv: int,
        dim: int,
        unit: int,
        *,
        causal: bool,
        **common: Any,
    ) -> None:
        assert not causal
        self.qo_indptr, self.indptr, self.indices = qo_indptr.tolist(), indptr.tolist(), indices
        self.scale = common["sm_scale"]
        self.check((qo, kv), unit, last)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor, lse: Tensor, return_lse: bool) -> None:
        self.seen(caches)
        self.attend(q, caches, self.qo_indptr, out, lse, self.scale)


def flash_dense_attn_with_kvcache_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    gather_kv_indices: Tensor,
    out: Tensor,
) -> Tensor:
    for request, t in enumerate(gather_kv_indices.long()):
        t = t[t >= 0]
        out[request] = attention(q[request, None], k[request, t], v[request, t], softmax_scale)[0][0].to(out.dtype)
    return out


def parallel_nsa(
    q: Tensor, k: Tensor, v: Tensor, *, block_indices: Tensor, block_counts: Tensor, block_size: int, scale: float
) -> Tensor:
    tokens, heads = q.shape[1], k.shape[2]
    mask = torch.zeros(tokens, heads, k.shape[1], dtype=torch.bool)
    for token in range(tokens):
        for head in range(heads):
            for block in block_indices[0, token, head, : block_counts[0, token, head]].tolist():
                mask[token, head, block * block_size : min((block + 1) * block_size, token + 1)] = True
    mask = mask.repeat_interleave(q.shape[2] // heads, 1)
    return attention(q[0], k[0], v[0], scale, mask)[0].to(q.dtype)[None]


class BlockMask(NamedTuple):
    """FlexAttention's mask of whole blocks."""

    counts: Tensor
    indices: Tensor
    size: tuple[int, int]

    @classmethod
    def from_kv_blocks(
        cls,
        partial_counts: Tensor,
        partial_indices: Tensor,
        counts: Tensor,
        indices: Tensor,
        *,
        BLOCK_SIZE: tuple[int, int],
        seq_lengths: tuple[int, int],
    ) -> BlockMask:
        assert not partial_counts.any()
        assert indices.shape[-1] == -(-seq_lengths[1] // BLOCK_SIZE[1])
        assert indices.shape[2] == -(-seq_lengths[0] // BLOCK_SIZE[0])
        return cls(counts, indices, BLOCK_SIZE)


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    kernel_options: dict[str, bool],
) -> Tensor:
    assert enable_gqa
    assert kernel_options == ({"FORCE_USE_FLEX_ATTENTION": True} if k.numel() >= 1 << 31 else {})
    queries, keys = block_mask.size
    out = torch.empty_like(q)
    for n, head, query in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        place = n, head % block_mask.counts.shape[1], query // queries
        blocks = block_mask.indices[place][: block_mask.counts[place]].long()
        t = (blocks[:, None] * keys + torch.arange(keys)).flatten()
        kv = head * k.shape[1] // q.shape[1]
        found = attention(q[n, head, query][None, None], k[n, kv, t][:, None], v[n, kv, t][:, None], scale)[0]
        out[n, head, query] = found[0, 0].to(out.dtype)
    return out
