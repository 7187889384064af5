"""Layers that have slots of their own, as the K/V space sees them: what they hold, and what the prefix cache has of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix import EvictResult

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.engine.kv.layer_rows import LayerRow
    from kvgraft.memory import SlotUsage
    from kvgraft.prefix import InsertResult, PrefixCache
    from kvgraft.token_key import RadixKey


class LayerBooks:
    """Who holds slots that are not of tokens; here there are none. `LayerSlots` adds what requests do with them.

    Attributes:
        keeps_tails: Sessions keep tokens that fill no page of the prefix cache.
        limit_bytes: Of all slots.
        host_keys: Names of what lies in the host store for donors to come.
    """

    keeps_tails: bool = True
    limit_bytes: int = 0
    host_keys: AbstractSet[str] = frozenset()

    def __init__(self, prefix: PrefixCache) -> None:
        self._prefix = prefix

    def cut(self, key: RadixKey) -> None:
        """Prepare the prefix cache for a match of `key`; nothing is marked as used."""

    def insert(
        self,
        key: RadixKey,
        slots: NDArray[np.int64],
        row: LayerRow | None,
        *,
        priority: int,
        counted_len: int,
    ) -> InsertResult:
        """Store the K/V of `key` with what the request holds of these layers; see `KVSpace.store_prefix`."""
        return self._prefix.insert(key, slots, priority=priority, counted_len=counted_len)

    def forget_all(self) -> EvictResult:
        """Have the prefix cache forget everything; the caller releases it."""
        return EvictResult(self._prefix.reset())

    def release_forgotten(self, result: EvictResult) -> None:
        """Take back slots that the prefix cache has forgotten, but those of tokens."""

    @property
    def held_bytes(self) -> int:
        """Bytes of slots that requests or the prefix cache hold."""
        return 0

    @property
    def prefix_host_bytes(self) -> int:
        """Bytes of what exact prefixes have of these layers in host memory."""
        return 0

    def window_usage(self) -> SlotUsage | None:
        """Slots of window layers by holder, where these have slots of their own."""
        return None

    def state_usage(self) -> SlotUsage | None:
        """States by holder, where layers keep states."""
        return None

    def rebuild(self) -> None:
        """Begin anew with all slots free; requests hold nothing any more."""

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
