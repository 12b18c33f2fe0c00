"""K and V as they are stored: codes become values once, in the tile, FP32 or in words of two those of the product's
dtype. Integer arithmetic does it that interpreter and compiler do alike (the interpreter decodes an fp8 NaN as 480),
but for what the processor decodes itself.
"""

import triton
import triton.language as tl


@triton.jit
def place_of(page, offset, within, stride_page, stride_token, CODEC: tl.constexpr):
    """Where slots `within` of an offset of a page lie, in elements from the start of their head: 64 bits from the page
    id on. Two tokens share a row where int4 is packed along tokens; offset is even where within is not 0.
    """
    in_row: tl.constexpr = 2 if (CODEC == "int4_token" or CODEC == "int4_token_high") else 1
    place = page.to(tl.int64) * stride_page + (offset // in_row).to(tl.int64) * stride_token
    return place + (within // in_row).to(tl.int64) * stride_token


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


@triton.constexpr_function
def unit(codec, dtype, wide):
    """What the numbers of `both` are to be multiplied by for the codes, where a column is `wide` 2, else 1."""
    return 64.0 if wide == 2 and codec == "int8" and dtype == tl.bfloat16 else 1.0


@triton.constexpr_function
def unpacking(codec, dtype):
    """PTX that makes of two words two numbers of their low and two of their high bytes: what the compiler does byte by
    byte. e4m3 and e5m2 are decoded to FP16 by the processor. int8 in FP16: 1152 and the code, less 1152. BF16 has too
    few bits for that: 128 and the code are there the bits of so many of the smallest number, 2^-133, which times 2^127,
    less 2, are the code by its `unit`.
    """
    if codec == "int8" and dtype == tl.float16:
        return """{
            .reg .b32 x, y, high, less;
            mov.b32 less, 0xE480E480;
            shr.u32 high, $2, 8;
            lop3.b32 x, $2, 0x00FF00FF, 0x64806480, 0x6A;
            lop3.b32 y, high, 0x00FF00FF, 0x64806480, 0x6A;
            add.rn.f16x2 $0, x, less;
            add.rn.f16x2 $1, y, less;
        }"""
    if codec == "int8":
        return """{
            .reg .b32 x, y, high, grow, less;
            mov.b32 grow, 0x7F007F00;
            mov.b32 less, 0xC000C000;
            shr.u32 high, $2, 8;
            lop3.b32 x, $2, 0x00FF00FF, 0x00800080, 0x6A;
            lop3.b32 y, high, 0x00FF00FF, 0x00800080, 0x6A;
            fma.rn.bf16x2 $0, x, grow, less;
            fma.rn.bf16x2 $1, y, grow, less;
        }"""
    pairs = """
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632;"""
    if dtype == tl.bfloat16:
        pairs = """
            .reg .b16 xl, xh, yl, yh; .reg .f32 a, b, c, d;
            mov.b32 {xl, xh}, x;
            mov.b32 {yl, yh}, y;
            cvt.f32.f16 a, xl;
            cvt.f32.f16 b, xh;
            cvt.f32.f16 c, yl;
            cvt.f32.f16 d, yh;
            cvt.rn.bf16x2.f32 $0, c, a;
            cvt.rn.bf16x2.f32 $1, d, b;"""
    decode = """{
            .reg .b16 u, v; .reg .b32 x, y;
            mov.b32 {u, v}, $2;
            cvt.rn.f16x2.FORMx2 x, u;
            cvt.rn.f16x2.FORMx2 y, v;PAIRS
        }"""
    return decode.replace("FORM", "e5m2" if codec == "fp8_e5m2" else "e4m3").replace("PAIRS", pairs)


@triton.jit
def both(word, CODEC: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Values of the two codes in each 16-bit word by their `unit`, the low byte first: in DTYPE, BF16 or FP16, which
    hold them exactly; under UPCAST in FP32.
    """
    if UPCAST:
        low = decoded((word & 0xFF).to(tl.uint8), 0, 0, CODEC, UPCAST) / unit(CODEC, DTYPE, 2)
        high = decoded(((word >> 8) & 0xFF).to(tl.uint8), 0, 0, CODEC, UPCAST) / unit(CODEC, DTYPE, 2)
    elif tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            unpacking(CODEC, DTYPE), "=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low, high = tl.inline_asm_elementwise(
            unpacking(CODEC, DTYPE), "=r,=r,r", [word], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def held(x):
    """x [slots, d] itself, which stays as the threads have loaded it up to here: decoded there 16 bytes at a time, and
    handed to the product as a tile that never had codes. The compiler looks for these behind most operations, but not
    behind a reduction; this is one of single elements, and costs nothing.
    """
    return tl.reduce(tl.reshape(x, [x.shape[0], x.shape[1], 1]), 2, either)


@triton.jit
def either(x, y):
    """Of a reduction that never combines."""
    return x


@triton.jit
def load_tile(
    base_ptr,
    place,
    column,
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
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """K or V of the slots at a place [slots] from base_ptr: as stored without a codec, else (code - zero) * scale in
    FP32, or where LATE the codes by their `unit`; and the scales [slots] that products of the codes then get, else 1.
    CHANNELS: scales change along the channels; strides are 0 along what shares one. What is not valid [slots], and what
    the mask [slots, d or 1] leaves out, is 0, whatever lies there and in its scale.

    A column [d] is a channel, or where base_ptr points to 16-bit words of codes two neighbours. Their values are two
    tiles (else the second is the first), in DTYPE or FP32: words reach the layout of the product as any numbers of 16
    bits do, and are decoded there; bytes have to be decoded before, and go twice the way.

    DESCRIBED: base_ptr is a description, and place a row of it.
    """
    scale = 1.0
    if DESCRIBED:
        value = base_ptr.load([place, 0])
        second = value
    elif CODEC == "none":
        value = tl.load(base_ptr + place[:, None] + column[None, :], mask=mask, other=0.0)
        second = value
    else:
        WORDS: tl.constexpr = base_ptr.dtype.element_ty == tl.int16
        UNIT: tl.constexpr = unit(CODEC, DTYPE, 2 if WORDS else 1)
        tl.static_assert(not (WORDS and CHANNELS), "words have one scale")
        per_byte: tl.constexpr = 2 if (CODEC == "int4" or CODEC == "int4_high") else 1
        code = tl.load(base_ptr + place[:, None] + (column // per_byte)[None, :], mask=mask, other=0)
        if WORDS:
            value, second = both(code, CODEC, DTYPE, UPCAST)
        else:
            value = decoded(code, column, offset, CODEC, UPCAST)
        scale_at = page.to(tl.int64) * stride_page + offset * stride_token + head * stride_head
        if LATE:
            scale = tl.load(scales_ptr + scale_at, mask=valid, other=0.0)
        else:
            value = scaled(value, column, valid, mask, scales_ptr, zeros_ptr, scale_at, stride_dim, UNIT, CHANNELS)
        if not WORDS:
            second = value
        elif not LATE:
            second = scaled(second, column, valid, mask, scales_ptr, zeros_ptr, scale_at, stride_dim, UNIT, CHANNELS)
    return value, second, scale


@triton.jit
def scaled(code, dim, valid, mask, scales_ptr, zeros_ptr, scale_at, stride_dim, UNIT, CHANNELS: tl.constexpr):
    """(code - zero) * scale in FP32: codes by UNIT [slots, d] of channels dim, scales and zero points at scale_at."""
    value = code.to(tl.float32) * UNIT
    scale_at = scale_at[:, None]
    there = valid[:, None]
    if CHANNELS:
        scale_at = scale_at + (dim * stride_dim)[None, :]
        there = mask
    if zeros_ptr is not None:
        value = value - tl.load(zeros_ptr + scale_at, mask=there, other=0.0)
    return value * tl.load(scales_ptr + scale_at, mask=there, other=0.0)
