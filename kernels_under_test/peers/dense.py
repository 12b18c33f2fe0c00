"""Dense SDPA: the whole context of each request under a mask, what sparsity is measured against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sacts.conformance.adapter import Capabilities, Case, Outputs, Refused, Support, fallback, refused
from sacts.reference.spec import AttentionSpec, CausalRule

from .gathered import Mask, attend, numerics
from .lists import contiguous_pages, tokens_of, units_of
from .needs import beyond, refuse

LARGEST_MASK = 1 << 33  # elements


@dataclass(frozen=True)
class Plan:
    """`pages`: where the requests lie; `mask`: of [requests, num_kv_heads or 1, q_len * group_size, T]."""

    pages: slice
    mask: Mask


class Adapter:
    """One masked call over contiguous KV; the query heads of a KV head are rows of it."""

    name = "dense-sdpa"

    def __init__(self) -> None:
        kept = frozenset(("seq_lens", "kv_indptr", "kv_indices", "page_table"))
        walked = {dtype: replace(each, dense=True) for dtype, each in numerics().items()}
        self.capabilities = Capabilities(numerics=walked, graph=True, plan_keeps=kept)

    def support(self, spec: AttentionSpec) -> Support:
        """The plain row over contiguous KV."""
        reason = _beyond(spec)
        return refused(reason) if reason else fallback("dense")

    def plan(self, case: Case) -> Plan:
        """The mask. Raises Refused as declared, and for requests that do not lie one behind the other."""
        spec = case.spec
        refuse(_beyond(spec))
        pages, units = contiguous_pages(case), units_of(case)
        heads = 1 if units.shared else spec.num_kv_heads
        rows, seq_len = spec.qo_lens[0] * spec.group_size, spec.page_size
        if spec.num_requests * heads * rows * seq_len > LARGEST_MASK:
            raise Refused(f"a mask of {spec.num_requests} x {heads} x {rows} x {seq_len} is too large")
        t, there = tokens_of(case, units)
        mask = torch.zeros(len(t), heads, seq_len + 1, dtype=torch.bool, device=t.device)
        mask.scatter_(2, torch.where(there, t, seq_len)[:, :heads], True)
        mask = mask[..., :seq_len].repeat_interleave(units.query_block, dim=0)  # of each token
        if spec.causal is not CausalRule.NONE:
            position = torch.tensor(spec.token_position, device=t.device)
            mask &= torch.arange(seq_len, device=t.device) <= position[:, None, None]
        mask = mask.unflatten(0, (spec.num_requests, -1)).transpose(1, 2)
        return Plan(pages, Mask.of(mask.repeat_interleave(spec.group_size, dim=2)))

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """One call. Raises Refused as declared."""
        plan = plan or self.plan(case)
        spec = case.spec
        shape = (spec.num_requests, spec.qo_lens[0], spec.num_kv_heads, spec.group_size)
        q, out = (x.view(*shape, x.shape[-1]) for x in (case.q, case.out))
        k, v = (cache[plan.pages].transpose(1, 2) for cache in (case.k_cache, case.v_cache))
        found = attend(q.transpose(1, 2).flatten(2, 3), k, v, plan.mask, spec.sm_scale)
        out.copy_(found.unflatten(2, shape[1::2]).transpose(1, 2))
        return Outputs(case.out, path="fallback(dense)")


def _beyond(spec: AttentionSpec) -> str:
    return beyond(
        spec,
        (any(seq_len != spec.page_size for seq_len in spec.seq_lens), "KV that is not contiguous"),
        (len(set(spec.qo_lens)) > 1, "requests of different query lengths"),
    )
