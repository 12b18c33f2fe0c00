"""What the kernels do for the terms of a row beyond the plain one. Logits and maxima are in units of log2."""

import triton
import triton.language as tl


@triton.jit
def turned(first, second, turn, pair, num_pairs):
    """RoPE in FP32: the first and the second channels of pairs [n, pairs], turned by their table at the pointers turn
    [n or 1, pairs], num_pairs cosines and as many sines; pairs beyond these stay.
    """
    turns = (pair < num_pairs)[None, :]
    cosine = tl.load(turn, mask=turns, other=1.0)
    sine = tl.load(turn + num_pairs, mask=turns, other=0.0)
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    return first * cosine - second * sine, first * sine + second * cosine


@triton.jit
def tanh(x):
    """tanh of FP32 values, within 2^-20 of the value: a series where 1 - e^(-2|x|) would cancel."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # -2 log2(e)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (
        1.0 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.0539682540 + s * (0.0218694885 - s * 0.00886324))))
    )
    return tl.where(s < 0.16, near, tl.where(x < 0.0, -far, far))


@triton.jit
def position_bias(distance, qo_head, mask, slopes_ptr, bucket_bias_ptr, bucket_reach):
    """What ALiBi and relative buckets add to the logits [heads, slots] of query heads under the mask, by the distance
    of a key behind its query; one of the pointers may be None.
    """
    bias = tl.zeros(distance.shape, tl.float32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + qo_head, mask=mask, other=0.0)
        bias -= slope[:, None] * tl.abs(distance).to(tl.float32)
    if bucket_bias_ptr is not None:
        column = tl.minimum(tl.maximum(distance, -bucket_reach), bucket_reach) + bucket_reach
        place = bucket_bias_ptr + qo_head[:, None] * (2 * bucket_reach + 1) + column
        bias += tl.load(place, mask=mask[:, None], other=0.0)
    return bias


@triton.jit
def keeps(dropout_ptr, request, key, query, qo_head):
    """Which edges dropout keeps: [heads, slots]; key [slots] position or ordinal, query and qo_head [heads]. One draw
    of Philox4x32-10 an edge: key (seed low, seed high), counter (key, query, query head, uid).
    `dropout_ptr`: seed, threshold floor(p 2^32), then the uid of each request, int64.
    """
    seed = tl.load(dropout_ptr)
    threshold = tl.load(dropout_ptr + 1)
    uid = tl.load(dropout_ptr + 2 + request).to(tl.int32)
    key_word = key[None, :] + 0 * qo_head[:, None]
    head_word = qo_head[:, None] + 0 * key_word
    x0, _, _, _ = tl.philox(seed, key_word, query[:, None] + 0 * key_word, head_word, uid + 0 * key_word)
    return x0.to(tl.int64) >= threshold


@triton.jit
def with_sink(m, l, o, sink):
    """The learned logit joins the merged state (m, l [rows], o [rows, d]) once: one more weight, without a value."""
    m_new = tl.maximum(m, sink)
    rescale = tl.exp2(m - m_new)
    return m_new, l * rescale + tl.exp2(sink - m_new), o * rescale[:, None]


@triton.jit
def epilogue(x, gate_ptr, place, mask, step, largest, KIND: tl.constexpr):
    """What is done to the merged output x in FP32; NaN stays NaN. `gate_ptr`: laid out as out, where x stands at
    `place` under the mask; `step`, `largest`: of low_bit.
    """
    if KIND == "gate":
        y = x * tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "fp16":
        y = x.to(tl.float16).to(tl.float32)
    elif KIND == "bf16":  # by bits: the interpreter's own cast truncates
        bits = x.to(tl.int32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        y = tl.where(x == x, (even & -65536).to(tl.float32, bitcast=True), x)
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif KIND == "sigmoid":
        y = 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))
    elif KIND == "silu":
        y = x / (1.0 + tl.exp2(x * -1.4426950408889634))
    elif KIND == "tanh":
        y = tanh(x)
    else:
        tl.static_assert(KIND == "low_bit", "unknown epilogue")
        code = tl.div_rn(x, step)
        code = tl.where(code > largest, largest, tl.where(code < -largest, -largest, code))
        y = ((code + 12582912.0) - 12582912.0) * step  # 1.5 * 2^23: what is added rounds to even integers
    return y
