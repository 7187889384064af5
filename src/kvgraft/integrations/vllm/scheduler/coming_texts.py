"""Text that requests are computing: one that asks about it waits until it is a donor, in place of computing it once more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.donors import DonorCatalogue, DonorQuery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.integrations.vllm.scheduler.requests import ScheduledRows, VLLMRequest
    from kvgraft.types import DonorId

_LEAST_SHARE = 0.5
"""Of what a request would compute, that others are computing: less is not waited for."""

_PATIENCE = 2.0
"""A request waits while the others have at most so many times its own tokens left to compute."""


class ComingTexts:
    """Knows the texts of admitted requests until they are donors. Not thread-safe.

    A request waits once at most, and never for one that a step leaves out: that may wait itself. vLLM computes prompts in the
    order in which they came, so that one that waits loses nothing: the tokens before it would have been computed first.

    Nothing is indexed before a second request asks.
    """

    def __init__(self, capacity_tokens: int, *, min_run: int, min_saved_tokens: int) -> None:
        """Follow texts of up to `capacity_tokens` together; arguments as those of `DonorRegistry` and `Lookup`."""
        self._catalogue = DonorCatalogue(capacity_tokens, min_run=min_run)
        self._min_saved_tokens = min_saved_tokens
        self._coming: dict[str, VLLMRequest] = {}
        self._indexed: dict[str, DonorId | None] = {}
        self._waits: dict[str, frozenset[str]] = {}

    def add(self, state: VLLMRequest) -> None:
        """Follow an admitted request that computes text to become a donor; ignore others."""
        if state.held.prompt is not None:
            self._coming[state.request_id] = state

    def step_scheduled(self, rows: Iterable[ScheduledRows]) -> None:
        """Forget texts that are donors now, and those of requests that the step leaves out."""
        scheduled = {state.request_id for state, _, _ in rows}
        for request_id, state in list(self._coming.items()):
            if request_id not in scheduled or state.held.prompt is None:
                self._drop(request_id)

    def end(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._drop(request_id)
        self._waits.pop(request_id, None)

    def clear(self) -> None:
        """Forget all texts; requests that wait go on."""
        self._catalogue.reset()
        self._coming.clear()
        self._indexed.clear()

    def has_come(self, request_id: str) -> bool:
        """Return whether a request has waited, and what it waited for is a donor now or will not be one; true once."""
        awaited = self._waits.get(request_id)
        if not awaited or not self._coming.keys().isdisjoint(awaited):
            return False
        self._waits[request_id] = frozenset()
        return True

    def keep_waiting(self, state: VLLMRequest) -> bool:
        """Return whether a request that has been looked up is to ask again in the next step.

        Complexity: a lookup in the texts of requests that are under way, once per request and only if there are any.
        """
        awaited = self._waits.get(state.request_id)
        if awaited is None:
            awaited = self._waits[state.request_id] = self._found(state)
        return bool(awaited)

    def _found(self, state: VLLMRequest) -> frozenset[str]:
        """Return the requests whose texts are worth waiting for."""
        self._drop(state.request_id)  # it may have been preempted in this very step
        if not self._coming or state.prompt.num_generated:
            return frozenset()
        prompt, plan = state.prompt, None if state.claim is None else state.claim.plan
        num_known = 0 if plan is None else plan.reused_len
        num_left = len(prompt.text) - state.prefix_len - num_known
        for other in self._coming.values():
            self._index(other)
        matches = self._catalogue.find(DonorQuery(prompt.namespace, prompt.text, prompt.prefix_len))
        num_more = sum(match.length for match in matches) - num_known
        if num_more < max(self._min_saved_tokens, _LEAST_SHARE * num_left):
            return frozenset()
        owners = {donor_id: request_id for request_id, donor_id in self._indexed.items()}
        awaited = frozenset(owners[match.donor_id] for match in matches)
        rows_left = sum(_num_left(self._coming[request_id]) for request_id in awaited)
        return awaited if rows_left <= _PATIENCE * (num_left + num_known) else frozenset()

    def _index(self, state: VLLMRequest) -> None:
        text = state.held.prompt
        if state.request_id in self._indexed or text is None:
            return
        prompt = state.prompt
        added = self._catalogue.add(prompt.namespace, prompt.token_ids[text.start : text.stop], None)
        self._indexed[state.request_id] = None if added.donor is None else added.donor.donor_id

    def _drop(self, request_id: str) -> None:
        self._coming.pop(request_id, None)
        donor_id = self._indexed.pop(request_id, None)
        if donor_id is not None and self._catalogue.get(donor_id) is not None:
            self._catalogue.remove(donor_id)


def _num_left(state: VLLMRequest) -> int:
    """Return how many positions of a prompt are not computed yet, about: text is captured step by step."""
    text = state.held.prompt
    return 0 if text is None else text.stop - text.next
