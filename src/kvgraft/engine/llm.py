"""The offline API: load a model, generate with reuse, get a report per request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import quoted
from kvgraft.engine.assembly import engine_config
from kvgraft.engine.core import Engine, StepEvent
from kvgraft.engine.sampling import SamplingParams
from kvgraft.engine.scoring import Probe, Score, probe, score
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode, TokenArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.config import EngineConfig
    from kvgraft.engine.adapter import TransformersAdapter
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.loading import LoadedModel
    from kvgraft.engine.request import Request, RequestOutput, StreamPart
    from kvgraft.engine.request_builder import Prompt
    from kvgraft.engine.risk import HeldRisk
    from kvgraft.engine.self_check import SelfCheckReport
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.memory import SlotUsage


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
        self, model: str | LoadedModel = "graft-tiny", config: EngineConfig | None = None, **settings: object
    ) -> None:
        """Load `model` (name, directory, hub id or a `LoadedModel`) and prove that its K/V may be reused.

        Args:
            model: What to load.
            config: Settings; default: from the environment (`KVGRAFT_*`).
            **settings: Single settings of `EngineConfig` that override `config`.

        Raises:
            ConfigError: A setting or the model's name is wrong.
            ModelError: The model cannot be loaded or fails the self-check.
        """
        self._engine = Engine(model, engine_config(config, settings))
        self._events: dict[str, deque[StepEvent]] = {}

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
        """What was proved for the model."""
        return self._engine.self_check

    @property
    def space(self) -> KVSpace:
        """Slots, stored prefixes and donors: what is kept, and where."""
        return self._engine.space

    @property
    def graft_refusal(self) -> str | None:
        """Why this model's K/V cannot be moved (`reuse="graft"` then behaves like `"exact"`), or None."""
        return self._engine.self_check.refusal

    @property
    def num_errors(self) -> int:
        """Lookups and grafts that failed and became misses."""
        return self._engine.manager.num_errors

    @property
    def adapter(self) -> TransformersAdapter:
        """The model as kvgraft runs it."""
        return self._engine.adapter

    def tokenize(self, prompt: Prompt) -> TokenArray:
        """Turn a prompt into int64 token ids, with the tokenizer's special tokens; ids are checked and copied."""
        return self._engine.builder.tokenize(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
        correction: str | DriftCorrection | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt in order; later prompts reuse what earlier ones computed.

        Args:
            prompts: One prompt or several.
            sampling: How to generate; greedy by default.
            reuse: `graft` (exact prefixes and matches at any offset), `exact`, or `off`.
            cache_salt: Requests with different salts never share K/V.
            selection: Selection policy, or its name, for these requests instead of the configured one.
            correction: Drift correction, or its name, instead of the configured one; "none" for none.

        Raises:
            ConfigError: A prompt is empty or too long, or an argument is wrong; nothing has been generated then.
        """
        build = self._engine.builder.build
        requests = [
            build(prompt, sampling, reuse, cache_salt=cache_salt, selection=selection, correction=correction)
            for prompt in _as_list(prompts)
        ]
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
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
        correction: str | DriftCorrection | None = None,
    ) -> Iterator[StreamPart]:
        """Generate for one prompt, a part per token; closing the iterator early cancels the request."""
        return self._run(
            self._engine.builder.build(
                prompt, sampling, reuse, cache_salt=cache_salt, selection=selection, correction=correction
            )
        )

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int] | TokenArray,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
        correction: str | DriftCorrection | None = None,
    ) -> Score:
        """Return the logits of a fixed continuation behind `prompt`; the cache is left as it was.

        Raises:
            ConfigError: Prompt and continuation together are too long, or an argument is wrong.
        """
        token_ids = self.tokenize(continuation)
        sampling = SamplingParams(len(token_ids))
        request = self._engine.builder.build(
            prompt, sampling, reuse, cache_salt=cache_salt, selection=selection, correction=correction
        )
        if request.sampling.max_new_tokens < len(token_ids):
            raise ConfigError(
                f"prompt and continuation exceed the {self._engine.builder.longest} tokens that fit; shorten them"
            )
        engine = self._engine
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
    ) -> Iterator[Probe]:
        """Prefill `prompt` and lend it to try continuations of up to `num_tokens` tokens; the cache is left as it was.

        Raises:
            ConfigError: Prompt and continuation together are too long, or an argument is wrong.
        """
        engine = self._engine
        sampling = SamplingParams(num_tokens)
        request = engine.builder.build(
            prompt, sampling, reuse, cache_salt=cache_salt, selection=selection, correction=correction
        )
        if request.sampling.max_new_tokens < num_tokens:
            raise ConfigError(
                f"prompt and continuation exceed the {engine.builder.longest} tokens that fit; shorten them"
            )
        with probe(engine.adapter, engine.manager, request, max_rows=engine.config.max_rows) as opened:
            yield opened

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._engine.eos_token_ids

    def validate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> None:
        """Raise `ConfigError` if `generate` would refuse the prompt."""
        self._engine.builder.build(prompt, sampling, request_id="validated")

    def audit(self) -> int:
        """Hold every sampled request that has ended against full prefill; returns how many there were.

        `AsyncLLM` does so by itself while it has nothing else to do.
        """
        count = self._engine.auditor.num_pending
        while self._engine.auditor.has_work:
            self._engine.audit_step()
        return count

    def usage(self) -> SlotUsage:
        """Count K/V slots that are free, or held by requests, prefixes and donors."""
        return self.space.usage()

    def reset(self) -> None:
        """Forget all cached prefixes and donors, on the device and on the host.

        Call it after you have changed the model's weights in place. Streams that are open go on with the K/V that they have,
        and nothing of them is kept.
        """
        self._engine.reset()

    def check(self) -> None:
        """Verify every invariant of the K/V bookkeeping; raises `CorruptCacheError`."""
        self.space.check()

    def _run(self, request: Request) -> Iterator[StreamPart]:
        """Step the engine until `request` ends; what steps give to other open streams waits for them."""
        request = replace(request, arrival=time.perf_counter())
        self._engine.add(request)
        events = self._events[request.request_id] = deque()
        try:
            while True:
                while not events:
                    for event in self._engine.step():
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
