"""What clients send in general and this server does not serve: it is left out of a body, and named to the client.

It is decided here alone. Refused, where it is read, is only what contradicts itself or would change what an answer means,
such as a picture that a question is about. A picture that a tool came back with is left out, with a line for the model: an
agent that has read one sends it with all later turns, and would never be answered again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.http.fields import LEFT_OUT, MAX_NAME_CHARS, Fields
from kvgraft.http.messages import MESSAGE_KEYS, OLDER_KEYS
from kvgraft.http.template_fields import reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

Values = dict[str, object]

_NOTHING: tuple[object, ...] = (None, [], {}, False, "")
"""Values that say nothing, which frameworks send with what they got back."""
_MEDIA_KEYS = frozenset({"audio", "images", "videos", "files"})
"""Keys of messages that hold what is said in them: they stay, to be refused."""
_RESULT_ROLES = ("tool", "function")
_TEXT_KEYS = frozenset({"reasoning", "reasoning_content"})
"""Keys of messages that templates get as texts; other forms are left out."""
_THOUGHT_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})
"""Parts of messages with what a model thought, often of another and enciphered."""
_OTHERS_RUNS = frozenset({"server_tool_use", "mcp_tool_use", "container_upload", "tool_reference"})
"""Parts of Anthropic's messages that report runs of tools on its servers; the results of such are `..._tool_result`."""
_RESULT_PART = "tool_result"
_MEDIA_PARTS = frozenset(
    {
        *("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url"),
        *("document", "file", "input_file"),
    }
)
"""Parts of messages that hold no text. They stay, to be refused, but in results of tools."""
_PARTS_FIELD, _OUTPUT_FIELD = "messages.content", "input.output"
"""Where parts of messages and of outputs stand."""
_TOLD = "[{} left out: the server reads text alone]"
"""Stands in the result of a tool for a part of it: without a word the model would take it for empty."""
_OUTPUT_ITEMS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
_SERVED_ITEMS = frozenset(
    {
        *("message", "function_call", "custom_tool_call", "local_shell_call"),
        *_OUTPUT_ITEMS,
    }
)
_MEANT_ITEMS = frozenset({"compaction"})
"""Items of `input` that stand for a part of the conversation: they stay, to be refused."""
_MOST_NAMES = 256
"""Names that are logged: clients can make up more."""


@dataclass(frozen=True, slots=True)
class ServedBody:
    """A body without what is not served.

    Attributes:
        fields: What is left of it; items that are left out keep their numbers in errors.
        left_out: Names of what is not: the field, and the key or the type in it, such as `tools.web_search`.
    """

    fields: Fields
    left_out: tuple[str, ...] = ()


class LeftOutLog:
    """Logs each name once, and at most 256 of them."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log the names that are new."""
        for name in names:
            if name not in self._known and len(self._known) < _MOST_NAMES:
                self._known.add(name)
                logger.warning("%s of a request is not served and was left out; said once, reports name it", name)


def has_media(left_out: Iterable[str]) -> bool:
    """Return whether parts without text, in whose place a line stands, are among what was left out."""
    return any(f"{field}.{kind}" in left_out for field in (_PARTS_FIELD, _OUTPUT_FIELD) for kind in _MEDIA_PARTS)


def served_chat(fields: Fields, template: str) -> ServedBody:
    """Return a body of `/v1/chat/completions` without what is not served.

    Args:
        fields: The body.
        template: Text of the model's chat template.
    """
    values, names = dict(fields.values), dict[str, None]()
    _each(values, "messages", lambda message: _message(message, names))
    _each(values, "tools", lambda tool: _tool(tool, names))
    if isinstance(values.get("reasoning_effort"), str) and not reads(template, "reasoning_effort"):
        _drop(values, "reasoning_effort", "reasoning_effort", names)
    return ServedBody(Fields(values), tuple(names))


def served_response(fields: Fields, template: str) -> ServedBody:
    """Return a body of `/v1/responses` without what is not served; arguments as of `served_chat`."""
    values, names = dict(fields.values), dict[str, None]()
    _each(values, "input", lambda item: _item(item, names))
    _each(values, "tools", lambda tool: _tool(tool, names))
    _section(values, "reasoning", lambda key, value: _is_served_reasoning(key, value, template), names)
    _section(values, "text", lambda key, value: key != "verbosity" or not isinstance(value, str), names)
    if isinstance(values.get("text"), dict) and (fields.section("text").values.get("verbosity") == "medium"):
        names.pop("text.verbosity")  # what is had in any case
    return ServedBody(Fields(values), tuple(names))


def served_message(fields: Fields, template: str) -> ServedBody:
    """Return a body of `/v1/messages` without what is not served; arguments as of `served_chat`."""
    values, names = dict(fields.values), dict[str, None]()
    _each(values, "messages", lambda message: _message(message, names))
    _each(values, "tools", lambda tool: _without(tool, lambda kind: kind == "custom", "tools", names))
    _section(values, "output_config", lambda key, value: _is_served_output(key, value, template), names)
    return ServedBody(Fields(values), tuple(names))


def _message(message: Values, names: dict[str, None]) -> Values:
    for key, value in list(message.items()):
        is_known = key in MESSAGE_KEYS or key in OLDER_KEYS or key in _MEDIA_KEYS
        if not is_known or (key in _TEXT_KEYS and not isinstance(value, str)):
            _drop(message, key, f"messages.{key}", names)
    read = _result_part if _has_results(message) else _part
    _each(message, "content", lambda part: read(part, _PARTS_FIELD, names))
    return message


def _has_results(message: Values) -> bool:
    """Return whether tools came back with what is said; files may stand beside their results (Claude Code: a PDF)."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return message.get("role") in _RESULT_ROLES or any(
        isinstance(part, dict) and part.get("type") == _RESULT_PART for part in parts
    )


def _part(part: Values, field: str, names: dict[str, None]) -> object:
    return _without(part, _is_served_part, field, names)


def _result_part(part: Values, field: str, names: dict[str, None]) -> object:
    """Return a part of what tools came back with, or the line that stands in its place."""
    if part.get("type") == _RESULT_PART:
        _each(part, "content", lambda inner: _result_part(inner, field, names))
        return part
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
        return _without(part, _is_served_part, field, names)
    names[f"{field}.{kind}"] = None
    return {"type": "text", "text": _TOLD.format(kind.removeprefix("input_").removesuffix("_url"))}


def _is_served_part(kind: str) -> bool:
    return not (kind in _THOUGHT_PARTS or kind in _OTHERS_RUNS or kind.endswith(f"_{_RESULT_PART}"))


def _tool(tool: Values, names: dict[str, None]) -> object:
    return _without(tool, lambda kind: kind == "function", "tools", names)


def _item(item: Values, names: dict[str, None]) -> object:
    if str(item.get("type")) in _OUTPUT_ITEMS:
        _each(item, "output", lambda part: _result_part(part, _OUTPUT_FIELD, names))
    return _without(item, lambda kind: kind in _SERVED_ITEMS or kind in _MEANT_ITEMS, "input", names)


def _is_served_output(key: str, value: object, template: str) -> bool:
    return key == "format" or _is_served_reasoning(key, value, template)


def _is_served_reasoning(key: str, value: object, template: str) -> bool:
    return key == "effort" and (not isinstance(value, str) or reads(template, "reasoning_effort"))


def _without(value: Values, is_served: Callable[[str], bool], field: str, names: dict[str, None]) -> object:
    """Return an object of a list, or the mark that it is left out because of its type."""
    kind = value.get("type")
    if not isinstance(kind, str) or is_served(kind):
        return value
    names[f"{field}.{kind[:MAX_NAME_CHARS]}"] = None
    return LEFT_OUT


def _each(values: Values, key: str, change: Callable[[Values], object]) -> None:
    """Change the objects of a list; all else is for its reader to judge."""
    given = values.get(key)
    if isinstance(given, list):
        values[key] = [change(dict(value)) if isinstance(value, dict) else value for value in given]


def _section(values: Values, key: str, is_served: Callable[[str, object], bool], names: dict[str, None]) -> None:
    given = values.get(key)
    if isinstance(given, dict):
        values[key] = inner = dict(given)
        for name, value in given.items():
            if not is_served(name, value):
                _drop(inner, name, f"{key}.{name}", names)


def _drop(values: Values, key: str, name: str, names: dict[str, None]) -> None:
    if values.pop(key) not in _NOTHING:
        names[name[: 2 * MAX_NAME_CHARS]] = None
