"""The contract of a launch, forward or backward: what a backend may touch, and what it must return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sacts.matrices.axes import Execution
from sacts.reference.forward import Inputs
from sacts.reference.spec import AttentionSpec, EpilogueKind, Hints
from sacts.reports.records import Finding, Gate

from . import branches, conventions, tensors
from .adapter import Backend, Case, KVLayout, Refused
from .build import Problem
from .codes import Scales
from .execution import PERFORM, Calls, Memory, settle

Array = NDArray[np.float64]
T = TypeVar("T")

WHOLE = "the whole launch"
STALE_VALUE = 1024.0  # an ordinary finite value for what no row attends


class ContractBroken(Exception):
    """The backend broke the contract; `.finding` says how."""

    def __init__(self, sentence: str, place: str = WHOLE) -> None:
        self.finding = Finding(Gate.CONTRACT, place, sentence)
        super().__init__(sentence)


class AdapterRaised(Exception):
    """The adapter raised; `__cause__` is its exception."""


@dataclass(frozen=True)
class Surroundings:
    """What must not matter: how far the stale page-table columns are turned, what stands between the pages of a strided
    cache, one value or several in turn, the 32-bit words repeated in the workspace, and the values that stand in turn
    for scales and zero points that no row needs (none: their own).
    """

    stale_shift: int = 0
    filler: float | tuple[float, ...] = STALE_VALUE
    workspace_words: tuple[int, ...] = (0xFFFFFFFF,)
    scales: tuple[float, ...] = ()


CLEAN = Surroundings()


@dataclass(frozen=True)
class Launched(Generic[T]):
    """One launch under the contract, forward or backward: what it is made of, and what both must keep."""

    backend: Backend
    device: str
    problem: Problem
    inputs: Inputs
    hints: Hints
    surroundings: Surroundings

    name = "run"

    def call(self, case: Case, planned: tuple[Any, ...]) -> Any:
        """Call the backend; what it returns is looked at by `observe`."""
        raise NotImplementedError

    def given(self) -> dict[str, torch.Tensor]:
        """What it is called with beside the case, by name."""
        return {}

    def blank(self, live: torch.Tensor) -> None:
        """Make the buffers for results as they were before anything ran; `live`: the pages that have any."""
        self._out.blank()
        self._lse.blank()

    def observe(self, result: Any) -> T:
        """What came back, converted. Raises ContractBroken for what it must not be."""
        raise NotImplementedError

    def offered(self) -> dict[str, tensors.Guarded]:
        """The buffers that the backend was offered, by name."""
        return {"out": self._out, "lse": self._lse}

    def watched(self, case: Case, live: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the backend must not change, by name; of a cache, its live pages."""
        names = ["q", "page_table", "seq_lens", "qo_indptr", "kv_indptr", "kv_indices"]
        names += [name for name in ("gate", "gates") if getattr(case, name) is not None]
        paged = ("k_cache", "v_cache", "k_scales", "v_scales", "k_zeros", "v_zeros")
        given = {name: each for name in paged if (each := getattr(case, name)) is not None}
        caches = {name: tensors.taken(each, live) for name, each in given.items()}
        return {name: getattr(case, name) for name in names} | caches

    def returns_own(self, result: Any) -> bool:
        """Whether the backend returned a tensor of its own instead of a buffer that it was offered."""
        raise NotImplementedError

    def run(self, execution: Execution) -> tuple[T, bool]:
        """The observation, and whether the backend returned tensors of its own."""
        case, live = self.case()
        before = self._digests(case, live)
        offered, result = self._called(case, live, execution)
        after = self._digests(case, live)
        changed = [name for name in before if before[name] != after[name]]
        if changed:
            raise ContractBroken(f"the launch changed its input {', '.join(changed)}", changed[0])
        for name, buffer in (*self.offered().items(), *offered):
            if where := buffer.broken():
                raise ContractBroken(f"the launch wrote outside {name}: {where}", name)
        observed = self.observe(result)
        return observed, self.returns_own(result)

    def _digests(self, case: Case, live: torch.Tensor) -> dict[str, bytes]:
        return {name: tensors.digest(tensor) for name, tensor in self.watched(case, live).items()}

    def _called(
        self, case: Case, live: torch.Tensor, execution: Execution
    ) -> tuple[list[tuple[str, tensors.Guarded]], Any]:
        """The workspaces that were offered, and what the backend returned."""
        size = self._asked(lambda: self.backend.workspace_bytes(case))
        workspace = tensors.Guarded.make((size,), torch.uint8, self.device)
        self._fill(workspace.inner)

        def blank() -> None:
            self.blank(live)
            if self.backend.capabilities.workspace_zeroed:
                self._fill(workspace.inner)

        calls = Calls(
            self.backend.capabilities,
            lambda case: self._asked(lambda: self.backend.planned(case)),
            lambda case, planned: self._asked(lambda: self.call(case, planned)),
            self._asked,
        )
        memory = Memory(replace(case, workspace=workspace.inner), live, self.given(), blank)
        result = PERFORM[execution](calls, memory)
        self._asked(lambda: settle(torch.device(self.device)))
        if memory.late:
            words = f"{', '.join(memory.late)} changed behind the run, in stream order: work was still under way"
            raise ContractBroken(words, memory.late[0])
        return [("workspace", workspace), *memory.guarded.items()], result

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What the backend answers. Raises AdapterRaised, or Refused."""
        try:
            return ask()
        except (Refused, AdapterRaised, ContractBroken):
            raise
        except Exception as error:  # whatever an adapter raises is its own verdict
            raise AdapterRaised(f"{self.name}(case)") from error

    @cached_property
    def spec(self) -> AttentionSpec:
        """What the backend is called with, before its index space: requests once, whatever their branches."""
        return branches.folded(self.problem.spec, self.problem.branches)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The problem's token whose q stands for each token of the call: of one branch."""
        return branches.tokens_of(self.problem.spec, self.problem.branches, 0)

    @cached_property
    def _out(self) -> tensors.Guarded:
        spec = self.spec
        shape = (spec.num_tokens, spec.num_qo_heads, spec.head_dim_vo)
        return tensors.Guarded.make(shape, tensors.TORCH[spec.dtype], self.device)

    @cached_property
    def _lse(self) -> tensors.Guarded:
        return tensors.Guarded.make(self.lse_shape, torch.float32, self.device)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of lse: [num_tokens, num_qo_heads], and num_branches where there are several."""
        spec = self.spec
        return (spec.num_tokens, spec.num_qo_heads, *((spec.num_branches,) if spec.num_branches > 1 else ()))

    def _page_table(self) -> NDArray[np.int64]:
        """The table, its stale columns turned by `stale_shift` among the live pages that the request does not own."""
        table = self.problem.table.table.copy()
        if self.surroundings.stale_shift:
            for request, owned in enumerate(self.problem.table.owned):
                others = np.array([page for page in self.problem.pages if page not in owned], np.int64)
                stale = table.shape[1] - len(owned)
                table[request, len(owned) :] = np.resize(np.roll(others, self.surroundings.stale_shift), stale)
        return table[:: self.problem.branches]

    def case(self) -> tuple[Case, torch.Tensor]:
        """The problem as the backend declared that it takes it, and the index of the live pages."""
        device, capabilities = self.device, self.backend.capabilities
        spec = conventions.spec_for(self.problem.spec, capabilities, self.problem.branches)
        lists = conventions.lists_for(self.problem, capabilities)
        filler = self.surroundings.filler
        k, v = (self._held(name, filler) for name in ("k", "v"))
        where = self.problem.pages, self.problem.table.num_pages, device, self._form()
        pool = tensors.pool_of(k, v, *where)
        case = Case(
            spec=spec,
            hints=self.hints,
            q=tensors.to_torch(self.inputs.q[self.tokens], spec.dtype, device),
            k_cache=pool.k,
            v_cache=pool.v,
            kv_cache=pool.packed,
            page_table=tensors.indices(self._page_table(), device),
            seq_lens=tensors.indices(np.asarray(spec.seq_lens), device),
            qo_indptr=tensors.indices(np.asarray(spec.qo_indptr), device),
            kv_indptr=tensors.indices(lists.indptr, device),
            kv_indices=tensors.indices(lists.indices, device),
            out=self._out.inner,
            lse=self._lse.inner,
            workspace=torch.empty(0, dtype=torch.uint8, device=device),
            gate=self._gate(spec),
            fallback=self.backend.reason,
        )
        scales: dict[str, Any] = {
            name: tensors.paged(tensors.held_scales(x, filler), *where) for name, x in self._scales()
        }
        return replace(case, **scales), pool.live

    def _gate(self, spec: AttentionSpec) -> torch.Tensor | None:
        if self.inputs.gate is None or spec.epilogue.kind is not EpilogueKind.GATE:
            return None
        return tensors.to_torch(self.inputs.gate, spec.dtype, self.device)

    def _held(self, name: str, filler: float | tuple[float, ...]) -> tensors.Held:
        """What the cache of "k" or "v" holds: values, or the codes that stand for them."""
        values = getattr(self.inputs, name).data
        scales: Scales | None = getattr(self.problem, f"{name}_scales")
        if scales is None:
            return tensors.held(values, self.problem.spec.dtype, filler)
        return tensors.held_codes(scales.codes(values, self.problem.needed), scales.codec, filler)

    def _scales(self) -> Iterator[tuple[str, Array]]:
        """Scales and, of an asymmetric codec, zero points, with poison where no row attends what they belong to."""
        for name in ("k", "v"):
            scales: Scales | None = getattr(self.problem, f"{name}_scales")
            if scales is not None:
                idle = scales.idle(self.problem.needed)
                poison = np.resize(np.asarray(self.surroundings.scales, np.float64), scales.scales.shape)
                there = idle & bool(self.surroundings.scales)
                yield f"{name}_scales", np.where(there, poison, scales.scales)
                if scales.codec.asymmetric:
                    yield f"{name}_zeros", np.where(there, poison, scales.zeros)

    def _form(self) -> tensors.CacheForm:
        capabilities = self.backend.capabilities
        return tensors.CacheForm(
            hnd=capabilities.kv_layout is KVLayout.HND,
            packed=capabilities.packed_kv,
            strides=self.problem.cell.cache if capabilities.real_strides else "contiguous",
        )

    def _fill(self, workspace: torch.Tensor) -> None:
        """The junk that a workspace starts with, or the zeros that the backend demands."""
        if self.backend.capabilities.workspace_zeroed:
            workspace.fill_(0)
        else:
            words = np.array(self.surroundings.workspace_words, "<u4").view(np.uint8)
            workspace.copy_(torch.from_numpy(np.resize(words, len(workspace))))

    def check_tensor(self, name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, where it is what the contract says. Raises ContractBroken."""
        if not isinstance(tensor, torch.Tensor):
            raise ContractBroken(f"{name} must be a tensor, got {type(tensor).__name__}", name)
        if tuple(tensor.shape) != shape:
            raise ContractBroken(f"{name} has shape {tuple(tensor.shape)}, expected {shape}", name)
        if tensor.dtype != dtype:
            raise ContractBroken(f"{name} has dtype {tensor.dtype}, expected {dtype}", name)
        if tensor.device.type != torch.device(self.device).type:
            raise ContractBroken(f"{name} is on {tensor.device}, expected {self.device}", name)
        return tensor

    def check_written(self, name: str, tensor: torch.Tensor) -> None:
        """Requirement: every element of a tensor [tokens, heads, ...] is written. Raises ContractBroken."""
        left = tensors.unwritten(tensor)
        if len(left):
            token, head = int(self.tokens[left[0][0]]), int(left[0][1])
            place = place_of(self.problem.spec, token, head)
            raise ContractBroken(f"{place}: {name} was never written ({len(left)} of {tensor.numel()} elements)", place)


def place_of(spec: AttentionSpec, token: int, qo_head: int) -> str:
    """An output row in words: its candidate row, and the query head."""
    row = spec.row(spec.row_of(token, qo_head))
    return str(row) if row.qo_head is not None else f"{row}, query head {qo_head}"
