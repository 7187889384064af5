"""What sessions go on from: approximate K/V in their places, in SGLang's tree under names that no request can ask for.

A text begins where the exact tree ended when the first turn of it was answered, and every turn adds what is new. The tree
cannot share slots, so the next turn copies the text; turns with the same text lie there once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvgraft.donors import Donor
from kvgraft.donors.front import Fronts
from kvgraft.integrations.sglang.donors.names import PrivateNames
from kvgraft.integrations.sglang.donors.slot_texts import SlotTexts
from kvgraft.integrations.sglang.donors.texts import UNKNOWN, Origin, TreeKV, TreeText
from kvgraft.integrations.sglang.planning.spans import LoadSpan
from kvgraft.reuse.continuation import continuation_key
from kvgraft.types import CONTINUATION, Fidelity

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.sglang.donors.slot_texts import TextPart
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.types import Namespace

_REMEMBERED = 1024
"""Beginnings of texts that are looked for; a lookup digests a prompt at all those of its namespace."""


class _Front(NamedTuple):
    """All tokens before a text: whose they are, how many, and their digest."""

    namespace_key: bytes
    start: int
    digest: bytes


class HeldPart(NamedTuple):
    """Positions `[start, stop)` of a request that went on from what `origin` had there."""

    start: int
    stop: int
    origin: Origin


class _Noted(NamedTuple):
    """A call of `Continuations.note`."""

    text: TreeText
    known: int
    slots: Tensor
    held: Sequence[HeldPart]


@dataclass(eq=False)
class Continuations:
    """Names the texts that requests give the tree, and finds those that a prompt goes on from. Not thread-safe.

    Attributes:
        page_size: Tokens of a page.
        min_run: Shortest text that is worth going on from: what is computed after it is approximate.
        num_slots: Of the pool.
        version: Changes with what can be found.
    """

    tree: DonorTree
    page_size: int
    min_run: int
    num_slots: int
    names: PrivateNames = field(default_factory=PrivateNames)
    version: int = field(default=0, init=False)
    _begun: OrderedDict[_Front, set[int]] = field(default_factory=OrderedDict, init=False)
    _holders: SlotTexts = field(init=False)
    _noted: deque[_Noted] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        """Nothing lies in any slot yet."""
        self._holders = SlotTexts(self.num_slots)

    def find(self, namespace: Namespace, tokens: array[int], prefix_len: int, end: int) -> LoadSpan | None:
        """Return the longest text that a prompt goes on from after its exact prefix, of equal ones the least often copied.

        Positions from `end` on are computed. What begins after the exact prefix is not found.

        Complexity: O(tokens), and a walk in the tree for every text with the same front.
        """
        best: tuple[int, int, TreeText] | None = None
        for text in self._texts(namespace, tokens[: end // self.page_size * self.page_size], prefix_len):
            stop = text.base + self.tree.resident(text, len(text.tokens)).length
            if best is None or (stop, -text.generation) > best[:2]:
                best = stop, -text.generation, text
        if best is None or best[0] - prefix_len < self.min_run:
            return None
        stop, _, text = best
        own = np.frombuffer(text.tokens[: stop - text.base], np.int64).astype(np.int32)
        donor = Donor(
            CONTINUATION,
            namespace,
            own,
            TreeKV(text, 0),
            generation=text.generation,
            start_position=text.base,
            front=text.front_at(0),
        )
        return LoadSpan(prefix_len, stop - prefix_len, donor, prefix_len - text.base, fidelity=Fidelity.CONTINUED)

    def text(self, namespace: Namespace, tokens: array[int], first: int, generation: int, origin: Origin) -> TreeText:
        """Name what a request has from `first` on, whole pages, as a part of a text that has all before it, if there is one.

        Args:
            namespace: Of the request.
            tokens: All that it has K/V of.
            first: Where the exact tree ends; the slots before are not the request's.
            generation: Highest of its K/V.
            origin: The request.
        """
        for text in self._texts(namespace, tokens, first, generation):
            before = first - text.base
            if self.tree.resident(text, before).length >= before:
                return replace(text, origin=origin)
        digest = Fronts(namespace.key, np.frombuffer(tokens[:], np.int64)).up_to(first)
        return self._named(namespace, tokens, _Front(namespace.key, first, digest), generation, origin)

    def note(self, text: TreeText, known: int, slots: Tensor, held: Sequence[HeldPart]) -> None:
        """Have a text found that the tree was given. The device is not waited for.

        Args:
            text: With its request as the origin.
            known: Tokens of it that the tree had already, of others: they may have had other K/V.
            slots: int64, of all of it.
            held: What its request went on from.
        """
        self._noted.append(_Noted(text, known, slots, held))
        front = _Front(text.namespace.key, text.base, text.front_at(0))
        self._begun.setdefault(front, set()).add(text.generation)
        self._begun.move_to_end(front)
        if len(self._begun) > _REMEMBERED:
            self._begun.popitem(last=False)
        self.version += 1

    def held_by(self, slots: Tensor) -> list[TextPart]:
        """Return parts of a path's `slots` with the K/V of one request each, `text.origin`. Waits for the device."""
        self._settle()
        return list(self._holders.in_slots(slots.cpu().numpy()))

    def forget(self, freed: Sequence[Tensor]) -> None:
        """Note which slots the tree has given up; called before anything is written there."""
        try:
            self._settle()
            if len(self._holders):
                self._holders.forget(torch.cat(list(freed)).cpu().numpy())
        except BaseException:
            self._noted.clear()
            self._holders.clear()  # some of its entries are of slots that are the next text's
            raise

    def check(self) -> None:
        """Verify which slots hold which text; raises `CorruptCacheError`."""
        self._holders.check()

    def clear(self) -> None:
        """Have nothing found any more that was given so far."""
        self._begun.clear()
        self._noted.clear()
        self._holders.clear()
        self.names.renew()
        self.version += 1

    def _settle(self) -> None:
        while self._noted:
            text, known, slots, held = self._noted.popleft()
            host = slots.cpu().numpy()
            start = self._shared_from(text.base, host[:known], held)
            self._holders.claim(text, start, host[start:])

    def _shared_from(self, base: int, known: NDArray[np.int64], held: Sequence[HeldPart]) -> int:
        """Return from which of the slots `known` on a request had the K/V that lie there: those that it went on from.

        They may have been evicted since, and given anew by another, or be those of a path of another generation. An origin
        gives its K/V to one path, once.
        """
        start = len(known)
        for part in reversed(list(self._holders.in_slots(known))):
            if part.first + part.length < start:
                break
            had = [each for each in held if each.origin == part.text.origin and each.start < base + start <= each.stop]
            if not had:
                break
            start = max(part.first, had[0].start - base)
            if start > part.first:
                break
        return start

    def _texts(
        self, namespace: Namespace, tokens: array[int], prefix_len: int, generation: int | None = None
    ) -> Iterator[TreeText]:
        """Yield texts that begin at or before `prefix_len` after the same tokens, of one generation or of all."""
        starts = {front.start for front in self._begun if front.namespace_key == namespace.key}
        if not starts or not tokens:
            return
        fronts = Fronts(namespace.key, np.frombuffer(tokens[:], np.int64))
        for start in sorted(start for start in starts if start <= prefix_len and start < len(tokens)):
            front = _Front(namespace.key, start, fronts.up_to(start))
            for each in sorted(self._begun.get(front, ())):
                if generation in (None, each):
                    yield self._named(namespace, tokens, front, each, Origin(UNKNOWN))

    def _named(
        self, namespace: Namespace, tokens: array[int], front: _Front, generation: int, origin: Origin
    ) -> TreeText:
        start, name = front.start, self.names.of_text(continuation_key(namespace, generation), front.digest)
        # As a salt too: SGLang's events know a node by that, and its hashes in them are of tokens and salt alone.
        before = tokens[:start]
        return TreeText(tokens[start:], namespace, name, name, start, generation, origin, before, is_shared=True)
