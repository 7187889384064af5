"""In which order nodes leave a radix tree: policies give keys, the queue keeps candidates sorted by them.

| name | smallest key leaves first | parameters |
|---|---|---|
| `lru` | last access | |
| `lfu` | hits, last access | |
| `fifo` | creation | |
| `mru` | -last access | |
| `filo` | -creation | |
| `priority` | priority, last access | |
| `slru` | hits >= protected_threshold, last access | `protected_threshold` |
| `tlru` | next prompt would miss its deadline, last access | `threshold`, `next_prompt_estimate` |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.node import NOT_QUEUED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

EvictionKey = int | tuple[int, ...]
"""What nodes are sorted by; one policy gives keys of one kind. A bare number is compared faster."""


class EvictionFacts(Protocol):
    """What a policy may read of a node; times are ticks of the tree's clock, lengths are tokens."""

    last_access: int
    created: int
    hit_count: int
    priority: int
    reach: int

    @property
    def start(self) -> int:
        """Tokens in front of the node."""


class EvictionPolicy(ABC):
    """Orders nodes for eviction: the smallest key leaves first. Fields are the policy's parameters."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Return the sort key of a node as it is now."""


@dataclass(frozen=True, slots=True)
class LRU(EvictionPolicy):
    """Least recently used: what was not matched or inserted for longest leaves first."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        return node.last_access


@dataclass(frozen=True, slots=True)
class LFU(EvictionPolicy):
    """Least frequently used, then least recently."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        return (node.hit_count, node.last_access)


@dataclass(frozen=True, slots=True)
class FIFO(EvictionPolicy):
    """First made, first out."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        return node.created


@dataclass(frozen=True, slots=True)
class MRU(EvictionPolicy):
    """Most recently used leaves first, for loops longer than the cache."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        return -node.last_access


@dataclass(frozen=True, slots=True)
class FILO(EvictionPolicy):
    """First made, last out."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        return -node.created


@dataclass(frozen=True, slots=True)
class Priority(EvictionPolicy):
    """Lowest priority leaves first, then least recently used."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        return (node.priority, node.last_access)


@dataclass(frozen=True, slots=True)
class SLRU(EvictionPolicy):
    """Segmented LRU: what was used again stays longer than what was seen once.

    Attributes:
        protected_threshold: Hits that lift a node into the protected segment; the insert that makes it is the first.

    Source: Karedla et al., "Caching strategies to improve disk system performance", IEEE Computer 27(3), 1994.
    """

    protected_threshold: int = 2

    def __post_init__(self) -> None:
        _require_at_least("protected_threshold", self.protected_threshold, 1)

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        return (int(node.hit_count >= self.protected_threshold), node.last_access)


@dataclass(frozen=True, slots=True)
class TLRU(EvictionPolicy):
    """Tail-optimised LRU: first what may go without making the next turn of its conversation slow.

    Without a node, the next turn computes the rest of the history behind it and the new prompt. Where that stays
    within `threshold` tokens, the turn meets its deadline all the same, so the node leaves before any other.

    Attributes:
        threshold: Tokens that a turn may compute within its deadline.
        next_prompt_estimate: Tokens that a new turn is expected to add.

    Source: "Tail-Optimized Caching for LLM Inference", arXiv 2510.15152.
    """

    threshold: int = 2048
    next_prompt_estimate: int = 256

    def __post_init__(self) -> None:
        _require_at_least("threshold", self.threshold, 1)
        _require_at_least("next_prompt_estimate", self.next_prompt_estimate, 0)

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """See `EvictionPolicy`."""
        computed = node.reach - node.start + self.next_prompt_estimate
        return (int(computed > self.threshold), node.last_access)


EVICTION_POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "fifo": FIFO,
    "filo": FILO,
    "lfu": LFU,
    "lru": LRU,
    "mru": MRU,
    "priority": Priority,
    "slru": SLRU,
    "tlru": TLRU,
}
"""Every policy by name. A new one is a dataclass above and a line here."""


def make_eviction_policy(name: str, config: Mapping[str, int] | None = None) -> EvictionPolicy:
    """Build a policy from its name and parameters, as a command line or a JSON file gives them.

    Raises:
        ConfigError: The name or a parameter is unknown, or a value is out of range; says what exists.
    """
    if name not in EVICTION_POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; there are {', '.join(sorted(EVICTION_POLICIES))}")
    policy = EVICTION_POLICIES[name]()
    known = [field.name for field in fields(policy)]  # type: ignore[arg-type]
    for parameter, value in (config or {}).items():
        if parameter not in known:
            raise ConfigError(
                f"eviction policy {name!r} has no parameter {parameter!r}; it has {', '.join(known) or 'none'}"
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{parameter} of eviction policy {name!r} must be an integer, not {value!r}")
    return EVICTION_POLICIES[name](**(config or {}))


def _require_at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ConfigError(f"{name} must be at least {lowest}, not {value}")


class Queueable(Protocol):
    """What an eviction queue holds: it stores its place there."""

    queue_index: int


Item = TypeVar("Item", bound=Queueable)


class EvictionQueue(Generic[Item]):
    """Candidates for eviction in an indexed binary heap; each of them knows its place in it.

    Chosen over a lazy heap, which pays for all nodes touched since the last eviction at once, in the middle of a
    request, and over an intrusive list, which cannot take back an old node (a parent that became a leaf, a lock given
    back) at its place, nor sort by anything but the time of insertion.

    Invariants:
        - `keys[i] == policy(items[i])`, and no key is smaller than its parent's in the heap.
        - `items[i].queue_index == i`; what is outside has `NOT_QUEUED`.

    Complexity: every change is O(log n) at worst; `add` and `update` of the largest key, which is what LRU does, cost
    O(1) on average.
    """

    def __init__(self, policy: Callable[[Item], EvictionKey]) -> None:
        self._policy = policy
        self._keys: list[Any] = []
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def add(self, item: Item) -> None:
        """Make an item that is not queued a candidate."""
        self._keys.append(self._policy(item))
        self._items.append(item)
        item.queue_index = len(self._items) - 1
        self._sift_up(item.queue_index)

    def update(self, item: Item) -> None:
        """Restore the order after the policy's key of a queued item changed."""
        self._keys[item.queue_index] = self._policy(item)
        self._restore(item.queue_index)

    def remove(self, item: Item) -> None:
        """Withdraw a queued item."""
        hole = item.queue_index
        last_key, last = self._keys.pop(), self._items.pop()
        if last is not item:
            self._place(hole, last_key, last)
            self._restore(hole)
        item.queue_index = NOT_QUEUED

    def pop(self) -> Item:
        """Withdraw and return the item with the smallest key; the queue is not empty."""
        item = self._items[0]
        self.remove(item)
        return item

    def clear(self) -> None:
        """Withdraw all."""
        for item in self._items:
            item.queue_index = NOT_QUEUED
        self._keys.clear()
        self._items.clear()

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        if len(self._keys) != len(self._items):
            raise CorruptCacheError(f"{len(self._keys)} keys for {len(self._items)} nodes in the eviction queue")
        for index, (key, item) in enumerate(zip(self._keys, self._items, strict=True)):
            if item.queue_index != index:
                raise CorruptCacheError(f"node at {index} of the eviction queue believes to be at {item.queue_index}")
            if key != self._policy(item):
                raise CorruptCacheError(f"key {key} in the eviction queue is not the policy's {self._policy(item)}")
            if index and key < self._keys[(index - 1) // 2]:
                raise CorruptCacheError(f"the eviction queue is out of order at {index}")

    def _place(self, index: int, key: EvictionKey, item: Item) -> None:
        self._keys[index] = key
        self._items[index] = item
        item.queue_index = index

    def _restore(self, index: int) -> None:
        if self._sift_up(index) == index:
            self._sift_down(index)

    def _sift_up(self, index: int) -> int:
        """Move an entry up until its parent's key is not larger; return where it ends."""
        keys, items = self._keys, self._items
        key, item = keys[index], items[index]
        while index:
            above = (index - 1) // 2
            if not key < keys[above]:
                break
            self._place(index, keys[above], items[above])
            index = above
        self._place(index, key, item)
        return index

    def _sift_down(self, index: int) -> None:
        """Move an entry down until its children's keys are not smaller."""
        keys, items = self._keys, self._items
        key, item, size = keys[index], items[index], len(keys)
        while (below := 2 * index + 1) < size:
            right = below + 1
            if right < size and keys[right] < keys[below]:
                below = right
            smaller = keys[below]
            if not smaller < key:
                break
            keys[index] = smaller  # `_place`, inlined: this loop is most of what eviction costs
            items[index] = moved = items[below]
            moved.queue_index = index
            index = below
        self._place(index, key, item)
