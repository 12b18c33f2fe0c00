"""Where slots lie: entries of a list, logical positions, pages."""

import triton
import triton.language as tl


@triton.jit
def entry_at(entries_ptr, slot, last, BLOCK_SIZE: tl.constexpr):
    """The entry of the list at entries_ptr that a slot belongs to."""
    return tl.load(entries_ptr + quotient(slot, BLOCK_SIZE), mask=slot < last, other=0)


@triton.jit
def token_and_page(entry, slot, last, table_ptr, seq_len, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The logical position of a slot, T where the list has ended; and its page, equation (17): table_n(t // P)."""
    t = tl.where(slot < last, entry * BLOCK_SIZE + remainder(slot, BLOCK_SIZE), seq_len)
    return t, tl.load(table_ptr + quotient(t, PAGE_SIZE), mask=t < seq_len, other=0)


@triton.jit
def quotient(n, divisor: tl.constexpr):
    """n // divisor of int32 that are not negative, which takes fewer instructions where the compiler knows it."""
    return (n.to(tl.uint32) // divisor).to(tl.int32)


@triton.jit
def remainder(n, divisor: tl.constexpr):
    """n % divisor of int32 that are not negative."""
    return (n.to(tl.uint32) % divisor).to(tl.int32)
