"""Rules on logits before the temperature: which tokens may be drawn, and what those cost that are there already.

They know tokens and nothing else, so that reuse, batching and preemption change nothing about them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvgraft.engine.sampling.sampling_params import SamplingParams
    from kvgraft.types import TokenArray

_LARGEST = 1e30
"""Biases and repetition penalties are cut to it, and penalties to its inverse: beyond, float32 would give infinities."""


class LogitRules:
    """The rules of one request, and the tokens that they count. Not thread-safe."""

    def __init__(self, rules: tuple[_Rule, ...]) -> None:
        self._rules = rules

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_ids: TokenArray, end_ids: Collection[int], device: torch.device
    ) -> LogitRules | None:
        """Begin after a prompt; None if the request has no such rules.

        Args:
            params: Of the request; its token ids are below the size of the vocabulary.
            prompt_ids: int64, what is counted besides the output; of a session all that it holds.
            end_ids: End-of-text tokens.
            device: Of the logits.
        """
        rules = tuple(_rules_of(params, prompt_ids, end_ids, device))
        return cls(rules) if rules else None

    def apply(self, logits: Tensor) -> Tensor:
        """Return float32 (vocab_size,) logits under the rules, minus infinity for what must not be drawn; takes a copy."""
        logits = logits.clone()
        for rule in self._rules:
            rule.apply(logits)
        return logits

    def accept(self, token_id: int) -> None:
        """Count a token of the output."""
        for rule in self._rules:
            rule.accept(token_id)

    def fork(self) -> LogitRules:
        """Return rules that have counted the same and go on by themselves."""
        return LogitRules(tuple(rule.fork() for rule in self._rules))


def _rules_of(
    params: SamplingParams, prompt_ids: TokenArray, end_ids: Collection[int], device: torch.device
) -> Iterable[_Rule]:
    """In the order of `SamplingParams`, but for `min_tokens`: what it bans is banned at any place, and it may give way."""
    if params.allowed_token_ids is not None:
        yield _Allowed(_tensor(params.allowed_token_ids, device))
    single = [ids[0] for ids in params.bad_token_ids if len(ids) == 1]
    if single:
        yield _BadTokens(_tensor(single, device))
    longer = [ids for ids in params.bad_token_ids if len(ids) > 1]
    if longer:
        yield _BadSequences(longer, prompt_ids)
    if params.logit_bias:
        yield _Bias(params.logit_bias, device)
    if params.repetition_penalty != 1:
        yield _Repetition(params.repetition_penalty, prompt_ids, device)
    if params.frequency_penalty or params.presence_penalty:
        yield _Occurrence(params.frequency_penalty, params.presence_penalty, device)
    ends = {*end_ids, *params.stop_token_ids}
    if params.min_tokens and ends:
        yield _MinTokens(params.min_tokens, _tensor(sorted(ends), device), gives_way=params.structure is not None)


class _Rule(ABC):
    """One rule. It counts nothing unless it says so."""

    @abstractmethod
    def apply(self, logits: Tensor) -> None:
        """Change float32 (vocab_size,) logits in place."""

    def accept(self, token_id: int) -> None:  # noqa: B027 - most rules count nothing
        """Count a token of the output."""

    def fork(self) -> _Rule:
        """Return a rule that has counted the same and goes on by itself."""
        return self


class _Allowed(_Rule):
    """No other tokens."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def apply(self, logits: Tensor) -> None:
        kept = logits[self._ids]
        logits.fill_(-torch.inf).index_copy_(0, self._ids, kept)


class _BadTokens(_Rule):
    """Never these tokens."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def apply(self, logits: Tensor) -> None:
        logits.index_fill_(0, self._ids, -torch.inf)


class _BadSequences(_Rule):
    """Never the last token of a sequence after all others of it, in the prompt or in the output.

    Sequences are found by the token before their last one: a step looks at few of them, however many there are.
    """

    def __init__(self, sequences: list[tuple[int, ...]], prompt_ids: TokenArray) -> None:
        self._by_token: dict[int, list[tuple[list[int], int]]] = {}
        for ids in sequences:
            self._by_token.setdefault(ids[-2], []).append((list(ids[:-1]), ids[-1]))
        longest = max(len(ids) for ids in sequences) - 1
        self._tail: list[int] = prompt_ids[-longest:].tolist()

    def apply(self, logits: Tensor) -> None:
        tail = self._tail
        bad = [last for front, last in self._by_token.get(tail[-1], ()) if tail[-len(front) :] == front]
        if bad:
            logits[bad] = -torch.inf

    def accept(self, token_id: int) -> None:
        self._tail.append(token_id)

    def fork(self) -> _BadSequences:
        other = copy.copy(self)
        other._tail = self._tail.copy()
        return other


class _MinTokens(_Rule):
    """No end before so many tokens are out, unless the structure of the output leaves nothing but its end."""

    def __init__(self, num_tokens: int, end_ids: Tensor, *, gives_way: bool) -> None:
        self._num_left = num_tokens
        self._end_ids = end_ids
        self._gives_way = gives_way

    def apply(self, logits: Tensor) -> None:
        if self._num_left <= 0:
            return
        ends = logits[self._end_ids]
        logits.index_fill_(0, self._end_ids, -torch.inf)
        if self._gives_way and not logits.max() > -torch.inf:
            logits.index_copy_(0, self._end_ids, ends)

    def accept(self, token_id: int) -> None:
        self._num_left -= 1

    def fork(self) -> _MinTokens:
        return copy.copy(self)


class _Bias(_Rule):
    """Add to the logits of some tokens; of a token that is named twice the sum."""

    def __init__(self, biases: tuple[tuple[int, float], ...], device: torch.device) -> None:
        total: dict[int, float] = {}
        for token, bias in biases:
            total[token] = total.get(token, 0.0) + bias
        self._ids = _tensor(total, device)
        cut = [max(-_LARGEST, min(_LARGEST, bias)) for bias in total.values()]
        self._biases = torch.tensor(cut, dtype=torch.float32, device=device)

    def apply(self, logits: Tensor) -> None:
        logits.index_add_(0, self._ids, self._biases)


class _Repetition(_Rule):
    """Tokens of prompt and output become less likely, or with a penalty below 1 more. Source: https://arxiv.org/abs/1909.05858."""

    def __init__(self, penalty: float, prompt_ids: TokenArray, device: torch.device) -> None:
        self._penalty = max(1 / _LARGEST, min(_LARGEST, penalty))
        self._seen = _CountedIds(prompt_ids.tolist(), device)

    def apply(self, logits: Tensor) -> None:
        ids = self._seen.ids
        scores = logits[ids]
        scores = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        logits.index_copy_(0, ids, scores.clamp_(max=torch.finfo(scores.dtype).max))

    def accept(self, token_id: int) -> None:
        self._seen.add(token_id)

    def fork(self) -> _Repetition:
        other = copy.copy(self)
        other._seen = self._seen.fork()
        return other


class _Occurrence(_Rule):
    """Subtract for each time that the output has a token, and once for having it."""

    def __init__(self, frequency: float, presence: float, device: torch.device) -> None:
        self._frequency, self._presence = frequency, presence
        self._out = _CountedIds((), device)

    def apply(self, logits: Tensor) -> None:
        ids = self._out.ids
        scores = logits[ids] - self._frequency * self._out.counts
        logits.index_copy_(0, ids, scores.sub_(self._presence))

    def accept(self, token_id: int) -> None:
        self._out.add(token_id)

    def fork(self) -> _Occurrence:
        other = copy.copy(self)
        other._out = self._out.fork()
        return other


class _CountedIds:
    """Distinct token ids and how often each was added, as tensors that grow in place: a token costs O(1), amortised."""

    def __init__(self, given: Iterable[int], device: torch.device) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(given))}
        room = 64 + 2 * len(self._place)
        self._ids = torch.zeros(room, dtype=torch.int64, device=device)
        self._ids[: len(self._place)] = _tensor(self._place, device)
        self._counts = torch.zeros(room, dtype=torch.float32, device=device)

    @property
    def ids(self) -> Tensor:
        """int64 (num_ids,)."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Tensor:
        """float32 (num_ids,), like `ids`; those given in the beginning count 0."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """Count a token."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1

    def fork(self) -> _CountedIds:
        """Return a copy."""
        other = copy.copy(self)
        other._place, other._ids, other._counts = self._place.copy(), self._ids.clone(), self._counts.clone()
        return other


def _tensor(ids: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)
