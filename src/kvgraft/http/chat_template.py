"""Turn a conversation into a prompt: by the model's own chat template, or a plain one where it has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvgraft.http.errors import BadRequestError
from kvgraft.http.shown_tools import spelled_out
from kvgraft.http.special_text import literal, shielded
from kvgraft.http.template_fields import TemplateFields

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.http.messages import Message

_DEFAULT = TemplateFields()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        text: The prompt; a `LiteralText` where messages spell special tokens that are to be text.
        add_special_tokens: The tokenizer is to add its own; templates write them themselves.
        stop: Texts that end the answer besides those of the request.
    """

    text: str
    add_special_tokens: bool
    stop: tuple[str, ...] = ()


def template_of(tokenizer: PreTrainedTokenizerBase | None, *, with_tools: bool) -> str:
    """Return the text of the template that renders conversations, empty if there is none; some models have two."""
    template: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return str(template["tool_use" if with_tools and "tool_use" in template else "default"])
    return template or ""


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Message],
    tools: Sequence[Message],
    asked: TemplateFields = _DEFAULT,
) -> ChatPrompt:
    """Render a conversation up to where the assistant speaks, or goes on.

    Calls of tools and their results that the template leaves out are spelled out as texts.

    Args:
        tokenizer: The model's.
        messages: The conversation.
        tools: Tools in the form that templates take.
        asked: What the request says about rendering.

    Raises:
        BadRequestError: The model has no tokenizer, cannot be shown tools, or its template refuses the conversation.
    """
    if tokenizer is None:
        raise BadRequestError("this model has no tokenizer; send token ids to /v1/completions", param="messages")
    if not asked.special_tokens_are_text:
        return _prompt(tokenizer, messages, tools, asked)
    variables = shielded(tokenizer, dict(asked.variables))
    prompt = _prompt(
        tokenizer,
        shielded(tokenizer, list(messages)),
        shielded(tokenizer, list(tools)),
        replace(asked, variables=variables),
    )
    return replace(prompt, text=literal(tokenizer, prompt.text))


def _prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Message], asked: TemplateFields
) -> ChatPrompt:
    if not template_of(tokenizer, with_tools=bool(tools)):
        if tools:
            raise BadRequestError(
                no_tools("this model has no chat template, so it cannot be shown tools"), param="tools"
            )
        return plain_chat(spelled_out(messages), asked)
    text = _rendered(tokenizer, messages, tools, asked)
    if any(_makes(tokenizer, text, less, tools, asked) for less in _reduced(messages)):
        text = _rendered(tokenizer, spelled_out(messages), tools, asked)
    return ChatPrompt(text, add_special_tokens=bool(asked.add_special_tokens))


def _reduced(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Conversations without calls, and without their results: of these a template that leaves such out makes the same."""
    if any(message.get("tool_calls") for message in messages):
        yield [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    if any(message["role"] == "tool" and message["content"] for message in messages):
        yield [message | {"content": ""} if message["role"] == "tool" else message for message in messages]


def _makes(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Message],
    asked: TemplateFields,
) -> bool:
    """Return whether the template makes `text` of a conversation; one that it refuses it has looked at."""
    try:
        return _rendered(tokenizer, messages, tools, asked) == text
    except BadRequestError:
        return False


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Message], asked: TemplateFields
) -> str:
    """Return what the model's template makes of a conversation."""
    try:
        conversation: Any = list(messages)  # transformers types contents as texts; templates take more
        variables: dict[str, Any] = dict(asked.variables)
        if asked.continue_final_message:
            variables["continue_final_message"] = True
        text = tokenizer.apply_chat_template(
            conversation,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=asked.add_generation_prompt,
            **variables,
        )
    except Exception as error:  # templates are programs of the model's author and fail in any way
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BadRequestError(f"the model's chat template refuses the messages: {reason}", param="messages") from error
    return str(text)


def no_tools(problem: str) -> str:
    """Return an error text: a model cannot be shown tools, and what to do."""
    return f"{problem}; start the server without --tool-parser, which describes them in a system message then"


def plain_chat(messages: Sequence[Message], asked: TemplateFields = _DEFAULT) -> ChatPrompt:
    """Write `Role: text` paragraphs, for base models; the answer ends where the user would speak again."""
    text = "\n\n".join(f"{str(message['role']).capitalize()}: {message['content']}" for message in messages)
    if asked.add_generation_prompt:
        text += "\n\nAssistant:"
    elif not asked.continue_final_message:
        text += "\n\n"
    return ChatPrompt(text, add_special_tokens=asked.add_special_tokens is not False, stop=("\nUser:",))
