"""What requests leave to others: donors of what they published, the text that turns go on from, and what is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.integrations.sglang.refusals import refused_request
from kvgraft.integrations.sglang.requests.guard import guarded, nothing, together

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.integrations.sglang.donors.request_texts import GivenPiece, GivenText
    from kvgraft.integrations.sglang.planning.substitutes import TreeSubstitutes
    from kvgraft.integrations.sglang.requests.books import Books
    from kvgraft.integrations.sglang.requests.repairs import Repairs
    from kvgraft.integrations.sglang.requests.request import SGLangRequest

_FAILED = -2
"""In place of the tokens that a tree was given: no number of tokens."""


def _wait_for_load() -> None:
    """Begin nothing anew: the tree may evict in the middle of a load."""
    raise CorruptCacheError("what is evicted is not known any more, and not kept")


@dataclass(eq=False)
class Publishing:
    """Makes donors of what SGLang publishes; gives its tree what a finished request was answered from. Not thread-safe."""

    books: Books
    repairs: Repairs
    substitutes: TreeSubstitutes | None = None

    @guarded("register", nothing)
    def published(self, req: Any, node: object) -> None:  # noqa: ANN401
        """Make donors of what `req` has given to the exact tree, once its prompt is complete."""
        state = self.books.requests.get(req)
        if state is None or self.books.is_stale or refused_request(req) is not None:
            return
        if not req.finished() and not self.books.request_texts.is_complete(req):
            return
        try:
            self._register(req, state, node)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.books.log.failed("register", state.rid, error)
        if self.books.stores is not None:
            self.books.stores.time_prefill(state)

    def _register(self, req: Any, state: SGLangRequest, node: object) -> None:  # noqa: ANN401
        self.books.request_texts.register_exact(req, state, node)
        if req.finished() and self.substitutes is not None:
            stored = req.full_untruncated_fill_ids[: req.kv.cache_protected_len]
            self.substitutes.provider.heard(req.rid, np.frombuffer(stored[:], np.int64), state.lineage)

    @guarded("register", nothing)
    def settle(self) -> None:
        """Register what was published. Called after a step's output, and before donors are looked for.

        So no first token waits for it: milliseconds mostly, but 200 where the anchor table of a new server takes memory.
        A flush or new weights in between drop what is not registered yet.
        """
        if not self.books.keeper.num_published:
            return
        self.books.require_sound()
        while self.books.keeper.num_published:
            try:
                self.books.keeper.settle()
            except Exception as error:  # noqa: BLE001 - logged and counted; one text becomes no donor
                self.books.log.failed("register", "-", error)
        self.books.log.show_donors(self.books.keeper)

    @together("register", nothing)
    def adopt_computed(self, req: Any, row: Tensor, node: object) -> None:  # noqa: ANN401
        """Keep what a finished request was answered from for those that go on from it, and its exact head as a donor.

        It is about to be released; `row` are its slots by position, `node` its node in the exact tree.
        """
        self.books.require_sound()
        state = self.books.requests.get(req)
        if state is None or not state.lineage.spans or state.held.adopted or self.books.is_stale:
            return
        try:
            req.refresh_fill_ids()
            self.books.request_texts.register_exact(req, state, node)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.books.log.failed("register", state.rid, error)
        self.settle()  # what is known by now is not adopted a second time
        if req in self.repairs.waiting:
            return  # it ended before its repair: others would go on without it
        if pieces := self.books.request_texts.pieces(req, state):
            self._adopt(req, state, row, pieces)

    def _adopt(self, req: Any, state: SGLangRequest, row: Tensor, pieces: list[GivenPiece]) -> None:  # noqa: ANN401
        """Keep what all ranks want of `pieces`: trees that do not have the same do not evict the same."""
        texts: list[GivenText | None] = [None] * len(pieces)
        try:
            texts = self.books.request_texts.texts(req, state, row, pieces)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.books.log.failed("register", state.rid, error)
        are_wanted = self.books.ranks.lowest([text is not None for text in texts])
        wanted = [text for text, is_wanted in zip(texts, are_wanted, strict=True) if text is not None and is_wanted]
        num_adopted = _FAILED
        try:
            self.books.request_texts.adopt(state, wanted)
            num_adopted = sum(stop - start for start, stop in state.held.adopted)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.books.log.failed("register", state.rid, error)
        try:
            # After a failure as well: trees of which one is not used alike do not evict alike.
            self.books.request_texts.touch_front(req, state)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.books.log.failed("register", state.rid, error)
            num_adopted = _FAILED
        least, negated = self.books.ranks.lowest([num_adopted, -num_adopted])
        if least != -negated:
            self.books.begin_anew()
            self.books.request_texts.empty_tree()

    def adopted(self, req: Any) -> list[tuple[int, int]]:  # noqa: ANN401
        """Return the ranges of the request's row that belong to the tree now."""
        state = self.books.requests.get(req)
        return [] if state is None else state.held.adopted

    def evicted(self, freed: list[Tensor]) -> None:
        """Keep donors whose slots the tree has given up in host memory."""
        try:
            self._evicted(freed)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.books.log.failed("capture", "-", error)
            self.books.log.books.condemn()  # it is not known what lies where

    def _evicted(self, freed: list[Tensor]) -> None:
        if self.books.log.books.is_doubtful:
            self.books.log.books.settle(self.books.check, _wait_for_load)
        self.settle()
        for what, take in (("capture", self.books.keeper.capture), ("origins", self.books.continuations.forget)):
            try:
                take(freed)
            except Exception as error:  # noqa: BLE001 - logged and counted; donors are lost, or the sources of what is left
                self.books.log.failed(what, "-", error)
