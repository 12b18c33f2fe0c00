"""Compiles for a GPU, without one, what the bundled adapter launches for the cells that are named (the first word:
`traced` or `plain`, with their traces or without), and prints a line of JSON for each kernel. Run by test_kernels.py in
a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sacts.conformance.adapter import Backend, Refused
from sacts.conformance.build import build
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.paged import adapter, branches, copies, gather, kernels, merge
from sacts.matrices.cell import parse

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
BUFFERED = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<[2-9]x\d+x\d+x")  # tiles that are loaded ahead


def source_of(kernel: Any, given: dict[str, Any]) -> ASTSource:
    """The kernel specialised as a launch with these arguments specialises it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: dict[tuple[int, ...], list[list[Any]]] = {}
    for at, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and special):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(number, int) and number % 16 == 0 and special:
            divisible[at,] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)


class Compiled:
    """In place of a kernel: compiles what would be launched."""

    def __init__(self, kernel: Any, cell: str) -> None:
        self.kernel, self.cell = kernel, cell

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
            start = time.monotonic()
            options = {
                name: named[name] for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl") if name in named
            }
            made = triton.compile(source_of(self.kernel, given), target=GPUTarget("cuda", 90, 32), options=options)
            seconds = round(time.monotonic() - start, 2)
            said = {
                "cell": self.cell,
                "kernel": self.kernel.__name__,
                "seconds": seconds,
                "shared": made.metadata.shared,
                "buffered": len(BUFFERED.findall(made.asm["ttgir"])),
                "order": re.findall(r"griddepcontrol\.(\w+)", made.asm["ptx"]),
                "early": made.metadata.launch_pdl,
                "copied": made.asm["ptx"].count("cp.async.bulk.tensor"),
                "scratch": made.metadata.global_scratch_size,
                "before": {
                    word: made.asm["ptx"].split("griddepcontrol.wait")[0].count(f"{word}.global")
                    for word in ("ld", "st")
                },
            }
            print(json.dumps(said), flush=True)

        return launch


def main(cells: list[str], *, traced: bool) -> None:
    adapter.early = copies.copies = lambda device: True  # as the processor would be that this is compiled for
    launched = [
        (kernels, "attention_kernel"),
        (merge, "merge_kernel"),
        (gather, "gather_kernel"),
        (branches, "gated_sum_kernel"),
    ]
    plain = [getattr(module, name) for module, name in launched]
    for cell in cells:
        problem, launcher = build(parse(cell)), Launcher(Backend(made := adapter.Adapter()), "cpu")
        case = launcher.case(problem, RANDOM.inputs(problem))
        case = replace(case, workspace=torch.empty(made.workspace_bytes(case), dtype=torch.uint8))
        for (module, name), kernel in zip(launched, plain, strict=True):
            setattr(module, name, Compiled(kernel, cell))
        try:
            made.run(case)
            if traced:
                made.trace(case)
        except Refused:
            refused = {
                "kernel": "refused",
                "seconds": 0,
                "shared": 0,
                "buffered": 0,
                "order": [],
                "early": False,
                "copied": 0,
                "scratch": 0,
            }
            print(json.dumps({"cell": cell} | refused), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:], traced=sys.argv[1] == "traced")
