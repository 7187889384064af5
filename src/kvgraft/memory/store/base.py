"""What every KV store offers. A store keeps blocks; which of them are worth keeping is decided elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.memory.block import KVBlock

StoreKey = int | str | bytes
"""Names one block; a `DonorId` is one."""


class KVStore(ABC):
    """Keeps KV blocks under keys, within a budget of bytes. Evicts nothing by itself. Blocks are never replaced.

    A store belongs to one process and begins empty: each rank of an engine makes its own, and their keys are the same.
    """

    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """Upper bound of `used_bytes`; 0 keeps nothing."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of the blocks kept, each counted as its `num_bytes`."""

    @abstractmethod
    def fits(self, num_bytes: int) -> bool:
        """Whether a block of `num_bytes` can be put without removing another."""

    @abstractmethod
    def put(self, key: StoreKey, block: KVBlock) -> None:
        """Keep `block`, of CPU tensors, under `key`; the tensors are the store's from now on.

        Raises:
            CapacityError: It does not fit; nothing has changed.
            StoreError: There is a block under `key` already.
        """

    @abstractmethod
    def get(self, key: StoreKey, start: int = 0, length: int | None = None) -> KVBlock:
        """Read `length` tokens from `start` of a block, all behind `start` by default.

        Returns:
            CPU tensors with what was put, bit for bit. Not to be written to; they stay good after `remove`.

        Raises:
            ConfigError: The block has fewer tokens.
            StoreError: There is no block under `key`.
        """

    @abstractmethod
    def remove(self, key: StoreKey) -> None:
        """Forget a block.

        Raises:
            StoreError: There is no block under `key`.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: StoreKey) -> bool: ...

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
