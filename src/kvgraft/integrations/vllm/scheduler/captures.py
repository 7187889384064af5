"""What of a request is captured to become donors: opened when it is looked up, due step by step, sealed at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.messages import Capture

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.scheduler.claims import Claim
    from kvgraft.integrations.vllm.scheduler.donor_registry import CapturedText, DonorRegistry
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.requests import RequestState
    from kvgraft.types import Match


class Captures:
    """Opens, follows and closes the texts of requests.

    Attributes:
        trusts_prefixes: vLLM's prefix cache holds K/V of the model as it is now. Weights that were changed in place while
            that cache was kept make it hold those of another model: nothing behind its hits is captured then.
    """

    def __init__(self, registry: DonorRegistry, facts: EngineFacts) -> None:
        self.trusts_prefixes = True
        self._registry = registry
        self._facts = facts

    def open_behind_prefix(self, state: RequestState, matches: Sequence[Match]) -> None:
        """Begin to capture the text of a request that is computed, where no donor has it."""
        num_tokens, exact_len = len(state.token_ids), state.given_len
        if exact_len and not self.trusts_prefixes:
            return
        runs = list(state.lineage.computed_runs(exact_len, num_tokens))
        if not runs:  # all of it attends to other text
            return
        tail = runs[-1]
        known = self._registry.rules.as_good(matches, tail.generation)
        if not self._registry.rules.admits(num_tokens - sum(match.length for match in known), tail.generation):
            return
        # What vLLM had cached is captured again only if no donor has it; of windows it is not there any more.
        is_exact = state.lineage.exact_len(num_tokens) == num_tokens
        start = 0 if is_exact and not self._facts.window and covered_head(known) < exact_len else tail.start
        if start == 0:
            for donor in self._registry.rules.superseded(known):
                self._registry.forget(donor.donor_id)
        state.prompt = self._registry.open(start, num_tokens, tail.generation)
        state.output = self._registry.open_output(num_tokens, tail.generation)

    def open_behind_graft(self, state: RequestState, claim: Claim) -> None:
        """Begin to capture what a grafted request computes: the gaps by its graft, the rest by the engine."""
        if not state.captures or (state.exact_len and not self.trusts_prefixes):
            return
        num_tokens = len(state.token_ids)
        runs = list(state.lineage.computed_runs(claim.plan.exact_len, num_tokens))
        if not runs:  # all of it attends to other text
            return
        *gaps, tail = runs
        opened = [self._registry.open(*gap) for gap in gaps]
        state.gaps = [text for text in opened if text is not None]
        state.prompt = self._registry.open(*tail)
        state.output = self._registry.open_output(num_tokens, tail.generation)

    def due(self, state: RequestState, stop: int) -> Iterable[Capture]:
        """Yield commands for what a step computes up to position `stop`."""
        prompt, output = state.prompt, state.output
        if prompt is not None and prompt.next < min(stop, prompt.stop):
            yield self._capture(state, prompt, min(stop, prompt.stop))
        if output is not None and stop - output.next >= self._facts.output_chunk:
            if self._registry.extend(output, stop):
                yield self._capture(state, output, stop)
            else:
                state.output = None
                self._registry.abandon(output)

    def graft_ended(self, state: RequestState, *, failed: bool) -> None:
        """Register the gaps that a graft computed, or give them up."""
        gaps, state.gaps = state.gaps, []
        for text in gaps:
            text.next = text.stop
            if failed:
                self._registry.abandon(text)
            else:
                self._registry.seal(state.namespace, state.token_ids, text)

    def end(self, state: RequestState, token_ids: NDArray[np.int32]) -> None:
        """Register the answer of a request that ended, unless its prompt is incomplete. Gaps stay open."""
        if state.output is not None and state.prompt is None:
            self._registry.seal(state.namespace, token_ids, state.output)
        for text in (state.prompt, state.output):
            self._registry.abandon(text)
        state.prompt = state.output = None

    def give_up(self, state: RequestState) -> None:
        """Capture nothing more of a request; what is a donor already stays one."""
        for text in state.texts:
            self._registry.abandon(text)
        state.prompt, state.output, state.gaps = None, None, []

    def lose(self, state: RequestState, text_ids: Container[int]) -> None:
        """Give up texts that workers have lost."""
        lost = [text for text in state.texts if text.text_id in text_ids]
        for text in lost:
            self._registry.abandon(text)
        state.prompt = None if state.prompt in lost else state.prompt
        state.output = None if state.output in lost else state.output
        state.gaps = [text for text in state.gaps if text not in lost]

    def _capture(self, state: RequestState, text: CapturedText, stop: int) -> Capture:
        start, text.next = text.next, stop
        donor_id = None
        if text is state.prompt and text.is_complete:
            donor_id = self._registry.register(state.namespace, state.token_ids, text)
            state.prompt = None
        return Capture(text.text_id, start, stop, state.blocks_to(stop, self._facts.block_sizes), donor_id)


def covered_head(matches: Iterable[Match]) -> int:
    """How many tokens from the first on matches cover without a gap."""
    position = 0
    for match in matches:
        if match.target_start > position:
            break
        position = match.target_end
    return position
