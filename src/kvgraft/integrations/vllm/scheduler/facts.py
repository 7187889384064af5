"""What the scheduler's half needs to know of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of one engine.

    Attributes:
        fingerprint: Of the model.
        block_sizes: Tokens of a block, per KV cache group.
        hash_block_size: Tokens behind each entry of `Request.block_hashes`.
        window: Longest sliding window, 0 for none.
        capacity_tokens: Donor tokens in all tiers.
        hidden_size: Of the model.
        output_chunk: Generated tokens that are captured at a time; they must still be in the shortest window then.
        reports_failed_loads: vLLM can be told that an asynchronous load failed, whatever the groups (0.32 and later).
        refusal: Why nothing may be grafted, or empty.
        model_config: vLLM's, for a semantic provider.
        host_tokens: Donor tokens that fit into the host memory of each worker; None for all of them.
        num_ranks: Workers of the engine.
    """

    fingerprint: str
    block_sizes: tuple[int, ...]
    hash_block_size: int
    window: int
    capacity_tokens: int
    hidden_size: int
    output_chunk: int
    reports_failed_loads: bool
    refusal: str
    model_config: object = None
    host_tokens: int | None = None
    num_ranks: int = 1
