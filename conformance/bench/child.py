"""The killable process: times one scenario after another with one adapter, as
`python -m sacts.conformance.bench.child FD ADAPTER DEVICE`.

It reads one JSON order a line from standard input and writes one row a line to file descriptor FD. Whatever the adapter
prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import msgspec
import torch

from sacts.reports.records import Verdict

from .. import loading
from ..adapter import Backend, Case, Outputs, Refused
from . import ceilings, checks, inputs, timing
from .ceilings import Ceilings
from .records import Row, encode, too_good
from .scenarios import Scenario, named


class Order(msgspec.Struct, frozen=True):
    """Time this scenario. `hints`: in place of its own; `seconds`: of warm-ups, and of events, of a long run."""

    scenario: str
    tiny: bool = False
    seconds: float = 5.0
    hints: dict[str, int | str] = {}


def hinted(scenario: Scenario, hints: dict[str, int | str]) -> Scenario:
    """A scenario with other hints. Raises ValueError for a hint that there is not, or a value that it cannot have."""
    values: dict[str, Any] = {}
    for name, value in hints.items():
        if not hasattr(scenario.hints, name):
            raise ValueError(f"no hint {name!r}; there are {', '.join(vars(scenario.hints))}")
        values[name] = type(getattr(scenario.hints, name))(value)
    return replace(scenario, hints=replace(scenario.hints, **values))


@dataclass
class Runs:
    """The calls of a scenario, one a rotation, and what each returned last."""

    backend: Backend
    cases: list[Case]
    planned: list[tuple[Any, ...]]
    results: list[Outputs | None]

    @property
    def calls(self) -> list[Callable[[], object]]:
        """A call of each rotation."""
        return [partial(self.run, rotation) for rotation in range(len(self.cases))]

    def run(self, rotation: int) -> None:
        """Run one rotation under its plan."""
        self.results[rotation] = self.backend.run(self.cases[rotation], self.planned[rotation])

    def blank(self) -> None:
        """Forget what was written, so that what is judged was written by what follows."""
        for case in self.cases:
            case.out.fill_(torch.nan)
            case.lse.fill_(torch.nan)

    def check(self, words: str) -> tuple[str, int]:
        """What is wrong with a sample of all rotations, and how many rows were looked at."""
        checked = 0
        for rotation, (case, result) in enumerate(zip(self.cases, self.results, strict=True)):
            assert result is not None
            rows = checks.rows_of(case.spec, words, rotation)
            checked += len(rows)
            if wrong := checks.check(self.backend, case, result, rows):
                return f"{words}, rotation {rotation}, {wrong}", checked
        return "", checked


class Timer:
    """Times scenarios with one backend; the ceilings are measured once, in this process."""

    def __init__(self, name: str, backend: Backend, device: str) -> None:
        self._name, self._backend, self._device = name, backend, device
        self._clock = timing.clock_of(device)
        self._ceilings: Ceilings | None = None

    def _synchronise(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)

    def row(self, order: Order) -> Row:
        """The row of one scenario, whatever the adapter raises."""
        scenario = hinted(named(order.scenario), order.hints)
        blank = Row(
            scenario=scenario.name,
            adapter=self._name,
            device=self._device,
            verdict=Verdict.ERROR,
            bound=scenario.bound,
            tiny=order.tiny,
            hints=order.hints,
        )
        try:
            support = self._backend.support(scenario.spec(order.tiny))
            if support.status == "refused":
                raise Refused(support.reason)
            return self._timed(scenario, order, blank)
        except Refused as refusal:
            return msgspec.structs.replace(blank, verdict=Verdict.REFUSED, sentence=str(refusal))
        except Exception as error:  # whatever an adapter raises costs its row
            words = (str(error).strip().splitlines() or [""])[0]
            return msgspec.structs.replace(blank, sentence=f"{type(error).__name__}: {words}")
        finally:
            gc.collect()
            if self._device.startswith("cuda"):
                with contextlib.suppress(RuntimeError):  # of a poisoned context, which the row tells
                    torch.cuda.empty_cache()

    def _timed(self, scenario: Scenario, order: Order, blank: Row) -> Row:
        self._ceilings = self._ceilings or ceilings.measure(self._device, self._clock)
        prepared = inputs.prepare(scenario, order.tiny, self._device, self._backend)
        runs, size = self._runs(prepared)
        for call in runs.calls:  # compiles, and refuses
            call()
        self._synchronise()
        runs.blank()
        eager = timing.measure(runs.calls, self._clock, order.seconds)
        wrong, checked = runs.check("eager")
        result, plan = runs.results[0], None
        if self._backend.plans:
            plan = timing.plan_ms(lambda: self._backend.planned(runs.cases[0]), self._synchronise)
        row = msgspec.structs.replace(
            blank,
            verdict=Verdict.FAIL if wrong else Verdict.PASS,
            sentence=wrong,
            work=inputs.work_of(prepared),
            loaded=prepared.cost.kv_bytes if scenario.sizes(order.tiny).query_block == 1 else 0.0,
            eager=eager,
            plan=plan,
            ceilings=self._ceilings,
            rotations=len(runs.cases),
            checked=checked,
            path=result.path if result else None,
            workspace=size,
        )
        if not wrong and self._device.startswith("cuda") and self._backend.capabilities.graph:
            row = self._replayed(runs, order, row)
        finding = "" if row.verdict is Verdict.FAIL or order.tiny else too_good(row)
        return msgspec.structs.replace(row, verdict=Verdict.FAIL, sentence=finding) if finding else row

    def _replayed(self, runs: Runs, order: Order, row: Row) -> Row:
        """The row with the times of a graph, whose outputs are judged too; where none can be recorded, why."""
        try:
            replay = timing.graph_of(runs.calls)
        except Exception as error:  # the promise is judged elsewhere (`exec:graph`): eager times stand
            words = (str(error).strip().splitlines() or [""])[0]
            return msgspec.structs.replace(row, sentence=f"not replayed: {type(error).__name__}: {words}")
        runs.blank()
        replayed = timing.measure([replay], self._clock, order.seconds, per_run=len(runs.cases))
        wrong, checked = runs.check("replayed")
        verdict = Verdict.FAIL if wrong else row.verdict
        return msgspec.structs.replace(
            row, replayed=replayed, verdict=verdict, sentence=wrong, checked=row.checked + checked
        )

    def _runs(self, prepared: inputs.Prepared) -> tuple[Runs, int]:
        """The cases with a workspace that all share, and their plans; its bytes."""
        size = max(self._backend.workspace_bytes(case) for case in prepared.cases)
        workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)
        cases = [replace(case, workspace=workspace) for case in prepared.cases]
        planned = [self._backend.planned(case) for case in cases]
        return Runs(self._backend, cases, planned, [None] * len(cases)), size


def serve(orders: BinaryIO, replies: BinaryIO, adapter: str, device: str) -> None:
    """Time until the orders end."""
    loaded: Backend | loading.AdapterError
    try:
        loaded = loading.load(adapter)
    except loading.AdapterError as error:
        loaded = error
    timer = Timer(adapter, loaded, device) if isinstance(loaded, Backend) else None
    for line in orders:
        order = msgspec.json.decode(line, type=Order)
        if timer is not None:
            row = timer.row(order)
        else:
            row = Row(
                scenario=order.scenario,
                adapter=adapter,
                device=device,
                verdict=Verdict.NOT_RUN,
                sentence=str(loaded),
                tiny=order.tiny,
            )
        replies.write(encode(row) + b"\n")
        replies.flush()


def main() -> None:
    """Serve the parent over the descriptor that it passed."""
    fd, adapter, device = sys.argv[1:]
    faulthandler.enable()
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(int(fd), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if device.startswith("cuda:"):
        torch.cuda.set_device(torch.device(device))
    serve(orders, replies, adapter, device)


if __name__ == "__main__":
    main()
