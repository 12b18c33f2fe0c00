"""PyTorch's scaled_dot_product_attention with a dense mask: the declared dense fallback, and the simplest right
backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sacts.conformance.adapter import Capabilities, Case, Gradients, Outputs, Refused, Saved, Support, fallback, refused
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, CausalRule, DType, FallbackReason

from .served import unserved

_HALF = (DType.FP16, DType.BF16)
# On CUDA PyTorch may choose cuDNN's kernel, which returns zeros for rows whose logits all lie near -1e5: see
# docs/measurements.md.
_BACKENDS = {"cuda": [SDPBackend.MATH], "cpu": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]}


class Adapter:
    """Gathers the whole committed KV of each request, zeroes what no row attends, and masks."""

    name = "sdpa"
    capabilities = Capabilities(
        numerics={
            DType.FP32: Numerics(p=DType.FP32, out=DType.FP32, dense=True),
            # PyTorch's CPU kernel takes a faster exponential for 16-bit types; exp(0) is off by about 3e-5.
            **{dtype: Numerics(p=dtype, out=dtype, u_exp=1.1e-4, dense=True) for dtype in _HALF},
        },
        d_lse=True,
        reads_saved=False,
    )

    def support(self, spec: AttentionSpec) -> Support:
        """The plain row, densely; anything beyond it is refused by name."""
        reason = unserved(spec)
        return refused(reason) if reason else fallback("dense")

    def run(self, case: Case, plan: Any = None) -> Outputs:
        """One dense call per request and branch, under the masks of a caller's plan, or its own. Raises Refused as
        declared.
        """
        if reason := unserved(case.spec):
            raise Refused(reason)
        masks = masks_of(case) if plan is None else plan
        if case.gates is None:
            _attend(case, masks[0])
        else:
            _attend_branches(case, case.gates, masks)
        path = str(fallback(case.fallback or "dense"))
        self._runs[path] += 1
        return Outputs(case.out, case.lse, path=path)

    def falls_back(self, spec: AttentionSpec, reason: FallbackReason) -> Support:
        """The one path, for whatever reason."""
        return refused(said) if (said := unserved(spec)) else fallback(reason)

    @cached_property
    def _runs(self) -> Counter[str]:
        return Counter()

    def counters(self) -> Counter[str]:
        """Runs by path."""
        return self._runs

    def backward(
        self, case: Case, saved: Saved, d_out: torch.Tensor, d_lse: torch.Tensor | None = None, plan: Any = None
    ) -> Gradients:
        """Autograd through dense attention in FP32, whatever the dtype; what is saved is not read. Raises Refused as
        declared.
        """
        spec, made, lists = case.spec, case.gradients, case.kv_indptr.tolist()
        if reason := unserved(spec):
            raise Refused(reason)
        if spec.num_branches > 1:
            raise Refused("not yet: gradients of gated branches")
        assert made is not None
        made.d_q.zero_()
        slots: list[torch.Tensor] = []
        of_k: list[torch.Tensor] = []
        of_v: list[torch.Tensor] = []
        for request, (seq_len, qo_len) in enumerate(zip(spec.seq_lens, spec.qo_lens, strict=True)):
            if not qo_len or not seq_len:
                continue
            tokens = slice(spec.qo_indptr[request], spec.qo_indptr[request] + qo_len)
            mask = torch.stack(
                [_mask(case, lists, token, seq_len) for token in range(tokens.start, tokens.stop)], dim=1
            )
            slot, k, v = _keys(case, request, mask)
            given = case.q[tokens].float(), k.float(), v.float()
            d_q, d_k, d_v = _gradients(spec, mask, given, d_out[tokens], None if d_lse is None else d_lse[tokens])
            made.d_q[tokens] = d_q.to(made.d_q.dtype)
            slots, of_k, of_v = [*slots, slot], [*of_k, d_k], [*of_v, d_v]
        for cache, parts in ((made.d_k, of_k), (made.d_v, of_v)):
            if parts:  # a slot that several requests read receives the sum
                own, place = torch.cat(slots).unique(return_inverse=True)
                total = parts[0].new_zeros(len(own), *parts[0].shape[1:]).index_add_(0, place, torch.cat(parts))
                cache.view(-1, *cache.shape[2:])[own] = total.to(cache.dtype)
        return made


def _attend(case: Case, masks: Sequence[torch.Tensor | None]) -> None:
    """Fill out and lse of a case."""
    for request, mask in enumerate(masks):
        if mask is not None:
            tokens = slice(*case.spec.qo_indptr[request : request + 2])
            case.out[tokens], case.lse[tokens] = _dense(case, request, tokens, mask)


def _attend_branches(case: Case, gates: torch.Tensor, masks: Sequence[Sequence[torch.Tensor | None]]) -> None:
    """Each branch in FP32, gated and added."""
    spec = replace(case.spec, num_branches=1)
    total = torch.zeros_like(case.out, dtype=torch.float32)
    for branch, own in enumerate(masks):
        out, lse = torch.zeros_like(total), torch.zeros_like(case.lse[..., branch])
        _attend(replace(case, spec=spec, q=case.q.float(), out=out, lse=lse), own)
        total += gates[..., branch, None] * out
        case.lse[..., branch] = lse
    case.out.copy_(total)


def masks_of(case: Case) -> list[list[torch.Tensor | None]]:
    """By branch and request: which keys its queries attend, [list_heads, q_len, T] of what stands in the lists, which
    are read on the host; None for a request without queries. The lists stand one branch after another.
    """
    spec, lists = case.spec, case.kv_indptr.tolist()
    starts = [branch * spec.num_rows for branch in range(spec.num_branches)]
    return [_masks(case, lists[start : start + spec.num_rows + 1]) for start in starts]


def _masks(case: Case, lists: list[int]) -> list[torch.Tensor | None]:
    starts = case.spec.qo_indptr
    masks: list[torch.Tensor | None] = []
    for first, behind, seq_len in zip(starts, starts[1:], case.spec.seq_lens, strict=False):
        rows = [_mask(case, lists, token, seq_len) for token in range(first, behind)]
        masks.append(torch.stack(rows, dim=1) if rows else None)
    return masks


def _mask(case: Case, indptr: list[int], token: int, seq_len: int) -> torch.Tensor:
    """Which keys one query token attends: [list_heads, T]."""
    spec = case.spec
    t = torch.arange(seq_len, device=case.q.device)
    mask = torch.zeros(spec.list_heads, seq_len, dtype=torch.bool, device=case.q.device)
    for head in range(spec.list_heads):
        row = token * spec.list_heads + head
        entries = case.kv_indices[indptr[row] : indptr[row + 1]].long()
        chosen = (entries[:, None] * spec.block_size + torch.arange(spec.block_size, device=t.device)).flatten()
        mask[head, chosen[chosen < seq_len]] = True
    position = spec.token_position[token]
    if spec.causal is not CausalRule.NONE:
        mask &= t <= position
    if spec.window_left >= 0:
        mask &= t >= position - spec.window_left
    return mask


def _keys(case: Case, request: int, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Physical slot of each committed token [T]; K and V there [T, num_kv_heads, d], 0 where no row attends."""
    spec = case.spec
    t = torch.arange(mask.shape[-1], device=mask.device)
    page, offset = case.page_table[request, t // spec.page_size].long(), t % spec.page_size
    attended = mask.any(dim=1).view(spec.num_kv_heads, spec.lists_per_kv_head, len(t)).any(dim=1).T[..., None]
    k, v = (torch.where(attended, cache[page, offset], 0) for cache in (case.k_cache, case.v_cache))
    return page * spec.page_size + offset, k, v


def _gradients(
    spec: AttentionSpec,
    mask: torch.Tensor,
    given: tuple[torch.Tensor, ...],
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """d_q [n, num_qo_heads, d], d_k and d_v [T, num_kv_heads, d] of one request; mask [list_heads, n, T]."""
    leaves = [x.detach().requires_grad_() for x in given]
    q, k, v = (x.transpose(0, 1) for x in leaves)
    k, v = (x.repeat_interleave(spec.group_size, 0) for x in (k, v))
    mask = mask.repeat_interleave(spec.heads_per_list, 0)
    some = mask.any(dim=-1, keepdim=True)
    logits = (q @ k.transpose(-1, -2) * spec.sm_scale).masked_fill(~mask & some, float("-inf"))
    lse = torch.logsumexp(logits, -1, keepdim=True)
    out = torch.exp(logits - lse) @ v
    weights = [d_out.transpose(0, 1).float(), torch.zeros_like(lse[..., 0]) if d_lse is None else d_lse.T]
    loss = (out * weights[0] * some).sum() + (lse[..., 0] * weights[1] * some[..., 0]).sum()
    return torch.autograd.grad(loss, leaves)


def _dense(case: Case, request: int, tokens: slice, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n, num_qo_heads, d] and lse [n, num_qo_heads] of one request; mask [list_heads, n, T]."""
    spec = case.spec
    seq_len = mask.shape[-1]
    held = (x.to(case.q.dtype) for x in _keys(case, request, mask)[1:])
    k, v = (x.permute(1, 0, 2).repeat_interleave(spec.group_size, 0) for x in held)
    q = case.q[tokens].transpose(0, 1)
    mask = mask.repeat_interleave(spec.heads_per_list, 0)
    some = mask.any(dim=-1, keepdim=True)
    if not seq_len:
        return torch.zeros_like(case.out[tokens]), torch.full_like(case.lse[tokens], float("-inf"))
    # A row without a key would be 0/0: let it see everything, and zero it afterwards.
    with sdpa_kernel(_BACKENDS.get(q.device.type, [SDPBackend.MATH])):
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask[None] | ~some[None], scale=spec.sm_scale)[
            0
        ]
    logits = (q.float() @ k.float().transpose(-1, -2) * spec.sm_scale).masked_fill(~mask, float("-inf"))
    return torch.where(some, out, 0).transpose(0, 1), torch.logsumexp(logits, -1).transpose(0, 1)
