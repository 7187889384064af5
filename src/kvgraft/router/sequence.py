"""Order of the batches of one worker, and what is lost of them. Decides; no I/O.

All that is learned from a suffix of a stream is part of the truth: what was stored in it and not removed since is
there. So when batches are lost for good, everything is forgotten and learning begins again after the gap. A worker
that has been started anew counts from 0 again; it is known by time stamps, which a repeated batch does not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.events import EventBatch, KVEvent

_MAX_HELD_BACK = 10_000
"""Batches that wait for older ones; as many as publishers keep for a replay."""


@dataclass(slots=True)
class Progress:
    """Actions that follow from a batch.

    Attributes:
        events: To be applied in order.
        forget: Forget everything that was learned, before the events are applied.
        ask_from: Ask for a replay from this number on; None for no need.
    """

    events: list[KVEvent] = field(default_factory=list)
    forget: bool = False
    ask_from: int | None = None


class BatchSequence:
    """The stream of one worker.

    Attributes:
        num_lost: Gaps that could not be closed.
        num_filled: Gaps that a replay has closed.
        num_restarts: How often another process was found at the endpoint.
    """

    def __init__(self, *, can_replay: bool) -> None:
        """Begin before the first batch; with `can_replay` the owner asks for what is missing."""
        self.num_lost = self.num_filled = self.num_restarts = 0
        self._can_replay = can_replay
        self._next: int | None = None
        self._known_from = 0
        self._last_time = -math.inf
        self._waiting: dict[int, EventBatch] = {}
        self._asked_from: int | None = None
        self._learns_anew = False
        self._witness: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a replay was asked for and is still wanted."""
        return self._asked_from is not None

    def connected(self) -> Progress:
        """Note a new connection: something may have been missed, or another process publishes now."""
        if not self._can_replay:
            return Progress(forget=self._begin_anew())
        if self._next:
            # The last batch is asked for once more: if it is another one, or there is none, this is another process.
            self._witness = self._next - 1
        # What waits for older batches may be of a process that is gone, and is sent again if it is not.
        self._waiting.clear()
        return self._ask(self._witness or 0)

    def settled(self) -> Progress:
        """Note that the subscription is in effect; what was published before it, after the last replay, is asked for."""
        if self._can_replay and self._next is not None and not self.is_waiting:
            return self._ask(self._next)
        return Progress()

    def retried(self) -> Progress:
        """Ask for everything once more, as an earlier replay was given up; what is known stays until it comes."""
        if self._next is None or self.is_waiting:
            return Progress()
        return self._ask(0, anew=True)

    def disconnected(self) -> Progress:
        """Note that the connection is gone: removals meanwhile are missed, without a replay for good."""
        return Progress() if self._can_replay else Progress(forget=self._begin_anew())

    def abandoned(self) -> Progress:
        """Forget all, as no publisher was connected for too long."""
        return Progress(forget=self._begin_anew())

    def received(self, number: int, batch: EventBatch) -> Progress:
        """Take a batch that was published."""
        if self._is_restart(number, batch):
            return self._restarted(number, batch)
        if self._next is not None and number < self._next:
            return Progress()  # known, or given up for lost
        self._waiting[number] = batch
        if self.is_waiting:
            return Progress() if len(self._waiting) <= _MAX_HELD_BACK else self._give_up()
        return self._go_on()

    def replayed(self, number: int, batch: EventBatch) -> Progress:
        """Take a batch from the replay endpoint."""
        if self._is_restart(number, batch):
            return self._restarted(number, batch)
        if number == self._witness:
            self._witness = None
        if self._next is None or number >= self._next or self._learns_anew:
            self._waiting[number] = batch
        return Progress() if len(self._waiting) <= 2 * _MAX_HELD_BACK else self._give_up()

    def replay_ended(self) -> Progress:
        """End the replay: it is complete, or the endpoint does not answer, and what is still missing is lost."""
        if self._witness is not None:
            return self._restarted()
        asked, self._asked_from = self._asked_from, None
        if self._next is None:
            self._begin_at(min(self._waiting, default=0))
        if self._learns_anew:
            return self._learned_anew()
        progress = self._go_on(asked_in_vain=asked)
        self.num_filled += bool(progress.events) and not progress.forget
        return progress

    def _learned_anew(self) -> Progress:
        """Begin with what was sent again if that goes back further, without a gap, than what is known."""
        assert self._next is not None
        self._learns_anew, first = False, self._next
        while first - 1 in self._waiting:
            first -= 1
        if is_more := first < self._known_from:
            self._begin_at(first)
        self._waiting = {number: batch for number, batch in self._waiting.items() if number >= self._next}
        progress = self._go_on()
        return replace(progress, forget=progress.forget or is_more)

    def _go_on(self, asked_in_vain: int | None = None) -> Progress:
        """Take what is in order; where batches wait after a gap, ask for the gap, once."""
        if self._next is None:
            self._begin_at(min(self._waiting))
        assert self._next is not None
        events = self._drained()
        if not self._waiting:
            return Progress(events)
        if not self._can_replay or self._next == asked_in_vain:
            return self._give_up()
        return Progress(events, ask_from=self._ask(self._next).ask_from)

    def _is_restart(self, number: int, batch: EventBatch) -> bool:
        return self._next is not None and number < self._next and batch.timestamp > self._last_time

    def _restarted(self, number: int | None = None, batch: EventBatch | None = None) -> Progress:
        """Begin with the batches of another process, all of which are asked for if the first is missing."""
        self.num_restarts += 1
        self._begin_anew()
        if number is not None and batch is not None:
            self._waiting[number] = batch
        if number == 0 or not self._can_replay:
            return replace(self._go_on(), forget=True)
        return replace(self._ask(0), forget=True)

    def _ask(self, first: int, *, anew: bool = False) -> Progress:
        self._asked_from, self._learns_anew = first, anew
        return Progress(ask_from=first)

    def _begin_at(self, number: int) -> None:
        self._next = self._known_from = number

    def _begin_anew(self) -> bool:
        """Begin before the first batch again; return whether anything was known."""
        knew = self._next is not None
        self._next, self._last_time = None, -math.inf
        self._waiting.clear()
        self._asked_from = self._witness = None
        self._learns_anew = False
        return knew

    def _give_up(self) -> Progress:
        """Forget what was learned, and go on after the last gap."""
        self.num_lost += 1
        numbers = sorted(self._waiting)
        while numbers[-1] - numbers[0] >= len(numbers):
            del self._waiting[numbers.pop(0)]
        self._asked_from = self._witness = None
        self._learns_anew = False
        self._begin_at(numbers[0])
        return Progress(self._drained(), forget=True)

    def _drained(self) -> list[KVEvent]:
        """Take what is in order from what waits."""
        events: list[KVEvent] = []
        while self._next is not None and (batch := self._waiting.pop(self._next, None)) is not None:
            self._next, self._last_time = self._next + 1, max(self._last_time, batch.timestamp)
            events += batch.events
        return events
