"""Writes to stores: the parts of donors that they do not hold yet, once a request has ended.

A conversation that grows is a new donor with every turn, and only what the turn has added is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvgraft.donors import DonorQuery
from kvgraft.engine.stores.stored_cover import StoredCover, StoredPart
from kvgraft.engine.stores.write_behind import BlockPages, PendingWrite, SlotPages, StepExport
from kvgraft.errors import CorruptCacheError
from kvgraft.memory import SlotPool
from kvgraft.memory.store.record import DonorRecord
from kvgraft.reuse.stored import StoredKV
from kvgraft.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.engine.stores.donor_memory import DonorMemory
    from kvgraft.engine.stores.write_behind import PageSource
    from kvgraft.memory import KVBlock
    from kvgraft.memory.store.tier import UsedStore
    from kvgraft.reuse.stored_donors import StoredDonors
    from kvgraft.types import DonorId, KeyedNamespace

LEAST_TOKENS = 64
"""Shorter parts are not stored by themselves: reading one costs as much as a page of 256. They wait for the next turn."""


class SlotReader(NamedTuple):
    """A write that reads the slots of a donor.

    Attributes:
        donor_id: The donor.
        start: Token of the donor with which the write begins. Not looked up in the cover, which forgets what a store has lost
            while the write goes on.
    """

    donor_id: DonorId
    start: int


class Carried(NamedTuple):
    """Parts, writes and stored donors that a text takes over when it becomes a donor.

    Attributes:
        parts: Of the text, that stores have or are given.
        moving: Writes that read its slots from now on, each with the token of the text that it begins with; they read those
            of a donor that goes before.
        superseded: Donors in stores alone that have nothing beside the text.
    """

    parts: tuple[StoredPart, ...] = ()
    moving: tuple[tuple[PendingWrite, int], ...] = ()
    superseded: tuple[DonorId, ...] = ()


class StoreWrites:
    """Writes the parts of the engine's donors that stores do not hold. Not thread-safe.

    Attributes:
        cover: Parts of resident donors that stores hold, or are being given.
    """

    def __init__(self, space: DonorMemory, stores: Sequence[UsedStore], stored: StoredDonors, *, min_run: int) -> None:
        """Begin with nothing; all of `stores` are written."""
        self.cover = StoredCover()
        self._space = space
        self._catalogue = space.donors
        self._stores = stores
        self._stored = stored
        self._least = max(min_run, LEAST_TOKENS)
        self._pending: dict[str, PendingWrite] = {}
        self._sources: dict[str, SlotReader] = {}
        self._export = StepExport()

    @property
    def is_busy(self) -> bool:
        """Whether the outcome of a write is still open."""
        return bool(self._pending)

    @property
    def is_copying(self) -> bool:
        """Whether `step` has something to copy."""
        return self._export.is_busy

    def step(self) -> None:
        """Copy a page, where that is the engine's thread's to do."""
        exported = self._export.step()
        if exported is not None:
            self._submit(exported)

    def carried(
        self,
        namespace: Namespace | KeyedNamespace,
        token_ids: NDArray[np.integer],
        generation: int,
        continued: Collection[DonorId] = (),
        slots: NDArray[np.int64] | None = None,
        *,
        start_position: int,
    ) -> Carried:
        """Return what a text takes over from other donors before it is registered.

        Args:
            namespace: Of the text.
            token_ids: The text.
            generation: Donors of a higher one do not count.
            continued: Donors that the text begins with and that are removed now; their K/V are its own.
            slots: Where its K/V lie; None if not in slots.
            start_position: Position of its first token.
        """
        parts: list[StoredPart] = []
        moving: list[tuple[PendingWrite, int]] = []
        superseded: list[DonorId] = []
        for match in self._catalogue.find(DonorQuery(namespace, token_ids, max_generation=generation)):
            donor = self._catalogue.get(match.donor_id)
            if donor is None:
                continue
            if isinstance(donor.kv, StoredKV):
                is_whole = match.length == donor.num_tokens
                parts.append(StoredPart(match.target_start, match.target_end, donor.kv.key, is_whole))
                if is_whole and not self._catalogue.is_pinned(donor.donor_id):
                    superseded.append(donor.donor_id)
                continue
            inherited = list(self.cover.inherited(match))
            parts += inherited
            if slots is not None and donor.donor_id in continued:
                moving += self._moved_on(donor.donor_id, inherited, slots, start_position)
        return Carried(tuple(parts), tuple(moving), tuple(superseded))

    def _moved_on(
        self, donor_id: DonorId, parts: Iterable[StoredPart], slots: NDArray[np.int64], start_position: int
    ) -> Iterator[tuple[PendingWrite, int]]:
        """Have writes of a donor go on from the slots of the text that continues it, where these are of the same positions.

        The text may say the same once more at others.
        """
        for part in parts:
            if not part.is_whole or part.key not in self._read_from(donor_id):
                continue
            pending = self._pending[part.key]
            if start_position + part.start == pending.record.start_position:
                pending.move(self._pages(slots[part.start : part.stop]))
                del self._sources[part.key]
                yield pending, part.start

    def registered(self, donor_id: DonorId | None, carried: Carried) -> None:
        """Note that the text has become a donor, or has not."""
        if donor_id is None:
            for pending, _ in carried.moving:
                pending.move(None)
            return
        self.cover.add(donor_id, carried.parts)
        for pending, start in carried.moving:
            self._sources[pending.record.key] = SlotReader(donor_id, start)
        for superseded in carried.superseded:
            if self._catalogue.get(superseded) is not None:
                self._catalogue.remove(superseded)
        for part in carried.parts:
            self.bind(donor_id, part)

    def offer(self, donor_ids: Iterable[DonorId]) -> None:
        """Have stores given what they do not have of these donors. Those that are gone are left out."""
        for donor_id in donor_ids:
            donor = self._catalogue.get(donor_id)
            if donor is None or isinstance(donor.kv, StoredKV) or _has_adapter(donor):
                continue
            for start, stop in list(self.cover.missing(donor_id, donor.num_tokens, self._least)):
                self._offer_part(donor, start, stop)

    def _offer_part(self, donor: Donor, start: int, stop: int) -> None:
        record = DonorRecord.of(donor, start, stop)
        key = record.key
        part = StoredPart(start, stop, key, is_whole=True)
        if key not in self._pending and not self._stored.holders(key):
            source = self._source(donor, start, stop)
            pending = PendingWrite(record, self._space.pool.layers, self._space.pool.dtype, source)
            self._pending[key] = pending
            if isinstance(source, SlotPages):
                self._sources[key] = SlotReader(donor.donor_id, start)
            self.cover.add(donor.donor_id, [part])
            if isinstance(source, SlotPages) and self._space.pool.device.type != "cpu":
                self._export.add(pending)
            else:
                self._submit(pending)
            return
        self.cover.add(donor.donor_id, [part])
        self.bind(donor.donor_id, part)

    def _submit(self, pending: PendingWrite) -> None:
        key = pending.record.key
        if self._pending.get(key) is not pending:
            return
        for number, used in enumerate(self._stores):
            if used.writer.offer(pending.record, pending.read):
                pending.waiting_for.add(number)
        if not pending.waiting_for:
            self._end_write(pending)

    def _source(self, donor: Donor, start: int, stop: int) -> PageSource:
        slots = self._space.slots_of(donor)
        if slots is not None:
            return self._pages(slots[start:stop])
        return BlockPages(self._space.host.get(donor.donor_id, start, stop - start))

    def _pages(self, slots: NDArray[np.int64]) -> SlotPages:
        assert isinstance(self._space.pool, SlotPool), "donors of a hybrid model lie on the host"
        return SlotPages(self._space.pool, slots)

    def _read_from(self, donor_id: DonorId) -> dict[str, int]:
        """Writes that read the slots of a donor, by key, and the token of the donor that each begins with."""
        return {key: source.start for key, source in self._sources.items() if source.donor_id == donor_id}

    def stop_reading(self, donor_id: DonorId) -> None:
        """See to it that no writer reads the slots of a donor any more."""
        for key in self._read_from(donor_id):
            del self._sources[key]
            self._pending[key].move(None)

    def bind(self, donor_id: DonorId, part: StoredPart) -> None:
        """Note under which key a donor is stored as a whole, so that it can be demoted.

        An object with the donor's text is not enough: its K/V may be of other positions, or another generation.
        """
        donor = self._catalogue.get(donor_id)
        if donor is None or not part.is_whole or part.stop - part.start != donor.num_tokens:
            return
        if not self._stored.holders(part.key) or self._stored.donor_of(part.key) is not None:
            return
        if DonorRecord.of(donor).key == part.key:
            self._stored.bind(donor_id, part.key)

    def moved(self, donor_id: DonorId, block: KVBlock) -> None:
        """Note that a donor's K/V lie in host memory now and that its slots will be given to others."""
        for key, start in self._read_from(donor_id).items():
            pending = self._pending[key]
            pending.move(BlockPages(block.span(start, pending.record.num_tokens)))
            del self._sources[key]

    def take_written(self, number: int, key: str, *, is_stored: bool) -> None:
        """Take a store's report of a write."""
        pending = self._pending.get(key)
        if pending is None:
            return
        pending.is_stored |= is_stored
        pending.waiting_for.discard(number)
        if not pending.waiting_for:
            self._end_write(pending)

    def lost(self, key: str) -> None:
        """Note that stores do not have an object any more; one that is still being written may come back yet."""
        if key not in self._pending:
            self.cover.lost(key)

    def _end_write(self, pending: PendingWrite) -> None:
        key = pending.record.key
        del self._pending[key]
        self._sources.pop(key, None)
        if not pending.is_stored:
            self.cover.lost(key)
            return
        for donor_id, part in list(self.cover.whole(key)):
            self.bind(donor_id, part)

    def forget(self, donor_id: DonorId) -> list[StoredPart]:
        """Forget a donor whose slots are given to others; returns its parts that are whole objects."""
        self.stop_reading(donor_id)
        return self.cover.forget(donor_id)

    def forget_all(self) -> None:
        """Note that all donors are gone."""
        for pending in self._pending.values():
            pending.move(None)
        self._sources.clear()
        self.cover.clear()

    def clear(self) -> None:
        """Forget what is under way; its outcome is not reported any more."""
        self._export.clear()
        self._pending.clear()
        self._sources.clear()

    def check(self) -> None:
        """Verify that only slots of donors are read; raises `CorruptCacheError`."""
        for key, source in self._sources.items():
            donor = self._catalogue.get(source.donor_id)
            if key not in self._pending or donor is None or self._space.slots_of(donor) is None:
                raise CorruptCacheError(f"a write of {key} reads slots of a donor that is not there")


def _has_adapter(donor: Donor) -> bool:
    """Tell whether K/V depend on an adapter's weights, which the name of the space does not cover."""
    return isinstance(donor.namespace, Namespace) and bool(donor.namespace.adapter)
