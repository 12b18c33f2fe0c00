"""The merge kernel: rows in several parts, whose states lie in the workspace, become out and lse."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .terms import epilogue, with_sink


@triton.jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_o_ptr,
    split_rows_ptr,
    parts_ptr,
    sinks_ptr,
    gate_ptr,
    epilogue_step,
    epilogue_largest,
    num_qo_heads,
    num_splits,
    heads_per_list,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge an output row of `split_rows`, equation (7): un-normalised states on one maximum, BLOCK_S splits at a time;
    empty splits carry no mass. What happens once to a row happens here: its sink logit, its epilogue. EARLY: launched
    while the attention kernel runs, for whose end it waits; what the plan made was there before that one began.
    """
    merged = tl.program_id(0)
    row = tl.load(split_rows_ptr + merged // heads_per_list)
    parts = tl.load(parts_ptr + merged // heads_per_list)
    out_row = row.to(tl.int64) * heads_per_list + merged % heads_per_list + tl.arange(0, 1)
    dim_vo = tl.arange(0, BLOCK_VO)
    out_mask = (dim_vo < HEAD_DIM_VO)[None, :]
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    o = tl.zeros([1, BLOCK_VO], tl.float32)
    if EARLY:
        gdc_wait()
    for first in range(0, parts, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        there = split < parts
        part = out_row * num_splits + split
        l_split = tl.load(partial_l_ptr + part, mask=there, other=0.0)
        m_split = tl.load(partial_m_ptr + part, mask=there, other=0.0)
        o_at = partial_o_ptr + part[:, None] * HEAD_DIM_VO + dim_vo[None, :]
        o_split = tl.load(o_at, mask=there[:, None] & out_mask, other=0.0)
        m_split = tl.where(l_split != 0, m_split, float("-inf"))
        m_new = tl.maximum(m, tl.max(m_split, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - base)
        scale = tl.exp2(m_split - base)
        l = l * rescale + tl.sum(l_split * scale, 0)
        o = o * rescale[:, None] + tl.sum(o_split * scale[:, None], 0)[None, :]
        m = m_new
    if sinks_ptr is not None:
        m, l, o = with_sink(m, l, o, tl.load(sinks_ptr + out_row % num_qo_heads))
    some = l != 0  # NaN too
    safe = tl.where(some, l, 1.0)
    lse = tl.where(some, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + out_row, lse)
    out = tl.where(some[:, None], o / safe[:, None], 0.0)
    out_at = out_row[:, None] * HEAD_DIM_VO + dim_vo[None, :]
    if EPILOGUE != "none":
        out = epilogue(out, gate_ptr, out_at, out_mask, epilogue_step, epilogue_largest, EPILOGUE)
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
