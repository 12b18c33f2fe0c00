"""The queries of a program: their q, and whether all of them see a whole tile."""

import triton
import triton.language as tl

from .lookups import channels_of
from .terms import turned


@triton.jit
def load_q(
    q_row,
    in_group,
    query,
    channels_ptr,
    turns_ptr,
    turns_low,
    num_pairs,
    WIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """q at the pointers q_row [lanes, 1] of the lanes in_group, as the two tiles [lanes, channels] that K comes in, in
    DTYPE, and the channels of each: even and odd ones where a column of K is WIDE 2; the first and the second of pairs,
    turned by `query` [lanes], where there is RoPE (-1: there is none); else all, twice.
    """
    if turns_ptr is None:
        dim = tl.arange(0, BLOCK // WIDE)
        dim_2 = dim
        mask = channels_of(in_group, dim, HEAD_DIM // WIDE)
        q = tl.load(q_row + dim[None, :] * WIDE, mask=mask, other=0.0)
        q_2 = q
        if WIDE == 2:
            q_2 = tl.load(q_row + dim[None, :] * WIDE + 1, mask=mask, other=0.0)
    else:
        pair = tl.arange(0, BLOCK_PAIRS)
        dim = tl.load(channels_ptr + pair)
        dim_2 = tl.load(channels_ptr + BLOCK_PAIRS + pair)
        q = tl.load(q_row + dim[None, :], mask=in_group[:, None] & (dim >= 0)[None, :], other=0.0)
        q_2 = tl.load(q_row + dim_2[None, :], mask=in_group[:, None] & (dim_2 >= 0)[None, :], other=0.0)
        turn = turns_ptr + (query - turns_low).to(tl.int64)[:, None] * 2 * num_pairs + pair[None, :]
        q, q_2 = turned(q, q_2, turn, pair, num_pairs)
    return q.to(DTYPE), q_2.to(DTYPE), dim, dim_2


@triton.jit
def sees_whole(
    t, seq_len, oldest, newest, window_left, SLOTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Whether all queries, at positions oldest to newest, see all of SLOTS tokens from t on: no mask is needed."""
    whole = t + SLOTS <= seq_len
    if CAUSAL:
        whole = whole & (t + SLOTS - 1 <= oldest)
    if WINDOW:
        whole = whole & (t >= newest - window_left)
    return whole
