"""Facts of the engine that the scheduler's half depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of one engine.

    Attributes:
        block_sizes: Tokens of a block, per KV cache group.
        hash_block_size: Tokens of an entry of `Request.block_hashes`.
        window: Longest sliding window, 0 for none.
        capacity_tokens: Donor tokens in all tiers.
        output_chunk: Generated tokens that are captured at a time; they must still be in the shortest window then.
        refusal: Why nothing may be grafted, or empty.
        model_config: vLLM's, for a semantic provider.
        host_tokens: Donor tokens that fit into the host memory of each worker; None for all of them.
        num_ranks: Workers of the engine.
        steps_under_way: Steps that vLLM schedules at most before it knows the result of the first.
        takes_running_back: Whether vLLM computes itself what could not be made for a request that runs (`runner.py`).
        max_model_len: Tokens of prompt and answer at which vLLM ends a request; None for no end.
        max_num_batched_tokens: Tokens that vLLM computes at most in one step; None for no bound.
    """

    fingerprint: str
    block_sizes: tuple[int, ...]
    hash_block_size: int
    window: int
    capacity_tokens: int
    hidden_size: int
    output_chunk: int
    refusal: str
    model_config: object = None
    host_tokens: int | None = None
    num_ranks: int = 1
    steps_under_way: int = 1
    takes_running_back: bool = True
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def keeps_no_repair(self) -> str:
        """Why no choice of a policy can be computed after the first token, or empty."""
        if self.window:
            return "vLLM has given blocks of sliding windows back by then"
        if len(self.block_sizes) > 1:
            return "of a model with several KV cache groups vLLM takes no failed repair back"
        return ""

    def answer_len(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return how long an answer of at most `max_tokens` can become, which vLLM does not cut to what fits."""
        return max_tokens if self.max_model_len is None else min(max_tokens, self.max_model_len - num_prompt_tokens)
