"""Prefix cache over two tiers: device slots, and copies in host memory that outlive them.

    device, no copy  --backup-->  device + host  --evict-->  host only  --load back-->  device + host
                     --evict (no room on the host)-->  gone              --evict host-->  gone

A matched prefix is a device part followed by a host part. The cache moves nothing itself: the owner of the pools does,
through `TierTransfer`, and a transfer that fails leaves the tree as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.prefix.component.node import ComponentNode
from kvgraft.prefix.hierarchical.load_back import BaseLoadBackCache
from kvgraft.prefix.radix.cache import SemanticRadixCache
from kvgraft.prefix.results import MatchResult, PrefixHandle, SlotArray, StoredLength

if TYPE_CHECKING:
    from kvgraft.token_key import RadixKey

    Node = ComponentNode[Any]


class TieredMatchResult(MatchResult):
    """A match of a device part and, after it, a host part."""

    __slots__ = ("_host_handle", "host_hit_len")

    def __init__(self, parts: list[SlotArray], device: Node, host: Node) -> None:
        super().__init__(parts, device.end, device)
        self._host_handle = host
        self.host_hit_len = host.end - device.end

    @property
    def host_handle(self) -> PrefixHandle:
        """End of the host part."""
        return self._host_handle


class HierarchicalRadixCache(BaseLoadBackCache, SemanticRadixCache[ComponentNode[Any]]):
    """A radix cache with evicted prefixes that live on in host memory and can be brought back. Not thread-safe.

    An insert over what lies on the host only gives it device slots again; after a handle of such a prefix it is refused.
    """

    def _match_prefix_exact(self, key: RadixKey) -> MatchResult:
        """Match the device part and say how much further the host reaches."""
        root = self._tree.root
        if self._disabled:
            return MatchResult([], 0, root)
        path, last = self._walk(key, root, key.aligned_len(self._page_size))
        device = [node for node in path if node.on_device]
        return TieredMatchResult([node.kv_indices for node in device], device[-1] if device else root, last)

    def _stored_in(self, path: list[Node], stop: int) -> StoredLength:
        on_device = max((node.end for node in path if node.on_device), default=0)
        return StoredLength(min(on_device, stop), max(0, stop - on_device))

    def _insert(
        self, key: RadixKey, slots: SlotArray, start: Node, total_len: int, *, priority: int, counted_len: int | None
    ) -> tuple[int, Node]:
        prefix_len, node = super()._insert(key, slots, start, total_len, priority=priority, counted_len=counted_len)
        self._write_through(node)
        return prefix_len, node
