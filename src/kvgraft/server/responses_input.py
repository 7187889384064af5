"""Bodies of `/v1/responses`: the conversation and how it is rendered, in the terms of a chat."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.http.messages import MAX_MESSAGES, parsed_arguments
from kvgraft.http.template_fields import parse_template_fields

if TYPE_CHECKING:
    from kvgraft.http.fields import Fields
    from kvgraft.http.messages import Message
    from kvgraft.http.template_fields import TemplateFields

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_LOCAL_SHELL = "local_shell"


def parse_input(fields: Fields) -> list[Message]:
    """Return the conversation of `instructions` and `input`, in the form that chat templates take.

    Calls of custom tools and of the local shell become calls of functions of these names, with what they were called with.

    Raises:
        APIError: An item is wrong or of a type that is not supported; the error names it.
    """
    messages: list[Message] = []
    if fields.has("instructions"):
        messages.append({"role": "system", "content": fields.text("instructions")})
    if isinstance(fields.values.get("input"), str):
        return [*messages, {"role": "user", "content": fields.text("input")}]
    items = fields.sections("input")
    if not items:
        raise fields.error("input", "is missing or empty; give a text or a list of items")
    if len(items) > MAX_MESSAGES:
        raise fields.error("input", f"must hold at most {MAX_MESSAGES} items")
    for item in items:
        _add_item(messages, item)
    return messages


def parse_rendering(fields: Fields, template: str) -> TemplateFields:
    """Read what a body says to the chat template: `chat_template_kwargs`, and the effort of `reasoning`."""
    asked = parse_template_fields(fields, template)
    reasoning = fields.section("reasoning")
    if not reasoning.has("effort"):
        return asked
    return replace(asked, variables={**asked.variables, "reasoning_effort": reasoning.text("effort", max_chars=64)})


def _add_item(messages: list[Message], item: Fields) -> None:
    match item.text("type", "message"):
        case "message":
            messages.append(_message(item))
        case "function_call":
            _add_call(messages, item, item.text("name"), parsed_arguments(item.text("arguments", "{}")))
        case "custom_tool_call":
            _add_call(messages, item, item.text("name"), {"input": item.text("input")})
        case "local_shell_call":
            action = {key: value for key, value in item.section("action").values.items() if key != "type"}
            _add_call(messages, item, _LOCAL_SHELL, action)
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            messages.append({"role": "tool", "content": _text(item, "output"), "tool_call_id": _call_id(item)})
        case kind:
            raise item.error(
                "type", f"{kind[:60]!r} is not supported; items are messages, calls of tools and their outputs"
            )


def _message(item: Fields) -> Message:
    role = item.text("role")
    if role not in _ROLES:
        raise item.error("role", f"must be one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _text(item, "content")}


def _call_id(item: Fields) -> str:
    """Return the call that an output is of.

    Those of the local shell may name it by their own `id`. What an agent says of itself names no call (Codex: the objective
    of a goal): the tool that it names is the id, then, as in the older form of chats.
    """
    own = item.text("id") if item.text("type") == "local_shell_call_output" else ""
    call_id = item.text("call_id") or own or item.text("name")
    if not call_id:
        raise item.error("call_id", "is missing; it says which call this is the result of")
    return call_id


def _add_call(messages: list[Message], item: Fields, name: str, arguments: object) -> None:
    """Add a call to the turn of the assistant that it belongs to."""
    if not name:
        raise item.error("name", "is missing")
    function = {"name": name, "arguments": arguments}
    call: Message = {"id": item.text("call_id"), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append(call)


def _text(item: Fields, key: str) -> str:
    if not isinstance(item.values.get(key), list):
        if not item.has(key):
            raise item.error(key, "is missing; give a string or a list of text parts")
        return item.text(key)
    return "\n".join(_part(part) for part in item.sections(key))


def _part(part: Fields) -> str:
    kind = part.text("type")
    if kind not in _TEXT_PARTS:
        raise part.error("type", "must be 'input_text' or 'output_text'; images, audio and files are not supported")
    return part.text(_TEXT_PARTS[kind])
