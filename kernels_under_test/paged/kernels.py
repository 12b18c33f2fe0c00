"""The kernels. A candidate row is one (query token, KV head) and serves the query heads of its group; a program takes
one row and one split of its slots. A slot is one token of one candidate entry: slot n names entry n // BLOCK_SIZE.

What goes beyond the plain row is there where its pointer is not None, and costs nothing elsewhere (docs/kernels.md).
Under the interpreter (UPCAST) low precision is lifted to FP32 right after the load and results are stored as FP32:
its bf16 arithmetic is wrong and its casts truncate (DESIGN section 10).
"""

import triton
import triton.language as tl

from .codecs import load_tile
from .terms import epilogue, keeps, tanh, turned, with_sink


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
    forced_ptr,
    ordinals_ptr,
    query_ordinals_ptr,
    log2_counts_ptr,
    frequency_ptr,
    partner_ptr,
    slopes_ptr,
    bucket_bias_ptr,
    bucket_reach,
    sinks_ptr,
    dropout_ptr,
    keep_scale,
    k_scales_ptr,
    k_zeros_ptr,
    v_scales_ptr,
    v_zeros_ptr,
    scale,
    cap_log2,
    window_left,
    epilogue_step,
    epilogue_largest,
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
    stride_ks_page,
    stride_ks_token,
    stride_ks_head,
    stride_ks_dim,
    stride_vs_page,
    stride_vs_token,
    stride_vs_head,
    stride_vs_dim,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    K_CODEC: tl.constexpr,
    K_CHANNELS: tl.constexpr,
    V_CODEC: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    EPILOGUE: tl.constexpr,
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
    dim_qk = tl.arange(0, BLOCK_QK)
    dim_vo = tl.arange(0, BLOCK_VO)
    q_mask = in_group[:, None]
    out_mask = in_group[:, None]
    if BLOCK_QK != HEAD_DIM_QK:
        q_mask = q_mask & (dim_qk < HEAD_DIM_QK)[None, :]
    if BLOCK_VO != HEAD_DIM_VO:
        out_mask = out_mask & (dim_vo < HEAD_DIM_VO)[None, :]
    query = position  # what position terms take for the query; masks and dropout take its logical position
    if query_ordinals_ptr is not None:
        query = tl.load(query_ordinals_ptr + row)
    q_row = q_ptr + token.to(tl.int64) * stride_q_token + qo_head[:, None] * stride_q_head
    q = tl.load(q_row + dim_qk[None, :], mask=q_mask, other=0.0)
    if partner_ptr is not None:
        frequency = tl.load(frequency_ptr + dim_qk, mask=dim_qk < HEAD_DIM_QK, other=0.0)
        partner = tl.load(partner_ptr + dim_qk, mask=dim_qk < HEAD_DIM_QK, other=0)
        q_partner = tl.load(q_row + partner[None, :], mask=q_mask, other=0.0)
        q = turned(q, q_partner, (query.to(tl.float32) * frequency)[None, :])
    q = q.to(tl.float32 if UPCAST else q_ptr.dtype.element_ty)
    if forced_ptr is not None:
        forced = tl.load(forced_ptr + row)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + qo_head, mask=in_group, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # in units of log2
    l = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_VO], tl.float32)
    for begin in range(first, last, BLOCK_N):
        slot = begin + tl.arange(0, BLOCK_N)
        entry = tl.load(kv_indices_ptr + start + slot // BLOCK_SIZE, mask=slot < last, other=0)
        t = entry * BLOCK_SIZE + slot % BLOCK_SIZE  # logical position
        valid = (slot < last) & (t < seq_len)
        if CAUSAL:
            valid = valid & (t <= position)
        if WINDOW:
            valid = valid & (t >= position - window_left)
        if forced_ptr is not None:  # a row without an edge holds the entry of its forced token, which no mask hides
            valid = tl.where(forced >= 0, (slot < last) & (t == forced), valid)
        key = t  # what position terms and dropout take for the key
        if ordinals_ptr is not None:
            key = tl.load(ordinals_ptr + start + slot // BLOCK_SIZE, mask=slot < last, other=0) + slot % BLOCK_SIZE
        # Equation (17): table_n(t // P), then the offset in the page; 64 bits from the page id on.
        page = tl.load(page_table_ptr + request * stride_table + t // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        offset = (t % PAGE_SIZE).to(tl.int64)
        k_slot = k_ptr + page * stride_k_page + offset * stride_k_token + kv_head * stride_k_head
        k_mask = valid[:, None]
        if BLOCK_QK != HEAD_DIM_QK:
            k_mask = k_mask & (dim_qk < HEAD_DIM_QK)[None, :]
        if K_CODEC == "none":
            k = tl.load(k_slot[:, None] + dim_qk[None, :], mask=k_mask, other=0.0)
        else:
            k = load_tile(
                k_slot, dim_qk, valid, k_mask, k_scales_ptr, k_zeros_ptr, page, offset, kv_head,
                stride_ks_page, stride_ks_token, stride_ks_head, stride_ks_dim, K_CODEC, K_CHANNELS,
            )  # fmt: skip
        if partner_ptr is not None:  # each key turns by its own position
            k_partner = load_tile(
                k_slot, partner, valid, k_mask, k_scales_ptr, k_zeros_ptr, page, offset, kv_head,
                stride_ks_page, stride_ks_token, stride_ks_head, stride_ks_dim, K_CODEC, K_CHANNELS,
            )  # fmt: skip
            k = turned(k, k_partner, key.to(tl.float32)[:, None] * frequency[None, :])
        k = k.to(q.dtype)
        # Equation (4); the mask stands behind all terms, before the maximum and the exponential.
        z = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * scale
        if cap_log2 is not None:
            z = tanh(z) * cap_log2
        if slopes_ptr is not None:
            z = z - slope[:, None] * tl.abs(query - key).to(tl.float32)[None, :]
        if bucket_bias_ptr is not None:
            column = tl.minimum(tl.maximum(query - key, -bucket_reach), bucket_reach) + bucket_reach
            bias = bucket_bias_ptr + qo_head[:, None] * (2 * bucket_reach + 1) + column[None, :]
            z = z + tl.load(bias, mask=in_group[:, None], other=0.0)
        if log2_counts_ptr is not None:
            z = z + tl.load(log2_counts_ptr + start + slot // BLOCK_SIZE, mask=slot < last, other=0.0)[None, :]
        z = tl.where(valid[None, :], z, float("-inf"))
        # Equations (5) and (6); a tile without a valid slot leaves the state as it is.
        m_new = tl.maximum(m, tl.max(z, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(z - base[:, None])
        rescale = tl.exp2(m - base)
        l = l * rescale + tl.sum(p, 1)
        if dropout_ptr is not None:  # of the numerator; l keeps every edge
            p = tl.where(keeps(dropout_ptr, request, key, position, qo_head), p * keep_scale, 0.0)
        v_slot = v_ptr + page * stride_v_page + offset * stride_v_token + kv_head * stride_v_head
        v_mask = valid[:, None]
        if BLOCK_VO != HEAD_DIM_VO:
            v_mask = v_mask & (dim_vo < HEAD_DIM_VO)[None, :]
        if V_CODEC == "none":
            v = tl.load(v_slot[:, None] + dim_vo[None, :], mask=v_mask, other=0.0)
        else:
            v = load_tile(
                v_slot, dim_vo, valid, v_mask, v_scales_ptr, v_zeros_ptr, page, offset, kv_head,
                stride_vs_page, stride_vs_token, stride_vs_head, stride_vs_dim, V_CODEC, V_CHANNELS,
            )  # fmt: skip
        v = v.to(q.dtype)
        o = o * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision=INPUT_PRECISION)
        m = m_new

    out_row = token.to(tl.int64) * num_kv_heads * GROUP + qo_head
    if SPLIT:
        part = out_row * num_splits + split
        tl.store(partial_m_ptr + part, m, mask=in_group)
        tl.store(partial_l_ptr + part, l, mask=in_group)
        tl.store(partial_o_ptr + part[:, None] * HEAD_DIM_VO + dim_vo[None, :], o, mask=out_mask)
    else:
        if sinks_ptr is not None:
            m, l, o = with_sink(m, l, o, tl.load(sinks_ptr + qo_head, mask=in_group, other=0.0))
        some = l > 0
        safe = tl.where(some, l, 1.0)
        lse = tl.where(some, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=in_group)
        out = tl.where(some[:, None], o / safe[:, None], 0.0)
        if EPILOGUE != "none":
            out = epilogue(out, epilogue_step, epilogue_largest, EPILOGUE)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM_VO + dim_vo[None, :], out, mask=out_mask)


@triton.jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_o_ptr,
    sinks_ptr,
    epilogue_step,
    epilogue_largest,
    num_rows,
    num_qo_heads,
    num_splits,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge the splits of BLOCK_M output rows, equation (7): un-normalised states on one maximum; empty splits carry
    no mass. What happens once to a row happens here: its sink logit, its epilogue.
    """
    out_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = out_row < num_rows
    dim_vo = tl.arange(0, BLOCK_VO)
    out_mask = inside[:, None]
    if BLOCK_VO != HEAD_DIM_VO:
        out_mask = out_mask & (dim_vo < HEAD_DIM_VO)[None, :]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_VO], tl.float32)
    for split in range(num_splits):
        part = out_row * num_splits + split
        l_split = tl.load(partial_l_ptr + part, mask=inside, other=0.0)
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
    if EPILOGUE != "none":
        out = epilogue(out, epilogue_step, epilogue_largest, EPILOGUE)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM_VO + dim_vo[None, :], out, mask=out_mask)
