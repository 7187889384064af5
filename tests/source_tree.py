"""The package's own source, read as a tree of modules that import names from each other."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Import:
    """`from module import name` in the file of `user`; `name` is empty for `import module`."""

    user: str
    module: str
    name: str


def modules() -> dict[str, Path]:
    """Files of the package by dotted name; a package's name stands for its `__init__`."""
    found = {}
    for path in sorted((SOURCE / "kvgraft").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(user: str, code: str) -> list[Import]:
    """Imports of our own modules, those for type checkers and those inside functions included."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [Import(user, node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [Import(user, alias.name, "") for alias in node.names]
    return [found_import for found_import in found if found_import.module.split(".")[0] == "kvgraft"]


def documented_names() -> list[Import]:
    """What our pages tell readers to import, or name as a class by its full path."""
    found = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        for module, names in re.findall(r"^from (kvgraft[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            found += [Import(page.name, module, name.strip()) for name in names.split(",")]
        for module, name in re.findall(r"\b(kvgraft(?:\.[a-z_]\w*)+)\.([A-Z]\w+)", text):
            found.append(Import(page.name, module, name))
    return found
