"""From a prompt as the user gives it to a checked `Request`. Touches no engine state: any thread may use it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import quoted
from kvgraft.engine.document_names import DocumentLabel, labelled_tokens
from kvgraft.engine.grammars import Grammars
from kvgraft.engine.loading import eos_token_ids
from kvgraft.engine.request import Request, SessionName, SessionTurn
from kvgraft.engine.sampling_params import SamplingParams
from kvgraft.engine.structure import StructureSpec
from kvgraft.errors import ConfigError, ContextLengthError, about, one_line
from kvgraft.graft.drift import DriftCorrection, drift_correction
from kvgraft.graft.select import SelectionPolicy, fault
from kvgraft.reuse.policy import configured_policy
from kvgraft.types import NamedPart, Namespace, ReuseMode, TokenArray

if TYPE_CHECKING:
    from kvgraft.config import EngineConfig
    from kvgraft.engine.loading import LoadedModel
    from kvgraft.engine.structure import Structure

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
        self._configured_policy = self.policy = self._named_policy(config.selection, may_import=True)
        self.correction = drift_correction(config.correction)
        self._numbers = itertools.count(1)
        self._grammars = Grammars(loaded, eos_token_ids(loaded))

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
        priority: int = 0,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        session_id: str | None = None,
        append: bool = False,
        owner: str = "",
        provisional: bool = False,
        documents: Sequence[DocumentLabel] = (),
    ) -> Request:
        """Return a request whose output is cut to what fits behind its prompt.

        Args:
            prompt: Text or token ids.
            sampling: How to generate; greedy by default.
            reuse: What may be reused.
            cache_salt: Requests with different salts never share K/V.
            selection: Selection policy, its name, or None for the configured one.
            correction: Drift correction, its name, or None for the configured one.
            priority: Under the eviction policy `priority`, prefixes of higher ones stay longer.
            request_id: Name of the request, or None.
            add_special_tokens: Whether the tokenizer adds its own.
            session_id: Session that this is a turn of, or None.
            append: `prompt` follows what the session holds; otherwise it is all of it.
            owner: Whose the session is, besides the salt.
            provisional: With `reuse="verified"`: stream drafted tokens, too, before they are verified.
            documents: What parts of the prompt are called in reports; goes with `append` not at all.

        Raises:
            ConfigError: The prompt is empty or too long, or an argument is wrong.
        """
        with about("prompt"):
            token_ids = self.tokenize(prompt, add_special_tokens=add_special_tokens)
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise ConfigError(f"sampling is a SamplingParams or None, not {quoted(sampling)}", "sampling")
        if not isinstance(cache_salt, str):
            raise ConfigError(f"cache_salt is a text, not {quoted(cache_salt)}", "cache_salt")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ConfigError(f"priority is a whole number, not {quoted(priority)}", "priority")
        if not (request_id is None or isinstance(request_id, str)):
            raise ConfigError(f"request_id is a text or None, not {quoted(request_id)}", "request_id")
        self._check_tokens(sampling)
        mode = self._mode(reuse, provisional=provisional)
        if mode is ReuseMode.VERIFIED:
            # The prompt is computed again whatever drafts see, so they get what costs nothing.
            selection = "none" if selection is None else selection
            correction = "none" if correction is None else correction
        sampling = self._fitted(sampling, len(token_ids))
        namespace = Namespace(self._loaded.fingerprint, tenant_salt=cache_salt)
        name = request_id or f"r{next(self._numbers)}"
        session = None
        if session_id is not None:
            later = self.tokenize(prompt, add_special_tokens=False) if append and isinstance(prompt, str) else token_ids
            session = SessionTurn(self.session_name(session_id, owner, cache_salt), later if append else None)
        elif append:
            raise ConfigError("append puts a prompt behind what a session holds; give a session_id", "append")
        return Request(
            name,
            token_ids,
            sampling,
            mode,
            namespace,
            self.selection(selection),
            correction=self._correction(correction),
            session=session,
            priority=priority,
            provisional=provisional,
            structure=self._structure(sampling),
            documents=self._documents(prompt, len(token_ids), documents, append=append, special=add_special_tokens),
        )

    def _documents(
        self, prompt: Prompt, num_tokens: int, labels: Sequence[DocumentLabel], *, append: bool, special: bool
    ) -> tuple[NamedPart, ...]:
        """Which tokens of the prompt have names."""
        if not labels:
            return ()
        if append:
            raise ConfigError("documents are named in whole prompts; leave append out, or the names", "documents")
        text = prompt if isinstance(prompt, str) else None
        with about("documents"):
            return labelled_tokens(text, num_tokens, labels, self._loaded.tokenizer, add_special_tokens=special)

    def _check_tokens(self, sampling: SamplingParams) -> None:
        """Raise `ConfigError` for token ids that the model does not have, and for an output longer than it may be."""
        named = {
            "stop_token_ids": sampling.stop_token_ids,
            "allowed_token_ids": sampling.allowed_token_ids or (),
            "bad_token_ids": itertools.chain.from_iterable(sampling.bad_token_ids),
            "logit_bias": (token for token, _ in sampling.logit_bias),
        }
        for name, token_ids in named.items():
            highest = max(token_ids, default=0)
            if highest >= self._loaded.vocab_size:
                message = f"{name} has token id {highest}; this model's lie in [0, {self._loaded.vocab_size})"
                raise ConfigError(message, name)
        if sampling.min_tokens > sampling.max_new_tokens:
            raise ConfigError(
                f"min_tokens is {sampling.min_tokens} and max_new_tokens {sampling.max_new_tokens}; raise max_new_tokens",
                "min_tokens",
            )

    def _structure(self, sampling: SamplingParams) -> Structure | None:
        """What the output has to be, compiled: here, where it holds up no step of the engine."""
        if sampling.structure is None:
            return None
        if not isinstance(sampling.structure, StructureSpec):
            raise ConfigError(f"structure is a StructureSpec or None, not {quoted(sampling.structure)}", "structure")
        if sampling.ignore_eos:
            message = "ignore_eos goes on behind the end that a structure has; leave out one of them"
            raise ConfigError(message, "ignore_eos")
        try:
            with about("structure"):
                return self._grammars.compile(sampling.structure)
        except ImportError as error:  # a request asks for it, so the request is refused
            raise ConfigError(str(error), "structure") from error

    def _mode(self, reuse: ReuseMode | str, *, provisional: bool) -> ReuseMode:
        """The mode meant, if this engine has it and provisional tokens, if there are to be such, come with it."""
        with about("reuse"):
            mode = reuse_mode(reuse)
        if mode is ReuseMode.SUBSTITUTE and not self._config.semantic_provider:
            raise ConfigError(
                "reuse='substitute' needs a semantic_provider, of which this engine has none; use 'graft'", "reuse"
            )
        if not isinstance(provisional, bool):
            raise ConfigError(f"provisional is True or False, not {quoted(provisional)}", "provisional")
        if provisional and mode is not ReuseMode.VERIFIED:
            message = "provisional tokens come with reuse='verified' only; ask for that or leave them out"
            raise ConfigError(message, "provisional")
        return mode

    def session_name(self, session_id: str, owner: str = "", cache_salt: str = "") -> SessionName:
        """Name a session of this model's.

        Raises:
            ConfigError: The id is no text.
        """
        if not isinstance(session_id, str):
            raise ConfigError(f"session_id is a text, not {quoted(session_id)}", "session_id")
        if not isinstance(cache_salt, str):
            raise ConfigError(f"cache_salt is a text, not {quoted(cache_salt)}", "cache_salt")
        return SessionName(session_id, owner, Namespace(self._loaded.fingerprint, tenant_salt=cache_salt).key)

    def behind(self, held_ids: TokenArray, request: Request, append_ids: TokenArray) -> Request:
        """Return `request` with a prompt of `held_ids` and `append_ids`.

        Raises:
            ConfigError: They are too long together.
        """
        token_ids = np.concatenate([held_ids, append_ids])
        return replace(request, token_ids=token_ids, sampling=self._fitted(request.sampling, len(token_ids)))

    def _fitted(self, sampling: SamplingParams, num_tokens: int) -> SamplingParams:
        """Cut the output to what fits behind a prompt of `num_tokens`; raises `ConfigError` if that is nothing."""
        if num_tokens + 1 > self.longest:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and {self.longest - 1} fit: this model's maximum context length is "
                f"{self.max_model_len} tokens, and there are {self._num_slots} KV slots; shorten it or raise num_slots",
                "prompt",
            )
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.longest - num_tokens))

    def selection(self, selection: str | SelectionPolicy | None) -> SelectionPolicy:
        """The policy meant by a name or by None, the configured one."""
        if selection is None:
            return self.policy
        if isinstance(selection, str):
            if selection == self._config.selection:
                return self._configured_policy
            with about("selection"):
                return self._named_policy(selection, may_import=False)  # a client may have said it
        if not isinstance(selection, SelectionPolicy):
            raise ConfigError(
                f"selection is the name of a policy, a SelectionPolicy or None, not {quoted(selection)}", "selection"
            )
        wrong = fault(selection)
        if wrong is not None:
            raise ConfigError(f"selection {type(selection).__name__}: {wrong}; correct the class", "selection")
        return selection

    def _correction(self, correction: str | DriftCorrection | None) -> DriftCorrection | None:
        """The correction meant by a name or by None, the configured one; the name `none` means none."""
        if correction is None:
            return self.correction
        if isinstance(correction, str):
            with about("correction"):
                return drift_correction(correction)
        if not isinstance(correction, DriftCorrection):
            raise ConfigError(
                f"correction is the name of one, a DriftCorrection or None, not {quoted(correction)}", "correction"
            )
        return correction

    def _named_policy(self, name: str, *, may_import: bool) -> SelectionPolicy:
        config = self._config
        return configured_policy(
            name, first_k=config.first_k, recompute_ratio=config.recompute_ratio, may_import=may_import
        )


def reuse_mode(reuse: ReuseMode | str) -> ReuseMode:
    """Parse a reuse mode; raises `ConfigError` that lists what exists."""
    try:
        return ReuseMode(reuse)
    except ValueError as error:
        raise ConfigError(f"unknown reuse mode {quoted(reuse)}; choose {', '.join(ReuseMode)}") from error
