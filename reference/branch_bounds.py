"""How much error the sum of gated branches may carry: docs/bounds.md section 14."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .bounds import FLUSH, U64, Expected, through_epilogue
from .formats import round_to
from .logit_bounds import gamma
from .numerics import Numerics
from .spec import Epilogue

Array = NDArray[np.float64]

NO_EPILOGUE = Epilogue()


def gated(
    parts: Sequence[Expected],
    gates: Array,
    numerics: Numerics,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    gate: Array | None = None,
) -> Expected:
    """What sum_b gates[..., b] * out_b may be, behind the epilogue: `parts` are the branches, before any epilogue and
    with the rounding to a partial output that `numerics.branched` adds; gates [tokens, heads, branches]. `gate`: of the
    epilogue, as in `forward`. The sum has no lse: NaN, with an infinite bound.

    Raises ValueError for gates of another shape.
    """
    shape = (*parts[0].lse.shape, len(parts))
    if gates.shape != shape:
        raise ValueError(f"gates must be {shape} (tokens, query heads, branches), got {gates.shape}")
    trusted = np.all([part.trusted for part in parts], axis=0)
    sizes = np.abs(gates)
    out, moved, size = (np.zeros_like(parts[0].out) for _ in range(3))
    for branch, part in enumerate(parts):
        width = np.where(trusted[..., None], part.half_width, 0.0)
        out += gates[..., branch, None] * part.out
        moved += sizes[..., branch, None] * width
        size += sizes[..., branch, None] * (np.abs(part.out) + width)
    n = len(parts) + 1  # a product is one more rounding, before the sum or within it
    half_width = moved + (gamma(n) + (n + 1) * U64) * size + n * FLUSH
    half_width[~trusted] = np.inf
    out, half_width, low, high = through_epilogue(epilogue, out, half_width, gate, numerics)
    lse = np.full(parts[0].lse.shape, np.nan)
    return Expected(
        out,
        half_width,
        round_to(low, numerics.out),
        round_to(high, numerics.out),
        lse,
        np.full_like(lse, np.inf),
        np.sum([part.edges for part in parts], axis=0),
        trusted,
    )
