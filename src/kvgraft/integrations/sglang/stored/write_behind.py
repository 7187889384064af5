"""Bring new donors into stores, after the requests that computed them.

K/V of a text in SGLang's tree are gathered piece by piece, so that the scheduler is never held up for long, and without
holding slots: every piece is copied out of slots that are looked up anew. A text that is evicted in between is given up; what
host memory has kept of it is a donor of its own and comes next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.integrations.sglang.donors.texts import HostBlockKV
from kvgraft.memory.block import KVBlock
from kvgraft.memory.store.record import DonorRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.donors import Donor
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.donors.kv_buffers import Export
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.memory.store.tier import StoreWriter

PIECE_BYTES = 8 << 20
"""K/V copied in one go: 24 ms on two cores with other work, from scattered slots; less of a GPU's bus (not measured)."""
MAX_QUEUED_BYTES = 512 << 20
"""K/V in host memory that wait to be written, at most, unless a single text has more."""
_MAX_WAITING = 4096
"""Donors that wait to be gathered; the oldest are given up."""


@dataclass(slots=True)
class _Gathering:
    """A donor whose K/V are being copied."""

    donor: Donor
    pieces: list[Export] = field(default_factory=list)
    next_token: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last piece was begun."""
        return self.next_token >= self.donor.num_tokens

    @property
    def has_arrived(self) -> bool:
        """Whether all pieces are in host memory."""
        return self.is_complete and all(piece.is_ready for piece in self.pieces)


class WriteBehind:
    """Offers new donors to writers. Not thread-safe.

    Ranks that serve requests together call it at the same points. It looks into the tree by their common decisions alone,
    for every look counts as a use of what it finds, and trees of ranks must evict the same.
    """

    def __init__(self, keeper: DonorKeeper, ranks: Ranks, bytes_per_token: int) -> None:
        self._keeper, self._ranks = keeper, ranks
        self._bytes_per_token = bytes_per_token
        self._piece_tokens = max(1, PIECE_BYTES // bytes_per_token)
        self._gathering: _Gathering | None = None
        self._arriving: deque[_Gathering] = deque()
        self._writers: Sequence[StoreWriter] = ()

    @property
    def is_idle(self) -> bool:
        """Whether every donor was offered."""
        return not self._keeper.unwritten and self._gathering is None and not self._arriving

    def pieces_of(self, num_tokens: int) -> int:
        """Pieces of so many tokens, one at least."""
        return max(1, -(-num_tokens // self._piece_tokens))

    def begin(self, writers: Sequence[StoreWriter]) -> None:
        """Offer donors that are new from now on."""
        self._writers = writers
        self._keeper.unwritten = deque(maxlen=_MAX_WAITING)

    def end(self) -> None:
        """Forget what was not offered."""
        self._writers, self._keeper.unwritten = (), None
        self._arriving.clear()
        self._gathering = None

    def has_room(self) -> bool:
        """Whether something waits to be copied, and every rank has room for it. The ranks' exchange; `work` has none.

        Whether something waits may be a matter of the rank, where a registration failed.
        """
        waits = bool(self._keeper.unwritten or self._gathering)
        return bool(self._ranks.lowest([waits and self._has_room_here()])[0])

    def work(self, num_pieces: int) -> None:
        """Copy at most `num_pieces` pieces, and offer what is complete."""
        self._offer_arrived()
        for _ in range(num_pieces):
            if self._gathering is None:
                if not self._keeper.unwritten:
                    break
                self._gathering = _Gathering(self._keeper.unwritten.popleft())
            self._copy_piece(self._gathering)
        self._offer_arrived()

    def _has_room_here(self) -> bool:
        arriving = sum(each.donor.num_tokens for each in self._arriving) * self._bytes_per_token
        return any(writer.queued_bytes + arriving < MAX_QUEUED_BYTES // 2 for writer in self._writers)

    def _offer_arrived(self) -> None:
        while self._arriving and self._arriving[0].has_arrived:
            self._offer(self._arriving.popleft())

    def _copy_piece(self, gathering: _Gathering) -> None:
        donor, start = gathering.donor, gathering.next_token
        # What host memory has is copied by the writer's thread.
        length = donor.num_tokens if isinstance(donor.kv, HostBlockKV) else self._piece_tokens
        piece = self._keeper.export(donor, start, min(length, donor.num_tokens - start))
        if piece is None:
            self._gathering = None
            return
        gathering.pieces.append(piece)
        gathering.next_token += piece.num_tokens
        if gathering.is_complete:
            self._arriving.append(gathering)
            self._gathering = None

    def _offer(self, gathering: _Gathering) -> None:
        donor = gathering.donor
        record = DonorRecord.of(donor)
        blocks = [piece.block for piece in gathering.pieces]
        for writer in self._writers:
            writer.offer(record, lambda: KVBlock.join(blocks))
