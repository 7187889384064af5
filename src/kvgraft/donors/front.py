"""What stood in front of a text, as a digest: where a prompt has the same there, the text's K/V are those of the prompt."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRONT_BYTES = 32
"""Length of a digest: nobody finds two fronts with one digest, not even of their own making."""


def front_digest(namespace_key: bytes, token_ids: NDArray[np.integer]) -> bytes:
    """Digest everything in front of a text, from position 0 on; empty if there is nothing. Complexity: O(tokens).

    Args:
        namespace_key: `Namespace.key` of the text; keys the digest.
        token_ids: int (num_tokens,).
    """
    if not len(token_ids):
        return b""
    raw = np.ascontiguousarray(token_ids, "<i8").tobytes()
    return hashlib.blake2b(raw, digest_size=FRONT_BYTES, key=namespace_key, person=b"kvgraft.front").digest()
