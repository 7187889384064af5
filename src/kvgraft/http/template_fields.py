"""Fields of a chat that its template gets besides messages and tools."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.http.fields import Fields

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of the renderer itself, and what templates get from it."""


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """What a request says about rendering.

    Attributes:
        variables: What the template reads besides messages and tools.
        add_generation_prompt: End where the assistant begins to speak.
        continue_final_message: End in the last message, which the answer goes on with.
        add_special_tokens: The tokenizer is to add its own; None: where the template does not write them.
        special_tokens_are_text: Special tokens that messages spell are no control tokens.
    """

    variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    special_tokens_are_text: bool = False


def parse_template_fields(fields: Fields, template: str) -> TemplateFields:
    """Read what a body says about its chat template.

    Args:
        fields: The body.
        template: Text of the template; empty if the model has none.

    Raises:
        APIError: A field is wrong, or the template does not read what it says.
    """
    continues = fields.flag("continue_final_message")
    generates = fields.flag("add_generation_prompt", default=not continues)
    if continues and generates:
        raise fields.error("continue_final_message", "and add_generation_prompt exclude each other; set one of them")
    special = fields.flag("add_special_tokens") if fields.has("add_special_tokens") else None
    return TemplateFields(_variables(fields, template), generates, continues, special)


def _variables(fields: Fields, template: str) -> dict[str, object]:
    """Return what the template gets; a name that it does not read would change nothing, and is refused."""
    asked = fields.section("chat_template_kwargs")
    for name in asked.values:
        if name in _RESERVED:
            raise fields.error("chat_template_kwargs", f"must not have {name!r}, which the server says itself")
        if not reads(template, name):
            raise fields.error(
                "chat_template_kwargs", f"has {name[:60]!r}, which the model's chat template does not read"
            )
    variables = dict(asked.values)
    if fields.has("reasoning_effort"):
        variables["reasoning_effort"] = fields.text("reasoning_effort", max_chars=64)
    if fields.values.get("documents"):
        variables["documents"] = [document.values for document in fields.sections("documents")]
    for name in ("reasoning_effort", "documents"):
        if name in variables and not reads(template, name):
            raise fields.error(name, "is not read by the model's chat template; say it in a message")
    return variables


def reads(template: str, name: str) -> bool:
    """Return whether a template reads a variable that it does not set itself."""
    return name in _read_by(template)


@lru_cache(maxsize=8)
def _read_by(template: str) -> frozenset[str]:
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", template)  # a tag of transformers' own
    try:
        parsed = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateError:  # rendering says what is wrong
        return frozenset(re.findall(r"\w+", template))
    return frozenset(meta.find_undeclared_variables(parsed))
