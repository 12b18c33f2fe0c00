"""PyTorch's FlexAttention with a BlockMask that is made of the block lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sacts.conformance.adapter import NATIVE, Capabilities, Case, Outputs, Refused, Support, refused
from sacts.reference.spec import AttentionSpec, CausalRule

from .lists import contiguous_pages, units_of, whole_blocks
from .needs import NUMERICS, a_gpu, beyond, refuse

LEAST_BLOCK = 64  # keys: the tile of its kernel
QUERY_BLOCK = 128


@dataclass(frozen=True)
class Plan:
    """The mask, where the requests lie, and options of the kernel."""

    mask: Any
    pages: slice
    options: Any


class Adapter:
    """One compiled call over contiguous KV; without a compiler it would attend densely, so it needs a GPU."""

    name = "flex"

    def __init__(self) -> None:
        a_gpu("FlexAttention")
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        torch._dynamo.config.recompile_limit = 64  # beyond it, it would run uncompiled
        self._block_mask = BlockMask
        self._attend = torch.compile(flex_attention, dynamic=False)
        kept = frozenset(("seq_lens", "kv_indptr", "kv_indices", "page_table"))
        self.capabilities = Capabilities(numerics=NUMERICS, graph=True, plan_keeps=kept)

    def support(self, spec: AttentionSpec) -> Support:
        """Whole blocks over contiguous KV."""
        reason = _beyond(spec)
        return refused(reason) if reason else NATIVE

    def plan(self, case: Case) -> Plan:
        """Raises Refused as declared, and for queries that do not share their lists in blocks of QUERY_BLOCK."""
        spec = case.spec
        refuse(_beyond(spec))
        whole_blocks(case)
        pages, units = contiguous_pages(case), units_of(case)
        queries = spec.qo_lens[0]
        if queries > 1 and units.query_block % QUERY_BLOCK:
            raise Refused(f"{units.query_block} queries share a list, its blocks hold {QUERY_BLOCK}")
        heads = 1 if units.shared else spec.num_kv_heads
        block = units.query_block if queries > 1 else QUERY_BLOCK
        shape = (spec.num_requests, -1, heads)
        width = spec.page_size // spec.block_size
        indices = torch.zeros(*units.entries.shape[:2], width, dtype=torch.int32, device=case.q.device)
        indices[..., : units.entries.shape[2]] = units.entries.clamp(min=0)
        full_indices = _by_head(spec, indices[:, :heads].unflatten(0, shape[:2]))
        full_counts = _by_head(spec, units.counts[:, :heads].int().unflatten(0, shape[:2]))
        mask = self._block_mask.from_kv_blocks(
            torch.zeros_like(full_counts),
            torch.zeros_like(full_indices),
            full_counts,
            full_indices,
            BLOCK_SIZE=(block, spec.block_size),
            seq_lengths=(queries, spec.page_size),
        )
        # Its decode kernel does not compile where offsets need 64 bits (torch 2.11): then the other one.
        large = case.k_cache.numel() >= 1 << 31
        return Plan(mask, pages, {"FORCE_USE_FLEX_ATTENTION": True} if large else {})

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """One call; it makes its own output. Raises Refused as declared."""
        plan = plan or self.plan(case)
        spec = case.spec
        q = case.q.unflatten(0, (spec.num_requests, -1)).transpose(1, 2)
        k, v = (cache[plan.pages].transpose(1, 2) for cache in (case.k_cache, case.v_cache))
        out = self._attend(
            q, k, v, block_mask=plan.mask, scale=spec.sm_scale, enable_gqa=True, kernel_options=plan.options
        )
        return Outputs(out.transpose(1, 2).flatten(0, 1), path="native")


def _by_head(spec: AttentionSpec, x: Tensor) -> Tensor:
    """[requests, blocks of queries, heads, ...] as [requests, query heads or 1, blocks of queries, ...]."""
    x = x.transpose(1, 2)
    return x.contiguous() if x.shape[1] == 1 else x.repeat_interleave(spec.group_size, dim=1)


def _beyond(spec: AttentionSpec) -> str:
    return beyond(
        spec,
        (spec.block_size < LEAST_BLOCK, f"block_size {spec.block_size}, below {LEAST_BLOCK}"),
        (any(seq_len != spec.page_size for seq_len in spec.seq_lens), "KV that is not contiguous"),
        (len(set(spec.qo_lens)) > 1, "requests of different query lengths"),
        (spec.causal is not CausalRule.NONE, f"causal {spec.causal} over whole blocks"),
    )
