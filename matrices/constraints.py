"""Which combinations of axis values name no cell, as data: each constraint has the axes that it ties together, the
rule, and the words that a cell which breaks it is answered with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cell import Cell


@dataclass(frozen=True)
class Constraint:
    """`axes`: those whose values decide, in the order in which a message names them; `holds`: whether a cell may have
    them; `because`: why not, in words that name what is valid.
    """

    name: str
    axes: tuple[str, ...]
    holds: Callable[[Cell], bool]
    because: str


def _repeats(pattern: str) -> bool:
    """Whether the raw lists of a pattern repeat entries by themselves."""
    return pattern in ("duplicates", "union")


def _coded(cell: Cell) -> bool:
    return cell.kcodec != "none" or cell.vcodec != "none"


def _own_token_committed(cell: Cell) -> bool:
    return all(q <= t for q, t in zip(cell.qo_lens, cell.kv, strict=True))


def _sink_token_committed(cell: Cell) -> bool:
    return all(t > 0 for q, t in zip(cell.qo_lens, cell.kv, strict=True) if q)


CONSTRAINTS = (
    Constraint("requests", ("kv",), lambda c: bool(c.kv), "axis kv names no request"),
    Constraint(
        "queries of decode",
        ("phase", "q"),
        lambda c: c.phase != "decode" or not c.q,
        "axis q belongs to prefill, train and index; decode has one query a request",
    ),
    Constraint(
        "queries by request",
        ("q", "kv"),
        lambda c: c.phase == "decode" or len(c.q) == len(c.kv),
        "axis q must name as many requests as axis kv",
    ),
    Constraint(
        "another dimension of V",
        ("dim", "vdim"),
        lambda c: c.vdim != c.dim,
        "vdim is left out where V has the dimension of K",
    ),
    Constraint(
        "nothing runs before lists alone",
        ("phase", "exec"),
        lambda c: c.phase != "index" or c.exec == "eager",
        "an index cell runs nothing",
    ),
    Constraint(
        "gradients of one softmax",
        ("phase", "branches"),
        lambda c: c.phase != "train" or c.branches == 1,
        "no backward of gated branches is judged yet: train needs branches:1",
    ),
    Constraint(
        "gates of branches",
        ("branches", "epilogue"),
        lambda c: c.branches == 1 or c.epilogue != "gate",
        "branches have gates of their own",
    ),
    Constraint(
        "a path to leave",
        ("phase", "fallback"),
        lambda c: c.phase != "index" or c.fallback == "none",
        "an index cell runs nothing",
    ),
    Constraint(
        "gradients to sum",
        ("phase", "reduction"),
        lambda c: c.phase == "train" or c.reduction == "atomic",
        "only phase train sums gradients",
    ),
    Constraint(
        "queries for a tile",
        ("phase", "qtile"),
        lambda c: c.phase != "decode" or c.qtile == 1,
        "decode has one query a request",
    ),
    Constraint(
        "lists that can differ",
        ("lists", "heads"),
        lambda c: c.lists == "kv_head" or c.heads[0] != c.heads[1],
        "as many query heads as KV heads: a list of each is the same; left out there",
    ),
    Constraint(
        "one way beyond 32 bits",
        ("map", "cache"),
        lambda c: c.cache == "contiguous" or c.map != "high",
        "map:high needs cache:contiguous: both are about offsets beyond 32 bits",
    ),
    Constraint(
        "pools that fit",
        ("map", "dim", "vdim"),
        lambda c: c.map != "high" or not c.vdim or max(c.dim, c.vdim) <= 2 * min(c.dim, c.vdim),
        "beyond 32 bits in the smaller of two pools the larger one has no room: dim and vdim within a factor of 2",
    ),
    Constraint(
        "64K pages",
        ("pattern", "page", "block"),
        lambda c: c.pattern != "case64k" or c.block == c.page == 16,
        "pattern:case64k needs page:16 and block:16",
    ),
    Constraint(
        "sharing",
        ("map", "kv"),
        lambda c: c.map != "shared" or len(c.kv) > 1,
        "map:shared needs two requests or more",
    ),
    Constraint(
        "an alias",
        ("map", "kv", "page"),
        lambda c: c.map != "alias" or (c.kv[0] >= 2 * c.page and max((0, *c.kv[1:])) >= c.page),
        "map:alias needs two whole pages of the first request and one of another",
    ),
    Constraint(
        "edges of codes",
        ("values", "kcodec", "vcodec"),
        lambda c: c.values != "scale_edges" or _coded(c),
        "only codes have edges",
    ),
    Constraint(
        "queries that share",
        ("phase", "qblock"),
        lambda c: c.phase != "decode" or c.qblock == 1,
        "decode has one query a request",
    ),
    Constraint(
        "example lists",
        ("pattern", "map"),
        lambda c: c.pattern != "example" or c.map == "example",
        "pattern:example needs map:example",
    ),
    Constraint(
        "example tokens",
        ("pattern", "block"),
        lambda c: c.pattern != "example" or c.block == 1,
        "pattern:example names tokens: it needs block:1",
    ),
    Constraint(
        "example pages",
        ("map", "page", "kv"),
        lambda c: c.map != "example" or (c.page == 64 and c.kv == (128,)),
        "map:example is the page table (41, 7): it needs page:64 and kv:128",
    ),
    Constraint(
        "blocks are sets",
        ("kind", "block"),
        lambda c: c.kind == "set" or c.block == 1,
        "lists of blocks carry sets only",
    ),
    Constraint(
        "a sequence repeats nothing",
        ("kind", "pattern"),
        lambda c: c.kind != "sequence" or not _repeats(c.pattern),
        "a sequence has no duplicates, and no window or sinks are added to it",
    ),
    Constraint(
        "an own token to attend",
        ("empty", "kv", "q"),
        lambda c: c.empty != "force_self" or _own_token_committed(c),
        "each query's own token must be committed: no more queries than keys in any request",
    ),
    Constraint(
        "a sink token to attend",
        ("empty", "kv"),
        lambda c: c.empty != "force_sink_token" or _sink_token_committed(c),
        "a request with queries needs a token 0",
    ),
    Constraint(
        "pairs of channels",
        ("pos", "dim"),
        lambda c: not c.pos.startswith("rope") or c.dim % (4 if c.pos == "rope-interleaved" else 2) == 0,
        "RoPE turns pairs of channels: dim must be even, for rope-interleaved (half of the channels) a multiple of 4",
    ),
    Constraint(
        "equal before and after turning",
        ("pos", "values"),
        lambda c: not c.pos.startswith("rope") or c.values != "equal",
        "RoPE turns equal keys apart",
    ),
    Constraint(
        "shifted far from positions",
        ("pos", "values"),
        lambda c: c.pos == "none" or c.values != "shifted",
        "RoPE turns the channel that shifts logits, and a bias is lost in the rounding of shifted ones",
    ),
    Constraint(
        "shifted far from a cap",
        ("cap", "values"),
        lambda c: not c.cap or c.values != "shifted",
        "a soft cap undoes the shift of the logits",
    ),
    Constraint(
        "shifted far from repeats",
        ("kind", "values"),
        lambda c: c.kind != "multiset" or c.values != "shifted",
        "ln(count) is lost in the rounding of shifted logits",
    ),
    Constraint(
        "shifted far from dropout",
        ("dropout", "values"),
        lambda c: not c.dropout or c.values != "shifted",
        "a dropped key shows in lse alone, and the shift makes its rounding coarse",
    ),
    Constraint(
        "shifted far from a sink",
        ("sink", "values"),
        lambda c: c.sink == "off" or c.values != "shifted",
        "the sink would have all the mass",
    ),
    Constraint(
        "scales of codes",
        ("scales", "kcodec", "vcodec"),
        lambda c: c.scales == "tensor" or _coded(c),
        "only codes have scales",
    ),
    Constraint(
        "steps of codes",
        ("steps", "kcodec", "vcodec"),
        lambda c: c.steps == "any" or _coded(c),
        "only codes have scales",
    ),
    Constraint(
        "zero points of integers",
        ("zeros", "kcodec", "vcodec"),
        lambda c: c.zeros == "off" or c.kcodec.startswith("int") or c.vcodec.startswith("int"),
        "only integer codes have zero points",
    ),
    Constraint(
        "keys that codes can hold",
        ("kcodec", "values"),
        lambda c: c.kcodec == "none" or c.values not in ("equal", "shifted"),
        "another scale makes equal keys unequal, and no code reaches the shift",
    ),
    Constraint(
        "memory of 8 bits",
        ("cache", "kcodec", "vcodec"),
        lambda c: c.cache != "span" or not _coded(c),
        "2^32 elements of a byte are no more bytes than 32 bits count",
    ),
)
