"""The documents say what the code does: the README's adapter runs and fails as printed; the tables name every field."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from sacts.conformance.adapter import Backend, Capabilities, Case, Gradients, Saved
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.loading import load
from sacts.kernels_under_test.faults import audited, catalogue
from sacts.matrices.cell import parse
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec
from sacts.reports.records import Record, Verdict

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADAPTERS = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
KERNEL = re.search(r"```python\n(.*?)```", README, re.DOTALL)
SHOWN = "prefill/fp16/kv:50/q:20/block:16/pattern:all/causal:bottom_right"
MASK = """            if spec.causal != "none":
                seen &= t <= position
"""


def judged(folder: Path, source: str, cell: str) -> Record:
    path = folder / "my_kernel.py"
    path.write_text(source, encoding="utf-8")
    backend: Backend = load(str(path))
    return judge(Launcher(backend, "cpu"), "my_kernel.py", parse(cell))


@pytest.mark.parametrize("cell", [SHOWN, "decode/bf16/kv:33+0+5", "decode/fp32/kv:90/block:16/pattern:all/window:20"])
def test_the_adapter_of_the_readme_is_right(tmp_path: Path, cell: str) -> None:
    assert KERNEL is not None
    assert len(KERNEL[1].splitlines()) <= 30
    assert judged(tmp_path, KERNEL[1], cell).verdict is Verdict.PASS


def test_without_its_mask_it_fails_as_the_readme_shows(tmp_path: Path) -> None:
    assert KERNEL is not None
    assert KERNEL[1].count(MASK) == 1
    record = judged(tmp_path, KERNEL[1].replace(MASK, ""), SHOWN)
    assert record.verdict is Verdict.FAIL
    assert " ".join(record.sentence.split()) in " ".join(README.split())
    strip = record.finding.strip if record.finding else None
    assert strip is not None
    assert strip.elsewhere == 0
    np.testing.assert_allclose(strip.observed, [1 / 50] * 50 + [0] * 14, rtol=0, atol=1e-4)
    np.testing.assert_allclose(strip.expected, [1 / 32] * 32 + [0] * 32)


def test_without_its_window_the_skeleton_fails_as_the_tour_shows(tmp_path: Path) -> None:
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    skeleton = (ROOT / "conformance" / "templates" / "adapter.py.txt").read_text(encoding="utf-8")
    window = """            if spec.window_left >= 0:
                seen &= t >= position - spec.window_left
"""
    assert skeleton.count(window) == 1
    cell = "prefill/bf16/kv:70/q:5/pattern:all/causal:bottom_right/window:16"
    assert judged(tmp_path, skeleton, cell).verdict is Verdict.PASS
    record = judged(tmp_path, skeleton.replace(window, ""), cell)
    assert " ".join(record.sentence.split()) in " ".join(tour.split())


def test_the_readme_counts_the_catalogue() -> None:
    modelled = len(audited()) - len(catalogue())
    assert f"seeds {len(catalogue())} faults into the bundled kernels and {modelled} into a modelled one" in README


def rows_of(heading: str) -> set[str]:
    section = ADAPTERS.split(heading, 1)[1].split("\n## ", 1)[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in first_cells for name in re.findall(r"`(?:saved\.|Gradients\.)?(\w+)", cell)}


@pytest.mark.parametrize(
    ("heading", "record"),
    [
        ("## Case", Case),
        ("`AttentionSpec` (all lengths", AttentionSpec),
        ("## Capabilities", Capabilities),
        ("## The numerics contract", Numerics),
        ("## Backward", Saved),
        ("## Backward", Gradients),
    ],
)
def test_the_tables_name_every_field(heading: str, record: type) -> None:
    assert {field.name for field in fields(record)} <= rows_of(heading)
