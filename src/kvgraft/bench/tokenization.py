"""Turn text into token ids for measurements: a Hugging Face tokenizer file, or a plain one that is built in."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import ConfigError

Tokenize = Callable[[str], NDArray[np.int32]]

_PIECE = re.compile(r" ?\w{1,6}| ?[^\w\s]|\s")


def load_tokenizer(path: str | None) -> Tokenize:
    """Return the tokenizer of a Hugging Face tokenizers JSON file, or the built-in one.

    Raises:
        ConfigError: The file is missing or of another kind.
        ImportError: `tokenizers` is not installed.
    """
    if path is None:
        return PieceTokenizer()
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no tokenizer file; --tokenizer takes a Hugging Face tokenizers JSON file")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ImportError("--tokenizer needs the package tokenizers: pip install 'kvgraft[torch]'") from error
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:
        raise ConfigError(f"{path}: not a Hugging Face tokenizers JSON file ({error})") from error
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


class PieceTokenizer:
    """Splits text into pieces of words of at most six letters, single marks and white space, numbered as they come up.

    Equal pieces have equal ids within one instance, and different pieces different ids. A piece is about as long as a
    token of a usual vocabulary, so figures are comparable, not equal.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text's pieces."""
        ids = self._ids
        return np.array([ids.setdefault(piece, len(ids)) for piece in _PIECE.findall(text)], np.int32)
