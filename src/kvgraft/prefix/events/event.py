"""What a KV event says: pages were stored, removed, or all of them forgotten."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages were stored, each continuing the one in front.

    Attributes:
        block_hashes: One signed 64-bit hash per page.
        parent_block_hash: Hash of the page in front of the first, None at the beginning of a sequence.
        token_ids: Tokens of all pages.
        block_size: Tokens per page.
        lora_id: Adapter number, where the engine has one.
        medium: Where the KV lies: `GPU`, `CPU_PINNED`, ...
        cache_salt: The tenant's salt as text, if any.
        session_id: Streaming session, if any.
        lora_name: Adapter, if any.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages are gone from `medium`."""

    block_hashes: tuple[int, ...]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is stored any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
