"""Rule of when a semantic provider is asked for text with K/V that may stand in, and what of its proposal is taken.

The rule is one for all engines. A request that asks for `ReuseMode.SUBSTITUTE` is put to the provider where verified matches
give less than `min_semantic_gain` tokens, and so many more are left to compute after the exact prefix: equal text that is
worth anything is preferred. A proposal is taken where it gives so many more than those scraps, which it replaces. What an
engine copies for it is another text's: it is reported as substituted and never published, no policy chooses from it, and
nothing is stated about its risk.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.substitution import GuardedProvider, load_provider, provider_class
from kvgraft.token_key import RadixKey
from kvgraft.types import Substitution

if TYPE_CHECKING:
    from kvgraft.config.reuse import ReuseSettings
    from kvgraft.reuse.lineage import Lineage
    from kvgraft.substitution import SemanticCounters, SemanticPrefixResult
    from kvgraft.types import TokenArray

logger = logging.getLogger(__name__)

_PARAMETERS = {
    "semantic_min_similarity": ("threshold", 1.0),
    "semantic_patience_ms": ("patience_s", 1e-3),
    "semantic_capacity": ("capacity", 1.0),
    "semantic_weights": ("directory", 1.0),
}
"""Settings of providers, the parameter of a constructor that takes each, and its unit."""


@dataclass(frozen=True, slots=True, eq=False)
class Substitute:
    """Text with K/V that may stand in for those of a prompt, position by position."""

    token_ids: TokenArray
    """int64, the other text from its first token on, as long as may be taken at most."""
    least_len: int
    """Tokens of it that must be stored, or it is not worth its error."""
    source: Substitution


class Substitutes:
    """Puts prompts to a provider. Errors and overruns of it are counted misses. Not thread-safe."""

    def __init__(self, guard: GuardedProvider, min_semantic_gain: int) -> None:
        self._guard = guard
        self._min_gain = min_semantic_gain
        self._taken: dict[str, int] = {}

    @classmethod
    def configured(cls, config: ReuseSettings, model_config: object) -> Substitutes:
        """Build and initialise the provider that settings name; engines import this where they name one.

        Raises:
            ConfigError: It cannot be built.
        """
        options = _options_of(config)
        provider = load_provider(config.semantic_provider, model_config, options)
        logger.info("semantic provider %s answers requests with reuse=substitute", config.semantic_provider)
        guard = GuardedProvider(provider, config.semantic_deadline_ms / 1e3 + float(options.get("patience_s", 0.0)))
        made = cls(guard, config.min_semantic_gain)
        weakref.finalize(made, guard.shut_down)  # not every engine closes its plug-ins
        return made

    @property
    def counters(self) -> SemanticCounters:
        """Counters of the calls."""
        return self._guard.counters

    def outcomes(self) -> dict[str, int]:
        """Return the number of calls so far, by the label `outcome` of their metric."""
        return self.counters.by_outcome()

    @property
    def num_errors(self) -> int:
        """Calls that failed or took too long."""
        return self.counters.num_failed

    def take_outcomes(self) -> dict[str, int]:
        """Return the outcomes since the last time, those with calls only."""
        before, self._taken = self._taken, self.outcomes()
        news = {outcome: count - before.get(outcome, 0) for outcome, count in self._taken.items()}
        return {outcome: count for outcome, count in news.items() if count}

    def propose(self, rid: str, token_ids: TokenArray, prefix_len: int, reused_len: int) -> Substitute | None:
        """Ask for a text that may stand in; None where there is too little to gain, or no answer.

        Args:
            rid: Name of the request.
            token_ids: int64 prompt; its last token is always computed.
            prefix_len: Tokens of it that the exact prefix cache has.
            reused_len: Tokens that verified matches give besides.
        """
        longest = len(token_ids) - 1
        least_len = prefix_len + reused_len + self._min_gain
        if reused_len >= self._min_gain or least_len > longest:
            return None
        num_errors = self.num_errors
        answer = self._guard.propose(rid, token_ids)
        proposal = None if answer is None else self._checked(answer, least_len, longest)
        self.counters.misses += proposal is None and self.num_errors == num_errors
        return proposal

    def realised(self, proposal: Substitute, stored_len: int) -> bool:
        """Count a proposal of which `stored_len` tokens are there; return whether it is to be taken."""
        is_taken = stored_len >= proposal.least_len
        self.counters.hits += is_taken
        self.counters.misses += not is_taken
        return is_taken

    def heard(self, rid: str, token_ids: TokenArray, lineage: Lineage) -> None:
        """Report to the provider what a finished request has stored, unless any of it is approximate.

        A text too short to gain anything is not reported, such as that of health checks and warm-ups.
        """
        if len(token_ids) >= self._min_gain and not lineage.is_approximate:
            self._guard.cached(rid, token_ids)

    def close(self) -> None:
        """Let the provider give back its resources."""
        self._guard.shut_down()

    def _checked(self, answer: SemanticPrefixResult, least_len: int, longest: int) -> Substitute | None:
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
        return Substitute(token_ids, least_len, source) if len(token_ids) >= least_len else None


def _options_of(config: ReuseSettings) -> dict[str, Any]:
    """Return the arguments of the provider's constructor: those settings that are parameters of it.

    Raises:
        ConfigError: There is no such provider, or a setting was changed that it does not take.
    """
    named = inspect.signature(provider_class(config.semantic_provider)).parameters
    options: dict[str, Any] = {}
    for setting, (parameter, unit) in _PARAMETERS.items():
        value = getattr(config, setting)
        if parameter in named:
            options[parameter] = value * unit if isinstance(value, float) else value
        elif value != config.field(setting).default:
            raise ConfigError(
                f"{setting} is not taken by {config.semantic_provider}: its constructor has no {parameter}; leave it out"
            )
    return options
