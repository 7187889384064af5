"""From a conversation with tools to what the engine is asked, and how its output is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.http.errors import BadRequestError
from kvgraft.server.rendering import Rendering, show_conversation
from kvgraft.server.tools import ToolReading
from kvgraft.server.tools.structures import structure_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvgraft.config import ServerConfig
    from kvgraft.http.chat_template import ChatPrompt
    from kvgraft.server.options import AnswerOptions
    from kvgraft.server.rendering import Conversation
    from kvgraft.server.tools import ToolFormat


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
    use = conversation.tools
    if use.shown and options.request.provisional:
        raise BadRequestError(
            "kvgraft.provisional cannot be true with tools: a call that was streamed cannot be taken back; leave it out",
            param="kvgraft.provisional",
        )
    shown = show_conversation(tokenizer, rendering_of(config), conversation)
    options = _for_prompt(options, shown.prompt)
    if not use.shown:
        return PreparedChat(shown.prompt.text, options)
    asked_structure = options.sampling.structure
    structure = structure_of(use, shown.written.layout, asked_structure)
    reading = ToolReading(
        use,
        shown.written,
        is_structured=structure is not None,
        may_begin_freely=not use.is_forced and asked_structure is None,
    )
    skips = options.sampling.skip_special_tokens and not _has_special_marks(tokenizer, shown.written)
    sampling = replace(options.sampling, structure=structure, skip_special_tokens=skips)
    return PreparedChat(shown.prompt.text, options.with_sampling(sampling), reading)


def rendering_of(config: ServerConfig) -> Rendering:
    """Return what the settings say of prompts."""
    return Rendering(config.tool_parser, special_tokens_are_text=config.chat_special_tokens == "text")


def _for_prompt(options: AnswerOptions, prompt: ChatPrompt) -> AnswerOptions:
    """Return options with what a rendered conversation asks of the tokenizer, and the texts that end its answer."""
    sampling = replace(options.sampling, stop=options.sampling.stop + prompt.stop)
    return options.with_sampling(sampling).with_fields(add_special_tokens=prompt.add_special_tokens)


def _has_special_marks(tokenizer: PreTrainedTokenizerBase | None, written: ToolFormat) -> bool:
    special = getattr(tokenizer, "all_special_tokens", ())
    return any(mark in special for mark in written.markers)
