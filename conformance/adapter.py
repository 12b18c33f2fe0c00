"""The contract between the suite and a backend: what an adapter gets (`Case`), returns (`Outputs`) and declares
(`Capabilities`).

An adapter is a class, an instance or a module with one required callable, `run(case, plan=None) -> Outputs`.
Everything else is optional: `name`, `capabilities`, `support(spec)`, `workspace_bytes(case)`, `plan(case)`,
`falls_back(spec, reason)`, `counters()`, `backward(case, saved, d_out, d_lse=None, plan=None) -> Gradients`.
docs/adapters.md is the vendor's page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, CausalRule, DType, FallbackReason, Hints

if TYPE_CHECKING:
    import torch

PADDING = -1  # the sentinel in the suite's own raw candidate lists


@dataclass(frozen=True)
class Case:
    """One call, on the adapter's device. Shapes, dtypes and strides of every field: docs/adapters.md.

    `out`, `lse` and `workspace` are buffers that the backend may write into; they stand between guard zones.
    `kv_cache` is the one tensor that holds K and V where the backend declares `packed_kv`, None otherwise.
    `gradients` are the buffers that `backward` may write into; None in the forward call. Where the spec has a codec,
    the cache holds codes, and `k_scales`, `v_scales` (and `k_zeros`, `v_zeros` where it is asymmetric) what decodes
    them, (code - zero) * scale; None without. `gate`: of the epilogue that multiplies by one. `fallback`: why the
    backend must leave its sparse path in this call; None where it takes the path that it declares for the spec. Where
    the spec has branches, `kv_indptr` holds the lists of all rows branch after branch, `lse` has one number per branch,
    and `gates` [num_tokens, num_qo_heads, num_branches] FP32 weigh what is added; None without.
    """

    spec: AttentionSpec
    hints: Hints
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    workspace: torch.Tensor
    kv_cache: torch.Tensor | None = None
    gradients: Gradients | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    k_zeros: torch.Tensor | None = None
    v_zeros: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    fallback: FallbackReason | None = None
    gates: torch.Tensor | None = None


@dataclass(frozen=True)
class Outputs:
    """out [num_tokens, num_qo_heads, head_dim_vo] in the dtype of q; lse [num_tokens, num_qo_heads] (of branches:
    [num_tokens, num_qo_heads, num_branches]) FP32, or None where the backend has none. `path`: the path taken, `native`
    or `fallback(reason)`, where the backend knows; it must be the declared one.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    path: str | None = None


@dataclass(frozen=True)
class Normalized:
    """What a backend makes of raw lists, before it computes: CSR over candidate rows, `kv_indptr` [num_rows + 1] and
    `kv_indices` [nnz] logical token or block ids; `slots` [nnz], where the backend knows them: physical slots, page *
    page_size + offset, of the tokens (of blocks: of their first token), or None.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class Trace:
    """What a backend computed on its way, by candidate row (token, KV head), padded to the longest: S slots in the
    order in which they were visited, in n tiles. What a backend cannot give is None.

    tokens [num_rows, S]: logical position of each slot, -1 where it was masked or is padding; tiles [num_rows, S]: the
    tile of each slot, from 0 and not falling; splits [num_rows, n]: the split of each tile; logits [num_rows, g, S]:
    natural, after all terms (ln(count) of a repeat that is visited once), junk where masked; m, l [num_rows, g, n] and
    o [num_rows, g, n, head_dim_vo]: the running state of the tile's split after it, m natural, o not normalised.
    """

    tokens: torch.Tensor
    tiles: torch.Tensor
    splits: torch.Tensor
    logits: torch.Tensor | None = None
    m: torch.Tensor | None = None
    l: torch.Tensor | None = None
    o: torch.Tensor | None = None


@dataclass(frozen=True)
class Saved:
    """What `backward` is fed in place of what its own forward left: out [num_tokens, num_qo_heads, head_dim_vo] in the
    dtype of q; lse [num_tokens, num_qo_heads] FP32, in the declared base and with the declared value of empty rows.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Gradients:
    """d_q as q; d_k and d_v as the caches, contiguous, in the declared layout: each slot holds the sum over all rows
    and all references of its page, 0 where no row attends it. All in the dtype of q, or `Numerics.gradient`. d_sink
    [num_qo_heads] FP32 where the spec has sink logits, else None.
    """

    d_q: torch.Tensor
    d_k: torch.Tensor
    d_v: torch.Tensor
    d_sink: torch.Tensor | None = None


class LseBase(StrEnum):
    """The base of the logarithm in a backend's lse."""

    NATURAL = "natural"
    TWO = "2"


class Consumes(StrEnum):
    """Which lists a backend takes: `RAW` (duplicates and padding: it normalises itself) or `VALIDATED` (sorted,
    unique).
    """

    RAW = "raw"
    VALIDATED = "validated"


class KVLayout(StrEnum):
    """Order of a page's dimensions: NHD [page_size, num_kv_heads, d] or HND [num_kv_heads, page_size, d]."""

    NHD = "NHD"
    HND = "HND"


class IndexSpace(StrEnum):
    """What a candidate entry is: a logical token or block id of the request, or a physical slot, page * page_size +
    offset.

    A backend of physical slots cannot mask by position: it gets the attended tokens only, one entry each, and no
    masks.
    """

    LOGICAL = "logical"
    PHYSICAL = "physical"


class SentinelPlaces(StrEnum):
    """Where padding may stand in a raw list."""

    ANYWHERE = "anywhere"
    TAIL = "tail"


class Scale(StrEnum):
    """The softmax scale: spec.sm_scale, or always 1 / sqrt(head_dim_qk)."""

    SPEC = "spec"
    DEFAULT = "default"


class Determinism(StrEnum):
    """What a backend may promise of an output: the same bits in another launch, in another process, under other hints
    (splits, tiles), whatever else is in the batch, and wherever the pages lie and however a set is ordered.
    """

    RUN_TO_RUN = "run-to-run"
    PROCESS_TO_PROCESS = "process-to-process"
    SCHEDULE = "schedule"
    BATCH_INVARIANT = "batch-invariant"
    PLACEMENT_INVARIANT = "placement-invariant"


SEQ_LEN = "T"  # a sentinel: the row's own committed KV length


@dataclass(frozen=True)
class Capabilities:
    """What a backend declares; the defaults are assumed of one that declares nothing. The suite converts to it.

    `numerics` by dtype; a dtype that is not in it has `Numerics.default`. `empty_lse`: lse of a row without edges.
    `packed_kv`: K and V share one tensor, `case.kv_cache` [num_pages, 2, ...]. `real_strides`: caches may be strided
    views; a backend without gets contiguous ones. `sentinel`: the padding value of raw lists, or SEQ_LEN. `causal`:
    the one causal rule that the backend knows. `workspace_zeroed`: the workspace must be zero before each launch.
    `determinism` by output ("out", "lse", "d_q", "d_k", "d_v"): the levels that are promised; none: results vary within
    their bounds. `d_lse`: backward takes a gradient of lse. `reads_saved`: backward takes P from the lse and D from the
    out that it is fed; one that does not (it runs its own forward again) is judged end to end, more loosely.
    `plan_keeps`: the fields of `Case` whose contents a plan has taken, so that it holds while these stay and all others
    may change in place; None: a plan holds for one run. `graph`: `run` may be recorded as a CUDA graph and replayed.
    `fallback_numerics`: of the path that `falls_back` names, by dtype; empty: those of `numerics`.
    """

    consumes: Consumes = Consumes.VALIDATED
    lse_base: LseBase = LseBase.NATURAL
    empty_lse: float = float("-inf")
    kv_layout: KVLayout = KVLayout.NHD
    packed_kv: bool = False
    real_strides: bool = True
    index_space: IndexSpace = IndexSpace.LOGICAL
    sentinel: int | str = PADDING
    sentinel_places: SentinelPlaces = SentinelPlaces.ANYWHERE
    scale: Scale = Scale.SPEC
    causal: CausalRule = CausalRule.BOTTOM_RIGHT
    workspace_zeroed: bool = False
    determinism: Mapping[str, frozenset[Determinism]] = field(default_factory=dict)
    numerics: Mapping[DType, Numerics] = field(default_factory=dict)
    d_lse: bool = False
    reads_saved: bool = True
    plan_keeps: frozenset[str] | None = None
    graph: bool = False
    fallback_numerics: Mapping[DType, Numerics] = field(default_factory=dict)

    def numerics_of(self, dtype: DType) -> Numerics:
        """The numerics contract for one dtype."""
        return self.numerics.get(dtype, Numerics.default(dtype))


@dataclass(frozen=True)
class Support:
    """How a backend serves a spec: the only status words are native, fallback(reason) and refused(reason)."""

    status: str
    reason: str = ""

    def __post_init__(self) -> None:
        if self.status not in ("native", "fallback", "refused"):
            raise ValueError(f"status must be native, fallback or refused, got {self.status!r}")
        if (self.status == "native") == bool(self.reason):
            raise ValueError(f"{self.status} {'takes no' if self.status == 'native' else 'needs a'} reason")

    def __str__(self) -> str:
        return f"{self.status}({self.reason})" if self.reason else self.status


NATIVE = Support("native")


def fallback(reason: str) -> Support:
    """Served by another path than the sparse one, whose numbers are judged all the same."""
    return Support("fallback", reason)


def refused(reason: str) -> Support:
    """Not served: `run` must raise `Refused`."""
    return Support("refused", reason)


class Refused(Exception):
    """Raised by `run` for a spec that the backend does not serve."""


class Adapter(Protocol):
    """The one required member; the optional ones are read with `Backend`."""

    def run(self, case: Case, plan: Any = None) -> Outputs:
        """Compute attention for `case`."""


class Backend:
    """An adapter with its optional members filled in. Raises TypeError, naming the member, for one that is no
    adapter. `reason`: why it is told to leave its sparse path, None where it is not.
    """

    reason: FallbackReason | None = None

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        if not callable(getattr(adapter, "run", None)):
            raise TypeError(f"{adapter!r} is no adapter: it has no callable `run(case, plan=None)`")
        self.capabilities: Capabilities = getattr(adapter, "capabilities", Capabilities())
        if not isinstance(self.capabilities, Capabilities):
            raise TypeError(f"capabilities must be a Capabilities, got {type(self.capabilities).__name__}")

    def support(self, spec: AttentionSpec) -> Support:
        """The declared status; native where the adapter declares none."""
        declare = getattr(self.adapter, "support", None)
        support = declare(spec) if declare else NATIVE
        if not isinstance(support, Support):
            raise TypeError(f"support(spec) must return a Support, got {type(support).__name__}")
        return support

    def forced(self, reason: FallbackReason) -> Backend:
        """The same, told to leave its sparse path. It promises no bits there."""
        return Forced(self.adapter, reason)

    @property
    def falls_back(self) -> bool:
        """Whether the adapter can be told to leave its sparse path."""
        return hasattr(self.adapter, "falls_back")

    def counters(self) -> dict[str, int] | None:
        """Runs by path, since the adapter was made; None where it does not count."""
        count = getattr(self.adapter, "counters", None)
        return dict(count()) if count else None

    def numerics(self, dtype: DType, hints: Hints, branches: int = 1) -> Numerics:
        """The numerics contract of a launch: where the hint names splits, the backend may split; what is put together
        from branches has been stored as a partial output.
        """
        declared = self.capabilities.numerics_of(dtype)
        return replace(declared, splits=declared.splits or hints.num_splits != 1, branched=branches > 1)

    def workspace_bytes(self, case: Case) -> int:
        """Bytes of workspace that the adapter asks for; 0 where it asks for none."""
        size = getattr(self.adapter, "workspace_bytes", None)
        return int(size(case)) if size else 0

    @property
    def plans(self) -> bool:
        """Whether the adapter has `plan`."""
        return hasattr(self.adapter, "plan")

    def planned(self, case: Case) -> tuple[Any, ...]:
        """Its plan for a case, as a last argument; nothing where it does not plan."""
        return (self.adapter.plan(case),) if self.plans else ()

    @property
    def traces(self) -> bool:
        """Whether the adapter has `trace`."""
        return hasattr(self.adapter, "trace")

    def trace(self, case: Case) -> Trace:
        """What it computed on its way."""
        return self.adapter.trace(case, *(self.planned(case) or (None,)))  # type: ignore[no-any-return]  # an adapter is untyped; its answer is checked

    @property
    def normalizes(self) -> bool:
        """Whether the adapter has `normalize`."""
        return hasattr(self.adapter, "normalize")

    def normalize(self, case: Case) -> Normalized:
        """What it makes of the lists."""
        return self.adapter.normalize(case)  # type: ignore[no-any-return]  # an adapter is untyped; its answer is checked

    def run(self, case: Case, planned: tuple[Any, ...] = ()) -> Outputs:
        """Run, under a plan where there is one."""
        return self.adapter.run(case, *planned)  # type: ignore[no-any-return]  # an adapter is untyped; its answer is checked

    @property
    def has_backward(self) -> bool:
        """Whether the adapter offers gradients."""
        return callable(getattr(self.adapter, "backward", None))

    def backward(
        self,
        case: Case,
        saved: Saved,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        planned: tuple[Any, ...] = (),
    ) -> Gradients:
        """The gradients of sum(d_out * out) + sum(d_lse * lse), lse natural, under a plan where there is one."""
        made = dict(zip(("plan",), planned, strict=False))
        return self.adapter.backward(case, saved, d_out, d_lse, **made)  # type: ignore[no-any-return]  # an adapter is untyped; its answer is checked


class Forced(Backend):
    """A backend that is told why it must leave its sparse path, in the field `fallback` of each case."""

    def __init__(self, adapter: Any, reason: FallbackReason) -> None:
        super().__init__(adapter)
        self.reason = reason
        numerics = self.capabilities.fallback_numerics or self.capabilities.numerics
        self.capabilities = replace(self.capabilities, numerics=numerics, determinism={})

    def support(self, spec: AttentionSpec) -> Support:
        """What `falls_back` says. Raises ValueError for anything but a fallback for this reason, or a refusal."""
        said, expected = self.adapter.falls_back(spec, self.reason), fallback(str(self.reason))
        if said != expected and not (isinstance(said, Support) and said.status == "refused"):
            raise ValueError(f"falls_back(spec, {self.reason}) must be {expected} or refused(...), got {said}")
        return said  # type: ignore[no-any-return]  # an adapter is untyped; its answer was checked
