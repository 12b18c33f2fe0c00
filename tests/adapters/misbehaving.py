"""A right backend that goes wrong in chosen cells: the KV length says how."""

import ctypes
import time
from dataclasses import replace

from sacts.conformance.adapter import Case, Outputs, Support, fallback
from sacts.kernels_under_test.sdpa import Adapter as Right
from sacts.reference.spec import AttentionSpec

capabilities = Right.capabilities


def support(spec: AttentionSpec) -> Support:
    return fallback("dense")


def run(case: Case, plan: object = None) -> Outputs:
    print("noise on standard output")
    match case.spec.seq_lens[0]:
        case 101:
            ctypes.string_at(1)
        case 102:
            time.sleep(3600)
        case 103:
            raise RuntimeError("no such kernel")
        case 104:
            outputs = Right().run(case)
            return replace(outputs, out=outputs.out[:, :1])
        case 105:
            outputs = Right().run(case)
            outputs.out.fill_(float("nan"))
            return outputs
        case 106:
            ctypes.CDLL(None).exit(7)
    return Right().run(case)
