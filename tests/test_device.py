"""A device that others fill for a while costs a wait, not a verdict."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from sacts.conformance import child
from sacts.conformance.device import HELD, WAITS, crowded, release
from sacts.reports.records import Record, Verdict, blank

CELL = "decode/fp16/kv:17"
FULL = "OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB"


def judging(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> tuple[Record, list[float]]:
    """The record of a cell whose judgements give these answers in turn, and how long was waited before each."""
    left, waited = list(answers), list[float]()

    def answer(*_: object) -> Record:
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return blank("x", "cuda:0", CELL, 0, *found)

    monkeypatch.setattr(child, "judge", answer)
    monkeypatch.setattr(child.Child, "_launcher", lambda *_: None)
    monkeypatch.setattr(child, "device_is_sound", lambda _: True)
    monkeypatch.setattr(child, "release", lambda _: None)
    monkeypatch.setattr(child.time, "sleep", waited.append)
    served = child.Child(io.BytesIO(), "x", "cuda:0", 1.0, 1.0)
    record = served._judge(child.Order(CELL, 0, {}))
    child.faulthandler.cancel_dump_traceback_later()
    return record, waited


def test_a_cell_without_memory_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = (Verdict.ERROR, "run(case) raised RuntimeError: Triton Error [CUDA]: out of memory")
    record, waited = judging(monkeypatch, [raised, RuntimeError(FULL), (Verdict.PASS,)])
    assert record.verdict is Verdict.PASS
    assert waited == list(WAITS[:2])


def test_memory_that_never_comes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    record, waited = judging(monkeypatch, [RuntimeError(FULL)] * (len(WAITS) + 1))
    assert record.verdict is Verdict.SUITE_ERROR
    assert "out of memory" in record.sentence
    assert record.sentence.endswith("try fewer processes (-n)")
    assert waited == list(WAITS)


@pytest.mark.parametrize(
    ("verdict", "sentence"), [(Verdict.FAIL, "out of memory"), (Verdict.ERROR, "KeyError"), (Verdict.PASS, "")]
)
def test_what_is_no_lack_of_memory_is_judged_once(
    verdict: Verdict, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, waited = judging(monkeypatch, [(verdict, sentence)])
    assert record.verdict is verdict
    assert waited == []


def test_a_device_of_one_s_own_is_not_waited_for() -> None:
    assert not crowded(blank("x", "cpu", CELL, 0, Verdict.ERROR, "out of memory"))


def test_a_poisoned_device_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * HELD)
    monkeypatch.setattr(torch.cuda, "empty_cache", poisoned)
    release("cuda:0")
    with pytest.raises(RuntimeError):
        torch.cuda.empty_cache()


def test_memory_is_given_back_where_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(1))
    for held, device in ((HELD // 2, "cuda:0"), (2 * HELD, "cpu"), (2 * HELD, "cuda:0")):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _, held=held: held)
        release(device)
    assert given == [1]
