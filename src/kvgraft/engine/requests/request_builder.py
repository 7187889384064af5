"""From a prompt as the user gives it to a checked `Request`. Touches no engine state: any thread may use it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import quoted
from kvgraft.engine.model.loading import eos_token_ids
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.repair import RepairRules
from kvgraft.engine.requests.request import Request, SessionName, SessionTurn
from kvgraft.engine.sampling.grammars import Grammars
from kvgraft.engine.sampling.structure import StructureSpec
from kvgraft.errors import ConfigError, ContextLengthError, about, one_line
from kvgraft.graft.drift import DriftCorrection, drift_correction
from kvgraft.graft.select import SelectionPolicy, fault
from kvgraft.literal_text import encode
from kvgraft.reuse.policy import configured_policy
from kvgraft.tokenising import TextBound
from kvgraft.types import NamedPart, Namespace, RepairTime, ReuseMode, TokenArray

if TYPE_CHECKING:
    from kvgraft.config import EngineConfig
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.sampling.sampling_params import SamplingParams
    from kvgraft.engine.sampling.structure import Structure

Prompt = str | Sequence[int] | TokenArray
"""Text (needs a tokenizer) or token ids."""
_DEFAULTS = RequestOptions()


class RequestBuilder:
    """Tokenises and validates for one model and one pool.

    Attributes:
        longest: Tokens that prompt and output may have together.
        policy: The configured selection policy.
        correction: The configured drift correction, or None.
        repair: The configured rules of repairs.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, num_slots: int) -> None:
        self.max_model_len = config.max_model_len or loaded.max_model_len
        self.longest = min(self.max_model_len, num_slots)
        self._loaded = loaded
        self._config = config
        self._num_slots = num_slots
        self._configured_policy = self.policy = self._named_policy(config.selection, may_import=True)
        self.correction = drift_correction(config.correction)
        self.repair = RepairRules.configured(config)
        self._numbers = itertools.count(1)
        self._grammars = Grammars(loaded, eos_token_ids(loaded))
        self._bound = TextBound.of(loaded.tokenizer)

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

    def check_length(self, prompt: Prompt) -> None:
        """Raise `ContextLengthError` for a prompt that cannot fit by its length alone: nothing of it is looked at."""
        most = self.longest - 1
        if not isinstance(prompt, str):
            self._check_fits(prompt_length(prompt))
        elif not self._bound.may_fit(prompt, most):
            raise ContextLengthError(
                f"the prompt has {len(prompt):,} characters, and {most:,} tokens have at most "
                f"{most * self._bound.longest_token:,}: {self._limits()}; shorten it or raise num_slots",
                "prompt",
            )

    def _check_fits(self, num_tokens: int) -> None:
        """Raise `ContextLengthError` if no output fits after a prompt of `num_tokens`."""
        if num_tokens + 1 > self.longest:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and {self.longest - 1} fit: {self._limits()}; shorten it or raise "
                "num_slots",
                "prompt",
            )

    def _limits(self) -> str:
        return f"this model's maximum context length is {self.max_model_len} tokens, and there are {self._num_slots} KV slots"

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self._loaded.tokenizer is not None
        try:
            return encode(self._loaded.tokenizer, text, add_special_tokens=add_special_tokens).token_ids
        except ConfigError:
            raise
        except Exception as error:  # lone surrogates have no UTF-8; a tokenizer is foreign code
            raise ConfigError(f"the prompt cannot be tokenised: {one_line(error)}") from error

    def build(self, prompt: Prompt, options: RequestOptions = _DEFAULTS) -> Request:
        """Return a request whose output is cut to what fits after its prompt.

        Raises:
            ConfigError: The prompt is empty or too long, or an option does not go with it or with this engine.
        """
        with about("prompt"):
            self.check_length(prompt)
            token_ids = self.tokenize(prompt, add_special_tokens=options.add_special_tokens)
        sampling = options.sampling
        self._check_tokens(sampling)
        mode = self._mode(options)
        # A verified answer computes the prompt again in any case, so drafts get what costs nothing.
        default = "none" if mode is ReuseMode.VERIFIED else None
        return Request(
            options.request_id or f"r{next(self._numbers)}",
            token_ids,
            self._fitted(sampling, len(token_ids)),
            mode,
            Namespace(self._loaded.fingerprint, tenant_salt=options.cache_salt),
            self.selection(default if options.selection is None else options.selection),
            correction=self._correction(default if options.correction is None else options.correction),
            repair=self._repair(options.repair),
            session=self._turn(prompt, token_ids, options),
            priority=options.priority,
            provisional=options.provisional,
            structure=self._structure(sampling),
            documents=self._documents(prompt, len(token_ids), options),
        )

    def _turn(self, prompt: Prompt, token_ids: TokenArray, options: RequestOptions) -> SessionTurn | None:
        if options.session_id is None:
            if options.append:
                raise ConfigError("append puts a prompt after what a session holds; give a session_id", "append")
            return None
        name = self.session_name(options.session_id, options.owner, options.cache_salt)
        if not options.append:
            return SessionTurn(name)
        return SessionTurn(
            name, self.tokenize(prompt, add_special_tokens=False) if isinstance(prompt, str) else token_ids
        )

    def _documents(self, prompt: Prompt, num_tokens: int, options: RequestOptions) -> tuple[NamedPart, ...]:
        """Return the parts of the prompt that have names."""
        if not options.documents:
            return ()
        if options.append:
            raise ConfigError("documents are named in whole prompts; leave append out, or the names", "documents")
        from kvgraft.engine.requests.document_names import labelled_tokens  # loaded where it is asked for

        text, special = prompt if isinstance(prompt, str) else None, options.add_special_tokens
        with about("documents"):
            return labelled_tokens(
                text, num_tokens, options.documents, self._loaded.tokenizer, add_special_tokens=special
            )

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

    def compile(self, sampling: SamplingParams) -> None:
        """Compile what the output has to be, so that `build` finds it done: that takes up to seconds, and needs no prompt.

        Raises:
            ConfigError: It cannot be compiled.
        """
        self._structure(sampling)

    def _structure(self, sampling: SamplingParams) -> Structure | None:
        """Return what the output has to be, compiled here, where it holds up no step of the engine."""
        if sampling.structure is None:
            return None
        if not isinstance(sampling.structure, StructureSpec):
            raise ConfigError(f"structure is a StructureSpec or None, not {quoted(sampling.structure)}", "structure")
        if sampling.ignore_eos:
            message = "ignore_eos goes on after the end that a structure has; leave out one of them"
            raise ConfigError(message, "ignore_eos")
        try:
            with about("structure"):
                return self._grammars.compile(sampling.structure)
        except ImportError as error:  # a request asks for it, so the request is refused
            raise ConfigError(str(error), "structure") from error

    def _mode(self, options: RequestOptions) -> ReuseMode:
        """Return the mode meant, if this engine has it and it goes with `provisional`."""
        with about("reuse"):
            mode = reuse_mode(options.reuse)
        if mode is ReuseMode.SUBSTITUTE and not self._config.semantic_provider:
            raise ConfigError(
                "reuse='substitute' needs a semantic_provider, of which this engine has none; use 'graft'", "reuse"
            )
        if options.provisional and mode is not ReuseMode.VERIFIED:
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

    def continued(self, held_ids: TokenArray, request: Request, append_ids: TokenArray) -> Request:
        """Return `request` with a prompt of `held_ids` and `append_ids`.

        Raises:
            ConfigError: They are too long together.
        """
        token_ids = np.concatenate([held_ids, append_ids])
        return replace(request, token_ids=token_ids, sampling=self._fitted(request.sampling, len(token_ids)))

    def _fitted(self, sampling: SamplingParams, num_tokens: int) -> SamplingParams:
        """Cut the output to what fits after a prompt of `num_tokens`; raises `ConfigError` if that is nothing."""
        self._check_fits(num_tokens)
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

    def _repair(self, repair: str | RepairTime | RepairRules | None) -> RepairRules:
        """Return the rules, for the time meant by its name or by None, the configured one."""
        if repair is None:
            return self.repair
        if isinstance(repair, RepairRules):
            return repair
        try:
            return replace(self.repair, time=RepairTime(repair))
        except ValueError as error:
            raise ConfigError(f"repair is {' or '.join(RepairTime)}, not {quoted(repair)}", "repair") from error

    def _named_policy(self, name: str, *, may_import: bool) -> SelectionPolicy:
        config = self._config
        return configured_policy(
            name, first_k=config.first_k, recompute_ratio=config.recompute_ratio, may_import=may_import
        )


def prompt_length(prompt: Prompt) -> int:
    """Return how many characters or token ids a prompt has; 0 for what is no prompt, which `tokenize` refuses."""
    try:
        return len(prompt)
    except TypeError:
        return 0


def reuse_mode(reuse: ReuseMode | str) -> ReuseMode:
    """Parse a reuse mode; raises `ConfigError` that lists what exists."""
    try:
        return ReuseMode(reuse)
    except ValueError as error:
        raise ConfigError(f"unknown reuse mode {quoted(reuse)}; choose {', '.join(ReuseMode)}") from error
