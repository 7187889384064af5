"""Messages in other forms than OpenAI's present one, as such: older calls of functions, and parts that are calls or results.

Parts of the types `tool_use` and `tool_result` are those of Anthropic's API, which its clients send to other endpoints, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.http.fields import LEFT_OUT

if TYPE_CHECKING:
    from kvgraft.http.fields import Fields

_USE, _RESULT = "tool_use", "tool_result"


def newest_form(message: Fields) -> list[Fields]:
    """Return the messages of OpenAI's present form that a message is: results are messages of their own, before the rest.

    Raises:
        BadRequestError: A call or a result lacks what names it; the error names where it was sent.
    """
    match message.values.get("role"):
        case "function":
            return [_result_of_function(message)]
        case "assistant":
            return [_with_calls(message)]
        case "user":
            return _results_apart(message)
    return [message]


def _result_of_function(message: Fields) -> Fields:
    """A result of the older form names the function; so does the id of its call, then."""
    name = _named(message, "name")
    return message.with_values({"role": "tool", "tool_call_id": name, "content": message.values.get("content")})


def _with_calls(message: Fields) -> Fields:
    """Return a message of the assistant with the calls of its other forms in `tool_calls`."""
    values, calls = dict(message.values), list[object]()
    if message.has("function_call"):
        if values.get("tool_calls"):
            raise message.error("function_call", "is the older form of tool_calls, which are there, too; leave it out")
        function = message.section("function_call")
        calls.append(_call(_named(function, "name"), values.pop("function_call")))
    for number, part in _parts(message, _USE):
        values["content"] = _apart(values["content"], number)
        called = {"name": _named(part, "name"), "arguments": part.section("input").values}
        calls.append(_call(_named(part, "id"), called))
    if not calls:
        return message
    given = values.get("tool_calls") or []
    values["tool_calls"] = [*given, *calls] if isinstance(given, list) else given
    return message.with_values(values)


def _results_apart(message: Fields) -> list[Fields]:
    content = message.values.get("content")
    results: list[Fields] = []
    for number, part in _parts(message, _RESULT):
        content = _apart(content, number)
        result = {"role": "tool", "tool_call_id": _named(part, "tool_use_id"), "content": part.values.get("content")}
        results.append(part.with_values(result))
    if results and isinstance(content, list) and all(part is LEFT_OUT for part in content):
        return results
    return [*results, message.with_values(message.values | {"content": content})]


def _parts(message: Fields, kind: str) -> list[tuple[int, Fields]]:
    """Parts of a type, with their numbers; what is no part is left to who reads the message."""
    content = message.values.get("content")
    if not isinstance(content, list) or not all(part is LEFT_OUT or isinstance(part, dict) for part in content):
        return []
    numbers = [number for number, part in enumerate(content) if part is not LEFT_OUT]
    parts = zip(numbers, message.sections("content"), strict=True)
    return [(number, part) for number, part in parts if part.values.get("type") == kind]


def _apart(content: object, number: int) -> list[object]:
    assert isinstance(content, list)
    return [*content[:number], LEFT_OUT, *content[number + 1 :]]


def _call(call_id: str, function: object) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": function}


def _named(fields: Fields, key: str) -> str:
    name = fields.text(key)
    if not name:
        raise fields.error(key, "is missing")
    return name
