"""Isolation: each adapter is timed in a killable process of its own, which is replaced after a crash, a hang or a
poisoned device context. A crash costs one row.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import msgspec

from sacts.reports.records import Verdict

from ..process import ChildProcess, innermost
from .records import Row, decode

if TYPE_CHECKING:
    from .child import Order

POISON = ("CUDA error", "illegal memory access", "device-side assert")


class Process:
    """Times scenarios with one adapter, one at a time; `limit`: seconds for each, compilation included."""

    def __init__(self, adapter: str, device: str, limit: float) -> None:
        self._adapter, self._device, self._limit = adapter, device, limit
        self._process: ChildProcess | None = None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def row(self, order: Order) -> Row:
        """The row of one scenario, whatever the adapter does."""
        if self._process is None:
            arguments = (self._adapter, self._device)
            self._process = ChildProcess("sacts.conformance.bench.child", arguments, self._device)
        self._process.send(msgspec.json.encode(order))
        line = self._process.read(self._limit)
        if not line:
            return self._lost(order, timed_out=line is None)
        row = decode(line)
        if any(word in row.sentence for word in POISON):
            self.close()
        return row

    def close(self) -> None:
        """End the child, by force."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _lost(self, order: Order, timed_out: bool) -> Row:
        """The row of a child that ended or hung; the next scenario gets a new one."""
        assert self._process is not None
        if timed_out:
            verdict, sentence = Verdict.TIMEOUT, f"no row within {self._limit:g} s"
        else:
            code = self._process.wait()
            said = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            verdict, sentence = Verdict.CRASH, f"the process ended with {said}{self._last_words()}"
        self.close()
        return Row(
            scenario=order.scenario,
            adapter=self._adapter,
            device=self._device,
            verdict=verdict,
            sentence=sentence,
            tiny=order.tiny,
            hints=order.hints,
        )

    def _last_words(self) -> str:
        assert self._process is not None
        tail = self._process.said()
        if where := innermost(tail):
            return f"; it was at {where}"
        lines = tail.strip().splitlines()
        return f" ({lines[-1]})" if lines else ""
