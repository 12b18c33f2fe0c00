"""How large tiles may be, which heads a program serves, and how kernels are compiled for them."""

from __future__ import annotations

import os

from sacts.reference.spec import AttentionSpec, Codec, DType, Route, ScaleGranularity

from .tables import padded

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TILE_BYTES = 64 << 10  # of K and V together in one tile: beyond it registers spill, and shared memory ends at 227 KiB
ROW_BYTES = 64 << 10  # of q and out of all lanes of a program
Q_BYTES = 128 << 10  # of q of the heads of one token in a program, in shared memory
O_BYTES = 64 << 10  # of their out, FP32, which goes through it
WIDE = 512  # channels of K and V, padded, beyond which the copies that a pipeline makes of a tile do not fit
STAGED_BYTES = 192 << 10  # of all tiles that are on their way


def heads_of(spec: AttentionSpec, route: Route) -> int:
    """Query heads that one program serves: those of a list, or as large a part of them as leaves shared memory for
    tiles.
    """
    if route is Route.GATHER_HEADS:
        return 1
    lanes = min(Q_BYTES // (_size(spec) * padded(spec.head_dim_qk)), O_BYTES // (4 * padded(spec.head_dim_vo)))
    parts = (n for n in range(1, spec.heads_per_list + 1) if spec.heads_per_list % n == 0)
    return max(n for n in parts if n == 1 or padded(n) <= lanes)


def programs_of(spec: AttentionSpec, route: Route) -> int:
    """How many programs share a task, each with heads of its own."""
    return spec.heads_per_list // heads_of(spec, route)


def q_tile_of(spec: AttentionSpec, route: Route, wanted: int) -> int:
    """Query tokens that one program serves where they have one list: no more than leave registers for their q and out,
    of a power of two of lanes.
    """
    lanes = ROW_BYTES // (_size(spec) * (padded(spec.head_dim_qk) + padded(spec.head_dim_vo)))
    lanes = 1 << (lanes.bit_length() - 1)
    return max(1, min(wanted, lanes // heads_of(spec, route)))


def _size(spec: AttentionSpec) -> int:
    """What an element of q and out counts for, in bytes: of FP32, which is multiplied without tensor cores, more."""
    return 8 if spec.dtype is DType.FP32 else 2


def tile_of(spec: AttentionSpec, hint: int) -> int:
    """Slots in a tile: the hint, on a GPU at most as many as leave shared memory for K and V of a tile."""
    if not INTERPRETED:
        early = (spec.k_codec and not k_late(spec)) or (spec.v_codec and not v_late(spec))
        fp32 = spec.dtype is DType.FP32 or spec.rope or early  # on their way to tl.dot
        size = 4 if fp32 else 2
        hint = min(hint, TILE_BYTES // (size * (padded(spec.head_dim_qk) + padded(spec.head_dim_vo))))
    return max(16, 1 << (max(hint, 1).bit_length() - 1))


def k_late(spec: AttentionSpec) -> bool:
    """Whether codes of K go into the product, whose operands hold them exactly, and what comes out of it is scaled. Not
    behind RoPE: two codes that are added may exceed what FP16 holds.
    """
    return _one_scale(spec.k_codec) and not spec.rope


def v_late(spec: AttentionSpec) -> bool:
    """The same of V, where P takes the scale before it is cast: times a small one it would fall out of FP16."""
    return _one_scale(spec.v_codec) and spec.dtype is not DType.FP16


def _one_scale(codec: Codec | None) -> bool:
    """Whether all channels of a token have one scale, and no zero point."""
    return codec is not None and not codec.asymmetric and not by_channel(codec)


def by_channel(codec: Codec) -> bool:
    """Whether channels of a token have scales of their own."""
    return codec.granularity in (ScaleGranularity.CHANNEL, ScaleGranularity.PAGE_CHANNEL)


def uniform(spec: AttentionSpec, tile: int) -> bool:
    """Whether the slots of a tile lie in one entry and on one page, so that both are looked up once."""
    return spec.block_size % tile == 0 and spec.page_size % tile == 0


def options(spec: AttentionSpec, lanes: int, tile: int, *, traced: bool = False) -> dict[str, int]:
    """How a kernel is compiled: with as many tiles on their way at once, 3 at most, as shared memory holds of what they
    load, beside the state that is `traced`; wide heads, and many `lanes`, with more warps.
    """
    size = 4 if spec.dtype is DType.FP32 else 2
    k, v = (_loaded(codec, size) for codec in (spec.k_codec, spec.v_codec))
    turns = 4 if spec.rope else 0  # half a cosine and half a sine a channel
    loaded = tile * ((k + turns) * padded(spec.head_dim_qk) + v * padded(spec.head_dim_vo))
    room = STAGED_BYTES - traced * 4 * lanes * padded(spec.head_dim_vo)
    if padded(spec.head_dim_qk) + padded(spec.head_dim_vo) > WIDE:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_warps": 8 if lanes >= 128 else 4, "num_stages": max(1, min(3, room // loaded))}


def _loaded(codec: Codec | None, size: int) -> int:
    """Bytes that one channel of a slot loads: what is stored, and a scale and zero point where channels have any."""
    if codec is None:
        return size
    return 1 + 4 * by_channel(codec) * (1 + codec.asymmetric)
