"""A right backend but for combinations that no tier has: wrong where an odd window meets three KV heads, gone where a
window is 2 more than a multiple of 5.
"""

import os
from dataclasses import replace

from sacts.conformance.adapter import Case, Outputs, Support, fallback
from sacts.kernels_under_test.sdpa import Adapter as Right
from sacts.reference.spec import AttentionSpec

capabilities = Right.capabilities


def support(spec: AttentionSpec) -> Support:
    said = Right().support(spec)
    return said if said.status == "refused" else fallback("dense")


def run(case: Case, plan: object = None) -> Outputs:
    spec = case.spec
    outputs = Right().run(case)
    if spec.window_left % 5 == 2:
        os._exit(9)
    if spec.window_left % 2 and spec.window_left > 0 and spec.num_kv_heads == 3:
        return replace(outputs, out=outputs.out.mul_(1.5))
    return outputs
