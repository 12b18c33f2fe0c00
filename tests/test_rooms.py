"""The dependency table of DESIGN section 2, read from the source of every module; what the plugin may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("reference", "matrices", "kernels_under_test", "conformance", "reports")
COMPOSITION_ROOT = "sacts.conformance.cli"


def allowed_of(module: str) -> tuple[str, ...]:
    """What a module may import of ours: these modules and all below them."""
    if f"{module}.".startswith(f"{COMPOSITION_ROOT}."):
        return tuple(f"sacts.{room}" for room in ROOMS)
    if module == "sacts.reports.records":
        return ()
    room = ".".join(module.split(".")[:2])
    table = {
        "sacts.reference": (),
        "sacts.matrices": ("sacts.reference.spec",),
        "sacts.kernels_under_test": ("sacts.conformance.adapter", "sacts.reference.spec", "sacts.reference.numerics"),
        "sacts.conformance": ("sacts.reference", "sacts.matrices", "sacts.reports.records"),
        "sacts.reports": (),
    }
    return (room, *table[room])


def modules() -> dict[str, Path]:
    """Module name -> file, for every module of the five rooms."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("sacts", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = modules()


def imports_of(module: str, source: str, *, package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of all imports, also in functions; a name taken from a package may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if package else module.split(".")[:-1]
            base = [] if not node.level else parts[: len(parts) - node.level + 1]
            origin = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield node.lineno, name if name in MODULES or origin == "sacts" else origin
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            named = (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
            yield from ((node.lineno, name) for name in named if isinstance(name, str))


def violations(module: str, source: str, *, package: bool = False) -> list[str]:
    """Imports that the table forbids."""
    allowed = allowed_of(module)
    bad = []
    for line, name in imports_of(module, source, package=package):
        top = name.partition(".")[0]
        ours = top == "sacts" or top in ROOMS  # a room under its bare folder name would be loaded a second time
        legal = any(name == root or name.startswith(f"{root}.") for root in allowed)
        foreign = module.startswith("sacts.reference") and top != "numpy" and top not in sys.stdlib_module_names
        if (ours and not legal) or (foreign and not ours):
            bad.append(f"{module} line {line} imports {name}")
    return bad


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    path = MODULES[module]
    assert violations(module, path.read_text(encoding="utf-8"), package=path.name == "__init__.py") == []


def test_all_five_rooms_are_looked_at() -> None:
    for room in ROOMS:
        assert sum(name.startswith(f"sacts.{room}.") for name in MODULES) >= 2, room
    assert {COMPOSITION_ROOT, "sacts.reports.records", "sacts.conformance.adapter"} <= MODULES.keys()


def test_what_relative_imports_mean_is_found() -> None:
    outside = (
        "from .a import x\nfrom . import launch\nfrom ..build import Problem\nfrom .. import build\n"
        "from ...reports import records"
    )
    names = [name for _, name in imports_of("sacts.conformance.gates.count", outside, package=False)]
    assert names == [
        "sacts.conformance.gates.a",
        "sacts.conformance.gates",
        "sacts.conformance.build",
        "sacts.conformance.build",
        "sacts.reports.records",
    ]
    inside = imports_of("sacts.conformance.gates", "from .count import x\nfrom .. import build", package=True)
    assert [name for _, name in inside] == ["sacts.conformance.gates.count", "sacts.conformance.build"]


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("sacts.reference.softmax", "import torch"),
        ("sacts.reference.softmax", "from sacts.matrices.cell import Cell"),
        ("sacts.reference.softmax", "from ..reports import records"),
        ("sacts.matrices.cell", "from sacts.reference import candidates"),
        ("sacts.matrices.cell", "import sacts.reference"),
        ("sacts.matrices.cell", "from ..conformance import build"),
        ("sacts.kernels_under_test.sdpa", "from sacts.reference.formats import round_to"),
        ("sacts.kernels_under_test.sdpa", "from sacts.reference import spec, softmax"),
        ("sacts.kernels_under_test.sdpa", "def f():\n    from sacts.conformance import build"),
        ("sacts.kernels_under_test.paged.adapter", "from ...conformance.judge import judge"),
        ("sacts.kernels_under_test.paged.adapter", "importlib.import_module('sacts.reference.forward')"),
        ("sacts.conformance.judge", "from sacts.kernels_under_test import sdpa"),
        ("sacts.conformance.session", "from sacts.reports import summary"),
        ("sacts.conformance.gates.count", "from ...kernels_under_test.paged import kernels"),
        ("sacts.conformance.gates.count", "if TYPE_CHECKING:\n    from sacts import reports"),
        ("sacts.reports.records", "from . import summary"),
        ("sacts.reports.records", "from sacts.reference.spec import DType"),
        ("sacts.reports.summary", "from sacts.conformance import worker"),
        ("sacts.conformance.cli", "from conformance import worker"),
        ("sacts.conformance.judge", "import reference.bounds"),
    ],
)
def test_a_planted_import_is_found(module: str, planted: str) -> None:
    assert module in MODULES
    source = MODULES[module].read_text(encoding="utf-8")
    (found,) = violations(module, f"{source}\n{planted}\n")
    assert found.startswith(f"{module} line ")


@pytest.mark.parametrize(
    ("module", "import_"),
    [
        ("sacts.reference.softmax", "import math, numpy as np\nfrom numpy import typing\nfrom .spec import DType"),
        ("sacts.matrices.cell", "from sacts.reference import spec\nfrom . import axes"),
        ("sacts.kernels_under_test.sdpa", "import torch\nfrom sacts.reference import spec\nfrom .paged import kernels"),
        ("sacts.conformance.judge", "from sacts.reports import records\nfrom sacts.reference import softmax"),
        ("sacts.reports.summary", "from . import records\nimport rich"),
        ("sacts.conformance.cli", "from sacts.reports import summary\nfrom sacts.kernels_under_test import sdpa"),
    ],
)
def test_an_import_that_the_table_allows_is_not_found(module: str, import_: str) -> None:
    assert violations(module, import_) == []


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_plugin_loads_nothing_heavy() -> None:
    loaded = loaded_after("import sacts.conformance.plugin")
    assert "sacts" in loaded
    assert loaded & {"torch", "triton", "numpy", "msgspec", "typer", "rich"} == set()


def test_heavy_modules_would_be_seen() -> None:
    assert "numpy" in loaded_after("import sacts.conformance.plugin, sacts.reference.softmax")
