"""The merge kernel: rows in several parts, whose states lie in the workspace, become out and lse."""

import triton
import triton.language as tl

from .terms import epilogue, with_sink


@triton.jit(do_not_specialize=["num_merged"])
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
    num_merged,
    num_qo_heads,
    num_splits,
    heads_per_list,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge BLOCK_M of the num_merged output rows of `split_rows`, equation (7): un-normalised states on one maximum;
    empty splits carry no mass. What happens once to a row happens here: its sink logit, its epilogue.
    """
    merged = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = merged < num_merged
    row = tl.load(split_rows_ptr + merged // heads_per_list, mask=inside, other=0)
    parts = tl.load(parts_ptr + merged // heads_per_list, mask=inside, other=0)
    out_row = row.to(tl.int64) * heads_per_list + merged % heads_per_list
    dim_vo = tl.arange(0, BLOCK_VO)
    out_mask = inside[:, None]
    if BLOCK_VO != HEAD_DIM_VO:
        out_mask = out_mask & (dim_vo < HEAD_DIM_VO)[None, :]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_VO], tl.float32)
    for split in range(num_splits):
        part = out_row * num_splits + split
        l_split = tl.load(partial_l_ptr + part, mask=inside & (split < parts), other=0.0)
        some = l_split > 0
        m_split = tl.where(some, tl.load(partial_m_ptr + part, mask=inside, other=0.0), float("-inf"))
        o_mask = out_mask & some[:, None]
        o_split = tl.load(partial_o_ptr + part[:, None] * HEAD_DIM_VO + dim_vo[None, :], mask=o_mask, other=0.0)
        m_new = tl.maximum(m, m_split)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - base)
        scale = tl.exp2(m_split - base)
        l = l * rescale + l_split * scale
        o = o * rescale[:, None] + o_split * scale[:, None]
        m = m_new
    if sinks_ptr is not None:
        m, l, o = with_sink(m, l, o, tl.load(sinks_ptr + out_row % num_qo_heads, mask=inside, other=0.0))
    some = l > 0
    safe = tl.where(some, l, 1.0)
    lse = tl.where(some, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + out_row, lse, mask=inside)
    out = tl.where(some[:, None], o / safe[:, None], 0.0)
    out_at = out_row[:, None] * HEAD_DIM_VO + dim_vo[None, :]
    if EPILOGUE != "none":
        out = epilogue(out, gate_ptr, out_at, out_mask, epilogue_step, epilogue_largest, EPILOGUE)
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
