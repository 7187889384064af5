"""Contract of embedders, which turn token ids into vectors that may be compared by their cosine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.types import TokenArray

Vectors = NDArray[np.float32]
"""One or more vectors, of length 1 each or all zero."""

Decoder = Callable[[list[int]], str]
"""Turns token ids of the served model into text, as the `decode` of its tokenizer does."""


class Embedder(ABC):
    """Turns texts into vectors with a cosine that says how alike they are.

    Implementations are thread-safe: prompts are embedded while stored texts are.
    """

    is_quick: ClassVar[bool] = False
    """Whether embedding a prompt costs no more than looking it up (about a millisecond for 32K tokens), so that it may
    be done in the path of a request. Everything else is embedded by a thread, and used when it is ready."""

    least_similarity: ClassVar[float] = 0.3
    """Cosine below which a text is not worth comparing with a prompt token by token."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in settings and records."""

    @property
    @abstractmethod
    def dimensions(self) -> int:
        """Length of a vector."""

    @abstractmethod
    def embed(self, texts: Sequence[TokenArray]) -> Vectors:
        """Embed texts of any length.

        Returns:
            float32 `(len(texts), dimensions)`, rows of length 1; a row of zeros has nothing to compare (an empty text).
        """

    def learn(self, text: TokenArray) -> bool:
        """Hear that a text is stored, from the one thread that stores texts.

        An embedder that learns from it belongs to one `Discovery`.

        Returns:
            Whether vectors made so far cannot be compared with those made from now on; all texts are embedded anew then.
        """
        del text
        return False


def unit_rows(rows: Vectors) -> Vectors:
    """Scale rows to length 1; rows of zeros stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Vectors = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)
    return scaled
