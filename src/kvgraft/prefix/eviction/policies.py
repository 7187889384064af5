"""In which order nodes leave a radix tree: a policy gives each a key.

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
from typing import TYPE_CHECKING, Protocol

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EvictionKey = int | tuple[int, ...]
"""Sort key of nodes; one policy gives keys of one kind. A bare number is compared faster."""


class EvictionFacts(Protocol):
    """The part of a node that a policy may read; times are ticks of the tree's clock, lengths are tokens."""

    last_access: int
    created: int
    hit_count: int
    priority: int
    reach: int

    @property
    def start(self) -> int:
        """Tokens before the node."""


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
        """Time of the last use."""
        return node.last_access


@dataclass(frozen=True, slots=True)
class LFU(EvictionPolicy):
    """Least frequently used, then least recently."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Hits, then time of the last use."""
        return (node.hit_count, node.last_access)


@dataclass(frozen=True, slots=True)
class FIFO(EvictionPolicy):
    """First made, first out."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Time at which the node was made."""
        return node.created


@dataclass(frozen=True, slots=True)
class MRU(EvictionPolicy):
    """Most recently used leaves first, for loops longer than the cache."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Time of the last use, the latest smallest."""
        return -node.last_access


@dataclass(frozen=True, slots=True)
class FILO(EvictionPolicy):
    """First made, last out."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Time at which the node was made, the latest smallest."""
        return -node.created


@dataclass(frozen=True, slots=True)
class Priority(EvictionPolicy):
    """Lowest priority leaves first, then least recently used."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Priority, then time of the last use."""
        return (node.priority, node.last_access)


@dataclass(frozen=True, slots=True)
class SLRU(EvictionPolicy):
    """Segmented LRU: what was used again stays longer than what was seen once.

    Source: Karedla et al., "Caching strategies to improve disk system performance", IEEE Computer 27(3), 1994.
    """

    protected_threshold: int = 2
    """Hits that lift a node into the protected segment; the insert that makes it is the first."""

    def __post_init__(self) -> None:
        _require_at_least("protected_threshold", self.protected_threshold, 1)

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Protected nodes last, then time of the last use."""
        return (int(node.hit_count >= self.protected_threshold), node.last_access)


@dataclass(frozen=True, slots=True)
class TLRU(EvictionPolicy):
    """Tail-optimised LRU: first what may go without making the next turn of its conversation slow.

    Without a node, the next turn computes the rest of the history after it and the new prompt. Where that stays
    within `threshold` tokens, the turn meets its deadline all the same, so the node leaves before any other.

    Source: "Tail-Optimized Caching for LLM Inference", arXiv 2510.15152.
    """

    threshold: int = 2048
    """Tokens that a turn may compute within its deadline."""
    next_prompt_estimate: int = 256
    """Tokens that a new turn is expected to add."""

    def __post_init__(self) -> None:
        _require_at_least("threshold", self.threshold, 1)
        _require_at_least("next_prompt_estimate", self.next_prompt_estimate, 0)

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Nodes that the next prompt needs to be in time last, then time of the last use."""
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
