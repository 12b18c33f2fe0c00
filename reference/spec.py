"""The types of a problem: what a backend must not change (`AttentionSpec`) and what it may ignore (`Hints`)."""

from __future__ import annotations

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


class CausalRule(StrEnum):
    """Where the causal diagonal lies; `BOTTOM_RIGHT`: query i of q_len sits at logical position T - q_len + i."""

    NONE = "none"
    BOTTOM_RIGHT = "bottom_right"


class EmptyRowRule(StrEnum):
    """What a row without any edge yields; `ZERO`: out 0, lse -inf."""

    ZERO = "zero"


class Row(NamedTuple):
    """The identity of a candidate row; it never changes, however tasks are sorted."""

    request: int
    query: int
    kv_head: int

    def __str__(self) -> str:
        return f"row (request {self.request}, query {self.query}, KV head {self.kv_head})"


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about a paged sparse-attention call that a backend must not change.

    Shapes that follow from it: q [num_tokens, num_qo_heads, head_dim_qk], out [num_tokens, num_qo_heads,
    head_dim_vo], lse [num_tokens, num_qo_heads]. A candidate row is one (token, KV head); its index is token *
    num_kv_heads + kv_head.

    `seq_lens[n]` is T, the committed KV length of request n in tokens; `qo_lens[n]` its number of queries.
    `block_size` is the number of tokens that one candidate entry names (1: token selection). `window_left` removes
    keys with t < position - window_left; -1 means no window.

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

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "block_size"):
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

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

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
        """Candidate rows: one per (token, KV head)."""
        return self.num_tokens * self.num_kv_heads

    @cached_property
    def token_request(self) -> tuple[int, ...]:
        """The request of each query token: [num_tokens]."""
        return tuple(n for n, length in enumerate(self.qo_lens) for _ in range(length))

    @cached_property
    def token_position(self) -> tuple[int, ...]:
        """Logical position of each query token, T - q_len + i: [num_tokens]; negative where q_len > T."""
        return tuple(t - q + i for t, q in zip(self.seq_lens, self.qo_lens, strict=True) for i in range(q))

    def row(self, index: int) -> Row:
        """The identity of candidate row `index`."""
        token, kv_head = divmod(index, self.num_kv_heads)
        request = self.token_request[token]
        return Row(request, token - self.qo_indptr[request], kv_head)


@dataclass(frozen=True)
class Hints:
    """What a backend may ignore: it changes speed and rounding, never the function.

    `num_splits`: parts that a row's KV range is cut into; `kv_tile`: slots per tile.
    """

    num_splits: int = 1
    kv_tile: int = 64

    def __post_init__(self) -> None:
        for name in ("num_splits", "kv_tile"):
            if getattr(self, name) < 1:
                raise ValueError(f"hint {name} must be at least 1, got {getattr(self, name)}")
