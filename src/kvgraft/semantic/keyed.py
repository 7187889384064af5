"""Helpers of sketches: a key of this process, and mixing the bits of hashes."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HALF = np.uint64(32)
_PROCESS_KEY = os.urandom(32)


def keyed_words(key: bytes | None, person: bytes) -> NDArray[np.uint64]:
    """Derive four words from a key of at most 64 bytes, by default this process's, and what they are for."""
    digest = hashlib.blake2b(digest_size=32, key=_PROCESS_KEY if key is None else key, person=person)
    return np.frombuffer(digest.digest(), np.uint64)


def mixed(hashes: NDArray[np.uint64], odd: np.uint64) -> NDArray[np.uint64]:
    """Mix all bits in place, with an odd factor."""
    hashes ^= hashes >> _HALF
    hashes *= odd
    hashes ^= hashes >> _HALF
    return hashes
