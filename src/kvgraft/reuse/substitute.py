"""When a semantic provider is asked whether other text's K/V may stand in, and what of its proposal is taken.

The rule is one for all engines. A request that asks for `ReuseMode.SUBSTITUTE` is put to the provider where verified matches
give less than `min_semantic_gain` tokens, and so many more are left to compute behind the exact prefix: equal text that is
worth anything is preferred. A proposal is taken where it gives so many more than those scraps, which it replaces. What an
engine copies for it is another text's: it is reported as substituted and never published, no policy chooses from it, and
nothing is stated about its risk.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix import GuardedProvider, RadixKey, load_provider
from kvgraft.types import Substitution

if TYPE_CHECKING:
    from kvgraft.config.reuse import ReuseSettings
    from kvgraft.prefix import SemanticCounters, SemanticPrefixResult
    from kvgraft.reuse.lineage import Lineage
    from kvgraft.types import TokenArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Text whose K/V may stand in for those of a prompt, position by position.

    Attributes:
        token_ids: int64, the other text from its first token on, as long as may be taken at most.
        least_len: Tokens of it that must be stored, or it is not worth its error.
        source: What is told about it.
    """

    token_ids: TokenArray
    least_len: int
    source: Substitution


class Substitutes:
    """Puts prompts to a provider. Errors and overruns of it are counted misses. Not thread-safe."""

    def __init__(self, guard: GuardedProvider, min_semantic_gain: int) -> None:
        self._guard = guard
        self._min_gain = min_semantic_gain
        self._told_errors = 0

    @classmethod
    def configured(cls, config: ReuseSettings, model_config: object) -> Substitutes | None:
        """Build and initialise the provider that settings name; None if they name none.

        Raises:
            ConfigError: It cannot be built.
        """
        if not config.semantic_provider:
            return None
        provider = load_provider(config.semantic_provider, model_config)
        logger.info("semantic provider %s answers requests with reuse=substitute", config.semantic_provider)
        guard = GuardedProvider(provider, config.semantic_deadline_ms / 1e3)
        made = cls(guard, config.min_semantic_gain)
        weakref.finalize(made, guard.shut_down)  # not every engine tells its plug-ins that it ends
        return made

    @property
    def counters(self) -> SemanticCounters:
        """What became of the calls."""
        return self._guard.counters

    @property
    def num_errors(self) -> int:
        """Calls that failed or took too long."""
        return self.counters.errors + self.counters.timeouts

    def take_errors(self) -> int:
        """Return how many there were since the last call."""
        new = self.num_errors - self._told_errors
        self._told_errors += new
        return new

    def propose(self, rid: str, token_ids: TokenArray, exact_len: int, reused_len: int) -> Proposal | None:
        """Ask for a text that may stand in; None where there is too little to gain, or no answer.

        Args:
            rid: Name of the request.
            token_ids: int64 prompt; its last token is always computed.
            exact_len: Tokens of it that the exact prefix cache has.
            reused_len: Tokens that verified matches give besides.
        """
        longest = len(token_ids) - 1
        least_len = exact_len + reused_len + self._min_gain
        if reused_len >= self._min_gain or least_len > longest:
            return None
        answer = self._guard.propose(rid, token_ids)
        proposal = None if answer is None else self._checked(answer, least_len, longest)
        if proposal is None:
            self.counters.misses += 1
        return proposal

    def realised(self, proposal: Proposal, stored_len: int) -> bool:
        """Count a proposal of which `stored_len` tokens are there; tell whether it is to be taken."""
        is_taken = stored_len >= proposal.least_len
        self.counters.hits += is_taken
        self.counters.misses += not is_taken
        return is_taken

    def heard(self, rid: str, token_ids: TokenArray, lineage: Lineage) -> None:
        """Tell the provider what a finished request has stored, unless any of it is approximate.

        A text too short to gain anything is not told of: health checks and warm-ups are.
        """
        if len(token_ids) >= self._min_gain and not lineage.is_approximate:
            self._guard.cached(rid, token_ids)

    def close(self) -> None:
        """Let the provider give back its resources."""
        self._guard.shut_down()

    def _checked(self, answer: SemanticPrefixResult, least_len: int, longest: int) -> Proposal | None:
        """Cut an answer to what may be taken; None if it is too short, or makes no sense, which counts as an error."""
        try:
            token_ids = RadixKey(np.asarray(answer.alternate_token_ids)).token_ids
            meant = int(answer.num_cached_tokens)
            token_ids = token_ids[: min(longest, meant) if meant > 0 else longest]
            source = Substitution(str(answer.source_id), dict(answer.metadata or {}))
        except Exception:
            self.counters.errors += 1
            logger.exception("a semantic provider's answer makes no sense; counted as a miss")
            return None
        return Proposal(token_ids, least_len, source) if len(token_ids) >= least_len else None
