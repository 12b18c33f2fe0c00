"""What the axes of a cell beyond the plain row say of its spec: position coding, soft cap, sink, dropout, candidate
kind, empty rows, codecs, epilogue. Learned numbers are drawn for the cell, exact in FP32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sacts.matrices.cell import Cell
from sacts.reference.scores import t5_buckets
from sacts.reference.spec import (
    CandidateKind,
    Codec,
    CodecFormat,
    Dropout,
    DType,
    EmptyRowRule,
    Epilogue,
    EpilogueKind,
    Nonlinearity,
    RelativeBuckets,
    RoPE,
    RopeLayout,
    ScaleGranularity,
)

from .draw import Array, Draw

NUM_BUCKETS, FARTHEST = 8, 64
FIRST_SLOPE = 4  # octaves below 1 of the steepest ALiBi slope; the last head has twice as many
STEEP = 96  # keys up to which it is so steep; of more the farthest would weigh nothing that anyone could see
SPREAD = 3.0  # between the largest and the smallest bias of a head's buckets at most, for the same reason
LOW_BITS, LOW_SCALE = 8, 2.0**-6


def terms_of(cell: Cell, draw: Draw) -> dict[str, Any]:
    """The fields of `AttentionSpec` that the term axes decide. `draw`: for the learned numbers and dropout's seed."""
    return {
        **_positional(cell, draw),
        "logits_soft_cap": float(cell.cap),
        "sink_logits": tuple(_numbers(draw, cell.heads[0]).tolist()) if cell.sink == "on" else (),
        "dropout": _dropout(cell, draw) if cell.dropout else None,
        "candidate_kind": CandidateKind(cell.kind),
        "empty_row": EmptyRowRule(cell.empty),
        "epilogue": _epilogue(cell),
        "k_codec": _codec(cell, cell.kcodec),
        "v_codec": _codec(cell, cell.vcodec),
    }


def _numbers(draw: Draw, *shape: int) -> Array:
    return draw.normal(shape).astype(np.float32).astype(np.float64)


def _positional(cell: Cell, draw: Draw) -> dict[str, Any]:
    heads = cell.heads[0]
    if cell.pos == "rope":
        return {"rope": RoPE(cell.dim)}
    if cell.pos == "rope-interleaved":
        return {"rope": RoPE(cell.dim // 2, layout=RopeLayout.INTERLEAVED)}
    if cell.pos == "alibi":
        octaves = FIRST_SLOPE + max(0, math.ceil(math.log2(max(*cell.kv, 1) / STEEP)))
        return {"alibi_slopes": tuple(2.0 ** -(octaves + FIRST_SLOPE * head / heads) for head in range(heads))}
    if cell.pos == "buckets":
        first = t5_buckets(NUM_BUCKETS, FARTHEST)
        bias = tuple(tuple(row) for row in _narrowed(_numbers(draw, heads, len(first))).tolist())
        return {"buckets": RelativeBuckets(first, bias)}
    return {}


def _narrowed(bias: Array) -> Array:
    """The biases [heads, buckets], those of each head brought closer where they lie more than SPREAD apart."""
    share = np.minimum(1.0, SPREAD / np.ptp(bias, axis=1, keepdims=True))
    narrowed: Array = (share * bias).astype(np.float32).astype(np.float64)
    return narrowed


def _dropout(cell: Cell, draw: Draw) -> Dropout:
    """Uids of requests that are neither their places in the batch nor in their order."""
    uids = tuple((100 + 7 * draw.permutation(len(cell.kv))).tolist())
    return Dropout(cell.dropout / 100, draw.integer(2**32, 2**63), uids)


def _codec(cell: Cell, name: str) -> Codec | None:
    if name == "none":
        return None
    stored = CodecFormat(name)
    asymmetric = cell.zeros == "on" and stored.integer
    return Codec(stored, ScaleGranularity(cell.scales), cell.steps == "power_of_two", asymmetric)


def _epilogue(cell: Cell) -> Epilogue:
    if cell.epilogue == "cast":
        other = DType.BF16 if cell.dtype == DType.FP16 else DType.FP16
        return Epilogue(EpilogueKind.CAST, other)
    if cell.epilogue == "low_bit":
        return Epilogue(EpilogueKind.LOW_BIT, bits=LOW_BITS, scale=LOW_SCALE)
    if cell.epilogue in ("none", "gate"):
        return Epilogue(EpilogueKind(cell.epilogue))
    return Epilogue(EpilogueKind.NONLINEAR, function=Nonlinearity(cell.epilogue))
