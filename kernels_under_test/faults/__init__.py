"""Seeded faults: each is one small patch on the bundled Triton backend, with the public failure it stands for, the
gate that must catch it and the words that its place must be named with. The catalogue is data: `catalogue.toml`.
`model.toml` holds faults of terms, codecs and backward, seeded in the emulation: see `ModelFault`; `cells.toml` those
that one cell beyond the plain row was chosen for.

`sacts.kernels_under_test.faults:NAME` names the faulty adapter, so `sacts run --adapter` takes it like any other.
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BACKENDS = Path(__file__).parent.parent


class FaultError(ValueError):
    """A catalogue entry that cannot be seeded: its text no longer stands in the backend, or stands there twice."""


@dataclass(frozen=True)
class Fault:
    """One seeded fault: `find` in `file` becomes `replace`. `gates`: what may be named; `place`: a pattern that one
    sentence must match; `verdict`: `fail`, or `crash` for a fault that may end the process; `cells`: those that it is
    audited on, where a tier of plain rows cannot show it.
    """

    name: str
    stands_for: str
    file: str
    find: str
    replace: str
    gates: tuple[str, ...]
    place: str
    verdict: str = "fail"
    cells: tuple[str, ...] = ()

    @property
    def adapter(self) -> str:
        """How `--adapter` names the faulty backend."""
        return f"{__name__}:{self.name}"


@dataclass(frozen=True)
class ModelFault:
    """One fault of the emulation: `find` in `file` becomes `replace`. `problem`: the spec, by its name in the tests,
    under which it must leave the bounds of one of `outputs`. `gates` and `place`, as of `Fault`: of those that show in
    cells, so that the audit runs them.
    """

    name: str
    stands_for: str
    file: str
    find: str
    replace: str
    problem: str
    outputs: tuple[str, ...]
    gates: tuple[str, ...] = ()
    place: str = ""
    verdict: str = "fail"
    cells: tuple[str, ...] = ()

    @property
    def adapter(self) -> str:
        """How `--adapter` names the faulty model."""
        return f"{__name__}:{self.name}"


def _entries(file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))["fault"]
    return found


@cache
def catalogue() -> dict[str, Fault]:
    """All faults seeded in the Triton backend, by name."""
    faults = [
        Fault(**entry | {name: tuple(entry.get(name, ())) for name in ("gates", "cells")})
        for entry in _entries("catalogue.toml")
    ]
    return {fault.name: fault for fault in faults}


@cache
def model_catalogue() -> dict[str, ModelFault]:
    """All faults seeded in the emulation, by name."""
    lists = ("outputs", "gates", "cells")
    faults = [
        ModelFault(**entry | {name: tuple(entry[name]) for name in lists if name in entry})
        for entry in _entries("model.toml")
    ]
    return {fault.name: fault for fault in faults}


@cache
def audited() -> dict[str, Fault | ModelFault]:
    """All faults that show in cells, by name: those of the Triton backend, then those of the model's backward."""
    return catalogue() | {name: fault for name, fault in model_catalogue().items() if fault.gates}


@cache
def drawn_catalogue() -> dict[str, ModelFault]:
    """All faults of the emulation that only drawn inputs show, by name: `problem` is the cell, `outputs` the gate."""
    faults = [ModelFault(**entry | {"outputs": tuple(entry["outputs"])}) for entry in _entries("drawn.toml")]
    return {fault.name: fault for fault in faults}


@cache
def cell_catalogue() -> dict[str, ModelFault]:
    """All faults of the emulation that one cell beyond the plain row shows, by name: `problem` is the cell, `outputs`
    the gate.
    """
    faults = [ModelFault(**entry | {"outputs": tuple(entry["outputs"])}) for entry in _entries("cells.toml")]
    return {fault.name: fault for fault in faults}


def seed(fault: Fault | ModelFault) -> Any:
    """The faulty adapter class of the Triton backend, or of the model. Raises FaultError."""
    backend = "emulation" if isinstance(fault, ModelFault) else "paged"
    return importlib.import_module(f"{patched(fault, backend)}.adapter").Adapter


def patched(fault: Fault | ModelFault, backend: str) -> str:
    """The name of a package that is the backend's, but for the fault; importable from now on. Raises FaultError."""
    package = f"sacts_fault_{fault.name}"
    if package not in sys.modules:
        folder = Path(tempfile.mkdtemp(prefix="sacts-fault-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        shutil.copytree(BACKENDS / backend, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        target = folder / package / fault.file
        text = target.read_text(encoding="utf-8")
        if text.count(fault.find) != 1:
            raise FaultError(
                f"fault {fault.name}: {text.count(fault.find)} places in {fault.file} read {fault.find!r}, expected 1"
            )
        target.write_text(text.replace(fault.find, fault.replace), encoding="utf-8")
        sys.path.insert(0, str(folder))
        try:
            importlib.import_module(package)
        finally:
            sys.path.remove(str(folder))
    return package


def __getattr__(name: str) -> Any:
    faults: dict[str, Fault | ModelFault] = {**cell_catalogue(), **model_catalogue(), **catalogue()}
    if name in faults:
        return seed(faults[name])
    raise AttributeError(f"no seeded fault {name!r}; faults: {', '.join(audited())}")
