"""Arguments of the engine by the fields of bodies that they came from, so that errors name what the client knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.http.errors import as_api_error
from kvgraft.server.body_fields import Endpoint

if TYPE_CHECKING:
    from kvgraft.errors import ConfigError, UnservableError
    from kvgraft.http.errors import APIError
    from kvgraft.http.fields import Fields

_NAMES = {
    "bad_token_ids": "bad_words",
    "include_stop": "include_stop_str_in_output",
    "reuse": "kvgraft.reuse",
    "selection": "kvgraft.selection",
    "correction": "kvgraft.correction",
    "repair": "kvgraft.repair",
    "provisional": "kvgraft.provisional",
    "documents": "kvgraft.documents",
}
"""Arguments that bodies call something else; others have the same name there."""
_PROMPTS = {
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.CHAT: "messages",
    Endpoint.RESPONSES: "input",
    Endpoint.MESSAGES: "messages",
}
_STRUCTURES = {"structured_outputs": "", "response_format": "", "text": "format", "output_config": "format"}
"""Fields that say what an output has to be, and the part of each that does, if it is a part."""


def body_error(error: ConfigError | UnservableError, fields: Fields, endpoint: Endpoint) -> APIError:
    """Return the answer to a body that the engine refuses, with the field that is wrong.

    Args:
        error: Why; names the argument of the engine that is wrong, if it is one.
        fields: The body.
        endpoint: Endpoint of the body.
    """
    answer = as_api_error(error, closing=False)
    match error.argument:
        case None:
            pass
        case "prompt":
            answer.param = _PROMPTS[endpoint]
        case "max_new_tokens":
            answer.param = _max_tokens(fields, endpoint)
        case "structure":
            answer.param = _structure(fields)
        case argument:
            answer.param = _NAMES.get(argument, argument)
    return answer


def _max_tokens(fields: Fields, endpoint: Endpoint) -> str:
    if endpoint is Endpoint.RESPONSES:
        return "max_output_tokens"
    return "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"


def _structure(fields: Fields) -> str | None:
    """The field that says what the output has to be; None if several do together, of which any may be the wrong one."""
    said = []
    for name, part in _STRUCTURES.items():
        inner = fields.section(name).section(part) if part else fields.section(name)
        if inner.values and inner.values.get("type") != "text":
            said.append(f"{name}.{part}" if part else name)
    if fields.values.get("tools") and fields.values.get("tool_choice") != "none":
        said.append("tools")
    return said[0] if len(said) == 1 else None
