"""Donors made of text that requests compute: exact text as SGLang publishes it, the rest under names of our own.

Clients wait for their first tokens meanwhile: texts are handed over here and registered after these (`DonorKeeper.settle`).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvgraft.donors.front import front_digest
from kvgraft.integrations.sglang.donors.texts import Origin, TreeText

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.integrations.sglang.request_state import SGLangRequest
    from kvgraft.reuse.lineage import ComputedRun


class ComputedText(NamedTuple):
    """Text that a request computed after copies.

    Attributes:
        text: It, under a name of our own.
        start: Its position in the request.
        slots: int64.
    """

    text: TreeText
    start: int
    slots: Tensor


class DonorRegistrar:
    """Registers donors. Copied tokens never become donors; computed ones carry their generation. Not thread-safe."""

    def __init__(self, tree: DonorTree, keeper: DonorKeeper, *, page_size: int, min_run: int) -> None:
        self._tree, self._keeper = tree, keeper
        self._page_size = page_size
        self._min_run = min_run
        self._secret = secrets.token_hex(16)
        self._num_private = 0

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
        state.registered_len = stop

    def computed(self, req: Any, state: SGLangRequest) -> list[ComputedRun]:  # noqa: ANN401
        """Return what `req` computed after copies, whole pages; the same on all ranks."""
        stop = min(req.owned_kv_len(), len(req.full_untruncated_fill_ids))
        runs = self._keeper.rules.runs(state.lineage, req.kv.cache_protected_len, stop)
        page = self._page_size
        return [run._replace(start=-(-run.start // page) * page, stop=run.stop // page * page) for run in runs]

    def texts(
        self,
        req: Any,  # noqa: ANN401
        state: SGLangRequest,
        row: Tensor,
        runs: Sequence[ComputedRun],
    ) -> list[ComputedText | None]:
        """Name `runs` of `req`, whose slots by position are `row`; None for one that is not worth keeping."""
        tokens = req.full_untruncated_fill_ids
        found: list[ComputedText | None] = []
        for start, stop, generation in runs:
            if not self._keeper.wants(state.namespace, tokens[start:stop], generation):
                found.append(None)
                continue
            slots = row[start:stop].long().clone()  # the row is another request's before they are registered
            found.append(ComputedText(self._private_text(state, tokens[:stop], start, generation), start, slots))
        return found

    def adopt(self, state: SGLangRequest, texts: Sequence[ComputedText]) -> None:
        """Give the tree texts of a request that is about to be released, under names that no request can ask for.

        Of its row it no longer owns the ranges `held.adopted`.

        Raises:
            Exception: The tree failed, and may have taken a part of a text, which is no donor; those after it are not given.
        """
        for text, start, slots in texts:
            taken = len(slots)
            try:
                self._tree.adopt(text, slots)
            except BaseException:
                taken = self._tree.resident(text, taken).length
                raise
            finally:
                state.held.adopted.append((start, start + taken))
            self._keeper.publish(text, 0, slots)

    def empty_tree(self) -> None:
        """Have the tree give up all that no request has: trees that took different texts are alike afterwards."""
        self._tree.empty()

    def _private_text(self, state: SGLangRequest, tokens: array[int], start: int, generation: int) -> TreeText:
        """Name `tokens[start:]` so that nothing shares its path: two of equal tokens may differ in what they attended to."""
        self._num_private += 1
        name = f"{self._secret}-{self._num_private}"
        # As a salt too: SGLang's events know a node by that, and its hashes in them are of tokens and salt alone.
        front = front_digest(state.namespace.key, np.frombuffer(tokens[:start], np.int64))
        return TreeText(tokens[start:], state.namespace, name, name, start, generation, _origin(state), front)

    def is_private(self, cache_salt: str | None) -> bool:
        """Whether a salt is a name of our own, of text that exact requests must never hit."""
        return cache_salt is not None and cache_salt.startswith(self._secret)


def _origin(state: SGLangRequest) -> Origin:
    return Origin(state.rid, len(state.attempts))
