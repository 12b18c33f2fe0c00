"""Every seeded fault is killed by the gate that the catalogue names, with its place; the bare backend fails nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from sacts.conformance.audit import audit, judged
from sacts.conformance.gates import generic
from sacts.conformance.session import Selection
from sacts.kernels_under_test import faults
from sacts.matrices import tiers
from sacts.reports.records import Finding, Gate, Record, Verdict, blank

CELLS = Path(__file__).parent / "audit.cells"
CATALOGUE = faults.audited()
DEMANDED = {
    "duplicate_counted_twice",
    "last_tile_dropped",
    "mask_after_exp",
    "merge_of_normalised_splits",
    "base2_lse",
    "causal_by_physical_order",
    "wrong_page_for_v",
    "tail_slot_attended",
    "nan_through_v",
    "sm_scale_missing",
}


# Of traces, for which only `sacts locate` asks, and B to D, which are sharper than the others where P is rounded,
# which the interpreter does not do; their faults have tests of their own.
ELSEWHERE = {Gate.LOGITS, *generic.GATES}


@dataclass(frozen=True)
class Entry:
    name: str = "x"
    adapter: str = "x"
    gates: tuple[str, ...] = ("count",)
    place: str = r"token \d+"
    verdict: str = "fail"
    cells: tuple[str, ...] = ()


OWN_CELLS = tuple(dict.fromkeys(cell for fault in faults.catalogue().values() for cell in fault.cells))
MODEL = "sacts.kernels_under_test.emulation.adapter:Adapter"
MODEL_CELLS = tuple(dict.fromkeys(cell for fault in faults.model_catalogue().values() for cell in fault.cells))


@pytest.fixture(scope="module")
def records() -> list[Record]:
    bare = [Entry("triton", "triton"), Entry("triton", "triton", cells=OWN_CELLS)]
    bare.append(Entry("model", MODEL, cells=MODEL_CELLS))
    selection = Selection(CELLS, [], processes=2)
    return judged([*bare, *CATALOGUE.values()], selection, Console(quiet=True))


def test_every_seeded_fault_is_caught_and_named(records: list[Record]) -> None:
    outcomes = audit(CATALOGUE.values(), records)
    assert {outcome.fault.name for outcome in outcomes} >= DEMANDED
    missed = {o.fault.name: o.shown and o.shown.sentence for o in outcomes if not o.caught}
    assert not missed


def test_the_unpatched_backend_raises_nothing(records: list[Record]) -> None:
    mine = [record for record in records if record.adapter == "triton"]
    assert sorted(record.cell for record in mine) == sorted([*OWN_CELLS, *(cell.id for cell in tiers.load(CELLS))])
    for record in mine:
        assert record.verdict is (Verdict.FALLBACK if "/fallback:" in record.cell else Verdict.PASS), record.sentence
    model = [record for record in records if record.adapter == MODEL]
    assert sorted(record.cell for record in model) == sorted(MODEL_CELLS)
    assert {record.verdict for record in model} == {Verdict.PASS}


def test_every_gate_has_a_fault_that_it_catches(records: list[Record]) -> None:
    assert {record.finding.gate for record in records if record.finding} == set(Gate) - ELSEWHERE


def failed(gate: Gate, sentence: str) -> Record:
    record = blank("x", "cpu", "c", 0, Verdict.FAIL, sentence)
    return Record(
        **{f: getattr(record, f) for f in record.__struct_fields__} | {"finding": Finding(gate, "", sentence)}
    )


@pytest.mark.parametrize(
    ("entry", "seen", "caught"),
    [
        (Entry(), [failed(Gate.COUNT, "token 3 missing")], True),
        (Entry(), [failed(Gate.COUNT, "something")], False),
        (Entry(), [failed(Gate.OUT, "token 3 missing")], False),
        (Entry(), [failed(Gate.COUNT, "token 3 missing"), failed(Gate.OUT, "channel 3")], False),
        (Entry(), [blank("x", "cpu", "c", 0, Verdict.PASS)], False),
        (Entry(), [blank("x", "cpu", "c", 0, Verdict.CRASH, "token 3")], False),
        (Entry(verdict="crash"), [blank("x", "cpu", "c", 0, Verdict.CRASH, "token 3")], True),
        (Entry(), [], False),
    ],
)
def test_the_audit_itself_can_fail(entry: Entry, seen: list[Record], caught: bool) -> None:
    assert audit([entry], seen)[0].caught is caught


def test_a_patch_that_no_longer_fits_is_refused() -> None:
    stale = replace(next(iter(faults.catalogue().values())), name="stale", find="text that stands nowhere")
    with pytest.raises(faults.FaultError, match=r"0 places in index\.py read 'text that stands nowhere', expected 1"):
        faults.seed(stale)


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(AttributeError, match="no seeded fault 'nonsense'; faults: duplicate_counted_twice"):
        faults.nonsense  # noqa: B018 - the attribute access is what is tested
