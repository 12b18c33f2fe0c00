"""What the bundled adapter does with hints, plans and workspaces, as JSON: run by test_kernel_tasks.py in a process of
its own, because TRITON_INTERPRET binds when a kernel is decorated.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from hashlib import blake2b
from itertools import product
from typing import Any

import torch

from sacts.conformance import tensors
from sacts.conformance.adapter import Backend, Case, Refused
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged import limits
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.paged.copies import aligned
from sacts.matrices.cell import parse
from sacts.reference.spec import CausalRule, Route, Schedule

GATHERS = (Route.GATHER, Route.GATHER_HEADS)


def bits(launcher: Launcher, cell: str) -> dict[str, str]:
    """A hash of out and lse, by schedule and route."""
    problem = build(parse(cell))
    found = {}
    ways = [*((schedule, Route.DIRECT) for schedule in Schedule), *((Schedule.PERSISTENT, route) for route in GATHERS)]
    for schedule, route in ways:
        hints = replace(problem.hints, schedule=schedule, route=route)
        seen = launcher(problem, RANDOM.inputs(problem), hints=hints)
        assert seen.lse_bits is not None
        both = seen.out_bits.tobytes() + seen.lse_bits.tobytes()
        found[f"{schedule} {route}"] = blake2b(both, digest_size=8).hexdigest()
    return found


def sized(adapter: Adapter, case: Case, extra: int) -> dict[str, Any]:
    """A run in a workspace that is `extra` bytes larger than was asked for: what it did, or how it was refused."""
    asked = adapter.workspace_bytes(case)
    workspace = tensors.Guarded.make((asked + extra,), torch.uint8, "cpu")
    workspace.inner.fill_(0xFF)
    before = case.lse.clone()
    try:
        adapter.run(replace(case, workspace=workspace.inner))
    except Refused as refused:
        untouched = torch.equal(case.lse, before) and bool((workspace.inner == 0xFF).all())
        return {"asked": asked, "refused": str(refused), "untouched": untouched}
    return {"asked": asked, "broken": workspace.broken(), "sum": float(case.lse.double().sum())}


def repacked(case: Case, axis: str, *, low_first: bool) -> Case:
    """The same codes of K and V, bytes of two along dim and the first in the low nibble, packed otherwise."""
    place = {"dim": 3, "token": 1}[axis]

    def turned(cache: torch.Tensor, length: int) -> torch.Tensor:
        codes = torch.stack((cache & 15, cache >> 4), dim=-1).flatten(3)[..., :length].movedim(place, -1)
        codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
        first, second = codes[..., 0::2], codes[..., 1::2]
        packed = first | second << 4 if low_first else second | first << 4
        return packed.movedim(-1, place).contiguous()

    codecs = [
        replace(codec, nibble_axis=axis, low_nibble_first=low_first)
        for codec in (case.spec.k_codec, case.spec.v_codec)
        if codec is not None
    ]
    return replace(
        case,
        spec=replace(case.spec, k_codec=codecs[0], v_codec=codecs[1]),
        k_cache=turned(case.k_cache, case.spec.head_dim_qk),
        v_cache=turned(case.v_cache, case.spec.head_dim_vo),
    )


def packings(adapter: Adapter, case: Case) -> dict[str, str]:
    """A hash of out and lse, by how int4 is packed and by route."""
    found = {}
    for axis, low_first in product(("dim", "token"), (True, False)):
        other = repacked(case, axis, low_first=low_first)
        for route in Route:
            other = replace(other, hints=replace(other.hints, route=route))
            space = torch.empty(adapter.workspace_bytes(other), dtype=torch.uint8)
            outputs = adapter.run(replace(other, workspace=space))
            assert outputs.lse is not None
            both = outputs.out.view(torch.uint8).numpy().tobytes() + outputs.lse.numpy().tobytes()
            found[f"{axis} {low_first} {route}"] = blake2b(both, digest_size=8).hexdigest()
    return found


def together_and_apart(adapter: Adapter, case: Case) -> list[Any]:
    """out and lse, where queries that have one list share tiles, and where they do not: equal or not, and finite or
    not.
    """
    found = []
    for q_tile in (case.spec.num_tokens, 1):
        asked = replace(case, hints=replace(case.hints, q_tile=q_tile), out=case.out.clone(), lse=case.lse.clone())
        space = torch.empty(adapter.workspace_bytes(asked), dtype=torch.uint8)
        outputs = adapter.run(replace(asked, workspace=space))
        found.append((outputs.out.float(), asked.lse))
    (out, lse), (out_apart, lse_apart) = found
    same = torch.allclose(out, out_apart, rtol=0.01, atol=1e-3) and torch.allclose(lse, lse_apart, rtol=1e-5)
    return [same, bool(out.isfinite().all())]


def between_windows(adapter: Adapter, launcher: Launcher) -> list[Any]:
    """Queries far from each other, and NaN in V where none of their windows reaches."""
    problem = build(parse("prefill/bf16/kv:60/q:4/block:64/pattern:all/causal:bottom_right/window:3"))
    case = launcher.case(problem, RANDOM.inputs(problem), problem.hints)
    spec = replace(case.spec, causal=CausalRule.ABSOLUTE, query_positions=(5, 50, 6, 51))
    page, offset = divmod(30, spec.page_size)
    case.v_cache[case.page_table[0, page], offset] = torch.nan
    return together_and_apart(adapter, replace(case, spec=spec))


def widest_window(adapter: Adapter, launcher: Launcher) -> list[Any]:
    """Queries that stand before the first key, and a window as wide as 32 bits hold."""
    problem = build(parse("prefill/bf16/kv:9/q:12/block:64/pattern:all/causal:bottom_right/window:5"))
    case = launcher.case(problem, RANDOM.inputs(problem), problem.hints)
    return together_and_apart(adapter, replace(case, spec=replace(case.spec, window_left=2**31 - 1)))


def far_heads(adapter: Adapter, launcher: Launcher) -> int:
    """How many results the routes have where KV heads lie so far apart that the last one begins beyond 2^31 elements.
    What nobody touches costs address space only.
    """
    problem = build(parse("decode/fp16/kv:20+9/heads:3-3"))
    case = launcher.case(problem, RANDOM.inputs(problem), problem.hints)

    def spread(cache: torch.Tensor) -> torch.Tensor:
        pages, tokens, heads, dim = cache.shape
        apart = 2**31 // (heads - 1) + 16
        storage = tensors.storage((heads - 1) * apart + pages * tokens * dim, cache.dtype, "cpu")
        wide = storage.as_strided(cache.shape, (tokens * dim, dim, apart, 1))
        wide.copy_(cache)
        return wide

    case = replace(case, k_cache=spread(case.k_cache), v_cache=spread(case.v_cache))
    found = set()
    for route in Route:
        asked = replace(case, hints=replace(case.hints, route=route))
        space = torch.empty(adapter.workspace_bytes(asked), dtype=torch.uint8)
        adapter.run(replace(asked, workspace=space))
        found.add(case.out.view(torch.uint8).numpy().tobytes())
    return len(found)


def parts_of_heads(adapter: Adapter, launcher: Launcher) -> list[Any]:
    """Whether one program that serves the heads of a list and several, whatever the route, get the same; and how many
    programs those were. To a step of out and of FP32: how many rows a product has shows in the last bit of some BLAS.
    """
    problem = build(parse("decode/bf16/kv:90+9/heads:96-1/dim:32/splits:2/tile:32/pos:rope/sink:on"))
    results, programs, whole = [], [], limits.Q_BYTES
    for limits.Q_BYTES in (whole, 2 * 32 * 32):
        case = launcher.case(problem, RANDOM.inputs(problem), problem.hints)
        programs.append(limits.programs_of(case.spec, Route.DIRECT))
        for route in Route:
            asked = replace(case, hints=replace(case.hints, route=route))
            space = torch.empty(adapter.workspace_bytes(asked), dtype=torch.uint8)
            adapter.run(replace(asked, workspace=space))
            results.append((case.out.double(), case.lse.double()))
    limits.Q_BYTES = whole
    (out, lse), *others = results
    same = [
        torch.allclose(o, out, rtol=2**-7, atol=1e-6) and torch.allclose(lse_, lse, rtol=1e-6, atol=1e-6)
        for o, lse_ in others
    ]
    return [len(same), all(same), programs]


def before_the_first_key(adapter: Adapter, launcher: Launcher) -> list[Any]:
    """Queries that see no key, under a sink, beside V that is NaN throughout: whether tiles are copied, whether all of
    their rows are 0, and how many are.
    """
    problem = build(parse("prefill/fp32/kv:4/q:12/page:64/block:16/causal:bottom_right/tile:16/sink:on/qtile:4"))
    case = launcher.case(problem, RANDOM.inputs(problem), problem.hints)
    case.v_cache.fill_(torch.nan)
    case = replace(case, workspace=torch.empty(adapter.workspace_bytes(case), dtype=torch.uint8))
    plan = adapter.plan(case)
    blind = torch.tensor(case.spec.token_position) < 0
    return [plan.descriptions is not None, bool((adapter.run(case, plan).out[blind] == 0).all()), int(blind.sum())]


def without_pages(adapter: Adapter, launcher: Launcher) -> list[Any]:
    """A request of no keys, whose page table has no column: whether tiles are copied, and whether out is 0."""
    problem = build(parse("prefill/bf16/kv:0/q:3/page:64/block:16/tile:16"))
    case = launcher.case(problem, RANDOM.inputs(problem), problem.hints)
    space = torch.empty(adapter.workspace_bytes(case), dtype=torch.uint8)
    case = replace(case, page_table=case.page_table[:, :0].clone(), workspace=space)
    plan = adapter.plan(case)
    return [plan.descriptions is not None, bool((adapter.run(case, plan).out == 0).all())]


COPIED = (
    "prefill/bf16/kv:100+37/q:9+3/page:128/block:32/pattern:all/causal:bottom_right/tile:32/qtile:4",
    "prefill/fp16/kv:100+37+1/q:4+2+1/page:128/block:32/pattern:all/splits:2/tile:16/pos:alibi/cap:20/sink:on",
    "prefill/bf16/kv:90+50/q:5+3/heads:7-1/dim:80/page:128/block:16/map:high/tile:16",
    "prefill/bf16/kv:70+37/q:4+2/page:128/block:32/pattern:all/causal:bottom_right/tile:32/branches:2",
)


def copied_and_loaded(adapter: Adapter, launcher: Launcher) -> list[Any]:
    """Tiles that are copied by descriptions and tiles that are loaded, by cell: whether both were, whether the bits are
    the same, and whether out is finite though NaN stands in V behind each request.
    """
    found = []
    for cell in COPIED:
        problem = build(parse(cell))
        case = launcher.case(problem, RANDOM.inputs(problem), problem.hints)
        for request, seq_len in enumerate(case.spec.seq_lens):
            case.v_cache[case.page_table[request, 0], seq_len:] = torch.nan
        case = replace(case, workspace=torch.empty(adapter.workspace_bytes(case), dtype=torch.uint8))
        apart = torch.zeros(case.k_cache.numel() + 1, dtype=case.k_cache.dtype)[1:].view(case.k_cache.shape)
        plan, bits = adapter.plan(case), []
        for k_cache in (case.k_cache, apart.copy_(case.k_cache)):
            outputs = adapter.run(replace(case, k_cache=k_cache), plan)
            assert outputs.lse is not None
            bits.append(outputs.out.view(torch.uint8).numpy().tobytes() + outputs.lse.numpy().tobytes())
        both = plan.descriptions is not None and aligned(case) and not aligned(replace(case, k_cache=apart))
        found.append([both, bits[0] == bits[1], bool(case.out.isfinite().all())])
    return found


def nans(adapter: Adapter, case: Case) -> list[bool]:
    """Whether out and lse are NaN wherever a row attends anything, all of K being NaN: rows do not become empty."""
    space = torch.empty(adapter.workspace_bytes(case), dtype=torch.uint8)
    outputs = adapter.run(replace(case, k_cache=torch.full_like(case.k_cache, torch.nan), workspace=space))
    lengths = adapter.plan(case).kv_indptr.diff()
    attends = (lengths > 0).repeat_interleave(case.spec.heads_per_list).view(case.lse.shape)
    assert outputs.lse is not None
    found = [x.isnan() for x in (outputs.out.float().sum(-1), outputs.lse)]
    return [torch.equal(x, attends) for x in found]


def main(cells: list[str]) -> None:
    adapter = Adapter()
    launcher = Launcher(Backend(adapter), "cpu")
    for cell in cells:
        problem = build(parse(cell))
        inputs = RANDOM.inputs(problem)
        cases = [launcher.case(problem, inputs, replace(problem.hints, route=route)) for route in Route]
        said = {
            "cell": cell,
            "bits": bits(launcher, cell),
            "nans": nans(adapter, cases[0]) if cases[0].k_cache.is_floating_point() else [],
            "packings": packings(adapter, cases[0]) if "kcodec:int4/vcodec:int4" in cell else {},
            "sized": [[sized(adapter, case, extra) for extra in (0, 5, -1)] for case in cases[:2]],
        }
        print(json.dumps(said), flush=True)
    edges = (
        between_windows,
        widest_window,
        far_heads,
        parts_of_heads,
        before_the_first_key,
        without_pages,
        copied_and_loaded,
    )
    for edge in edges:
        print(json.dumps({"cell": edge.__name__, "found": edge(adapter, launcher)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
