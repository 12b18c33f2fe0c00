"""Caches as the attention kernel reads them: values as they are, codes as their bits, or two neighbours as one word."""

from __future__ import annotations

import torch
from torch import Tensor

from sacts.reference.spec import AttentionSpec, Codec, DType

from .limits import by_channel

PACKED = ("int8", "fp8_e4m3fn", "fp8_e5m2")  # formats of which two codes are decoded at once
LEAST_WORDS = 16  # channels, of which half are too few for a product
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def packed(codec: Codec | None, dtype: DType) -> bool:
    """Whether two neighbours may be read as one word of 16 bits: codes of 8 bits with one scale, for products of 16."""
    return codec is not None and codec.format in PACKED and not by_channel(codec) and dtype is not DType.FP32


def bits(cache: Tensor) -> Tensor:
    """A cache; of fp8 its bits, which the kernel decodes itself."""
    return cache.view(torch.uint8) if cache.dtype in FP8 else cache


def as_read(spec: AttentionSpec, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V, caches or scratch, as the attention kernel reads them: codes as `bits`, or two neighbours as one word.
    RoPE pairs channels in its own way.
    """
    return bits(k) if spec.rope else words(k, spec.k_codec, spec.dtype), words(v, spec.v_codec, spec.dtype)


def words(stored: Tensor, codec: Codec | None, dtype: DType) -> Tensor:
    """Codes as 16-bit words of two channels where they are `packed` and lie so that it is possible; else their bits."""
    stored = bits(stored)
    if not packed(codec, dtype) or not decodes(stored.device):
        return stored
    *outer, innermost = stored.stride()
    channels = stored.shape[-1]
    even = all(n % 2 == 0 for n in (*outer, channels, stored.data_ptr()))
    return stored.view(torch.int16) if even and innermost == 1 and channels > LEAST_WORDS else stored


def decodes(device: torch.device) -> bool:
    """Whether the processor has the instructions of `codecs.unpacking`; the interpreter needs none."""
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
