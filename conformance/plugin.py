"""The pytest plugin: collects tier files (`*.cells`), one item per adapter and cell, node ids such as
`smoke.cells::triton::decode/fp16/kv:17/pattern:all`.

It is loaded in every pytest session where SACTS is installed, so it imports nothing heavy before a tier is collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .worker import Worker

RECORD = "sacts"  # the user property that carries a record, as JSON
_WORKER = pytest.StashKey["Worker | None"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for judging tier files under plain pytest; `sacts run` sets them."""
    group = parser.getgroup("sacts", "sparse-attention conformance (tier files, *.cells)")
    group.addoption(
        "--sacts-adapter", action="append", metavar="A", help="adapter to judge; may be repeated (default: triton)"
    )
    group.addoption("--sacts-device", default="cpu", metavar="D", help="torch device (default: cpu)")
    group.addoption("--sacts-replicates", type=int, default=1, metavar="R", help="draw each cell's data R times")
    group.addoption(
        "--sacts-gpus", type=int, default=0, metavar="N", help="GPUs that the processes of xdist take in turn"
    )
    group.addoption("--sacts-timeout", type=float, default=30.0, metavar="S", help="seconds for one launch")
    group.addoption(
        "--sacts-compile-timeout", type=float, default=60.0, metavar="S", help="seconds for a spec's first launch"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A place for the worker of this process."""
    config.stash[_WORKER] = None


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the worker."""
    if worker := config.stash.get(_WORKER, None):
        worker.close()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Tier files are collected wherever they are named."""
    return TierFile.from_parent(parent, path=file_path) if file_path.suffix == ".cells" else None


class TierFile(pytest.File):
    """A tier: its cells, for each adapter."""

    def collect(self) -> Iterator[pytest.Collector]:
        """One node per adapter."""
        for adapter in self.config.getoption("--sacts-adapter") or ["triton"]:
            yield AdapterNode.from_parent(self, name=adapter)


class AdapterNode(pytest.Collector):
    """The cells of a tier for one adapter."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item per cell and replicate."""
        from sacts.matrices import tiers

        from . import loading

        try:
            loading.check(self.name)
            cells = tiers.load(self.path)
        except (loading.AdapterError, tiers.TierError) as error:
            raise self.CollectError(str(error)) from None
        replicates = self.config.getoption("--sacts-replicates")
        for cell in cells:
            for replicate in range(replicates):
                name = cell.id if replicates == 1 else f"{cell.id}/replicate:{replicate}"
                yield CellItem.from_parent(self, name=name, cell=cell.id, replicate=replicate)


class CellFailed(Exception):
    """A cell was not accepted."""


class CellItem(pytest.Item):
    """One cell, judged in a process of its own."""

    def __init__(self, *, cell: str, replicate: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cell = cell
        self.replicate = replicate

    def runtest(self) -> None:
        """Judge; the record travels in the report's user properties."""
        from sacts.reports import records

        assert self.parent is not None
        record = _worker(self.config, self.parent.name).judge(self.cell, self.replicate)
        self.user_properties.append((RECORD, records.encode(record).decode()))
        if not record.accepted:
            raise CellFailed(f"{record.adapter} {records.describe(record)}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The sentence, without a traceback of the suite."""
        if isinstance(excinfo.value, CellFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the cell stands."""
        return self.path, None, self.name


def _worker(config: pytest.Config, adapter: str) -> Worker:
    """The worker of this process; items come adapter by adapter, so one at a time is enough."""
    from .worker import Limits, Worker

    worker = config.stash[_WORKER]
    if worker is None or worker.adapter != adapter:
        if worker is not None:
            worker.close()
        limits = Limits(config.getoption("--sacts-timeout"), config.getoption("--sacts-compile-timeout"))
        worker = config.stash[_WORKER] = Worker(adapter, config.getoption("--sacts-device"), limits, _gpu(config))
    return worker


def _gpu(config: pytest.Config) -> int | None:
    """The GPU of this process of xdist, among those that are visible; None: all of them."""
    gpus = config.getoption("--sacts-gpus")
    name = getattr(config, "workerinput", {}).get("workerid", "")
    return int(name.removeprefix("gw")) % gpus if gpus > 1 and name else None
