"""The offline API: load a model, generate with reuse, get a report per request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import EngineConfig
from kvgraft.engine.active import ActiveRequest
from kvgraft.engine.adapter import TransformersAdapter
from kvgraft.engine.cache_manager import CacheManager
from kvgraft.engine.flops import ModelFlops
from kvgraft.engine.kv_space import KVSpace
from kvgraft.engine.loading import LoadedModel, load_model
from kvgraft.engine.request import Request, RequestOutput
from kvgraft.engine.sampling import Sampler, SamplingParams
from kvgraft.engine.scoring import Score, score
from kvgraft.engine.self_check import PROBE_SLOTS, SelfCheckReport, self_check
from kvgraft.engine.text import OutputText
from kvgraft.errors import ConfigError
from kvgraft.graft.select import SelectionPolicy, selection_policy
from kvgraft.types import Namespace, ReuseMode, TokenArray

if TYPE_CHECKING:
    from kvgraft.memory import SlotUsage

Prompt = str | Sequence[int] | TokenArray
"""Text (needs a tokenizer) or token ids."""


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One step of a streamed request.

    Attributes:
        text: Text that became certain.
        token_id: Token drawn in this step.
        output: The whole result; set in the last part only.
    """

    text: str
    token_id: int
    output: RequestOutput | None = None


class LLM:
    """A model that reuses the K/V of everything it has read. Requests run one after another; not thread-safe.

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
        self.config = (config or EngineConfig.from_env()).updated(settings)
        if 0 < self.config.num_slots < PROBE_SLOTS:
            raise ConfigError(
                f"num_slots must be at least {PROBE_SLOTS}, or 0 to choose by memory, not {self.config.num_slots}"
            )
        self.policy = self._make_policy(self.config.selection)
        self.loaded = (
            model
            if isinstance(model, LoadedModel)
            else load_model(model, dtype=self.config.dtype, device=self.config.device)
        )
        self.max_model_len = self.config.max_model_len or self.loaded.max_model_len
        self._adapter = TransformersAdapter.create(
            self.loaded.model, num_slots=self.config.num_slots, kv_bytes=self.config.kv_bytes
        )
        self.self_check: SelfCheckReport = self_check(self._adapter, np.arange(PROBE_SLOTS))
        self.space = KVSpace(
            self._adapter.pool,
            host_bytes=self.config.host_bytes,
            donor_tokens=self.config.donor_tokens,
            min_run=self.config.min_run,
        )
        self._manager = CacheManager(
            self._adapter,
            self.space,
            flops=ModelFlops.of_model(self.loaded.model),
            min_run=self.config.min_run,
            max_generation=self.config.max_generation,
            refusal=self.self_check.refusal,
        )
        self._numbers = itertools.count(1)

    @property
    def graft_refusal(self) -> str | None:
        """Why this model's K/V cannot be moved (`reuse="graft"` then behaves like `"exact"`), or None."""
        return self.self_check.refusal

    @property
    def num_errors(self) -> int:
        """Lookups and grafts that failed and became misses."""
        return self._manager.num_errors

    @property
    def adapter(self) -> TransformersAdapter:
        """The model as kvgraft runs it."""
        return self._adapter

    def tokenize(self, prompt: Prompt) -> TokenArray:
        """Turn a prompt into int64 token ids, with the tokenizer's special tokens; ids are checked and copied."""
        if isinstance(prompt, str):
            if self.loaded.tokenizer is None:
                raise ConfigError(f"model {self.loaded.name} has no tokenizer; give token ids")
            prompt = self.loaded.tokenizer(prompt)["input_ids"]
        token_ids = np.array(prompt, dtype=np.int64)
        if token_ids.ndim != 1 or not len(token_ids):
            raise ConfigError("the prompt is empty; give at least one token")
        vocabulary = self.loaded.vocab_size
        if token_ids.min() < 0 or token_ids.max() >= vocabulary:
            raise ConfigError(f"token ids must lie in [0, {vocabulary}); was the prompt tokenised for another model?")
        return token_ids

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt in order; later prompts reuse what earlier ones computed.

        Args:
            prompts: One prompt or several.
            sampling: How to generate; greedy by default.
            reuse: `graft` (exact prefixes and matches at any offset), `exact`, or `off`.
            cache_salt: Requests with different salts never share K/V.
            selection: Selection policy, or its name, for these requests instead of the configured one.

        Raises:
            ConfigError: A prompt is empty or too long, or an argument is wrong; nothing has been generated then.
        """
        requests = [self._request(p, sampling, reuse, cache_salt) for p in _as_list(prompts)]
        policy = self._policy(selection)
        outputs = []
        for request in requests:
            *_, last = self._run(request, policy)
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
    ) -> Iterator[StreamPart]:
        """Generate for one prompt, a part per token; closing the iterator early cancels the request."""
        policy = self._policy(selection)
        return self._run(self._request(prompt, sampling, reuse, cache_salt), policy)

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int] | TokenArray,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
    ) -> Score:
        """Return the logits of a fixed continuation behind `prompt`; the cache is left as it was.

        Raises:
            ConfigError: Prompt and continuation together are too long, or an argument is wrong.
        """
        token_ids = self.tokenize(continuation)
        request = self._request(prompt, SamplingParams(len(token_ids)), reuse, cache_salt)
        if len(request.token_ids) + len(token_ids) > self.max_model_len:
            raise ConfigError(f"prompt and continuation exceed the model length {self.max_model_len}; shorten them")
        policy = self._policy(selection)
        return score(self._adapter, self._manager, request, policy, token_ids, max_rows=self.config.max_rows)

    def validate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> None:
        """Raise `ConfigError` if `generate` would refuse the prompt."""
        self._request(prompt, sampling, ReuseMode.OFF, "")

    def usage(self) -> SlotUsage:
        """K/V slots by holder."""
        return self.space.usage()

    def reset(self) -> None:
        """Forget all cached prefixes and donors."""
        self.space.reset()

    def check(self) -> None:
        """Verify every invariant of the K/V bookkeeping; raises `CorruptCacheError`."""
        self.space.check()

    def _run(self, request: Request, policy: SelectionPolicy) -> Iterator[StreamPart]:
        active = self._start(request, policy)
        try:
            text = self._advance(active)
            while active.finish_reason is None:
                if not active.is_prefilling:
                    yield StreamPart(text, active.output_ids[-1])
                text = self._advance(active)
            output = active.close()
        except BaseException:
            active.abort()
            raise
        yield StreamPart(text, output.token_ids[-1], output)

    def _advance(self, active: ActiveRequest) -> str:
        return active.receive(self._adapter.forward([active.next_rows()])[0])

    def _start(self, request: Request, policy: SelectionPolicy) -> ActiveRequest:
        admitted = time.perf_counter()
        cache = self._manager.begin(request, policy)
        self._manager.graft(cache)
        return ActiveRequest(
            cache,
            self._manager,
            policy,
            OutputText(self.loaded.tokenizer, request.sampling.stop),
            Sampler(request.sampling, self._adapter.pool.device),
            eos_token_ids=self._eos_token_ids(),
            max_rows=self.config.max_rows,
            max_model_len=self.max_model_len,
            admitted=admitted,
        )

    def _request(
        self, prompt: Prompt, sampling: SamplingParams | None, reuse: ReuseMode | str, cache_salt: str
    ) -> Request:
        token_ids = self.tokenize(prompt)
        sampling = sampling or SamplingParams()
        longest = min(self.max_model_len, self._adapter.pool.num_slots)
        if len(token_ids) + 1 > longest:
            raise ConfigError(
                f"the prompt has {len(token_ids)} tokens and {longest - 1} fit (model length {self.max_model_len}, "
                f"{self._adapter.pool.num_slots} KV slots); shorten it or raise num_slots"
            )
        if len(token_ids) + sampling.max_new_tokens > longest:
            sampling = replace(sampling, max_new_tokens=longest - len(token_ids))
        namespace = Namespace(self.loaded.fingerprint, tenant_salt=cache_salt)
        return Request(f"r{next(self._numbers)}", token_ids, sampling, _reuse_mode(reuse), namespace)

    def _policy(self, selection: str | SelectionPolicy | None) -> SelectionPolicy:
        if selection is None:
            return self.policy
        return self._make_policy(selection) if isinstance(selection, str) else selection

    def _make_policy(self, name: str) -> SelectionPolicy:
        parameters: dict[str, dict[str, float]] = {
            "query_seam": {"ratio": self.config.recompute_ratio},
            "first_k": {"k": self.config.first_k},
        }
        return selection_policy(name, **parameters.get(name, {}))

    def _eos_token_ids(self) -> frozenset[int]:
        configured = self.loaded.model.generation_config.eos_token_id if self.loaded.model.generation_config else None
        if configured is None and self.loaded.tokenizer is not None:
            configured = self.loaded.tokenizer.eos_token_id
        if configured is None:
            return frozenset()
        return frozenset(configured if isinstance(configured, list) else [configured])


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text, an array or a sequence of ids is one."""
    if isinstance(prompts, str | np.ndarray):
        return [prompts]
    if not len(prompts):
        raise ConfigError("no prompt was given")
    if isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _reuse_mode(reuse: ReuseMode | str) -> ReuseMode:
    try:
        return ReuseMode(reuse)
    except ValueError as error:
        raise ConfigError(f"unknown reuse mode {reuse!r}; choose {', '.join(ReuseMode)}") from error
