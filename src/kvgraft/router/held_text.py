"""Text of one worker: pages as exact prefixes, and text that it can reuse at any offset."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.errors import CapacityError
from kvgraft.events import AllBlocksCleared, BlockStored
from kvgraft.events.log import NAMESPACE_SALT
from kvgraft.reuse.donor_events import donor_generation, donor_place, donor_scope, is_donor
from kvgraft.router.chains import BlockChains, BlockRun
from kvgraft.router.turnover import Turnover
from kvgraft.types import Fidelity, KeyedNamespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from kvgraft.donors import Donor
    from kvgraft.events import BlockHash, BlockRemoved, KVEvent
    from kvgraft.reuse.donor_events import DonorPlace
    from kvgraft.types import DonorId, Match, Namespace

    Tokens = NDArray[np.int32]

_CHAIN_BYTES_PER_TOKEN = 32
"""Memory for chains of pages per token of the limit: all of the text in pages of 16 tokens, an eighth in pages of one."""
_MAX_KEYS_PER_SCOPE = 64
"""Namespaces that one scope may have at a worker: models differ by weights, and by RoPE where it depends on the length."""

_MAX_SCOPES = 65_536
"""Scopes with remembered namespaces; the oldest are forgotten, and their text counts for nothing then."""


_NOWHERE = 1 << 40
"""Place of a donor whose sender does not say where it stands: no prompt is so long."""


class Held(NamedTuple):
    """Tokens of a prompt that a worker holds, verified.

    Attributes:
        exact: At its beginning.
        continued: After these in their own places, after the same text: an engine goes on from them as they are.
        shifted: After the exact ones, elsewhere.
    """

    exact: int
    continued: int
    shifted: int


class HeldText:
    """The text of one worker, learned from its KV events. Not thread-safe.

    A worker that announces donors is believed about these alone: its pages may lie where its grafts cannot read them.
    One that is only said to graft is believed to reuse any text of its pages. Of any other worker nothing but prefixes
    counts.
    """

    def __init__(self, *, grafts: bool, max_tokens: int) -> None:
        """Begin without text.

        Args:
            grafts: The worker reuses text at any offset, and may not announce donors.
            max_tokens: Most text that is remembered, per kind; up to 225 bytes each.
        """
        self._grafts = grafts
        self._chains = BlockChains(max_tokens * _CHAIN_BYTES_PER_TOKEN)
        self._texts = DonorCatalogue(max_tokens)
        self._announces = False
        self._by_hash: dict[BlockHash, DonorId] = {}
        self._of_run: dict[BlockRun, DonorId] = {}
        self._goes_on: set[DonorId] = set()
        self._keys: dict[str, dict[KeyedNamespace, str]] = {}
        self._windowed_groups: set[int] = set()
        self._turnover = Turnover()
        self.adapters: set[str] = set()

    @property
    def grafts(self) -> bool:
        """Whether the worker reuses text at any offset, as configured or seen."""
        return self._grafts or self._announces

    @property
    def num_exact_tokens(self) -> int:
        """Tokens of all pages that are remembered."""
        return self._chains.num_tokens

    @property
    def num_shifted_tokens(self) -> int:
        """Tokens of all text that is remembered for reuse at any offset."""
        return self._texts.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the text that counts: donors where the worker announces them, else pages."""
        return self.num_shifted_tokens if self._announces else self.num_exact_tokens

    @property
    def is_full(self) -> bool:
        """Whether text that came lately has displaced other text, there or in what is remembered of it here.

        Text counts once, however many donors have it. Of a worker that holds more than is remembered, more is of no
        use to who looks here: it is as full as far as is known.
        """
        return self._turnover.is_full

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Take over what a batch says. Complexity: O(n log n) in the tokens of donors, O(n) in those of pages."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                self._removed(event)

    def clear(self) -> None:
        """Forget everything but what kind of worker it is."""
        self._chains.clear()
        self._texts.reset()
        self._by_hash.clear()
        self._of_run.clear()
        self._goes_on.clear()
        self._keys.clear()
        self._turnover.clear()

    def held(self, scope: str, token_ids: Tokens, *, is_grafted: bool = True) -> Held:
        """Find what the worker holds of a prompt. Its last token is always computed, and so never counts as held.

        Args:
            scope: Whose text it may be.
            token_ids: The prompt, int32 `(n,)`.
            is_grafted: Whether the request accepts copies; of one that does not, the exact beginning alone counts.

        Complexity: O(n log n).
        """
        token_ids = token_ids[:-1]
        namespaces = self._keys.get(scope, {})
        names = (scope, *(NAMESPACE_SALT + name for name in namespaces.values()))
        exact = max(self._chains.match(name, token_ids) for name in names)
        if not (self.grafts and is_grafted):
            return Held(exact, 0, 0)
        found = [self._found(key, token_ids, exact) for key in namespaces]
        return max(found, key=lambda held: held.continued + held.shifted, default=Held(exact, 0, 0))

    def check(self) -> None:
        """Verify the invariants; for tests."""
        self._chains.check()
        self._texts.check()
        assert self._goes_on <= {donor.donor_id for donor in self._texts}, "donors that are gone do not go on"

    def _found(self, key: KeyedNamespace, token_ids: Tokens, exact: int) -> Held:
        """Find what the donors of a namespace have of a prompt after its exact beginning.

        Where a text was computed after copies and stands after the same tokens, all before it is there as it was: the worker
        goes on from the end of that, and looks for nothing before.
        """
        matches = self._texts.find(DonorQuery(key, token_ids, start=exact))
        in_place = [match for match in matches if match.fidelity is not Fidelity.SHIFTED]
        reach = max([exact, *(match.target_end for match in in_place if match.donor_id in self._goes_on)])
        continued, shifted = reach - exact, 0
        for match in matches:
            num_tokens = self._alive(match)
            if match.target_end <= reach:
                continue
            if match.target_start < reach:
                num_tokens = min(num_tokens, match.target_end - reach)
            if match.fidelity is Fidelity.SHIFTED:
                shifted += num_tokens
            else:
                continued += num_tokens
        return Held(exact, continued, shifted)

    def _stored(self, event: BlockStored) -> None:
        if event.lora_name and len(self.adapters) < _MAX_SCOPES:
            self.adapters.add(event.lora_name)
        if is_donor(event):
            self._donor_stored(event)
        elif event.kv_cache_spec_sliding_window is not None:
            # Window layers keep a part of what layers of full attention keep, under the same hashes.
            self._windowed_groups.add(event.group_idx or 0)
        else:
            self._note_pages(event)
            added, dropped = self._chains.stored(event)
            self._forget_runs(dropped)
            if not self._announces:
                self._turnover.went(sum(len(run.tokens) for run in dropped))
            if added is not None and self._grafts and not self._announces:
                key = _key_of(added.scope)
                self._note(added.scope, key, added.scope)
                donor_id = self._add_text(key, added.tokens, added)
                if donor_id is not None:
                    self._of_run[added] = donor_id

    def _removed(self, event: BlockRemoved) -> None:
        donors = [donor_id for name in event.block_hashes if (donor_id := self._by_hash.pop(name, None)) is not None]
        for donor_id in donors:
            self._goes_on.discard(donor_id)
            self._note_gone(self._texts.remove(donor_id))
        if is_donor(event):
            self._turnover.went_unknown(len(event.block_hashes) - len(donors))
        elif not donors and event.group_idx not in self._windowed_groups:
            self._pages_removed(event)

    def _pages_removed(self, event: BlockRemoved) -> None:
        before = self._chains.num_held_tokens(event.block_hashes)
        num_unknown = sum(name not in self._chains for name in event.block_hashes)
        self._forget_runs(self._chains.removed(event))
        if not self._announces:
            self._turnover.went(before - self._chains.num_held_tokens(event.block_hashes))
            self._turnover.went_unknown(num_unknown)

    def _note_pages(self, event: BlockStored) -> None:
        """Count pages that came, not those that lie in another place already, nor those of a worker that announces donors."""
        if event.block_hashes and not self._announces:
            num_tokens, num_held = len(event.token_ids), self._chains.num_held_tokens(event.block_hashes)
            self._turnover.came(num_tokens, max(0, num_tokens - num_held), len(event.block_hashes))

    def _note_gone(self, donor: Donor) -> None:
        """Note that a donor has gone: a loss as far as no other donor has its text."""
        self._turnover.went(self._num_new(donor.namespace, donor.token_ids))

    def _num_new(self, key: Namespace | KeyedNamespace, token_ids: ArrayLike) -> int:
        """Count the tokens of a text that no donor has."""
        tokens = np.asarray(token_ids)
        return len(tokens) - sum(match.length for match in self._texts.find(DonorQuery(key, tokens)))

    def _donor_stored(self, event: BlockStored) -> None:
        owner = donor_scope(event)
        if owner is None or len(event.block_hashes) != 1 or event.block_hashes[0] in self._by_hash:
            return
        if not self._announces:
            self._announces = True
            self._forget_texts_of_pages()
            self._turnover.clear()
        name = event.block_hashes[0]
        self._turnover.came(len(event.token_ids), self._num_new(owner.namespace, event.token_ids))
        if owner.scope is not None:
            self._note(owner.scope, owner.namespace, owner.namespace_key)
        place = donor_place(event)
        donor_id = self._add_text(owner.namespace, event.token_ids, name, place, donor_generation(event))
        if donor_id is not None:
            self._by_hash[name] = donor_id
            if place is not None and place.goes_on:
                self._goes_on.add(donor_id)

    def _add_text(
        self,
        key: KeyedNamespace,
        token_ids: ArrayLike,
        owner: BlockHash | BlockRun,
        place: DonorPlace | None = None,
        generation: int = 0,
    ) -> DonorId | None:
        """Make text findable in a namespace, whose scope may have been announced with another text of it."""
        start, front = (_NOWHERE, b"") if place is None else (place.start, place.front)
        try:
            donor, evicted = self._texts.add(
                key, token_ids, owner, generation=generation, start_position=start, front=front
            )
        except CapacityError:
            return None
        for gone in evicted:
            if not isinstance(gone.kv, BlockRun):
                self._by_hash.pop(gone.kv, None)  # type: ignore[call-overload]
                self._goes_on.discard(gone.donor_id)
                self._note_gone(gone)
        return None if donor is None else donor.donor_id

    def _note(self, scope: str, key: KeyedNamespace, namespace: str) -> None:
        keys = self._keys.setdefault(scope, {})
        if len(keys) < _MAX_KEYS_PER_SCOPE:
            keys[key] = namespace
        if len(self._keys) > _MAX_SCOPES:
            del self._keys[next(iter(self._keys))]

    def _alive(self, match: Match) -> int:
        """Count the tokens of a match that are still held: of a run of pages some may be gone."""
        donor = self._texts.get(match.donor_id)
        if donor is None or not isinstance(donor.kv, BlockRun):
            return match.length
        size, media = donor.kv.page_size, donor.kv.media
        first, last = match.donor_start, match.donor_start + match.length
        return sum(
            min(last, (page + 1) * size) - max(first, page * size)
            for page in range(first // size, -(-last // size))
            if media[page]
        )

    def _forget_runs(self, runs: Iterable[BlockRun]) -> None:
        for run in runs:
            donor_id = self._of_run.pop(run, None)
            if donor_id is not None and self._texts.get(donor_id) is not None:
                self._texts.remove(donor_id)

    def _forget_texts_of_pages(self) -> None:
        self._texts.reset()
        self._of_run.clear()
        self._keys.clear()


def _key_of(scope: str) -> KeyedNamespace:
    """Return a namespace for the pages of a scope, which name none."""
    return KeyedNamespace(hashlib.blake2b(scope.encode(), digest_size=16, person=b"kvgraft.router").digest())
