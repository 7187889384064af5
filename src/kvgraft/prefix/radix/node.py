"""A node of a radix tree: a run of tokens, the slots of their KV, and its place in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from kvgraft.prefix.eviction.queue import NOT_QUEUED, Queueable
from kvgraft.prefix.results import NO_SLOTS, PrefixHandle, SlotArray
from kvgraft.token_key import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from kvgraft.token_key import KeyNamespace
    from kvgraft.types import TokenArray


_INT64 = np.dtype(np.int64)
_LONG = 8192
"""Slots from which on a loop of numpy copies faster than `memcpy`: its string instruction is slow between addresses that
are aligned differently: 10 % at 8K and 128K, 20-30 % between. Below, the loop starts later by more than that."""


class _Visited(Queueable, PrefixHandle):
    """The part of a node that a match reads, in two cache lines: slots of a class lie after those of its base."""

    __slots__ = ("children", "end", "kv_indices", "last_access", "tokens")


class RadixNode(_Visited):
    """Tokens between two branching points. Behaviour is the tree's; the node only holds state.

    Tokens are kept as raw bytes because `bytes.startswith` compares them with a key at the speed of `memcmp`, without
    creating an array per node; that is what makes a match along hundreds of nodes cheap.

    Attributes:
        tree: Identity of the tree the node belongs to; None once it was dropped.
        parent: None for a root and for a node that was dropped.
        namespace: What must be equal besides the tokens, shared with the parent's; None for a root.
        edge: Key under which `parent.children` holds this node.
        tokens: int64 token ids as bytes; a bigram view has one token more than elements.
        kv_indices: Read-only int64 `(num_elements,)`, owned: never a view that would keep a longer array alive.
        children: By the first page of their tokens (below the root after the namespace).
        end: Elements from the root to the end of this node. A split does not change it.
        lock_ref: Locks taken through this very node plus children with `lock_ref > 0`; the node is protected while
            it is positive. Counting children instead of all locks below lets a lock stop at the first protected node.
        handle_locks: Locks that were taken through this very node.
        last_access: Time of the last match or insert through this node, in ticks of the tree's clock.
        created: Time at which the node was made.
        hit_count: Requests that inserted through this node, the one that made it included.
        priority: Largest priority of an insert through this node.
        reach: Length of the longest sequence that was inserted through this node.
        page_hashes: Digests of the pages, 32 bytes each, where events are recorded.
    """

    __slots__ = (
        "created",
        "edge",
        "handle_locks",
        "hit_count",
        "lock_ref",
        "namespace",
        "page_hashes",
        "parent",
        "priority",
        "reach",
        "tree",
    )

    def __init__(
        self,
        tree: object,
        parent: Self | None,
        edge: Hashable,
        tokens: bytes,
        kv_indices: SlotArray,
        *,
        end: int,
        now: int,
        priority: int = 0,
        namespace: KeyNamespace | None = None,
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.edge = edge
        self.namespace = namespace
        self.tokens = tokens
        self.kv_indices = kv_indices
        self.children: dict[Hashable, Self] = {}
        self.end = end
        self.lock_ref = 0
        self.handle_locks = 0
        self.last_access = now
        self.created = now
        self.hit_count = 0
        self.priority = priority
        self.reach = end
        self.page_hashes = b""
        self.queue_index = NOT_QUEUED  # what `Queueable` sets, without the call
        self.queue_key = self.queue_before = self.queue_after = None

    def __len__(self) -> int:
        return len(self.kv_indices)

    def __bool__(self) -> bool:
        return True

    @property
    def start(self) -> int:
        """Elements from the root to the beginning of this node."""
        return self.end - len(self)

    @property
    def token_ids(self) -> TokenArray:
        """Read-only int64 view of the node's tokens."""
        return np.frombuffer(self.tokens, dtype=np.int64)

    def subtree(self) -> Iterator[Self]:
        """Yield this node and everything below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def learn_from(self, leaf: RadixNode) -> None:
        """Take over what a leaf below has seen since, now that it goes and this node may have to compete.

        A continued insert touches only what is new, so until then its path does not know of it.
        """
        if leaf.last_access > self.last_access:  # noqa: PLR1730 (`max` costs three times as much, once per evicted node)
            self.last_access = leaf.last_access
        if leaf.reach > self.reach:  # noqa: PLR1730
            self.reach = leaf.reach
        if leaf.priority > self.priority:  # noqa: PLR1730
            self.priority = leaf.priority

    def protect(self) -> int:
        """Take one lock more; returns how many elements up the path were not protected before.

        Complexity: O(nodes that were not protected before). The loop ends at the root at the latest, which is always locked.
        """
        step = self
        while not step.lock_ref:
            step.lock_ref = 1
            step = step.parent  # type: ignore[assignment]
        step.lock_ref += 1
        return self.end - step.end

    def unprotect(self) -> int:
        """Give back one lock; returns how many elements up the path are not protected any more.

        Complexity: O(nodes that are not protected any more).
        """
        step = self
        while step.lock_ref == 1:
            step.lock_ref = 0
            step = step.parent  # type: ignore[assignment]
        step.lock_ref -= 1
        return self.end - step.end

    def divide(self, length: int, now: int, page_size: int) -> Self:
        """Cut after `length` elements, whole pages; return the new node of the upper part, which is linked in.

        This object stays the lower part, so handles and locks keep meaning the same prefix. The upper part takes over
        hit count and priority, is protected if the lower one is, and counts as made now. Both halves are copies: a
        view would keep the other half alive after its eviction.
        """
        assert self.parent is not None, "the root holds nothing and is never divided"
        overlap = len(self.tokens) // TOKEN_BYTES - len(self)
        cut = length * TOKEN_BYTES
        upper = type(self)(
            self.tree,
            self.parent,
            self.edge,
            self.tokens[: cut + overlap * TOKEN_BYTES],
            frozen_copy(self.kv_indices[:length]),
            end=self.start + length,
            now=now,
            priority=self.priority,
            namespace=self.namespace,
        )
        upper.last_access = self.last_access
        upper.hit_count = self.hit_count
        upper.reach = self.reach
        upper.lock_ref = int(self.lock_ref > 0)
        num_hash_bytes = length // page_size * (len(self.page_hashes) // max(len(self) // page_size, 1))
        upper.page_hashes, self.page_hashes = self.page_hashes[:num_hash_bytes], self.page_hashes[num_hash_bytes:]
        self.parent.children[self.edge] = upper
        self.tokens = self.tokens[cut:]
        self.kv_indices = frozen_copy(self.kv_indices[length:])
        self.parent = upper
        self.edge = self.tokens[: (page_size + overlap) * TOKEN_BYTES]
        upper.children[self.edge] = self
        return upper

    def detach(self) -> None:
        """Let a dropped node hold nothing, however long its handle is kept."""
        self.tree = self.parent = self.namespace = None
        self.children.clear()
        self.tokens = self.page_hashes = b""
        self.kv_indices = NO_SLOTS


def frozen_copy(array: SlotArray) -> SlotArray:
    """Copy into a read-only int64 array of its own."""
    if array.dtype is not _INT64:
        copy = array.astype(np.int64)
    elif len(array) < _LONG:
        copy = array.copy()
    else:
        copy = np.positive(array)
    copy.setflags(write=False)
    return copy
