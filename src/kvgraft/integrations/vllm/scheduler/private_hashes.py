"""Keep approximate K/V out of vLLM's prefix cache, but for requests that go on from the same text and accept copies.

vLLM publishes loaded tokens like computed ones, block by block, under the entries of `Request.block_hashes`; blocks that
fill up later, those of the answer included, get theirs appended. The connector is asked between vLLM's own lookup and the
allocation: the last moment at which a request can be given a list with other entries from one block on, however late they
are written. The attribute is no documented interface, so its form is checked where it is read; that vLLM goes on with the
list that it finds there is tried out on its own class at start (`contract.py`).

Entries are a request's own secret, or names that follow from its text (`ContinuationNames`): the next turn of a conversation
makes the same ones, and vLLM finds and shares the blocks as it does exact ones. No request that was not given such a list
can.

The last eight bytes of either, all that vLLM's events contain of it by default, are marked under a key of this process:
`is_private` knows them again, of any request and at any time.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import IntegrationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Protocol, Self

    class HashedRequest(Protocol):
        """The part of vLLM's `Request` that is used."""

        block_hashes: list[bytes]

        @property
        def all_token_ids(self) -> Sequence[int]:
            """Prompt and answer so far."""


_MARK_KEY = secrets.token_bytes(32)
_MARK_BYTES = 4
_LEAST_BYTES = 16
"""Of hashes that can stand for a text: of shorter ones two texts could have the same."""


def is_private(block_hash: bytes | int) -> bool:
    """Whether a hash of a block, or its last 64 bits as a number, is none that vLLM made.

    Complexity: O(1), of nothing that is remembered. A public hash is taken for a private one with probability 2**-32.
    """
    tail = block_hash.to_bytes(8, "big") if isinstance(block_hash, int) else block_hash[-2 * _MARK_BYTES :]
    return _mark(tail[:_MARK_BYTES]) == tail[_MARK_BYTES:]


def is_tainted(request: HashedRequest) -> bool:
    """Whether blocks of the request are kept from exact requests, because they hold approximate K/V or were to hold them."""
    return isinstance(request.block_hashes, PrivateBlockHashes)


class ContinuationNames:
    """Makes the names of blocks that requests go on from. They mean something in this process and epoch alone.

    Attributes:
        epoch: Raised by `renew`.
        top: Highest generation of blocks that were named in this epoch, 0 for none.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.renew()

    def renew(self) -> None:
        """Make other names from now on: what lies under those so far is never found again."""
        self.epoch += 1
        self.top = 0
        self._secret = secrets.token_bytes(32)

    def name(self, front: bytes, generation: int, size: int) -> bytes:
        """Return the name, `size` bytes, of a block that ends with the text `front`, a digest, and is of `generation`."""
        digest = hashlib.blake2b(
            front, key=self._secret, person=b"kvgraft.goes_on", salt=generation.to_bytes(2, "little")
        )
        return _marked(digest.digest(), size)


class BlockFronts:
    """Digests of all tokens of a request up to the end of each block, in its namespace; made when they are asked for."""

    def __init__(self, namespace_key: bytes, request: HashedRequest, block_size: int) -> None:
        """Begin with none; tokens that were digested must not change."""
        self._request = request
        self._block_size = block_size
        self._digest = hashlib.blake2b(digest_size=32, key=namespace_key, person=b"kvgraft.front")
        self._made: list[bytes] = []

    def at(self, index: int) -> bytes:
        """Return the digest of block `index`. Complexity: O(tokens that were not digested yet)."""
        missing = index + 1 - len(self._made)
        if missing > 0:
            start = len(self._made) * self._block_size
            tokens = self._request.all_token_ids[start : (index + 1) * self._block_size]
            for block in np.asarray(tokens, "<i8").reshape(missing, self._block_size):
                self._digest.update(block.tobytes())
                self._made.append(self._digest.digest())
        return self._made[index]


@dataclass(slots=True, eq=False)
class SharedNames:
    """What a request's blocks are called for those that go on from it.

    Attributes:
        epoch: Of `names`; of another one, the blocks have no names any more.
        steps: Ascending `(block, generation)`: from each block on the K/V are of that generation at most; 0 for another
            text's, from which no request goes on.
    """

    names: ContinuationNames
    fronts: BlockFronts
    epoch: int
    steps: list[tuple[int, int]]

    def name(self, index: int, size: int) -> bytes | None:
        """Return the name of a block, or None if it has none."""
        generation = self.generation_at(index)
        if not generation or self.names.epoch != self.epoch or size < _LEAST_BYTES:
            return None
        return self.names.name(self.fronts.at(index), generation, size)

    def generation_at(self, index: int) -> int:
        """Return the generation of a block; 0 for none."""
        return next((generation for block, generation in reversed(self.steps) if block <= index), 0)


class PrivateBlockHashes(list[bytes]):
    """Hashes of a request's blocks; those from `first_private` on are none that another request is given by vLLM.

    vLLM chains a hash to the entry before it. Nevertheless each entry is made private by itself: the chain is not ours.
    """

    def __init__(self, hashes: Iterable[bytes], first_private: int, shared: SharedNames | None = None) -> None:
        super().__init__(hashes)
        self.first_private = first_private
        self._shared = shared
        self.rename()

    @property
    def is_shared(self) -> bool:
        """Whether others may find its blocks, which are of the present model."""
        return self._shared is not None and self._shared.epoch == self._shared.names.epoch

    def generation_before(self, stop: int) -> int:
        """Return the highest generation of the blocks before block `stop`; 0 where none has a name."""
        return 0 if self._shared is None or stop <= self.first_private else self._shared.generation_at(stop - 1)

    def renew(self) -> None:
        """Make all private hashes new and secret: blocks under the old ones are not found any more, not even by itself."""
        self._shared = None
        self.rename()

    def widen(self, first_private: int) -> None:
        """Make the hashes from an earlier block on private too; a later one changes nothing."""
        if first_private < self.first_private:
            self.first_private = first_private
            self.rename()

    def name_by(self, shared: SharedNames) -> None:
        """Call blocks as `shared` says from now on; those that it has no name for stay secret."""
        self._shared = shared
        self.rename()

    def share_from(self, first: int, generation: int) -> None:
        """Let those find the blocks from `first` on that go on from the same text; those before keep their names."""
        assert self._shared is not None, "names are given first"
        kept = [step for step in self._shared.steps if step[0] < first]
        self._shared.steps = [*kept, (first, generation)]
        self.rename()

    def hide_from(self, first: int) -> None:
        """Hide the blocks from `first` on from all, the request itself included; those before keep their names."""
        if self.is_shared:
            self.share_from(first, 0)
        else:
            self.renew()

    def rename(self) -> None:
        """Make all secret hashes new: blocks under the old ones are not found any more. Names stay what they are."""
        self._secret = secrets.token_bytes(32)
        for index in range(self.first_private, len(self)):
            super().__setitem__(index, self._private(index, self[index]))

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
        name = None if self._shared is None else self._shared.name(index, len(value))
        if name is not None:
            return name
        secret = hashlib.blake2b(value, key=self._secret, person=b"kvgraft.priv", salt=index.to_bytes(8, "little"))
        return _marked(secret.digest(), len(value))


def _marked(digest: bytes, size: int) -> bytes:
    """Return `size` bytes, the last of which tell that they are private."""
    head = digest[: size - _MARK_BYTES]
    return head + _mark(head[-_MARK_BYTES:])


def _mark(value: bytes) -> bytes:
    return hashlib.blake2b(value, key=_MARK_KEY, person=b"kvgraft.mark", digest_size=_MARK_BYTES).digest()


def make_private(request: HashedRequest, first_block: int) -> PrivateBlockHashes:
    """Keep every block of `request` from `first_block` on from vLLM's other requests, those without a hash yet included.

    Raises:
        IntegrationError: The hashes are not a list of bytes; nothing was changed.
    """
    hashes = request.block_hashes
    if isinstance(hashes, PrivateBlockHashes):
        hashes.widen(first_block)
        return hashes
    _require_list(hashes)
    private = PrivateBlockHashes(hashes, first_block)
    request.block_hashes = private
    return private


def continued_hashes(hashes: list[bytes], shared: SharedNames, first_block: int) -> PrivateBlockHashes:
    """Return `hashes` with names from `first_block` on, for a lookup of what a request goes on from.

    Raises:
        IntegrationError: The hashes are not a list of bytes.
    """
    _require_list(hashes)
    return PrivateBlockHashes(hashes, first_block, shared)


def _require_list(hashes: object) -> None:
    if type(hashes) is not list or not all(isinstance(value, bytes) for value in hashes):
        raise IntegrationError("vLLM keeps block hashes in another form than a list of bytes: nothing can be grafted")
