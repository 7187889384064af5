"""Donors in a stream of KV events: our readers find their text at any offset, readers of others take nothing for a prefix.

A donor is announced as one `BlockStored` with one page that is as long as its text. Routers that know nothing of donors
match pages from the beginning of a prompt, each after its parent. The parent of a donor is a page that no cache ever
stores, so its own page is never reached. Its length mostly is no page size of theirs besides, and
it lies outside the GPU.

The owner stands in `extra_keys` as digests: of the namespace, and of adapter and salt, which is all that a
router knows of a request. The salt itself is never sent. The digests keep tenants apart; they are no secret from
readers of the stream, which carries the text. After them stands the generation as a number if it is above 0; readers of
digests alone pass numbers over.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvgraft.prefix.events.event import BlockRemoved, BlockStored
from kvgraft.types import Namespace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Keyed(Protocol):
    """A namespace, or no more than its key, as of a donor that was read from a store."""

    @property
    def key(self) -> bytes:
        """16 bytes that stand for model state, adapter and salt."""


class AnnouncedDonor(Protocol):
    """The part of a donor that is announced; `kvgraft.donors.Donor` has it."""

    @property
    def donor_id(self) -> int:
        """Never given out twice by one catalogue."""

    @property
    def namespace(self) -> Keyed:
        """Its owners: who may reuse it."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Its text `(num_tokens,)`."""

    @property
    def generation(self) -> int:
        """0 for K/V that attended to exact ones alone."""


OWNERSHIP = "kvgraft"
"""Stands in every event about a donor."""

_MEDIUM = "CPU"
_PROCESS = os.urandom(16)
"""Keeps hashes of this process apart from those that it had before a restart."""


def _digest(person: bytes, *parts: bytes, size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=size, person=person)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


DONOR_PARENT = int.from_bytes(_digest(b"kvgraft.orphan", size=8), "big", signed=True)
"""The parent page of every donor, which no cache stores."""


@dataclass(frozen=True, slots=True)
class DonorScope:
    """The owners of an announced donor: who may reuse it."""

    namespace_key: str
    """Digest of model state, adapter and salt, in hexadecimal."""
    scope: str | None
    """What `scope_of` gives for adapter and salt; None if the sender knows the namespace by its key alone."""


def scope_of(adapter: str | None = None, salt: str | None = None) -> str:
    """Digest of what keeps texts of one model apart, as 32 hexadecimal digits; None and empty are the same."""
    raw = (text.encode("utf-8", "surrogatepass") for text in (adapter or "", salt or ""))
    return _digest(b"kvgraft.scope", *raw, size=16).hex()


def donor_stored(donor: AnnouncedDonor, scope: str | None = None) -> BlockStored:
    """Announce a donor.

    Args:
        donor: Which.
        scope: What `scope_of` gives for adapter and salt as clients name them; None takes these from the donor's
            namespace, where it says them.

    Complexity: O(tokens).
    """
    namespace = donor.namespace
    if scope is None and isinstance(namespace, Namespace):
        scope = scope_of(namespace.adapter, namespace.tenant_salt)
    owner = (namespace.key.hex(),) if scope is None else (namespace.key.hex(), scope)
    generation = (donor.generation,) if donor.generation else ()
    return BlockStored(
        block_hashes=(_hash(donor),),
        parent_block_hash=DONOR_PARENT,
        token_ids=tuple(donor.token_ids.tolist()),
        block_size=len(donor.token_ids),
        medium=_MEDIUM,
        extra_keys=((*owner, *generation),),
        locality="LOCAL",
        ownership=OWNERSHIP,
    )


def donor_removed(donor: AnnouncedDonor) -> BlockRemoved:
    """Announce that a donor of this process is gone."""
    return BlockRemoved((_hash(donor),), _MEDIUM, locality="LOCAL", ownership=OWNERSHIP)


def is_donor(event: BlockStored | BlockRemoved) -> bool:
    """Return whether an event is about a donor, and so never about a prefix.

    False of a removal in a stream that leaves ownership out, although its hash is a donor's.
    """
    return event.ownership == OWNERSHIP or (isinstance(event, BlockStored) and event.parent_block_hash == DONOR_PARENT)


def donor_scope(event: BlockStored) -> DonorScope | None:
    """Return the owners of an announced donor; None if it does not name them, and then it must not be used for anyone."""
    if event.extra_keys is None or len(event.extra_keys) != 1:
        return None
    names = [name for name in event.extra_keys[0] or () if isinstance(name, str)]
    return DonorScope(names[0], names[1] if len(names) > 1 else None) if names else None


def donor_generation(event: BlockStored) -> int:
    """Generation of an announced donor; 0 where nothing is said of it, as by senders that never do."""
    keys = event.extra_keys[0] if event.extra_keys else None
    numbers = [key for key in keys or () if isinstance(key, int) and not isinstance(key, bool)]
    return max(0, numbers[0]) if numbers else 0


def _hash(donor: AnnouncedDonor) -> int:
    """A number of the registration, not of the text: two donors may have the same one, and one of them may leave."""
    raw = _digest(b"kvgraft.donor", _PROCESS, donor.namespace.key, donor.donor_id.to_bytes(8, "little"), size=8)
    return int.from_bytes(raw, "big", signed=True)
