"""The prompt of a conversation, from a body of `/v1/chat/completions`, `/v1/responses` or `/v1/messages`.

It is made here alone, for the server and for a router that has to know what servers make of a body. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.http.chat_template import ChatPrompt, no_tools, render_chat, template_of
from kvgraft.http.errors import BadRequestError
from kvgraft.http.left_out import served_chat, served_message, served_response
from kvgraft.http.messages import parse_messages
from kvgraft.http.shown_tools import with_tools_told
from kvgraft.http.template_fields import parse_template_fields
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.messages_input import as_chat, parse_conversation
from kvgraft.server.responses_input import parse_input, parse_rendering
from kvgraft.server.tools import parse_tool_use, tool_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.http.fields import Fields
    from kvgraft.http.messages import Message
    from kvgraft.http.template_fields import TemplateFields
    from kvgraft.server.tools import ToolFormat, ToolUse

TEMPLATE_ALONE = ""
"""`tool_parser` of servers that give tools to the template and never describe them: vLLM and SGLang."""
_DESCRIBED_IN = "json"
"""The form of calls of models to which the server describes tools, because their template does not show them."""
_DESCRIBING = frozenset({"auto", _DESCRIBED_IN})
"""Values of `tool_parser` with which it does; the others name a form that a template has to show."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a server's settings say of prompts.

    Attributes:
        tool_parser: The setting, or `TEMPLATE_ALONE`.
        special_tokens_are_text: Special tokens that messages spell are no control tokens.
    """

    tool_parser: str = "auto"
    special_tokens_are_text: bool = True


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
class ReadConversation:
    """A body with a conversation.

    Attributes:
        fields: The body without what is not served.
        chat: What it says besides the conversation, under the names that chats have for it.
        conversation: What it is about.
        left_out: Names of what is not served.
    """

    fields: Fields
    chat: Fields
    conversation: Conversation
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShownConversation:
    """A rendered conversation.

    Attributes:
        prompt: What the model reads.
        written: How calls of tools are written in it, and in the answer.
    """

    prompt: ChatPrompt
    written: ToolFormat


def read_conversation(
    endpoint: Endpoint, fields: Fields, tokenizer: PreTrainedTokenizerBase | None
) -> ReadConversation:
    """Read the conversation of a body.

    Args:
        endpoint: Whose body it is: `CHAT`, `RESPONSES`, `MESSAGES`, or `TOKENIZE`, which has the fields of a chat.
        fields: The body, with the names of `with_our_names`.
        tokenizer: The model's.

    Raises:
        APIError: A field is wrong, or would change what the answer means; the error names it.
    """
    template = template_of(tokenizer, with_tools=fields.has("tools"))
    is_flat = endpoint is Endpoint.RESPONSES
    if is_flat:
        body = served_response(fields, template)
        messages, chat = parse_input(body.fields), body.fields
    elif endpoint is Endpoint.MESSAGES:
        body = served_message(fields, template)
        messages, chat = parse_conversation(body.fields), as_chat(body.fields)
    else:
        body = served_chat(fields, template)
        messages, chat = parse_messages(body.fields), body.fields
    tools = parse_tool_use(chat, is_flat=is_flat)
    template = template_of(tokenizer, with_tools=bool(tools.shown))
    asked = parse_rendering(chat, template) if is_flat else parse_template_fields(chat, template)
    return ReadConversation(body.fields, chat, Conversation(messages, tools, asked), body.left_out)


def show_conversation(
    tokenizer: PreTrainedTokenizerBase | None, rendering: Rendering, conversation: Conversation
) -> ShownConversation:
    """Render a conversation. Takes milliseconds; call it off the event loop.

    Args:
        tokenizer: The model's.
        rendering: Settings of the server.
        conversation: What the request says.

    Raises:
        BadRequestError: It cannot be rendered, or its tools cannot be shown.
    """
    shown, parser = conversation.tools.shown, rendering.tool_parser
    written = tool_format(parser or "auto", template_of(tokenizer, with_tools=bool(shown)))
    messages = [written.template_message(message) for message in conversation.messages]
    asked = replace(conversation.asked, special_tokens_are_text=rendering.special_tokens_are_text)
    if not shown:
        return ShownConversation(render_chat(tokenizer, messages, [], asked), written)
    if parser == TEMPLATE_ALONE:
        return ShownConversation(render_chat(tokenizer, messages, shown, asked), written)
    if template_of(tokenizer, with_tools=True) or parser not in _DESCRIBING:
        prompt = render_chat(tokenizer, messages, shown, asked)
        if prompt != render_chat(tokenizer, messages, [], asked):
            return ShownConversation(prompt, written)
    if parser not in _DESCRIBING:
        raise BadRequestError(no_tools("the model's chat template does not show tools to the model"), param="tools")
    described = render_chat(tokenizer, with_tools_told(messages, shown), [], asked)
    return ShownConversation(described, tool_format(_DESCRIBED_IN, ""))
