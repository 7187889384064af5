"""Memory of an engine's K/V and donors, against its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.config import EngineConfig
    from kvgraft.engine.kv.kv_space import KVSpace


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes and tokens in use, each with its limit; a limit of 0 means that none are kept.

    Attributes:
        kv_bytes: K/V and states on the device that requests, prefixes or donors hold.
        kv_limit_bytes: Slots of the device, all of which are allocated at the start.
        host_bytes: K/V of donors in host memory.
        host_limit_bytes: The setting `host_bytes`.
        prefix_host_bytes: K/V and states of exact prefixes in host memory.
        prefix_host_limit_bytes: The setting `prefix_host_bytes`, all of which is reserved at the start.
        donor_tokens: Tokens of donors in all tiers.
        donor_tokens_limit: The setting `donor_tokens`.
    """

    kv_bytes: int = 0
    kv_limit_bytes: int = 0
    host_bytes: int = 0
    host_limit_bytes: int = 0
    prefix_host_bytes: int = 0
    prefix_host_limit_bytes: int = 0
    donor_tokens: int = 0
    donor_tokens_limit: int = 0

    @classmethod
    def of(cls, space: KVSpace, config: EngineConfig) -> MemoryUse:
        """Read a space; cheap, callable from any thread, numbers may be of neighbouring moments."""
        return cls(
            kv_bytes=space.held_bytes,
            kv_limit_bytes=space.limit_bytes,
            host_bytes=space.host.used_bytes,
            host_limit_bytes=space.host.budget_bytes,
            prefix_host_bytes=space.prefix_host_bytes,
            prefix_host_limit_bytes=config.prefix_host_bytes,
            donor_tokens=space.donors.num_tokens,
            donor_tokens_limit=space.donors.capacity_tokens,
        )

    @property
    def pools(self) -> dict[str, tuple[int, int]]:
        """Bytes in use and their limit, by the name of the pool in `/health` and in the metrics."""
        return {
            "kv": (self.kv_bytes, self.kv_limit_bytes),
            "host_donors": (self.host_bytes, self.host_limit_bytes),
            "host_prefixes": (self.prefix_host_bytes, self.prefix_host_limit_bytes),
        }
