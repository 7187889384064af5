"""Another text for a request that asked for it: named by a semantic provider and found among donors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import DonorQuery
from kvgraft.errors import ConfigError
from kvgraft.integrations.vllm.scheduler.claims import covered_to, covering
from kvgraft.reuse.substitute import Substitutes
from kvgraft.types import GraftPlan

if TYPE_CHECKING:
    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.donors import DonorCatalogue
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.reuse.attempt import AskedPrompt
    from kvgraft.types import Miss, Substitution


@dataclass(frozen=True, slots=True)
class DonorSubstitutes:
    """Lets donors of other text stand in where a provider names it. Not thread-safe."""

    provider: Substitutes
    catalogue: DonorCatalogue
    max_generation: int

    @classmethod
    def configured(cls, config: VLLMConfig, facts: EngineFacts, catalogue: DonorCatalogue) -> DonorSubstitutes:
        """Build the provider that settings name.

        Raises:
            ConfigError: It cannot be built, or the model has sliding windows.
        """
        if facts.window:
            raise ConfigError("semantic_provider does not go with sliding windows; unset it")
        return cls(Substitutes.configured(config, facts.model_config), catalogue, config.max_generation)

    def find(
        self, prompt: AskedPrompt, planned: GraftPlan | Miss, *, num_stored: int
    ) -> tuple[GraftPlan, Substitution] | None:
        """Plan to copy other text, position by position after the exact prefix; None if that gains too little.

        It must gain more than `planned`, of verified matches, and than `num_stored` exact tokens that a store beside us has.
        """
        text, cached_len = prompt.text.astype(np.int64), prompt.prefix_len
        reused_len = max(planned.reused_len if isinstance(planned, GraftPlan) else 0, num_stored)
        proposal = self.provider.propose(prompt.request_id, text, cached_len, reused_len)
        if proposal is None:
            return None
        # K/V of other text are not worth waiting for a store.
        matches = self.catalogue.find(
            DonorQuery(prompt.namespace, proposal.token_ids, max_generation=self.max_generation, with_stored=False)
        )
        end = covered_to(matches, cached_len)
        if not self.provider.realised(proposal, end):
            return None
        spans = covering(matches, cached_len, end)
        assert spans is not None
        return GraftPlan.over(len(text), cached_len, spans), proposal.source
