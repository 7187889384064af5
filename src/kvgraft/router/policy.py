"""Policies that choose a worker: by the text that workers hold, and baselines that do not look at it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from kvgraft.config import quoted
from kvgraft.errors import ConfigError
from kvgraft.router.directory import WorkerScore
from kvgraft.router.load import USUAL_PROMPT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.router.load import WorkerLoad

PREFIX_TOKENS = 256
"""Tokens from which `prefix_hash` chooses: enough to distinguish documents, few enough to be shared by their questions."""
_NOTHING = WorkerScore(0, 0)
_DUPLICATE_COST = 0.5
"""Extra cost of a token that a worker computes though another one holds it: it lies there twice from then on, and later
requests find less in one place. Measured against 0 (docs/routing.md)."""
_LIKE_SPEEDS = 1.5
"""Workers within this factor of the usual speed count as equally fast: measured prefills differ as much on
a machine with other work."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as policies see it.

    Attributes:
        token_ids: Its tokens `(n,)`; None if they are not known.
        scope: Scope of the text that it may reuse.
        raw: Its body, for what needs no tokens.
        is_grafted: Whether it accepts copies, so that text counts which is no exact prefix.
    """

    token_ids: Sequence[int] | NDArray[np.int32] | None
    scope: str
    raw: bytes
    is_grafted: bool = True


class Policy:
    """Chooses a worker. Subclasses say in `wants_scores` whether they look at what is held."""

    wants_scores = False

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad], scores: Mapping[str, WorkerScore]) -> WorkerLoad:
        """Return one of `workers`, of which there is at least one."""
        raise NotImplementedError


class LeastLoaded(Policy):
    """The worker with least to do; among equals, the one that was sent least."""

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad], scores: Mapping[str, WorkerScore]) -> WorkerLoad:
        """Look at the queues alone."""
        return min(workers, key=lambda worker: (worker.queued_tokens, worker.num_sent))


class RoundRobin(Policy):
    """One after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad], scores: Mapping[str, WorkerScore]) -> WorkerLoad:
        """Take the next one."""
        self._turn += 1
        return workers[(self._turn - 1) % len(workers)]


class PrefixHash(Policy):
    """The same beginning goes to the same worker, and as few beginnings as possible move when workers come and go.

    Rendezvous hashing (Thaler and Ravishankar, 1998).
    """

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad], scores: Mapping[str, WorkerScore]) -> WorkerLoad:
        """Take the worker with the name that hashes highest with the beginning."""
        tokens = prompt.token_ids
        start = (
            repr([int(token) for token in tokens[:PREFIX_TOKENS]]).encode() if tokens is not None else prompt.raw[:1024]
        )
        key = hashlib.blake2b(start + prompt.scope.encode(), digest_size=32).digest()
        return max(workers, key=lambda worker: hashlib.blake2b(worker.spec.name.encode(), key=key).digest())


class Reuse(Policy):
    """The worker from which the first token is to be expected soonest.

    Its tokens to compute, the prompt less what it holds, and those queued before, at its speed; and a bit for what others
    hold of the prompt and it would compute. Among equals, as for a prompt of which no worker holds anything, the one that
    holds most text, where later requests find most, as long as it has room. A request whose tokens are
    not known goes to the least loaded.
    """

    wants_scores = True

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad], scores: Mapping[str, WorkerScore]) -> WorkerLoad:
        """Compare expected times, in tokens where no speed is known."""
        num_tokens = USUAL_PROMPT_TOKENS if prompt.token_ids is None else len(prompt.token_ids)
        found = {worker.spec.name: scores.get(worker.spec.name, _NOTHING) for worker in workers}
        most = max(score.tokens_saved for score in found.values())
        usual = _usual_speed(workers)

        def expected(worker: WorkerLoad) -> tuple[float, float, bool, int]:
            score, queued = found[worker.spec.name], worker.queued_tokens
            duplicates = most - score.tokens_saved
            tokens = num_tokens - score.tokens_saved + queued + _DUPLICATE_COST * duplicates
            rank = worker.num_sent if score.is_full else -score.held_tokens
            return (tokens * _speed(worker, usual), queued, score.is_full, rank)

        return min(workers, key=lambda worker: (*expected(worker), worker.num_sent))


def _usual_speed(workers: Sequence[WorkerLoad]) -> float:
    """Return the median of their seconds per token; 1 where none are known."""
    speeds = [speed for worker in workers if (speed := worker.seconds_per_token) is not None]
    return median_low(speeds) if speeds else 1.0


def _speed(worker: WorkerLoad, usual: float) -> float:
    """Return a worker's seconds per token, or the usual ones where these differ little."""
    own = worker.seconds_per_token
    return own if own is not None and not usual / _LIKE_SPEEDS <= own <= usual * _LIKE_SPEEDS else usual


_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "reuse": Reuse,
    "round_robin": RoundRobin,
    "prefix_hash": PrefixHash,
    "least_loaded": LeastLoaded,
}
POLICIES = tuple(_POLICIES)
"""Names of all policies; the first is the default."""


def make_policy(name: str) -> Policy:
    """Return a policy by name.

    Raises:
        ConfigError: There is none; names those that there are.
    """
    if name not in _POLICIES:
        raise ConfigError(f"unknown policy {quoted(name)}; choose {', '.join(POLICIES)}")
    return _POLICIES[name]()
