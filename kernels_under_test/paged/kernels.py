"""The kernels. A candidate row is one (query token, KV head) and serves the query heads of its group; a program takes
one row and one split of its slots. A slot is one token of one candidate entry: slot n names entry n // BLOCK_SIZE.

Under the interpreter (UPCAST) low precision is lifted to FP32 right after the load and results are stored as FP32:
its bf16 arithmetic is wrong and its casts truncate (DESIGN section 10).
"""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    seq_lens_ptr,
    token_request_ptr,
    token_position_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    out_ptr,
    lse_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_o_ptr,
    scale_log2,
    window_left,
    num_kv_heads,
    num_splits,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """One split of one row: un-normalised (m, l, o) where SPLIT, out and lse otherwise."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    token = row // num_kv_heads
    kv_head = row % num_kv_heads
    request = tl.load(token_request_ptr + token)
    position = tl.load(token_position_ptr + token)
    seq_len = tl.load(seq_lens_ptr + request)

    start = tl.load(kv_indptr_ptr + row)
    slots = (tl.load(kv_indptr_ptr + row + 1) - start) * BLOCK_SIZE
    tiles_per_split = tl.cdiv(tl.cdiv(slots, BLOCK_N), num_splits)
    first = split * tiles_per_split * BLOCK_N
    last = tl.minimum(first + tiles_per_split * BLOCK_N, slots)

    lane = tl.arange(0, BLOCK_M)
    in_group = lane < GROUP
    qo_head = kv_head * GROUP + lane
    dim_qk = tl.arange(0, HEAD_DIM_QK)
    dim_vo = tl.arange(0, HEAD_DIM_VO)
    q_row = q_ptr + token.to(tl.int64) * stride_q_token
    q = tl.load(q_row + qo_head[:, None] * stride_q_head + dim_qk[None, :], mask=in_group[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # in units of log2
    l = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, HEAD_DIM_VO], tl.float32)
    for begin in range(first, last, BLOCK_N):
        slot = begin + tl.arange(0, BLOCK_N)
        entry = tl.load(kv_indices_ptr + start + slot // BLOCK_SIZE, mask=slot < last, other=0)
        t = entry * BLOCK_SIZE + slot % BLOCK_SIZE  # logical position
        valid = (slot < last) & (t < seq_len)
        if CAUSAL:
            valid = valid & (t <= position)
        if WINDOW:
            valid = valid & (t >= position - window_left)
        # Equation (17): table_n(t // P), then the offset in the page; 64 bits from the page id on.
        page = tl.load(page_table_ptr + request * stride_table + t // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        offset = (t % PAGE_SIZE).to(tl.int64)
        k_slot = k_ptr + page * stride_k_page + offset * stride_k_token + kv_head * stride_k_head
        k = tl.load(k_slot[:, None] + dim_qk[None, :], mask=valid[:, None], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        # Equation (4); the mask stands before the maximum and the exponential.
        z = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * scale_log2
        z = tl.where(valid[None, :], z, float("-inf"))
        # Equations (5) and (6); a tile without a valid slot leaves the state as it is.
        m_new = tl.maximum(m, tl.max(z, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(z - base[:, None])
        rescale = tl.exp2(m - base)
        l = l * rescale + tl.sum(p, 1)
        v_slot = v_ptr + page * stride_v_page + offset * stride_v_token + kv_head * stride_v_head
        v = tl.load(v_slot[:, None] + dim_vo[None, :], mask=valid[:, None], other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        o = o * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision=INPUT_PRECISION)
        m = m_new

    out_row = token.to(tl.int64) * num_kv_heads * GROUP + qo_head
    if SPLIT:
        part = out_row * num_splits + split
        tl.store(partial_m_ptr + part, m, mask=in_group)
        tl.store(partial_l_ptr + part, l, mask=in_group)
        tl.store(partial_o_ptr + part[:, None] * HEAD_DIM_VO + dim_vo[None, :], o, mask=in_group[:, None])
    else:
        some = l > 0
        safe = tl.where(some, l, 1.0)
        lse = tl.where(some, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=in_group)
        out = tl.where(some[:, None], o / safe[:, None], 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM_VO + dim_vo[None, :], out, mask=in_group[:, None])


@triton.jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_o_ptr,
    num_heads,
    num_splits,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge the splits of BLOCK_M output rows, equation (7): un-normalised states on one maximum; empty splits carry
    no mass.
    """
    out_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = out_row < num_heads
    dim_vo = tl.arange(0, HEAD_DIM_VO)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, HEAD_DIM_VO], tl.float32)
    for split in range(num_splits):
        part = out_row * num_splits + split
        l_split = tl.load(partial_l_ptr + part, mask=inside, other=0.0)
        some = l_split > 0
        m_split = tl.where(some, tl.load(partial_m_ptr + part, mask=inside, other=0.0), float("-inf"))
        o_split = tl.load(partial_o_ptr + part[:, None] * HEAD_DIM_VO + dim_vo[None, :], mask=some[:, None], other=0.0)
        m_new = tl.maximum(m, m_split)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - base)
        scale = tl.exp2(m_split - base)
        l = l * rescale + l_split * scale
        o = o * rescale[:, None] + o_split * scale[:, None]
        m = m_new
    some = l > 0
    safe = tl.where(some, l, 1.0)
    lse = tl.where(some, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + out_row, lse, mask=inside)
    out = tl.where(some[:, None], o / safe[:, None], 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM_VO + dim_vo[None, :], out, mask=inside[:, None])
