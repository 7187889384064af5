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
    PrefixHandle,
    SlotArray,
    join_results,
    join_slots,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix.ssm.state import State


class BaseLoadBackCache(BaseTieredCache):
    """Base of caches with evicted prefixes that live on in host memory and can be brought back."""

    def load_back(self, match: MatchResult) -> LoadBackResult:
        """Bring the host part of a match to the device, with its state; if either fails the device part is all there is.

        The caller makes room on the device beforehand or inside `TierTransfer.load`.
        """
        ticket = self.begin_load_back(match)
        states = NO_SLOTS if self._host_states is None else self._host_states.load(ticket.host_states)
        slots = None if states is None else self._host.load(ticket.host_indices)
        if states is None or slots is None:
            loaded = EvictResult(NO_SLOTS, state_freed=NO_SLOTS if states is None else states)
            result = join_results(loaded, self.abort_load_back(ticket))
            return LoadBackResult(match.handle, match.prefix_len, result.freed, result.state_freed)
        return self.commit_load_back(ticket, slots, states)

    def begin_load_back(self, match: MatchResult) -> LoadBack:
        """Keep both parts of a match from eviction while the owner copies what the ticket names to the device.

        Raises:
            CorruptCacheError: The match is stale.
        """
        last, begin = self._tree.resolve(match.host_handle), self._tree.resolve(match.handle)
        anchor = last
        while anchor.parent is not None and not anchor.on_device:
            anchor = anchor.parent
        locks = (self.lock_inserted(begin), self._lock_anchor(anchor, last))
        host_states = NO_SLOTS
        if self._host_states is not None and last.component is None and last.host_component is not None:
            host_states = self._host_states.pin([last.host_component])
        host_indices = self._host.pin(self._host_part(last, anchor.end))
        return LoadBack(host_indices, anchor.end, last, locks, host_states)

    def _lock_anchor(self, anchor: Node, last: Node) -> PrefixHandle:
        """Lock the tokens on the device from which a load-back to `last` begins."""
        return self.lock_inserted(anchor)

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
        state = ticket.node.host_component
        if len(states) and state is not None and not state.on_device:
            self._revive_state(state, int(states[0]))
            states = NO_SLOTS
        unused = EvictResult(join_slots(freed), state_freed=states)
        result = join_results(unused, self._close(ticket, nodes))
        return LoadBackResult(ticket.node, ticket.node.end, result.freed, result.state_freed)

    def _revive_state(self, state: State, slot: int) -> None:
        """Give a state that lies on the host only a slot on the device again."""
        raise NotImplementedError

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

    def _close(self, ticket: LoadBack, nodes: Sequence[Node]) -> EvictResult:
        ticket.done = True
        for node in nodes:
            node.host_locks -= 1
            self._queue_if_candidate(node)
        state = ticket.node.host_component
        if len(ticket.host_states) and state is not None and self._host_states is not None:
            self._host_states.unpin(state)
        return join_results(*(self.dec_lock_ref(lock) for lock in ticket.locks))
