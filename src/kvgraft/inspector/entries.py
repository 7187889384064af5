"""Requests that ended, numbered in the order in which they did, the last ones kept."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvgraft.explain import RunKind
from kvgraft.explain.hints import reason_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvgraft.explain import ExplainedRequest

_MOST_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that ended.

    Attributes:
        number: Its place, from 1 on; never given out twice.
        ended: Unix time at which it ended, or was read of, in seconds.
        request_id: Its name.
        outcome: How it ended; empty where unknown.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens generated; None where unknown.
        ttft_s: Seconds to the first token; None where unknown.
        total_s: Seconds to its end; None where unknown.
        counts: Prompt tokens by fate (`RunKind`).
        miss: Why nothing was grafted, or empty.
        explained: Makes its report's explanation; None without a report.
    """

    number: int
    ended: float
    request_id: str
    outcome: str
    prompt_tokens: int
    output_tokens: int | None
    ttft_s: float | None
    total_s: float | None
    counts: Mapping[RunKind, int]
    miss: str
    explained: Callable[[], ExplainedRequest] | None

    @property
    def reuse(self) -> str:
        """`grafted`, `continued`, `exact` or `none`: the least exact of what was reused."""
        if self.counts.get(RunKind.SHIFTED) or self.counts.get(RunKind.SUBSTITUTED):
            return "grafted"
        if self.counts.get(RunKind.CONTINUED):
            return "continued"
        return "exact" if self.counts.get(RunKind.EXACT) else "none"

    @property
    def why(self) -> str:
        """Why nothing was grafted, in the words of `kvgraft explain`; empty where something was, or without a reason."""
        return reason_in_words(self.miss).words if self.miss else ""


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice of requests.

    Attributes:
        text: Part of the name, the outcome or the reason of the miss, as reports and as people say it, in lower case; empty
            takes all.
        reuse: As `Entry.reuse`; empty takes all.
    """

    text: str = ""
    reuse: str = ""

    def takes(self, entry: Entry) -> bool:
        """Whether a request is among those."""
        if self.reuse and entry.reuse != self.reuse:
            return False
        said = (entry.request_id, entry.outcome, entry.miss, entry.why)
        return not self.text or any(self.text in part.lower() for part in said)


class EntryLog:
    """The last entries, for any number of threads. `add` is O(1)."""

    def __init__(self, limit: int = _MOST_ENTRIES) -> None:
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._newest = 0
        self._lock = threading.Lock()

    def add(self, make: Callable[[int], Entry]) -> None:
        """Keep the entry that `make` gives for its number; the oldest one leaves where there are too many."""
        with self._lock:
            self._newest += 1
            self._entries.append(make(self._newest))

    @property
    def newest(self) -> int:
        """Number of the last entry; 0 while there was none."""
        return self._newest

    def get(self, number: int) -> Entry | None:
        """An entry, or None if it is not kept. O(entries after it)."""
        return next((entry for entry in self._backwards() if entry.number == number), None)

    def select(self, which: Filter, *, after: int = 0, before: int = 0, limit: int) -> list[Entry]:
        """Return up to `limit` of the entries that `which` takes, the newest first.

        Args:
            which: Takes them.
            after: Only those with a higher number.
            before: Only those with a lower number; 0 is no bound.
            limit: How many.
        """
        fitting = (
            entry
            for entry in self._backwards()
            if entry.number > after and (not before or entry.number < before) and which.takes(entry)
        )
        return list(islice(fitting, limit))

    def _backwards(self) -> Iterator[Entry]:
        with self._lock:
            entries = list(self._entries)
        return reversed(entries)
