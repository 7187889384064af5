"""Donors in a stream of KV events: our readers find their text at any offset, readers of others take nothing for a prefix.

A donor is announced as one `BlockStored` with one page that is as long as its text. Routers that know nothing of donors
match pages from the beginning of a prompt, each after its parent. The parent of a donor is a page that no cache ever
stores, so its own page is never reached. Its length mostly is no page size of theirs besides, and
it lies outside the GPU.

The owner stands in `extra_keys` as digests: of the namespace, and of adapter and salt, which is all that a
router knows of a request. The salt itself is never sent. The digests keep tenants apart; they are no secret from
readers of the stream, which carries the text. After them stand the generation as a number if it is above 0, and texts that
begin with a mark: of the donor's place, and of the tokens before it that readers have not been sent yet (`sent_fronts.py`).
Readers of digests alone pass all of these over.
"""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvgraft.donors.front import FRONT_BYTES
from kvgraft.events.event import BlockRemoved, BlockStored
from kvgraft.types import KeyedNamespace, Namespace

if TYPE_CHECKING:
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

    @property
    def start_position(self) -> int:
        """Position of its first token when it was encoded."""

    @property
    def front(self) -> bytes:
        """Digest of all tokens before it then; empty if there were none, or if that is not known."""


OWNERSHIP = "kvgraft"
"""Stands in every event about a donor."""

_MEDIUM = "CPU"
_PLACE, _KEPT_PLACE, _BEFORE = "at:", "goes-on-at:", "before:"
"""Marks of texts in `extra_keys`: of where a donor stands, that one goes on there, and of tokens before it."""
_DIGEST_DIGITS, _NUM_KEY_DIGITS = 2 * FRONT_BYTES, 32
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

    @property
    def namespace(self) -> KeyedNamespace:
        """The namespace, under whose key fronts are digested."""
        return KeyedNamespace(bytes.fromhex(self.namespace_key))


@dataclass(frozen=True, slots=True)
class DonorPlace:
    """Where an announced donor stands: there its K/V are reused as they are, if a prompt has the same text before them.

    Attributes:
        start: Position of its first token.
        front: Digest of all tokens before it (`kvgraft.donors.front`); empty if there are none, or if it is not known.
        goes_on: The engine computed it after copies and has kept all before it, these included, for who goes on from there.
    """

    start: int
    front: bytes
    goes_on: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokensBefore:
    """The end of the text before a donor, from where on readers have not been sent it.

    Attributes:
        base: Digest of the text before `token_ids`, of which readers have been sent all; empty if there is none.
        token_ids: int32 `(n,)`, up to the donor's first token.
    """

    base: bytes
    token_ids: NDArray[np.int32]


def scope_of(adapter: str | None = None, salt: str | None = None) -> str:
    """Digest of what keeps texts of one model apart, as 32 hexadecimal digits; None and empty are the same."""
    raw = (text.encode("utf-8", "surrogatepass") for text in (adapter or "", salt or ""))
    return _digest(b"kvgraft.scope", *raw, size=16).hex()


def donor_stored(
    donor: AnnouncedDonor, scope: str | None = None, *, goes_on: bool = False, before: TokensBefore | None = None
) -> BlockStored:
    """Announce a donor.

    Args:
        donor: Which.
        scope: What `scope_of` gives for adapter and salt as clients name them; None takes these from the donor's
            namespace, where it says them.
        goes_on: See `DonorPlace`.
        before: Tokens before it; None to leave them out.

    Complexity: O(tokens).
    """
    namespace = donor.namespace
    if scope is None and isinstance(namespace, Namespace):
        scope = scope_of(namespace.adapter, namespace.tenant_salt)
    owner = (namespace.key.hex(),) if scope is None else (namespace.key.hex(), scope)
    generation = (donor.generation,) if donor.generation else ()
    place = f"{_KEPT_PLACE if goes_on else _PLACE}{donor.start_position}:{donor.front.hex()}"
    unsent = () if before is None else (_BEFORE + before.base.hex() + ":" + _text_of(before.token_ids),)
    return BlockStored(
        block_hashes=(_hash(donor),),
        parent_block_hash=DONOR_PARENT,
        token_ids=tuple(donor.token_ids.tolist()),
        block_size=len(donor.token_ids),
        medium=_MEDIUM,
        extra_keys=((*owner, *generation, place, *unsent),),
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
    names = [name for name in _texts(event) if ":" not in name]
    if not names or not _is_hexadecimal(names[0], _NUM_KEY_DIGITS):
        return None
    return DonorScope(names[0], names[1] if len(names) > 1 else None)


def donor_place(event: BlockStored) -> DonorPlace | None:
    """Return where an announced donor stands; None where its sender does not say so."""
    for text in _texts(event):
        mark, _, rest = text.partition(":")
        start, _, front = rest.partition(":")
        if mark + ":" not in (_PLACE, _KEPT_PLACE) or not (start.isascii() and start.isdecimal() and len(start) < 10):
            continue
        if not front or _is_hexadecimal(front, _DIGEST_DIGITS):
            return DonorPlace(int(start), bytes.fromhex(front), mark + ":" == _KEPT_PLACE)
    return None


def tokens_before(event: BlockStored) -> TokensBefore | None:
    """Return the tokens before an announced donor that stand in its event; None if there are none."""
    for text in _texts(event):
        if not text.startswith(_BEFORE):
            continue
        base, _, raw = text.removeprefix(_BEFORE).partition(":")
        if base and not _is_hexadecimal(base, _DIGEST_DIGITS):
            return None
        try:
            return TokensBefore(bytes.fromhex(base), np.frombuffer(base64.b64decode(raw, validate=True), "<i4"))
        except ValueError:  # no base64, or no whole tokens
            return None
    return None


def donor_generation(event: BlockStored) -> int:
    """Generation of an announced donor; 0 where nothing is said of it, as by senders that never do."""
    keys = event.extra_keys[0] if event.extra_keys else None
    numbers = [key for key in keys or () if isinstance(key, int) and not isinstance(key, bool)]
    return max(0, numbers[0]) if numbers else 0


def _texts(event: BlockStored) -> list[str]:
    if event.extra_keys is None or len(event.extra_keys) != 1:
        return []
    return [name for name in event.extra_keys[0] or () if isinstance(name, str)]


def _is_hexadecimal(text: str, num_digits: int) -> bool:
    return len(text) == num_digits and not set(text) - set("0123456789abcdef")


def _text_of(token_ids: NDArray[np.int32]) -> str:
    return base64.b64encode(np.ascontiguousarray(token_ids, "<i4").tobytes()).decode()


def _hash(donor: AnnouncedDonor) -> int:
    """A number of the registration, not of the text: two donors may have the same one, and one of them may leave."""
    raw = _digest(b"kvgraft.donor", _PROCESS, donor.namespace.key, donor.donor_id.to_bytes(8, "little"), size=8)
    return int.from_bytes(raw, "big", signed=True)
