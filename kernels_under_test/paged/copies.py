"""Tiles that the processor copies by a description of where K and V lie, and no address of a slot is computed: which
cases allow that, and the memory of descriptions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sacts.conformance.adapter import Case
from sacts.reference.spec import AttentionSpec, EmptyRowRule, Hints, Route

from .limits import INTERPRETED, uniform
from .tables import padded

ALIGNMENT = 16  # bytes: of addresses and strides
MOST_EXTENT = 256  # slots and channels of a tile
DESCRIPTION_BYTES = 128  # of K, and as many of V, in each program


def describable(spec: AttentionSpec, hints: Hints) -> bool:
    """Whether tiles that lie in one piece may be copied so: values of one page a request, of which some query sees all
    up to one token, so that what must not be loaded comes as 0. Codes are loaded as words, RoPE pairs channels, a
    window begins late, a forced row sees one token alone, scratch has no page. Decode has nothing to gain
    (docs/measurements.md).
    """
    return (
        max(spec.qo_lens, default=0) > 1
        and not (spec.k_codec or spec.v_codec or spec.rope)
        and spec.window_left < 0
        and spec.empty_row is EmptyRowRule.ZERO
        and hints.route is Route.DIRECT
        and max(spec.seq_lens, default=0) <= spec.page_size
        and max(padded(spec.head_dim_qk), padded(spec.head_dim_vo)) <= MOST_EXTENT
    )


def copied(case: Case, tile: int) -> bool:
    """Whether tiles of so many slots are copied so, as far as a plan knows; for its caches see `aligned`."""
    spec = case.spec
    able = copies(case.q.device) and describable(spec, case.hints)
    return able and uniform(spec, tile) and tile <= MOST_EXTENT


def aligned(case: Case) -> bool:
    """Whether K and V lie as a description takes them."""
    return all(_aligned(cache) for cache in (case.k_cache, case.v_cache))


def _aligned(cache: Tensor) -> bool:
    *outer, innermost = cache.stride()
    size = cache.element_size()
    places = cache.data_ptr(), *(stride * size for stride in outer)
    return innermost == 1 and all(place % ALIGNMENT == 0 for place in places)


def copies(device: torch.device) -> bool:
    """Whether the processor can; the interpreter does."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def memory_for(programs: int, device: torch.device) -> Tensor:
    """For the descriptions of so many programs at once: uint8."""
    return torch.empty(programs * 2 * DESCRIPTION_BYTES, dtype=torch.uint8, device=device)
