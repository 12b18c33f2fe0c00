"""What is looked up: tasks, where slots lie (entries of a list, logical positions, pages), which channels there are.

Positions and slots are not negative: divided without a sign they take fewer instructions.
"""

import triton
import triton.language as tl


@triton.jit
def entry_at(entries_ptr, slot, last, BLOCK_SIZE: tl.constexpr):
    """The entry of the list at entries_ptr that a slot belongs to."""
    return tl.load(entries_ptr + (slot.to(tl.uint32) // BLOCK_SIZE).to(tl.int32), mask=slot < last, other=0)


@triton.jit
def token_and_page(entry, slot, last, table_ptr, seq_len, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The logical position of a slot, T where the list has ended; and its page, equation (17): table_n(t // P)."""
    t = entry * BLOCK_SIZE + (slot.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
    t = tl.where(slot < last, t, seq_len)
    return t, tl.load(table_ptr + (t.to(tl.uint32) // PAGE_SIZE).to(tl.int32), mask=t < seq_len, other=0)


@triton.jit
def channels_of(rows, dim, CHANNELS: tl.constexpr):
    """Which of the channels dim [padded] of rows [n], a mask, are there: [n, padded], or [n, 1] where all are."""
    mask = rows[:, None]
    if dim.shape[0] != CHANNELS:
        mask = mask & (dim < CHANNELS)[None, :]
    return mask


@triton.jit
def task_at(tasks_ptr):
    """The task at a row of the table, column by column: tasks.Columns."""
    return (
        tl.load(tasks_ptr),
        tl.load(tasks_ptr + 1),
        tl.load(tasks_ptr + 2),
        tl.load(tasks_ptr + 3),
        tl.load(tasks_ptr + 4),
        tl.load(tasks_ptr + 5),
        tl.load(tasks_ptr + 6),
        tl.load(tasks_ptr + 7),
    )


@triton.jit
def description(
    base_ptr,
    table_ptr,
    tokens,
    stride_page,
    stride_token,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one head of K or V at base_ptr, on the first page of the table: `tokens`, of which tiles [SLOTS, BLOCK] are
    copied. What lies behind them or behind the head comes as 0, whatever is there. At least one is described: `row_of`.
    """
    first = base_ptr + tl.load(table_ptr, mask=tokens > 0, other=0).to(tl.int64) * stride_page
    return tl.make_tensor_descriptor(first, [tl.maximum(tokens, 1), HEAD_DIM], [stride_token, 1], [SLOTS, BLOCK])


@triton.jit
def row_of(t, tokens):
    """Where the tile from token t on begins in a description of so many tokens: where there are none, behind the one
    that is described.
    """
    return t + (tokens < 1).to(tl.int32)
