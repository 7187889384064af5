"""The router as a library: scores of the workers for a prompt, and the choice of one. No HTTP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.errors import OverloadedError, RequestError
from kvgraft.reuse.donor_events import scope_of
from kvgraft.router.directory import Directory, WorkerScore
from kvgraft.router.load import USUAL_PROMPT_TOKENS, WorkerLoad
from kvgraft.router.policy import Prompt, make_policy
from kvgraft.router.subscriber import EventReader
from kvgraft.router.worker import WorkerSpec, require_distinct

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.router.directory import HeldSize
    from kvgraft.router.sequence import BatchSequence

DEFAULT_MAX_TOKENS = 1 << 20
DEFAULT_MAX_IN_FLIGHT = 256


class NoWorkerError(RequestError):
    """No worker answers."""


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """A worker for a request.

    Attributes:
        worker: The worker.
        score: Tokens of the prompt that it holds; None where the policy needs no score.
        prefill_tokens: Tokens that it has to compute, as far as is known.
    """

    worker: WorkerLoad
    score: WorkerScore | None
    prefill_tokens: float


class Router:
    """Knows the workers' text from their KV events, and their load; chooses among them.

    `score` may be called from any thread, the rest belongs to one.
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        *,
        policy: str = "reuse",
        max_tokens: int = DEFAULT_MAX_TOKENS,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
    ) -> None:
        """Subscribe to the workers' events.

        Args:
            workers: At least one.
            policy: One of `POLICIES`.
            max_tokens: Text that is remembered per worker, prefixes and donors apart; up to 225 bytes per token.
            max_in_flight: Requests that a worker may have from this router at the same time.

        Raises:
            ConfigError: There is no such policy, no worker, two of one name, or an endpoint that cannot be used.
            ImportError: pyzmq or msgspec is not installed.
        """
        require_distinct(tuple(workers))
        self.policy_name = policy
        self._policy = make_policy(policy)
        self._max_in_flight = max_in_flight
        self._directory = Directory(workers, max_tokens=max_tokens)
        self.loads: dict[str, WorkerLoad] = {spec.name: WorkerLoad(spec) for spec in workers}
        self._reader = EventReader(workers, self._directory)

    def score(
        self, token_ids: Sequence[int] | NDArray[np.int32], scope: str | None = None, *, is_grafted: bool = True
    ) -> dict[str, WorkerScore]:
        """Return what each worker holds of a prompt, and the time that this saves where its speed is known.

        Args:
            token_ids: The prompt, `(n,)`.
            scope: `kvgraft.prefix.scope_of` of adapter and salt; None for a request without either.
            is_grafted: Whether the request accepts copies; of one that does not, its exact prefix alone counts.

        Raises:
            ConfigError: The prompt is no sequence of 32-bit token ids.
        """
        scores = self._directory.score(token_ids, scope_of() if scope is None else scope, is_grafted=is_grafted)
        return {name: self._timed(score, self.loads[name]) for name, score in scores.items()}

    @property
    def wants_scores(self) -> bool:
        """Whether the policy looks at scores; for one that does not, none are made."""
        return self._policy.wants_scores

    def choose(
        self, prompt: Prompt, scores: Mapping[str, WorkerScore], *, without: Collection[str] = ()
    ) -> WorkerChoice:
        """Choose a worker that answers and has room.

        Args:
            prompt: What is known of the request.
            scores: What `score` gave for it; may be empty.
            without: Names of workers that have been tried.

        Raises:
            NoWorkerError: None answers.
            OverloadedError: All that answer have as many requests as they may.
        """
        answering = [load for name, load in self.loads.items() if load.is_up and name not in without]
        if not answering:
            raise NoWorkerError("no worker answers; try again later")
        free = [load for load in answering if load.num_in_flight < self._max_in_flight]
        if not free:
            raise OverloadedError(f"all workers have {self._max_in_flight} requests; try again later")
        worker = self._policy.choose(prompt, free, scores)
        score = scores.get(worker.spec.name)
        num_tokens = USUAL_PROMPT_TOKENS if prompt.token_ids is None else len(prompt.token_ids)
        return WorkerChoice(worker, score, num_tokens - (0 if score is None else score.tokens_saved))

    def has_room(self, *, without: Collection[str] = ()) -> bool:
        """Return whether `choose` finds a worker."""
        others = (load for name, load in self.loads.items() if load.is_up and name not in without)
        return any(load.num_in_flight < self._max_in_flight for load in others)

    def scope_of(self, model: str, salt: str) -> str:
        """Return the scope of a request; a model that some worker lists as an adapter, or names in its events, is one."""
        is_listed = any(model in load.adapters for load in self.loads.values())
        is_adapter = is_listed or self._directory.names_adapter(model)
        return scope_of(model if is_adapter else "", salt)

    def sizes(self) -> dict[str, HeldSize]:
        """Return the tokens of each worker's known text."""
        return self._directory.sizes()

    def sequences(self) -> dict[str, BatchSequence]:
        """Return the event streams by worker, for their counters."""
        return self._reader.sequences()

    def close(self) -> None:
        """Stop reading events."""
        self._reader.close()

    def _timed(self, score: WorkerScore, load: WorkerLoad) -> WorkerScore:
        speed = load.seconds_per_token
        return score if speed is None else replace(score, seconds_saved=score.tokens_saved * speed)
