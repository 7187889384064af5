"""The key of a prefix cache: token ids in a namespace, and how two runs of token ids are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.types import TokenArray

KeyNamespace = tuple["Hashable", "Hashable", bool]
"""Namespace, equal besides the tokens: `extra_key`, `cache_salt`, `is_bigram`."""

TOKEN_BYTES = 8
"""Bytes of one token id (int64)."""

_INT64 = np.dtype(np.int64)
_NO_BYTES = memoryview(b"")

_FIRST_BLOCK = 1024
"""Tokens compared first: most mismatches are near, and one numpy call costs more than comparing a thousand ids."""
_BLOCK_GROWTH = 8


class UnannouncedKey(bytes):
    """An `extra_key` of whose pages no event speaks, such as that of K/V that are approximate."""


@dataclass(slots=True, eq=False)
class RadixKey:
    """Token ids to look up or to store, and the namespace they live in. A key is never changed once it is made.

    Any 1-D integer array-like is taken and kept as int64; an int64 array is not copied, so the caller does not write
    to it while the key is in use. Caches copy what they store, except for token ids that are read-only for good: those of
    `frozen_tokens` are shared where a cache stores all of them.

    (Not a frozen dataclass: those set their fields one by one through `object.__setattr__`, a fifth of what a miss costs.)

    A bigram view (speculative decoding with EAGLE) has one element per pair of neighbouring tokens, so `len` is one
    less, and neighbouring slices share a token.
    """

    token_ids: TokenArray
    extra_key: Hashable = None
    """What must be equal besides the tokens, for example `Namespace.key` or a LoRA name. Keys with different values never
    share anything; None is a namespace like any other."""
    cache_salt: Hashable = None
    """A second part of the namespace, for a tenant."""
    is_bigram: bool = False
    """Whether elements are pairs of tokens. Views of both kinds never share anything."""
    limit: int | None = None
    """Only the first `limit` token ids count; nothing is copied."""
    view: memoryview = field(init=False, repr=False)
    """The raw bytes of `token_ids`, without a copy."""

    def __post_init__(self) -> None:
        token_ids = self.token_ids
        if type(token_ids) is not np.ndarray or token_ids.dtype is not _INT64 or token_ids.strides != (TOKEN_BYTES,):
            token_ids = self.token_ids = _as_token_ids(token_ids)
        if self.limit is not None:
            if self.limit < 0:
                raise ConfigError(f"limit must be at least 0 or None, not {self.limit}")
            token_ids = self.token_ids = token_ids[: self.limit]
        self.view = token_ids.data.cast("B") if token_ids.size else _NO_BYTES

    def __len__(self) -> int:
        return max(len(self.token_ids) - self.is_bigram, 0)

    @property
    def namespace(self) -> KeyNamespace:
        """Namespace: equal besides the tokens."""
        return self.extra_key, self.cache_salt, self.is_bigram

    def aligned_len(self, page_size: int) -> int:
        """Length in whole pages, counted in elements."""
        length = len(self.token_ids) - self.is_bigram
        return length - length % page_size if length > 0 else 0

    def slice_bytes(self, start: int, stop: int) -> memoryview:
        """Raw bytes of elements `[start, stop)`, without a copy; of a bigram view one token more."""
        return self.view[start * TOKEN_BYTES : (stop + self.is_bigram) * TOKEN_BYTES]

    def own_bytes(self, start: int, stop: int) -> bytes:
        """The same bytes for keeps: a copy, unless they are all of a read-only object."""
        asked = self.view[start * TOKEN_BYTES : (stop + self.is_bigram) * TOKEN_BYTES]
        owner: object = self.token_ids.base
        if isinstance(owner, np.ndarray):  # a view of a view: numpy stops at the array that stands on the bytes
            owner = owner.base
        return owner if type(owner) is bytes and len(owner) == len(asked) else asked.tobytes()

    def match(self, other: RadixKey, page_size: int = 1) -> int:
        """Count leading elements that both keys share, in whole pages.

        Raises:
            ConfigError: The namespaces differ.
        """
        if self.namespace != other.namespace:
            raise ConfigError("keys of different extra_key, cache_salt or mode cannot be compared")
        run = common_prefix_len(self.token_ids, other.token_ids) - self.is_bigram
        return max(run, 0) // page_size * page_size


def frozen_tokens(token_ids: object) -> TokenArray:
    """Copy 1-D integers into a read-only int64 array with memory that is read-only for good.

    A cache that stores all of them shares that memory instead of copying it.

    Raises:
        ConfigError: They are not 1-D integers.
    """
    return np.frombuffer(_as_token_ids(token_ids).tobytes(), dtype=np.int64)


def _as_token_ids(token_ids: object) -> TokenArray:
    """Return 1-D integers as a contiguous int64 array; raises `ConfigError` for anything else."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ConfigError(f"token_ids must be 1-D integers, not {array.ndim}-D {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)


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
