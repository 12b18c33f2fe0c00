"""The ladder: a kernel brought up rung by rung, fixed candidates first. Each rung adds one thing to the one before,
which is its reference: what fails on a rung and holds below it lies in what that rung adds. Seed 5.2.
"""

from __future__ import annotations

from typing import NamedTuple

from .cell import Cell, parse


class Rung(NamedTuple):
    """`number`, from 1; `adds`: what it has and the rung below has not; `cells`: the first is the first one of the rung
    below but for that.
    """

    number: int
    name: str
    adds: str
    cells: tuple[Cell, ...]


_RUNGS = (
    (
        "fixed candidates",
        "every key of one request, on ascending pages",
        ("decode/fp16/kv:64/pattern:all/map:identity", "decode/bf16/kv:90/heads:8-2/pattern:all/map:identity"),
    ),
    (
        "random pages",
        "pages in an order that is not the logical one",
        ("decode/fp16/kv:64/pattern:all", "decode/bf16/kv:90/heads:8-2/pattern:all"),
    ),
    (
        "ragged",
        "requests of unequal length, one of them empty, queries of several",
        (
            "decode/fp16/kv:64+150+0+9/pattern:all",
            "prefill/bf16/kv:90+33/q:5+2/pattern:all/causal:bottom_right",
        ),
    ),
    (
        "split",
        "long rows in several parts, merged",
        (
            "decode/fp16/kv:64+150+0+9/pattern:all/splits:2",
            "prefill/bf16/kv:90+33/q:5+2/pattern:all/causal:bottom_right/splits:4/tile:16",
        ),
    ),
    (
        "quantised",
        "K and V in codes, scales by page",
        (
            "decode/fp16/kv:64+150+0+9/pattern:all/splits:2/kcodec:int8/vcodec:int8/scales:page",
            "prefill/bf16/kv:90+33/q:5+2/pattern:all/causal:bottom_right/splits:4/tile:16/kcodec:fp8_e4m3fn/vcodec:int4"
            "/scales:page_head",
        ),
    ),
    (
        "selector",
        "raw lists as a selector leaves them: some keys, repeated, padded, joined by a window and sinks",
        (
            "decode/fp16/kv:64+150+0+9/pattern:union/splits:2/kcodec:int8/vcodec:int8/scales:page",
            "decode/bf16/kv:90+33/pattern:duplicates/splits:2/tile:16",
            "index/fp16/kv:90+33/q:3+1/pattern:union",
        ),
    ),
    (
        "graph",
        "a plan that is kept, and a recorded run, on contents that change in place",
        (
            "decode/fp16/kv:64+150+0+9/pattern:union/splits:2/kcodec:int8/vcodec:int8/scales:page/exec:graph",
            "decode/bf16/kv:90+33/pattern:duplicates/splits:2/tile:16/exec:reuse",
        ),
    ),
)
RUNGS = tuple(
    Rung(number, name, adds, tuple(parse(cell) for cell in cells))
    for number, (name, adds, cells) in enumerate(_RUNGS, start=1)
)


def up_to(number: int) -> tuple[Rung, ...]:
    """The rungs from the first to this one. Raises ValueError, with all of them, for one that is not there."""
    if not 1 <= number <= len(RUNGS):
        names = ", ".join(f"{rung.number} {rung.name}" for rung in RUNGS)
        raise ValueError(f"no rung {number}; rungs: {names}")
    return RUNGS[:number]
