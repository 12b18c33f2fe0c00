"""The dispatch rule: tiles and splits where a case leaves them to the backend (hints of 0), from what was measured.

What was measured holds for one architecture and one compiler; elsewhere a default is taken that is safe, not fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
import triton

from sacts.conformance.adapter import Case
from sacts.reference.spec import AttentionSpec, DType, Hints, Schedule

from .copies import aligned, copies, describable
from .limits import k_late, programs_of, uniform, v_late
from .tables import padded
from .words import as_read

LEAST_PART = 320  # slots of a part: less is not worth a merge
MOST_PARTS = 32  # of a row: the workspace has room for as many of each
LANES = 128  # query heads of all tokens of one program, where tokens share lists
PROGRAMS = 3  # parts of rows that a processor should have at least
MEASURED_DIM = 128  # head dims, padded
MEASURED_HEADS = 16  # query heads of a list at most, where its tokens are alone: what one product holds
MEASURED_CODES = ("int8", "fp8_e4m3fn")  # of K and V alike
CPU_PROCESSORS = 3  # as many as programs that stay in the interpreter


class Work(StrEnum):
    """What bounds a case: K and V from memory, how long a program waits for them, codes to decode, or the products. Of
    these, that K and V are copied by descriptions; and that each token has a list of its own.
    """

    DECODE = "decode"
    ALONE = "alone"
    CODES = "codes"
    PREFILL = "prefill"
    COPIED = "copied"
    COPIED_APART = "copied_apart"


@dataclass(frozen=True)
class Tile:
    """Slots of a tile, and compiler options beside those of `limits.options`."""

    kv_tile: int = 64
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuned:
    """What is taken on one `architecture` (compute capability) with one `compiler` (major and minor version)."""

    architecture: tuple[int, int]
    compiler: str
    tiles: dict[Work, Tile]


ANYWHERE = Tile()
MEASURED = (
    Tuned(
        architecture=(9, 0),
        compiler="3.6",
        tiles={
            Work.DECODE: Tile(32, {"num_stages": 3, "maxnreg": 128}),
            Work.ALONE: Tile(128, {"num_stages": 3}),
            Work.CODES: Tile(128, {"num_warps": 2, "num_stages": 2}),
            Work.PREFILL: Tile(64, {"num_stages": 3}),
            Work.COPIED: Tile(128, {"num_stages": 3}),
            Work.COPIED_APART: Tile(64, {"num_warps": 2, "num_stages": 2}),
        },
    ),
)


@dataclass(frozen=True)
class Choice:
    """What a case is run with: `num_splits` parts at most, of `least_part` slots at least; `q_tile` query tokens at
    most, and if that is `asked` for also where few of them share a list; the `tile`, and what it is where tokens do not
    share their lists, `tile_apart`.
    """

    num_splits: int
    least_part: int
    q_tile: int
    asked: bool
    tile: Tile
    tile_apart: Tile

    def tile_of(self, q_tile: int) -> Tile:
        """The tile of programs of so many tokens."""
        return self.tile if q_tile > 1 else self.tile_apart


def chosen(case: Case) -> Choice:
    """The hints of a case, and where they are 0 what was measured. It follows from what the host knows before the plan:
    spec, hints, size of the raw lists, and the device.
    """
    hints, spec, device = case.hints, case.spec, case.q.device
    splits, part = hints.num_splits, 1
    if not splits:
        splits, part = splits_of(spec, case.kv_indices.numel(), PROGRAMS * processors(device))
    several = max(spec.qo_lens, default=0) > 1
    tasks = most_tasks(spec, case.kv_indices.numel(), splits, part)
    alone = tasks * programs_of(spec, hints.route) <= processors(device)
    words = all(cache.dtype is torch.int16 for cache in as_read(spec, case.k_cache, case.v_cache))
    tile = tile_apart = Tile(hints.kv_tile)
    if not hints.kv_tile:
        copied = copies(device) and aligned(case) and describable(spec, hints)
        tile, tile_apart = (
            tile_for(spec, *here(device), alone=alone, words=words, copied=copied, apart=apart)
            for apart in (False, True)
        )
    return Choice(
        num_splits=splits,
        least_part=part,
        q_tile=hints.q_tile or (max(1, LANES // spec.heads_per_list) if several else 1),
        asked=hints.q_tile > 0,
        tile=tile,
        tile_apart=tile_apart,
    )


def splits_of(spec: AttentionSpec, entries: int, programs: int) -> tuple[int, int]:
    """How many parts a row may have, and how many slots a part has at least, where the raw lists have so many entries
    in all: such that there are at least so many programs, and none has more than twice what a row has on average, but
    for a row of more than MOST_PARTS such parts. Of many queries there are programs enough: their rows are not split.
    """
    slots, lists = entries * spec.block_size, max(1, spec.num_lists)
    if max(spec.qo_lens, default=0) > 1 and lists >= programs:
        return 1, 1
    # A list names no entry twice: once repeats are dropped, and in a sequence they are illegal.
    longest = min(slots, -(-max(spec.seq_lens, default=0) // spec.block_size) * spec.block_size)
    part = max(LEAST_PART, min(slots // programs, 2 * slots // lists))
    return max(1, min(MOST_PARTS, -(-longest // part))), part


def most_tasks(spec: AttentionSpec, entries: int, splits: int, part: int) -> int:
    """How many tasks there are at most, of such parts of all rows, see `splits_of`."""
    return min(spec.num_lists * splits, spec.num_lists + entries * spec.block_size // part)


def here(device: torch.device) -> tuple[tuple[int, int] | None, str]:
    """Compute capability, None where there is none, and version of Triton."""
    architecture = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return architecture, ".".join(triton.__version__.split(".")[:2])


def tile_for(
    spec: AttentionSpec,
    architecture: tuple[int, int] | None,
    compiler: str,
    *,
    alone: bool = False,
    words: bool = True,
    copied: bool = False,
    apart: bool = False,
) -> Tile:
    """What was measured there for such work, see `work_of`, or the default. `copied`: K and V may be, where a tile lies
    in one piece; `apart`: tokens do not share their lists.
    """
    same_size = padded(spec.head_dim_qk) == padded(spec.head_dim_vo) == MEASURED_DIM and spec.dtype is not DType.FP32
    work = work_of(spec, alone=alone, words=words)
    for tuned in MEASURED:
        if (tuned.architecture, tuned.compiler) == (architecture, compiler) and same_size and work:
            tile = tuned.tiles[Work.COPIED_APART if apart else Work.COPIED]
            return tile if copied and uniform(spec, tile.kv_tile) else tuned.tiles[work]
    return ANYWHERE


def work_of(spec: AttentionSpec, *, alone: bool, words: bool) -> Work | None:
    """What bounds a spec, whose programs have a processor each if they are `alone`, and whose codes are read as
    `words`; None where that was not measured: RoPE, codes that are scaled early, of other formats, of one side only, or
    read one by one, and many heads of a list.
    """
    if spec.rope or (spec.k_codec and not k_late(spec)) or (spec.v_codec and not v_late(spec)):
        return None
    if max(spec.qo_lens, default=0) > 1:
        return Work.PREFILL
    if spec.heads_per_list > MEASURED_HEADS:
        return None
    if spec.k_codec is None and spec.v_codec is None:
        return Work.ALONE if alone else Work.DECODE
    k, v = (codec.format if codec else None for codec in (spec.k_codec, spec.v_codec))
    return Work.CODES if k == v and k in MEASURED_CODES and words else None


def programs(work: int, hints: Hints, device: torch.device) -> int:
    """Programs for `work` tasks: one each, or of those that stay one a processor."""
    if hints.schedule is not Schedule.PERSISTENT:
        return work
    return min(work, processors(device))


def processors(device: torch.device) -> int:
    """That run programs at once."""
    if device.type != "cuda":
        return CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
