"""The tokens of a request, as the workers will make them: by the model's tokenizer and chat template."""

from __future__ import annotations

import logging
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
from kvgraft.tokenising import TextBound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_MOST_TOKENS = 1 << 22
_LENIENCE = 4
"""Engines may serve longer prompts than a tokenizer says: it is a few times as long before a prompt is not looked at."""
_TOO_LONG = "it is longer than what the engines take"

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


class PromptReader:
    """Reads prompts out of request bodies. Thread-safe as far as the tokenizer is."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers' tokenizer, or None
        """Read with `tokenizer`; without one, prompts of token ids alone can be read."""
        self._tokenizer = tokenizer
        self._bound = TextBound.of(tokenizer)
        said = getattr(tokenizer, "model_max_length", None)
        self._most_tokens = _LENIENCE * said if isinstance(said, int) and 0 < said < _MOST_TOKENS else _MOST_TOKENS
        self._has_said = tokenizer is None

    def tokens(self, path: str, body: Mapping[str, object]) -> NDArray[np.int32] | None:
        """Return the tokens of a request `(n,)`, of its first prompt if it has several; None if that cannot be said.

        What cannot be read here (images, a body that the worker will refuse) is the worker's to judge. Nothing is raised.
        """
        fields = Fields(dict(body))
        try:
            return self._chat(fields) if path == CHAT_PATH else self._completion(fields)
        except (APIError, ConfigError, ValueError, OverflowError, TypeError) as error:
            if not self._has_said:
                self._has_said = True
                logger.warning("a prompt cannot be read, so it goes to the least loaded worker: %s", one_line(error))
            return None

    def _chat(self, fields: Fields) -> NDArray[np.int32]:
        fields = served_chat(fields, template_of(self._tokenizer, with_tools=fields.has("tools"))).fields
        tools = parse_tools(fields)
        asked = parse_template_fields(fields, template_of(self._tokenizer, with_tools=bool(tools)))
        prompt = render_chat(self._tokenizer, parse_messages(fields), tools, asked)
        return self._encoded(prompt.text, add_special_tokens=prompt.add_special_tokens)

    def _completion(self, fields: Fields) -> NDArray[np.int32] | None:
        prompt = fields.values.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._encoded(prompt, add_special_tokens=True)
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return self._taken(np.array(prompt, np.int32))
        return None

    def _taken(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        if len(tokens) > self._most_tokens:
            raise ConfigError(_TOO_LONG)
        return tokens

    def _encoded(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        if self._tokenizer is None:
            raise ConfigError("there is no tokenizer")
        if not self._bound.may_fit(text, self._most_tokens):
            raise ConfigError(_TOO_LONG)
        try:
            token_ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        except Exception as error:  # a tokenizer is foreign code
            raise ConfigError(f"the prompt cannot be tokenised: {one_line(error)}") from error
        return np.array(token_ids, np.int32)


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
