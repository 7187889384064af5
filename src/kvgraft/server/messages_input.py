"""Bodies of `/v1/messages`, Anthropic's API, as bodies of chats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.http.messages import parse_messages

if TYPE_CHECKING:
    from kvgraft.http.fields import Fields
    from kvgraft.http.messages import Message

_SAME = ("max_tokens", "temperature", "top_p", "top_k", "stream", "kvgraft", "cache_salt", "priority")
"""Fields that chats have under the same name and with the same meaning."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CALL = "tool_use"


def parse_conversation(fields: Fields) -> list[Message]:
    """Return the conversation of `system` and `messages`, in the form that chat templates take.

    Raises:
        BadRequestError: A message is wrong, or has a part that would change its meaning; the error names it.
    """
    messages = parse_messages(fields)
    if not fields.has("system"):
        return messages
    system = fields.with_values({"messages": [{"role": "system", "content": fields.values["system"]}]})
    return [*parse_messages(system), *messages]


def as_chat(fields: Fields) -> Fields:
    """Return what a body says besides its messages as a chat says it.

    Raises:
        BadRequestError: A field that chats write differently is wrong; the error names it.
    """
    values = {key: fields.values[key] for key in _SAME if key in fields.values}
    if fields.has("stop_sequences"):
        values["stop"] = fields.values["stop_sequences"]
        values["include_stop_str_in_output"] = True  # the answer says which of them ended it
    if fields.has("tools"):
        values["tools"] = [_tool(tool) for tool in fields.sections("tools")]
    values |= _tool_choice(fields) | _output(fields)
    if _is_begun(fields):
        values["continue_final_message"] = True
    return fields.with_values(values)


def _tool(tool: Fields) -> Message:
    if not tool.text("name"):
        raise tool.error("name", "is missing")
    function: Message = {"name": tool.text("name"), "parameters": tool.section("input_schema").values}
    if tool.has("description"):
        function["description"] = tool.text("description")
    if tool.has("strict"):
        function["strict"] = tool.flag("strict")
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields) -> Message:
    choice = fields.section("tool_choice")
    if not choice.values:
        return {}
    kind = choice.choice("type", "auto", (*_CHOICES, "tool"))
    named = {"type": "function", "function": {"name": choice.text("name")}}
    said: Message = {"tool_choice": named if kind == "tool" else _CHOICES[kind]}
    return said | ({"parallel_tool_calls": False} if choice.flag("disable_parallel_tool_use") else {})


def _output(fields: Fields) -> Message:
    """What `output_config` asks of the answer: an effort, if the template reads it, and the schema of its text."""
    asked, said = fields.section("output_config"), dict[str, object]()
    if asked.has("effort"):
        said["reasoning_effort"] = asked.text("effort", max_chars=64)
    if asked.has("format"):
        form = asked.section("format")
        form.choice("type", "", ("json_schema",))
        if not form.section("schema").values:
            raise form.error("schema", "is missing; it is the JSON schema that the answer has to be of")
        schema = {"name": "answer", "schema": form.section("schema").values}
        said["response_format"] = {"type": "json_schema", "json_schema": schema}
    return said


def _is_begun(fields: Fields) -> bool:
    """Return whether the last message is the beginning of the answer: text of the assistant."""
    last = fields.sections("messages")[-1:]
    if not last or last[0].values.get("role") != "assistant":
        return False
    content = last[0].values.get("content")
    parts = last[0].sections("content") if isinstance(content, list) else []
    return all(part.values.get("type") != _CALL for part in parts)
