"""The tokenizer of the served model, from what an engine calls a model configuration."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError, one_line

if TYPE_CHECKING:
    from kvgraft.semantic.base import Decoder

_PATHS = ("tokenizer", "tokenizer_path", "model_path", "model")
"""Attributes that name a tokenizer's directory, the most exact first: vLLM has `tokenizer` and `model`, SGLang the
others."""


def decoder_of(model_config: object) -> Decoder | None:
    """Return what turns token ids into text, or None if `model_config` says nothing about it.

    Args:
        model_config: A tokenizer (anything with `decode`), something that has one under `tokenizer`, or something that
        names its
            directory under `tokenizer`, `tokenizer_path`, `model_path` or `model`. A named one is loaded by
            transformers when the first text is decoded, and never runs code that lies beside it.
    """
    for owner in (model_config, getattr(model_config, "tokenizer", None)):
        decode = getattr(owner, "decode", None)
        if callable(decode):
            return decode  # type: ignore[no-any-return]
    named = (getattr(model_config, name, None) for name in _PATHS)
    path = next((each for each in named if isinstance(each, str) and each), None)
    return None if path is None else _LazyDecoder(path, getattr(model_config, "tokenizer_revision", None))


class _LazyDecoder:
    """A tokenizer that is loaded when it is first needed."""

    def __init__(self, path: str, revision: str | None) -> None:
        self._path, self._revision = path, revision

    def __call__(self, token_ids: list[int]) -> str:
        return str(_tokenizer(self._path, self._revision).decode(token_ids))


@cache
def _tokenizer(path: str, revision: str | None) -> Any:  # noqa: ANN401 - of an optional package
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("reading text takes transformers: pip install 'kvgraft[torch]', or pass decode=") from error
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main", trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"no tokenizer in {path}: {one_line(error)}; pass decode=") from error
