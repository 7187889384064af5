"""Digests of all tokens before a text: where a prompt has the same ones, the text's K/V are those of the prompt."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRONT_BYTES = 32
"""Length of a digest: two fronts with one digest cannot be found, not even by a client who makes both."""


class Fronts:
    """Digests of what a prompt begins with, asked for from short to long: O(tokens) in all."""

    def __init__(self, namespace_key: bytes, token_ids: NDArray[np.integer]) -> None:
        """Begin with nothing.

        Args:
            namespace_key: `Namespace.key` of the prompt; keys the digests.
            token_ids: int (num_tokens,).
        """
        self._tokens = token_ids
        self._digest = hashlib.blake2b(digest_size=FRONT_BYTES, key=namespace_key, person=b"kvgraft.front")
        self._stop = 0

    def up_to(self, stop: int) -> bytes:
        """Digest the tokens before `stop`, which is never less than before; empty if there are none."""
        self._digest.update(np.ascontiguousarray(self._tokens[self._stop : stop], "<i8").tobytes())
        self._stop = stop
        return self._digest.digest() if stop else b""


def front_digest(namespace_key: bytes, token_ids: NDArray[np.integer]) -> bytes:
    """Digest everything before a text, from position 0 on; see `Fronts`."""
    return Fronts(namespace_key, token_ids).up_to(len(token_ids))
