"""What the attention kernel stores on its way, where a trace is asked for."""

import triton
import triton.language as tl


@triton.jit
def record(
    tokens_ptr,
    logits_ptr,
    m_ptr,
    l_ptr,
    o_ptr,
    num_tiles,
    rows,
    of_row,
    out_row,
    begin,
    last,
    in_group,
    out_mask,
    tokens,
    z,
    m,
    l,
    o,
    BLOCK_N: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
):
    """Store the tile that begins at a slot, of slots before last: `tokens` [lanes, slots] once for each of `rows`
    [lanes], by the lane that stands for it (`of_row`); logits z [lanes, slots] and the state behind the tile by
    `out_row`.
    """
    slot = begin + tl.arange(0, BLOCK_N)
    inside = in_group[:, None] & (slot < last)[None, :]
    visited = tokens_ptr + rows[:, None] * num_tiles * BLOCK_N + slot[None, :]
    tl.store(visited, tokens, mask=inside & of_row[:, None])
    tl.store(logits_ptr + (out_row * num_tiles)[:, None] * BLOCK_N + slot[None, :], z, mask=inside)
    state = out_row * num_tiles + begin // BLOCK_N
    tl.store(m_ptr + state, m, mask=in_group)
    tl.store(l_ptr + state, l, mask=in_group)
    tl.store(o_ptr + state[:, None] * HEAD_DIM_VO + tl.arange(0, o.shape[1])[None, :], o, mask=out_mask)
