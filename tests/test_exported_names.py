"""What others use of a package is exported by it, or its docstring names the module as public; what is exported exists."""

from __future__ import annotations

import ast
import importlib
import re

import pytest
from tests.source_tree import documented_names, imports_of, modules

FILES = modules()
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def exported(package):
    """`__all__` as the source says; of a package without it, what is written in its own file."""
    body = ast.parse(FILES[package].read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    assigned = [target.id for node in body if isinstance(node, ast.Assign) for target in node.targets]
    defined = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [name for name in assigned + defined if not name.startswith("_")]


def public_modules(package):
    """Modules that the package's docstring names behind `Public modules:`."""
    text = ast.get_docstring(ast.parse(FILES[package].read_text())) or ""
    listed = re.search(r"Public modules:(.*?)(\.\s|\.$)", text, re.DOTALL)
    return {f"{package}.{name}" for name in re.findall(r"`([\w.]+)`", listed.group(1))} if listed else set()


def hidden(use):
    """Why `use` reaches for something that its package does not offer; None if it offers it."""
    module, name = use.module, use.name
    if f"{module}.{name}" in FILES:
        module, name = f"{module}.{name}", ""
    if module not in FILES:
        return f"{use.user}: there is no {module}"
    package = module if module in PACKAGES else module.rpartition(".")[0]
    above = [package, package.rpartition(".")[0]] if package.count(".") > 1 else [package]
    offered = any(name in exported(each) or module in public_modules(each) for each in above)
    is_whole_package = module in PACKAGES and not name
    if offered or is_whole_package or package == "kvgraft":
        return None
    return f"{use.user}: {' or '.join(above)} should export {name or 'nothing'}, or name {module} as public"


def uses():
    """Imports across packages, and what our pages show."""
    for name, path in FILES.items():
        own = name.split(".")[1:2]
        for found in imports_of(name, path.read_text()):
            if own and found.module.count(".") and found.module.split(".")[1:2] != own:
                yield found
    yield from documented_names()


def test_what_others_use_is_exported_or_in_a_public_module():
    assert sorted({problem for use in uses() if (problem := hidden(use))}) == []


@pytest.mark.parametrize("name", sorted(name for name in PACKAGES if exported(name)))
def test_all_names_exist_once(name):
    names = exported(name)
    assert len(set(names)) == len(names)
    if not name.startswith("kvgraft.integrations"):  # these need their engines
        module = importlib.import_module(name)
        assert all(getattr(module, each) is not None for each in names)


def test_public_modules_exist():
    assert [module for package in PACKAGES for module in public_modules(package) if module not in FILES] == []
