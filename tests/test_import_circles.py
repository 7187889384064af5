"""No two files import each other, not through others nor for type checkers alone: a circle has no beginning to read from."""

from __future__ import annotations

import pytest
from tests.source_tree import imports_of, modules


def import_graph():
    """Which files each file imports; the inits of packages above it do not count."""
    files = modules()
    graph = {}
    for name, path in files.items():
        targets = set()
        for found in imports_of(name, path.read_text()):
            submodule = f"{found.module}.{found.name}"
            targets.add(submodule if submodule in files else found.module)
        graph[name] = (targets & files.keys()) - {name}
    return graph


def circles(graph):
    """Sets of files of which each reaches each other."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def reachable(graph, start):
    seen, waiting = set(), [start]
    while waiting:
        for target in graph[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def test_no_files_import_each_other():
    assert circles(import_graph()) == []


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}, [["b", "c"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "x": {"y"}, "y": {"x"}}, [["a", "b", "c"], ["x", "y"]]),
    ],
)
def test_circles_are_found(graph, expected):
    assert circles(graph) == expected
