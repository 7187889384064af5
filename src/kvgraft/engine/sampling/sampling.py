"""Draw the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgraft.errors import NothingToDrawError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvgraft.engine.sampling.logit_rules import LogitRules
    from kvgraft.engine.sampling.sampling_params import SamplingParams
    from kvgraft.engine.sampling.structure import StructureState
    from kvgraft.types import TokenArray


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token, and the most likely ones in its place.

    Attributes:
        token_id: The token drawn, or that the prompt has.
        logprob: Its natural log-probability under the model, before all that `SamplingParams` says about logits.
        top: The most likely tokens and their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


_ROWS_AT_ONCE = 16
"""Rows with log-probabilities over the whole vocabulary are held at a time."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Say how likely tokens were.

    Args:
        logits: float32 (len(token_ids), vocab_size).
        token_ids: One per row.
        count: How many of the most likely ones to name beside each.
    """
    found = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        logprobs = logits[start : start + _ROWS_AT_ONCE].log_softmax(dim=-1)
        own = token_ids[start : start + _ROWS_AT_ONCE]
        chosen = logprobs[torch.arange(len(own)), torch.tensor(own)].tolist()
        values, ids = (part.tolist() for part in logprobs.topk(min(count, logprobs.shape[-1])))
        found += [
            TokenLogprobs(int(token), logprob, tuple(zip(*top, strict=True)))
            for token, logprob, *top in zip(own, chosen, ids, values, strict=True)
        ]
    return found


def rules_of(
    params: SamplingParams, prompt_ids: TokenArray, end_ids: Collection[int], device: torch.device
) -> LogitRules | None:
    """Begin the rules of a request after its prompt, as `LogitRules.of`; nothing of rules is imported without any."""
    is_penalised = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    is_limited = params.allowed_token_ids is not None or params.bad_token_ids or params.min_tokens
    if not (is_penalised or is_limited or params.logit_bias):
        return None
    from kvgraft.engine.sampling.logit_rules import LogitRules

    return LogitRules.of(params, prompt_ids, end_ids, device)


class Sampler:
    """Draws tokens for one request; holds its random state, what its rules count, and how far its structure has come."""

    def __init__(
        self,
        params: SamplingParams,
        device: torch.device,
        structure: StructureState | None = None,
        rules: LogitRules | None = None,
    ) -> None:
        """Begin before the first token.

        Args:
            params: Of the request.
            device: Of the logits.
            structure: What the output has to be; None for anything.
            rules: What `params` says about logits before the temperature; None for nothing.
        """
        self._params = params
        self._device = device
        self._structure = structure
        self._rules = rules
        self._generator: torch.Generator | None = None
        if params.seed is not None:
            self._generator = torch.Generator(device).manual_seed(params.seed)

    def fork(self) -> Sampler:
        """Return a sampler that will draw what this one would: from equal logits equal tokens, from similar ones mostly.

        Both have random states of their own from now on; one without a seed gets one from torch's global generator. A draw
        is the largest of probabilities divided by exponential noise, so equal noise makes two distributions meet nearly as
        often as they can.
        """
        if self._generator is None and self._params.temperature:
            seed = int(torch.randint(2**63 - 1, ()))
            self._generator = torch.Generator(self._device).manual_seed(seed)
        structure = None if self._structure is None else self._structure.fork()
        rules = None if self._rules is None else self._rules.fork()
        other = Sampler(self._params, self._device, structure, rules)
        if self._generator is not None:
            other._generator = torch.Generator(self._device)
            other._generator.set_state(self._generator.get_state())
        return other

    def sample(self, logits: Tensor) -> int:
        """Draw the token after those drawn so far, from float32 (vocab_size,) logits, and count it as drawn.

        O(vocab_size log vocab_size) unless greedy.

        Raises:
            NothingToDrawError: The rules and the structure leave no token; nothing is counted then.
        """
        if self._structure is None and self._rules is None:
            return self._drawn(logits)
        few = None if self._structure is None else self._structure.few(len(logits))
        logits = self._left(logits, few)
        if not logits.max() > -torch.inf:
            raise NothingToDrawError(
                "the request's structure, allowed and bad tokens and min_tokens together leave no token; ask for less"
            )
        token_id = self._drawn(logits) if few is None else int(few[self._drawn(logits)])
        if self._structure is not None:
            self._structure.accept(token_id)
        if self._rules is not None:
            self._rules.accept(token_id)
        return token_id

    def _left(self, logits: Tensor, few: Tensor | None) -> Tensor:
        """Return what structure and rules leave: of few tokens the logits of these alone."""
        if self._structure is not None and (few is None or self._rules is not None):
            logits = self._structure.mask(logits)
        if self._rules is not None:
            logits = self._rules.apply(logits)
        return logits if few is None else logits[few.to(logits.device)]

    def _drawn(self, logits: Tensor) -> int:
        if self._params.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=self._generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return float32 (vocab_size,): tokens are drawn in proportion to it, at a temperature above 0."""
        params = self._params
        # A temperature near 0 must sharpen towards the largest logit; float32 would round it to 0, or give inf - inf.
        scaled = ((logits - logits.max()).double() / params.temperature).float()
        if params.top_k and params.top_k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -torch.inf)
        if params.min_p:
            scaled = scaled.masked_fill(scaled < math.log(params.min_p), -torch.inf)
        probabilities = scaled.softmax(dim=-1)
        return probabilities if params.top_p == 1 else _nucleus(probabilities, params.top_p)

    def logprobs(self, logits: Tensor, token_id: int) -> TokenLogprobs | None:
        """Say how likely `token_id` was under float32 (vocab_size,) logits; None unless the request asks."""
        if self._params.logprobs is None:
            return None
        return token_logprobs(logits[None], [token_id], self._params.logprobs)[0]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero every token outside the smallest set that holds `top_p`. Source: https://arxiv.org/abs/1904.09751."""
    ordered, order = probabilities.sort(descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    outside[0] = False  # a top_p that float32 rounds to 0 still leaves the most likely token
    return probabilities.index_fill(0, order[outside], 0.0)
