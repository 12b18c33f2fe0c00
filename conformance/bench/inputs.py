"""The inputs of a scenario, made on the device: one pool of pages, and several rotations of all that is read from it.

A rotation has its own q, lists and page table. Where one call touches less than `COLD` times the L2, each rotation has
its own pages too, and there are so many of them that what a call reads has left the L2 when its turn comes again; a
call that touches more evicts itself. V lies on a coarse grid and the first query head of each KV head is zero: its
weights are all equal and its sums exact, so that one dropped or doubled candidate shows in the output.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sacts.reference import costs
from sacts.reference.spec import AttentionSpec, CausalRule, Codec, CodecFormat

from ..adapter import Backend, Case, IndexSpace, KVLayout, Refused
from .scenarios import Bound, Scenario, Sizes

L2_BYTES = 50e6  # of the H200
COLD = 4  # times the L2, before anything is read again
LEAST_ROTATIONS = 3
CHUNK = 1 << 26  # elements that are drawn at a time
GRID = 8.0  # V is a multiple of its inverse
LARGEST_V = 4.0
DTYPES = {
    None: torch.bfloat16,
    CodecFormat.INT8: torch.int8,
    CodecFormat.FP8_E4M3FN: torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Lists:
    """The lists of one rotation: kv_indptr [num_rows + 1], kv_indices [nnz], sorted and unique; `attended`: edges."""

    kv_indptr: Tensor
    kv_indices: Tensor
    attended: int


@dataclass(frozen=True)
class Cost:
    """What a call must do by the reference's cost model: bytes of K, V and scales, FLOPs of both products."""

    kv_bytes: float
    flops: int


@dataclass(frozen=True)
class Prepared:
    """A scenario on a device: `cases`, one a rotation, and what each must do at least."""

    scenario: Scenario
    spec: AttentionSpec
    cases: tuple[Case, ...]
    cost: Cost


def seed_of(*words: object) -> int:
    """A seed that depends on these words alone."""
    return zlib.crc32("/".join(map(str, words)).encode())


def prepare(scenario: Scenario, tiny: bool, device: str, backend: Backend) -> Prepared:
    """The cases of a scenario as the backend declares that it takes them. Raises Refused for what is not converted."""
    spec, sizes = scenario.spec(tiny), scenario.sizes(tiny)
    _check(backend, scenario)
    draw = torch.Generator(device).manual_seed(seed_of(scenario.name, "pool"))
    rotations, copies = rotations_of(spec, sizes) if device.startswith("cuda") else (LEAST_ROTATIONS, LEAST_ROTATIONS)
    per_rotation = sum(costs.num_pages(seq_len, spec.page_size) for seq_len in spec.seq_lens)
    num_pages = per_rotation * copies
    k_grid = GRID if spec.k_codec else 0.0
    pools = [
        _pool(spec, codec, num_pages, grid, draw) for codec, grid in ((spec.k_codec, k_grid), (spec.v_codec, GRID))
    ]
    scales = [_scales(spec, codec, num_pages, draw) for codec in (spec.k_codec, spec.v_codec)]
    hnd = backend.capabilities.kv_layout is KVLayout.HND
    laid = [None if x is None else _laid(x, scenario.hnd, hnd) for x in (*pools, *scales)]
    k_cache, v_cache, k_scales, v_scales = laid
    assert k_cache is not None and v_cache is not None
    order = _order(num_pages, sizes, draw)
    cases, attended = [], 0
    for rotation in range(rotations):
        draw = torch.Generator(device).manual_seed(seed_of(scenario.name, "rotation", rotation))
        lists = draw_lists(spec, sizes, scenario.shared, draw)
        attended = lists.attended
        pages = order.roll(-rotation * per_rotation)[:per_rotation]
        tensors = {"k_cache": k_cache, "v_cache": v_cache, "k_scales": k_scales, "v_scales": v_scales}
        cases.append(_case(spec, scenario, lists, pages, tensors, draw))
    return Prepared(scenario, spec, tuple(cases), cost_of(spec, attended, sizes))


def _check(backend: Backend, scenario: Scenario) -> None:
    capabilities = backend.capabilities
    if capabilities.index_space is IndexSpace.PHYSICAL:
        raise Refused("bench converts no lists to physical slots: take logical ids and case.page_table")
    if capabilities.packed_kv:
        raise Refused("bench packs no K and V into one tensor")
    if not capabilities.real_strides and scenario.hnd is not (capabilities.kv_layout is KVLayout.HND):
        raise Refused(f"pages lie as {'HND' if scenario.hnd else 'NHD'}, and the backend takes no strided view of them")


def rotations_of(spec: AttentionSpec, sizes: Sizes) -> tuple[int, int]:
    """How many rotations there are, and how many times the pages of one call the pool has."""
    touched = touched_bytes(spec, sizes)
    if touched >= COLD * L2_BYTES:
        return LEAST_ROTATIONS, 1
    rotations = max(LEAST_ROTATIONS, min(16, int(-(-COLD * L2_BYTES // touched))))
    return rotations, rotations


def touched_bytes(spec: AttentionSpec, sizes: Sizes) -> float:
    """Bytes of K and V that one call touches, each once: of many queries that share keys, no more than the context."""
    own = [
        min(seq_len, qo_len * entries * sizes.block_size)
        for seq_len, qo_len, entries in zip(sizes.seq_lens, sizes.qo_lens, sizes.entries, strict=True)
    ]
    return spec.num_kv_heads * costs.kv_bytes(sum(own), *_dims(spec), *_items(spec))


def _dims(spec: AttentionSpec) -> tuple[int, int]:
    return spec.head_dim_qk, spec.head_dim_vo


def _items(spec: AttentionSpec) -> list[float]:
    return [codec.format.bits / 8 if codec else costs.ITEM_BYTES[spec.dtype] for codec in (spec.k_codec, spec.v_codec)]


def cost_of(spec: AttentionSpec, attended: int, sizes: Sizes) -> Cost:
    """The cost of `attended` edges of candidate rows: every row loads its own K and V (decode), and its scales."""
    moved = costs.kv_bytes(attended, *_dims(spec), *_items(spec))
    pages = sum(
        entries * max(1, sizes.block_size // spec.page_size) for entries in sizes.entries
    )  # selected by each request; fewer where entries share a page
    for codec, head_dim in ((spec.k_codec, spec.head_dim_qk), (spec.v_codec, spec.head_dim_vo)):
        if codec is not None:
            shape = {"page_size": spec.page_size, "heads": spec.num_kv_heads, "head_dim": head_dim}
            moved += costs.scale_bytes(codec.granularity, pages=pages, **shape, item=costs.FP32_BYTES)
    return Cost(moved, costs.flops(attended, *_dims(spec)) * spec.heads_per_list)


def _pool(spec: AttentionSpec, codec: Codec | None, num_pages: int, grid: float, draw: torch.Generator) -> Tensor:
    """K or V of all pages, or their codes: [num_pages, page_size, num_kv_heads, d]; `grid`: on its multiples."""
    dtype, device = DTYPES[codec.format if codec else None], draw.device
    shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim_vo)
    pool = torch.empty(shape, dtype=dtype, device=device)
    flat = pool.view(-1)
    for part in flat.split(CHUNK):
        if dtype is torch.int8:
            part.copy_(torch.randint(-127, 128, part.shape, generator=draw, device=device, dtype=torch.int8))
            continue
        drawn = torch.randn(part.shape, generator=draw, device=device)
        part.copy_((drawn * grid).round_().div_(grid).clamp_(-LARGEST_V, LARGEST_V) if grid else drawn)
    return pool


def _scales(spec: AttentionSpec, codec: Codec | None, num_pages: int, draw: torch.Generator) -> Tensor | None:
    """Scales, powers of two of which neighbours differ: size 1 along the axes that share one."""
    if codec is None:
        return None
    sizes = {"page": num_pages, "token": spec.page_size, "head": spec.num_kv_heads, "dim": spec.head_dim_vo}
    shape = [size if axis in codec.granularity.axes else 1 for axis, size in sizes.items()]
    least = 2.0**-6 if codec.format is CodecFormat.INT8 else 1.0
    return least * 2.0 ** torch.randint(0, 2, shape, generator=draw, device=draw.device).float()


def _laid(pool: Tensor, in_memory: bool, wanted: bool) -> Tensor:
    """[pages, page_size, heads, d] laid as HND where `in_memory`, its dimensions in that order where `wanted`."""
    if in_memory:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    return pool.transpose(1, 2) if wanted else pool


def _order(num_pages: int, sizes: Sizes, draw: torch.Generator) -> Tensor:
    """The physical pages as they are handed out: at random, of contiguous KV in order."""
    if not sizes.page_size:
        return torch.arange(num_pages, device=draw.device)
    return torch.randperm(num_pages, generator=draw, device=draw.device)


def draw_lists(spec: AttentionSpec, sizes: Sizes, shared: bool, draw: torch.Generator) -> Lists:
    """Random lists of `entries` entries a row, fewer where the context has fewer; under a causal rule no entry begins
    behind its query, and the block of the query is among them.
    """
    device, causal = draw.device, spec.causal is not CausalRule.NONE
    request = torch.tensor(spec.token_request, device=device)
    position = torch.tensor(spec.token_position, device=device)
    seq_lens = torch.tensor(spec.seq_lens, device=device)
    first = torch.arange(0, spec.num_tokens, sizes.query_block, device=device)  # a token of each list
    heads = 1 if shared else spec.list_heads
    of_list = first.repeat_interleave(heads)
    last = position[of_list] if causal else seq_lens[request[of_list]] - 1
    blocks = last // spec.block_size + 1
    wanted = torch.minimum(torch.tensor(sizes.entries, device=device)[request[of_list]], blocks)
    chosen = _choose(blocks, wanted, causal, draw)
    rows = torch.arange(spec.num_rows, device=device)
    token, head = rows // spec.list_heads, rows % spec.list_heads
    mine = token // sizes.query_block * heads + (0 if shared else head)
    indptr = torch.cat((wanted.new_zeros(1), wanted[mine].cumsum(0)))
    indices = chosen[mine][torch.arange(chosen.shape[1], device=device) < wanted[mine][:, None]]
    end = torch.minimum(seq_lens[request[token]], position[token] + 1) if causal else seq_lens[request[token]]
    seen = (end.repeat_interleave(wanted[mine]) - indices * spec.block_size).clamp(0, spec.block_size)
    return Lists(indptr.int(), indices.int(), int(seen.sum()))


def _choose(blocks: Tensor, wanted: Tensor, with_last: bool, draw: torch.Generator) -> Tensor:
    """`wanted` of `blocks` numbers of each list, sorted: [lists, most wanted], junk behind them."""
    most, width = int(wanted.max()), int(blocks.max())
    chosen = torch.empty(len(blocks), most, dtype=torch.int64, device=blocks.device)
    number = torch.arange(width, device=blocks.device)
    for at in range(0, len(blocks), max(1, CHUNK // width)):
        some = slice(at, at + max(1, CHUNK // width))
        weight = torch.rand(len(blocks[some]), width, generator=draw, device=blocks.device)
        weight[number >= blocks[some, None]] = -1.0
        if with_last:
            weight[number == blocks[some, None] - 1] = 2.0
        best = weight.topk(most, dim=1).indices
        best[torch.arange(most, device=blocks.device) >= wanted[some, None]] = width
        chosen[some] = best.sort(dim=1).values
    return chosen


def _case(
    spec: AttentionSpec,
    scenario: Scenario,
    lists: Lists,
    pages: Tensor,
    caches: dict[str, Any],
    draw: torch.Generator,
) -> Case:
    device = draw.device
    q = torch.randn(spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk, generator=draw, device=device)
    q[:, :: spec.group_size] = 0
    counts = [costs.num_pages(seq_len, spec.page_size) for seq_len in spec.seq_lens]
    table = torch.zeros(spec.num_requests, max(counts), dtype=torch.int32, device=device)
    held = torch.arange(max(counts), device=device) < torch.tensor(counts, device=device)[:, None]
    table[held] = pages.int()
    shape = (spec.num_tokens, spec.num_qo_heads)
    whole: dict[str, Any] = {
        name: torch.tensor(getattr(spec, name), dtype=torch.int32, device=device) for name in _WHOLE
    }
    return Case(
        spec=spec,
        hints=scenario.hints,
        q=q.bfloat16(),
        page_table=table,
        kv_indptr=lists.kv_indptr,
        kv_indices=lists.kv_indices,
        out=torch.full((*shape, spec.head_dim_vo), torch.nan, dtype=torch.bfloat16, device=device),
        lse=torch.full(shape, torch.nan, device=device),
        workspace=torch.empty(0, dtype=torch.uint8, device=device),
        **whole,
        **caches,
    )


_WHOLE = ("seq_lens", "qo_indptr")


def work_of(prepared: Prepared) -> float:
    """What a call does in the unit that bounds its scenario: bytes or FLOPs."""
    cost = prepared.cost
    return cost.kv_bytes if prepared.scenario.bound is Bound.BYTES else cost.flops
