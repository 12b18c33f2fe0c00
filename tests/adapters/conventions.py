"""Backends that are right under one convention and declare another: `check` must name both."""

from dataclasses import replace
from typing import Any

import torch

from sacts.conformance.adapter import (
    PADDING,
    SEQ_LEN,
    Capabilities,
    Case,
    Consumes,
    IndexSpace,
    KVLayout,
    LseBase,
    Outputs,
    Scale,
    SentinelPlaces,
    Support,
    fallback,
)
from sacts.kernels_under_test.sdpa import Adapter as Right
from sacts.reference.spec import AttentionSpec, CausalRule


class Declared:
    """The dense backend under declared capabilities."""

    capabilities: Capabilities = Right.capabilities

    def support(self, spec: AttentionSpec) -> Support:
        return fallback("dense")

    def run(self, case: Case, plan: Any = None) -> Outputs:
        return Right().run(self.seen(case))

    def seen(self, case: Case) -> Case:
        return case


def declares(**conventions: Any) -> Capabilities:
    return replace(Right.capabilities, **conventions)


class Base2(Declared):
    def run(self, case: Case, plan: Any = None) -> Outputs:
        outputs = Right().run(case)
        return replace(outputs, lse=outputs.lse / 0.6931471805599453)


class SaysBase2(Declared):
    capabilities = declares(lse_base=LseBase.TWO)


class EmptyIsPositive(Declared):
    def run(self, case: Case, plan: Any = None) -> Outputs:
        outputs = Right().run(case)
        return replace(outputs, lse=outputs.lse.nan_to_num(neginf=float("inf")))


class ReadsHnd(Declared):
    def seen(self, case: Case) -> Case:
        return replace(case, k_cache=case.k_cache.transpose(1, 2), v_cache=case.v_cache.transpose(1, 2))


class SaysHnd(Declared):
    capabilities = declares(kv_layout=KVLayout.HND)


class OwnScale(Declared):
    def seen(self, case: Case) -> Case:
        return replace(case, spec=replace(case.spec, sm_scale=case.spec.head_dim_qk**-0.5))


class PhysicalSlots(Declared):
    """Takes entries as slots of the whole pool; its table is the identity over all slots."""

    def seen(self, case: Case) -> Case:
        pages = case.k_cache.shape[0]
        slots = pages * case.spec.page_size
        spec = replace(case.spec, seq_lens=(slots,) * case.spec.num_requests, causal=CausalRule.NONE, window_left=-1)
        table = torch.arange(pages, dtype=torch.int32).expand(case.spec.num_requests, pages)
        return replace(case, spec=spec, page_table=table)


class TopLeft(Declared):
    """Query i of a request sees t <= i."""

    def seen(self, case: Case) -> Case:
        plain = case.spec.causal is CausalRule.NONE
        return case if plain else replace(case, spec=replace(case.spec, causal=CausalRule.TOP_LEFT))


def without(case: Case, drop: torch.Tensor) -> Case:
    """The case with some entries dropped and each row sorted and unique."""
    rows = torch.repeat_interleave(torch.arange(case.spec.num_rows), case.kv_indptr.diff())
    keys = torch.unique((rows[~drop] << 32) + case.kv_indices[~drop].long().clamp(min=0))
    counts = torch.bincount(keys >> 32, minlength=case.spec.num_rows)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return replace(case, kv_indptr=indptr, kv_indices=(keys & 0xFFFFFFFF).int())


class SentinelT(Declared):
    """A raw consumer whose padding is T; any other value beyond it is clamped to the last token."""

    capabilities = declares(consumes=Consumes.RAW)

    def seen(self, case: Case) -> Case:
        length = case.spec.seq_lens[0]
        trimmed = without(case, case.kv_indices == length)
        return replace(trimmed, kv_indices=trimmed.kv_indices.clamp(max=length - 1))


class SentinelAtTail(Declared):
    """A raw consumer that stops at the first padding; a value beyond T is clamped to the last token."""

    capabilities = declares(consumes=Consumes.RAW)

    def seen(self, case: Case) -> Case:
        drop = torch.zeros(len(case.kv_indices), dtype=torch.bool)
        for start, stop in zip(case.kv_indptr[:-1].tolist(), case.kv_indptr[1:].tolist(), strict=True):
            padding = (case.kv_indices[start:stop] == PADDING).nonzero()
            if len(padding):
                drop[start + int(padding[0]) : stop] = True
        trimmed = without(case, drop)
        return replace(trimmed, kv_indices=trimmed.kv_indices.clamp(max=case.spec.seq_lens[0] - 1))


class SaysRaw(Declared):
    """Declares raw lists, but attends every entry once for each time that it stands there."""

    capabilities = declares(consumes=Consumes.RAW)

    def run(self, case: Case, plan: Any = None) -> Outputs:
        if case.spec.block_size > 1:
            return Right().run(case)
        lengths = case.kv_indptr.diff()
        rows = torch.repeat_interleave(torch.arange(case.spec.num_rows), lengths)
        for row in range(case.spec.num_rows):
            entries = case.kv_indices[rows == row].long()
            token, head = divmod(row, case.spec.num_kv_heads)
            request = case.spec.token_request[token]
            page = case.page_table[request, entries // case.spec.page_size].long()
            group = slice(head * case.spec.group_size, (head + 1) * case.spec.group_size)
            k, v = (c[page, entries % case.spec.page_size, head].float() for c in (case.k_cache, case.v_cache))
            logits = case.q[token, group].float() @ k.T * case.spec.sm_scale
            case.lse[token, group] = torch.logsumexp(logits, -1)
            case.out[token, group] = (torch.softmax(logits, -1) @ v).to(case.out.dtype)
        return Outputs(case.out, case.lse)


class AssumesContiguous(Declared):
    def seen(self, case: Case) -> Case:
        caches = {}
        for name in ("k_cache", "v_cache"):
            cache = getattr(case, name)
            plain = torch.empty(cache.shape, device="meta").stride()
            caches[name] = cache.as_strided(cache.shape, plain)
        return replace(case, **caches)


class WantsPacked(Declared):
    def seen(self, case: Case) -> Case:
        assert case.kv_cache is not None, "kv_cache is None"
        return replace(case, k_cache=case.kv_cache[:, 0], v_cache=case.kv_cache[:, 1])


class AddsToWorkspace(Declared):
    def workspace_bytes(self, case: Case) -> int:
        return 4 * case.out.numel()

    def run(self, case: Case, plan: Any = None) -> Outputs:
        outputs = Right().run(case)
        total = case.workspace.view(torch.float32).add_(outputs.out.float().view(-1))
        case.out.copy_(total.view(case.out.shape))
        return outputs


TABLE = {
    "Base2": ("lse_base", LseBase.NATURAL, LseBase.TWO),
    "SaysBase2": ("lse_base", LseBase.TWO, LseBase.NATURAL),
    "EmptyIsPositive": ("empty_lse", "-inf", "inf"),
    "ReadsHnd": ("kv_layout", KVLayout.NHD, KVLayout.HND),
    "SaysHnd": ("kv_layout", KVLayout.HND, KVLayout.NHD),
    "TopLeft": ("causal", CausalRule.BOTTOM_RIGHT, CausalRule.TOP_LEFT),
    "OwnScale": ("scale", Scale.SPEC, Scale.DEFAULT),
    "PhysicalSlots": ("index_space", IndexSpace.LOGICAL, IndexSpace.PHYSICAL),
    "SentinelT": ("sentinel", str(PADDING), SEQ_LEN),
    "SentinelAtTail": ("sentinel_places", SentinelPlaces.ANYWHERE, SentinelPlaces.TAIL),
    "SaysRaw": ("consumes", Consumes.RAW, Consumes.VALIDATED),
    "AssumesContiguous": ("real_strides", "True", "False"),
    "WantsPacked": ("packed_kv", "False", "True"),
    "AddsToWorkspace": ("workspace_zeroed", "False", "True"),
}
