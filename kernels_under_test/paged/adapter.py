"""The bundled Triton backend: normalises raw candidate lists in `plan`, computes in `run`; where a case says that it
must leave its kernels, PyTorch's dense attention computes over the same lists.

On a GPU the kernels are compiled; where TRITON_INTERPRET is set when this module is imported, they run in the
interpreter on CPU tensors, compute in FP32 throughout, and torch makes the final cast.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sacts.conformance.adapter import (
    NATIVE,
    Capabilities,
    Case,
    Consumes,
    Determinism,
    Normalized,
    Outputs,
    Refused,
    Support,
    Trace,
    refused,
)
from sacts.kernels_under_test import sdpa
from sacts.reference.numerics import Numerics
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    DType,
    FallbackReason,
)

from . import branches, gather, kernels, merge
from .arguments import codec_of, epilogue_of, of_slots, scales_of, shapes, strides, terms_of
from .copies import aligned
from .index import slots_of
from .launches import Launch, early, launch, launch_with
from .limits import INTERPRETED, k_late, options, programs_of, uniform, v_late
from .plan import Plan, normalized, plan_of
from .tables import padded, turns_bytes
from .trace import NOTHING, recording_of, trace_of
from .tuning import chosen, programs
from .words import as_read, bits
from .workspace import Workspace, copies_of, needed_bytes, stored, workspace_of

ADDED_ROWS = 16  # output rows of one program of the gated sum
MERGED_AT_ONCE = 16  # parts of a row
LARGEST_HEAD_DIM = 1024  # padded; more does not fit into shared memory beside 16 slots
LARGEST_TURNS = 1 << 30  # bytes of the table of cosines and sines
WIDEST_WINDOW = 1 << 30  # keys: what begins so far back is no window, and a position less it is no overflow
LARGEST_REACH = 1 << 16  # of relative buckets: their table holds a bias for each distance


class Adapter:
    """Paged sparse attention, forward."""

    name = "triton"
    input_precision = "ieee"  # of FP32 operands of tl.dot
    capabilities = Capabilities(
        consumes=Consumes.RAW,
        plan_keeps=frozenset(("seq_lens", "kv_indptr", "kv_indices")),
        graph=True,
        determinism=dict.fromkeys(("out", "lse"), frozenset(Determinism) - {Determinism.SCHEDULE}),
        numerics={
            dtype: Numerics(
                p=DType.FP32 if INTERPRETED else dtype,
                out=dtype,
                merges_states=True,
                unit_p=True,
                # Operands of tl.dot have one dtype: K and V behind scales that do not wait for the product, else P
                # behind the scale of V; q and K behind RoPE.
                reconstructed=DType.FP32 if INTERPRETED else dtype,
                rotated=DType.FP32 if INTERPRETED else dtype,
                # Cosines and sines are a table, made in FP64 and rounded once.
                u_freq=2.0**-51,
                u_angle=2.0**-51,
                u_sin=2.0**-24,
            )
            for dtype in DType
        },
        fallback_numerics=sdpa.Adapter.capabilities.numerics,
    )

    def __init__(self) -> None:
        self._dense = sdpa.Adapter()
        self._runs: Counter[str] = Counter()

    def support(self, spec: AttentionSpec) -> Support:
        """Native for what the kernel was written for, refused with the reason otherwise; never another path."""
        for beyond, reason in (
            (padded(spec.head_dim_qk) > LARGEST_HEAD_DIM, f"head_dim_qk above {LARGEST_HEAD_DIM}"),
            (padded(spec.head_dim_vo) > LARGEST_HEAD_DIM, f"head_dim_vo above {LARGEST_HEAD_DIM}"),
            (turns_bytes(spec) > LARGEST_TURNS, f"rope at positions whose table exceeds {LARGEST_TURNS} bytes"),
            (spec.buckets and spec.buckets.first[-1] > LARGEST_REACH, f"buckets beyond a distance of {LARGEST_REACH}"),
        ):
            if beyond:
                return refused(reason)
        return NATIVE

    def falls_back(self, spec: AttentionSpec, reason: FallbackReason) -> Support:
        """Dense attention for whatever reason, where it serves the spec: the plain row."""
        return self._dense.falls_back(spec, reason)

    def counters(self) -> Counter[str]:
        """Runs by path."""
        return self._runs

    def workspace_bytes(self, case: Case) -> int:
        """From spec, hints and the size of the raw lists: see `workspace`; a fallback needs none."""
        return 0 if case.fallback else needed_bytes(case, fp32_out=INTERPRETED)

    def plan(self, case: Case) -> Plan:
        """Normalise the raw lists on the device, cut their rows into tasks, and make the tables of the terms; for a
        fallback its masks. Raises Refused as declared.
        """
        self._check(case)
        plan = plan_of(case)
        if not case.fallback:
            return plan
        masks = sdpa.masks_of(replace(case, kv_indptr=plan.kv_indptr, kv_indices=plan.kv_indices))
        return replace(plan, masks=masks)

    def normalize(self, case: Case) -> Normalized:
        """The lists that `plan` makes, before empty rows get a token, and their slots; a multiset with its repeats."""
        lists = normalized(case)
        indptr, rows, entries = lists.kv_indptr, lists.rows, lists.kv_indices
        if case.spec.candidate_kind is CandidateKind.MULTISET:
            indptr = torch.cat((lists.counts.new_zeros(1), lists.counts.cumsum(0)))[indptr.long()]
            rows, entries = (x.repeat_interleave(lists.counts) for x in (rows, entries))
        return Normalized(indptr, entries, slots_of(case.spec, case.page_table, rows, entries))

    def run(self, case: Case, plan: Plan | None = None) -> Outputs:
        """Launch the gather kernel where candidates are gathered, the attention kernel, the merge kernel where rows are
        split, and that of the gated sum where there are branches; or dense attention, where the case must leave these.
        Raises Refused as declared (`plan` does), for a plan of another case, and for a workspace that is too small.
        """
        plan = plan or self.plan(case)
        if plan.repeats.adapter is self and plan.repeats.case is case:
            for again in plan.repeats.launches:
                again()
            self._runs["native"] += 1
            return Outputs(case.out, case.lse, path="native")
        plan.made_for.check(case)
        if case.fallback:
            outputs = self._dense.run(case, plan.masks)
            self._runs[str(outputs.path)] += 1
            return outputs
        space = workspace_of(case, fp32_out=INTERPRETED)
        launches: list[Launch] = []
        if plan.tasks.num_tasks:
            launches = [
                *self._attend(case, plan, space, NOTHING),
                *self._merge(case, plan, space),
                *self._add(case, space),
            ]
        if space.out is not None:
            case.out.copy_(whole := space.out.view(case.out.shape))
            launches.append(partial(case.out.copy_, whole))
        plan.repeats.adapter, plan.repeats.case, plan.repeats.launches = self, case, launches
        self._runs["native"] += 1
        return Outputs(case.out, case.lse, path="native")

    def trace(self, case: Case, plan: Plan | None = None) -> Trace:
        """What `run` computes on its way, in memory of its own. Raises Refused as `run` does, and for a fallback."""
        if case.fallback:
            raise Refused(f"fallback({case.fallback}) has no tiles to trace")
        plan = plan or self.plan(case)
        own = torch.empty(self.workspace_bytes(case), dtype=torch.uint8, device=case.q.device)
        case = replace(case, workspace=own, out=torch.empty_like(case.out), lse=torch.empty_like(case.lse))
        plan.made_for.check(case)
        recording = recording_of(case.spec, plan.tasks)
        if plan.tasks.num_tasks:
            self._attend(case, plan, workspace_of(case, fp32_out=INTERPRETED), recording.arguments)
        return trace_of(case.spec, plan.tasks, recording)

    def _attend(self, case: Case, plan: Plan, space: Workspace, traced: dict[str, Any]) -> list[Launch]:
        """Launch the attention kernel over the tasks, behind the gather kernel where there is scratch."""
        spec, tasks, choice = case.spec, plan.tasks, chosen(case)
        launches = []
        work = tasks.num_tasks * programs_of(spec, case.hints.route)
        grid = (programs(work, case.hints, case.q.device),)
        k_cache, v_cache = case.k_cache, case.v_cache
        if space.k is not None and space.v is not None:
            launches.append(self._gather(case, plan, (space.k, space.v)))
            k_cache, v_cache = space.k, space.v
        k_cache, v_cache = as_read(spec, k_cache, v_cache)
        descriptions = plan.descriptions if aligned(case) else None
        shape = shapes(spec, case.hints.route, tasks.q_tile)
        attention = launch_with(
            descriptions,
            kernels.attention_kernel,
            grid,
            case.q,
            k_cache,
            v_cache,
            case.page_table,
            case.seq_lens,
            plan.token_position,
            plan.kv_indices,
            tasks.table,
            work,
            *_of_rows(case, space),
            space.m,
            space.l,
            space.o,
            window_left=min(spec.window_left, WIDEST_WINDOW),
            list_heads=spec.list_heads,
            num_tokens=spec.num_tokens if spec.num_branches > 1 else None,
            num_splits=choice.num_splits,
            **traced,
            **terms_of(spec, plan),
            **scales_of("k", case.k_scales, case.k_zeros, late=k_late(spec)),
            **scales_of("v", case.v_scales, case.v_zeros, late=v_late(spec)),
            **strides("q", case.q.stride()[:2]),
            **strides("k", of_slots(k_cache)),
            **strides("v", of_slots(v_cache)),
            stride_table=case.page_table.stride(0),
            DESCRIBED=descriptions is not None,
            SPLIT=choice.num_splits > 1,
            EARLY=choice.num_splits > 1 and early(case.q.device),
            GATHER=copies_of(case),
            BLOCK_N=tasks.tile,
            UNIFORM=uniform(spec, tasks.tile),
            INPUT_PRECISION=self.input_precision,
            **shape,
            **epilogue_of(case),
            **options(spec, shape["BLOCK_M"], tasks.tile, traced=traced["TRACE"])
            | choice.tile_of(tasks.q_tile).options,
        )
        return [*launches, attention]

    def _gather(
        self,
        case: Case,
        plan: Plan,
        scratch: tuple[Tensor, Tensor],
    ) -> Launch:
        """Launch the gather kernel, which takes each task once a copy."""
        spec, caches = case.spec, (bits(case.k_cache), bits(case.v_cache))
        work = plan.tasks.num_tasks * copies_of(case)
        return launch(
            gather.gather_kernel,
            (programs(work, case.hints, case.q.device),),
            *caches,
            *map(bits, scratch),
            case.page_table,
            case.seq_lens,
            plan.kv_indices,
            plan.tasks.table,
            work,
            spec.list_heads,
            **strides("k", of_slots(caches[0])),
            **strides("v", of_slots(caches[1])),
            stride_table=case.page_table.stride(0),
            K_CODEC=codec_of(spec.k_codec),
            V_CODEC=codec_of(spec.v_codec),
            K_STORED=(k_stored := stored(spec.k_codec, spec.head_dim_qk)),
            V_STORED=(v_stored := stored(spec.v_codec, spec.head_dim_vo)),
            BLOCK_K=padded(k_stored),
            BLOCK_V=padded(v_stored),
            PAGE_SIZE=spec.page_size,
            BLOCK_SIZE=spec.block_size,
            LISTS=spec.lists_per_kv_head,
            COPIES=copies_of(case),
            BLOCK_N=plan.tasks.tile,
        )

    def _merge(self, case: Case, plan: Plan, space: Workspace) -> list[Launch]:
        """Launch the merge kernel over the output rows in several parts, where there are any."""
        spec, tasks = case.spec, plan.tasks
        rows = len(tasks.split_rows) * spec.heads_per_list
        if not rows:
            return []
        waits = early(case.q.device)
        merged = launch(
            merge.merge_kernel,
            (rows,),
            *_of_rows(case, space),
            space.m,
            space.l,
            space.o,
            tasks.split_rows,
            tasks.parts,
            sinks_ptr=plan.tables.sinks,
            num_qo_heads=spec.num_qo_heads,
            num_splits=chosen(case).num_splits,
            heads_per_list=spec.heads_per_list,
            HEAD_DIM_VO=spec.head_dim_vo,
            BLOCK_VO=padded(spec.head_dim_vo),
            BLOCK_S=MERGED_AT_ONCE,
            EARLY=waits,
            **({"launch_pdl": True} if waits else {}),
            **epilogue_of(case),
        )
        return [merged]

    def _add(self, case: Case, space: Workspace) -> list[Launch]:
        """Launch the kernel that gates and adds branches, where there are several."""
        if case.gates is None:
            return []
        spec = case.spec
        rows = spec.num_tokens * spec.num_qo_heads
        added = launch(
            branches.gated_sum_kernel,
            (-(-rows // ADDED_ROWS),),
            case.out if space.out is None else space.out,
            case.lse,
            space.branch_out,
            space.branch_lse,
            case.gates,
            num_rows=rows,
            num_branches=spec.num_branches,
            HEAD_DIM_VO=spec.head_dim_vo,
            BLOCK_VO=padded(spec.head_dim_vo),
            BLOCK_M=ADDED_ROWS,
            **epilogue_of(case, of_sum=True),
        )
        return [added]

    def _check(self, case: Case) -> None:
        """Raises Refused as declared."""
        support = self.falls_back(case.spec, case.fallback) if case.fallback else self.support(case.spec)
        if support.status == "refused":
            raise Refused(support.reason)


def _of_rows(case: Case, space: Workspace) -> tuple[Tensor, Tensor]:
    """Where out and lse of each row go: of branches into the workspace, one branch behind another."""
    if space.branch_out is not None and space.branch_lse is not None:
        return space.branch_out, space.branch_lse
    return case.out if space.out is None else space.out, case.lse
