"""What a KV event says: pages were stored, removed, or all of them forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BlockHash = int | bytes
"""Names a page: a signed 64-bit number, or the whole digest where vLLM is told to send bytes."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages were stored, each continuing the one in front.

    Attributes:
        block_hashes: One per page.
        parent_block_hash: Hash of the page in front of the first, None at the beginning of a sequence.
        token_ids: Tokens of all pages.
        block_size: Tokens per page.
        lora_id: Adapter number, where the engine has one.
        medium: Where the KV lies: `GPU`, `CPU_PINNED`, ...
        cache_salt: The tenant's salt as text, if any.
        session_id: Streaming session, if any.
        lora_name: Adapter, if any.
        extra_keys: Per page what enters its hash besides tokens (vLLM: adapter, images, salt), None for nothing; of a
            donor, whose it is (`donors.py`).
        group_idx: vLLM's group of layers; pages of several groups have the same hash.
        kv_cache_spec_kind: Kind of layers in that group.
        kv_cache_spec_sliding_window: Window of these layers in tokens, if they have one.
        locality: `LOCAL` or `REMOTE` as seen from the sender, None if it does not say.
        ownership: Tier or library that holds the pages, None for the engine itself; `kvgraft` for a donor.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Sequence[object] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


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
