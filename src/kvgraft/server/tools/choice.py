"""Functions that a request offers, and those that the model may or has to call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.http.messages import parse_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.http.fields import Fields
    from kvgraft.http.messages import Message

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_ALLOWED = "allowed_tools"
_NO_ARGUMENTS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: Its name.
        schema: JSON schema of its arguments, an object.
        is_strict: Its arguments are to fit the schema whenever it is called.
    """

    name: str
    schema: dict[str, object]
    is_strict: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request.

    Attributes:
        shown: The tools in the form that templates take; none if calls are not wanted.
        functions: Those that may be called.
        is_forced: One of them has to be called.
        is_parallel: Several calls may be made.
        withheld: Names of those that are shown and may not be called.
    """

    shown: tuple[Message, ...] = ()
    functions: tuple[Function, ...] = ()
    is_forced: bool = False
    is_parallel: bool = True
    withheld: frozenset[str] = frozenset()

    @property
    def is_strict(self) -> bool:
        """Return whether a function wants its arguments to fit its schema."""
        return any(function.is_strict for function in self.functions)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions that may be called."""
        return tuple(function.name for function in self.functions)


def parse_tool_use(fields: Fields, *, is_flat: bool = False) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`.

    Args:
        fields: The body.
        is_flat: What a tool says of its function stands beside its type, as in /v1/responses, not in `function`.

    Raises:
        APIError: One of them is wrong; the error names it.
    """
    shown = tuple(parse_tools(fields, is_flat=is_flat))
    functions = [_function(tool if is_flat else tool.section("function")) for tool in fields.sections("tools")]
    names = [function.name for function in functions]
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            raise fields.error(f"tools[{number}]", f"is the second function with the name {name!r}")
        seen.add(name)
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    choice = fields.values.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        if choice.get("type") == _ALLOWED:
            allowed, is_forced = _allowed(fields.section("tool_choice"), functions, is_flat=is_flat)
            withheld = frozenset(names) - {function.name for function in allowed}
            return ToolUse(shown, allowed, is_forced=is_forced, is_parallel=is_parallel, withheld=withheld)
        named = _named(fields.section("tool_choice"), names, is_flat=is_flat)
        chosen = tuple(function for function in functions if function.name == named)
        return ToolUse(shown, chosen, is_forced=True, is_parallel=False)
    word = fields.choice("tool_choice", "auto", ("auto", "none", "required"))
    if word == "required" and not functions:
        raise fields.error("tool_choice", "is 'required', but there are no tools; give some")
    if word == "none":
        return ToolUse()
    return ToolUse(shown, tuple(functions), is_forced=word == "required", is_parallel=is_parallel)


def _function(function: Fields) -> Function:
    name = function.text("name")
    if not _NAME.fullmatch(name):
        raise function.error("name", "must have 1 to 128 letters, digits and _.-")
    schema = dict(function.section("parameters").values)
    if not schema.get("properties") and set(schema) <= {"type", "properties", "required"}:
        schema = _NO_ARGUMENTS
    return Function(name, {"type": "object"} | schema, function.flag("strict"))


def _allowed(choice: Fields, functions: Sequence[Function], *, is_flat: bool) -> tuple[tuple[Function, ...], bool]:
    """Return the functions that are allowed, and whether one has to be called; tools of other types are not served."""
    said = choice if is_flat else choice.section(_ALLOWED)
    word = said.choice("mode", "auto", ("auto", "required"))
    if not said.has("tools"):
        raise said.error("tools", "is missing; it lists the functions that may be called")
    tools = [tool for tool in said.sections("tools") if tool.text("type", "function") == "function"]
    names = {tool.text("name") if is_flat else tool.section("function").text("name") for tool in tools}
    allowed = tuple(function for function in functions if function.name in names)
    if word == "required" and not allowed:
        raise said.error("tools", "has none of the functions of tools, and one of them is required")
    return allowed, word == "required"


def _named(choice: Fields, names: list[str], *, is_flat: bool) -> str:
    kind = choice.text("type", "function")
    if kind != "function":
        raise choice.error(
            "type", "must be 'function'; other choices are 'allowed_tools', 'auto', 'none' and 'required'"
        )
    function = choice if is_flat else choice.section("function")
    name = function.text("name")
    if name not in names:
        raise function.error("name", "names no function of tools")
    return name
