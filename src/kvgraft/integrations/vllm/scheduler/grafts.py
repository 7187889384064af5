"""Commands to workers about grafts, as claims become them once vLLM has given a request its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.messages import DonorToRead, Graft, GraftRepair
from kvgraft.reuse.stored import StoredKV, is_stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.integrations.vllm.scheduler.donor_registry import DonorRegistry
    from kvgraft.integrations.vllm.scheduler.pending_blocks import PendingBlocks
    from kvgraft.integrations.vllm.scheduler.requests import VLLMRequest
    from kvgraft.reuse.claim import Claim
    from kvgraft.types import DonorId

_WHOLE_SHARE = 0.5
"""A stored donor is read whole and promoted if a graft needs at least this share of it: the rest costs little more then."""


class Grafts:
    """Writes the commands that make grafts.

    Attributes:
        unsent: Grafts that no step has carried yet. vLLM counts on every one of them.
        cancels: Requests of which workers are to forget grafts and repairs, by the next step.
    """

    def __init__(
        self,
        registry: DonorRegistry,
        pending: PendingBlocks,
        *,
        block_sizes: tuple[int, ...],
        deadline_s: Callable[[Claim], float],
    ) -> None:
        self._registry, self._pending = registry, pending
        self._block_sizes, self._deadline_s = block_sizes, deadline_s
        self.unsent: list[Graft] = []
        self.cancels: list[str] = []

    def copy(self, state: VLLMRequest, claim: Claim) -> None:
        """Have a claim carried out."""
        self._queue(state, claim, deadline_s=self._deadline_s(claim), stored=self._stored_donors(claim))

    def void(self, state: VLLMRequest, claim: Claim, reason: str, *, is_gone: bool) -> None:
        """Let a load fail that vLLM waits for; no error where what it was to be made of `is_gone`."""
        self._queue(state, claim, void=reason, is_gone=is_gone)

    def repair(self, state: VLLMRequest, claim: Claim) -> GraftRepair:
        """Return the command that repairs a graft, of a prompt that is computed."""
        return GraftRepair(state.request_id, state.blocks_to(claim.plan.num_tokens, self._block_sizes))

    def credit(self, claim: Claim) -> None:
        """Note the use of a claim's donors, here and in stores."""
        for span in claim.plan.spans:
            self._registry.catalogue.record_hit(span.donor_id, span.length)
        self._registry.stores.touch(donor.donor_id for donor in claim.donors)

    def _queue(
        self,
        state: VLLMRequest,
        claim: Claim,
        *,
        stored: dict[DonorId, DonorToRead] | None = None,
        deadline_s: float = 0.0,
        void: str = "",
        is_gone: bool = False,
    ) -> None:
        graft = Graft(
            state.request_id,
            state.prompt.token_ids[: claim.plan.num_tokens],
            claim.plan,
            claim.spans,
            claim.source_starts,
            claim.end,
            state.blocks_to(claim.end, self._block_sizes),
            tuple((text.text_id, text.start, text.stop) for text in state.held.gaps),
            state.held.prompt.text_id if state.held.prompt is not None else None,
            claim.asynchronous,
            claim.decision.substitution is not None,
            stored or {},
            deadline_s,
            void,
            repairs_after=claim.repairs_after,
            is_gone=is_gone,
        )
        if not claim.asynchronous:  # vLLM publishes the blocks of an asynchronous one when it is through
            self._pending.owe(state.request_id, graft.block_ids, claim.plan.prefix_len, claim.end)
        self.unsent.append(graft)

    def _stored_donors(self, claim: Claim) -> dict[DonorId, DonorToRead]:
        """Return those of a claim's donors that must be read, as they lie now: one may have come nearer meanwhile."""
        needed: dict[DonorId, int] = {}
        for span in claim.spans:
            donor = self._registry.catalogue.get(span.donor_id)
            if donor is not None and is_stored(donor):
                needed[span.donor_id] = needed.get(span.donor_id, 0) + span.length
        stored = {}
        for donor_id, num_tokens in needed.items():
            donor = self._registry.catalogue.get(donor_id)
            assert donor is not None
            assert isinstance(donor.kv, StoredKV)
            is_promoted = num_tokens >= _WHOLE_SHARE * donor.num_tokens and self._registry.promote(donor_id)
            stored[donor_id] = DonorToRead(donor.kv.key, donor.num_tokens, is_promoted)
        return stored
