"""The offline API: load a model, generate with reuse, get a report per request."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np

from kvgraft.config import quoted
from kvgraft.engine.assembly import engine_config
from kvgraft.engine.core import Engine, StepEvent
from kvgraft.engine.idle.scoring import Probe, Score, probe, score
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.text import OutputText
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.errors import ConfigError
from kvgraft.types import RepairTime, ReuseMode, TokenArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.config import EngineConfig
    from kvgraft.engine.idle.dictated_answer import DictatedAnswer
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.model.adapter import TransformersAdapter
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.model.self_check import SelfCheckReport
    from kvgraft.engine.requests.options import OptionFields
    from kvgraft.engine.requests.repair import RepairRules
    from kvgraft.engine.requests.request import Request, RequestOutput, StreamPart
    from kvgraft.engine.requests.request_builder import Prompt
    from kvgraft.engine.requests.risk import HeldRisk
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.memory import SlotUsage
    from kvgraft.observability import Recorder
    from kvgraft.types import RepairTime


class LLM:
    """A model that reuses the K/V of everything it has read. Not thread-safe.

    Prompts of `generate` run one after another, so that later ones reuse earlier ones; streams that are open at the same
    time run side by side.

    Example:
        >>> llm = LLM("graft-tiny")
        >>> first, second = llm.generate([prompt, other_prompt_with_the_same_documents])
        >>> second.report.shifted_tokens
    """

    def __init__(
        self,
        model: str | LoadedModel = "graft-tiny",
        config: EngineConfig | None = None,
        recorder: Recorder | None = None,
        **settings: object,
    ) -> None:
        """Load `model` (name, directory, hub id or a `LoadedModel`) and prove that its K/V may be reused.

        Args:
            model: What to load.
            config: Settings; default: from the environment (`KVGRAFT_*`).
            recorder: Gets every step and every request that ends.
            **settings: Single settings of `EngineConfig` that override `config`.

        Raises:
            ConfigError: A setting or the model's name is wrong.
            ModelError: The model cannot be loaded or fails the self-check.
        """
        self._engine = Engine(model, engine_config(config, settings), recorder=recorder)
        self._events: dict[str, deque[StepEvent]] = {}
        self._finalizer = weakref.finalize(self, self._engine.close)

    @property
    def config(self) -> EngineConfig:
        """Settings that the engine runs with, defaults filled in."""
        return self._engine.config

    @property
    def loaded(self) -> LoadedModel:
        """The model, its tokenizer and its fingerprint."""
        return self._engine.loaded

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together by the model's limit; the pool may hold fewer."""
        return self._engine.builder.max_model_len

    @property
    def policy(self) -> SelectionPolicy:
        """Chooses what requests compute again that name no policy themselves."""
        return self._engine.builder.policy

    @property
    def risk(self) -> HeldRisk:
        """At which notch grafts are served, and what may be said about them."""
        return self._engine.risk

    @property
    def self_check(self) -> SelfCheckReport:
        """The proofs about the model."""
        return self._engine.self_check

    @property
    def space(self) -> KVSpace:
        """Slots, stored prefixes and donors: what is kept, and where."""
        return self._engine.space

    @property
    def graft_refusal(self) -> str | None:
        """Reason why this model's K/V cannot be moved (`reuse="graft"` then behaves like `"exact"`), or None."""
        return self._engine.self_check.refusal

    @property
    def num_errors(self) -> int:
        """Lookups and grafts that failed and became misses."""
        return self._engine.manager.num_errors

    @property
    def engine(self) -> Engine:
        """The core that this object drives, for programs that take its steps themselves; it is not safe between threads."""
        return self._engine

    @property
    def adapter(self) -> TransformersAdapter:
        """The model as kvgraft runs it."""
        return self._engine.adapter

    def tokenize(self, prompt: Prompt) -> TokenArray:
        """Turn a prompt into int64 token ids, with the tokenizer's special tokens; ids are checked and copied.

        Returns:
            int64 (num_tokens,), the caller's own.

        Raises:
            ConfigError: It is empty, not made of ids in [0, vocab_size), or text without a tokenizer.
        """
        return self._engine.builder.tokenize(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        **options: Unpack[OptionFields],
    ) -> list[RequestOutput]:
        """Generate for each prompt in order; later prompts reuse what earlier ones computed.

        Args:
            prompts: One prompt or several, each a text or 1-D token ids.
            sampling: How to generate; greedy by default.
            reuse: What may be reused: `graft`, `exact`, `off`, `verified` or `substitute` (`RequestOptions`).
            **options: Other fields of `RequestOptions`, for all prompts; `documents` go with one prompt.

        Returns:
            One output per prompt, in their order.

        Raises:
            ConfigError: A prompt is empty or too long, or an argument is wrong; nothing has been generated then.
            UnknownSessionError: The session is not open.
            SessionInUseError: A turn of it is not done: a stream that is still open.
            OverloadedError: Streams that are open wait, as many as may (`max_waiting`).
            RequestError: The engine failed on a prompt; later ones are not begun, and outputs of earlier ones are lost.
        """
        asked, given = RequestOptions.of(sampling, reuse, **options), _as_list(prompts)
        if asked.documents and len(given) != 1:
            raise ConfigError(
                f"documents are parts of one prompt, and there are {len(given)}; generate one after another"
            )
        requests = [self._engine.builder.build(prompt, asked) for prompt in given]
        outputs = []
        for request in requests:
            *_, last = self._run(request)
            assert last.output is not None
            outputs.append(last.output)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        **options: Unpack[OptionFields],
    ) -> Iterator[StreamPart]:
        """Generate for one prompt, a part per token; closing the iterator early cancels the request.

        Arguments and errors as for `generate`. A wrong prompt raises here; the engine takes the request at the first `next`,
        and what fails from there on is raised by `next`.
        """
        return self._run(self._engine.builder.build(prompt, RequestOptions.of(sampling, reuse, **options)))

    def open_session(self, session_id: str = "", *, ttl_s: float | None = None, cache_salt: str = "") -> str:
        """Open a session and return its id, a made-up one for an empty text.

        Its turns are requests with the same `cache_salt`. Their exact K/V are kept from eviction until it is closed, idle for
        `ttl_s` seconds (at most, and by default, `session_ttl_s`), or the room is needed.

        Raises:
            ConfigError: An argument is wrong, or the id is taken (`SessionInUseError`).
            OverloadedError: As many sessions are open as may be.
        """
        name = self._engine.builder.session_name(session_id, cache_salt=cache_salt)
        return self._engine.sessions.open(name, ttl_s).name.session_id

    def close_session(self, session_id: str, *, cache_salt: str = "") -> None:
        """Forget a session; what it has said stays an ordinary cached prefix. A turn of it that is open goes on.

        Raises:
            UnknownSessionError: There is none.
        """
        self._engine.sessions.close(self._engine.builder.session_name(session_id, cache_salt=cache_salt))

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int] | TokenArray,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
        correction: str | DriftCorrection | None = None,
        repair: str | RepairTime | None = None,
    ) -> Score:
        """Return the logits of a fixed continuation of `prompt`, as they would be served; the cache is left as it was.

        Args:
            prompt: A text or 1-D token ids.
            continuation: 1-D token ids, at least one.
            reuse: What may be reused for the prompt.
            cache_salt: As of `RequestOptions`, as are `selection`, `correction` and `repair`.
            selection: What is computed again.
            correction: What is corrected.
            repair: When that is done; with `after` the first row is from before it.

        Returns:
            Logits, float32 (len(continuation), vocab_size), and the prompt's report.

        Raises:
            ConfigError: Prompt and continuation together are too long, or an argument is wrong.
            CapacityError: Streams that are open hold the slots.

        Complexity: the prompt's prefill, and a row per token of the continuation.
        """
        token_ids = self.tokenize(continuation)
        options = RequestOptions(SamplingParams(len(token_ids)), reuse, cache_salt, selection, correction, repair)
        request, engine = self._continued(prompt, options), self._engine
        with self._lent_slots():
            return score(engine.adapter, engine.manager, request, token_ids, max_rows=engine.config.max_rows)

    @contextmanager
    def probe(
        self,
        prompt: Prompt,
        num_tokens: int,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
        correction: str | DriftCorrection | None = None,
        repair: str | RepairTime | RepairRules | None = None,
    ) -> Iterator[Probe]:
        """Prefill `prompt` and lend it to try continuations of up to `num_tokens` tokens; the cache is left as it was.

        Arguments as for `score`. The probe is good until the `with` ends, which takes its slots back.

        Raises:
            ConfigError: Prompt and continuation together are too long, or an argument is wrong.
            CapacityError: Streams that are open hold the slots.
        """
        options = RequestOptions(SamplingParams(num_tokens), reuse, cache_salt, selection, correction, repair)
        request, engine = self._continued(prompt, options), self._engine
        with (
            self._lent_slots(),
            probe(engine.adapter, engine.manager, request, max_rows=engine.config.max_rows) as opened,
        ):
            yield opened

    def dictate(
        self,
        prompt: Prompt,
        token_ids: Sequence[int] | TokenArray,
        sampling: SamplingParams,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        **options: Unpack[OptionFields],
    ) -> DictatedAnswer:
        """Serve `prompt` step by step with `token_ids` as the beginning of its answer; the cache is left as it was.

        What is measured so is what a request gets: a token that is drawn late sees what earlier steps have repaired.

        Args:
            prompt: A text or 1-D token ids.
            token_ids: 1-D token ids, or none: the first tokens of the answer; greedy ones follow.
            sampling: When the answer ends.
            reuse: What may be reused for the prompt.
            **options: Other fields of `RequestOptions`.

        Returns:
            Tokens, their logits, float32 (num_tokens, vocab_size), times in seconds, and the report.

        Raises:
            ConfigError: Prompt and answer together are too long, an argument is wrong, or a session or `prompt_logprobs` is
                asked for.
            CapacityError: Streams that are open hold the slots.
        """
        from kvgraft.engine.idle.dictated import dictate  # loaded where it is asked for

        request = self._continued(prompt, RequestOptions.of(sampling, reuse, **options))
        if request.session is not None or sampling.prompt_logprobs is not None:
            raise ConfigError(
                "dictate serves one prompt and its answer; leave session_id, append and prompt_logprobs out"
            )
        engine, given = self._engine, self.tokenize(token_ids) if len(token_ids) else np.empty(0, np.int64)
        with self._lent_slots():
            return dictate(
                engine.adapter,
                engine.manager,
                request,
                given,
                text=OutputText.of(self.loaded.tokenizer, request.sampling),
                eos_token_ids=self.eos_token_ids,
                max_rows=engine.config.max_rows,
            )

    @contextmanager
    def _lent_slots(self) -> Iterator[None]:
        """Tell of what is evicted for a request that leaves no trace, and have healing look again once its slots are back."""
        self._engine.num_lent += 1
        try:
            yield
        finally:
            self._engine.num_lent -= 1
            self._engine.flush_events()
            self._engine.healer.wake()

    def _continued(self, prompt: Prompt, options: RequestOptions) -> Request:
        """Return a request for `prompt` and all of `max_new_tokens`; raises `ConfigError` if these do not fit."""
        request = self._engine.builder.build(prompt, options)
        if request.sampling.max_new_tokens < options.sampling.max_new_tokens:
            raise ConfigError(
                f"prompt and continuation exceed the {self._engine.builder.longest} tokens that fit; shorten them"
            )
        return request

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._engine.eos_token_ids

    def validate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> None:
        """Raise `ConfigError` if `generate` would refuse the prompt.

        Complexity: that of tokenising; the model is not run.
        """
        self._engine.builder.build(prompt, RequestOptions.of(sampling, ReuseMode.GRAFT, request_id="validated"))

    def audit(self) -> int:
        """Hold every sampled request that has ended against full prefill; returns how many there were.

        `AsyncLLM` does so by itself while it has nothing else to do.

        Complexity: a full prefill for each.
        """
        count = self._engine.auditor.num_pending
        while self._engine.auditor.has_work:
            self._engine.audit_step()
        return count

    def heal(self, max_seconds: float | None = None) -> int:
        """Compute exactly what grafted requests have left, the hottest text first; returns how many tokens that were.

        The same prompt is an exact prefix hit then, and prompts that reuse its text get K/V of generation 0. What has
        been healed stays so if it ends early. `AsyncLLM` does so by itself while it has nothing else to do (setting `heal`);
        with `heal="off"` there is nothing to do.

        Args:
            max_seconds: After so long no further piece is begun; None for no limit.

        Raises:
            ConfigError: `max_seconds` is negative.
        """
        if max_seconds is not None and not max_seconds >= 0:
            raise ConfigError(f"max_seconds must be at least 0, not {quoted(max_seconds)}")
        before, deadline = self._engine.healer.num_tokens, time.perf_counter() + (max_seconds or 0.0)
        while (max_seconds is None or time.perf_counter() < deadline) and self._engine.heal_step():
            pass
        return self._engine.healer.num_tokens - before

    def usage(self) -> SlotUsage:
        """Count K/V slots that are free, or held by requests, prefixes and donors.

        Complexity: O(1).
        """
        return self.space.usage()

    def reset(self) -> None:
        """Forget all cached prefixes, donors and sessions, on the device and on the host.

        Call it after you have changed the model's weights in place. Streams that are open go on with the K/V that they have,
        and nothing of them is kept. What a store has is found again only if the weights are, element by element, what they
        were.
        """
        self._engine.reset()

    def sync_stores(self, timeout_s: float = 10.0) -> bool:
        """Wait until stores have what requests have left, and donors of others are known that they have.

        Both happen in the background by themselves; this is for scripts that end at once, and for measurements.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            False if it takes longer, if a store could not be asked what it has, or if there is no store.
        """
        stores = self._engine.stores
        return stores is not None and stores.flush(timeout_s)

    def close(self) -> None:
        """Write what stores are still to have, publish the last events, and let a semantic provider give back its resources.

        By itself at the latest when the interpreter ends; a second call does nothing.
        """
        self._finalizer()

    def check(self) -> None:
        """Verify every invariant of the K/V bookkeeping; raises `CorruptCacheError`.

        Not while a `probe` is open: its slots are no request's. Complexity: O(slots + tokens of prefixes and donors).
        """
        self._engine.check()

    def _run(self, request: Request) -> Iterator[StreamPart]:
        """Step the engine until `request` ends; what steps give to other open streams waits for them."""
        request = replace(request, arrival=time.perf_counter())
        self._engine.add(request)
        events = self._events[request.request_id] = deque()
        try:
            while True:
                while not events:
                    for event in self._engine.step():
                        if event.request_id in self._events:
                            self._events[event.request_id].append(event)
                event = events.popleft()
                if event.error is not None:
                    raise event.error
                assert event.part is not None
                yield event.part
                if event.part.output is not None:
                    return
        finally:
            del self._events[request.request_id]
            self._engine.cancel(request.request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text, an array or a sequence of ids is one."""
    if isinstance(prompts, str | np.ndarray):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ConfigError(f"give a prompt (text or token ids) or a list of prompts, not {quoted(prompts)}")
    if not len(prompts):
        raise ConfigError("no prompt was given")
    if isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
