"""What the helpers of the kernels yield in Triton's interpreter, as arrays in an .npz: run by test_kernels.py in a
process of its own, because TRITON_INTERPRET binds when a kernel is decorated.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton
import triton.language as tl

from sacts.kernels_under_test.paged.codecs import decoded
from sacts.kernels_under_test.paged.terms import epilogue, keeps

SEED, THRESHOLD, UIDS = 0xFEDCBA9876543210, 1 << 30, (7, 2**32 - 1)
KEYS, QUERY, HEADS = 64, -3, 16  # a query that stands before its request's first key
STEP, LARGEST = 0.0625, 127.0
CODES = {
    "int8": torch.int8,
    **dict.fromkeys(("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "int4", "int4_high"), torch.uint8),
    **dict.fromkeys(("int4_token", "int4_token_high"), torch.uint8),
}
EPILOGUES = ("fp16", "bf16", "relu", "sigmoid", "silu", "tanh", "low_bit", "gate")


@triton.jit
def decode_all(code_ptr, value_ptr, CODEC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 256 codes as 256 channels of two tokens, [2, 256]; of int4 along dim [2, 512], both nibbles of each byte."""
    per_byte: tl.constexpr = 2 if (CODEC == "int4" or CODEC == "int4_high") else 1
    dim = tl.arange(0, 256 * per_byte)
    offset = tl.arange(0, 2)
    code = tl.load(code_ptr + 0 * offset[:, None] + (dim // per_byte)[None, :])
    tl.store(value_ptr + offset[:, None] * 256 * per_byte + dim[None, :], decoded(code, dim, offset, CODEC, True))


@triton.jit
def apply(x_ptr, y_ptr, KIND: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, epilogue(x, x_ptr, at, at < N, 0.0625, 127.0, KIND))


@triton.jit
def draw(dropout_ptr, kept_ptr, request, query):  # type: ignore[no-untyped-def]
    key, head = tl.arange(0, 64), tl.arange(0, 16)
    kept = keeps(dropout_ptr, request, key, query + 0 * head, head)
    tl.store(kept_ptr + head[:, None] * 64 + key[None, :], kept.to(tl.int32))


def inputs() -> torch.Tensor:
    """Numbers of all sizes, ties of both casts and of low_bit, and what is no number."""
    sizes = torch.logspace(-30, 4, 1000, base=2.0)
    ties = (torch.arange(-400, 400) + 0.5) * STEP
    halves = 1.0 + torch.arange(400) * 2.0**-9
    x = torch.cat((sizes, -sizes, ties, halves, torch.tensor([0.0, torch.nan, 3e38, -3e38, 80.0, -80.0])))
    return torch.nn.functional.pad(x, (0, 4096 - len(x)))


def main(path: str) -> None:
    made: dict[str, torch.Tensor] = {"x": inputs()}
    for codec, dtype in CODES.items():
        value = torch.zeros(2, 512 if codec in ("int4", "int4_high") else 256)
        decode_all[(1,)](torch.arange(256, dtype=torch.uint8).view(dtype), value, codec)
        made[codec] = value
    for kind in EPILOGUES:
        made[kind] = torch.zeros(4096)
        apply[(1,)](made["x"], made[kind], kind, 4096)
    words = torch.tensor([SEED - (1 << 64), THRESHOLD, *UIDS])
    for request in range(len(UIDS)):
        kept = torch.zeros(HEADS, KEYS, dtype=torch.int32)
        draw[(1,)](words, kept, request, QUERY)
        made[f"kept{request}"] = kept
    np.savez(path, **{name: each.numpy() for name, each in made.items()})


if __name__ == "__main__":
    main(sys.argv[1])
