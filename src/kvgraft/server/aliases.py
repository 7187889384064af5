"""Fields under the names that llama.cpp's clients and our vLLM connector have for them, as this server calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.http.fields import Fields
from kvgraft.reuse.asked import PARAMETER, REPAIR_PARAMETER

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_OUTPUTS = ("max_tokens", "max_completion_tokens")
_TRANSFER = "kv_transfer_params"
_CONTINUES = "continue_final_message"
_ASKED = {PARAMETER: "reuse", REPAIR_PARAMETER: "repair"}
AS_MANY_AS_FIT = 2**31 - 1
"""Largest `max_tokens`; what does not fit after the prompt is cut in any case."""


def with_our_names(fields: Fields) -> Fields:
    """Return a body with the fields that it means.

    `prefix` of the last message is a name of `continue_final_message` in other servers. `n_predict` and `repeat_penalty` are
    llama.cpp's names, `max_tokens: -1` is its word for as many as fit, and
    `kv_transfer_params: {"kvgraft": MODE, "kvgraft_repair": TIME}` is how a vLLM server with our connector is asked for
    `kvgraft.reuse` and `kvgraft.repair`.

    Args:
        fields: The whole body.

    Raises:
        BadRequestError: It says one thing under two names, and not the same.
    """
    values = dict(fields.values)
    for alias, name in _NAMES.items():
        _move(fields, values, alias, name, values.pop(alias, None))
    for name in _OUTPUTS:
        if values.get(name) == -1:
            values[name] = AS_MANY_AS_FIT
    if _asks_connector(values):
        transfer = fields.section(_TRANSFER, known=frozenset(_ASKED))
        del values[_TRANSFER]
        ours = dict(fields.section(PARAMETER).values)
        for parameter, name in _ASKED.items():
            if parameter in transfer.values:
                _move(fields, ours, f"{_TRANSFER}.{parameter}", name, transfer.text(parameter))
        values[PARAMETER] = ours
    _move_prefix(values)
    return Fields(values)


def _move_prefix(values: dict[str, object]) -> None:
    """Say for the whole body what the last message says of itself, unless the body says otherwise."""
    messages = values.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or (last.get("role"), last.get("prefix")) != ("assistant", True):
        return
    if values.get(_CONTINUES) is not False and not values.get("add_generation_prompt"):
        assert isinstance(messages, list)
        values[_CONTINUES] = True
        values["messages"] = [*messages[:-1], {key: value for key, value in last.items() if key != "prefix"}]


def _asks_connector(values: Mapping[str, object]) -> bool:
    transfer = values.get(_TRANSFER)
    return isinstance(transfer, dict) and not _ASKED.keys().isdisjoint(transfer)


def _move(fields: Fields, values: dict[str, object], alias: str, name: str, value: object) -> None:
    if value is None:
        return
    if values.get(name) not in (None, value):
        raise fields.error(alias, f"is another name of {name} here, which is there with another value; leave out one")
    values[name] = value
