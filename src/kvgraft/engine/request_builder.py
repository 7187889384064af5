"""From a prompt as the user gives it to a checked `Request`. Touches no engine state: any thread may use it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import quoted
from kvgraft.engine.request import Request
from kvgraft.engine.sampling import SamplingParams
from kvgraft.errors import ConfigError, one_line
from kvgraft.graft.drift import DriftCorrection, drift_correction
from kvgraft.graft.select import SelectionPolicy
from kvgraft.reuse.policy import configured_policy
from kvgraft.types import Namespace, ReuseMode, TokenArray

if TYPE_CHECKING:
    from kvgraft.config import EngineConfig
    from kvgraft.engine.loading import LoadedModel

Prompt = str | Sequence[int] | TokenArray
"""Text (needs a tokenizer) or token ids."""


class RequestBuilder:
    """Tokenises and validates for one model and one pool.

    Attributes:
        longest: Tokens that prompt and output may have together.
        policy: The configured selection policy.
        correction: The configured drift correction, or None.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, num_slots: int) -> None:
        self.max_model_len = config.max_model_len or loaded.max_model_len
        self.longest = min(self.max_model_len, num_slots)
        self._loaded = loaded
        self._config = config
        self._num_slots = num_slots
        self.policy = self._named_policy(config.selection)
        self.correction = drift_correction(config.correction)
        self._numbers = itertools.count(1)

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenArray:
        """Turn a prompt into int64 token ids; ids are checked and copied.

        Raises:
            ConfigError: It is empty, not made of token ids, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self._loaded.tokenizer is None:
                raise ConfigError(f"model {self._loaded.name} has no tokenizer; give token ids")
            prompt = self._encode(prompt, add_special_tokens=add_special_tokens)
        vocabulary = self._loaded.vocab_size
        try:
            given = np.asarray(prompt)
            is_numbers = given.dtype.kind in "iu" or not given.size
            token_ids = given.astype(np.int64) if is_numbers else None
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"a prompt is text or a list of token ids in [0, {vocabulary})") from error
        if token_ids is None:
            raise ConfigError(f"a prompt is text or a list of token ids in [0, {vocabulary}), not {quoted(prompt)}")
        if token_ids.ndim != 1 or not len(token_ids):
            raise ConfigError("the prompt is empty; give at least one token")
        if token_ids.min() < 0 or token_ids.max() >= vocabulary:
            raise ConfigError(f"token ids must lie in [0, {vocabulary}); was the prompt tokenised for another model?")
        return token_ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self._loaded.tokenizer is not None
        try:
            token_ids: list[int] = self._loaded.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        except Exception as error:  # lone surrogates have no UTF-8; a tokenizer is foreign code
            raise ConfigError(f"the prompt cannot be tokenised: {one_line(error)}") from error
        return token_ids

    def build(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
        correction: str | DriftCorrection | None = None,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> Request:
        """Return a request whose output is cut to what fits behind its prompt.

        Raises:
            ConfigError: The prompt is empty or too long, or an argument is wrong.
        """
        token_ids = self.tokenize(prompt, add_special_tokens=add_special_tokens)
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise ConfigError(f"sampling is a SamplingParams or None, not {quoted(sampling)}")
        if not isinstance(cache_salt, str):
            raise ConfigError(f"cache_salt is a text, not {quoted(cache_salt)}")
        if not (request_id is None or isinstance(request_id, str)):
            raise ConfigError(f"request_id is a text or None, not {quoted(request_id)}")
        if len(token_ids) + 1 > self.longest:
            raise ConfigError(
                f"the prompt has {len(token_ids)} tokens and {self.longest - 1} fit (model length {self.max_model_len}, "
                f"{self._num_slots} KV slots); shorten it or raise num_slots"
            )
        if len(token_ids) + sampling.max_new_tokens > self.longest:
            sampling = replace(sampling, max_new_tokens=self.longest - len(token_ids))
        namespace = Namespace(self._loaded.fingerprint, tenant_salt=cache_salt)
        name = request_id or f"r{next(self._numbers)}"
        return Request(
            name,
            token_ids,
            sampling,
            reuse_mode(reuse),
            namespace,
            self.selection(selection),
            correction=self._correction(correction),
        )

    def selection(self, selection: str | SelectionPolicy | None) -> SelectionPolicy:
        """The policy meant by a name or by None, the configured one."""
        if selection is None:
            return self.policy
        if isinstance(selection, str):
            return self._named_policy(selection)
        if not isinstance(selection, SelectionPolicy):
            raise ConfigError(f"selection is the name of a policy, a SelectionPolicy or None, not {quoted(selection)}")
        return selection

    def _correction(self, correction: str | DriftCorrection | None) -> DriftCorrection | None:
        """The correction meant by a name or by None, the configured one; the name `none` means none."""
        if correction is None:
            return self.correction
        if isinstance(correction, str):
            return drift_correction(correction)
        if not isinstance(correction, DriftCorrection):
            raise ConfigError(f"correction is the name of one, a DriftCorrection or None, not {quoted(correction)}")
        return correction

    def _named_policy(self, name: str) -> SelectionPolicy:
        config = self._config
        return configured_policy(name, first_k=config.first_k, recompute_ratio=config.recompute_ratio)


def reuse_mode(reuse: ReuseMode | str) -> ReuseMode:
    """Parse a reuse mode; raises `ConfigError` that lists what exists."""
    try:
        return ReuseMode(reuse)
    except ValueError as error:
        raise ConfigError(f"unknown reuse mode {quoted(reuse)}; choose {', '.join(ReuseMode)}") from error
