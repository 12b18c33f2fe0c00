"""The gather kernel: candidates copied to contiguous scratch, before attention over dense tiles of it. Seed 2.1."""

import triton
import triton.language as tl

from .codecs import place_of
from .lookups import task_at


@triton.jit(do_not_specialize=["num_work"])
def gather_kernel(
    k_ptr,
    v_ptr,
    k_scratch_ptr,
    v_scratch_ptr,
    page_table_ptr,
    seq_lens_ptr,
    kv_indices_ptr,
    tasks_ptr,
    num_work,
    list_heads,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_table,
    K_CODEC: tl.constexpr,
    V_CODEC: tl.constexpr,
    K_STORED: tl.constexpr,
    V_STORED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LISTS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One copy of the slots of each task, as they are stored, codes as codes: the write of equation (3). Slots beyond T
    become 0; what other masks hide is copied and never loaded.
    """
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        row, first, last, _, _, _, start, request = task_at(tasks_ptr + work // COPIES * 8)
        kv_head = row % list_heads // LISTS
        seq_len = tl.load(seq_lens_ptr + request)
        k_base = k_ptr + kv_head.to(tl.int64) * stride_k_head
        v_base = v_ptr + kv_head.to(tl.int64) * stride_v_head
        dim_k = tl.arange(0, BLOCK_K)
        dim_v = tl.arange(0, BLOCK_V)
        for begin in range(first, last, BLOCK_N):
            slot = begin + tl.arange(0, BLOCK_N)
            inside = slot < last
            entry = tl.load(kv_indices_ptr + start + slot // BLOCK_SIZE, mask=inside, other=0)
            t = entry * BLOCK_SIZE + slot % BLOCK_SIZE
            committed = inside & (t < seq_len)
            # Equation (17), as in the attention kernel.
            page = tl.load(page_table_ptr + request * stride_table + t // PAGE_SIZE, mask=committed, other=0)
            offset = t % PAGE_SIZE
            place = (start.to(tl.int64) * BLOCK_SIZE + slot) * COPIES + work % COPIES
            k_slot = k_base + place_of(page, offset, 0 * offset, stride_k_page, stride_k_token, K_CODEC)
            k_there = (dim_k < K_STORED)[None, :]
            k = tl.load(k_slot[:, None] + dim_k[None, :], mask=committed[:, None] & k_there, other=0)
            k_place = k_scratch_ptr + place[:, None] * K_STORED + dim_k[None, :]
            tl.store(k_place, k, mask=inside[:, None] & k_there)
            v_slot = v_base + place_of(page, offset, 0 * offset, stride_v_page, stride_v_token, V_CODEC)
            v_there = (dim_v < V_STORED)[None, :]
            v = tl.load(v_slot[:, None] + dim_v[None, :], mask=committed[:, None] & v_there, other=0)
            v_place = v_scratch_ptr + place[:, None] * V_STORED + dim_v[None, :]
            tl.store(v_place, v, mask=inside[:, None] & v_there)
