"""Describe tools in a system message, where the chat template does not show them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.http.messages import Message

_TOLD = (
    "You can call the functions below. To call one, write nothing but a JSON object with its name and its arguments, as in\n"
    '{"name": "some_function", "arguments": {"some_argument": "some value"}}\n'
    "For several calls write one object per line. You will be told the results. If no function helps, answer in words.\n\n"
    "Functions:\n"
)


def with_tools_told(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Return a conversation of texts alone: what the system says ends with the tools, calls and results are spelled out."""
    described = _TOLD + "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    spelled = spelled_out(messages)
    if spelled and spelled[0]["role"] == "system":
        return [spelled[0] | {"content": f"{spelled[0]['content']}\n\n{described}"}, *spelled[1:]]
    return [{"role": "system", "content": described}, *spelled]


def spelled_out(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation of texts alone: calls are JSON in the assistant's text, results are the user's."""
    names: dict[object, object] = {}
    return [_spelled(message, names) for message in messages]


def _spelled(message: Message, names: dict[object, object]) -> Message:
    """Return a message without calls and ids; notes which function each call is of."""
    if message["role"] == "tool":
        name = names.get(message.get("tool_call_id"), message.get("name") or "the function")
        return {"role": "user", "content": f"Result of {name}: {message['content']}"}
    calls = cast("list[Message]", message.get("tool_calls") or [])
    lines = [str(message["content"])] if message["content"] else []
    for call in calls:
        function = cast("Message", call["function"])
        names[call.get("id")] = function["name"]
        written = {"name": function["name"], "arguments": function.get("arguments")}
        lines.append(json.dumps(written, ensure_ascii=False))
    return {"role": message["role"], "content": "\n".join(lines)}
