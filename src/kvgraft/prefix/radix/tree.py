"""The structure of a radix tree: finding, dividing, adding and removing nodes. Knows no locks, sizes or eviction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.radix.node import RadixNode, frozen_copy
from kvgraft.prefix.results import NO_SLOTS, PrefixHandle, SlotArray
from kvgraft.token_key import TOKEN_BYTES, common_prefix_len

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.token_key import RadixKey

Node = TypeVar("Node", bound=RadixNode)


class RadixTree(Generic[Node]):
    """Nodes below one root; namespaces part at the root's children.

    Invariants: a node holds whole pages; `children` keys are the first page of the child, so no two children share one.
    """

    def __init__(self, page_size: int, node_class: type[Node]) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.now = 0
        self._node_class = node_class
        self.root = self._new_root()

    def tick(self) -> int:
        """Advance the clock. A counter: times never tie and never run backwards."""
        self.now += 1
        return self.now

    def descend(self, key: RadixKey, node: Node, length: int) -> tuple[list[Node], Node | None, int]:
        """Follow `key` from the end of `node` to at most `length` elements, without changing anything.

        Returns:
            The nodes that lie within the key in full; the node that the key leaves in its middle, or None; and how
            many of that node's elements match, whole pages, at least one.

        Complexity: O(nodes on the path) plus O(matched) at the speed of `memcmp`.
        """
        path: list[Node] = []
        start = node.end
        if start >= length:
            return path, None, 0
        # In place of `slice_bytes` and `namespace`: calls less.
        view, shared_bytes = key.view, TOKEN_BYTES * key.is_bigram
        edge_bytes = TOKEN_BYTES * self.page_size + shared_bytes
        at = TOKEN_BYTES * start
        page = view[at : at + edge_bytes].tobytes()
        child = node.children.get(((key.extra_key, key.cache_salt, key.is_bigram), page) if node is self.root else page)
        while child is not None:
            stop = child.end
            after = TOKEN_BYTES * stop
            if stop > length or not child.tokens.startswith(view[at : after + shared_bytes]):
                return path, child, self._common(key, child, at // TOKEN_BYTES, min(length, stop))
            path.append(child)
            if stop == length:
                break
            at = after
            child = child.children.get(view[at : at + edge_bytes].tobytes())
        return path, None, 0

    def _common(self, key: RadixKey, child: Node, start: int, stop: int) -> int:
        """Whole-page elements that `child` shares with `key[start:stop]`; its first page is known to be equal."""
        ids = key.token_ids[start : stop + key.is_bigram]
        run = min(common_prefix_len(child.token_ids, ids) - key.is_bigram, stop - start)
        return run - run % self.page_size

    def divide(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` elements and return the upper part."""
        return node.divide(length, self.now, self.page_size)

    def add_leaf(
        self,
        parent: Node,
        key: RadixKey,
        kv_indices: SlotArray,
        start: int,
        stop: int,
        *,
        priority: int = 0,
        hit_count: int = 0,
    ) -> Node:
        """Hang elements `[start, stop)` of the key below `parent`, which ends at `start`."""
        tokens = key.own_bytes(start, stop)
        edge: Hashable = tokens[: (self.page_size + key.is_bigram) * TOKEN_BYTES]
        namespace = parent.namespace
        if namespace is None:
            namespace = key.namespace
            edge = (namespace, edge)
        leaf = self._node_class(
            parent.tree,
            parent,
            edge,
            tokens,
            frozen_copy(kv_indices[start:stop]),
            end=stop,
            now=self.now,
            priority=priority,
            namespace=namespace,
        )
        leaf.hit_count = hit_count
        parent.children[edge] = leaf
        return leaf

    def remove_leaf(self, leaf: Node) -> Node:
        """Take out a node without children; returns its parent."""
        parent = leaf.parent
        assert parent is not None, "the root is never removed"
        assert not leaf.children, "only leaves are removed"
        del parent.children[leaf.edge]
        leaf.detach()
        return parent

    def resolve(self, handle: PrefixHandle) -> Node:
        """Return the node of a handle. Complexity: O(1).

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another tree.
        """
        if not isinstance(handle, self._node_class) or handle.tree is not self.root.tree:
            raise CorruptCacheError("the handle is of a dropped prefix or of another cache: match again")
        return handle

    def resolve_prefix(self, key: RadixKey, handle: PrefixHandle) -> Node:
        """Return the node of a handle that stands for a beginning of `key`; its namespace and last page are verified.

        Raises:
            ConfigError: The key does not begin with the handle's prefix.
        """
        node = self.resolve(handle)
        if node is not self.root:
            last_page = key.slice_bytes(node.end - self.page_size, node.end)
            if node.end > len(key) or node.namespace != key.namespace or not node.tokens.endswith(last_page):
                raise ConfigError("`after` is not a beginning of the key: pass the handle of the key's own prefix")
        return node

    def clear(self) -> list[Node]:
        """Forget everything; returns the dropped nodes, still with their contents, for the caller to `detach`."""
        nodes = list(self.root.subtree())[1:]
        self.rebuild()
        return nodes

    def rebuild(self) -> None:
        """Forget everything without looking at it; handles become stale."""
        root = self._new_root()
        self.root.tree = None
        self.root = root

    def path_slots(self, node: Node, start: int = 0) -> SlotArray:
        """Slots of positions `[start, node.end)` on the path of `node`. Complexity: O(slots + nodes)."""
        parts: list[SlotArray] = []
        step: Node | None = node
        while step is not None and step.end > start:
            parts.append(step.kv_indices[max(start - step.start, 0) :])
            step = step.parent
        return np.concatenate(parts[::-1]) if parts else NO_SLOTS

    def _new_root(self) -> Node:
        """Make an empty root with an identity of its own: one lock keeps it from ever being a candidate."""
        root = self._node_class(object(), None, None, b"", NO_SLOTS, end=0, now=0)
        root.lock_ref = 1
        return root
