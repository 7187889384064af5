"""The tokens of a request, as the workers will make them: by the server's own renderer, with the model's tokenizer.

Engines differ in what they make of some kinds of bodies. `parity` finds out which, and how.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.config import quoted
from kvgraft.errors import ConfigError, one_line
from kvgraft.http.errors import APIError
from kvgraft.http.fields import Fields
from kvgraft.http.left_out import has_media
from kvgraft.http.special_text import spells_special_tokens
from kvgraft.literal_text import encode
from kvgraft.models import BUNDLED_MODEL, SMOLLM2_MODEL, Checkpoint, bundled_model_path, load_failure, smollm2_path
from kvgraft.reuse.asked import PARAMETER, asked_mode
from kvgraft.reuse.continuation import may_go_on
from kvgraft.server.aliases import with_our_names
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.given_prompts import parse_prompts
from kvgraft.server.rendering import Rendering, read_conversation, show_conversation
from kvgraft.server.truncation import parse_truncation
from kvgraft.tokenising import TextBound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvgraft.server.rendering import ReadConversation

_MOST_TOKENS = 1 << 22
_TOKEN_IDS = 1 << 31
"""Ids are as a worker's vocabulary has them, which is not known here; they are numbers of 32 bits in events."""
_LENIENCE = 4
"""Engines may serve longer prompts than a tokenizer says: it is a few times as long before a prompt is not looked at."""
KVGRAFT_RENDERING = Rendering()
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
RESPONSES_PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"
_ENDPOINTS = {
    CHAT_PATH: Endpoint.CHAT,
    COMPLETION_PATH: Endpoint.COMPLETIONS,
    RESPONSES_PATH: Endpoint.RESPONSES,
    MESSAGES_PATH: Endpoint.MESSAGES,
}


class UnreadReason(StrEnum):
    """Why the tokens of a request are not known here."""

    PATH = "path"
    """What is sent to this path is rendered by engines alone, or by these in another way."""
    DIFFERS = "differs"
    """Some worker renders such a body otherwise, or does not say how it does."""
    INVALID = "invalid"
    """It has no prompt, or one that the worker will refuse."""
    UNSUPPORTED = "unsupported"
    """It has fields or parts that are not rendered here, such as images."""
    TOO_LONG = "too_long"
    """It is longer than what engines take."""
    NO_TOKENIZER = "no_tokenizer"
    """The router was started without `--model`."""
    FAILED = "failed"
    """The tokenizer failed."""


class BodyKind(StrEnum):
    """What a body has that engines may render in different ways."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSE = "response"
    """A body of `/v1/responses`."""
    MESSAGE = "message"
    """A body of `/v1/messages`."""
    TOOLS = "tools"
    CALLS = "calls"
    """Calls of tools, or their results."""
    SPECIAL_TOKENS = "special_tokens"
    """Messages or tools that spell special tokens."""
    PARTS = "parts"
    """Messages of several parts."""
    MEDIA = "media"
    """Results of tools with parts that are no text: `kvgraft serve` writes a line, others refuse or see them."""
    OPEN = "open"
    """The prompt does not end where the assistant begins to speak."""


_OF_ENDPOINT = {
    Endpoint.CHAT: BodyKind.CHAT,
    Endpoint.RESPONSES: BodyKind.RESPONSE,
    Endpoint.MESSAGES: BodyKind.MESSAGE,
    Endpoint.COMPLETIONS: BodyKind.COMPLETION,
}
_PATH_KINDS = frozenset({BodyKind.RESPONSE, BodyKind.MESSAGE})


@dataclass(frozen=True, slots=True)
class EngineRendering:
    """How the workers make prompts of bodies.

    Attributes:
        rendering: As the server does with these settings.
        unlike: Kinds of bodies that some worker renders otherwise.
        max_model_len: Tokens that prompt and output may have together at all workers; None if it is not known.
    """

    rendering: Rendering = KVGRAFT_RENDERING
    unlike: frozenset[BodyKind] = frozenset()
    max_model_len: int | None = None


class UnreadPromptError(ConfigError):
    """The tokens of a request are not known here: it goes to the least loaded worker.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: UnreadReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def accepts_copies(body: Mapping[str, object]) -> bool:
    """Return whether a request takes text that is no exact prefix, as far as its body says so; engines do by default.

    `verified` computes its prompt in full, also where it drafts from copies.
    """
    places = ("kvgraft", "reuse"), ("kv_transfer_params", PARAMETER), ("custom_params", PARAMETER)
    for name, key in places:
        given = body.get(name)
        if isinstance(given, dict) and key in given:
            return may_go_on(asked_mode(given[key], name)[0])
    return True


class PromptReader:
    """Reads prompts out of request bodies. Thread-safe as far as the tokenizer is.

    Attributes:
        engines: How the workers make prompts; as `kvgraft serve` until something else is known.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers' tokenizer, or None
        """Read with `tokenizer`; without one, prompts of token ids alone can be read."""
        self.engines = EngineRendering()
        self.tokenizer = tokenizer
        self._bound = TextBound.of(tokenizer)
        said = getattr(tokenizer, "model_max_length", None)
        self._most_tokens = _LENIENCE * said if isinstance(said, int) and 0 < said < _MOST_TOKENS else _MOST_TOKENS

    def tokens(
        self, path: str, body: Mapping[str, object], engines: EngineRendering | None = None
    ) -> NDArray[np.int32]:
        """Return the tokens of a request `(n,)`, of its first prompt if it has several, as the worker will make them.

        Args:
            path: Where it is sent.
            body: What is sent.
            engines: How the workers make prompts; None: as is known.

        Raises:
            UnreadPromptError: That cannot be said here. Whether the request is right is the worker's to judge.
        """
        endpoint = _ENDPOINTS.get(path)
        if endpoint is None:
            raise UnreadPromptError(UnreadReason.PATH, f"what is sent to {path} is rendered by the engine alone")
        engines = engines or self.engines
        try:
            if endpoint is Endpoint.COMPLETIONS:
                return self._completion(with_our_names(Fields(dict(body))), engines)
            return self._conversation(endpoint, Fields(dict(body)), engines)
        except UnreadPromptError:
            raise
        except (APIError, ConfigError) as error:
            raise UnreadPromptError(UnreadReason.UNSUPPORTED, one_line(error)) from error
        except (ValueError, OverflowError, TypeError) as error:
            raise UnreadPromptError(UnreadReason.INVALID, one_line(error)) from error

    def _conversation(self, endpoint: Endpoint, fields: Fields, engines: EngineRendering) -> NDArray[np.int32]:
        if self.tokenizer is None:
            raise _no_tokenizer()
        _require_like({_OF_ENDPOINT[endpoint]}, engines)
        fields = with_our_names(fields) if endpoint is Endpoint.CHAT else fields
        read = read_conversation(endpoint, fields, self.tokenizer)
        if engines.unlike:
            _require_like(self._kinds(read), engines)
        prompt = show_conversation(self.tokenizer, engines.rendering, read.conversation).prompt
        tokens = self._encoded(prompt.text, add_special_tokens=prompt.add_special_tokens)
        return _truncated(read.chat, tokens, engines)

    def _completion(self, fields: Fields, engines: EngineRendering) -> NDArray[np.int32]:
        try:
            prompt = parse_prompts(fields, _TOKEN_IDS)[0]
        except APIError as error:
            raise UnreadPromptError(UnreadReason.INVALID, one_line(error)) from error
        if isinstance(prompt, str):
            _require_like({BodyKind.COMPLETION}, engines)
            special = fields.flag("add_special_tokens", default=True)
            return _truncated(fields, self._encoded(prompt, add_special_tokens=special), engines)
        if len(prompt) > self._most_tokens:
            raise _too_long()
        return _truncated(fields, np.array(prompt, np.int32), engines)

    def _kinds(self, read: ReadConversation) -> Iterator[BodyKind]:
        """Yield what a conversation has that engines may render in different ways."""
        said = read.conversation
        if said.tools.shown:
            yield BodyKind.TOOLS
        if any(message["role"] == "tool" or message.get("tool_calls") for message in said.messages):
            yield BodyKind.CALLS
        if said.asked.continue_final_message or not said.asked.add_generation_prompt:
            yield BodyKind.OPEN
        given = read.fields.values.get("messages")
        if isinstance(given, list) and any(_num_parts(message) > 1 for message in given):
            yield BodyKind.PARTS
        if has_media(read.left_out):
            yield BodyKind.MEDIA
        shown = [list(said.messages), list(said.tools.shown), dict(said.asked.variables)]
        if spells_special_tokens(self.tokenizer, shown):
            yield BodyKind.SPECIAL_TOKENS

    def _encoded(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        if self.tokenizer is None:
            raise _no_tokenizer()
        if not self._bound.may_fit(text, self._most_tokens):
            raise _too_long()
        try:
            token_ids = encode(self.tokenizer, text, add_special_tokens=add_special_tokens).token_ids
        except Exception as error:  # a tokenizer is foreign code
            raise UnreadPromptError(
                UnreadReason.FAILED, f"the prompt cannot be tokenised: {one_line(error)}"
            ) from error
        return np.array(token_ids, np.int32)


def _require_like(kinds: set[BodyKind] | Iterator[BodyKind], engines: EngineRendering) -> None:
    for kind in kinds:
        if kind in engines.unlike:
            reason = UnreadReason.PATH if kind in _PATH_KINDS else UnreadReason.DIFFERS
            raise UnreadPromptError(reason, f"a worker renders {kind.replace('_', ' ')} otherwise, or does not say how")


def _num_parts(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 1


def _truncated(fields: Fields, tokens: NDArray[np.int32], engines: EngineRendering) -> NDArray[np.int32]:
    """Return what the client lets the engine keep."""
    truncation = parse_truncation(fields)
    if truncation is None:
        return tokens
    most = (_MOST_TOKENS if engines.max_model_len is None else engines.max_model_len) - 1
    if truncation.num_tokens < 0 and len(tokens) > most:
        raise UnreadPromptError(UnreadReason.TOO_LONG, "what is kept of it is what fits, which engines count otherwise")
    return truncation.cut(tokens, most)


def _no_tokenizer() -> UnreadPromptError:
    return UnreadPromptError(UnreadReason.NO_TOKENIZER, "text is tokenised with --model alone")


def _too_long() -> UnreadPromptError:
    return UnreadPromptError(UnreadReason.TOO_LONG, "it is longer than what the engines take")


def load_tokenizer(name: str) -> Any:  # noqa: ANN401 - transformers' tokenizer
    """Load the tokenizer of a model: a directory, a hub id, a GGUF file or a name that `kvgraft serve` knows.

    Raises:
        ConfigError: There is none, or it cannot be loaded.
        ImportError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise ImportError(
            "tokenising prompts needs transformers: pip install 'kvgraft[router]'", name="transformers"
        ) from error
    transformers_logging.set_verbosity_error()
    checkpoint = _checkpoint(name)
    try:
        return AutoTokenizer.from_pretrained(checkpoint.source, **checkpoint.arguments)
    except Exception as error:
        raise ConfigError(
            f"cannot load the tokenizer of model {quoted(name)}: {load_failure(name, error)}; give --model the "
            "directory or hub id that the workers serve"
        ) from error


def _checkpoint(name: str) -> Checkpoint:
    """Find a tokenizer; unlike a model, it needs no weights beside it."""
    path: Path | None = bundled_model_path() if name == BUNDLED_MODEL else Path(name).expanduser()
    if name == SMOLLM2_MODEL:
        path = smollm2_path()
    if path is not None and path.is_file():
        return Checkpoint(name, str(path.parent), path)
    return Checkpoint(name, str(path) if path is not None and path.is_dir() else name)
