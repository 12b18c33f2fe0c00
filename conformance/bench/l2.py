"""What the L2 delivers: a kernel that reads the same few MiB again and again, past the L1."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of 4 bytes that a program reads at a time
SOURCE_BYTES, TINY_SOURCE_BYTES = 16 << 20, 64 << 10  # well within the L2, beyond all L1 of a processor
PROGRAMS, TINY_PROGRAMS = 8, 1  # a processor
ROUNDS, TINY_ROUNDS = 128, 5


@triton.jit
def read_kernel(source_ptr, sums_ptr, num_blocks, rounds, BLOCK: tl.constexpr):
    """Each program reads `rounds` blocks of the source, one stride of all programs apart, and stores their sum."""
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for turn in range(rounds):
        block = (program + turn * tl.num_programs(0)) % num_blocks
        total += tl.load(source_ptr + block * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(sums_ptr + program, tl.sum(total, 0))


def reading(device: str) -> tuple[Callable[[], Tensor], int]:
    """A call that reads, its sums [programs], and the bytes that it reads. Elements are the number of their block."""
    on_gpu = device.startswith("cuda")
    size, per_processor, rounds = (
        (SOURCE_BYTES, PROGRAMS, ROUNDS) if on_gpu else (TINY_SOURCE_BYTES, TINY_PROGRAMS, TINY_ROUNDS)
    )
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 3
    num_blocks, programs = size // 4 // BLOCK, processors * per_processor
    source = torch.arange(num_blocks, dtype=torch.int32, device=device).repeat_interleave(BLOCK)
    sums = torch.zeros(programs, dtype=torch.int32, device=device)

    def read() -> Tensor:
        read_kernel[(programs,)](source, sums, num_blocks, rounds, BLOCK=BLOCK)
        return sums

    return read, programs * rounds * BLOCK * 4


def can_read(device: str) -> bool:
    """Whether the kernel runs: on a GPU, or in Triton's interpreter."""
    return device.startswith("cuda") or os.environ.get("TRITON_INTERPRET") == "1"
