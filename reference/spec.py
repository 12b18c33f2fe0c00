"""The types of a problem: what a backend must not change (`AttentionSpec`) and what it may ignore (`Hints`).

In one module, however long, because adapters and the matrix may import this one alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class DType(StrEnum):
    """Element type of q, K, V and out."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class CandidateKind(StrEnum):
    """What a candidate list means: see `candidates.validate`."""

    SET = "set"
    SEQUENCE = "sequence"
    MULTISET = "multiset"


class ListsPer(StrEnum):
    """What has a candidate list of its own at each query token. `KV_HEAD`: a KV head, whose query heads share the list;
    `QUERY_HEAD`: each query head. Where there are as many of one as of the other, both say the same.
    """

    KV_HEAD = "kv_head"
    QUERY_HEAD = "query_head"


class CausalRule(StrEnum):
    """Whether keys behind the query's logical position are hidden, and where query i of q_len sits: `BOTTOM_RIGHT`:
    at T - q_len + i; `TOP_LEFT`: at i; `ABSOLUTE`: at `AttentionSpec.query_positions`. `NONE` hides nothing; its
    queries sit where those of `BOTTOM_RIGHT` do, or at the query positions where a spec holds them.
    """

    NONE = "none"
    BOTTOM_RIGHT = "bottom_right"
    TOP_LEFT = "top_left"
    ABSOLUTE = "absolute"


class EmptyRowRule(StrEnum):
    """What a row without any edge yields. `ZERO`: out 0, lse -inf (or the sink logit); `FORCE_SELF`: it attends the
    query's own token; `FORCE_SINK_TOKEN`: it attends token 0; `FORBID`: the call is refused.
    """

    ZERO = "zero"
    FORCE_SELF = "force_self"
    FORCE_SINK_TOKEN = "force_sink_token"
    FORBID = "forbid"

    @property
    def forces(self) -> bool:
        """Whether an empty row gets an edge."""
        return self in (EmptyRowRule.FORCE_SELF, EmptyRowRule.FORCE_SINK_TOKEN)


class RopeLayout(StrEnum):
    """Which two channels of the first `rotary_dim` turn together: (2i, 2i + 1), or (i, i + rotary_dim / 2)."""

    INTERLEAVED = "interleaved"
    HALF_SPLIT = "half_split"


@dataclass(frozen=True)
class RoPE:
    """Rotary embedding inside the kernel; keys are stored unrotated.

    Pair i of the first `rotary_dim` channels of q and k turns by the angle position * base^(-2i / rotary_dim).
    """

    rotary_dim: int
    base: float = 10000.0
    layout: RopeLayout = RopeLayout.HALF_SPLIT

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rope.rotary_dim must be even and at least 2, got {self.rotary_dim}")
        if not (math.isfinite(self.base) and self.base >= 1):
            raise ValueError(f"rope.base must be finite and at least 1, got {self.base}")


@dataclass(frozen=True)
class RelativeBuckets:
    """A learned bias by distance pos_q - t: `first[b]` is the least distance in bucket b, and `bias[head][b]` is added.

    `first` starts at 0 and never falls (where equal, all but the last are empty). Keys behind the query (t > pos_q)
    count as distance 0 or, where `bidirectional`, use a second set of len(first) buckets, by t - pos_q.
    `scores.t5_buckets` gives `first` of T5.
    """

    first: tuple[int, ...]
    bias: tuple[tuple[float, ...], ...]
    bidirectional: bool = False

    def __post_init__(self) -> None:
        if not self.first or self.first[0] != 0 or list(self.first) != sorted(self.first):
            raise ValueError(f"buckets.first must start at 0 and never fall, got {self.first}")
        width = len(self.first) * (2 if self.bidirectional else 1)
        for head, values in enumerate(self.bias):
            if len(values) != width or not all(map(math.isfinite, values)):
                raise ValueError(f"buckets.bias[{head}] must hold {width} finite values, got {values}")


@dataclass(frozen=True)
class Dropout:
    """Dropout on the numerator: edge j is kept with factor 1 / (1 - p) where x0 >= floor(p * 2^32).

    x0: first word of Philox4x32-10 under the 64-bit `seed` (key: low word, high word). `request_uids[n]` identifies
    request n in the counter, so that it may move in the batch; empty: n itself.
    """

    p: float
    seed: int
    request_uids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"dropout.p must be in [0, 1), got {self.p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"dropout.seed must be an unsigned 64-bit integer, got {self.seed}")
        for request, uid in enumerate(self.request_uids):
            if not 0 <= uid < 2**32:
                raise ValueError(f"dropout.request_uids[{request}] must be an unsigned 32-bit integer, got {uid}")


class EpilogueKind(StrEnum):
    """What happens to the normalised, merged output: see `Epilogue`."""

    NONE = "none"
    CAST = "cast"
    GATE = "gate"
    NONLINEAR = "nonlinear"
    LOW_BIT = "low_bit"


class Nonlinearity(StrEnum):
    """The functions that an epilogue may apply."""

    RELU = "relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    SILU = "silu"


@dataclass(frozen=True)
class Epilogue:
    """What is done to out after the merge of all splits; lse is not touched.

    `CAST`: rounded to `dtype`. `GATE`: multiplied by the `gate` that `forward` is given. `NONLINEAR`: `function` of
    each element. `LOW_BIT`: written as a signed integer of `bits` bits, code = out / scale rounded to even and clipped
    to +-(2^(bits-1) - 1); the result is code * scale.
    """

    kind: EpilogueKind = EpilogueKind.NONE
    dtype: DType | None = None
    function: Nonlinearity | None = None
    bits: int = 0
    scale: float = 0.0

    def __post_init__(self) -> None:
        for kind, field, given in (
            (EpilogueKind.CAST, "dtype", self.dtype is not None),
            (EpilogueKind.NONLINEAR, "function", self.function is not None),
            (EpilogueKind.LOW_BIT, "bits", self.bits != 0),
            (EpilogueKind.LOW_BIT, "scale", self.scale != 0),
        ):
            if given is not (self.kind is kind):
                needed = "needs" if self.kind is kind else "has no use for"
                raise ValueError(f"epilogue {self.kind} {needed} {field}, got {getattr(self, field)}")
        if self.kind is EpilogueKind.LOW_BIT and not (2 <= self.bits <= 16 and 0 < self.scale < math.inf):
            raise ValueError(f"epilogue needs 2 to 16 bits and a positive scale, got {self.bits} and {self.scale}")


class CodecFormat(StrEnum):
    """How one element of a quantised K or V is stored; `formats.decode_table` holds the value of each code."""

    INT8 = "int8"
    INT4 = "int4"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"

    @property
    def integer(self) -> bool:
        """Whether codes are two's complement integers."""
        return self in (CodecFormat.INT8, CodecFormat.INT4)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self is CodecFormat.INT4 else 8


class ScaleGranularity(StrEnum):
    """What shares one scale (and zero point) of a quantised cache; a channel is one dim of one head."""

    TENSOR = "tensor"
    HEAD = "head"
    CHANNEL = "channel"
    PAGE = "page"
    PAGE_HEAD = "page_head"
    TOKEN_HEAD = "token_head"
    PAGE_CHANNEL = "page_channel"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a cache (page, token, head, dim) along which the scale changes; pages are physical."""
        return _SCALE_AXES[self]


_SCALE_AXES = {
    ScaleGranularity.TENSOR: (),
    ScaleGranularity.HEAD: ("head",),
    ScaleGranularity.CHANNEL: ("head", "dim"),
    ScaleGranularity.PAGE: ("page",),
    ScaleGranularity.PAGE_HEAD: ("page", "head"),
    ScaleGranularity.TOKEN_HEAD: ("page", "token", "head"),
    ScaleGranularity.PAGE_CHANNEL: ("page", "head", "dim"),
}


class OverflowRule(StrEnum):
    """What a value beyond the largest code becomes. `SATURATE`: the largest code of its sign; `NON_FINITE`: infinity,
    or NaN where the format has no infinity (fp8 only); `ERROR`: refused.
    """

    SATURATE = "saturate"
    NON_FINITE = "non_finite"
    ERROR = "error"


class NaNRule(StrEnum):
    """What NaN becomes. `KEEP`: NaN (fp8 only); `CODE`: `Codec.nan_code` (integers only); `ERROR`: refused."""

    KEEP = "keep"
    CODE = "code"
    ERROR = "error"


@dataclass(frozen=True)
class Codec:
    """How K or V is quantised: x = (value of the code - zero point) * scale, see `codecs`.

    `power_of_two`: scales are powers of two, else any FP32 values. `asymmetric`: integers with integer zero points;
    otherwise the zero points are 0. `narrow_range`: the least integer code (-128, -8) is never written.
    `nibble_axis`: the neighbours along it, "dim" or "token", share a byte of int4, the first in the low nibble where
    `low_nibble_first`. FP8_E4M3FNUZ is read, never written.
    """

    format: CodecFormat
    granularity: ScaleGranularity = ScaleGranularity.TENSOR
    power_of_two: bool = False
    asymmetric: bool = False
    narrow_range: bool = False
    overflow: OverflowRule = OverflowRule.SATURATE
    nan: NaNRule = NaNRule.ERROR
    nan_code: int = 0
    nibble_axis: str = "dim"
    low_nibble_first: bool = True

    def __post_init__(self) -> None:
        integer, packed = self.format.integer, self.format is CodecFormat.INT4
        for field, default, allowed in (
            ("asymmetric", False, integer),
            ("narrow_range", False, integer),
            ("nan_code", 0, self.nan is NaNRule.CODE),
            ("nibble_axis", "dim", packed),
            ("low_nibble_first", True, packed),
        ):
            if getattr(self, field) != default and not allowed:
                raise ValueError(f"codec {self.format} has no use for {field}, got {getattr(self, field)!r}")
        if self.overflow is OverflowRule.NON_FINITE and integer:
            raise ValueError(f"codec {self.format} has no infinity and no NaN for overflow rule {self.overflow}")
        if self.nan is (NaNRule.KEEP if integer else NaNRule.CODE):
            raise ValueError(f"codec {self.format} cannot follow NaN rule {self.nan}")
        if self.nibble_axis not in ("dim", "token"):
            raise ValueError(f"codec nibble_axis must be 'dim' or 'token', got {self.nibble_axis!r}")
        if self.nan is NaNRule.CODE and not self.code_range[0] <= self.nan_code <= self.code_range[1]:
            raise ValueError(f"codec nan_code must be in {self.code_range}, got {self.nan_code}")

    @property
    def code_range(self) -> tuple[int, int]:
        """The least and the largest integer code that is written. Raises ValueError for fp8."""
        if not self.format.integer:
            raise ValueError(f"codec {self.format} has no integer codes")
        half = 1 << (self.format.bits - 1)
        return int(self.narrow_range) - half, half - 1


class Row(NamedTuple):
    """The identity of a candidate row; it never changes, however tasks are sorted. `qo_head`: of a row that serves one
    query head, None where it serves those of a KV head.
    """

    request: int
    query: int
    kv_head: int
    qo_head: int | None = None

    def __str__(self) -> str:
        head = f"KV head {self.kv_head}" if self.qo_head is None else f"query head {self.qo_head}"
        return f"row (request {self.request}, query {self.query}, {head})"


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about a paged sparse-attention call that a backend must not change.

    Shapes that follow from it: q [num_tokens, num_qo_heads, head_dim_qk], out [num_tokens, num_qo_heads,
    head_dim_vo], lse [num_tokens, num_qo_heads]. A candidate row is one (token, KV head), or one (token, query head)
    where `lists` says so; its index is token * list_heads + head.

    `seq_lens[n]` is T, the committed KV length of request n in tokens; `qo_lens[n]` its number of queries.
    `block_size` is the number of tokens that one candidate entry names (1: token selection). `window_left` removes
    keys with t < position - window_left (so window_left + 1 keys remain under a causal rule); -1 means no window.

    Terms of the logit, in order (`scores`): sm_scale * q.k with `rope`, `logits_soft_cap` c (0: none), bias by
    `alibi_slopes` and `buckets` [num_qo_heads], masks. `sink_logits` [num_qo_heads]: learned, joins each row once.
    `query_positions` [num_tokens]: absolute logical positions. `query_ordinals` [num_rows]: of a sequence; empty: k - 1
    where the list ends with the query's own token, else k. `k_codec`, `v_codec`: how K and V are stored where not in
    `dtype`; the function is attention over the reconstructed KV (`quantised`).

    `num_branches`: softmaxes of each row, gated and added; each has a candidate list of its own in every row, and a
    lse: row r of branch b has list b * num_rows + r. The reference takes each branch as a call of its own, of 1.

    Raises ValueError, naming the field, for a spec that has no meaning.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    seq_lens: tuple[int, ...]
    qo_lens: tuple[int, ...]
    dtype: DType
    sm_scale: float
    block_size: int = 1
    candidate_kind: CandidateKind = CandidateKind.SET
    causal: CausalRule = CausalRule.NONE
    window_left: int = -1
    empty_row: EmptyRowRule = EmptyRowRule.ZERO
    query_positions: tuple[int, ...] = ()
    query_ordinals: tuple[int, ...] = ()
    rope: RoPE | None = None
    logits_soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    buckets: RelativeBuckets | None = None
    sink_logits: tuple[float, ...] = ()
    dropout: Dropout | None = None
    epilogue: Epilogue = Epilogue()
    k_codec: Codec | None = None
    v_codec: Codec | None = None
    lists: ListsPer = ListsPer.KV_HEAD
    num_branches: int = 1

    def __post_init__(self) -> None:
        sizes = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "block_size")
        for name in (*sizes, "num_branches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads, got {self.num_qo_heads} and {self.num_kv_heads}"
            )
        if len(self.seq_lens) != len(self.qo_lens):
            raise ValueError(f"seq_lens names {len(self.seq_lens)} requests, qo_lens {len(self.qo_lens)}")
        for name in ("seq_lens", "qo_lens"):
            for request, length in enumerate(getattr(self, name)):
                if length < 0:
                    raise ValueError(f"{name}[{request}] must not be negative, got {length}")
        if self.window_left < -1:
            raise ValueError(f"window_left must be -1 (no window) or at least 0, got {self.window_left}")
        self._check_positions()
        self._check_terms()

    def _check_positions(self) -> None:
        own = self.causal in (CausalRule.BOTTOM_RIGHT, CausalRule.TOP_LEFT)
        if self.query_positions and own:
            raise ValueError(
                f"query_positions contradict the causal rule {self.causal}, which places the queries itself"
            )
        placed = self.query_positions or self.causal is CausalRule.ABSOLUTE
        if placed and len(self.query_positions) != self.num_tokens:
            raise ValueError(f"query_positions must name {self.num_tokens} tokens, got {len(self.query_positions)}")
        if self.query_ordinals and self.candidate_kind is not CandidateKind.SEQUENCE:
            raise ValueError(f"query_ordinals belong to a sequence, but candidate_kind is {self.candidate_kind}")
        if self.query_ordinals and len(self.query_ordinals) != self.num_lists:
            raise ValueError(f"query_ordinals must name {self.num_lists} rows, got {len(self.query_ordinals)}")

    def _check_terms(self) -> None:
        if self.rope and self.rope.rotary_dim > self.head_dim_qk:
            raise ValueError(f"rope.rotary_dim {self.rope.rotary_dim} exceeds head_dim_qk {self.head_dim_qk}")
        if not (math.isfinite(self.logits_soft_cap) and self.logits_soft_cap >= 0):
            raise ValueError(f"logits_soft_cap must be 0 (none) or positive, got {self.logits_soft_cap}")
        for name in ("alibi_slopes", "sink_logits"):
            values = getattr(self, name)
            if values and (len(values) != self.num_qo_heads or not all(map(math.isfinite, values))):
                raise ValueError(
                    f"{name} must hold {self.num_qo_heads} finite values (one per query head), got {values}"
                )
        if self.buckets and len(self.buckets.bias) != self.num_qo_heads:
            raise ValueError(f"buckets.bias must name {self.num_qo_heads} query heads, got {len(self.buckets.bias)}")
        uids = self.dropout.request_uids if self.dropout else ()
        if uids and len(uids) != self.num_requests:
            raise ValueError(f"dropout.request_uids must name {self.num_requests} requests, got {len(uids)}")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def list_heads(self) -> int:
        """Heads that have a candidate list of their own, so rows of each token."""
        return self.num_kv_heads if self.lists is ListsPer.KV_HEAD else self.num_qo_heads

    @property
    def heads_per_list(self) -> int:
        """Query heads that a candidate row serves: those from row % list_heads * heads_per_list on."""
        return self.num_qo_heads // self.list_heads

    @property
    def lists_per_kv_head(self) -> int:
        """Candidate rows of each token that read one KV head: row % list_heads // lists_per_kv_head."""
        return self.list_heads // self.num_kv_heads

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens)

    @cached_property
    def qo_indptr(self) -> tuple[int, ...]:
        """First token of each request in q, and the total: [num_requests + 1]."""
        return (0, *accumulate(self.qo_lens))

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests together."""
        return self.qo_indptr[-1]

    @property
    def num_rows(self) -> int:
        """Candidate rows: one per token and head that has a list."""
        return self.num_tokens * self.list_heads

    @property
    def num_lists(self) -> int:
        """Candidate lists: one per candidate row and branch."""
        return self.num_branches * self.num_rows

    @cached_property
    def token_request(self) -> tuple[int, ...]:
        """The request of each query token: [num_tokens]."""
        return tuple(n for n, length in enumerate(self.qo_lens) for _ in range(length))

    @cached_property
    def token_position(self) -> tuple[int, ...]:
        """Logical position of each query token: [num_tokens]; T - q_len + i (negative where q_len > T) unless the
        causal rule or `query_positions` place it elsewhere.
        """
        if self.query_positions:
            return self.query_positions
        if self.causal is CausalRule.TOP_LEFT:
            return tuple(i for q in self.qo_lens for i in range(q))
        return tuple(t - q + i for t, q in zip(self.seq_lens, self.qo_lens, strict=True) for i in range(q))

    def row_of(self, token: int, qo_head: int) -> int:
        """The candidate row that serves output row (token, query head)."""
        return token * self.list_heads + qo_head // self.heads_per_list

    def row(self, index: int) -> Row:
        """The identity of candidate row `index`."""
        token, head = divmod(index, self.list_heads)
        request = self.token_request[token]
        own = head if self.lists is ListsPer.QUERY_HEAD else None
        return Row(request, token - self.qo_indptr[request], head // self.lists_per_kv_head, own)


class Schedule(StrEnum):
    """Who takes which task (row, start, end, split). `STATIC`: one program a task, in the order of the rows;
    `SHUFFLED`: one program a task, in an order that has nothing to do with them; `PERSISTENT`: programs that stay, and
    take task after task.
    """

    STATIC = "static"
    SHUFFLED = "shuffled"
    PERSISTENT = "persistent"


class Route(StrEnum):
    """How candidates reach the tiles. `DIRECT`: loaded through the page table; `GATHER`: copied to contiguous scratch
    first, once for the query heads of a KV head; `GATHER_HEADS`: copied once for each query head.
    """

    DIRECT = "direct"
    GATHER = "gather"
    GATHER_HEADS = "gather_heads"


class Reduction(StrEnum):
    """How dK and dV of a slot are summed over the rows that attend it. `ATOMIC`: each row adds to memory; `KV_CENTRIC`:
    one program a block of KV sums over its rows; `HYBRID`: the second for pages that many rows attend.
    """

    ATOMIC = "atomic"
    KV_CENTRIC = "kv_centric"
    HYBRID = "hybrid"


class FallbackReason(StrEnum):
    """Why a backend may leave its sparse path, seed 5.2: nearly all keys are candidates; a head dimension that no
    kernel has; a block size that none was compiled for; too small a workspace; a row without candidates; another
    architecture.
    """

    DENSE = "dense"
    HEAD_DIM = "head_dim"
    BLOCK_SIZE = "block_size"
    WORKSPACE = "workspace"
    EMPTY = "empty"
    ARCHITECTURE = "architecture"


@dataclass(frozen=True)
class Hints:
    """What a backend may ignore: it changes speed and rounding, never the function.

    `num_splits`: parts that a row's KV range is cut into; `kv_tile`: slots per tile; `q_tile`: query tokens that one
    program takes; of these 0: the backend chooses. `reduction`: of the backward pass.
    """

    num_splits: int = 1
    kv_tile: int = 64
    q_tile: int = 1
    schedule: Schedule = Schedule.STATIC
    route: Route = Route.DIRECT
    reduction: Reduction = Reduction.ATOMIC

    def __post_init__(self) -> None:
        for name in ("num_splits", "kv_tile", "q_tile"):
            if getattr(self, name) < 0:
                raise ValueError(f"hint {name} must be at least 1, or 0 for any, got {getattr(self, name)}")
