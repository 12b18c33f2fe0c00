"""The kernel of gated branches: out and lse of each branch, which lie in the workspace, become out and lse of the call.

out = epilogue(sum_b gates[token, head, b] out_b): branches are separate softmaxes, whose sum has no lse.
"""

import triton
import triton.language as tl

from .lookups import channels_of
from .terms import epilogue


@triton.jit(do_not_specialize=["num_rows"])
def gated_sum_kernel(
    out_ptr,
    lse_ptr,
    branch_out_ptr,
    branch_lse_ptr,
    gates_ptr,
    gate_ptr,
    epilogue_step,
    epilogue_largest,
    num_rows,
    num_branches,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add BLOCK_M of the num_rows output rows in FP32, in the order of the branches. What comes in lies branch behind
    branch; gates and lse have the branch as their last dimension.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < num_rows
    dim_vo = tl.arange(0, BLOCK_VO)
    out_mask = channels_of(inside, dim_vo, HEAD_DIM_VO)
    out = tl.zeros([BLOCK_M, BLOCK_VO], tl.float32)
    for branch in range(num_branches):
        own = branch * num_rows.to(tl.int64) + row
        gated = row * num_branches + branch
        tl.store(lse_ptr + gated, tl.load(branch_lse_ptr + own, mask=inside), mask=inside)
        part = tl.load(branch_out_ptr + own[:, None] * HEAD_DIM_VO + dim_vo[None, :], mask=out_mask, other=0.0)
        out += tl.load(gates_ptr + gated, mask=inside, other=0.0)[:, None] * part
    out_at = row[:, None] * HEAD_DIM_VO + dim_vo[None, :]
    if EPILOGUE != "none":
        out = epilogue(out, gate_ptr, out_at, out_mask, epilogue_step, epilogue_largest, EPILOGUE)
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
