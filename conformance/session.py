"""One run: judge a tier file through pytest, collect the records, show progress."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sacts.reports.records import Record, Verdict, blank, decode

from .plugin import RECORD
from .worker import Limits


@dataclass(frozen=True)
class Selection:
    """What to judge: a tier file, narrowed by a pytest `-k` expression, for some adapters on one device; `gpus`: over
    how many the processes spread.
    """

    path: Path
    adapters: Sequence[str]
    device: str = "cpu"
    expression: str = ""
    replicates: int = 1
    processes: int = 1
    limits: Limits = field(default_factory=Limits)
    gpus: int = 0

    def arguments(self) -> list[str]:
        """For pytest: only our own plugin and xdist, no configuration of the folder that the user happens to be in."""
        arguments = [str(self.path), f"--rootdir={self.path.parent}", "-c", os.devnull, "-p", "no:terminal"]
        arguments += ["-p", "no:cacheprovider", "-p", "sacts.conformance.plugin"]
        if self.processes > 1:
            arguments += ["-p", "xdist.plugin", "-n", str(self.processes), "--dist", "worksteal"]
        if self.expression:
            arguments += ["-k", self.expression]
        arguments += [f"--sacts-adapter={adapter}" for adapter in self.adapters]
        arguments += [f"--sacts-device={self.device}", f"--sacts-replicates={self.replicates}"]
        arguments += [f"--sacts-gpus={self.gpus}"]
        arguments += [f"--sacts-timeout={self.limits.launch}", f"--sacts-compile-timeout={self.limits.first}"]
        return arguments


class Journal:
    """A pytest plugin of the controlling process: records as they come in, and the progress line."""

    def __init__(self, device: str, progress: Progress) -> None:
        self.records: dict[str, Record] = {}
        self.collected: list[str] = []
        self.errors: list[str] = []
        self.seconds: dict[str, float] = {}  # by cell id, of all adapters and replicates
        self._device = device
        self._progress = progress
        self._task: TaskID | None = None

    def _expect(self, ids: Sequence[str]) -> None:
        self.collected = list(ids)
        if self._task is None:
            self._task = self._progress.add_task("judging", total=len(ids), bad="")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist, the items stand here."""
        if session.items:
            self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """With xdist, each worker reports the same list."""
        self._expect(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A tier or adapter that could not be read."""
        if report.failed:
            self.errors.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One record per item: the judged one, or a suite error where the item failed without one."""
        found = [value for name, value in report.user_properties if name == RECORD]
        if found and report.when == "call":
            self._add(report.nodeid, decode(str(found[0])), report.duration)
        elif report.failed and report.nodeid not in self.records:
            crash = getattr(report.longrepr, "reprcrash", None)
            words = crash.message if crash else str(report.longrepr)
            self._add(report.nodeid, self._blank(report.nodeid, Verdict.SUITE_ERROR, words))

    def _add(self, nodeid: str, record: Record, seconds: float = 0.0) -> None:
        self.records[nodeid] = record
        self.seconds[record.cell] = self.seconds.get(record.cell, 0.0) + seconds
        if self._task is not None:
            bad = sum(not r.accepted for r in self.records.values())
            self._progress.update(self._task, completed=len(self.records), bad=f"{bad} not accepted" if bad else "")

    def _blank(self, nodeid: str, verdict: Verdict, sentence: str) -> Record:
        _, adapter, name = nodeid.split("::", 2)
        cell, _, replicate = name.partition("/replicate:")
        return blank(adapter, self._device, cell, int(replicate or 0), verdict, sentence)

    def complete(self) -> list[Record]:
        """Every collected case: what was not reached is `not-run`."""
        missing = [nodeid for nodeid in self.collected if nodeid not in self.records]
        return [
            *self.records.values(),
            *(self._blank(nodeid, Verdict.NOT_RUN, "the run ended first") for nodeid in missing),
        ]


class SelectionError(ValueError):
    """A selection that names nothing that can be judged."""


def judge_all(selection: Selection, console: Console, seconds: dict[str, float] | None = None) -> list[Record]:
    """Judge every selected case; `seconds` takes what each cell took. Raises SelectionError where nothing matches or a
    file cannot be read.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bad]}", markup=False),
        TextColumn("time left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    journal = Journal(selection.device, progress)
    before = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins may reorder, retry or time out what we judge
    try:
        _check(selection)
        with progress:
            pytest.main(selection.arguments(), plugins=[journal])
    finally:
        if before is None:
            del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        else:
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = before
    if seconds is not None:
        seconds |= journal.seconds
    return journal.complete()


def _check(selection: Selection) -> None:
    """Collect once in this process, where mistakes can be told apart."""
    journal = Journal(selection.device, Progress(disable=True))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = pytest.main([*replace(selection, processes=1).arguments(), "--collect-only"], plugins=[journal])
    if journal.errors:
        raise SelectionError(journal.errors[0])
    if code == pytest.ExitCode.USAGE_ERROR:
        raise SelectionError(
            said.getvalue().strip().removeprefix("ERROR: ") or f"cannot select -k {selection.expression!r}"
        )
    if not journal.collected:
        raise SelectionError(
            f"no cell of {selection.path.name} matches -k {selection.expression!r}; see sacts matrix list"
        )
