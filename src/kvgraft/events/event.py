"""KV events: pages were stored, removed, or all of them forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BlockHash = int | bytes
"""Names a page: a signed 64-bit number, or the whole digest where vLLM is set to send bytes."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages were stored, each continuing the one before."""

    block_hashes: tuple[BlockHash, ...]
    """One per page."""
    parent_block_hash: BlockHash | None
    """Hash of the page before the first, None at the beginning of a sequence."""
    token_ids: tuple[int, ...]
    block_size: int
    """Tokens per page."""
    lora_id: int | None = None
    medium: str | None = None
    """Where the KV lies: `GPU`, `CPU_PINNED`, ..."""
    cache_salt: str | None = None
    """The tenant's salt as text, if any."""
    session_id: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Sequence[object] | None, ...] | None = None
    """Per page what enters its hash besides tokens (vLLM: adapter, images, salt), None for nothing; of a donor, its owners
    (`kvgraft.reuse.donor_events`)."""
    group_idx: int | None = None
    """vLLM's group of layers; pages of several groups have the same hash."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """`LOCAL` or `REMOTE` as seen from the sender, None if it does not say."""
    ownership: str | None = None
    """Tier or library that holds the pages, None for the engine itself; `kvgraft` for a donor."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages are gone from `medium`."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is stored any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
