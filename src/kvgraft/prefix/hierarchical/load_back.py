"""Load-backs of a tree of two tiers: begun, then committed or aborted, while other requests use the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.hierarchical.base import BaseTieredCache, Node
from kvgraft.prefix.hierarchical.transfer import LoadBack, LoadBackResult
from kvgraft.prefix.results import (
    NO_SLOTS,
    NOTHING_FREED,
    EvictResult,
    MatchResult,
    SlotArray,
    join_results,
    join_slots,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix.hierarchical.transfer import TierTransfer


class BaseLoadBackCache(BaseTieredCache[Node]):
    """Base of caches with evicted prefixes that live on in host memory and can be brought back."""

    def load_back(self, match: MatchResult) -> LoadBackResult:
        """Bring the host part of a match to the device; if that fails the device part is all there is.

        The caller makes room on the device beforehand or inside `TierTransfer.load`.
        """
        ticket = self.begin_load_back(match)
        device_slots = self._loaded(self._transfer, ticket.host_indices)
        if device_slots is None:
            freed = self.abort_load_back(ticket)
            return LoadBackResult(match.handle, match.prefix_len, freed.freed)
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
        return LoadBack(self._pin(nodes), match.prefix_len, last, (lock,))

    def commit_load_back(self, ticket: LoadBack, kv_indices: SlotArray, states: SlotArray = NO_SLOTS) -> LoadBackResult:
        """Take over device slots, one per host slot of the ticket; returns those that were not needed.

        Raises:
            ConfigError: There is not one slot per token, or per state. The load-back stays open.
            CorruptCacheError: The cache was reset, or the load-back is done; the caller keeps the slots.
        """
        nodes = self._open_nodes(ticket)
        for given, asked in ((kv_indices, ticket.host_indices), (states, ticket.host_states)):
            if len(given) != len(asked):
                raise ConfigError(f"{len(given)} device slots for {len(asked)} host slots; one for each")
        freed: list[SlotArray] = []
        for node in nodes:
            slots = kv_indices[node.start - ticket.start : node.end - ticket.start]
            if node.on_device:
                freed.append(slots)
            else:
                self._revive(node, slots)
        unused = EvictResult(join_slots(freed), state_freed=self._restore_state(ticket, states))
        result = join_results(unused, self._close(ticket, nodes))
        return LoadBackResult(ticket.node, ticket.node.end, result.freed, result.state_freed)

    def abort_load_back(self, ticket: LoadBack) -> EvictResult:
        """Give up a load-back; the copies stay on the host. Nothing happens if the cache was reset since.

        Returns what `dec_lock_ref` does.

        Raises:
            CorruptCacheError: The load-back is done.
        """
        if ticket.node.tree is not self._tree.root.tree and not ticket.done:
            ticket.done = True
            return NOTHING_FREED
        return self._close(ticket, self._open_nodes(ticket))

    def _loaded(self, transfer: TierTransfer, host_slots: SlotArray) -> SlotArray | None:
        """Copy host slots to the device; None if there is no room or it fails."""
        if not len(host_slots):
            return NO_SLOTS
        told = f"load-back of {len(host_slots)} host slots failed; they are computed instead"
        return self._transferred(transfer.load, host_slots, told)

    def _restore_state(self, ticket: LoadBack, states: SlotArray) -> SlotArray:
        """Give the state at the end of a load-back its device slot; returns what is not needed."""
        return states

    def _open_nodes(self, ticket: LoadBack) -> list[Node]:
        if ticket.done:
            raise CorruptCacheError("this load-back was committed or aborted before")
        return self._host_part(self._tree.resolve(ticket.node), ticket.start)

    def _host_part(self, last: Node, start: int) -> list[Node]:
        """Nodes of `[start, last.end)`, top down; positions stay true through splits."""
        nodes: list[Node] = []
        step = last
        while step.parent is not None and step.start >= start:
            nodes.append(step)
            step = step.parent
        return nodes[::-1]

    def _pin(self, nodes: Sequence[Node]) -> SlotArray:
        """Keep copies from eviction; returns their host slots."""
        for node in nodes:
            node.host_locks += 1
            if node.queue_index >= 0 and not node.on_device:
                self._host_queue.remove(node)
        return join_slots([node.host_indices for node in nodes])

    def _close(self, ticket: LoadBack, nodes: Sequence[Node]) -> EvictResult:
        ticket.done = True
        for node in nodes:
            node.host_locks -= 1
            self._queue_if_candidate(node)
        return join_results(*(self.dec_lock_ref(lock) for lock in ticket.locks))
