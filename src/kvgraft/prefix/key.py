"""The key of a prefix cache: token ids in a namespace, and how two runs of token ids are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.types import TokenArray

_FIRST_BLOCK = 1024
"""Tokens compared first: most mismatches are near, and one numpy call costs more than comparing a thousand ids."""
_BLOCK_GROWTH = 8


@dataclass(frozen=True, slots=True, eq=False)
class RadixKey:
    """Token ids to look up or to store, and the namespace they live in.

    Any 1-D integer array-like is taken and kept as int64; an int64 array is not copied, so the caller does not write
    to it while the key is in use. Caches copy what they store.

    Attributes:
        token_ids: int64 `(num_tokens,)`.
        extra_key: What must be equal besides the tokens, for example `Namespace.key`. Keys with different values never
            share anything; None is a namespace like any other.
    """

    token_ids: TokenArray
    extra_key: Hashable = None

    def __post_init__(self) -> None:
        token_ids = np.asarray(self.token_ids)
        if token_ids.ndim != 1 or (token_ids.dtype.kind not in "iu" and token_ids.size):
            raise ConfigError(f"token_ids must be 1-D integers, not {token_ids.ndim}-D {token_ids.dtype}")
        object.__setattr__(self, "token_ids", np.ascontiguousarray(token_ids, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.token_ids)

    def aligned_len(self, page_size: int) -> int:
        """Length in whole pages, counted in tokens."""
        return len(self.token_ids) // page_size * page_size


def common_prefix_len(left: TokenArray, right: TokenArray) -> int:
    """Count the leading tokens that are equal.

    Complexity: O(result), vectorised over blocks that grow geometrically, so that an early mismatch between long runs
    does not read them whole.
    """
    limit = min(len(left), len(right))
    start, block = 0, _FIRST_BLOCK
    while start < limit:
        end = min(start + block, limit)
        differs = left[start:end] != right[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, block = end, block * _BLOCK_GROWTH
    return limit
