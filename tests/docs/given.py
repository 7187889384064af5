"""What the reader of a page is taken to have: names that its programs use and do not make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix import RadixCache
from kvgraft.semantic import EmbeddingProvider

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = "import shutil\n\n\ndef copy(source, target):\n    return shutil.copy2(source, target)\n" * 8


class Slots:
    """A reader's own pool: gives out slots, and takes back those that it has given out, once."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self._next = 0

    def alloc(self, count: int) -> np.ndarray:
        found = np.arange(self._next, self._next + count)
        self._next += count
        self.held |= set(found.tolist())
        return found

    def free(self, slots: np.ndarray) -> None:
        assert self.held >= set(slots.tolist())
        self.held -= set(slots.tolist())


class _Tokenizer:
    """Of a model whose vocabulary is the bytes."""

    def decode(self, token_ids: np.ndarray) -> str:
        return bytes(np.asarray(token_ids, np.uint8)).decode("latin-1")


class _MyCache(RadixCache):
    """A reader's own prefix cache."""


def _texts() -> dict[str, object]:
    return {"prompt": TEXT, "other_prompt": "Explain this:\n\n" + TEXT, "question": "What does copy do?"}


def _prefix() -> dict[str, object]:
    pool = Slots()
    return {
        "pool": pool,
        "full_pool": Slots(),
        "swa_pool": Slots(),
        "state_pool": Slots(),
        "states": np.zeros((64, 4)),
        "provider": EmbeddingProvider("minhash"),
        "copy": lambda slots: pool.alloc(len(slots)),
        "MyCache": _MyCache,
    }


def _semantic() -> dict[str, object]:
    rng = np.random.default_rng(0)
    document = rng.integers(32, 127, 400)
    return {"document": document, "prompt": np.concatenate([document[50:], [10]]), "tokenizer": _Tokenizer()}


def _graft() -> dict[str, object]:
    return {"prompts": [TEXT, "Explain this:\n\n" + TEXT]}


GIVEN: dict[str, Callable[[], dict[str, object]]] = {
    "README.md": _texts,
    "docs/graft.md": _graft,
    "docs/healing.md": _graft,
    "docs/prefix.md": _prefix,
    "docs/semantic.md": _semantic,
    "docs/server.md": _texts,
}
"""By page; a page that is not here needs nothing but itself."""
