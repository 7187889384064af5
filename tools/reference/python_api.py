"""docs/reference/python.md: the public names that a program begins with, and the first line of each docstring."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING

from kvgraft import LLM, AsyncLLM, SamplingParams
from kvgraft.engine import RequestOutput, StreamPart
from kvgraft.types import GraftReport, SpanReport

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """\
# Python API

What a program begins with; docstrings have arguments, shapes, units and errors (`help(LLM.generate)`). Other public
packages: `kvgraft.prefix` ([prefix.md](../prefix.md)), `kvgraft.events` (KV events), `kvgraft.substitution` (the hook for
other texts), `kvgraft.donors` ([donors.md](../donors.md)), `kvgraft.semantic` ([semantic.md](../semantic.md)),
`kvgraft.graft.select` (policies), `kvgraft.memory.store` (stores), `kvgraft.testing` (suites for plug-ins).

"""
_CLASSES = {
    "kvgraft": (LLM, AsyncLLM, SamplingParams),
    "kvgraft.engine": (RequestOutput, StreamPart),
    "kvgraft.types": (GraftReport, SpanReport),
}


def python_page() -> str:
    """Return the page."""
    return _HEAD + "\n".join(_section(package, each) for package, kinds in _CLASSES.items() for each in kinds)


def _section(package: str, kind: type) -> str:
    lines = [f"## {kind.__name__}", "", f"From `{package}`. {_first_line(kind)}"]
    if dataclasses.is_dataclass(kind):
        fields = [f"`{field.name}`" for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        lines += ["", f"Fields: {', '.join(fields)}."]
    rows = list(_members(kind))
    if rows:
        lines += ["", "| member | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _members(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property | classmethod)):
            continue
        function = member.__func__ if isinstance(member, classmethod) else member
        arguments = "" if isinstance(member, property) else f"({', '.join(_arguments(function))})"
        yield f"| `{name}{arguments}` | {_first_line(member)} |"


def _arguments(function: object) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    first_keyword = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    names = [f"{'**' if p.kind is p.VAR_KEYWORD else ''}{p.name}" for p in parameters]
    return names if first_keyword is None else [*names[:first_keyword], "*", *names[first_keyword:]]


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").splitlines()[0].replace("|", "\\|")
