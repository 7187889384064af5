"""`docs/seeds.md` and `docs/reports.md` name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / "docs" / page).read_text() for page in ("seeds.md", "reports.md"))
NAMED = sorted(set(re.findall(r"`(tests/[\w./]+\.py(?:::\w+)?)`", PAGES)))


def test_there_are_many():
    assert len(NAMED) > 40


@pytest.mark.parametrize("name", NAMED)
def test_named_test_exists(name):
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    machines = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.startswith("Test")}
    assert function in functions if function else machines or any(found.startswith("test") for found in functions)
