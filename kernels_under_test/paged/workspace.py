"""The workspace: what it holds, how large it is from what the host knows before the plan, and where each part lies.

First the scratch of the gather route, K then V, each rounded up to ALIGNMENT bytes; then FP32: out under the
interpreter, out and lse of each branch where there are several, then partial m, l and o of each output row and split
where rows may be split.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sacts.conformance.adapter import Case, Refused
from sacts.reference.spec import Codec, CodecFormat, DType, Route

from .tuning import chosen

ALIGNMENT = 16


@dataclass(frozen=True)
class Workspace:
    """Views of the workspace. `k`, `v` [scratch slots, elements as stored]: scratch, None where nothing is gathered;
    FP32 `out`, flat, None where the kernels write into `case.out`; `branch_out`, `branch_lse`: of each branch, one
    behind another, flat, None where there is one; `m`, `l`, `o`: partial states, flat.
    """

    k: Tensor | None
    v: Tensor | None
    out: Tensor | None
    branch_out: Tensor | None
    branch_lse: Tensor | None
    m: Tensor
    l: Tensor
    o: Tensor


def copies_of(case: Case) -> int:
    """How often a candidate slot is copied to scratch."""
    return {Route.DIRECT: 0, Route.GATHER: 1, Route.GATHER_HEADS: case.spec.heads_per_list}[case.hints.route]


def scratch_slots(case: Case) -> int:
    """Slots that scratch may need: those of all entries of the raw lists, and of one more of each row that may be
    forced, once a copy.
    """
    forced = case.spec.num_lists if case.spec.empty_row.forces else 0
    return (case.kv_indices.numel() + forced) * case.spec.block_size * copies_of(case)


def stored(codec: Codec | None, head_dim: int) -> int:
    """Elements of one slot of one head as stored: bytes of two int4 along it, else one a channel. Bytes that two tokens
    share are copied with both.
    """
    halves = codec is not None and codec.format is CodecFormat.INT4 and codec.nibble_axis == "dim"
    return -(-head_dim // 2) if halves else head_dim


def sizes_of(case: Case, *, fp32_out: bool) -> tuple[int, ...]:
    """Bytes of the scratch of K and V, and of FP32 out, out and lse of branches, m, l and o."""
    spec, splits = case.spec, chosen(case).num_splits
    slots, out = scratch_slots(case), case.spec.num_tokens * case.spec.num_qo_heads * 4
    item = 4 if spec.dtype is DType.FP32 else 2
    k = slots * stored(spec.k_codec, spec.head_dim_qk) * (1 if spec.k_codec else item)
    v = slots * stored(spec.v_codec, spec.head_dim_vo) * (1 if spec.v_codec else item)
    branches = out * spec.num_branches if spec.num_branches > 1 else 0
    parts = out * spec.num_branches * splits if splits > 1 else 0
    row = spec.head_dim_vo
    return _aligned(k), _aligned(v), out * row * fp32_out, branches * row, branches, parts, parts, parts * row


def needed_bytes(case: Case, *, fp32_out: bool) -> int:
    """Bytes that `run` needs."""
    return sum(sizes_of(case, fp32_out=fp32_out))


def workspace_of(case: Case, *, fp32_out: bool) -> Workspace:
    """The views. Raises Refused, with both sizes, for a workspace that is too small."""
    needed, given = needed_bytes(case, fp32_out=fp32_out), case.workspace.numel()
    if given < needed:
        raise Refused(f"workspace: {needed} bytes needed, {given} given")
    k, v, *words = sizes_of(case, fp32_out=fp32_out)
    flat = case.workspace[k + v :]
    flat = flat[: flat.numel() // 4 * 4].view(torch.float32)  # it may be longer than needed, by any number of bytes
    at = [sum(words[:n]) // 4 for n in range(len(words) + 1)]
    out, branch_out, branch_lse, m, l, o = (flat[start:end] for start, end in pairwise(at))
    return Workspace(
        k=_scratch(case, case.workspace[:k], case.k_cache) if k else None,
        v=_scratch(case, case.workspace[k : k + v], case.v_cache) if v else None,
        out=out if fp32_out else None,
        branch_out=branch_out if case.spec.num_branches > 1 else None,
        branch_lse=branch_lse if case.spec.num_branches > 1 else None,
        m=m,
        l=l,
        o=o,
    )


def _scratch(case: Case, section: Tensor, cache: Tensor) -> Tensor:
    slots, width = scratch_slots(case), cache.shape[3]
    return section[: slots * width * cache.element_size()].view(cache.dtype).view(slots, width)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
