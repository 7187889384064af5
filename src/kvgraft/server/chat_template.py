"""Turn a conversation into a prompt: by the model's own chat template, or a plain one where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.server.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.server.messages import Message


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        text: The prompt.
        add_special_tokens: The tokenizer is to add its own; templates write them themselves.
        stop: Texts that end the answer besides those of the request.
    """

    text: str
    add_special_tokens: bool
    stop: tuple[str, ...] = ()


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Message], tools: Sequence[Message]
) -> ChatPrompt:
    """Render a conversation up to where the assistant speaks.

    Raises:
        BadRequestError: The model has no tokenizer, cannot be shown tools, or its template refuses the conversation.
    """
    if tokenizer is None:
        raise BadRequestError("this model has no tokenizer; send token ids to /v1/completions", param="messages")
    if not getattr(tokenizer, "chat_template", None):
        if tools:
            raise BadRequestError("this model has no chat template, so it cannot be shown tools", param="tools")
        return plain_chat(messages)
    try:
        conversation: Any = list(messages)  # transformers types contents as texts; templates take more
        text = tokenizer.apply_chat_template(
            conversation, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs of the model's author and fail in any way
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BadRequestError(f"the model's chat template refuses the messages: {reason}", param="messages") from error
    return ChatPrompt(str(text), add_special_tokens=False)


def plain_chat(messages: Sequence[Message]) -> ChatPrompt:
    """Write `Role: text` paragraphs, for base models; the answer ends where the user would speak again."""
    turns = [f"{str(message['role']).capitalize()}: {message['content']}\n\n" for message in messages]
    return ChatPrompt("".join(turns) + "Assistant:", add_special_tokens=True, stop=("\nUser:",))
