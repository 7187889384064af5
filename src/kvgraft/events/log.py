"""Records which pages a cache stores and removes, for routers and indexes outside.

A page is named by a hash that chains over all pages before it and is seeded with its namespace and, if given, a
secret key, so that without the key it cannot be tested whether another tenant's text is cached.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvgraft.events.event import AllBlocksCleared, BlockRemoved, BlockStored
from kvgraft.token_key import TOKEN_BYTES, UnannouncedKey

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.events.event import BlockHash, KVEvent
    from kvgraft.token_key import KeyNamespace
    from kvgraft.types import TokenArray

DIGEST_BYTES = 32

NAMESPACE_SALT = "kvgraft-namespace:"
"""Begins the stand-in for a salt, in events of pages with a namespace known by its key alone, which follows as hex."""


class Pages(Protocol):
    """The part of a node that the log reads, and the digests that it leaves there.

    Attributes:
        tokens: int64 token ids as bytes; a bigram view has one token more than elements.
        namespace: What must be equal besides the tokens; None for the root of a tree.
        page_hashes: Digests of the pages, 32 bytes each; empty until the log has computed them.
    """

    tokens: bytes
    namespace: KeyNamespace | None
    page_hashes: bytes

    @property
    def parent(self) -> Pages | None:
        """The node before it."""

    @property
    def token_ids(self) -> TokenArray:
        """The tokens as int64."""

    def __len__(self) -> int: ...


class _StoredRun:
    """Stored pages that go on growing; lists, because appending to tuples would make a chunked prefill quadratic."""

    __slots__ = ("_first", "_hashes", "_token_ids")

    def __init__(self, event: BlockStored) -> None:
        self._first = event
        self._hashes = list(event.block_hashes)
        self._token_ids = list(event.token_ids)

    def accepts(self, event: BlockStored) -> bool:
        """Return whether `event` continues the run and differs in nothing else."""
        names = ("block_size", "lora_id", "medium", "cache_salt", "session_id", "lora_name")
        return event.parent_block_hash == self._hashes[-1] and all(
            getattr(event, name) == getattr(self._first, name) for name in names
        )

    def append(self, event: BlockStored) -> None:
        """Take the pages of an accepted event."""
        self._hashes += event.block_hashes
        self._token_ids += event.token_ids

    def close(self) -> BlockStored:
        """Return the run as one event."""
        return replace(self._first, block_hashes=tuple(self._hashes), token_ids=tuple(self._token_ids))


class _RemovedRun:
    """Removed pages of one medium that go on growing, as a list for the same reason."""

    __slots__ = ("hashes", "medium")

    def __init__(self, medium: str | None) -> None:
        self.medium = medium
        self.hashes: list[BlockHash] = []

    def close(self) -> BlockRemoved:
        """Return the run as one event."""
        return BlockRemoved(tuple(self.hashes), self.medium)


class EventLog:
    """Records what a cache stores and removes until `take` fetches it; neighbouring events are merged.

    Stored and removed hashes are the same sets over the life of a cache: a node keeps the digests of its pages, and a
    split divides them. The log itself keeps only what has not been fetched yet. Not thread-safe.
    """

    def __init__(self, *, key: bytes = b"", medium: str | None = "GPU", common_key: bytes | None = None) -> None:
        """Make an empty log.

        Args:
            key: Secret of up to 64 bytes that seeds every hash; empty for hashes that anyone can compute.
            medium: Named in each event.
            common_key: `Namespace.key` of text that is everyone's. Pages under keys of other namespaces say so in place of a
                salt, so that no reader takes one tenant's text for everyone's; may be set later.
        """
        self.common_key = common_key
        self._key = key
        self._medium = medium
        self._events: list[KVEvent] = []
        self._open: _StoredRun | _RemovedRun | None = None

    def __len__(self) -> int:
        return len(self._events) + (self._open is not None)

    def take(self) -> list[KVEvent]:
        """Return and forget what was recorded. Complexity: O(pages of the last event)."""
        self._close_run()
        events, self._events = self._events, []
        return events

    def stored(self, node: Pages, page_size: int, medium: str | None = None) -> None:
        """Record a new node, computing the hashes of its pages; nothing of one under an `UnannouncedKey`.

        Complexity: O(tokens of the node), one SHA-256 per page.
        """
        assert node.parent is not None, "the root is never recorded"
        assert node.namespace is not None, "only the root has no namespace"
        parent = node.parent.page_hashes[-DIGEST_BYTES:]
        extra_key, salt, _ = node.namespace
        if isinstance(extra_key, UnannouncedKey):
            return
        if not node.page_hashes:
            node.page_hashes = self._chain(node, page_size, parent or self._seed(node.namespace))
        self._append_stored(
            BlockStored(
                block_hashes=_short(node.page_hashes),
                parent_block_hash=_short(parent)[0] if parent else None,
                token_ids=tuple(node.token_ids[: len(node)].tolist()),
                block_size=page_size,
                medium=medium or self._medium,
                cache_salt=self._salt(extra_key, salt),
                lora_name=extra_key if isinstance(extra_key, str) else None,
            )
        )

    def removed(self, node: Pages, medium: str | None = None) -> None:
        """Record that a node goes that was recorded. Complexity: O(pages of the node)."""
        if not node.page_hashes:
            return
        medium = medium or self._medium
        run = self._open
        if not isinstance(run, _RemovedRun) or run.medium != medium:
            self._close_run()
            self._open = run = _RemovedRun(medium)
        run.hashes += _short(node.page_hashes)

    def cleared(self) -> None:
        """Record that everything goes."""
        self._close_run()
        self._events.append(AllBlocksCleared())

    def announce(self, event: KVEvent) -> None:
        """Record an event about something else than pages of the cache, after what was recorded so far."""
        self._close_run()
        self._events.append(event)

    def _append_stored(self, event: BlockStored) -> None:
        """Record pages; they join the run in progress if they continue it and all else is equal."""
        if isinstance(self._open, _StoredRun) and self._open.accepts(event):
            self._open.append(event)
            return
        self._close_run()
        self._open = _StoredRun(event)

    def _close_run(self) -> None:
        if self._open is not None:
            self._events.append(self._open.close())
            self._open = None

    def _chain(self, node: Pages, page_size: int, previous: bytes) -> bytes:
        tokens = node.tokens
        overlap = len(tokens) // TOKEN_BYTES - len(node)
        step, width = page_size * TOKEN_BYTES, (page_size + overlap) * TOKEN_BYTES
        digests = []
        for start in range(0, len(node) * TOKEN_BYTES, step):
            previous = hashlib.sha256(previous + tokens[start : start + width]).digest()
            digests.append(previous)
        return b"".join(digests)

    def _salt(self, extra_key: Hashable, salt: Hashable) -> str | None:
        """Return the keys that keep readers from sharing text that is not everyone's."""
        if isinstance(extra_key, bytes) and extra_key != self.common_key:
            return NAMESPACE_SALT + extra_key.hex() + ("" if salt is None else f":{salt}")
        if salt is not None and str(salt).startswith(NAMESPACE_SALT):
            # A client's word must not pass for the namespace of another.
            return "kvgraft-salt:" + hashlib.sha256(str(salt).encode("utf-8", "surrogatepass")).hexdigest()
        return None if salt is None else str(salt)

    def _seed(self, namespace: tuple[Hashable, ...]) -> bytes:
        """Digest that starts the chains of a namespace: fields with a presence byte and a length cannot run together.

        Computed for every sequence that begins, not kept: a table of tenants would grow as long as new ones come.
        """
        raw = b"".join(_encode(part) for part in namespace)
        return hashlib.blake2b(raw, digest_size=32, key=self._key, person=b"kvgraft.page").digest()


def _encode(part: Hashable) -> bytes:
    if part is None:
        return b"\0"
    raw = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
    kind = b"\1" if isinstance(part, bytes) else b"\2"
    return kind + len(raw).to_bytes(8, "little") + raw


def _short(digests: bytes) -> tuple[int, ...]:
    """First eight bytes of each digest as signed integers."""
    return tuple(value for (value,) in struct.iter_unpack(">q24x", digests))
