"""The built wheel, installed into an empty environment: every module imports, and the data files came along."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("reference", "matrices", "kernels_under_test", "conformance", "reports")
CHECK = """
import importlib, importlib.metadata, pathlib, sys
where = pathlib.Path(sys.argv[1])
names = sys.argv[2:]
for name in names:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(where), module.__file__
from sacts.matrices import must_pass, tiers
from sacts.kernels_under_test.faults import catalogue
assert len(tiers.load(tiers.path_of("smoke"))) >= 12
assert must_pass.load()
assert len(catalogue()) >= 10
points = importlib.metadata.entry_points(group="sacts.adapters")
assert {point.name for point in points} == {"triton", "sdpa"}
print(len(names))
"""


def modules() -> list[str]:
    paths = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    parts = ([*path.relative_to(ROOT).with_suffix("").parts] for path in paths)
    return sorted("sacts." + ".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(command, cwd=source, check=True)
    (built,) = (source / "dist").glob("sacts-*.whl")
    return built


def test_every_module_of_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    # The dependencies come from this environment; a path added this way runs no .pth: no editable install shows
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run(
        [python, "-c", CHECK, site, *modules()], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 35


def test_nothing_of_ours_lands_beside_the_namespace(wheel: Path) -> None:
    import zipfile

    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert top == {"sacts", "sacts-0.1.0.dist-info"}
