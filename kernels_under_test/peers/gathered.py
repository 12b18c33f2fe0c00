"""Gather and SDPA: the selected K and V are copied, then PyTorch attends the copy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sacts.conformance.adapter import NATIVE, Capabilities, Case, Outputs, Support, refused
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, CausalRule, DType

from .lists import tokens_of, units_of
from .needs import NUMERICS, beyond, refuse

COPIED_BYTES = 4 << 30  # of K and V at a time


@dataclass(frozen=True)
class Mask:
    """seen [units, num_kv_heads, rows or 1, slots], where a row that sees nothing sees all; empty [units, num_kv_heads,
    rows or 1, 1]: those rows, None where there are none.
    """

    seen: Tensor
    empty: Tensor | None

    @classmethod
    def of(cls, seen: Tensor) -> Mask:
        """From what each row sees."""
        empty = ~seen.any(dim=-1, keepdim=True)
        return cls(seen | empty, empty) if bool(empty.any()) else cls(seen, None)

    def part(self, some: slice) -> Mask:
        """Of some units."""
        return Mask(self.seen[some], None if self.empty is None else self.empty[some])


@dataclass(frozen=True)
class Plan:
    """page, offset [units, num_kv_heads, slots]: where each slot lies; `mask`: None where every query sees every slot;
    `step`: units at a time.
    """

    query_block: int
    page: Tensor
    offset: Tensor
    mask: Mask | None
    step: int


class Adapter:
    """One gather and one call for as many units as fit."""

    name = "gather-sdpa"

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            numerics=numerics(),
            graph=True,
            plan_keeps=frozenset(("seq_lens", "kv_indptr", "kv_indices", "page_table")),
        )

    def support(self, spec: AttentionSpec) -> Support:
        """The plain row."""
        reason = beyond(spec)
        return refused(reason) if reason else NATIVE

    def plan(self, case: Case) -> Plan:
        """Physical slots and masks. Raises Refused as declared."""
        spec = case.spec
        refuse(beyond(spec))
        units = units_of(case)
        t, there = tokens_of(case, units)
        page = case.page_table.long()[units.request[:, None, None], t // spec.page_size]
        page, offset = torch.where(there, page, 0), torch.where(there, t % spec.page_size, 0)
        mask = None if bool(there.all()) and spec.causal is CausalRule.NONE else there[:, :, None]
        if spec.causal is not CausalRule.NONE:
            position = torch.tensor(spec.token_position, device=t.device).view(len(t), 1, -1, 1)
            sees = there[:, :, None] & (t[:, :, None] <= position)
            mask = sees.repeat_interleave(spec.group_size, dim=2)
        copied = spec.num_kv_heads * page.shape[2] * (spec.head_dim_qk + spec.head_dim_vo) * case.q.element_size()
        step = max(1, COPIED_BYTES // max(1, copied))
        return Plan(units.query_block, page, offset, None if mask is None else Mask.of(mask), step)

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """Units at a time, each with its queries and their heads as one row of queries. Raises Refused as declared."""
        plan = plan or self.plan(case)
        spec, block = case.spec, plan.query_block
        shape = (-1, block, spec.num_kv_heads, spec.group_size)
        q, out = (x.view(*shape, x.shape[-1]) for x in (case.q, case.out))
        head = torch.arange(spec.num_kv_heads, device=case.q.device)[:, None]
        for at in range(0, len(plan.page), plan.step):
            some = slice(at, at + plan.step)
            k, v = (cache[plan.page[some], plan.offset[some], head] for cache in (case.k_cache, case.v_cache))
            rows = q[some].transpose(1, 2).flatten(2, 3)
            mask = None if plan.mask is None else plan.mask.part(some)
            found = attend(rows, k, v, mask, spec.sm_scale)
            out[some] = found.unflatten(2, (block, spec.group_size)).transpose(1, 2)
        return Outputs(case.out, path="native")


def numerics() -> dict[DType, Numerics]:
    """Of PyTorch's kernels: that on the CPU takes a faster exponential."""
    if torch.cuda.is_available():
        return NUMERICS
    return {dtype: replace(each, u_exp=1.1e-4) for dtype, each in NUMERICS.items()}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float) -> Tensor:
    """PyTorch's attention of q [units, num_kv_heads, rows, d]; rows that see nothing are 0."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    seen = mask.seen.expand(*q.shape[:3], k.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale)
    return out if mask.empty is None else torch.where(mask.empty, 0, out)
