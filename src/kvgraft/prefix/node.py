"""A node of a radix tree: a run of tokens, the slots of their KV, and its place in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix.base import PrefixHandle, SlotArray

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from kvgraft.types import TokenArray

NOT_QUEUED = -1
"""`queue_index` of a node that waits in no eviction queue."""


class RadixNode(PrefixHandle):
    """Tokens between two branching points. Behaviour is the tree's; the node only holds state.

    Attributes:
        parent: None for a root and for a node that was dropped.
        edge: Key under which `parent.children` holds this node.
        token_ids: Read-only int64 `(num_tokens,)`, owned: never a view that would keep a longer array alive.
        kv_indices: Read-only int64 `(num_tokens,)`, owned.
        children: By the first page of their tokens (below the root with the namespace in front).
        lock_ref: Locks on this node or below it.
        handle_locks: Those of them that were taken through this very node.
        last_access: Time of the last match or insert through this node, in ticks of the tree's clock.
        queue_index: Place in the eviction queue, or `NOT_QUEUED`.
    """

    __slots__ = (
        "children",
        "edge",
        "handle_locks",
        "kv_indices",
        "last_access",
        "lock_ref",
        "parent",
        "queue_index",
        "token_ids",
    )

    def __init__(
        self, parent: RadixNode | None, edge: Hashable, token_ids: TokenArray, kv_indices: SlotArray, last_access: int
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.token_ids = token_ids
        self.kv_indices = kv_indices
        self.children: dict[Hashable, RadixNode] = {}
        self.lock_ref = 0
        self.handle_locks = 0
        self.last_access = last_access
        self.queue_index = NOT_QUEUED

    def __len__(self) -> int:
        return len(self.token_ids)

    def __bool__(self) -> bool:
        return True

    @property
    def is_queued(self) -> bool:
        """Whether the node waits in an eviction queue."""
        return self.queue_index != NOT_QUEUED

    def up_to_root(self) -> Iterator[RadixNode]:
        """Yield this node and its ancestors; the last one has no parent."""
        node: RadixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[RadixNode]:
        """Yield this node and everything below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def frozen_copy(array: TokenArray) -> TokenArray:
    """Copy into a read-only int64 array of its own."""
    copy = np.array(array, dtype=np.int64)
    copy.flags.writeable = False
    return copy


EMPTY = frozen_copy(np.empty(0, dtype=np.int64))
"""No tokens, no slots."""
