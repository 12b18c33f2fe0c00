"""FlashInfer: the selected pages are the page list of its paged wrappers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sacts.conformance.adapter import NATIVE, Capabilities, Case, LseBase, Outputs, Refused, Support, refused
from sacts.reference.spec import AttentionSpec, CausalRule, Codec, CodecFormat, ScaleGranularity

from .lists import Units, units_of, whole_blocks
from .needs import NUMERICS, a_gpu, beyond, package, refuse

WORKSPACE = 256 << 20  # bytes that its split-KV merges through


@dataclass(frozen=True)
class Plan:
    """A wrapper that is planned for the lists. `by_head`: KV heads stand as requests of one KV head each; `unit`:
    tokens of a page as the wrapper sees it; `scales`: of K and V, per tensor.
    """

    wrapper: Any
    by_head: bool
    unit: int
    scales: tuple[float, float] | None


class Adapter:
    """Decode on CUDA cores; queries that share their list as a prefill of their own."""

    name = "flashinfer"
    tensor_cores = False

    def __init__(self) -> None:
        a_gpu("FlashInfer")
        self._library = package("flashinfer", "flashinfer-python")
        kept = frozenset(("seq_lens", "kv_indptr", "kv_indices", "page_table"))
        self.capabilities = Capabilities(numerics=NUMERICS, lse_base=LseBase.TWO, graph=True, plan_keeps=kept)
        self._space: Tensor | None = None

    def support(self, spec: AttentionSpec) -> Support:
        """Whole pages, without masks."""
        reason = _beyond(spec)
        return refused(reason) if reason else NATIVE

    def plan(self, case: Case) -> Plan:
        """Raises Refused as declared, for lists per KV head in NHD pages, and for queries without a common list."""
        spec = case.spec
        refuse(_beyond(spec))
        whole_blocks(case)
        units = units_of(case)
        by_head, hnd = not units.shared, _is_hnd(case.k_cache)
        if by_head and (not hnd or units.query_block > 1):
            raise Refused("lists per KV head need HND pages and one query of each request")
        unit = math.gcd(spec.block_size, spec.page_size)
        if hnd and unit != spec.page_size:
            raise Refused(f"blocks of {spec.block_size} do not hold whole HND pages of {spec.page_size}")
        indptr, indices = _pages(case, units, unit, by_head)
        if self._space is None:
            self._space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=case.q.device)
        layout = "HND" if hnd else "NHD"
        last = torch.full((len(indptr) - 1,), unit, dtype=torch.int32)
        dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.k_cache.dtype}
        heads = (spec.group_size, 1) if by_head else (spec.num_qo_heads, spec.num_kv_heads)
        common = {"sm_scale": spec.sm_scale, **dtypes}
        if units.query_block == 1:
            wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._space, layout, use_tensor_cores=self.tensor_cores
            )
            wrapper.plan(indptr, indices, last, *heads, spec.head_dim_qk, unit, **common)
        else:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._space, layout)
            qo_indptr = torch.arange(0, spec.num_tokens + 1, units.query_block, dtype=torch.int32)
            wrapper.plan(qo_indptr, indptr, indices, last, *heads, spec.head_dim_qk, unit, causal=False, **common)
        return Plan(wrapper, by_head, unit, _scales(case))

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """One call of the wrapper. Raises Refused as declared."""
        plan = plan or self.plan(case)
        spec = case.spec
        caches = [_seen(cache, plan) for cache in (case.k_cache, case.v_cache)]
        q, out, lse = case.q, case.out, case.lse
        if plan.by_head:
            q, out = (x.view(-1, spec.group_size, x.shape[-1]) for x in (q, out))
            lse = lse.view(-1, spec.group_size)
        scales = {} if plan.scales is None else dict(zip(("k_scale", "v_scale"), plan.scales, strict=True))
        plan.wrapper.run(q, tuple(caches), out=out, lse=lse, return_lse=True, **scales)
        return Outputs(case.out, case.lse, path="native")


class TensorCores(Adapter):
    """Decode on tensor cores, which suits large groups."""

    name = "flashinfer-tensor-cores"
    tensor_cores = True


def _beyond(spec: AttentionSpec) -> str:
    """What it does not serve; of codes, fp8 with a scale per tensor is its own."""
    codecs = (spec.k_codec, spec.v_codec)
    for codec in codecs:
        if codec is not None and not _served(codec):
            return f"codec {codec.format} per {codec.granularity}"
    if any(codecs):
        spec = replace(spec, k_codec=None, v_codec=None)
    return beyond(
        spec,
        (spec.causal is not CausalRule.NONE, f"causal {spec.causal} over selected pages"),
        (spec.head_dim_qk != spec.head_dim_vo, "head_dim_qk that is not head_dim_vo"),
    )


def _served(codec: Codec) -> bool:
    return codec.format is CodecFormat.FP8_E4M3FN and codec.granularity is ScaleGranularity.TENSOR


def _scales(case: Case) -> tuple[float, float] | None:
    if case.k_scales is None or case.v_scales is None:
        return None
    return float(case.k_scales.flatten()[0]), float(case.v_scales.flatten()[0])


def _is_hnd(cache: Tensor) -> bool:
    """Whether pages lie as [num_kv_heads, page_size, d]."""
    return cache.shape[1] > 1 and cache.shape[2] > 1 and cache.stride(2) > cache.stride(1)


def _pages(case: Case, units: Units, unit: int, by_head: bool) -> tuple[Tensor, Tensor]:
    """indptr on the host and indices on the device, of pages of `unit` tokens."""
    spec = case.spec
    entries = units.entries if by_head else units.entries[:, :1]
    per_entry = spec.block_size // unit
    t = entries[..., None] * spec.block_size + torch.arange(0, spec.block_size, unit, device=entries.device)
    there = (entries >= 0)[..., None].expand_as(t)
    t = t.clamp(min=0)
    page = case.page_table.long()[units.request[:, None, None, None], t // spec.page_size]
    page = page * (spec.page_size // unit) + t % spec.page_size // unit
    if by_head:
        page = page * spec.num_kv_heads + torch.arange(spec.num_kv_heads, device=page.device)[:, None, None]
    counts = (units.counts if by_head else units.counts[:, :1]).flatten() * per_entry
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return indptr.int().cpu(), page[there].int()


def _seen(cache: Tensor, plan: Plan) -> Tensor:
    """A cache as the wrapper takes it: its own pages, or heads as pages of one head."""
    pages, size, heads, dim = cache.shape
    if not _is_hnd(cache):
        return cache.reshape(pages * (size // plan.unit), plan.unit, heads, dim)
    held = cache.transpose(1, 2)
    return held.reshape(pages * heads, 1, size, dim) if plan.by_head else held
