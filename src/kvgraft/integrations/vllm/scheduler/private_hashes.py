"""Keep approximate K/V out of vLLM's prefix cache.

vLLM publishes loaded tokens like computed ones, block by block, under the entries of `Request.block_hashes`; blocks that
fill up later, those of the answer included, get theirs appended. The connector is asked between vLLM's own lookup and the
allocation: the last moment at which a request can be given a list with entries that are its own secret from one block on,
however late they are written. The attribute is no documented interface, so its form is checked where it is read; that vLLM
goes on with the list that it finds there is tried out on its own class at start (`contract.py`).

The last eight bytes of a private hash, all that vLLM's events contain of it by default, are marked under a key of this
process: `is_private` knows them again, of any request and at any time.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from kvgraft.errors import IntegrationError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol, Self

    class HashedRequest(Protocol):
        """The part of vLLM's `Request` that is used."""

        block_hashes: list[bytes]


_MARK_KEY = secrets.token_bytes(32)
_MARK_BYTES = 4


def is_private(block_hash: bytes | int) -> bool:
    """Whether a hash of a block, or its last 64 bits as a number, is a request's secret.

    Complexity: O(1), of nothing that is remembered. A public hash is taken for a private one with probability 2**-32.
    """
    tail = block_hash.to_bytes(8, "big") if isinstance(block_hash, int) else block_hash[-2 * _MARK_BYTES :]
    return _mark(tail[:_MARK_BYTES]) == tail[_MARK_BYTES:]


def is_tainted(request: HashedRequest) -> bool:
    """Whether blocks of the request are kept to itself, because they hold approximate K/V or were to hold them."""
    return isinstance(request.block_hashes, PrivateBlockHashes)


class PrivateBlockHashes(list[bytes]):
    """Hashes of a request's blocks; those from `first_private` on are secret.

    vLLM chains a hash to the entry before it. Nevertheless each entry is made private by itself: the chain is not ours.
    """

    def __init__(self, hashes: Iterable[bytes], first_private: int) -> None:
        super().__init__(hashes)
        self.first_private = first_private
        self.renew()

    def renew(self) -> None:
        """Make all private hashes new: blocks under the old ones are not found any more, not even by the request itself."""
        self._secret = secrets.token_bytes(32)
        for index in range(self.first_private, len(self)):
            super().__setitem__(index, self._private(index, self[index]))

    def widen(self, first_private: int) -> None:
        """Make the hashes from an earlier block on private too; a later one changes nothing."""
        if first_private < self.first_private:
            self.first_private = first_private
            self.renew()

    def append(self, value: bytes) -> None:
        """Append the hash of the next block."""
        super().append(self._private(len(self), value))

    def extend(self, values: Iterable[bytes]) -> None:
        """Append the hashes of the next blocks."""
        for value in values:
            self.append(value)

    def __iadd__(self, values: Iterable[bytes]) -> Self:  # type: ignore[misc,override]
        """As `extend`."""
        self.extend(values)
        return self

    def _private(self, index: int, value: bytes) -> bytes:
        if index < self.first_private:
            return value
        secret = hashlib.blake2b(value, key=self._secret, person=b"kvgraft.priv").digest()[: len(value) - _MARK_BYTES]
        return secret + _mark(secret[-_MARK_BYTES:])


def _mark(value: bytes) -> bytes:
    return hashlib.blake2b(value, key=_MARK_KEY, person=b"kvgraft.mark", digest_size=_MARK_BYTES).digest()


def make_private(request: HashedRequest, first_block: int) -> PrivateBlockHashes:
    """Keep every block of `request` from `first_block` on to itself, those without a hash yet included.

    Raises:
        IntegrationError: The hashes are not a list of bytes; nothing was changed.
    """
    hashes = request.block_hashes
    if isinstance(hashes, PrivateBlockHashes):
        hashes.widen(first_block)
        return hashes
    if type(hashes) is not list or not all(isinstance(value, bytes) for value in hashes):
        raise IntegrationError("vLLM keeps block hashes in another form than a list of bytes: nothing can be grafted")
    private = PrivateBlockHashes(hashes, first_block)
    request.block_hashes = private
    return private
