"""Messages and tools of a chat, checked and in the form that chat templates take."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvgraft.http.errors import BadRequestError
from kvgraft.http.json_io import has_half_characters, nests_deeply
from kvgraft.http.message_forms import newest_form

if TYPE_CHECKING:
    from kvgraft.http.fields import Fields

Message = dict[str, object]

MAX_MESSAGES = 4096
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that are accepted, and what templates call them."""
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts, and which of their fields holds the text."""
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content", "reasoning")
OLDER_KEYS = ("function_call",)
"""Of older forms, which are read as newer ones."""
_SILENT = frozenset({"assistant", "tool"})
"""Roles whose messages may have no content: thoughts or calls alone, results that are empty."""


def parse_messages(fields: Fields) -> list[Message]:
    """Return the conversation; raises `BadRequestError` naming the message that is wrong."""
    messages = fields.sections("messages")
    if not messages:
        raise fields.error("messages", "is missing or empty; give at least one message")
    if len(messages) > MAX_MESSAGES:
        raise fields.error("messages", f"must hold at most {MAX_MESSAGES} messages")
    return [_message(form) for message in messages for form in newest_form(message)]


def parse_tools(fields: Fields, *, is_flat: bool = False) -> list[Message]:
    """Return the tools in the form that templates take; none if `tool_choice` is `none`.

    Args:
        fields: The body.
        is_flat: What a tool says of its function stands beside its type, as in /v1/responses, not in `function`.
    """
    shown: list[Message] = []
    for tool in fields.sections("tools"):
        if tool.text("type", "function") != "function":
            raise tool.error("type", "must be 'function'; the server runs no tools of its own")
        function = tool if is_flat else tool.section("function")
        if not function.text("name"):
            raise function.error("name", "is missing")
        inner = {key: value for key, value in tool.values.items() if key != "type"} if is_flat else None
        shown.append(tool.values if inner is None else {"type": "function", "function": inner})
    return shown if fields.values.get("tool_choice") != "none" else []


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role not in _ROLES:
        raise fields.error("role", f"must be one of {', '.join(_ROLES)}")
    _refuse_keys(fields)
    message: Message = {"role": _ROLES[role], "content": _content(fields)}
    for key, shown in (
        ("name",) * 2,
        ("tool_call_id",) * 2,
        ("reasoning", "reasoning_content"),
        ("reasoning_content",) * 2,
    ):
        if fields.has(key):
            message[shown] = fields.text(key)
    if role == "tool" and "tool_call_id" not in message:
        raise fields.error("tool_call_id", "is missing; it says which call this is the result of")
    if fields.has("tool_calls"):
        if role != "assistant":
            raise fields.error("tool_calls", "belongs to messages of the assistant")
        message["tool_calls"] = [_tool_call(call) for call in fields.sections("tool_calls")]
    return message


def _refuse_keys(fields: Fields) -> None:
    """Refuse fields of a message that templates do not get; frameworks send what they got back, so nulls pass."""
    for key, value in fields.values.items():
        if key not in MESSAGE_KEYS and value not in (None, [], {}, False, ""):
            raise fields.error(key, f"is not supported; messages have {', '.join(MESSAGE_KEYS)}")


def _content(fields: Fields) -> str:
    if isinstance(fields.values.get("content"), list):
        return "\n".join(_part(part) for part in fields.sections("content"))
    if fields.has("content"):
        return fields.text("content")
    if fields.values.get("role") not in _SILENT:
        raise fields.error("content", "is missing; give a string or a list of text parts")
    return fields.text("refusal")


def _part(fields: Fields) -> str:
    kind = fields.text("type")
    if kind not in _PARTS:
        raise BadRequestError(
            f"{fields.name('type')} must be 'text'; images, audio and files are not supported",
            param=fields.name("type"),
        )
    return fields.text(_PARTS[kind])


def _tool_call(fields: Fields) -> Message:
    function = fields.section("function")
    if not function.text("name"):
        raise function.error("name", "is missing")
    fields.text("id")
    arguments: object = function.values.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    return {**fields.values, "function": {**function.values, "arguments": arguments}}


def parsed_arguments(text: str) -> object:
    """Templates expect arguments as an object, OpenAI's API carries them as JSON text; what they cannot take stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_taken = isinstance(value, dict) and not nests_deeply(value) and not has_half_characters(value)
    return value if is_taken else text
