"""Serve a prompt whose answer is given beforehand: the passes of a real request, and the logits of each token.

A probe computes a continuation in one pass. Where decode steps change the K/V of the prompt (`repair_rows`) that would not be
what is served: there each token's logits depend on how many steps there were before it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from kvgraft.engine.idle.dictated_answer import DictatedAnswer
from kvgraft.engine.sampling.sampling import Sampler
from kvgraft.engine.schedule.active import ActiveRequest
from kvgraft.errors import CapacityError, PolicyError

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.engine.kv.cache_manager import CacheManager
    from kvgraft.engine.requests.request import Request
    from kvgraft.engine.requests.text import OutputText
    from kvgraft.graft.model import ModelAdapter
    from kvgraft.types import TokenArray


class _Dictation(Sampler):
    """Draws given tokens, then the likeliest ones."""

    def __init__(self, request: Request, token_ids: TokenArray) -> None:
        super().__init__(request.sampling, torch.device("cpu"))
        self.logits: list[Tensor] = []
        self.times_s: list[float] = []
        self.cpu_times_s: list[float] = []
        self._started, self._cpu_started = time.perf_counter(), time.process_time()
        self._token_ids = token_ids

    def sample(self, logits: Tensor) -> int:
        number = len(self.logits)
        self.times_s.append(time.perf_counter() - self._started)
        self.cpu_times_s.append(time.process_time() - self._cpu_started)
        self.logits.append(logits.clone())
        return int(self._token_ids[number] if number < len(self._token_ids) else logits.argmax())


def dictate(
    adapter: ModelAdapter,
    manager: CacheManager,
    request: Request,
    token_ids: TokenArray,
    *,
    text: OutputText,
    eos_token_ids: frozenset[int],
    max_rows: int,
) -> DictatedAnswer:
    """Serve `request` alone, with the first tokens of its answer given; leaves no trace in the cache.

    Args:
        adapter: Runs the rows.
        manager: Lends the slots.
        request: Ends as its sampling says.
        token_ids: The first tokens of the answer, for any logits.
        text: Of the answer, which a stop text ends.
        eos_token_ids: Tokens that end the answer, unless the request ignores them.
        max_rows: Rows of one pass.

    Raises:
        ConfigError: The answer outgrows the angles that its prompt was computed with; a served one would begin again there.
        CapacityError: Running requests hold the slots.
    """
    sampler = _Dictation(request, token_ids)
    longest = len(request.token_ids) + request.sampling.max_new_tokens
    active = ActiveRequest(
        request, text, sampler, flops=manager.flops, eos_token_ids=eos_token_ids, max_model_len=longest
    )
    manager.require_one_table(len(request.token_ids), longest - 1)
    kv = manager.begin(request, leaves_trace=False, headroom=1)  # the row of the first token, beside a repair
    try:
        manager.graft(kv)
        manager.settle(kv)
        active.start(kv, manager.prefill(kv))
        while active.finish_reason is None:
            if active.is_streaming:
                manager.grow(kv, active.num_tokens)
            count = 1
            if active.is_prefilling and not (count := manager.reserve(kv, active.remaining[: active.piece(max_rows)])):
                raise CapacityError("running requests hold the slots of window layers; dictate when they have ended")
            try:
                output = adapter.forward([active.next_rows(count)])[0]
            except PolicyError as error:
                active.give_up(error)
            else:
                active.receive(output)
        return DictatedAnswer(
            tuple(active.output_ids),
            torch.stack(sampler.logits),
            active.output().report,
            tuple(sampler.times_s),
            tuple(sampler.cpu_times_s),
        )
    finally:
        manager.abort(kv)
