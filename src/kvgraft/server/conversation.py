"""From a conversation with tools to what the engine is asked, and how its output is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.http.chat_template import no_tools, render_chat, template_of
from kvgraft.http.errors import BadRequestError
from kvgraft.http.shown_tools import with_tools_told
from kvgraft.server.tools import ToolReading, tool_format
from kvgraft.server.tools.structures import structure_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.config import ServerConfig
    from kvgraft.http.chat_template import ChatPrompt
    from kvgraft.http.messages import Message
    from kvgraft.http.template_fields import TemplateFields
    from kvgraft.server.options import AnswerOptions
    from kvgraft.server.tools import ToolFormat, ToolUse

_DESCRIBED_IN = "json"
"""The form of calls of models to which the server describes tools, because their template does not show them."""
_DESCRIBING = frozenset({"auto", _DESCRIBED_IN})
"""Values of `tool_parser` with which it does; the others name a form that a template has to show."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation of a request.

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
    """A prompt and how it is answered.

    Attributes:
        prompt: The rendered conversation.
        options: How to answer; with tools, what the output has to be and hold is in them.
        reading: How calls are found in the output; None without tools.
    """

    prompt: str
    options: AnswerOptions
    reading: ToolReading | None = None


def prepare_chat(
    tokenizer: PreTrainedTokenizerBase | None, config: ServerConfig, conversation: Conversation, options: AnswerOptions
) -> PreparedChat:
    """Render a conversation and say how it is answered. Takes milliseconds; call it off the event loop.

    Args:
        tokenizer: The model's.
        config: Says how tools are described, and what special tokens in messages are.
        conversation: What the request says.
        options: How to answer.

    Raises:
        BadRequestError: The conversation cannot be rendered, its tools cannot be shown, or the options do not go with them.
    """
    use, tool_parser = conversation.tools, config.tool_parser
    written = tool_format(tool_parser, template_of(tokenizer, with_tools=bool(use.shown)))
    messages = [written.template_message(message) for message in conversation.messages]
    asked = replace(conversation.asked, special_tokens_are_text=config.chat_special_tokens == "text")
    conversation = replace(conversation, messages=messages, asked=asked)
    if not use.shown:
        prompt = render_chat(tokenizer, messages, [], conversation.asked)
        return PreparedChat(prompt.text, _for_prompt(options, prompt))
    if options.request.provisional:
        raise BadRequestError(
            "kvgraft.provisional cannot be true with tools: a call that was streamed cannot be taken back; leave it out",
            param="kvgraft.provisional",
        )
    prompt, is_described = _shown(tokenizer, tool_parser, conversation)
    if is_described:
        written = tool_format(_DESCRIBED_IN, "")
    asked_structure = options.sampling.structure
    structure = structure_of(use, written.layout, asked_structure)
    reading = ToolReading(
        use,
        written,
        is_structured=structure is not None,
        may_begin_freely=not use.is_forced and asked_structure is None,
    )
    options = _for_prompt(options, prompt)
    skips = options.sampling.skip_special_tokens and not _has_special_marks(tokenizer, written)
    sampling = replace(options.sampling, structure=structure, skip_special_tokens=skips)
    return PreparedChat(prompt.text, options.with_sampling(sampling), reading)


def _for_prompt(options: AnswerOptions, prompt: ChatPrompt) -> AnswerOptions:
    """Return options with what a rendered conversation asks of the tokenizer, and the texts that end its answer."""
    sampling = replace(options.sampling, stop=options.sampling.stop + prompt.stop)
    return options.with_sampling(sampling).with_fields(add_special_tokens=prompt.add_special_tokens)


def _shown(
    tokenizer: PreTrainedTokenizerBase | None, tool_parser: str, conversation: Conversation
) -> tuple[ChatPrompt, bool]:
    """Render with tools, and say whether a system message describes them because the template does not show them.

    Raises:
        BadRequestError: It does not, and the setting names a form of calls that it would have to show.
    """
    messages, shown, asked = conversation.messages, conversation.tools.shown, conversation.asked
    has_template = bool(template_of(tokenizer, with_tools=True))
    if has_template or tool_parser not in _DESCRIBING:
        prompt = render_chat(tokenizer, messages, shown, asked)
        if prompt != render_chat(tokenizer, messages, [], asked):
            return prompt, False
    if tool_parser not in _DESCRIBING:
        raise BadRequestError(no_tools("the model's chat template does not show tools to the model"), param="tools")
    return render_chat(tokenizer, with_tools_told(messages, shown), [], asked), True


def _has_special_marks(tokenizer: PreTrainedTokenizerBase | None, written: ToolFormat) -> bool:
    special = getattr(tokenizer, "all_special_tokens", ())
    return any(mark in special for mark in written.markers)
