"""KV blocks in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.config import check_host_memory
from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError, StoreError
from kvgraft.memory.host_memory import HOST_MEMORY, page_locked_memory
from kvgraft.memory.packed import keeps_nothing_else, packed

if TYPE_CHECKING:
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.host_memory import HostMemory
    from kvgraft.memory.page_lock import PageLock

StoreKey = int | str | bytes
"""Names one block; a `DonorId` is one."""


class HostKVStore:
    """Blocks as CPU tensors under keys, within a budget of bytes, page-locked on demand. Not thread-safe.

    It evicts nothing by itself and replaces no block: what is worth keeping is decided elsewhere. Each rank of an engine has
    one of its own.

    Invariants (verified by `check`):
        - `used_bytes` is the sum over the blocks and at most `budget_bytes`.
        - Every block keeps exactly its bytes alive: no tensor is a view of more than is counted.
    """

    def __init__(self, budget_bytes: int, *, pages: PageLock | None = None) -> None:
        """Make an empty store.

        Args:
            budget_bytes: Upper bound of `used_bytes`, and of what is page-locked.
            pages: Locks the memory of blocks for asynchronous copies to a GPU; None leaves it to the system.

        Raises:
            ConfigError: The bound is negative, or more than the machine's memory.
        """
        if budget_bytes < 0:
            raise ConfigError(f"budget_bytes must not be negative, not {budget_bytes}")
        check_host_memory("host_bytes", budget_bytes)
        self._budget_bytes = budget_bytes
        self._memory = HOST_MEMORY if pages is None else page_locked_memory(budget_bytes, pages)
        self._blocks: dict[StoreKey, KVBlock] = {}
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._blocks

    @property
    def budget_bytes(self) -> int:
        """Upper bound of `used_bytes`."""
        return self._budget_bytes

    @property
    def memory(self) -> HostMemory:
        """Where blocks lie: one that does not, and should be page-locked, is copied there when it is put."""
        return self._memory

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks kept."""
        return self._used_bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether a block of `num_bytes` can be put without removing another."""
        return self._used_bytes + num_bytes <= self._budget_bytes

    def put(self, key: StoreKey, block: KVBlock) -> None:
        """Keep `block` under `key`; its tensors are the store's from now on, views are copied.

        Memory that should be page-locked and has no room left for a block in one piece keeps it unlocked.

        Raises:
            CapacityError: It does not fit; nothing has changed.
            ConfigError: A tensor is not in host memory.
            StoreError: There is a block under `key` already.
        """
        if key in self._blocks:
            raise StoreError(f"there is a block under {key!r} already: remove it first")
        if any(tensor.device.type != "cpu" for tensor in (*block.keys, *block.values)):
            raise ConfigError("a host store takes CPU tensors: export the block first")
        if not self.fits(block.num_bytes):
            raise CapacityError(f"{block.num_bytes} bytes do not fit in {self._budget_bytes - self._used_bytes}")
        self._blocks[key] = block if self.is_own(block) else packed([block], self._memory)
        self._used_bytes += block.num_bytes

    def get(self, key: StoreKey, start: int = 0, length: int | None = None) -> KVBlock:
        """View `length` tokens from `start` of a block, all from `start` on by default.

        The views stay good after `remove`, which then frees nothing until they are gone.

        Raises:
            ConfigError: The block has fewer tokens.
            StoreError: There is no block under `key`.
        """
        block = self._find(key)
        return block.span(start, block.num_tokens - start if length is None else length)

    def remove(self, key: StoreKey) -> None:
        """Forget a block.

        Raises:
            StoreError: There is no block under `key`.
        """
        self._used_bytes -= self._find(key).num_bytes
        del self._blocks[key]

    def rebuild(self) -> None:
        """Forget all blocks without a look at the count of their bytes, which may be wrong."""
        self._blocks.clear()
        self._used_bytes = 0

    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        used_bytes = sum(block.num_bytes for block in self._blocks.values())
        if used_bytes != self._used_bytes or used_bytes > self._budget_bytes:
            raise CorruptCacheError(
                f"{used_bytes} bytes kept, {self._used_bytes} counted, {self._budget_bytes} allowed"
            )
        for key, block in self._blocks.items():
            if not keeps_nothing_else(block):
                raise CorruptCacheError(f"the block under {key!r} keeps more memory alive than is counted")

    def is_own(self, block: KVBlock) -> bool:
        """Return whether `put` keeps a block as it is: in memory of its own, page-locked if that is wanted and has room."""
        if not keeps_nothing_else(block):
            return False
        if self._memory is HOST_MEMORY or all(map(self._memory.holds, (*block.keys, *block.values))):
            return True
        return not self._memory.has_room(block.num_bytes)

    def _find(self, key: StoreKey) -> KVBlock:
        try:
            return self._blocks[key]
        except KeyError:
            raise StoreError(f"there is no block under {key!r}") from None
