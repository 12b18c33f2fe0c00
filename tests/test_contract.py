"""The contract: what a backend may touch and must return. Each breach is a backend that is right but for one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sacts.conformance.adapter import (
    NATIVE,
    Backend,
    Capabilities,
    Case,
    LseBase,
    Outputs,
    Refused,
    Support,
    fallback,
    refused,
)
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.kernels_under_test.emulation.adapter import Adapter as Emulation
from sacts.kernels_under_test.sdpa import Adapter as Right
from sacts.matrices.cell import parse
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, DType, EmptyRowRule, FallbackReason
from sacts.reports.records import Gate, Record, Verdict

CELL = parse("decode/fp32/kv:40+0+21")


class Bent:
    """The dense backend with its outputs bent."""

    def __init__(self, bend: Callable[[Case, Outputs], Any], support: Support | None = None, **declared: Any) -> None:
        self.capabilities = replace(Right.capabilities, **declared)
        self._bend, self._support = bend, support or fallback("dense")

    def support(self, spec: AttentionSpec) -> Support:
        return self._support

    def run(self, case: Case, plan: object = None) -> Any:
        return self._bend(case, Right().run(case))


def record_of(backend: object, cell: str = CELL.id) -> Record:
    return judge(Launcher(Backend(backend), "cpu"), "bent", parse(cell))


def spoil_guard(case: Case, outputs: Outputs, name: str, at: int) -> Outputs:
    getattr(case, name).view(-1).as_strided((1,), (1,), getattr(case, name).storage_offset() + at).fill_(1)
    return outputs


def own_out(case: Case, outputs: Outputs, fill: bool) -> Outputs:
    out = torch.empty_like(outputs.out)
    out[:1] = outputs.out[:1]
    if fill:
        out[1:] = outputs.out[1:]
    return Outputs(out, outputs.lse)


def unwritten(case: Case, outputs: Outputs) -> Outputs:
    pattern = torch.tensor(0x7FDADADA, dtype=torch.int32).view(torch.float32)
    outputs.out[1, 2] = pattern
    return outputs


def changed(name: str) -> Callable[[Case, Outputs], Outputs]:
    def bend(case: Case, outputs: Outputs) -> Outputs:
        getattr(case, name).view(-1)[-1].add_(1)
        return outputs

    return bend


BREACHES = {
    "returns a tuple": (lambda c, o: (o.out, o.lse), "run must return Outputs, got tuple"),
    "out is no tensor": (lambda c, o: replace(o, out=o.out.numpy()), "out must be a tensor, got ndarray"),
    "lse shape": (lambda c, o: replace(o, lse=o.lse.T.contiguous()), "lse has shape (4, 3), expected (3, 4)"),
    "out dtype": (lambda c, o: replace(o, out=o.out.half()), "out has dtype torch.float16, expected torch.float32"),
    "lse dtype": (lambda c, o: replace(o, lse=o.lse.double()), "lse has dtype torch.float64, expected torch.float32"),
    "path": (lambda c, o: replace(o, path="native"), "took the path native, but declared fallback(dense)"),
    "before out": (lambda c, o: spoil_guard(c, o, "out", -2), "wrote outside out: 2 elements before it"),
    "behind out": (lambda c, o: spoil_guard(c, o, "out", 3 * 4 * 64), "wrote outside out: 1 elements behind it"),
    "behind lse": (lambda c, o: spoil_guard(c, o, "lse", 3 * 4 + 4), "wrote outside lse: 5 elements behind it"),
    "unwritten": (unwritten, "row (request 1, query 0, KV head 1), query head 2: out was never written (64 of 768"),
    "own tensor, not filled": (lambda c, o: own_out(c, o, fill=False), "query head 0: channel 0 is nan"),
    **{
        name: (changed(name), f"the launch changed its input {name}")
        for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens", "qo_indptr", "kv_indptr", "kv_indices")
    },
}


@pytest.mark.parametrize("name", BREACHES)
def test_each_breach_of_the_contract_is_named(name: str) -> None:
    bend, words = BREACHES[name]
    record = record_of(Bent(bend))
    assert record.verdict is Verdict.FAIL
    assert words in record.sentence


def test_the_backend_is_right_when_it_is_not_bent() -> None:
    assert record_of(Bent(lambda c, o: o)).verdict is Verdict.FALLBACK


def test_own_tensors_are_accepted_when_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the import of torch's compiler, and with the user's own setting behind it."""
    monkeypatch.setattr(torch, "use_deterministic_algorithms", None)
    torch.set_deterministic_debug_mode("warn")
    try:
        assert record_of(Bent(lambda c, o: own_out(c, o, fill=True))).verdict is Verdict.FALLBACK
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode("default")


def test_a_backend_without_lse_is_judged_by_out_and_says_so() -> None:
    record = record_of(Bent(lambda c, o: replace(o, lse=None)))
    assert record.verdict is Verdict.FALLBACK
    assert record.gates[Gate.LSE] == "not offered"


@pytest.mark.parametrize(
    ("declared", "bend", "words"),
    [
        ({"lse_base": LseBase.TWO}, lambda c, o: o, "the logarithm is natural where base 2 is declared"),
        (
            {},
            lambda c, o: replace(o, lse=o.lse / 0.6931471805599453),
            "the logarithm is base 2 where natural is declared",
        ),
        ({"empty_lse": float("inf")}, lambda c, o: replace(o, lse=o.lse.nan_to_num(neginf=0)), "lse 0, expected -inf"),
    ],
)
def test_a_wrongly_declared_convention_is_named(declared: dict[str, Any], bend: Any, words: str) -> None:
    record = record_of(Bent(bend, **declared))
    assert record.finding is not None
    assert record.finding.gate is Gate.LSE
    assert words in record.sentence


def test_declared_conventions_are_converted() -> None:
    base2 = Bent(lambda c, o: replace(o, lse=o.lse / 0.6931471805599453), lse_base=LseBase.TWO)
    assert record_of(base2).verdict is Verdict.FALLBACK
    infinite = Bent(lambda c, o: replace(o, lse=o.lse.nan_to_num(neginf=float("inf"))), empty_lse=float("inf"))
    assert record_of(infinite).verdict is Verdict.FALLBACK


def refuse(case: Case, outputs: Outputs) -> Outputs:
    raise Refused("head_dim 64 is not compiled")


def test_a_declared_refusal_that_is_honoured_is_accepted() -> None:
    record = record_of(Bent(refuse, refused("head_dim 64 is not compiled")))
    assert (record.verdict, record.status) == (Verdict.REFUSED, "refused(head_dim 64 is not compiled)")
    assert record.accepted


@pytest.mark.parametrize(
    ("bend", "support", "words"),
    [
        (
            lambda c, o: replace(o, path=None),
            refused("too large"),
            "support declared refused(too large), but run returned numbers",
        ),
        (refuse, NATIVE, "run refused (head_dim 64 is not compiled), but support declared native"),
    ],
)
def test_a_lie_about_refusals_fails(bend: Any, support: Support, words: str) -> None:
    record = record_of(Bent(bend, support))
    assert record.verdict is Verdict.FAIL
    assert words in record.sentence


def test_only_the_three_status_words_exist() -> None:
    with pytest.raises(ValueError, match="status must be native, fallback or refused, got 'ok'"):
        Support("ok")
    with pytest.raises(ValueError, match="fallback needs a reason"):
        Support("fallback")


def test_wrong_members_are_named() -> None:
    with pytest.raises(TypeError, match="has no callable `run"):
        Backend(object())
    with pytest.raises(TypeError, match="capabilities must be a Capabilities, got dict"):
        Backend(type("A", (), {"run": print, "capabilities": {}})())
    assert Backend(type("A", (), {"run": print})()).capabilities == Capabilities()


def test_a_fallback_that_need_not_split_does_not_pass_for_a_merge() -> None:
    splits = "decode/fp32/kv:40/splits:2/tile:16"
    assert record_of(Bent(lambda c, o: o), splits).gates[Gate.MERGE] == "not applicable"
    native = record_of(Bent(lambda c, o: replace(o, path=None), NATIVE), splits)
    assert (native.verdict, native.gates[Gate.MERGE]) == (Verdict.PASS, "pass")


# --- a backend that is told to leave its sparse path


class Leaving(Right):
    """The dense backend beside a sparse path that it says it takes otherwise. `path`: what it says when it is told to
    leave; `bend`: what is done to out then.
    """

    def __init__(self, path: str | None = "fallback({})", bend: float = 1.0) -> None:
        super().__init__()
        self.path, self.bend = path, bend

    def support(self, spec: AttentionSpec) -> Support:
        return NATIVE

    def run(self, case: Case, plan: object = None) -> Outputs:
        outputs = super().run(case)
        if case.fallback is None:
            return replace(outputs, path="native")
        outputs.out.mul_(self.bend)
        return replace(outputs, path=self.path and self.path.format(case.fallback))

    counters = None  # type: ignore[assignment]  # an adapter need not count


class Counting(Leaving):
    """Counts `times` for each run, under `path`."""

    def __init__(self, times: int = 1, path: str = "fallback(dense)") -> None:
        super().__init__()
        self.times, self.counted_as, self.count = times, path, 0

    def run(self, case: Case, plan: object = None) -> Outputs:
        self.count += self.times
        return super().run(case)

    def counters(self) -> dict[str, int]:
        return {self.counted_as: self.count}


FORCED = "decode/fp32/kv:40+21/fallback:dense"


@pytest.mark.parametrize("reason", FallbackReason)
def test_each_reason_to_fall_back_is_forced_and_judged(reason: FallbackReason) -> None:
    record = record_of(Leaving(), f"decode/fp32/kv:40+21/fallback:{reason}")
    assert record.verdict is Verdict.FALLBACK, record.sentence
    assert record.status == f"fallback({reason})"
    assert record_of(Leaving(), "decode/fp32/kv:40+21").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (Leaving("native"), "the backend took the path native, but declared fallback(dense)"),
        (Leaving("fallback(workspace)"), "took the path fallback(workspace), but declared fallback(dense)"),
        (Leaving(None), "a backend that is forced to fall back must say its path"),
        (Counting(2), "one run was counted as fallback(dense) +2, expected fallback(dense) +1"),
        (Counting(0), "one run was counted as nothing"),
        (Counting(path="native"), "one run was counted as native +1, expected fallback(dense) +1"),
    ],
)
def test_a_forced_fallback_says_its_reason_and_is_counted_once(backend: Any, words: str) -> None:
    record = record_of(backend, FORCED)
    assert record.verdict is Verdict.FAIL
    assert record.gates[Gate.CONTRACT] == "fail"
    assert words in record.sentence


def test_a_run_that_is_counted_once_passes() -> None:
    assert record_of(Counting(), FORCED).verdict is Verdict.FALLBACK


def test_wrong_numbers_of_the_other_path_fail() -> None:
    assert record_of(Leaving(bend=1.5), FORCED).verdict is Verdict.FAIL
    assert record_of(Leaving(bend=1.5), "decode/fp32/kv:40+21").verdict is Verdict.PASS


def test_a_backend_without_another_path_is_refused_in_its_name() -> None:
    record = record_of(Bent(lambda c, o: o), FORCED)
    assert record.verdict is Verdict.REFUSED
    assert record.sentence == "fallback: the backend cannot be told to leave its sparse path"


def test_the_other_path_may_refuse_a_spec_and_must_then_raise() -> None:
    class Narrow(Leaving):
        def falls_back(self, spec: AttentionSpec, reason: FallbackReason) -> Support:
            return refused("no dense path for fp32")

    record = record_of(Narrow(), FORCED)
    assert record.verdict is Verdict.FAIL
    assert "declared refused(no dense path for fp32)" in record.sentence


def test_another_reason_than_the_one_that_was_asked_for_is_the_adapters_error() -> None:
    class Other(Leaving):
        def falls_back(self, spec: AttentionSpec, reason: FallbackReason) -> Support:
            return fallback("workspace")

    record = record_of(Other(), FORCED)
    assert record.verdict is Verdict.ERROR
    assert "falls_back(spec, dense) must be fallback(dense) or refused(...), got fallback(workspace)" in record.sentence


def test_another_arithmetic_of_the_other_path_is_declared_apart() -> None:
    class Coarse(Leaving):
        def run(self, case: Case, plan: object = None) -> Outputs:
            outputs = super().run(case)
            if case.fallback:
                outputs.out.copy_(outputs.out.to(torch.bfloat16))
            return outputs

    assert record_of(Coarse(), FORCED).verdict is Verdict.FAIL
    coarse = Coarse()
    declared = {DType.FP32: Numerics(p=DType.FP32, out=DType.BF16, dense=True)}
    coarse.capabilities = replace(coarse.capabilities, fallback_numerics=declared)
    record = record_of(coarse, FORCED)
    assert record.verdict is Verdict.FALLBACK, record.sentence


# --- rows that a spec forbids to be empty


class Strict(Emulation):
    """The modelled kernel; `looks`: whether it refuses a call with an empty row."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks

    def run(self, case: Case, plan: object = None) -> Outputs:
        if self.looks and not case.kv_indptr.diff().all():
            raise Refused("a row has no candidate")
        return super().run(replace(case, spec=replace(case.spec, empty_row=EmptyRowRule.ZERO)))


def test_a_call_with_a_forbidden_empty_row_must_be_refused() -> None:
    cell = "decode/fp32/kv:40+0+21/pattern:all/empty:forbid"
    record = record_of(Strict(looks=True), cell)
    assert record.verdict is Verdict.PASS, record.sentence
    assert record.gates[Gate.CONTRACT] == "pass"
    assert record.gates[Gate.OUT] == "not applicable"
    record = record_of(Strict(looks=False), cell)
    assert record.verdict is Verdict.FAIL
    assert record.sentence.startswith("row (request 1, query 0, KV head 0) has no edge, which the spec forbids")


def test_a_call_without_an_empty_row_is_judged_as_any_other() -> None:
    record = record_of(Strict(looks=True), "decode/fp32/kv:40+21/pattern:all/empty:forbid")
    assert record.verdict is Verdict.PASS
    assert record.gates[Gate.OUT] == "pass"


def test_a_fault_in_rows_that_may_not_be_empty_is_named() -> None:
    class Losing(Strict):
        def run(self, case: Case, plan: object = None) -> Outputs:
            place = torch.arange(len(case.kv_indices)) - case.kv_indptr[:-1].long().repeat_interleave(
                case.kv_indptr.diff()
            )
            kept = (place != 3).long()
            indptr = torch.cat((kept.new_zeros(1), kept.cumsum(0)))[case.kv_indptr.long()]
            lists = case.kv_indices[kept.bool()]
            return super().run(replace(case, kv_indptr=indptr.to(case.kv_indptr.dtype), kv_indices=lists))

    record = record_of(Losing(looks=True), "decode/fp32/kv:40+21/pattern:all/empty:forbid")
    assert record.verdict is Verdict.FAIL
    assert "missing token" in record.sentence
