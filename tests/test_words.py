"""Codes that are read two at a time: which are, and that the text for the processor makes of every word what torch
reads there.
"""

from __future__ import annotations

import numpy as np
import ptx
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sacts.conformance.build import build
from sacts.kernels_under_test.paged.codecs import both, unit, unpacking
from sacts.kernels_under_test.paged.words import as_read, words
from sacts.matrices.cell import parse
from sacts.reference.spec import Codec, CodecFormat, DType, ScaleGranularity

INT8 = Codec(CodecFormat.INT8, ScaleGranularity.PAGE)
CACHE = torch.zeros(3, 16, 2, 64, dtype=torch.int8)
STORED = {
    CodecFormat.INT8: torch.int8,
    CodecFormat.FP8_E4M3FN: torch.float8_e4m3fn,
    CodecFormat.FP8_E5M2: torch.float8_e5m2,
}
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", STORED)
def test_every_word_holds_what_torch_reads_the_low_byte_first(form: CodecFormat, dtype: torch.dtype) -> None:
    first = np.arange(1 << 16, dtype=np.uint32)
    second = first * np.uint32(40503) % np.uint32(1 << 16)  # odd: each word once
    outputs = ptx.run(unpacking(form.value, DTYPES[dtype]), 2, first | second << np.uint32(16))
    for low_byte, output in enumerate(outputs):
        for word, half in zip((first, second), ptx.halves(output), strict=True):
            codes = torch.from_numpy((word >> np.uint32(8 * low_byte)).astype(np.uint8)).view(STORED[form])
            right = codes.float()
            seen = ptx.as_numbers(half, dtype) * unit(form.value, DTYPES[dtype], 2)
            np.testing.assert_array_equal(seen.numpy(), right.numpy())
            number = ~right.isnan()
            assert torch.equal(seen[number].signbit(), right[number].signbit())


@triton.jit
def unpack_kernel(word_ptr, low_ptr, high_ptr, CODEC: tl.constexpr, DTYPE: tl.constexpr):
    """As the attention kernel unpacks words."""
    at = tl.arange(0, 256)
    low, high = both(tl.load(word_ptr + at), CODEC, DTYPE, False)
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)


@pytest.mark.parametrize(("dtype", "pointer"), [(tl.float16, "*fp16"), (tl.bfloat16, "*bf16")], ids=str)
@pytest.mark.parametrize("form", STORED)
def test_the_text_compiles_for_the_processor(form: CodecFormat, dtype: tl.dtype, pointer: str) -> None:
    signature = {
        "word_ptr": "*i16",
        "low_ptr": pointer,
        "high_ptr": pointer,
        "CODEC": "constexpr",
        "DTYPE": "constexpr",
    }
    source = ASTSource(fn=unpack_kernel, signature=signature, constexprs={"CODEC": form.value, "DTYPE": dtype})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert made.asm["cubin"]
    assert made.asm["ptx"].count("f16x2") >= 2


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize(
    "stored",
    [CACHE, CACHE[:, :, 1:], CACHE[..., 2:], CACHE.transpose(1, 2), CACHE.view(torch.float8_e5m2), CACHE[0, :, 0]],
)
def test_neighbouring_codes_are_read_as_words(stored: torch.Tensor, dtype: DType) -> None:
    codec = Codec(CodecFormat.FP8_E5M2) if stored.dtype is torch.float8_e5m2 else INT8
    read = words(stored, codec, dtype)
    assert read.dtype is torch.int16
    assert read.data_ptr() == stored.data_ptr()
    assert read.shape == (*stored.shape[:-1], stored.shape[-1] // 2)
    assert read.stride() == (*(n // 2 for n in stored.stride()[:-1]), 1)


ODD = torch.zeros(3 * 16 * 2 * 65 + 1, dtype=torch.int8)


@pytest.mark.parametrize(
    ("stored", "codec", "dtype"),
    [
        (CACHE, INT8, DType.FP32),
        (CACHE, Codec(CodecFormat.INT8, ScaleGranularity.PAGE_CHANNEL), DType.BF16),
        (CACHE, Codec(CodecFormat.INT8, ScaleGranularity.CHANNEL), DType.FP16),
        (CACHE.view(torch.uint8), Codec(CodecFormat.INT4), DType.BF16),
        (CACHE.view(torch.float8_e4m3fnuz), Codec(CodecFormat.FP8_E4M3FNUZ), DType.BF16),
        (CACHE[..., 1:], INT8, DType.BF16),
        (CACHE[..., ::2], INT8, DType.BF16),
        (CACHE[..., :16], INT8, DType.BF16),
        (ODD[1 : 1 + CACHE.numel()].view(CACHE.shape), INT8, DType.BF16),
        (ODD[:-1].view(3, 16, 2, 65)[..., :64], INT8, DType.BF16),
    ],
    ids=["fp32", "page_channel", "channel", "int4", "fnuz", "63", "apart", "16", "odd address", "odd strides"],
)
def test_other_codes_are_read_one_at_a_time(stored: torch.Tensor, codec: Codec, dtype: DType) -> None:
    read = words(stored, codec, dtype)
    assert read.dtype in (torch.int8, torch.uint8)
    assert (read.data_ptr(), read.stride(), read.shape) == (stored.data_ptr(), stored.stride(), stored.shape)


def test_rope_pairs_the_channels_of_k_in_its_own_way() -> None:
    spec = build(parse("decode/bf16/kv:60/pos:rope/kcodec:int8/vcodec:int8")).spec
    assert [x.dtype for x in as_read(spec, CACHE, CACHE)] == [torch.int8, torch.int16]


def test_what_has_no_codes_is_read_as_it_is() -> None:
    stored = CACHE.view(torch.bfloat16)
    assert words(stored, None, DType.BF16) is stored
