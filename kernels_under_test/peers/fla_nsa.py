"""fla-core's `parallel_nsa`: selected blocks of each query and KV head, causal, over contiguous KV. Its pooling of K,
which the selected branch does not use, is part of the call.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sacts.conformance.adapter import NATIVE, Capabilities, Case, Outputs, Support, refused
from sacts.reference.spec import AttentionSpec, CausalRule

from .lists import contiguous_pages, units_of
from .needs import NUMERICS, a_gpu, beyond, package, refuse

LEAST_GROUP = 16


@dataclass(frozen=True)
class Plan:
    """blocks int64 [1, T, num_kv_heads, most], counts [1, T, num_kv_heads], and where the request lies."""

    blocks: Tensor
    counts: Tensor
    pages: slice


class Adapter:
    """The selected branch alone."""

    name = "fla-nsa"

    def __init__(self) -> None:
        a_gpu("fla-core")
        self._library = package("fla.ops.nsa.parallel", "fla-core")
        kept = frozenset(("seq_lens", "kv_indptr", "kv_indices", "page_table"))
        self.capabilities = Capabilities(numerics=NUMERICS, plan_keeps=kept)

    def support(self, spec: AttentionSpec) -> Support:
        """One request whose queries are all its tokens."""
        reason = _beyond(spec)
        return refused(reason) if reason else NATIVE

    def plan(self, case: Case) -> Plan:
        """Raises Refused as declared."""
        refuse(_beyond(case.spec))
        pages, units = contiguous_pages(case), units_of(case)
        entries, counts = (
            x.repeat_interleave(units.query_block, dim=0)[None].contiguous() for x in (units.entries, units.counts)
        )
        return Plan(entries.clamp(min=0), counts, pages)

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """One call; it makes its own output. Raises Refused as declared."""
        plan = plan or self.plan(case)
        spec = case.spec
        out = self._library.parallel_nsa(
            case.q[None],
            case.k_cache[plan.pages],
            case.v_cache[plan.pages],
            block_indices=plan.blocks,
            block_counts=plan.counts,
            block_size=spec.block_size,
            scale=spec.sm_scale,
        )
        return Outputs(out[0], path="native")


def _beyond(spec: AttentionSpec) -> str:
    return beyond(
        spec,
        (spec.qo_lens != spec.seq_lens or len(spec.qo_lens) != 1, "queries that are not all tokens of one request"),
        (spec.causal is not CausalRule.BOTTOM_RIGHT, f"causal {spec.causal}"),
        (spec.page_size != spec.seq_lens[0], "KV that is not contiguous"),
        (spec.group_size < LEAST_GROUP, f"groups of {spec.group_size} query heads, below {LEAST_GROUP}"),
    )
