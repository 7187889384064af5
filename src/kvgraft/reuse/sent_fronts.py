"""Text before announced donors, each piece of it sent once: a turn that adds 500 tokens to 25,000 sends these.

A conversation's donors have gaps between them, text that was copied; to compute the conversation again takes that, too.
Sender and reader know a text by digests of its beginnings, one per 256 tokens; what follows the longest one that readers have
been sent is sent with the donor. A reader that has missed something, or forgotten it, cannot say what stood before a donor.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors.front import Fronts, front_digest
from kvgraft.reuse.donor_events import TokensBefore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvgraft.reuse.donor_events import DonorPlace

STEP = 256
"""Tokens between two beginnings that are known; as many are sent again at most."""
_MOST_SENT = 1 << 11
"""Beginnings that a sender remembers, those of half a million tokens: fewer than a reader does, so that what that forgets is
sent again."""


class SentFronts:
    """The beginnings of texts that readers have been sent. Not thread-safe."""

    def __init__(self) -> None:
        """Begin with none."""
        self._sent: OrderedDict[bytes, None] = OrderedDict()

    def send(self, namespace_key: bytes, before: NDArray[np.integer], token_ids: NDArray[np.integer]) -> TokensBefore:
        """Return what is to be sent of the text before a donor, and note that readers know it from now on.

        Args:
            namespace_key: Of the donor; keys the digests.
            before: Everything before it, int `(start,)`.
            token_ids: The donor's, which are sent in any case.

        Complexity: O(tokens of both), of hashing.
        """
        base, num_known = b"", 0
        for stop, digest in _beginnings(namespace_key, np.concatenate([before, token_ids])):
            if stop <= len(before) and digest in self._sent:
                base, num_known = digest, stop
            self._sent[digest] = None
            self._sent.move_to_end(digest)
        while len(self._sent) > _MOST_SENT:
            self._sent.popitem(last=False)
        return TokensBefore(base, before[num_known:].astype(np.int32))


class Beginning(NamedTuple):
    """Everything before a donor, as a reader keeps it; `ReceivedFronts.text` gives the tokens.

    Attributes:
        known: Digest of all but the last tokens; empty for none of them.
        rest: The last tokens, fewer than `STEP`.
    """

    known: bytes
    rest: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """`STEP` tokens, and the digest of all before them."""

    before: bytes
    token_ids: NDArray[np.int32]


class ReceivedFronts:
    """The texts before announced donors, as far as they were sent; what several have is kept once. Not thread-safe.

    A text is known by the digest of all of it, so that it stays true when donors go, and when events are lost.
    """

    def __init__(self, max_tokens: int) -> None:
        """Begin with none; of more than `max_tokens` what was not asked for longest is forgotten."""
        self._most = max(1, max_tokens // STEP)
        self._pieces: OrderedDict[bytes, _Piece] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return len(self._pieces) * STEP

    def receive(
        self, namespace_key: bytes, place: DonorPlace, before: TokensBefore, token_ids: NDArray[np.int32]
    ) -> Beginning | None:
        """Take what was sent with a donor; None if it is not all that stands before it, token by token.

        Complexity: O(tokens of the text up to the donor's end), of hashing.
        """
        known = self._known(before.base)
        if known is None:
            return None
        front = np.concatenate([known, before.token_ids])
        if len(front) != place.start or front_digest(namespace_key, front) != place.front:
            return None
        last, num_known, whole = b"", 0, np.concatenate([front, token_ids])
        beginning = Beginning(b"", front)
        for stop, digest in _beginnings(namespace_key, whole):
            self._pieces[digest] = _Piece(last, whole[stop - STEP : stop].copy())
            self._pieces.move_to_end(digest)
            last = digest
            if stop <= len(front):
                num_known = stop
                beginning = Beginning(digest, front[num_known:].copy())
        while len(self._pieces) > self._most:
            self._pieces.popitem(last=False)
        return beginning

    def text(self, beginning: Beginning) -> NDArray[np.int32] | None:
        """Return all tokens before a donor, `(start,)`; None if some of them are forgotten."""
        known = self._known(beginning.known)
        return None if known is None else np.concatenate([known, beginning.rest])

    def _known(self, digest: bytes) -> NDArray[np.int32] | None:
        """Return the text with a digest; its pieces are forgotten last from now on, the first ones after the others."""
        pieces: list[NDArray[np.int32]] = []
        while digest:
            piece = self._pieces.get(digest)
            if piece is None:
                return None
            self._pieces.move_to_end(digest)
            pieces.append(piece.token_ids)
            digest = piece.before
        return np.concatenate([np.empty(0, np.int32), *reversed(pieces)])


def _beginnings(namespace_key: bytes, token_ids: NDArray[np.integer]) -> Iterator[tuple[int, bytes]]:
    """Yield the ends and digests of the beginnings of a text that are known by these."""
    fronts = Fronts(namespace_key, token_ids)
    return ((stop, fronts.up_to(stop)) for stop in range(STEP, len(token_ids) + 1, STEP))
