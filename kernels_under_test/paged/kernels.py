"""The attention kernel. A candidate row is one (query token, head that has a list) and serves GROUP query heads; LISTS
of them read one KV head. A slot is one token of one entry: slot n of a row names entry n // BLOCK_SIZE of its list. A
task is a range of the slots of a row, and of the rows of the tokens behind it that have the same list.
Each program takes every num_programs-th task, so that one kernel serves all schedules: as many programs as tasks, or
as many as the device holds at once; the order of the tasks stands in the table.

What goes beyond the plain row is there where its pointer is not None, and costs nothing elsewhere (docs/kernels.md).
Under the interpreter (UPCAST) low precision is lifted to FP32 right after the load and results are stored as FP32:
its bf16 arithmetic is wrong and its casts truncate (DESIGN section 10).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .codecs import held, load_tile, place_of, unit
from .lookups import channels_of, description, entry_at, row_of, task_at, token_and_page
from .queries import load_q, sees_whole
from .recorder import record
from .terms import epilogue, keeps, position_bias, tanh, turned, with_sink


@triton.jit(do_not_specialize=["num_work", "num_tokens"])
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    seq_lens_ptr,
    token_position_ptr,
    kv_indices_ptr,
    tasks_ptr,
    num_work,
    out_ptr,
    lse_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_o_ptr,
    forced_ptr,
    ordinals_ptr,
    query_ordinals_ptr,
    log2_counts_ptr,
    turns_ptr,
    channels_ptr,
    turns_low,
    num_pairs,
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
    trace_tokens_ptr,
    trace_logits_ptr,
    trace_m_ptr,
    trace_l_ptr,
    trace_o_ptr,
    trace_tiles,
    scale,
    cap_log2,
    window_left,
    gate_ptr,
    epilogue_step,
    epilogue_largest,
    list_heads,
    num_tokens,
    num_splits,
    stride_q_token,
    stride_q_head,
    stride_table,
    stride_ks_page: tl.constexpr,
    stride_ks_token: tl.constexpr,
    stride_ks_head: tl.constexpr,
    stride_ks_dim: tl.constexpr,
    stride_vs_page: tl.constexpr,
    stride_vs_token: tl.constexpr,
    stride_vs_head: tl.constexpr,
    stride_vs_dim: tl.constexpr,
    stride_k_page: tl.constexpr,
    stride_k_token: tl.constexpr,
    stride_k_head: tl.constexpr,
    stride_v_page: tl.constexpr,
    stride_v_token: tl.constexpr,
    stride_v_head: tl.constexpr,
    GROUP: tl.constexpr,
    LISTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    K_CODEC: tl.constexpr,
    K_CHANNELS: tl.constexpr,
    K_LATE: tl.constexpr,
    V_CODEC: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    V_LATE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIFORM: tl.constexpr,
    GATHER: tl.constexpr,
    TRACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Tasks of the table (tasks.Columns), once for each of the programs that share one, with heads of its own: out and
    lse of rows in one part, else un-normalised (m, l, o) of their part. UNIFORM: the slots of a tile lie in one entry
    and on one page. EARLY: the merge kernel may be launched from now on. DESCRIBED: K and V lie on one page a request,
    and tiles are copied by a description of it.
    """
    sharers: tl.constexpr = GROUP // HEADS  # of a task
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    # Channels that stand in one column of K or V: the two of a word of codes, else one.
    K_WIDE: tl.constexpr = 2 if K_CODEC != "none" and k_ptr.dtype.element_ty == tl.int16 else 1
    V_WIDE: tl.constexpr = 2 if V_CODEC != "none" and v_ptr.dtype.element_ty == tl.int16 else 1
    K_UNIT: tl.constexpr = unit(K_CODEC, dtype, K_WIDE) if K_LATE else 1.0  # of what is multiplied
    V_UNIT: tl.constexpr = unit(V_CODEC, dtype, V_WIDE) if V_LATE else 1.0
    if EARLY:
        gdc_launch_dependents()
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        row, first, last, split, parts, queries, start, request = task_at(tasks_ptr + work // sharers * 8)
        seq_len = tl.load(seq_lens_ptr + request)
        list_head = row % list_heads
        kv_head = list_head // LISTS

        # A lane is one query head of one of the tokens.
        lane = tl.arange(0, BLOCK_M)
        token = row // list_heads + lane // HEADS
        in_group = lane < HEADS * queries
        qo_head = list_head * GROUP + work % sharers * HEADS + lane % HEADS
        position = tl.load(token_position_ptr + token, mask=in_group, other=0)
        # Rows of branches stand one branch behind another, in every table; q is common.
        q_token = token if num_tokens is None else token % num_tokens
        dim_v = tl.arange(0, BLOCK_VO // V_WIDE)
        dim_vo = tl.arange(0, BLOCK_VO)
        out_mask = channels_of(in_group, dim_vo, HEAD_DIM_VO)
        query = position  # what position terms take for the query; masks and dropout take its logical position
        if query_ordinals_ptr is not None:
            query = tl.load(query_ordinals_ptr + row + lane // HEADS * list_heads, mask=in_group, other=0)
        q_row = q_ptr + q_token.to(tl.int64)[:, None] * stride_q_token + qo_head[:, None] * stride_q_head
        q, q_2, dim_k, dim_k_2 = load_q(
            q_row, in_group, query, channels_ptr, turns_ptr, turns_low, num_pairs, K_WIDE, HEAD_DIM_QK, BLOCK_QK,
            BLOCK_PAIRS, tl.float32 if UPCAST else dtype,
        )  # fmt: skip
        if forced_ptr is not None:
            forced = tl.load(forced_ptr + row)

        out_row = token.to(tl.int64) * list_heads * GROUP + qo_head
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # in units of log2
        l = tl.zeros([BLOCK_M], tl.float32)
        o = tl.zeros([BLOCK_M, BLOCK_VO // V_WIDE], tl.float32)
        o_2 = o
        # What a tile loads is looked up while those before it are computed: its entries two tiles ahead, its pages one.
        apart = 0 if UNIFORM else tl.arange(0, BLOCK_N)
        within = tl.arange(0, BLOCK_N) if UNIFORM else tl.zeros([BLOCK_N], tl.int32)
        newest = tl.max(tl.where(in_group, position, -2147483648))
        oldest = tl.min(tl.where(in_group, position, 2147483647))
        k_base = k_ptr + kv_head.to(tl.int64) * stride_k_head
        v_base = v_ptr + kv_head.to(tl.int64) * stride_v_head
        entries = kv_indices_ptr + start
        table = page_table_ptr + request * stride_table
        if DESCRIBED:
            end = tl.minimum(seq_len, newest + 1) if CAUSAL else seq_len  # of what any of the queries sees
            k_base = description(k_base, table, end, stride_k_page, stride_k_token, BLOCK_N, HEAD_DIM_QK, BLOCK_QK)
            v_base = description(v_base, table, end, stride_v_page, stride_v_token, BLOCK_N, HEAD_DIM_VO, BLOCK_VO)
        at = first + apart
        entry = entry_at(entries, at, last, BLOCK_SIZE)
        t_next, page_next = token_and_page(entry, at, last, table, seq_len, BLOCK_SIZE, PAGE_SIZE)
        entry = entry_at(entries, at + BLOCK_N, last, BLOCK_SIZE)
        for begin in range(first, last, BLOCK_N):
            page = page_next
            t = t_next + within  # logical position
            whole = False
            if UNIFORM and forced_ptr is None:
                whole = sees_whole(t_next, seq_len, oldest, newest, window_left, BLOCK_N, CAUSAL, WINDOW)
            if DESCRIBED:
                row_at = row_of(t_next, end)
            offset = (t_next.to(tl.uint32) % PAGE_SIZE).to(tl.int32)  # of the first slot, where one page holds them all
            at = begin + BLOCK_N + apart
            t_next, page_next = token_and_page(entry, at, last, table, seq_len, BLOCK_SIZE, PAGE_SIZE)
            entry = entry_at(entries, at + BLOCK_N, last, BLOCK_SIZE)
            slot = begin + tl.arange(0, BLOCK_N)
            valid = t < seq_len  # for any of the queries
            sees = valid[None, :]  # each of them
            if CAUSAL:
                valid = valid & (t <= newest)
                sees = sees & (t[None, :] <= position[:, None])
            if WINDOW:
                valid = valid & (t >= oldest - window_left)
                sees = sees & (t[None, :] >= position[:, None] - window_left)
            if forced_ptr is not None:  # a row without an edge holds the entry of its forced token, which no mask hides
                valid = tl.where(forced >= 0, t == forced, valid)
                sees = tl.where(forced >= 0, valid[None, :], sees)
            key = t  # what position terms and dropout take for the key
            if ordinals_ptr is not None:
                key = tl.load(ordinals_ptr + start + slot // BLOCK_SIZE, mask=slot < last, other=0) + slot % BLOCK_SIZE
            k_place = place_of(page, offset, within, stride_k_page, stride_k_token, K_CODEC)
            v_place = place_of(page, offset, within, stride_v_page, stride_v_token, V_CODEC)
            offset = offset + within
            if GATHER:  # so many copies of each slot, one row behind the other
                place = (start.to(tl.int64) * BLOCK_SIZE + slot) * GATHER + work % GATHER
                k_place = place * stride_k_token
                v_place = place * stride_v_token
            k_mask = channels_of(valid, dim_k, HEAD_DIM_QK // K_WIDE)
            if turns_ptr is not None:
                k_mask = valid[:, None] & (dim_k >= 0)[None, :]
            k, k_2, k_scale = load_tile(
                k_base, row_at if DESCRIBED else k_place, dim_k, valid, k_mask, k_scales_ptr, k_zeros_ptr, page, offset,
                kv_head, stride_ks_page, stride_ks_token, stride_ks_head, stride_ks_dim, K_CODEC, K_CHANNELS,
                K_LATE, dtype, UPCAST, DESCRIBED,
            )  # fmt: skip
            if turns_ptr is not None:  # each key turns by its own position
                k_mask = valid[:, None] & (dim_k_2 >= 0)[None, :]
                k_2, _, k_scale = load_tile(
                    k_base, k_place, dim_k_2, valid, k_mask, k_scales_ptr, k_zeros_ptr, page, offset, kv_head,
                    stride_ks_page, stride_ks_token, stride_ks_head, stride_ks_dim, K_CODEC, K_CHANNELS, K_LATE,
                    dtype, UPCAST, DESCRIBED,
                )  # fmt: skip
                k_turn = turns_ptr + tl.where(valid, key - turns_low, 0).to(tl.int64)[:, None] * 2 * num_pairs
                pair = tl.arange(0, BLOCK_PAIRS)
                k, k_2 = turned(k, k_2, k_turn + pair[None, :], pair, num_pairs)
            # Equation (4); the mask stands behind all terms, before the maximum and the exponential.
            z = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=INPUT_PRECISION)
            if turns_ptr is not None or K_WIDE == 2:
                z = tl.dot(q_2, tl.trans(k_2.to(q.dtype)), z, input_precision=INPUT_PRECISION)
            z = z * (k_scale * (scale * K_UNIT))[None, :] if K_LATE else z * scale
            if cap_log2 is not None:
                z = tanh(z) * cap_log2
            if slopes_ptr is not None or bucket_bias_ptr is not None:
                z += position_bias(
                    query[:, None] - key[None, :], qo_head, in_group, slopes_ptr, bucket_bias_ptr, bucket_reach
                )
            if log2_counts_ptr is not None:
                z = z + tl.load(log2_counts_ptr + start + slot // BLOCK_SIZE, mask=slot < last, other=0.0)[None, :]
            z = z if whole else tl.where(sees, z, float("-inf"))
            # Equations (5) and (6); a tile without a valid slot leaves the state as it is.
            m_new = tl.maximum(m, tl.max(z, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(z - base[:, None])
            rescale = tl.exp2(m - base)
            l = l * rescale + tl.sum(p, 1)
            if dropout_ptr is not None:  # of the numerator; l keeps every edge
                p = tl.where(keeps(dropout_ptr, request, key, position, qo_head), p * keep_scale, 0.0)
            v_mask = channels_of(valid, dim_v, HEAD_DIM_VO // V_WIDE)
            v, v_2, v_scale = load_tile(
                v_base, row_at if DESCRIBED else v_place, dim_v, valid, v_mask, v_scales_ptr, v_zeros_ptr, page, offset,
                kv_head, stride_vs_page, stride_vs_token, stride_vs_head, stride_vs_dim, V_CODEC, V_CHANNELS,
                V_LATE, dtype, UPCAST, DESCRIBED,
            )  # fmt: skip
            if V_LATE:
                p = p * v_scale[None, :]
            p = p.to(q.dtype)
            v = v.to(q.dtype)
            if V_CODEC != "none" and V_WIDE == 1 and not UPCAST:
                v = held(v)
            o = o * rescale[:, None] + tl.dot(p, v, input_precision=INPUT_PRECISION)
            if V_WIDE == 2:
                o_2 = o_2 * rescale[:, None] + tl.dot(p, v_2.to(q.dtype), input_precision=INPUT_PRECISION)
            m = m_new
            if TRACE:
                record(
                    trace_tokens_ptr, trace_logits_ptr, trace_m_ptr, trace_l_ptr, trace_o_ptr, trace_tiles,
                    (row + lane // HEADS * list_heads).to(tl.int64), lane % HEADS == 0, out_row, begin, last,
                    in_group, out_mask, tl.where(sees, t[None, :], -1), z, m, l,
                    (tl.interleave(o, o_2) if V_WIDE == 2 else o) * V_UNIT, BLOCK_N, HEAD_DIM_VO,
                )  # fmt: skip

        o = (tl.interleave(o, o_2) if V_WIDE == 2 else o) * V_UNIT
        if SPLIT and parts > 1:
            part = out_row * num_splits + split
            tl.store(partial_m_ptr + part, m, mask=in_group)
            tl.store(partial_l_ptr + part, l, mask=in_group)
            tl.store(partial_o_ptr + part[:, None] * HEAD_DIM_VO + dim_vo[None, :], o, mask=out_mask)
        else:
            if sinks_ptr is not None:
                m, l, o = with_sink(m, l, o, tl.load(sinks_ptr + qo_head, mask=in_group, other=0.0))
            some = l != 0  # NaN too
            safe = tl.where(some, l, 1.0)
            lse = tl.where(some, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
            tl.store(lse_ptr + out_row, lse, mask=in_group)
            out = tl.where(some[:, None], o / safe[:, None], 0.0)
            out_at = out_row[:, None] * HEAD_DIM_VO + dim_vo[None, :]
            if EPILOGUE != "none":
                out = epilogue(out, gate_ptr, out_at, out_mask, epilogue_step, epilogue_largest, EPILOGUE)
            tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
