"""What the code has: files, modules, classes with their members, and every word that it uses."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvgraft"
_CODE = ("src", "tests", "benchmarks", "models")
_OTHERS = ("Makefile", "pyproject.toml", ".ci/run")
_LEFT_OUT = {"docs"}
"""Folders of tests whose words prove nothing: these very tests."""


@dataclass
class Class:
    """Members of a class and the names of its bases."""

    bases: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)


@dataclass
class Index:
    """All of the code.

    Attributes:
        classes: By name, those of `src/kvgraft`; classes of one name are one entry.
        defined: By module (`donors.catalogue`) of `src/kvgraft`, what it defines: functions, classes, methods, constants.
        words: Identifiers and words of string constants, anywhere.
        strings: String constants.
    """

    classes: dict[str, Class] = field(default_factory=dict)
    defined: dict[str, set[str]] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)

    def has_member(self, name: str, member: str) -> bool:
        """Whether a class, or a class that it extends, has a member."""
        found = self.classes.get(name)
        if found is None:
            return False
        return member in found.members or any(self.has_member(base, member) for base in found.bases)

    def modules_named(self, name: str) -> list[str]:
        """Modules that `name` may mean: itself, or everything below a folder of that name."""
        return [module for module in self.defined if f".{module}.".find(f".{name}.") >= 0]


@cache
def code_index() -> Index:
    """Read all the code once."""
    index = Index()
    for folder in _CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "tests" / "docs"):
                continue
            tree = ast.parse(path.read_text())
            _read_words(index, tree)
            if path.is_relative_to(SOURCE):
                module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
                index.defined[module] = _definitions(index, tree)
    for name in _OTHERS:
        index.words |= set(re.findall(r"\w+", (ROOT / name).read_text()))
        index.strings |= set(re.findall(r"[\w.-]+", (ROOT / name).read_text()))
    return index


def _read_words(index: Index, tree: ast.AST) -> None:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                index.words.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                index.words.add(name)
            case ast.alias(name=name):
                index.words |= set(name.split("."))
            case ast.Constant(value=str(text)) if len(text) < 300:
                index.strings.add(text)
                index.words |= set(re.findall(r"\w+", text))


def _definitions(index: Index, tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                found.add(name)
                entry = index.classes.setdefault(name, Class())
                entry.bases |= {ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] for base in node.bases}
                entry.members |= _members(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name), *_]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
    return found


def _members(node: ast.ClassDef) -> set[str]:
    members: set[str] = set()
    for child in ast.walk(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                members.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name), *_]):
                members.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                members.add(name)
    return members


@cache
def files() -> tuple[str, ...]:
    """Files and folders of the repository, relative, those that are built or downloaded left out."""
    skipped = {".git", "__pycache__", ".hypothesis", "runs", "node_modules"}
    caches = (".venv", ".pytest", ".mypy", ".ruff", ".import")
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(caches)]
        relative = Path(folder).relative_to(ROOT)
        found += [f"{(relative / name).as_posix()}/" for name in folders]
        found += [(relative / name).as_posix() for name in names]
    return tuple(found)
