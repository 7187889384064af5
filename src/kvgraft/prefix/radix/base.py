"""Base of radix caches: lookup, insert, locks and eviction over one tree. A match costs its own length."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Self, TypedDict, TypeVar

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.base import PrefixCache
from kvgraft.prefix.eviction.policies import EvictionPolicy, make_eviction_policy
from kvgraft.prefix.eviction.queue import EvictionQueue
from kvgraft.prefix.radix.invariants import check_tree, require
from kvgraft.prefix.radix.node import RadixNode
from kvgraft.prefix.radix.tree import RadixTree
from kvgraft.prefix.results import (
    NO_SLOTS,
    NOTHING_FREED,
    EvictResult,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    OutlineNode,
    PrefixHandle,
    SlotArray,
    StoredLength,
    as_slots,
    join_slots,
)
from kvgraft.token_key import RadixKey

if TYPE_CHECKING:
    from kvgraft.events.log import EventLog
    from kvgraft.prefix.lifecycle import StoredRow
    from kvgraft.prefix.request import RequestRow

Node = TypeVar("Node", bound=RadixNode)

_kv_indices = attrgetter("kv_indices")


class TreeOptions(TypedDict, total=False):
    """Options of every tree; for each see `BaseRadixCache`."""

    policy: EvictionPolicy | str
    policy_config: dict[str, int] | None
    events: EventLog | None
    disabled: bool


class BaseRadixCache(PrefixCache, Generic[Node]):
    """Base of radix caches of one lock and one eviction order; `RadixCache` is the plain one.

    Invariants (verified by `check`):
        - A node holds whole pages and one slot per element; no slot is stored twice in a namespace.
        - `children` keys are the first page of the child, so no two children share a first page.
        - `lock_ref` is the node's `handle_locks` plus its children with `lock_ref > 0`; the root counts as locked.
        - The eviction queue holds the unlocked leaves and nothing else.
        - `evictable_size` and `protected_size` are the elements of nodes with `lock_ref == 0` and `> 0`.

    A split makes a new node of the upper part; the lower part stays the same node, so handles and locks keep meaning
    the same prefix.
    """

    _node_class: type[Node]

    def __init__(
        self,
        page_size: int = 1,
        *,
        policy: EvictionPolicy | str = "lru",
        policy_config: dict[str, int] | None = None,
        events: EventLog | None = None,
        disabled: bool = False,
        simulated: bool = False,
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: Tokens per page.
            policy: Name in `EVICTION_POLICIES`, or a policy.
            policy_config: Parameters for a policy given by name.
            events: Where stored and removed pages are recorded; None records nothing.
            disabled: Store and match nothing.
            simulated: Without a pool: an insert without slots takes the token ids as slots, and slots may repeat.

        Raises:
            ConfigError: There is no such policy, it has no such parameter, or `policy_config` goes with no name.
        """
        if isinstance(policy, str):
            policy = make_eviction_policy(policy, policy_config)
        elif policy_config:
            raise ConfigError("policy_config goes with a policy's name; give the parameters to the policy itself")
        self.policy = policy
        self._tree: RadixTree[Node] = RadixTree(page_size, self._node_class)
        self._page_size = page_size
        # A bound method is called sooner than an object.
        self._queue: EvictionQueue[Node] = EvictionQueue(policy.__call__)
        self._evictable_size = 0
        self._protected_size = 0
        self._events = events
        self._disabled = disabled
        self._simulated = simulated

    @classmethod
    def create_simulated(cls, page_size: int = 1, **options: object) -> Self:
        """Make a cache without a pool, for simulation and tests: `insert(key)` takes the token ids as slots."""
        return cls(page_size, simulated=True, **options)  # type: ignore[arg-type]

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

    @property
    def disabled(self) -> bool:
        """Whether the cache never stores anything."""
        return self._disabled

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, the root not counted. Complexity: O(nodes)."""
        return sum(1 for _ in self._tree.root.subtree()) - 1

    def outline(self, limit: int) -> list[OutlineNode]:
        """Return up to `limit` nodes from the root on, level by level, the root left out. O(limit + children)."""
        found: list[OutlineNode] = []
        level = [(-1, child) for child in self._tree.root.children.values()]
        while level:
            below = []
            for parent, node in level:
                if len(found) == limit:
                    return found
                below += [(len(found), child) for child in node.children.values()]
                found.append(OutlineNode(parent, len(node), node.lock_ref > 0))
            level = below
        return found

    def num_locks(self) -> int | None:
        """See `PrefixCache.num_locks`. Complexity: O(nodes)."""
        return sum(node.handle_locks for node in self._tree.root.subtree())

    def is_empty_prefix(self, handle: PrefixHandle) -> bool:
        """See `PrefixCache.is_empty_prefix`."""
        return handle is self._tree.root

    @property
    def root_handle(self) -> PrefixHandle:
        """Handle of the empty prefix."""
        return self._tree.root

    # lookup

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> MatchResult:
        """Find the longest stored prefix in whole pages and mark it as used now.

        Splits the node in which the match ends, so that the handle covers exactly what was matched.

        Complexity: O(matched tokens) at the speed of `memcmp`, plus O(nodes on the path).
        """
        return self._match_prefix_exact(params if isinstance(params, RadixKey) else params.key)

    def look(self, key: RadixKey) -> StoredLength:
        """See `PrefixCache.look`. Complexity: as `match_prefix`."""
        return StoredLength(0) if self._disabled else self._stored_in(*self._descend(key))

    def _descend(self, key: RadixKey) -> tuple[list[Node], int]:
        """Return the nodes that a key has from the root on, the last one perhaps in part, and where it leaves them."""
        path, partial, run = self._tree.descend(key, self._tree.root, key.aligned_len(self._page_size))
        if partial is None:
            return path, path[-1].end if path else 0
        path.append(partial)
        return path, partial.start + run

    def _stored_in(self, path: list[Node], stop: int) -> StoredLength:
        """Return how much can be used of a key that follows `path` from the root on and leaves it at `stop`."""
        return StoredLength(stop)

    def _match_prefix_exact(self, key: RadixKey) -> MatchResult:
        """Match by the key alone."""
        if self._disabled:
            return MatchResult([], 0, self._tree.root)
        path, node = self._walk(key, self._tree.root, key.aligned_len(self._page_size))
        return MatchResult(list(map(_kv_indices, path)), node.end, node)

    def _walk(self, key: RadixKey, start: Node, length: int) -> tuple[list[Node], Node]:
        """Follow `key` from `start` as far as it is stored, split where it ends and mark the last node as used now.

        The nodes above it learn that when it goes: until then they have a child and do not compete.

        Returns the nodes after `start` and the last one.
        """
        tree = self._tree
        now = tree.tick()
        path, partial, run = tree.descend(key, start, length)
        if partial is not None:
            path.append(self._divide(partial, run))
        node = path[-1] if path else start
        node.last_access = now
        if node.queue_index >= 0:
            self._requeue(node)
        return path, node

    def _requeue(self, node: Node) -> None:
        """Restore the order of eviction after the facts about a node changed, if it is queued."""
        if node.queue_index >= 0:
            self._queue.update(node)

    def _divide(self, node: Node, length: int) -> Node:
        upper = self._tree.divide(node, length)
        self._requeue(node)  # it begins later now, which a policy may look at
        return upper

    # insert

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
    ) -> InsertResult:
        """Store `key`, see `PrefixCache.insert`; a simulated cache takes the token ids where there are no slots.

        Every node on the path counts a hit, the one that is made now included.

        Complexity: O(tokens of `key` after `after`) plus O(nodes after `counted_len`).
        """
        slots = self._offered(key, kv_indices)
        if self._disabled:
            return InsertResult(0, 0, self._tree.root)
        start = self._tree.root if after is None else self._prefix_of(key, after)
        total_len = key.aligned_len(self._page_size)
        prefix_len, node = self._insert(key, slots, start, total_len, priority=priority, counted_len=counted_len)
        return InsertResult(prefix_len, max(total_len, start.end), node)

    def _prefix_of(self, key: RadixKey, after: PrefixHandle) -> Node:
        """Return the stored prefix of `key` that `after` stands for."""
        return self._tree.resolve_prefix(key, after)

    def _insert(
        self, key: RadixKey, slots: SlotArray, start: Node, total_len: int, *, priority: int, counted_len: int | None
    ) -> tuple[int, Node]:
        """Store `key` from `start` to `total_len`: what every insert has in common.

        Returns how many elements had slots before, and the node that ends there.
        """
        path, node = self._walk(key, start, total_len)
        counted_len = start.end if counted_len is None else counted_len
        self._credit(start, path, total_len, priority, counted_len)
        prefix_len = self._stored_len(node, path, slots)
        if node.end < total_len:
            node = self._add_node(node, key, slots, total_len, priority, hit_count=int(total_len > counted_len))
            self._queue.add(node)
        return prefix_len, node

    def _offered(self, key: RadixKey, kv_indices: SlotArray | None) -> SlotArray:
        if kv_indices is not None:
            return as_slots(kv_indices, len(key))
        if not self._simulated:
            raise ConfigError("insert needs kv_indices, one slot per token; create_simulated() makes a cache without")
        return key.token_ids[: len(key)]

    def _credit(self, start: Node, path: list[Node], total_len: int, priority: int, counted_len: int) -> None:
        """Count hits along the path of an insert, those of a request once, and note priority and length at its end.

        What is above learns the latter two when a leaf goes.
        """
        last = step = path[-1] if path else start
        last.priority = max(last.priority, priority)
        if path:
            last.reach = max(last.reach, total_len)
        while step.end > counted_len and step.parent is not None:
            step.hit_count += 1
            step = step.parent
        if last.queue_index >= 0:
            self._requeue(last)

    def _stored_len(self, node: Node, path: list[Node], slots: SlotArray) -> int:
        """Return how many elements had slots in the cache already; `path` was walked by an insert that offers `slots`."""
        return node.end

    def _add_node(
        self, parent: Node, key: RadixKey, slots: SlotArray, stop: int, priority: int, *, hit_count: int
    ) -> Node:
        """Add what follows `parent` up to `stop`; the caller queues what stays a leaf."""
        if parent.queue_index >= 0:
            self._queue.remove(parent)
        node = self._tree.add_leaf(parent, key, slots, parent.end, stop, priority=priority, hit_count=hit_count)
        self._evictable_size += len(node)
        if self._events is not None:
            self._events.stored(node, self._page_size)
        return node

    # locks

    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """Lock, and return `handle`. Complexity: O(nodes that were not protected before) plus O(log n) for a leaf."""
        node = self._tree.resolve(handle)
        if node.parent is None:
            return handle
        node.handle_locks += 1
        num_tokens = node.protect()
        self._evictable_size -= num_tokens
        self._protected_size += num_tokens
        if node.queue_index >= 0:  # nodes above have a child and wait nowhere
            self._queue.remove(node)
        return handle

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back one lock of `handle`. Does not count as an access; never frees anything here.

        Complexity: O(nodes that are not protected any more) plus O(log n) for a leaf.
        """
        node = self._tree.resolve(handle)
        if node.parent is None:
            return NOTHING_FREED
        if not node.handle_locks:
            raise CorruptCacheError("dec_lock_ref without inc_lock_ref on the same handle")
        node.handle_locks -= 1
        num_tokens = node.unprotect()
        self._evictable_size += num_tokens
        self._protected_size -= num_tokens
        self._queue_if_candidate(node)
        return NOTHING_FREED

    def _queue_if_candidate(self, node: Node) -> None:
        if not node.children and not node.lock_ref:
            self._queue.add(node)

    # eviction

    def evict(self, num_tokens: int) -> EvictResult:
        """Drop unlocked leaves in the order of the policy until `num_tokens` are freed or nothing unlocked is left.

        A parent that loses its last child becomes a leaf and competes at once. May free more: nodes go whole.

        Complexity: O(log n) per dropped node plus O(tokens freed).
        """
        return self._evict_leaves(num_tokens, trim=False)

    def _evict_leaves(self, num_tokens: int, *, trim: bool) -> EvictResult:
        dropped: list[SlotArray] = []
        num_freed = 0
        while num_freed < num_tokens and self._queue:
            leaf = self._queue.pop()
            if trim:
                self._trim(leaf, num_tokens - num_freed)
            slots = leaf.kv_indices
            num_freed += len(slots)
            dropped.append(slots)
            self._queue_if_candidate(self._take_out(leaf))
        self._evictable_size -= num_freed
        return EvictResult(join_slots(dropped))

    def _trim(self, leaf: Node, num_tokens: int) -> None:
        """Cut off what a leaf has before its last `num_tokens`, in whole pages."""
        wanted = -(-num_tokens // self._page_size) * self._page_size
        if wanted < len(leaf):
            self._divide(leaf, len(leaf) - wanted)

    def _take_out(self, leaf: Node) -> Node:
        """Take an unqueued leaf out of the tree; returns its parent, which may be a candidate now."""
        if self._events is not None:
            self._events.removed(leaf)
        parent = self._tree.remove_leaf(leaf)
        parent.learn_from(leaf)
        return parent

    def reset(self) -> SlotArray:
        """Forget everything, see `PrefixCache.reset`. Complexity: O(stored tokens)."""
        return self._forget()

    def _forget(self) -> SlotArray:
        self._queue.clear()
        nodes = self._tree.clear()
        freed = np.concatenate([NO_SLOTS, *(node.kv_indices for node in nodes)])
        for node in nodes:
            node.detach()
        self._evictable_size = self._protected_size = 0
        if self._events is not None:
            self._events.cleared()
        return freed

    def rebuild(self) -> None:
        """See `PrefixCache.rebuild`."""
        self._tree.rebuild()
        self._queue.rebuild()
        self._evictable_size = self._protected_size = 0
        if self._events is not None:
            self._events.cleared()

    def path_slots(self, handle: PrefixHandle, start: int = 0) -> SlotArray:
        """Slots of positions `[start, end)` of a stored prefix. Complexity: O(slots + nodes that hold them)."""
        return self._tree.path_slots(self._tree.resolve(handle), start)

    # requests

    def end_prompt(self, stored: StoredRow, req: RequestRow) -> None:
        """Cut the last node of a finished request at the end of its prompt; the part of the prompt gets one more priority.

        Outputs are seldom asked for again, so they can then be evicted without the prompt.
        """
        node = self._tree.resolve(stored.handle)
        if req.prompt_len is None:
            return
        boundary = req.prompt_len - req.is_bigram
        boundary -= boundary % self._page_size
        if node.start < boundary < node.end:
            upper = self._divide(node, boundary - node.start)
            upper.priority = max(upper.priority, req.priority) + 1

    # invariants

    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Complexity: O(stored tokens * log).

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        self._queue.check()
        sizes, counted = self._check_nodes(), (self._evictable_size, self._protected_size)
        require(sizes == counted, f"evictable and protected tokens are {sizes}, counted as {counted}")

    def _check_nodes(self) -> tuple[int, int]:
        """Verify the nodes; returns the tokens in unlocked and in locked ones."""
        return check_tree(self._tree.root, self._page_size, set(self._queue), unique_slots=not self._simulated)
