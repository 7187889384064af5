"""The ways of writing tool calls by name, and which one a chat template shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.server.tools.generic import JsonFormat
from kvgraft.server.tools.hermes import HermesFormat
from kvgraft.server.tools.llama import LlamaFormat
from kvgraft.server.tools.mistral import MistralFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.server.tools.base import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "json": JsonFormat(),
    "llama": LlamaFormat(),
    "mistral": MistralFormat(),
}
_NEWER_MISTRAL = MistralFormat(is_named=True)
AUTO = "auto"


def tool_format(name: str, template: str) -> ToolFormat:
    """Return the format that a setting names; `auto` is the one with marks that stand in the chat template, or bare JSON.

    Args:
        name: Value of the setting `tool_parser`.
        template: Text of the model's chat template.
    """
    chosen = _guess(template) if name == AUTO else name
    if chosen == "mistral" and "[ARGS]" in template:
        return _NEWER_MISTRAL
    return TOOL_FORMATS[chosen]


def _guess(template: str) -> str:
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama"
    return "json"
