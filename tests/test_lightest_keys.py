"""Under a bias the lightest key of a long row still shows: its loss is seen, in cells whose formats hide the most."""

from __future__ import annotations

import pytest

from sacts.conformance.adapter import Backend
from sacts.conformance.build import build
from sacts.conformance.gates.intervals import largest, lse_use
from sacts.conformance.gates.witnesses import used
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.copies import Copy, copies
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.emulation.arithmetic import Arithmetic
from sacts.kernels_under_test.faults import ModelFault, seed
from sacts.matrices.cell import parse
from sacts.reference.spec import DType

CELLS = {
    "prefill/fp16/kv:127+40/q:5+3/dim:128/vdim:64/page:128/block:16/pattern:all/tile:32/values:equal/pos:alibi"
    "/vcodec:int4/scales:head/epilogue:silu/branches:2": 0,
    "prefill/fp16/kv:128+40/q:2+2/heads:8-1/dim:128/vdim:64/page:1/pattern:all/map:alias/cache:strided/tile:128"
    "/values:huge/pos:alibi/kind:sequence/kcodec:fp8_e5m2/vcodec:fp8_e5m2/scales:token_head/epilogue:relu": 0,
    "prefill/fp32/kv:128+40/q:5+3/heads:7-1/dim:128/vdim:64/page:64/block:16/pattern:union/splits:8/tile:128"
    "/values:huge/pos:alibi/empty:force_self/kcodec:fp8_e4m3fn/vcodec:int8/scales:token_head/epilogue:low_bit"
    "/schedule:shuffled/route:gather_heads/branches:2": 0,
    "decode/fp16/kv:129+40/dim:192/vdim:128/pattern:all/splits:8/tile:128/values:equal/pos:buckets/kind:multiset"
    "/vcodec:fp8_e4m3fn/scales:page/epilogue:silu/lists:query_head": 100,  # 16 to 31 behind the query: a light bucket
}
COMPILED = {d: Arithmetic(p=d, out=d, rotated=d, reconstructed=d, tile=16) for d in DType}


def losing(token: int) -> type:
    """The model without one mention of a token in every row of more than 64."""
    fault = ModelFault(
        name=f"token_{token}_lost_in_long_rows",
        stands_for="one key of a long row is lost",
        file="rows.py",
        find="    times = Counter(tokens)\n",
        replace=f"    len(tokens) > 64 and {token} in tokens and tokens.remove({token})\n    times = Counter(tokens)\n",
        problem="",
        outputs=("count",),
    )
    found: type = seed(fault)
    return found


def count_copy(cell: str) -> Copy:
    problem = build(parse(cell))
    numerics = Backend(Adapter(COMPILED)).numerics(problem.spec.dtype, problem.hints, problem.branches)
    return next(copy for copy in copies(problem, numerics) if "count" in copy.margin)


def use_of(copy: Copy, adapter: type) -> float:
    seen = Launcher(Backend(adapter(COMPILED)), "cpu")(copy.problem, copy.inputs)
    return max(used(copy, seen, "count"), largest(lse_use(copy.expected, seen)))


@pytest.mark.parametrize("cell", CELLS, ids=range(len(CELLS)))
def test_the_loss_of_the_lightest_key_of_a_long_row_is_seen(cell: str) -> None:
    copy = count_copy(cell)
    assert copy.lse_margin is not None
    for out, lse in zip(copy.margin["count"], copy.lse_margin, strict=True):
        assert max(out, lse) > 1.5  # a row whose lightest key does not show makes the case untrusted
    assert use_of(copy, Adapter) <= 1
    assert use_of(copy, losing(CELLS[cell])) > 1
