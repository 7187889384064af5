"""Another text for a request that asked for it: named by a semantic provider and found among donors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.integrations.vllm.scheduler.claims import covering
from kvgraft.reuse.substitute import Substitutes
from kvgraft.types import GraftPlan

if TYPE_CHECKING:
    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.donors import DonorCatalogue
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.requests import RequestState
    from kvgraft.types import Miss, Substitution


@dataclass(frozen=True, slots=True)
class StandIn:
    """What stands in for a prompt.

    Attributes:
        plan: Copies other text's K/V right behind the exact prefix, position by position.
        source: What is told about it.
    """

    plan: GraftPlan
    source: Substitution


@dataclass(frozen=True, slots=True)
class StandIns:
    """Lets donors of other text stand in where a provider names it. Not thread-safe."""

    substitutes: Substitutes
    catalogue: DonorCatalogue
    max_generation: int

    @classmethod
    def configured(cls, config: VLLMConfig, facts: EngineFacts, catalogue: DonorCatalogue) -> StandIns | None:
        """Build the provider that settings name; None if they name none.

        Raises:
            ConfigError: It cannot be built, or the model has sliding windows.
        """
        if config.semantic_provider and facts.window:
            raise ConfigError("semantic_provider does not go with sliding windows; unset it")
        substitutes = Substitutes.configured(config, facts.model_config)
        return None if substitutes is None else cls(substitutes, catalogue, config.max_generation)

    def find(
        self, state: RequestState, exact_len: int, planned: GraftPlan | Miss, *, num_stored: int
    ) -> StandIn | None:
        """Ask for a text that stands in; None if that gains too little.

        Args:
            state: Of a request that asks for it.
            exact_len: Tokens of its prompt that vLLM has.
            planned: What verified matches give.
            num_stored: Exact tokens behind these that a store beside us has.
        """
        prompt = state.token_ids[: state.num_prompt_tokens].astype(np.int64)
        reused_len = max(planned.reused_len if isinstance(planned, GraftPlan) else 0, num_stored)
        proposal = self.substitutes.propose(state.request_id, prompt, exact_len, reused_len)
        if proposal is None:
            return None
        # K/V of other text are not worth waiting for a store.
        matches = self.catalogue.find(
            state.namespace, proposal.token_ids, max_generation=self.max_generation, with_far=False
        )
        end = exact_len
        for match in matches:
            if match.target_start > end:
                break
            end = max(end, match.target_end)
        if not self.substitutes.realised(proposal, end):
            return None
        spans = covering(matches, exact_len, end)
        assert spans is not None
        return StandIn(GraftPlan.over(len(prompt), exact_len, spans), proposal.source)

    def heard(self, state: RequestState, token_ids: list[int]) -> None:
        """Tell the provider what a request has computed, if its prompt is complete: donors are left of all of it then."""
        if len(token_ids) < state.num_prompt_tokens:
            return
        self.substitutes.heard(state.request_id, np.asarray(token_ids, np.int64), state.lineage)
