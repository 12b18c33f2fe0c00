"""The axes of the matrix as data: name, values, default, and what each value means.

An axis with a default is left out of ids where a cell has the default, so a new axis leaves every old id alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sacts.reference.spec import (
    CandidateKind,
    CausalRule,
    DType,
    EmptyRowRule,
    FallbackReason,
    ListsPer,
    Reduction,
    Route,
    ScaleGranularity,
    Schedule,
)


class Phase(StrEnum):
    """How the queries of a request relate to its KV."""

    DECODE = "decode"
    PREFILL = "prefill"
    TRAIN = "train"
    INDEX = "index"


class Execution(StrEnum):
    """What ran before, in the same memory."""

    EAGER = "eager"
    REUSE = "reuse"
    OVERWRITTEN = "overwritten"
    SMALL_PLAN = "small_plan"
    SMALL_WORKSPACE = "small_workspace"
    GRAPH = "graph"
    DOUBLE_BUFFER = "double_buffer"


PATTERNS = {
    "scattered": "about a quarter of the visible entries, spread at random",
    "clustered": "two runs of neighbouring entries",
    "contiguous": "one run of neighbouring entries, a quarter of the visible ones",
    "hot": "the first 16 entries, which every row names (a hot page), and an eighth of the visible ones",
    "all": "every visible entry",
    "one": "one entry in each row",
    "empty": "no entry in any row",
    "duplicates": "scattered, then every third entry repeated and the list shuffled; padding at head, middle and tail",
    "union": "D, a window of 16 and 4 sinks that overlap: the raw list repeats what they share",
    "case64k": "page lists with the statistics of a 64K context: window, full, two-page and one-page tiles of 64",
    "example": "the tokens 1, 2, 63, 64, 65, 127 with page table (41, 7), page size 64",
}
MAPS = {
    "random": "distinct pages in random order, unrelated to logical order",
    "shared": "requests share the pages of their common prefix, half of the shortest",
    "alias": "every second whole page of a later request is the page behind it in the first: a page at two places",
    "identity": "ascending pages from 0",
    "high": "page numbers beyond 2^31 elements into the pool, so that 32-bit offsets overflow",
    "example": "the page table (41, 7)",
}
CACHES = {
    "contiguous": "K and V caches contiguous",
    "strided": "K and V caches are views: twice the page stride, junk between the pages, an odd base offset",
    "span": "K and V caches are views of so large a page stride that they span 2^32 elements: 32-bit offsets overflow",
}
VALUES = {
    "gaussian": "normal q, K and V",
    "huge": "logits up to about +-300 (under RoPE and for K in codes +-50, in bf16 +-20), one key dominant mostly",
    "shifted": "all logits shifted by one number, -864 (random probe) or -98304 (count witness)",
    "equal": "all keys equal: every logit the same, not zero",
    "scale_edges": "K and V at the edges of their codes: the largest, the least and subnormal ones, what saturates",
    "heavy": "cubes of normal numbers: heavy tails, so that one key or one channel decides",
}
POSITIONS = {
    "none": "logits do not depend on positions, as where keys are rotated before they are cached",
    "rope": "RoPE inside the kernel over all channels, half-split pairs; keys are stored unrotated",
    "rope-interleaved": "RoPE inside the kernel over the first half of the channels, interleaved pairs",
    "alibi": "ALiBi: -slope * |pos_q - t|, a slope for each query head, from 2^-4 down; less for more than 128 keys",
    "buckets": "relative buckets as in T5, 8 up to a distance of 64, a drawn bias for each query head and bucket",
}
SINKS = {"off": "no sink", "on": "a drawn sink logit for each query head joins each row once"}
KINDS = {
    CandidateKind.SET.value: "a list names a set: order and duplicates mean nothing",
    CandidateKind.MULTISET.value: "each repeat adds mass: every third entry of a list stands in it three times",
    CandidateKind.SEQUENCE.value: "order counts: position terms and dropout use the place in the list",
}
EMPTY_ROWS = {
    EmptyRowRule.ZERO.value: "a row without an edge has out 0, lse -inf or the sink logit",
    EmptyRowRule.FORCE_SELF.value: "a row without an edge attends the query's own token",
    EmptyRowRule.FORCE_SINK_TOKEN.value: "a row without an edge attends token 0",
    EmptyRowRule.FORBID.value: "a call with a row without an edge must be refused",
}
EPILOGUES = {
    "none": "out as it is",
    "cast": "out rounded to fp16 (in an fp16 cell: to bf16) after the merge",
    "gate": "out times a given gate for each token, query head and channel, after the merge",
    "relu": "max(out, 0) after the merge",
    "silu": "out * sigmoid(out) after the merge",
    "low_bit": "out written back as 8-bit integers of scale 1/64 after the merge",
}
CODECS = {
    "none": "stored in the dtype",
    "int8": "8-bit integers",
    "int4": "4-bit integers, two to a byte",
    "fp8_e4m3fn": "FP8 with 4 bits of exponent, no infinity",
    "fp8_e5m2": "FP8 with 5 bits of exponent",
}
SCALES = {
    ScaleGranularity.TENSOR.value: "one scale for all of K, one for all of V",
    ScaleGranularity.HEAD.value: "one scale for each KV head",
    ScaleGranularity.CHANNEL.value: "one scale for each channel of each KV head",
    ScaleGranularity.PAGE.value: "one scale for each physical page",
    ScaleGranularity.PAGE_HEAD.value: "one scale for each page and KV head",
    ScaleGranularity.TOKEN_HEAD.value: "one scale for each slot and KV head",
    ScaleGranularity.PAGE_CHANNEL.value: "one scale for each page and channel of each KV head",
}
STEPS = {"any": "scales are any FP32 values", "power_of_two": "scales are powers of two"}
ZEROS = {"off": "zero points are 0", "on": "integer codecs have a zero point beside each scale"}
PHASES = {
    Phase.DECODE.value: "one query a request",
    Phase.PREFILL.value: "`q` queries a request",
    Phase.TRAIN.value: "`q` queries a request, forward and backward: a backend without backward cannot be judged",
    Phase.INDEX.value: "the lists that a backend makes, item by item; nothing is computed from them",
}
EXECUTIONS = {
    Execution.EAGER.value: "planned and run, once",
    Execution.REUSE.value: "run on other lists, pages and data in the same memory first, under one plan if that may be",
    Execution.OVERWRITTEN.value: "run behind others, without waiting; in stream order its contents and results are"
    " overwritten behind it",
    Execution.SMALL_PLAN.value: "run under a plan for shorter lists first: refused, and planned anew, or right",
    Execution.SMALL_WORKSPACE.value: "run in a workspace of one byte less first: refused, or right",
    Execution.GRAPH.value: "recorded as a CUDA graph on other lists, pages and data, then replayed on these",
    Execution.DOUBLE_BUFFER.value: "two such graphs, each over a buffer of its own, replayed in turn while the other is"
    " written",
}
FORMATS = {
    "csr": "each raw list as long as it is",
    "fixed_k": "raw lists of one length, that of the longest; padding behind the entries",
    "tiers": "raw lists as long as the least capacity of 16, 64, 256, ... that holds them; padding behind the entries",
}
FALLBACKS = {
    "none": "the path that the backend declares for the spec",
    FallbackReason.DENSE.value: "the backend is told to leave its sparse path, as if nearly all keys were candidates",
    FallbackReason.HEAD_DIM.value: "the same, as if it had no kernel of this head dimension",
    FallbackReason.BLOCK_SIZE.value: "the same, as if none were compiled for this block size",
    FallbackReason.WORKSPACE.value: "the same, as if the workspace were too small",
    FallbackReason.EMPTY.value: "the same, as if a row had no candidates",
    FallbackReason.ARCHITECTURE.value: "the same, as if the device were of another architecture",
}
SCHEDULES = {
    Schedule.STATIC.value: "hint: one program a task, in the order of the rows",
    Schedule.SHUFFLED.value: "hint: one program a task, the tasks in another order than their rows",
    Schedule.PERSISTENT.value: "hint: programs that take task after task",
}
ROUTES = {
    Route.DIRECT.value: "hint: candidates loaded through the page table",
    Route.GATHER.value: "hint: candidates copied to contiguous scratch first, once for a KV head",
    Route.GATHER_HEADS.value: "hint: candidates copied to contiguous scratch first, once for a query head",
}
REDUCTIONS = {
    Reduction.ATOMIC.value: "hint: each row adds to dK and dV in memory",
    Reduction.KV_CENTRIC.value: "hint: dK and dV of a block of KV are summed by one program",
    Reduction.HYBRID.value: "hint: so for pages that many rows attend, by additions in memory for the others",
}
LISTS = {
    ListsPer.KV_HEAD.value: "each KV head: its query heads share one list",
    ListsPer.QUERY_HEAD.value: "each query head: lists of query heads that read one KV head differ",
}
MEANINGS = {
    "phase": PHASES,
    "exec": EXECUTIONS,
    "kcodec": CODECS,
    "vcodec": CODECS,
    "scales": SCALES,
    "steps": STEPS,
    "zeros": ZEROS,
    "pattern": PATTERNS,
    "map": MAPS,
    "cache": CACHES,
    "values": VALUES,
    "pos": POSITIONS,
    "sink": SINKS,
    "kind": KINDS,
    "empty": EMPTY_ROWS,
    "epilogue": EPILOGUES,
    "format": FORMATS,
    "fallback": FALLBACKS,
    "schedule": SCHEDULES,
    "route": ROUTES,
    "reduction": REDUCTIONS,
    "lists": LISTS,
}


@dataclass(frozen=True)
class Axis:
    """One axis: `default` None means that the value always stands in the id; `values` None: integers from `low` to
    `high`. `clause`: where the contract demands it.
    """

    name: str
    sentence: str
    default: object = None
    values: tuple[str, ...] | None = None
    low: int = 1
    high: int | None = None
    clause: str = "DESIGN section 6"

    def holds(self, number: int) -> bool:
        """Whether an integer is a value of the axis."""
        return self.low <= number and (self.high is None or number <= self.high)


AXES = (
    Axis("phase", "what is computed, and for how many queries", None, tuple(Phase)),
    Axis("dtype", "element type of q, K, V and out", None, tuple(DType)),
    Axis("kv", "committed KV length T of each request, joined by +", low=0),
    Axis("q", "queries of each request, joined by +; not in decode", (), low=0),
    Axis("heads", "query heads - KV heads", (4, 2)),
    Axis("dim", "head dimension of q and K", 64),
    Axis("vdim", "head dimension of V and out; 0: that of q and K", 0, low=0),
    Axis("page", "tokens in a page", 16),
    Axis("block", "tokens that one candidate entry names; 1: token selection", 1),
    Axis("pattern", "which entries are selected", "scattered", tuple(PATTERNS)),
    Axis("map", "which physical pages hold the KV", "random", tuple(MAPS)),
    Axis("cache", "strides of the K and V caches", "contiguous", tuple(CACHES)),
    Axis(
        "causal", "causal rule, by logical position", CausalRule.NONE.value, (CausalRule.NONE, CausalRule.BOTTOM_RIGHT)
    ),
    Axis("window", "window_left: keys that a query sees to its left beside its own; -1: all", -1, low=-1),
    Axis("splits", "hint: parts that a row's KV range is cut into", 1),
    Axis("tile", "hint: slots in a KV tile", 64),
    Axis("values", "numeric family of q, K and V", "gaussian", tuple(VALUES)),
    Axis(
        "pos", "position coding of the logits", "none", tuple(POSITIONS), clause="DESIGN section 4, One row; RoPE, bias"
    ),
    Axis("cap", "soft cap c of the logits, c * tanh(z / c); 0: none", 0, low=0, clause="DESIGN section 4, One row"),
    Axis("sink", "learned sink logits", "off", tuple(SINKS), clause="DESIGN section 4, One row"),
    Axis("dropout", "percent of the edges that are dropped", 0, low=0, high=99, clause="DESIGN section 4, Dropout"),
    Axis("kind", "what a candidate list means", "set", tuple(KINDS), clause="DESIGN section 4, Candidates"),
    Axis("empty", "what a row without an edge yields", "zero", tuple(EMPTY_ROWS), clause="DESIGN section 4, Empty row"),
    Axis("kcodec", "how K is stored", "none", tuple(CODECS), clause="DESIGN section 4, Quantised KV"),
    Axis("vcodec", "how V is stored", "none", tuple(CODECS), clause="DESIGN section 4, Quantised KV"),
    Axis("scales", "what shares one scale", "tensor", tuple(SCALES), clause="DESIGN section 4, Quantised KV"),
    Axis("steps", "what values scales have", "any", tuple(STEPS), clause="DESIGN section 4, Quantised KV"),
    Axis("zeros", "zero points", "off", tuple(ZEROS), clause="DESIGN section 4, Quantised KV"),
    Axis("epilogue", "what is done to out at last", "none", tuple(EPILOGUES), clause="DESIGN section 4, Epilogues"),
    Axis("exec", "what ran before, in the same memory", "eager", tuple(Execution)),
    Axis("qtile", "hint: query tokens in a tile", 1),
    Axis("schedule", "hint: who takes which task", Schedule.STATIC.value, tuple(SCHEDULES)),
    Axis("route", "hint: how candidates reach the tiles", Route.DIRECT.value, tuple(ROUTES)),
    Axis("format", "how long raw lists are", "csr", tuple(FORMATS)),
    Axis(
        "qblock", "neighbouring queries that share one list", 1, clause="DESIGN section 6: per query or per query block"
    ),
    Axis("fallback", "the reason for which a backend is forced to fall back", "none", tuple(FALLBACKS)),
    Axis("reduction", "hint: how dK and dV are summed over rows", Reduction.ATOMIC.value, tuple(REDUCTIONS)),
    Axis(
        "lists",
        "what has a candidate list of its own",
        ListsPer.KV_HEAD.value,
        tuple(LISTS),
        clause="DESIGN section 4, Candidates",
    ),
    Axis(
        "branches",
        "separate softmaxes over lists of their own, gated and added",
        1,
        clause="DESIGN section 4, Branches",
    ),
)
