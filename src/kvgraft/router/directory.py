"""Texts by worker, and their worth for a prompt. Thread-safe."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.errors import ConfigError, one_line
from kvgraft.router.held_text import Held, HeldText

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.events import KVEvent
    from kvgraft.router.worker import WorkerSpec

logger = logging.getLogger(__name__)

SHIFTED_WORTH = 0.85
"""Share of the time of computing a token that a shifted one saves: a tenth of them is computed again by default, and
copying and rotating take a while. A router need not know better: workers differ by thousands of tokens where it matters."""


class HeldSize(NamedTuple):
    """Tokens of a worker's known text."""

    exact_tokens: int
    shifted_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerScore:
    """Tokens of a prompt that a worker would not have to compute.

    Attributes:
        exact_tokens: Tokens at its beginning that the worker holds.
        shifted_tokens: Tokens after these that it holds at any offset, if it reuses such.
        continued_tokens: Tokens after the exact ones that it has in their own places, after the same text: it goes on from
            them as they are, which saves as much as an exact prefix does.
        seconds_saved: Prefill time that this saves there; None as long as its speed is unknown.
        held_tokens: Tokens of all text that the worker is known to hold, of this prompt or not.
        is_full: What it takes in displaces other text.
    """

    exact_tokens: int
    shifted_tokens: int
    continued_tokens: int = 0
    seconds_saved: float | None = None
    held_tokens: int = 0
    is_full: bool = False

    @property
    def tokens_saved(self) -> float:
        """Tokens that are saved, shifted ones for their worth."""
        return self.exact_tokens + self.continued_tokens + SHIFTED_WORTH * self.shifted_tokens


class Directory:
    """The text of all workers, in a lock: one thread reads events while others score."""

    def __init__(self, workers: Iterable[WorkerSpec], *, max_tokens: int) -> None:
        """Begin without text; remember at most `max_tokens` of each, prefixes and donors apart."""
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._held = {spec.name: HeldText(grafts=spec.graft, max_tokens=max_tokens) for spec in workers}

    def apply(self, worker: str, events: Sequence[KVEvent], *, forget: bool = False) -> None:
        """Take over what a worker says; with `forget`, instead of all that was known. A failure forgets it all, too."""
        with self._lock:
            held = self._held[worker]
            if forget:
                held.clear()
            try:
                held.apply(events)
            except Exception as error:  # noqa: BLE001 - what a worker says is its own
                held.clear()
                if worker not in self._said:
                    self._said.add(worker)
                    logger.warning(
                        "events of worker %s cannot be applied, so its text is forgotten each time; logged once: %s",
                        worker,
                        one_line(error),
                    )

    def score(
        self, token_ids: Sequence[int] | np.ndarray, scope: str, *, is_grafted: bool = True
    ) -> dict[str, WorkerScore]:
        """Return what each worker holds of a prompt.

        Args:
            token_ids: The prompt, `(n,)`.
            scope: `kvgraft.prefix.scope_of` of the request's adapter and salt; text of others is not looked at.
            is_grafted: Whether the request accepts copies.

        Raises:
            ConfigError: The prompt is no sequence of 32-bit token ids.

        Complexity: O(workers * n log n).
        """
        tokens = as_tokens(token_ids)
        with self._lock:
            return {
                name: _scored(held, held.held(scope, tokens, is_grafted=is_grafted))
                for name, held in self._held.items()
            }

    def names_adapter(self, name: str) -> bool:
        """Return whether a worker has announced pages of an adapter of that name."""
        return any(name in held.adapters for held in self._held.values())

    def sizes(self) -> dict[str, HeldSize]:
        """Return how much text of each worker is known."""
        with self._lock:
            return {name: HeldSize(held.num_exact_tokens, held.num_shifted_tokens) for name, held in self._held.items()}

    def check(self) -> None:
        """Verify the invariants; for tests."""
        with self._lock:
            for held in self._held.values():
                held.check()


def _scored(held: HeldText, found: Held) -> WorkerScore:
    return WorkerScore(found.exact, found.shifted, found.continued, held_tokens=held.num_tokens, is_full=held.is_full)


def as_tokens(token_ids: object) -> np.ndarray:
    """Return int32 tokens.

    Raises:
        ConfigError: They are none.
    """
    try:
        given = np.asarray(token_ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError("token ids must be a list of whole numbers")
        tokens = given.astype(np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError("token ids must be a list of whole numbers") from error
    if (tokens != given).any():
        raise ConfigError("token ids must fit into 32 bits")
    return tokens


__all__ = ["Directory", "Held", "HeldSize", "WorkerScore"]
