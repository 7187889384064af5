"""Text of a request that is captured to become donors: opened at its lookup, due step by step, sealed at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.messages import Capture
from kvgraft.integrations.vllm.scheduler.claims import covered_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.scheduler.donor_registry import CapturedText, DonorRegistry
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.requests import VLLMRequest
    from kvgraft.reuse.claim import Claim
    from kvgraft.types import Match


class Captures:
    """Opens, follows and closes the texts of requests.

    Attributes:
        trusts_prefixes: vLLM's prefix cache holds K/V of the model as it is now. After weights were changed in place it may
            hold those of another model: nothing after its hits is captured then.
    """

    def __init__(self, registry: DonorRegistry, facts: EngineFacts) -> None:
        self.trusts_prefixes = True
        self.registry = registry
        self._facts = facts

    def open_after_prefix(self, state: VLLMRequest, matches: Sequence[Match]) -> None:
        """Begin to capture the text of a request that is computed, where no donor has it."""
        num_tokens, prefix_len = len(state.prompt.token_ids), state.prefix_len
        if prefix_len and not self.trusts_prefixes:
            return
        runs = list(state.attempt.lineage.computed_runs(prefix_len, num_tokens))
        if not runs:  # all of it attends to other text
            return
        tail = runs[-1]
        known = self.registry.rules.as_good(matches, tail.generation)
        if not self.registry.rules.admits(num_tokens - sum(match.length for match in known), tail.generation):
            return
        # What vLLM had cached is captured again only if no donor has it; of windows it is not there any more.
        is_exact = state.attempt.lineage.exact_len(num_tokens) == num_tokens
        start = 0 if is_exact and not self._facts.window and covered_to(known) < prefix_len else tail.start
        state.held.prompt = self.registry.open(start, num_tokens, tail.generation)
        if start == 0 and state.held.prompt is not None:
            state.held.prompt.known = known
        self._open_output(state, num_tokens, tail.generation)

    def open_after_graft(self, state: VLLMRequest, claim: Claim) -> None:
        """Begin to capture what a grafted request computes: the gaps by its graft, the rest by the engine."""
        if not state.keeps_text or (state.prompt.cached_len and not self.trusts_prefixes):
            return
        num_tokens = len(state.prompt.token_ids)
        runs = list(state.attempt.lineage.computed_runs(claim.plan.prefix_len, num_tokens))
        if not runs:  # all of it attends to other text
            return
        *gaps, tail = runs
        for gap in gaps:
            text = self.registry.open(*gap)
            if text is not None:
                state.held.gaps.append(text)
        state.held.prompt = self.registry.open(*tail)
        self._open_output(state, num_tokens, tail.generation)

    def _open_output(self, state: VLLMRequest, start: int, generation: int) -> None:
        if not state.prompt.is_session:
            state.held.output = self.registry.open_output(start, generation)

    def due(self, state: VLLMRequest, stop: int, captures: list[Capture]) -> None:
        """Add commands for what a step computes up to position `stop`; of what is to be repaired, not before that.

        A prompt may become a donor here, of which workers hear with its command or never.
        """
        prompt, output = state.held.prompt, state.held.output
        if output is not None and stop - output.next >= self._facts.output_chunk:
            if self.registry.extend(output, stop):
                captures.append(self._capture(state, output, stop))
            else:
                state.held.output = None
                self.registry.abandon(output)
        if prompt is not None and not state.attempt.owes_repair and prompt.next < min(stop, prompt.stop):
            captures.append(self._capture(state, prompt, min(stop, prompt.stop)))

    def graft_ended(self, state: VLLMRequest, *, failed: bool) -> None:
        """Register the gaps that a graft computed, or give them up."""
        while state.held.gaps:
            text = state.held.gaps[0]
            text.next = text.stop
            if failed:
                self.registry.abandon(text)
            else:
                self.registry.seal(state.prompt.namespace, state.prompt.token_ids, text)
            del state.held.gaps[0]  # not before: what fails is given up by what is held

    def end(self, state: VLLMRequest, token_ids: NDArray[np.int32]) -> None:
        """Register the answer of a request that ended, unless its prompt is incomplete. Gaps stay open."""
        held = state.held
        # Aborted with steps under way, a request may not know the last token that workers have captured.
        if held.output is not None and held.prompt is None and held.output.next <= len(token_ids):
            self.registry.seal(state.prompt.namespace, token_ids, held.output)
        for text in (held.prompt, held.output):
            self.registry.abandon(text)
        held.prompt = held.output = None

    def _capture(self, state: VLLMRequest, text: CapturedText, stop: int) -> Capture:
        blocks = state.blocks_to(stop, self._facts.block_sizes)
        start, text.next = text.next, stop
        if text is not state.held.prompt or not text.is_complete:
            return Capture(text.text_id, start, stop, blocks, None)
        donor_id = self.registry.register(state.prompt.namespace, state.prompt.token_ids, text)
        state.held.prompt = None
        try:
            return Capture(text.text_id, start, stop, blocks, donor_id)
        except BaseException:
            self.registry.take_back(text, donor_id)
            raise
