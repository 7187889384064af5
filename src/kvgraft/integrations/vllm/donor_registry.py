"""Which computed text becomes a donor: the catalogue, what is being captured for it, and the memory of both."""

from __future__ import annotations

import hashlib
from itertools import count
from typing import TYPE_CHECKING

from kvgraft.donors import DonorCatalogue
from kvgraft.errors import KVGraftError
from kvgraft.integrations.vllm.messages import Seal
from kvgraft.integrations.vllm.request_state import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.messages import PieceId
    from kvgraft.types import DonorId, Match, Namespace


class DonorRegistry:
    """Decides what workers keep in host memory. Their budgets hold because every token is counted before it is captured.

    Invariant: tokens of donors and of pieces are together at most `catalogue.capacity_tokens`.
    """

    def __init__(self, capacity_tokens: int, *, min_run: int, max_generation: int) -> None:
        self.catalogue = DonorCatalogue(capacity_tokens, min_run=min_run)
        self.num_refused_pieces = 0
        self._min_run = min_run
        self._max_generation = max_generation
        self._piece_ids = count()
        self._reserved: dict[PieceId, int] = {}
        self._reserved_tokens = 0
        self._drops: list[DonorId] = []
        self._discards: list[PieceId] = []
        self._seals: list[Seal] = []

    @property
    def reserved_tokens(self) -> int:
        """Tokens of pieces."""
        return self._reserved_tokens

    def open(self, start: int, stop: int, generation: int) -> Piece | None:
        """Make room for the text of positions `[start, stop)`; None if it is too short, too derived or does not fit."""
        if stop - start < self._min_run or generation > self._max_generation:
            return None
        piece = Piece(next(self._piece_ids), start, stop, generation, start)
        self._reserved[piece.piece_id] = 0
        if self.extend(piece, stop):
            return piece
        del self._reserved[piece.piece_id]
        self.num_refused_pieces += 1
        return None

    def open_output(self, start: int, generation: int) -> Piece | None:
        """Begin text whose length is not known; `extend` makes room as it grows."""
        if generation > self._max_generation:
            return None
        piece = Piece(next(self._piece_ids), start, start, generation, start)
        self._reserved[piece.piece_id] = 0
        return piece

    def extend(self, piece: Piece, stop: int) -> bool:
        """Make room for the piece to reach `stop`, dropping donors of least value; False if that does not do."""
        wanted = stop - piece.start - self._reserved[piece.piece_id]
        catalogue = self.catalogue
        short = catalogue.num_tokens + self._reserved_tokens + wanted - catalogue.capacity_tokens
        if short > 0:
            self._drops += [donor.donor_id for donor in catalogue.evict(short)]
        if catalogue.num_tokens + self._reserved_tokens + wanted > catalogue.capacity_tokens:
            return False
        piece.stop = stop
        self._reserved[piece.piece_id] += wanted
        self._reserved_tokens += wanted
        return True

    def register(self, namespace: Namespace, token_ids: NDArray[np.int32], piece: Piece) -> DonorId | None:
        """Turn a complete piece into a donor; the caller tells workers. None if the text cannot become one."""
        self._release(piece)
        context = hashlib.blake2b(token_ids[: piece.start].tobytes(), digest_size=16).digest() if piece.start else b""
        try:
            added = self.catalogue.add(
                namespace,
                token_ids[piece.start : piece.next],
                None,
                generation=piece.generation,
                start_position=piece.start,
                context=context,
            )
        except KVGraftError:
            added = None
        if added is not None:
            self._drops += [donor.donor_id for donor in added.evicted]
        if added is None or added.donor is None:
            self._discards.append(piece.piece_id)
            return None
        return added.donor.donor_id

    def seal(self, namespace: Namespace, token_ids: NDArray[np.int32], piece: Piece) -> None:
        """Register a piece that was complete in an earlier step, if there is enough of it."""
        if piece.next - piece.start < self._min_run:
            self.abandon(piece)
            return
        donor_id = self.register(namespace, token_ids, piece)
        if donor_id is not None:
            self._seals.append(Seal(piece.piece_id, donor_id))

    def abandon(self, piece: Piece | None) -> None:
        """Give up a piece."""
        if piece is not None and piece.piece_id in self._reserved:
            self._release(piece)
            self._discards.append(piece.piece_id)

    def supersede(self, matches: Iterable[Match]) -> None:
        """Drop donors that a text about to be registered from its first token on begins with."""
        for match in matches:
            donor = self.catalogue.get(match.donor_id)
            if donor is None or self.catalogue.is_pinned(match.donor_id):
                continue
            if match.target_start == donor.start_position == 0 and match.length == donor.num_tokens:
                self.forget(match.donor_id)

    def forget(self, donor_id: DonorId) -> None:
        """Drop a donor; one that is gone is ignored."""
        if self.catalogue.get(donor_id) is not None:
            self.catalogue.remove(donor_id)
            self._drops.append(donor_id)

    def take_news(self) -> tuple[tuple[Seal, ...], tuple[PieceId, ...], tuple[DonorId, ...]]:
        """Seals, discards and drops since the last call."""
        news = tuple(self._seals), tuple(self._discards), tuple(self._drops)
        self._seals, self._discards, self._drops = [], [], []
        return news

    def check(self) -> None:
        """Verify the invariant and the catalogue's; raises `CorruptCacheError`."""
        self.catalogue.check()
        assert self._reserved_tokens == sum(self._reserved.values())
        assert self.catalogue.num_tokens + self._reserved_tokens <= self.catalogue.capacity_tokens

    def _release(self, piece: Piece) -> None:
        self._reserved_tokens -= self._reserved.pop(piece.piece_id)
