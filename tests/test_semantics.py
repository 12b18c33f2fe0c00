"""The semantics documents name functions and tests that exist, and every public rule of these modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
LINK = re.compile(r"\[`(\w[\w.]*)`\]\(\.\./((?:reference|tests)/\w+\.py)\)")
SEMANTICS = (DOCS / "semantics.md").read_text(encoding="utf-8")


def defined_in(path: Path) -> set[str]:
    """Functions, classes and methods of a file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


@pytest.mark.parametrize("path", sorted((*DOCS.glob("semantics*.md"), DOCS / "bounds.md")), ids=lambda path: path.name)
def test_every_link_leads_to_what_it_names(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    missing = [(name, file) for name, file in links if name.split(".")[-1] not in defined_in(DOCS.parent / file)]
    assert missing == []


def test_every_rule_names_a_function_or_a_test_of_its_own() -> None:
    rules = re.split(r"\n\*\*(?=[CPLK]\d)", SEMANTICS)[1:]
    assert len(rules) == 11 + 7 + 4 + 8
    for rule in rules:
        assert any(file.startswith("tests/") for _, file in LINK.findall(rule)), rule.split("**")[0]


@pytest.mark.parametrize("module", ["candidates", "paging", "layouts", "branches", "tasks", "tiers", "costs"])
def test_every_conversion_and_rule_is_documented(module: str) -> None:
    tree = ast.parse((DOCS.parent / "reference" / f"{module}.py").read_text(encoding="utf-8"))
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    named = {name for name, file in LINK.findall(SEMANTICS) if file == f"reference/{module}.py"}
    helpers = {
        "rows_of", "lists_of", "concatenate", "expand", "address", "index_bytes", "num_pages", "intensity",
        "direct_time", "gather_time", "transaction_efficiency", "memory_time",
    }  # fmt: skip
    assert {name for name in public - named - helpers if not name.startswith("from_")} == set()
