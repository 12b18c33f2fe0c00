"""What the bundled adapter makes of gated branches, a line of JSON for each cell: run by test_kernel_branches.py in a
process of its own, because TRITON_INTERPRET binds when a kernel is decorated.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import launched_kernels
import numpy as np
import torch
from torch import Tensor

from sacts.conformance.adapter import Backend, Case, Trace
from sacts.conformance.branches import drawn_gates, tokens_of
from sacts.conformance.build import Problem, build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.rows import branches_of
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.matrices.cell import parse
from sacts.reference import epilogues
from sacts.reference.forward import forward
from sacts.reference.spec import Epilogue

FIELDS = ("tokens", "logits", "m", "l", "o")


def with_workspace(adapter: Adapter, case: Case) -> Case:
    """The case with fresh outputs and a workspace full of NaN."""
    workspace = torch.full((adapter.workspace_bytes(case),), 0xFF, dtype=torch.uint8)
    out, lse = torch.full_like(case.out, torch.nan), torch.full_like(case.lse, torch.nan)
    return replace(case, workspace=workspace, out=out, lse=lse)


def exact(problem: Problem, gates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of the call by the FP64 reference: each branch by itself, gated and added in FP64."""
    inputs, plain = RANDOM.inputs(problem), replace(problem.spec, epilogue=Epilogue())
    found = forward(plain, inputs, problem.table, problem.candidates)
    tokens = [tokens_of(problem.spec, problem.branches, branch) for branch in range(problem.branches)]
    out = sum(gates[..., branch, None] * found.out[mine] for branch, mine in enumerate(tokens))
    out, _ = epilogues.apply(problem.spec.epilogue, out, np.zeros_like(out), None)
    return out, np.stack([found.lse[mine] for mine in tokens], axis=-1)


def distance(found: Tensor, right: np.ndarray) -> float:
    """The largest difference, infinity where -inf does not meet -inf."""
    seen = found.double().numpy()
    same = (seen == right) | (np.abs(seen - right) < np.inf)
    return float(np.where(same, np.abs(np.where(seen == right, 0.0, seen - right)), np.inf).max())


def alone(adapter: Adapter, case: Case) -> list[tuple[Tensor, Trace]]:
    """lse, and the trace, of each branch as a call of its own without branches."""
    found = []
    for each in branches_of(replace(case, gates=None)):
        first, last = int(each.kv_indptr[0]), int(each.kv_indptr[-1])
        lists = {"kv_indptr": each.kv_indptr - first, "kv_indices": each.kv_indices[first:last]}
        own = with_workspace(adapter, replace(each, **lists, lse=torch.empty_like(case.lse[..., 0])))
        lse = adapter.run(own).lse
        assert lse is not None
        found.append((lse, adapter.trace(own)))
    return found


def same_traces(whole: Trace, parts: list[Trace]) -> bool:
    """Whether the rows of a trace are those of its branches, one branch behind another; longer rows may pad more."""
    at = 0
    for part in parts:
        rows = part.tokens.shape[0]
        for name in FIELDS:
            mine, own = getattr(whole, name)[at : at + rows], getattr(part, name)
            cut = tuple(slice(size) for size in own.shape)
            tiles = (part.splits >= 0)[:, None] if name in ("m", "l", "o") else (part.tokens >= 0)
            there = tiles[:, None] if name == "logits" else tiles
            there = there[..., None] if name == "o" else there
            if not torch.equal(mine[cut].masked_fill(~there, 0.0), own.masked_fill(~there, 0.0)):
                return False
        at += rows
    return at == whole.tokens.shape[0]


def said_of(cell: str) -> dict[str, Any]:
    adapter, problem = Adapter(), build(parse(cell))
    launcher = Launcher(Backend(adapter), "cpu")
    case = launcher.case(problem, RANDOM.inputs(problem))
    gates = drawn_gates((*case.lse.shape[:2], problem.branches), problem.draw("gates"))
    case = with_workspace(adapter, replace(case, gates=torch.from_numpy(gates.astype(np.float32))))
    ran = adapter.run(case)
    out, lse = exact(problem, gates)
    parts = alone(adapter, case)
    assert ran.lse is not None
    return {
        "cell": cell,
        "out": distance(ran.out, out),
        "lse": distance(ran.lse, lse),
        "own_lse": all(torch.equal(ran.lse[..., branch], own) for branch, (own, _) in enumerate(parts)),
        "own_trace": same_traces(adapter.trace(case), [trace for _, trace in parts]),
        "bits": launched_kernels.bits(launcher, cell),
        "sized": [launched_kernels.sized(adapter, case, extra) for extra in (0, 5, -1)],
    }


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps(said_of(each)), flush=True)
