"""What requests leave in SGLang's tree: exact text as SGLang publishes it, what others go on from under names of our own.

Donors are parts of it that were computed.

Clients wait for their first tokens meanwhile: texts are handed over here and registered after these (`DonorKeeper.settle`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvgraft.integrations.sglang.donors.continuations import HeldPart
from kvgraft.integrations.sglang.donors.texts import Origin, TreeText
from kvgraft.types import Fidelity

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.integrations.sglang.donors.continuations import Continuations
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.integrations.sglang.requests.request import SGLangRequest
    from kvgraft.reuse.lineage import ComputedRun


class GivenPiece(NamedTuple):
    """Whole pages of a request that SGLang's tree is to have; the same on all ranks.

    Attributes:
        start: Position of the first token.
        stop: First position after the last one.
        generation: Of its K/V; 0 if a full prefill gives them.
        runs: What of it was computed, and may become donors.
    """

    start: int
    stop: int
    generation: int
    runs: tuple[ComputedRun, ...]


class GivenText(NamedTuple):
    """A piece by its name.

    Attributes:
        text: A path that ends with the piece; it may begin before it.
        slots: int64, of the whole path; those before the piece are not the request's.
        runs: As of the piece.
    """

    text: TreeText
    slots: Tensor
    runs: tuple[ComputedRun, ...]


class RequestTexts:
    """Makes donors of requests' text: computed tokens, with their generation, and never copied ones. Not thread-safe."""

    def __init__(self, tree: DonorTree, keeper: DonorKeeper, continuations: Continuations, *, min_run: int) -> None:
        self._tree, self._keeper, self._continuations = tree, keeper, continuations
        self._page_size = continuations.page_size
        self._min_run = min_run

    def is_complete(self, req: Any) -> bool:  # noqa: ANN401 - SGLang's Req
        """Whether the exact tree has all whole pages of the prompt."""
        return bool(req.kv.cache_protected_len + self._page_size > len(req.origin_input_ids))

    def register_exact(self, req: Any, state: SGLangRequest, node: object) -> None:  # noqa: ANN401
        """Register what `req` has in the exact tree and is not registered yet.

        A run before it, which another request registered, is taken along, so that no match is torn at the seam. `node` is the
        request's in the exact tree.
        """
        stop = state.lineage.exact_len(req.kv.cache_protected_len)
        start = max(state.registered_len, state.lineage.prefix_len - self._min_run, 0)
        if stop - start < self._min_run:
            return
        slots = self._tree.slots(node)[start:stop]
        tokens = req.full_untruncated_fill_ids[:stop]
        text = TreeText(tokens, state.namespace, req.extra_key, req.cache_salt, 0, 0, _origin(state))
        self._keeper.publish(text, start, slots)
        state.registered(stop)

    def pieces(self, req: Any, state: SGLangRequest) -> list[GivenPiece]:  # noqa: ANN401 - SGLang's Req
        """Return what `req`, which holds copies, leaves to the tree.

        If something of it is approximate, that is all that it was answered from, copies included. Where copies are exact the
        tree may have their text elsewhere, and gets what was computed after them.
        """
        lineage, first, page = state.lineage, req.kv.cache_protected_len, self._page_size
        stop = lineage.own_len(min(req.owned_kv_len(), len(req.full_untruncated_fill_ids))) // page * page
        runs = tuple(
            run._replace(start=-(-run.start // page) * page, stop=run.stop // page * page)
            for run in self._keeper.rules.runs(lineage, first, stop)
        )
        generation = lineage.generation_at(stop)
        if generation and stop > first:
            return [GivenPiece(first, stop, generation, runs)]
        return [GivenPiece(*run, (run,)) for run in runs]

    def texts(
        self,
        req: Any,  # noqa: ANN401
        state: SGLangRequest,
        row: Tensor,
        pieces: Sequence[GivenPiece],
    ) -> list[GivenText | None]:
        """Name `pieces` of `req`, whose slots by position are `row`; None for one that is not worth keeping."""
        tokens = req.full_untruncated_fill_ids
        found: list[GivenText | None] = []
        for start, stop, generation, runs in pieces:
            if generation:
                text = self._continuations.text(state.namespace, tokens[:stop], start, generation, _origin(state))
            elif self._keeper.wants(state.namespace, tokens[start:stop], 0):
                text = self._private_text(state, tokens[:stop], start)
            else:
                found.append(None)
                continue
            slots = row[text.base : stop].long().clone()  # the row is another request's before they are registered
            found.append(GivenText(text, slots, runs))
        return found

    def adopt(self, state: SGLangRequest, texts: Sequence[GivenText]) -> None:
        """Give the tree texts of a request that is about to be released, under names that no request can ask for.

        Of its row it no longer owns the ranges `held.adopted`: what the tree had already stays its own.

        Raises:
            Exception: The tree failed, and may have taken a part of a text, which is not found; those after it are not given.
        """
        for text, slots, runs in texts:
            known = self._tree.resident(text, len(slots)).length
            taken = len(slots)
            try:
                self._tree.adopt(text, slots, known)
            except BaseException:
                taken = self._tree.resident(text, len(slots)).length
                raise
            finally:
                if taken > known:
                    state.held.adopted.append((text.base + known, text.base + taken))
            if text.generation:
                path = self._tree.slots(self._tree.resident(text, len(slots)).node)
                self._continuations.note(text, known, path[: len(slots)], _gone_on_from(state))
            self._publish(text, slots, known, runs)

    def touch_front(self, req: Any, state: SGLangRequest) -> None:  # noqa: ANN401 - SGLang's Req
        """Have the exact beginning of a request evicted after what begins there: without it that is not found."""
        tokens, names = req.full_untruncated_fill_ids, (req.extra_key, req.cache_salt)
        front = TreeText(tokens, state.namespace, *names, 0, 0, _origin(state))
        self._tree.touch(front, req.kv.cache_protected_len)

    def _publish(self, text: TreeText, slots: Tensor, known: int, runs: Sequence[ComputedRun]) -> None:
        """Have donors made of computed runs, as far as they are this request's: what was known may have been copied."""
        for run in runs:
            start, stop = max(run.start - text.base, known), run.stop - text.base
            if start < stop:
                self._keeper.publish(replace(text, generation=run.generation), start, slots[start:stop])

    def empty_tree(self) -> None:
        """Have the tree give up all that no request has: trees that took different texts are alike afterwards."""
        self._tree.empty()

    def _private_text(self, state: SGLangRequest, tokens: array[int], start: int) -> TreeText:
        """Name exact text `tokens[start:]` so that nothing shares its path."""
        name = self._continuations.names.fresh()
        return TreeText(tokens[start:], state.namespace, name, name, start, 0, _origin(state), tokens[:start])

    def is_private(self, cache_salt: str | None) -> bool:
        """Whether a salt is a name of our own, of text that exact requests must never hit."""
        return self._continuations.names.are_of(cache_salt)


def _gone_on_from(state: SGLangRequest) -> list[HeldPart]:
    """Return what a request goes on from, by the requests that had it; `UNKNOWN` for some."""
    return [
        HeldPart(
            span.target_start,
            span.target_start + span.length,
            Origin(str(source["request"]), int(str(source["attempt"]))),
        )
        for span, source in zip(state.lineage.spans, state.sources, strict=True)
        if span.fidelity is Fidelity.CONTINUED
    ]


def _origin(state: SGLangRequest) -> Origin:
    return Origin(state.rid, len(state.attempts))
