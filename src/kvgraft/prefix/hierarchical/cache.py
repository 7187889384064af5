"""Prefix cache over two tiers: device slots, and copies in host memory that outlive them.

    device, no copy  --backup-->  device + host  --evict-->  host only  --load back-->  device + host
                     --evict (no room on the host)-->  gone              --evict host-->  gone

A matched prefix is a device part followed by a host part. The cache moves nothing itself: the owner of the pools does,
through `TierTransfer`, and a transfer that fails leaves the tree as it was.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.hierarchical.base import BaseTieredCache
from kvgraft.prefix.hierarchical.transfer import LoadBack, LoadBackResult
from kvgraft.prefix.results import NO_SLOTS, MatchResult, SlotArray, join_slots

if TYPE_CHECKING:
    from kvgraft.prefix.hierarchical.node import HierNode

logger = logging.getLogger(__name__)


class HierarchicalRadixCache(BaseTieredCache):
    """A radix cache with evicted prefixes that live on in host memory and can be brought back. Not thread-safe."""

    def load_back(self, match: MatchResult) -> LoadBackResult:
        """Bring the host part of a match to the device; if that fails the device part is all there is.

        The caller makes room on the device beforehand or inside `TierTransfer.load`.
        """
        ticket = self.begin_load_back(match)
        try:
            device_slots = self._transfer.load(ticket.host_indices) if len(ticket.host_indices) else NO_SLOTS
        except Exception:
            self.num_failed_transfers += 1
            logger.exception("load-back of %d tokens failed; they are computed instead", len(ticket.host_indices))
            device_slots = None
        if device_slots is None:
            self.abort_load_back(ticket)
            return LoadBackResult(match.handle, match.prefix_len)
        return self.commit_load_back(ticket, device_slots)

    def begin_load_back(self, match: MatchResult) -> LoadBack:
        """Keep both parts of a match from eviction while the owner copies `host_indices` to the device.

        Raises:
            CorruptCacheError: The match is stale.
        """
        last = self._tree.resolve(match.host_handle)
        nodes = self._host_part(last, match.prefix_len)
        if any(not node.on_host for node in nodes):
            raise CorruptCacheError("the host part of this match is gone: match again")
        lock = self.inc_lock_ref(match.handle)
        for node in nodes:
            node.host_locks += 1
            if node.queue_index >= 0 and not node.on_device:
                self._host_queue.remove(node)
        return LoadBack(join_slots([node.host_indices for node in nodes]), match.prefix_len, last, lock)

    def commit_load_back(self, ticket: LoadBack, kv_indices: SlotArray) -> LoadBackResult:
        """Take over device slots, one per host slot of the ticket; returns those that were not needed.

        Raises:
            ConfigError: There is not one slot per token. The load-back stays open.
            CorruptCacheError: The cache was reset, or the load-back is done; the caller keeps the slots.
        """
        nodes = self._open_nodes(ticket)
        if len(kv_indices) != len(ticket.host_indices):
            raise ConfigError(f"{len(kv_indices)} device slots for {len(ticket.host_indices)} host slots; one for each")
        freed: list[SlotArray] = []
        for node in nodes:
            slots = kv_indices[node.start - ticket.start : node.end - ticket.start]
            if node.on_device:
                freed.append(slots)
            else:
                self._revive(node, slots)
        self._close(ticket, nodes)
        return LoadBackResult(ticket.node, ticket.node.end, join_slots(freed))

    def abort_load_back(self, ticket: LoadBack) -> None:
        """Give up a load-back; the copies stay on the host. Nothing happens if the cache was reset since.

        Raises:
            CorruptCacheError: The load-back is done.
        """
        if ticket.node.tree is not self._tree.root.tree and not ticket.done:
            ticket.done = True
            return
        self._close(ticket, self._open_nodes(ticket))

    def _open_nodes(self, ticket: LoadBack) -> list[HierNode]:
        if ticket.done:
            raise CorruptCacheError("this load-back was committed or aborted before")
        return self._host_part(self._tree.resolve(ticket.node), ticket.start)

    def _host_part(self, last: HierNode, start: int) -> list[HierNode]:
        """Nodes of `[start, last.end)`, top down; positions stay true through splits."""
        nodes: list[HierNode] = []
        step = last
        while step.parent is not None and step.start >= start:
            nodes.append(step)
            step = step.parent
        return nodes[::-1]

    def _close(self, ticket: LoadBack, nodes: list[HierNode]) -> None:
        ticket.done = True
        for node in nodes:
            node.host_locks -= 1
            self._queue_if_candidate(node)
        self.dec_lock_ref(ticket.lock)
