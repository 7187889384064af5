"""The exact prefix cache: a radix tree from token prefixes to KV slots, in which a match costs its own length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.base import EvictResult, InsertResult, MatchResult, PrefixCache, PrefixHandle, SlotArray
from kvgraft.prefix.eviction import EvictionPolicy, EvictionQueue, least_recently_used
from kvgraft.prefix.invariants import check_tree
from kvgraft.prefix.key import RadixKey, common_prefix_len
from kvgraft.prefix.node import EMPTY, RadixNode, frozen_copy

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.types import TokenArray


class RadixCache(PrefixCache):
    """A radix tree; namespaces part at the root's children.

    Invariants (verified by `check`):
        - A node holds whole pages and one slot per token; no slot is stored twice.
        - `children` keys are the first page of the child, so no two children share a first page.
        - `lock_ref` is the node's `handle_locks` plus the `lock_ref` of its children; the root counts as locked.
        - A parent was accessed no earlier than its children.
        - The eviction queue holds the unlocked leaves and nothing else.
        - `evictable_size` and `protected_size` are the tokens of nodes with `lock_ref == 0` and `> 0`.

    A split makes a new node of the upper part; the lower part stays the same node, so handles and locks keep meaning
    the same prefix.
    """

    def __init__(self, page_size: int = 1, *, policy: EvictionPolicy = least_recently_used) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {page_size}")
        self._page_size = page_size
        self._clock = 0
        self._evictable_size = 0
        self._protected_size = 0
        self._queue = EvictionQueue(policy)
        self._root = _new_root()

    @property
    def page_size(self) -> int:
        """Tokens per page; nothing is matched or stored in smaller pieces."""
        return self._page_size

    @property
    def evictable_size(self) -> int:
        """Stored tokens that no lock protects."""
        return self._evictable_size

    @property
    def protected_size(self) -> int:
        """Stored tokens under at least one lock."""
        return self._protected_size

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Find the longest stored prefix of `key` in whole pages and mark it as used now.

        Splits the node in which the match ends, so that the handle covers exactly what was matched.

        Complexity: O(matched tokens), vectorised, plus O(nodes on the path).
        """
        node, prefix_len = self._walk(key, key.aligned_len(self._page_size))
        return MatchResult(_path_indices(node), prefix_len, node)

    def insert(self, key: RadixKey, kv_indices: SlotArray) -> InsertResult:
        """Store `key` in whole pages; the part that is not stored yet takes its slots from `kv_indices`.

        Complexity: O(tokens of `key`), vectorised, plus O(nodes on the path).

        Raises:
            ConfigError: `kv_indices` are not integers, one per token.
        """
        kv_indices = _as_slots(kv_indices, len(key))
        total_len = key.aligned_len(self._page_size)
        node, prefix_len = self._walk(key, total_len)
        if prefix_len < total_len:
            edge = self._edge(node, key.token_ids, prefix_len, key.extra_key)
            node = self._add_leaf(node, edge, key.token_ids[prefix_len:total_len], kv_indices[prefix_len:total_len])
        return InsertResult(prefix_len, total_len, node)

    def evict(self, num_tokens: int) -> EvictResult:
        """Drop unlocked leaves in the order of the policy until `num_tokens` are freed or nothing unlocked is left.

        A parent that loses its last child becomes a leaf and competes at once. May free more: nodes go whole.

        Complexity: O(log n) per dropped node plus O(tokens freed).
        """
        dropped: list[SlotArray] = []
        num_freed = 0
        while num_freed < num_tokens and self._queue:
            leaf = self._queue.pop()
            num_freed += len(leaf)
            dropped.append(leaf.kv_indices)
            self._drop_leaf(leaf)
        self._evictable_size -= num_freed
        return EvictResult(np.concatenate(dropped) if dropped else np.empty(0, dtype=np.int64))

    def inc_lock_ref(self, handle: PrefixHandle) -> None:
        """Keep the prefix of `handle` from eviction until as many `dec_lock_ref` follow.

        Complexity: O(nodes on the path) plus O(log n) for a leaf.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache.
        """
        path = self._path(handle)
        for node in path:
            node.lock_ref += 1
            if node.lock_ref == 1:
                self._evictable_size -= len(node)
                self._protected_size += len(node)
        if path:
            path[0].handle_locks += 1
            if path[0].is_queued:
                self._queue.remove(path[0])

    def dec_lock_ref(self, handle: PrefixHandle) -> None:
        """Give back one lock of `handle`. Does not count as an access.

        Complexity: O(nodes on the path) plus O(log n) for a leaf.

        Raises:
            CorruptCacheError: The handle holds no lock here. Nothing has changed then.
        """
        path = self._path(handle)
        if path and not path[0].handle_locks:
            raise CorruptCacheError("dec_lock_ref without inc_lock_ref on the same handle")
        for node in path:
            node.lock_ref -= 1
            if not node.lock_ref:
                self._evictable_size += len(node)
                self._protected_size -= len(node)
        if path:
            path[0].handle_locks -= 1
            self._queue_if_candidate(path[0])

    def reset(self) -> SlotArray:
        """Forget everything, locked or not, and return every slot for the caller to free. Handles become stale.

        Complexity: O(stored tokens).
        """
        nodes = list(self._root.subtree())
        freed = np.concatenate([node.kv_indices for node in nodes])
        self._queue.clear()
        for node in nodes:
            _detach(node)
        self._root = _new_root()
        self._evictable_size = self._protected_size = 0
        return freed

    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Complexity: O(stored tokens * log).

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        self._queue.check()
        sizes = check_tree(self._root, self._page_size, set(self._queue))
        if sizes != (self._evictable_size, self._protected_size):
            counted = (self._evictable_size, self._protected_size)
            raise CorruptCacheError(f"evictable and protected tokens are {sizes}, counted as {counted}")

    def _walk(self, key: RadixKey, length: int) -> tuple[RadixNode, int]:
        """Follow the first `length` tokens of `key` as far as they are stored; whole pages.

        Marks the path as accessed and splits the node in which the walk ends. Returns the last node and the tokens
        matched. A walk that ends inside a node needs no case of its own: no child continues it.
        """
        self._clock += 1
        node, matched = self._root, 0
        node.last_access = self._clock
        while matched < length:
            child = node.children.get(self._edge(node, key.token_ids, matched, key.extra_key))
            if child is None:
                break
            run = common_prefix_len(child.token_ids, key.token_ids[matched:length])
            run -= run % self._page_size
            node = child if run == len(child) else self._split(child, run)
            node.last_access = self._clock
            matched += run
        if node.is_queued:
            self._queue.update(node)
        return node, matched

    def _edge(self, parent: RadixNode, token_ids: TokenArray, start: int, extra_key: Hashable) -> Hashable:
        """Key of the child of `parent` that begins with the page at `start`."""
        page = token_ids[start : start + self._page_size].tobytes()
        return (extra_key, page) if parent is self._root else page

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Cut `node` after `length` tokens, whole pages; return the new upper node.

        Both halves are copies: a view would keep the other half alive after its eviction.
        """
        parent = node.parent
        assert parent is not None, "the root holds no tokens and is never split"
        upper = RadixNode(
            parent, node.edge, frozen_copy(node.token_ids[:length]), frozen_copy(node.kv_indices[:length]), self._clock
        )
        upper.lock_ref = node.lock_ref
        parent.children[node.edge] = upper
        node.token_ids = frozen_copy(node.token_ids[length:])
        node.kv_indices = frozen_copy(node.kv_indices[length:])
        node.parent = upper
        node.edge = node.token_ids[: self._page_size].tobytes()
        upper.children[node.edge] = node
        return upper

    def _add_leaf(self, parent: RadixNode, edge: Hashable, token_ids: TokenArray, kv_indices: SlotArray) -> RadixNode:
        """Hang copies of the given tokens and slots below `parent`."""
        if parent.is_queued:
            self._queue.remove(parent)
        leaf = RadixNode(parent, edge, frozen_copy(token_ids), frozen_copy(kv_indices), self._clock)
        parent.children[edge] = leaf
        self._evictable_size += len(leaf)
        self._queue.add(leaf)
        return leaf

    def _drop_leaf(self, leaf: RadixNode) -> None:
        """Take an unqueued leaf out of the tree; its parent may become a candidate."""
        parent = leaf.parent
        assert parent is not None, "the root is never queued"
        del parent.children[leaf.edge]
        _detach(leaf)
        self._queue_if_candidate(parent)

    def _queue_if_candidate(self, node: RadixNode) -> None:
        if not node.children and not node.lock_ref:
            self._queue.add(node)

    def _path(self, handle: PrefixHandle) -> list[RadixNode]:
        """Nodes from `handle` up to the root, without the root."""
        path = list(handle.up_to_root()) if isinstance(handle, RadixNode) else []
        if not path or path.pop() is not self._root:
            raise CorruptCacheError("the handle is of a dropped prefix or of another cache: match again")
        return path


def _new_root() -> RadixNode:
    """Make an empty root: one lock keeps it from ever being a candidate."""
    root = RadixNode(None, None, EMPTY, EMPTY, 0)
    root.lock_ref = 1
    return root


def _detach(node: RadixNode) -> None:
    """Let a dropped node hold nothing, however long somebody keeps its handle."""
    node.parent = None
    node.children.clear()
    node.token_ids = node.kv_indices = EMPTY


def _path_indices(node: RadixNode) -> SlotArray:
    """Slots of the prefix that ends with `node`; read-only, and without a copy where one node holds it all."""
    parts = [step.kv_indices for step in node.up_to_root()]
    if len(parts) <= 2:
        return parts[0]
    kv_indices = np.concatenate(parts[-2::-1])
    kv_indices.flags.writeable = False
    return kv_indices


def _as_slots(kv_indices: SlotArray, num_tokens: int) -> SlotArray:
    slots = np.asarray(kv_indices)
    if slots.shape != (num_tokens,) or (slots.dtype.kind not in "iu" and num_tokens):
        raise ConfigError(f"kv_indices must be {num_tokens} integers, one per token, not {slots.dtype} {slots.shape}")
    return slots
