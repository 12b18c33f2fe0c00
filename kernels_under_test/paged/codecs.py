"""K and V as they are stored: codes become FP32 values once, in the tile, by integer arithmetic that interpreter and
compiler do alike (the interpreter decodes an fp8 NaN as 480), but for what the processor decodes itself.
"""

import triton
import triton.language as tl


@triton.jit
def row_of(offset, CODEC: tl.constexpr):
    """The row of a page that holds the token at offset: two share one where int4 is packed along tokens."""
    if CODEC == "int4_token" or CODEC == "int4_token_high":
        offset = offset // 2
    return offset


@triton.jit
def place_of(page, offset, within, stride_page, stride_token, CODEC: tl.constexpr):
    """Where slots `within` of an offset of a page lie, in elements from the start of their head: 64 bits from the page
    id on. Where two tokens share a row and within is not 0, offset is even.
    """
    place = page.to(tl.int64) * stride_page + row_of(offset, CODEC).to(tl.int64) * stride_token
    return place + row_of(within, CODEC).to(tl.int64) * stride_token


@triton.jit
def decoded(code, dim, offset, CODEC: tl.constexpr, UPCAST: tl.constexpr):
    """Values of codes [slots, d] of the channels dim [d] of tokens at offset [slots] of their pages: int8, or the bits
    of fp8 and of two int4 as uint8. int4: the two are neighbours along dim, or along tokens; the first of them is the
    low nibble, or the high one. What the compiler decodes at full speed is left to it.
    """
    if CODEC == "int8":  # as the low byte of 2^23 + 128 + code: a conversion runs at a fraction of the rate
        biased = code.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080
        value = biased.to(tl.float32, bitcast=True) - 8388736.0
    elif CODEC == "fp8_e4m3fn" and not UPCAST:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif CODEC == "int4" or CODEC == "int4_high":
        second = (dim % 2)[None, :]
        if CODEC == "int4_high":
            second = 1 - second
        value = signed_nibble(code, second)
    elif CODEC == "int4_token" or CODEC == "int4_token_high":
        second = (offset % 2).to(tl.int32)[:, None]
        if CODEC == "int4_token_high":
            second = 1 - second
        value = signed_nibble(code, second)
    elif CODEC == "fp8_e5m2":  # the upper byte of an FP16 number
        value = (code.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif CODEC == "fp8_e4m3fnuz":  # as below, with another exponent bias and one NaN, where -0 would be
        bits = code.to(tl.int32)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 128.0
        value = tl.where(bits == 0x80, float("nan"), value)
    else:
        tl.static_assert(CODEC == "fp8_e4m3fn", "unknown codec")
        bits = code.to(tl.int32)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # FP16 with the same exponent field: 2^8 too small
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def signed_nibble(code, second):
    """Of each byte the low nibble, or where second is 1 the high one, as a number from -8 to 7."""
    nibble = (code.to(tl.int32) >> (second * 4)) & 15
    return ((nibble ^ 8) - 8).to(tl.float32)


@triton.jit
def scale_of(scales_ptr, page, offset, head, stride_page, stride_token, stride_head, mask):
    """Scales of slots by page and offset, [slots], 0 where the mask hides them; strides are 0 along what shares one."""
    place = page.to(tl.int64) * stride_page + offset * stride_token + head * stride_head
    return tl.load(scales_ptr + place, mask=mask, other=0.0)


@triton.jit
def held(x):
    """x [slots, d] itself, which stays as the threads have loaded it up to here: decoded there 16 bytes at a time, not
    byte by byte where the product wants them. For at least 32 slots: the compiler gives each thread twice as many of an
    operand that was joined, and of 16 it makes a wrong one.
    """
    first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return tl.reshape(tl.join(first, second), [x.shape[0], x.shape[1]])


@triton.jit
def load_tile(
    base_ptr,
    place,
    dim,
    valid,
    mask,
    scales_ptr,
    zeros_ptr,
    page,
    offset,
    head,
    stride_page,
    stride_token,
    stride_head,
    stride_dim,
    CODEC: tl.constexpr,
    CHANNELS: tl.constexpr,
    LATE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """K or V of the slots at a place [slots] from base_ptr, channels dim [d], from codes: (code - zero) * scale in
    FP32, or where LATE the code, whose products are scaled. CHANNELS: scales change along dim. What is not valid
    [slots], and what the mask [slots, d or 1] leaves out, is 0, whatever lies there and in its scale.
    """
    per_byte: tl.constexpr = 2 if (CODEC == "int4" or CODEC == "int4_high") else 1
    code = tl.load(base_ptr + place[:, None] + (dim // per_byte)[None, :], mask=mask, other=0)
    value = decoded(code, dim, offset, CODEC, UPCAST)
    if not LATE:
        scale_at = (page.to(tl.int64) * stride_page + offset * stride_token + head * stride_head)[:, None]
        there = valid[:, None]
        if CHANNELS:
            scale_at = scale_at + (dim * stride_dim)[None, :]
            there = mask
        if zeros_ptr is not None:
            value = value - tl.load(zeros_ptr + scale_at, mask=there, other=0.0)
        value = value * tl.load(scales_ptr + scale_at, mask=there, other=0.0)
    return value
