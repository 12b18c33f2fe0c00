"""Cells and backends that the tests of the gate of gradients share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from term_problems import BASE, SPECS

from sacts.conformance.adapter import Backend, Case, Gradients, Saved
from sacts.conformance.build import Problem, build
from sacts.conformance.gradients import GradientVerdict, judge_gradients
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.kernels_under_test.faults import model_catalogue, patched
from sacts.matrices.cell import parse
from sacts.reference.spec import CandidateKind
from sacts.reports.records import Record

GRADIENTS = {"d_q", "d_k", "d_v", "d_sink"}
FAULTS = [
    fault
    for fault in model_catalogue().values()
    if set(fault.outputs) <= GRADIENTS and SPECS[fault.problem].candidate_kind is CandidateKind.SET  # as in every cell
]
RAGGED = "prefill/{}/kv:150+45/q:5+3/dim:32/map:shared/causal:bottom_right"
CELL = "decode/fp32/kv:40+0+21/dim:32"
TERMS = ("rope", "logits_soft_cap", "alibi_slopes", "buckets", "sink_logits", "dropout")

ROW, KEY = r"request \d, query \d, head \d", r"\(request \d, token \d+ .*, KV head \d, channel \d+\) is .*"


def problem_of(cell: str, spec_name: str = "plain") -> Problem:
    """The problem of a cell, with the terms of a spec that no cell asks for yet."""
    problem = build(replace(parse(cell), lists=SPECS[spec_name].lists.value))
    terms = {name: getattr(SPECS[spec_name], name) for name in TERMS}
    terms = {name: value for name, value in terms.items() if value != getattr(BASE, name)}
    if "dropout" in terms:
        terms["dropout"] = replace(terms["dropout"], request_uids=tuple(range(5, 5 + problem.spec.num_requests)))
    return replace(problem, spec=replace(problem.spec, **terms))


def verdict_of(adapter: Any, cell: str, spec_name: str = "plain") -> GradientVerdict:
    return judge_gradients(Launcher(Backend(adapter), "cpu"), problem_of(cell, spec_name))


@cache
def adapter_of(name: str) -> Any:
    return importlib.import_module(f"{patched(model_catalogue()[name], 'emulation')}.adapter").Adapter


def judged(adapter: Any, cell: str, name: str = "x") -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), name, parse(cell))


class Bent(Adapter):
    """The model with its gradients bent."""

    def __init__(self, bend: Callable[[Case, Gradients], Any]) -> None:
        super().__init__()
        self.bend = bend

    def backward(self, case: Case, saved: Saved, d_out: Any, d_lse: Any = None, plan: Any = None) -> Any:
        self.given = {"saved.out": saved.out, "saved.lse": saved.lse, "d_out": d_out, "d_lse": d_lse}
        return self.bend(case, super().backward(case, saved, d_out, d_lse))
