"""Messages and tools of a chat, checked and in the form that chat templates take."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvgraft.server.errors import BadRequestError

if TYPE_CHECKING:
    from kvgraft.server.fields import Fields

Message = dict[str, object]

MAX_MESSAGES = 4096
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that are accepted, and what templates call them."""


def parse_messages(fields: Fields) -> list[Message]:
    """Return the conversation; raises `BadRequestError` naming the message that is wrong."""
    messages = fields.sections("messages")
    if not messages:
        raise fields.error("messages", "is missing or empty; give at least one message")
    if len(messages) > MAX_MESSAGES:
        raise fields.error("messages", f"must hold at most {MAX_MESSAGES} messages")
    return [_message(message) for message in messages]


def parse_tools(fields: Fields) -> list[Message]:
    """Return the tools as they are, for the template to show; the model's calls come back as text."""
    tools = fields.sections("tools")
    for tool in tools:
        if tool.text("type", "function") != "function":
            raise tool.error("type", "must be 'function'")
        if not tool.section("function").text("name"):
            raise tool.error("function.name", "is missing")
    return [tool.values for tool in tools] if fields.values.get("tool_choice") != "none" else []


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role not in _ROLES:
        raise fields.error("role", f"must be one of {', '.join(_ROLES)}")
    message: Message = {"role": _ROLES[role], "content": _content(fields, optional=fields.has("tool_calls"))}
    for key in ("name", "tool_call_id"):
        if fields.has(key):
            message[key] = fields.text(key)
    if fields.has("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in fields.sections("tool_calls")]
    return message


def _content(fields: Fields, *, optional: bool) -> str:
    if isinstance(fields.values.get("content"), list):
        return "\n".join(_part(part) for part in fields.sections("content"))
    if not fields.has("content") and not optional:
        raise fields.error("content", "is missing; give a string or a list of text parts")
    return fields.text("content")


def _part(fields: Fields) -> str:
    if fields.text("type") != "text":
        raise BadRequestError(
            f"{fields.name('type')} must be 'text'; images, audio and files are not supported",
            param=fields.name("type"),
        )
    return fields.text("text")


def _tool_call(fields: Fields) -> Message:
    function = fields.section("function")
    if not function.text("name"):
        raise function.error("name", "is missing")
    arguments: object = function.values.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return {**fields.values, "function": {**function.values, "arguments": arguments}}


def _parsed(text: str) -> object:
    """Templates expect arguments as an object, OpenAI's API carries them as JSON text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
