"""Commands that carry claims out, once vLLM has given a request its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.messages import ColdDonor, Graft
from kvgraft.integrations.vllm.scheduler.stores import is_cold
from kvgraft.reuse.stored import StoredKV

if TYPE_CHECKING:
    from kvgraft.integrations.vllm.scheduler.claims import Claim
    from kvgraft.integrations.vllm.scheduler.donor_registry import DonorRegistry
    from kvgraft.integrations.vllm.scheduler.requests import RequestState
    from kvgraft.types import DonorId

_WHOLE_SHARE = 0.5
"""A cold donor is read whole and kept nearer by if a graft needs at least this share of it: the rest costs no more then."""


def graft_of(
    state: RequestState,
    claim: Claim,
    registry: DonorRegistry,
    block_sizes: tuple[int, ...],
    *,
    deadline_s: float,
    void: str = "",
) -> Graft:
    """Build the command.

    Args:
        state: Has its blocks, and what is to be captured.
        claim: What vLLM was promised.
        registry: Says where donors lie now, and makes room for those that come nearer.
        block_sizes: Per KV cache group.
        deadline_s: For reads.
        void: Why the claim cannot be kept, or empty.
    """
    return Graft(
        state.request_id,
        state.token_ids[: claim.plan.num_tokens],
        claim.plan,
        claim.spans,
        claim.source_starts,
        claim.end,
        state.blocks_to(claim.end, block_sizes),
        tuple((text.text_id, text.start, text.stop) for text in state.gaps),
        state.prompt.text_id if state.prompt is not None else None,
        claim.asynchronous,
        state.substitution is not None,
        {} if void else _cold_donors(claim, registry),
        deadline_s,
        void,
    )


def _cold_donors(claim: Claim, registry: DonorRegistry) -> dict[DonorId, ColdDonor]:
    """Of a claim's donors those that must be read, as they lie now: one may have come nearer meanwhile."""
    needed: dict[DonorId, int] = {}
    for span in claim.spans:
        donor = registry.catalogue.get(span.donor_id)
        if donor is not None and is_cold(donor):
            needed[span.donor_id] = needed.get(span.donor_id, 0) + span.length
    cold = {}
    for donor_id, num_tokens in needed.items():
        donor = registry.catalogue.get(donor_id)
        assert donor is not None
        assert isinstance(donor.kv, StoredKV)
        is_promoted = num_tokens >= _WHOLE_SHARE * donor.num_tokens and registry.promote(donor_id)
        cold[donor_id] = ColdDonor(donor.kv.key, donor.num_tokens, is_promoted)
    return cold
