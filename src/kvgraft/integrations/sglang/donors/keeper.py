"""Donors of one SGLang scheduler: what SGLang's tree holds, and what it evicted and our host store kept."""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvgraft.donors import DonorCatalogue, DonorQuery, new_secret
from kvgraft.donors.front import front_digest
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.integrations.sglang.donors.kv_buffers import Export
from kvgraft.integrations.sglang.donors.slot_texts import SlotTexts, TextPart
from kvgraft.integrations.sglang.donors.texts import STORE, HostBlockKV, Origin, TreeKV, TreeText
from kvgraft.memory import HostKVStore
from kvgraft.memory.store.record import DonorRecord
from kvgraft.reuse.donor_rules import DonorRules
from kvgraft.reuse.stored import is_stored
from kvgraft.reuse.stored_donors import StoredDonors
from kvgraft.types import Match, Namespace

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.config.sglang import SGLangConfig
    from kvgraft.donors import Donor
    from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.memory.block import KVBlock
    from kvgraft.types import DonorId, KeyedNamespace, TokenArray

logger = logging.getLogger(__name__)

_MAX_REPAIRS = 8
"""Lookups per call that may find donors shorter than registered; matches that still are get left out."""


class _DonorText(NamedTuple):
    """A text that is to become a donor; the attributes are those of `Donor`."""

    namespace: Namespace | KeyedNamespace
    tokens: TokenArray
    generation: int
    start_position: int
    front: bytes
    before: TokenArray | None = None
    """All tokens before it, where they are known; no donor keeps them."""

    @classmethod
    def in_tree(cls, text: TreeText, start: int, stop: int) -> Self:
        """Take tokens `[start, stop)` of a path."""
        tokens, before = np.frombuffer(text.tokens[start:stop], np.int64), text.before_at(start)
        front = front_digest(text.namespace.key, before)
        return cls(text.namespace, tokens, text.generation, text.base + start, front, before)


class _Published(NamedTuple):
    """A text that lies in the tree and is not registered yet; its slots on the device."""

    text: TreeText
    start: int
    slots: Tensor


class DonorKeeper:
    """Finds donors, says where their K/V are, and keeps what SGLang evicts. Not thread-safe; one per rank.

    A resident donor that leaves memory stays in the catalogue as a stored one if a store holds it.

    SGLang evicts without telling which text goes, so a donor may turn out shorter than it was registered. Lookups check
    what they hand out and correct the catalogue on the way.

    Every change of the catalogue is the same on all ranks as long as their trees evict the same and nothing fails on one of
    them alone. After that their `digest` differs, until all of them have cleared it.

    Attributes:
        catalogue: Of resident and stored donors.
        stored: The stored ones.
        unwritten: New donors whose text no store holds; None while nothing is written.
        version: Changes with the catalogue.
    """

    def __init__(
        self, tree: DonorTree, buffers: KVBuffers, config: SGLangConfig, *, secret: bytes | None = None
    ) -> None:
        """Make an empty keeper; ranks that serve one request together need one `secret`."""
        self.catalogue = DonorCatalogue(
            config.donor_tokens, min_run=config.min_run, secret=new_secret() if secret is None else secret
        )
        self.version = self._history = 0
        self._tree = tree
        self._buffers = buffers
        self._min_run = config.min_run
        self.stored = StoredDonors(self.catalogue, min_run=config.min_run, max_generation=config.max_generation)
        self.unwritten: deque[Donor] | None = None
        self.rules = DonorRules(
            self.catalogue, min_run=config.min_run, max_generation=config.max_generation, finder=self
        )
        self._host = HostKVStore(config.host_bytes)
        self._host_order: OrderedDict[int, Donor] = OrderedDict()
        self._next_store_key = 0
        self._slot_texts = SlotTexts(buffers.num_slots)
        self._donor_in: dict[TreeText, DonorId] = {}
        self._published: deque[_Published] = deque()

    @property
    def host_bytes(self) -> int:
        """Bytes of donors in host memory."""
        return self._host.used_bytes

    @property
    def digest(self) -> int:
        """A number of 62 bits by which ranks notice that their donors are not the same any more; O(1)."""
        catalogue = self.catalogue
        counts = self.version, len(catalogue), catalogue.num_tokens, len(self._host_order)
        return hash((self._history, *counts)) & (1 << 62) - 1

    @property
    def next_epoch(self) -> int:
        """Above all numbers of donors, and of states of the catalogue, so far."""
        return max(self.version, self.catalogue.next_epoch)

    @property
    def num_published(self) -> int:
        """Texts that are not registered yet."""
        return len(self._published)

    def __len__(self) -> int:
        return len(self.catalogue)

    def find(self, query: DonorQuery) -> list[Match]:
        """Find runs whose K/V are there right now, or in a store unless the query leaves those out.

        Complexity: of `DonorCatalogue.find`, plus one walk in the tree per match.
        """
        for _ in range(_MAX_REPAIRS):
            matches = self.catalogue.find(query)
            # All stale donors are corrected before the next lookup; one lookup for each would be too many.
            stale = [match for match in matches if not self._verify(match)]
            if not stale:
                return matches
        return [match for match in matches if self._verify(match)]

    def publish(self, text: TreeText, start: int, slots: Tensor) -> None:
        """Have `text.tokens[start : start + len(slots)]`, which lie in `slots` (int64) of the tree, registered by `settle`.

        Nothing is waited for here. The caller settles before anything is found, or captured of what the tree gives up.
        """
        self._published.append(_Published(text, start, slots))

    def settle(self) -> None:
        """Register what was published, in its order.

        Raises:
            Exception: One could not be registered. It is lost, those after it still wait.
        """
        while self._published:
            text, start, slots = self._published.popleft()
            self.register(text, start, slots.cpu().numpy())

    def register(self, text: TreeText, start: int, slots: NDArray[np.int64]) -> None:
        """Make `text.tokens[start : start + len(slots)]`, which lie in `slots`, a donor unless they are one already."""
        stop = start + len(slots)
        if not self.rules.admits(stop - start, text.generation):
            return
        tokens = np.frombuffer(text.tokens[start:stop], np.int64)
        self._slot_texts.claim(text, start, slots)
        if self.rules.is_known(text.namespace, tokens, text.generation):
            return
        self._add(_DonorText.in_tree(text, start, stop), TreeKV(text, start))

    def capture(self, freed: Sequence[Tensor]) -> None:
        """Keep what lies in slots that the tree has given up; called before anything is written there."""
        try:
            # Leaves are freed before their parents: backwards, neighbours in a text come one after the other.
            slots = torch.cat(list(reversed(freed)))
            numbers = slots.cpu().numpy()
            parts = list(self._slot_texts.in_slots(numbers))
            self._slot_texts.forget(numbers)  # what lies there next is another text's, also where this one is not kept
            self._cut([part.text for part in parts])
        except BaseException:
            self._slot_texts.clear()  # some of its entries are of slots that are the next text's
            self._cut(list(self._donor_in))
            raise
        for part in parts:
            self._capture(part, slots)

    def has(self, donor: Donor, start: int, length: int) -> bool:
        """Whether `donor.token_ids[start : start + length]` have K/V somewhere."""
        return self._available(donor, start, length) == length

    def wants(self, namespace: Namespace, tokens: array[int], generation: int) -> bool:
        """Whether a text is worth keeping: long enough, of low enough generation, and not known yet."""
        if not self.rules.admits(len(tokens), generation):
            return False
        return not self.rules.is_known(namespace, np.frombuffer(tokens, np.int64), generation)

    def on_device(self, donor: Donor, start: int, length: int) -> tuple[Tensor, object] | None:
        """Pin `donor.token_ids[start : start + length]` in the tree; None if they are not all there.

        Returns:
            Their slots, and the pin, which the caller gives back to the tree.
        """
        kv = donor.kv
        if not isinstance(kv, TreeKV):
            return None
        first = kv.offset + start
        found = self._tree.resident(kv.text, first + length)
        if found.length < first + length:
            return None
        slots = self._tree.slots(found.node)[first : first + length]
        return slots, self._tree.pin(found.node)  # last: where naming the slots fails, nothing is pinned

    def in_host(self, donor: Donor, start: int, length: int) -> KVBlock | None:
        """View K/V of a donor in host memory, or None."""
        kv = donor.kv
        if not isinstance(kv, HostBlockKV) or kv.store_key not in self._host:
            return None
        return self._host.get(kv.store_key, start, length)

    def export(self, donor: Donor, start: int, length: int) -> Export | None:
        """Begin to copy K/V of a donor to host memory; None if it is not all there."""
        kv = donor.kv
        if isinstance(kv, HostBlockKV):
            return Export(self._host.get(kv.store_key, start, length)) if kv.store_key in self._host else None
        # As in `_available`: a question for a part would split a node.
        found = self.on_device(donor, 0, donor.num_tokens)
        if found is None:
            return None
        slots, pin = found
        try:
            return self._buffers.begin_export(slots[start : start + length])
        finally:
            self._tree.unpin(pin)

    def keep(self, donor: Donor, start: int, block: KVBlock) -> bool:
        """Make `donor.token_ids[start : start + block.num_tokens]` a donor in host memory; `donor` may be another's.

        Returns:
            Whether the text is at hand now; it may have been before.
        """
        tokens = donor.token_ids[start : start + block.num_tokens].astype(np.int64)
        if self.rules.is_known(donor.namespace, tokens, donor.generation):
            return True
        position = donor.start_position + start
        front = donor.front_at(start)
        text = _DonorText(donor.namespace, tokens, donor.generation, position, front)
        return self._keep(text, Origin(STORE), lambda: block)

    def record_hit(self, donor: Donor, num_tokens: int) -> None:
        """Count tokens that a donor saved."""
        self.catalogue.record_hit(donor.donor_id, num_tokens)
        self.use(donor)

    def use(self, donor: Donor) -> None:
        """Have the K/V of a donor go after those that were used before."""
        kv = donor.kv
        if isinstance(kv, TreeKV):
            self._tree.touch(kv.text, kv.offset + donor.num_tokens)
        elif isinstance(kv, HostBlockKV) and kv.store_key in self._host_order:
            self._host_order.move_to_end(kv.store_key)

    def clear(self, first_epoch: int = 0) -> None:
        """Forget everything; for a flushed cache.

        Ranks that all pass the highest `next_epoch` of any of them are alike afterwards.
        """
        self.version = max(self.version, first_epoch)
        self._published.clear()
        self.catalogue.reset(first_epoch)
        if self.unwritten is not None:
            self.unwritten.clear()
        self._slot_texts.clear()
        self._donor_in.clear()
        self._host.rebuild()
        self._host_order.clear()
        self.version += 1
        self._history = 0

    def check(self) -> None:
        """Verify the catalogue and the host store, and that every block is a donor's.

        Raises:
            CorruptCacheError: Something does not hold.
        """
        self.catalogue.check()
        self._host.check()
        self._slot_texts.check()
        kept = {kv.store_key for donor in self.catalogue if isinstance(kv := donor.kv, HostBlockKV)}
        if kept != set(self._host_order):
            raise CorruptCacheError("blocks in host memory and their donors are not the same")

    def _verify(self, match: Match) -> bool:
        """Whether a match is there in full; if not, its donor is cut to what is there."""
        donor = self.catalogue.get(match.donor_id)
        if donor is None:
            return False
        if is_stored(donor) or self._available(donor, match.donor_start, match.length) == match.length:
            return True
        kv = donor.kv
        self._leaves_memory(donor)
        if isinstance(kv, TreeKV):
            live = self._tree.resident(kv.text, kv.offset + donor.num_tokens).length - kv.offset
            if live >= self._min_run:
                tokens = donor.token_ids[:live].astype(np.int64)
                left = _DonorText(donor.namespace, tokens, donor.generation, donor.start_position, donor.front)
                self._add(left, kv)
        return False

    def _cut(self, texts: Iterable[TreeText]) -> None:
        """Cut donors of shared paths to what is left of them: what the tree is given there next may have been copied."""
        for text in dict.fromkeys(texts):
            donor_id = self._donor_in.get(text)
            donor = None if donor_id is None else self.catalogue.get(donor_id)
            is_whole = donor is not None and self._verify(Match(0, donor.donor_id, 0, donor.num_tokens))
            if not is_whole and self._donor_in.get(text) == donor_id:  # not where what is left of it took its place
                self._donor_in.pop(text, None)

    def _available(self, donor: Donor, start: int, length: int) -> int:
        kv = donor.kv
        if isinstance(kv, HostBlockKV):
            return length if kv.store_key in self._host else 0
        if not isinstance(kv, TreeKV):
            return 0
        # Asking for all of the donor, not for the part, keeps the tree from splitting a node for every question.
        live = self._tree.resident(kv.text, kv.offset + donor.num_tokens).length - kv.offset
        return max(0, min(length, live - start))

    def _add(self, text: _DonorText, kv: TreeKV | HostBlockKV) -> Donor | None:
        """Make a text a resident donor: the stored one of the same K/V, or a new one."""
        tokens = text.tokens.astype(np.int32)
        record = DonorRecord(text.namespace.key, tokens, text.generation, text.start_position, text.front)
        replaced = self.rules.replaced(text.namespace, text.tokens, text.generation)
        donor = self._promoted(record, kv) or self._new(text, record, kv)
        if donor is not None:
            if isinstance(kv, TreeKV) and kv.text.is_shared:
                self._donor_in[kv.text] = donor.donor_id
            for other in replaced:
                self._replace(other.donor_id, donor.donor_id)
        self._changed(text.tokens)
        return donor

    def _promoted(self, record: DonorRecord, kv: TreeKV | HostBlockKV) -> Donor | None:
        """Return the stored donor of the same K/V, resident from now on; None if there is none."""
        donor_id = None if self.unwritten is None else self.stored.donor_of(record.key)
        if donor_id is None or not is_stored(self.catalogue.get(donor_id)):
            return None
        self.catalogue.rebind(donor_id, kv)
        return self.catalogue.get(donor_id)

    def _new(self, text: _DonorText, record: DonorRecord, kv: TreeKV | HostBlockKV) -> Donor | None:
        """Register a text; one that stores are to have is offered to them."""
        # Adapters are named, and their names may come to mean other weights; what was read is in a store.
        is_ours = isinstance(text.namespace, Namespace) and not text.namespace.adapter
        is_written = self.unwritten is not None and is_ours and not self.stored.covers(record)
        try:
            added = self.catalogue.add(
                text.namespace,
                text.tokens,
                kv,
                generation=text.generation,
                start_position=text.start_position,
                front=text.front,
                before=text.before,
            )
        except CapacityError as error:
            logger.debug("a text of %d tokens does not become a donor: %s", len(text.tokens), error)
            return None
        for evicted in added.evicted:
            if isinstance(evicted.kv, HostBlockKV):
                self._drop_block(evicted.kv.store_key)
        donor = added.donor
        if donor is not None and is_written and self.stored.offer(donor.donor_id, record.key):
            assert self.unwritten is not None
            self.unwritten.append(donor)
        return donor

    def _replace(self, donor_id: DonorId, heir: DonorId) -> None:
        """Drop a donor of a higher generation for a better one of its text; what the tree has of it is evicted in time."""
        donor = self.catalogue.get(donor_id)
        if donor is None:
            return
        self.catalogue.inherit(heir, donor_id)
        self.stored.unbind(donor_id)
        self.catalogue.remove(donor_id)
        if isinstance(donor.kv, HostBlockKV):
            self._drop_block(donor.kv.store_key)

    def _capture(self, part: TextPart, slots: Tensor) -> None:
        if part.length < self._min_run or not self._host.budget_bytes:
            return
        text, stop = part.text, part.start + part.length
        tokens = np.frombuffer(text.tokens[part.start : stop], np.int64)
        if self.rules.is_known(text.namespace, tokens, text.generation):
            return
        kept = _DonorText.in_tree(text, part.start, stop)
        self._keep(kept, text.origin, partial(self._buffers.export, slots[part.first : part.first + part.length]))

    def _keep(self, text: _DonorText, origin: Origin, block: Callable[[], KVBlock]) -> bool:
        """Make a donor of K/V in host memory; False where there is no room."""
        if not self._make_room(len(text.tokens) * self._buffers.bytes_per_token):
            return False
        store_key = self._next_store_key
        self._next_store_key += 1  # first: an entry whose registration breaks off must not find the next block
        donor = self._add(text, HostBlockKV(store_key, origin))
        if donor is None:
            return False
        try:
            self._host.put(store_key, block())
        except BaseException:
            self._leaves_memory(donor)
            raise
        self._host_order[store_key] = donor
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Drop least recently used blocks until `num_bytes` fit."""
        if num_bytes > self._host.budget_bytes:
            return False
        while not self._host.fits(num_bytes):
            store_key, donor = next(iter(self._host_order.items()))
            self._leaves_memory(donor)
            self._drop_block(store_key)
        return True

    def _leaves_memory(self, donor: Donor) -> None:
        """Take a donor whose K/V are gone out of the catalogue, unless a store holds them."""
        if not self.stored.demote(donor.donor_id):
            self.catalogue.remove(donor.donor_id)
        self._changed(donor.token_ids)

    def _changed(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Note which text came or left: two ranks of which each lacks another one have as many."""
        self.version += 1
        # Of numbers, which all processes hash alike.
        self._history = hash((self._history, zlib.crc32(tokens.tobytes())))

    def _drop_block(self, store_key: int) -> None:
        del self._host_order[store_key]
        self._host.remove(store_key)
