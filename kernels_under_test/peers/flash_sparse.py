"""flash-sparse-attn: its dense decode kernel over gathered token positions. Its sparse kernels drop small weights:
another function.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from sacts.conformance.adapter import NATIVE, Capabilities, Case, Outputs, Refused, Support, refused
from sacts.reference.spec import AttentionSpec, CausalRule

from .lists import contiguous_pages, units_of
from .needs import NUMERICS, a_gpu, beyond, package, refuse

# It imports these of a package that it does not declare, for kernels that are not called here.
STUBS = {
    "triton_kernels": (),
    "triton_kernels.matmul_ogs": ("matmul_ogs", "PrecisionConfig", "FlexCtx"),
    "triton_kernels.numerics": ("InFlexData", "OutFlexData"),
}


@dataclass(frozen=True)
class Plan:
    """tokens int32 [requests, k], -1 behind the last; `pages`: where the requests lie."""

    tokens: Tensor
    pages: slice


class Adapter:
    """Decode with a list per request."""

    name = "flash-sparse-attn"

    def __init__(self) -> None:
        a_gpu("flash-sparse-attn")
        for name, members in STUBS.items():
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                for member in members:
                    setattr(module, member, type(member, (), {}))
                sys.modules[name] = module
        self._library = package("flash_sparse_attn", "flash-sparse-attn")
        kept = frozenset(("seq_lens", "kv_indptr", "kv_indices"))
        self.capabilities = Capabilities(numerics=NUMERICS, graph=True, plan_keeps=kept)

    def support(self, spec: AttentionSpec) -> Support:
        """Token lists, one query a request, without masks."""
        reason = _beyond(spec)
        return refused(reason) if reason else NATIVE

    def plan(self, case: Case) -> Plan:
        """Raises Refused as declared, and for lists that differ among KV heads."""
        refuse(_beyond(case.spec))
        units = units_of(case)
        if not units.shared:
            raise Refused("lists per KV head")
        return Plan(units.entries[:, 0].int().contiguous(), contiguous_pages(case))

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """One call. Raises Refused as declared."""
        plan = plan or self.plan(case)
        out = self._library.flash_dense_attn_with_kvcache_func(
            case.q,
            case.k_cache[plan.pages],
            case.v_cache[plan.pages],
            softmax_scale=case.spec.sm_scale,
            gather_kv_indices=plan.tokens,
            out=case.out,
        )
        return Outputs(out, path="native")


def _beyond(spec: AttentionSpec) -> str:
    return beyond(
        spec,
        (spec.block_size > 1, f"block_size {spec.block_size}: it gathers tokens"),
        # Of paged KV it takes the list and attends all tokens.
        (any(seq_len != spec.page_size for seq_len in spec.seq_lens), "KV that is not contiguous"),
        (any(qo_len != 1 for qo_len in spec.qo_lens), "more than one query a request"),
        (spec.causal is not CausalRule.NONE, f"causal {spec.causal}"),
    )
