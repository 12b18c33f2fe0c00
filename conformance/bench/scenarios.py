"""What is timed: scenarios as data, and the floors that the bundled kernels must hold in them.

Lengths are in tokens. Each scenario has a tiny twin of the same shape, for tests and for the interpreter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum

from sacts.reference.spec import AttentionSpec, CausalRule, Codec, CodecFormat, DType, Hints, ScaleGranularity

ANY_HINTS = Hints(num_splits=0, kv_tile=0, q_tile=0)  # the backend chooses


class Bound(StrEnum):
    """What a scenario is held against: bytes of K and V, or FLOPs of both products."""

    BYTES = "bytes"
    FLOPS = "flops"


@dataclass(frozen=True)
class Sizes:
    """`seq_lens`, `qo_lens`, `entries` by request: T, queries, and entries of each list, of `block_size` tokens each;
    `page_size` 0: contiguous KV, one page that holds all of a request.
    """

    seq_lens: tuple[int, ...]
    qo_lens: tuple[int, ...]
    entries: tuple[int, ...]
    block_size: int
    page_size: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    query_block: int = 1


@dataclass(frozen=True)
class Scenario:
    """One row of the acceptance list. `shared`: all KV heads of a token have the same list, else each its own;
    `Sizes.query_block`: consecutive queries that share it. `hnd`: pages lie as [num_kv_heads, page_size, d] in memory.
    `causal`: bottom-right; each list then holds the block of its query. `codec`: how K and V are stored.
    """

    name: str
    title: str
    bound: Bound
    full: Sizes
    tiny: Sizes
    shared: bool = True
    hnd: bool = False
    causal: bool = False
    codec: Codec | None = None
    hints: Hints = ANY_HINTS

    def sizes(self, tiny: bool) -> Sizes:
        """The sizes that are timed."""
        return self.tiny if tiny else self.full

    def spec(self, tiny: bool) -> AttentionSpec:
        """The spec of each call."""
        sizes = self.sizes(tiny)
        return AttentionSpec(
            num_qo_heads=sizes.num_qo_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim_qk=sizes.head_dim,
            head_dim_vo=sizes.head_dim,
            page_size=sizes.page_size or max(sizes.seq_lens),
            seq_lens=sizes.seq_lens,
            qo_lens=sizes.qo_lens,
            dtype=DType.BF16,
            sm_scale=1 / math.sqrt(sizes.head_dim),
            block_size=sizes.block_size,
            causal=CausalRule.BOTTOM_RIGHT if self.causal else CausalRule.NONE,
            k_codec=self.codec,
            v_codec=self.codec,
        )


def _decode(batch: int, kv: int, entries: int, block_size: int, page_size: int) -> Sizes:
    return Sizes((kv,) * batch, (1,) * batch, (entries,) * batch, block_size, page_size)


def _prefill(kv: int, page_size: int) -> Sizes:
    return Sizes((kv,), (kv,), (16,), 128, page_size, query_block=128)


def _small(sizes: Sizes, head_dim: int = 32) -> Sizes:
    return replace(sizes, num_qo_heads=4, num_kv_heads=2, head_dim=head_dim)


_TINY_PAGES = _small(_decode(3, 96, 3, 16, 16))
_TINY_PREFILL = Sizes((48,), (48,), (2,), 16, 16, 4, 2, 32, query_block=16)
_EVEN = Sizes((8192,) * 256, (1,) * 256, (35,) * 256, 64, 16)
_PAGES = _decode(64, 65536, 264, 16, 16)

_BF16 = (
    Scenario("decode-pages", "page-selected decode, B 64, 264 pages of 16", Bound.BYTES, _PAGES, _TINY_PAGES),
    Scenario(
        "decode-pages-head",
        "the same with a list per KV head, HND pages",
        Bound.BYTES,
        _PAGES,
        _TINY_PAGES,
        shared=False,
        hnd=True,
    ),
    Scenario(
        "decode-blocks",
        "block-selected decode, B 64, 33 blocks of 128 in contiguous KV",
        Bound.BYTES,
        _decode(64, 65536, 33, 128, 0),
        _small(_decode(2, 96, 2, 16, 0)),
    ),
    Scenario(
        "decode-tokens",
        "token-selected decode, B 64, 2048 scattered tokens of 65,536",
        Bound.BYTES,
        _decode(64, 65536, 2048, 1, 16),
        _small(_decode(3, 96, 24, 1, 16)),
    ),
    Scenario(
        "decode-tokens-16k",
        "token-selected decode, B 64, 2048 scattered tokens of 16,384, contiguous KV",
        Bound.BYTES,
        _decode(64, 16384, 2048, 1, 0),
        _small(_decode(2, 64, 16, 1, 0)),
    ),
    Scenario(
        "decode-one",
        "batch 1, 264 pages of 16, split-KV",
        Bound.BYTES,
        _decode(1, 65536, 264, 16, 16),
        _small(_decode(1, 96, 4, 16, 16)),
    ),
    Scenario(
        "decode-ragged",
        "ragged batch: 1 row of 800 blocks of 64, 255 of 32",
        Bound.BYTES,
        replace(_EVEN, seq_lens=(65536,) + (8192,) * 255, entries=(800,) + (32,) * 255),
        _small(Sizes((256,) * 4, (1,) * 4, (5,) + (1,) * 3, 32, 16)),
    ),
    Scenario(
        "decode-even",
        "the same bytes in an even batch: 256 rows of 35 blocks of 64",
        Bound.BYTES,
        _EVEN,
        _small(Sizes((256,) * 4, (1,) * 4, (2,) * 4, 32, 16)),
    ),
)


def _codecs() -> tuple[Scenario, ...]:
    """The page-selected decode over codes."""
    wanted = (
        ScaleGranularity.TENSOR,
        ScaleGranularity.HEAD,
        ScaleGranularity.PAGE,
        ScaleGranularity.PAGE_CHANNEL,
    )
    formats = (("fp8", CodecFormat.FP8_E4M3FN), ("int8", CodecFormat.INT8))
    return tuple(
        Scenario(
            f"decode-{word}-{granularity.replace('_', '-')}",
            f"the page-selected decode over {word}, a scale per {granularity.replace('_', ' and ')}",
            Bound.BYTES,
            _PAGES,
            _TINY_PAGES,
            codec=Codec(format, granularity, power_of_two=True),
        )
        for word, format in formats
        for granularity in wanted
    )


_FLOPS = (
    *(
        Scenario(
            f"prefill-{kv // 1024}k{'-paged' if page else ''}",
            f"block-sparse prefill, {kv // 1024}K, 16 of 128-token blocks, {'pages of 16' if page else 'contiguous'}",
            Bound.FLOPS,
            _prefill(kv, page),
            replace(_TINY_PREFILL, page_size=page),
        )
        for kv in (16384, 32768)
        for page in (0, 16)
    ),
    Scenario(
        "prefill-per-token",
        "per-token block selection, T 16384, 64/4 heads, 16 blocks of 64, causal, a list per KV head",
        Bound.FLOPS,
        Sizes((16384,), (16384,), (16,), 64, 0, 64, 4, 128),
        Sizes((48,), (48,), (2,), 16, 0, 4, 2, 32),
        shared=False,
        causal=True,
    ),
)

SCENARIOS: dict[str, Scenario] = {each.name: each for each in (*_BF16, *_codecs(), *_FLOPS)}


def named(name: str) -> Scenario:
    """A scenario by name. Raises ValueError with the nearest one."""
    if name not in SCENARIOS:
        near = get_close_matches(name, SCENARIOS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no scenario {name!r}{hint}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


class Against(StrEnum):
    """What a floor compares with: the copy ceiling, the speed of a peer on the same inputs, or our own in another
    scenario.
    """

    COPY = "copy"
    PEER = "peer"
    SCENARIO = "scenario"


@dataclass(frozen=True)
class Floor:
    """Our rate in `scenario` must be at least `least` times what `against` names: the copy ceiling, a peer's rate here,
    or our own rate in the scenario `other`; `aim` is wanted. `time`: of times, not of rates (codes move fewer bytes).
    `replays`: by graph replay also, where both have it.
    """

    scenario: str
    least: float
    against: Against
    other: str = ""
    aim: float | None = None
    time: bool = False
    replays: bool = False

    @property
    def words(self) -> str:
        """The floor as the table prints it."""
        what = "copy" if self.against is Against.COPY else self.other
        kind = " in time" if self.time else ""
        aim = f", aim {self.aim:g}" if self.aim else ""
        return f">= {self.least:g}x {what}{kind}{aim}"


FLOORS: tuple[Floor, ...] = (
    Floor("decode-pages", 0.85, Against.COPY),
    Floor("decode-pages", 0.9, Against.PEER, "flashinfer", aim=1.0),
    Floor("decode-blocks", 4.0, Against.PEER, "flex"),
    Floor("decode-pages-head", 0.75, Against.COPY, aim=0.85),
    Floor("decode-tokens", 0.9, Against.PEER, "flashinfer", aim=1.0),
    Floor("decode-tokens-16k", 1.1, Against.PEER, "flash-sparse-attn"),
    Floor("decode-one", 0.8, Against.PEER, "flashinfer", aim=1.0, replays=True),
    *(
        Floor(f"decode-{word}-{granularity}", 1.6, Against.SCENARIO, "decode-pages", time=True)
        for word in ("fp8", "int8")
        for granularity in ("tensor", "head", "page")
    ),
    Floor("prefill-16k", 0.9, Against.PEER, "flex", aim=1.1),
    Floor("prefill-32k", 0.9, Against.PEER, "flex", aim=1.1),
    Floor("prefill-per-token", 1.0, Against.PEER, "fla-nsa", aim=1.3),
    Floor("decode-ragged", 0.8, Against.SCENARIO, "decode-even"),
)
