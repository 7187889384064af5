"""From a conversation with tools to what the engine is asked, and how its output is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.server.chat_template import no_tools, render_chat, template_of
from kvgraft.server.errors import BadRequestError
from kvgraft.server.tools import ToolReading, tool_format
from kvgraft.server.tools.shown import with_tools_told
from kvgraft.server.tools.structures import structure_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.server.chat_template import ChatPrompt
    from kvgraft.server.messages import Message
    from kvgraft.server.options import Options
    from kvgraft.server.template_fields import TemplateFields
    from kvgraft.server.tools import ToolFormat, ToolUse

_TOLD_BY_US = "json"
"""The value of `tool_parser` with which tools are told to models whose template does not show them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request says.

    Attributes:
        messages: In the form that templates take.
        tools: Which tools there are, and what is to be done with them.
        asked: How it is to be rendered.
    """

    messages: Sequence[Message]
    tools: ToolUse
    asked: TemplateFields


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What the engine is asked.

    Attributes:
        prompt: The rendered conversation.
        options: How to answer; with tools, what the output has to be and hold is in them.
        reading: How calls are found in the output; None without tools.
    """

    prompt: ChatPrompt
    options: Options
    reading: ToolReading | None = None


def prepare_chat(
    tokenizer: PreTrainedTokenizerBase | None, tool_parser: str, conversation: Conversation, options: Options
) -> PreparedChat:
    """Render a conversation and say how it is answered. Takes milliseconds; call it off the event loop.

    Args:
        tokenizer: The model's.
        tool_parser: The setting.
        conversation: What the request says.
        options: How to answer.

    Raises:
        BadRequestError: The conversation cannot be rendered, its tools cannot be shown, or the options do not go with them.
    """
    use = conversation.tools
    written = tool_format(tool_parser, template_of(tokenizer, with_tools=bool(use.shown)))
    messages = [written.template_message(message) for message in conversation.messages]
    conversation = replace(conversation, messages=messages)
    if not use.shown:
        prompt = render_chat(tokenizer, messages, [], conversation.asked)
        return PreparedChat(prompt, options.with_stops(prompt.stop))
    if options.provisional:
        raise BadRequestError(
            "kvgraft.provisional cannot be true with tools: a call that was streamed cannot be taken back; leave it out",
            param="kvgraft.provisional",
        )
    prompt = _shown(tokenizer, tool_parser, conversation)
    structure = structure_of(use, written.layout, options.sampling.structure)
    sampling = replace(
        options.sampling,
        structure=structure,
        stop=options.sampling.stop + prompt.stop,
        skip_special_tokens=options.sampling.skip_special_tokens and not _has_special_marks(tokenizer, written),
    )
    is_held = use.is_forced or options.sampling.structure is not None
    reading = ToolReading(use, written, is_structured=structure is not None, may_begin_freely=not is_held)
    return PreparedChat(prompt, replace(options, sampling=sampling), reading)


def _shown(tokenizer: PreTrainedTokenizerBase | None, tool_parser: str, conversation: Conversation) -> ChatPrompt:
    """Render with tools; raises `BadRequestError` if nobody tells the model of them: neither its template nor the setting."""
    messages, shown, asked = conversation.messages, conversation.tools.shown, conversation.asked
    has_template = bool(template_of(tokenizer, with_tools=True))
    if has_template or tool_parser != _TOLD_BY_US:
        prompt = render_chat(tokenizer, messages, shown, asked)
        if prompt != render_chat(tokenizer, messages, [], asked):
            return prompt
    if tool_parser != _TOLD_BY_US:
        raise BadRequestError(no_tools("the model's chat template does not show tools to the model"), param="tools")
    return render_chat(tokenizer, with_tools_told(messages, shown), [], asked)


def _has_special_marks(tokenizer: PreTrainedTokenizerBase | None, written: ToolFormat) -> bool:
    special = getattr(tokenizer, "all_special_tokens", ())
    return any(mark in special for mark in written.markers)
