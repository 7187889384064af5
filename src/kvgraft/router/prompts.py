"""The tokens of a request, as the workers will make them: by the model's tokenizer and chat template."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.config import quoted
from kvgraft.errors import ConfigError, one_line
from kvgraft.http.chat_template import render_chat, template_of
from kvgraft.http.errors import APIError
from kvgraft.http.fields import Fields
from kvgraft.http.left_out import served_chat
from kvgraft.http.messages import parse_messages, parse_tools
from kvgraft.http.template_fields import parse_template_fields
from kvgraft.models import BUNDLED_MODEL, SMOLLM2_MODEL, Checkpoint, bundled_model_path, load_failure, smollm2_path
from kvgraft.reuse.asked import PARAMETER, asked_mode
from kvgraft.reuse.continuation import may_go_on
from kvgraft.tokenising import TextBound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_MOST_TOKENS = 1 << 22
_LENIENCE = 4
"""Engines may serve longer prompts than a tokenizer says: it is a few times as long before a prompt is not looked at."""
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


class UnreadReason(StrEnum):
    """Why the tokens of a request are not known here."""

    PATH = "path"
    """What is sent to this path is rendered by engines alone."""
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
    """Reads prompts out of request bodies. Thread-safe as far as the tokenizer is."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers' tokenizer, or None
        """Read with `tokenizer`; without one, prompts of token ids alone can be read."""
        self._tokenizer = tokenizer
        self._bound = TextBound.of(tokenizer)
        said = getattr(tokenizer, "model_max_length", None)
        self._most_tokens = _LENIENCE * said if isinstance(said, int) and 0 < said < _MOST_TOKENS else _MOST_TOKENS

    def tokens(self, path: str, body: Mapping[str, object]) -> NDArray[np.int32]:
        """Return the tokens of a request `(n,)`, of its first prompt if it has several, as the worker will make them.

        Raises:
            UnreadPromptError: That cannot be said here. Whether the request is right is the worker's to judge.
        """
        if path not in (CHAT_PATH, COMPLETION_PATH):
            raise UnreadPromptError(UnreadReason.PATH, f"what is sent to {path} is rendered by the engine alone")
        fields = Fields(dict(body))
        try:
            tokens = self._chat(fields) if path == CHAT_PATH else self._completion(fields)
            return _truncated(tokens, body.get("truncate_prompt_tokens"))
        except UnreadPromptError:
            raise
        except (APIError, ConfigError) as error:
            raise UnreadPromptError(UnreadReason.UNSUPPORTED, one_line(error)) from error
        except (ValueError, OverflowError, TypeError) as error:
            raise UnreadPromptError(UnreadReason.INVALID, one_line(error)) from error

    def _chat(self, fields: Fields) -> NDArray[np.int32]:
        if self._tokenizer is None:
            raise _no_tokenizer()
        fields = served_chat(fields, template_of(self._tokenizer, with_tools=fields.has("tools"))).fields
        tools = parse_tools(fields)
        asked = parse_template_fields(fields, template_of(self._tokenizer, with_tools=bool(tools)))
        prompt = render_chat(self._tokenizer, parse_messages(fields), tools, asked)
        return self._encoded(prompt.text, add_special_tokens=_asked_specials(fields, prompt.add_special_tokens))

    def _completion(self, fields: Fields) -> NDArray[np.int32]:
        prompt = fields.values.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._encoded(prompt, add_special_tokens=_asked_specials(fields, True))
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return self._taken(np.array(prompt, np.int32))
        raise UnreadPromptError(UnreadReason.INVALID, "there is no prompt of text or token ids")

    def _taken(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        if len(tokens) > self._most_tokens:
            raise _too_long()
        return tokens

    def _encoded(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        if self._tokenizer is None:
            raise _no_tokenizer()
        if not self._bound.may_fit(text, self._most_tokens):
            raise _too_long()
        try:
            token_ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        except Exception as error:  # a tokenizer is foreign code
            raise UnreadPromptError(
                UnreadReason.FAILED, f"the prompt cannot be tokenised: {one_line(error)}"
            ) from error
        return np.array(token_ids, np.int32)


def _no_tokenizer() -> UnreadPromptError:
    return UnreadPromptError(UnreadReason.NO_TOKENIZER, "text is tokenised with --model alone")


def _too_long() -> UnreadPromptError:
    return UnreadPromptError(UnreadReason.TOO_LONG, "it is longer than what the engines take")


def _asked_specials(fields: Fields, default: bool) -> bool:
    asked = fields.values.get("add_special_tokens")
    return asked if isinstance(asked, bool) else default


def _truncated(tokens: NDArray[np.int32], most: object) -> NDArray[np.int32]:
    """The last tokens, as many as the client lets the engine keep."""
    return tokens[-most:] if type(most) is int and most > 0 else tokens


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
