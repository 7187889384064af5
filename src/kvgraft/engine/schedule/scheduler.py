"""Continuous batching: choose the requests that run and their rows of the next forward pass. Runs nothing.

A step carries one row of every stream (a request that is past its prompt) and as much prefill as `Pace` allows. Prompts are
admitted as late as possible, when a step has room for their first rows: what finishes before that can still be reused.
A prompt that reads K/V from a store is admitted, too, and holds its slots, but is in no pass until they are there or the time
for it is up; others run meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.schedule.active import Phase
from kvgraft.engine.schedule.fair_queue import FairQueue
from kvgraft.engine.schedule.prompt_logprobs import MOST_ROWS
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvgraft.engine.kv.cache_manager import CacheManager
    from kvgraft.engine.requests.request import Request
    from kvgraft.engine.schedule.active import ActiveRequest
    from kvgraft.engine.schedule.pace import Pace
    from kvgraft.graft.model import SequenceRows

_HEADROOM = 32
"""Slots that a request gets beyond what it needs now, so that its output lies in few runs."""
_MIN_ROWS = 32
"""A piece of prefill is not cut smaller than this; the pace makes up for it later."""
_MAX_LONG_PREFILLS = 4
"""So many long prompts are computed side by side at most; a short one need not wait for them."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """The rows of the next forward pass.

    Attributes:
        parts: Requests and their rows; those of streams first.
        num_streams: Streams among them.
        prefill_flops: Operations of the other rows.
        failed: Waiting requests that cannot be admitted, and why; the caller removes them.
        admission_s: Seconds that the lookups and copies of admitted prompts took.
        spare_flops: Operations of prefill that the streams would bear and that no prompt wants.
    """

    parts: list[tuple[ActiveRequest, SequenceRows]]
    num_streams: int
    prefill_flops: float
    failed: list[tuple[ActiveRequest, Exception]]
    admission_s: float = 0.0
    spare_flops: float = 0.0

    @property
    def prefill_rows(self) -> int:
        """Prompt positions among the rows."""
        return sum(len(rows.positions) for _, rows in self.parts[self.num_streams :])

    @property
    def repair_rows(self) -> int:
        """Positions among the rows that streams compute exactly besides their own."""
        return sum(len(rows.positions) - 1 for _, rows in self.parts[: self.num_streams])


class Scheduler:
    """Queues, admits, batches and preempts. Not thread-safe.

    Preemption takes the request that arrived last; it goes back to the head of the queue and is computed again.
    """

    def __init__(self, manager: CacheManager, pace: Pace, *, max_running: int, max_rows: int) -> None:
        self.waiting: FairQueue[ActiveRequest] = FairQueue()
        self.running: list[ActiveRequest] = []
        self.loading: list[ActiveRequest] = []
        self.num_preemptions = 0
        self._manager = manager
        self._pace = pace
        self._max_running = max_running
        self._max_rows = max_rows
        self._is_blocked = False

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self.running or self.loading or len(self.waiting))

    def add(self, active: ActiveRequest) -> None:
        """Queue a new request after those of its tenant."""
        request = active.request
        self.waiting.push(active, request.namespace.tenant_salt, len(request.token_ids))

    def remove(self, active: ActiveRequest) -> None:
        """Forget a request, waiting or running; its slots are the caller's to release."""
        self._is_blocked = False
        if active in self.running:
            self.running.remove(active)
        elif active in self.loading:
            self.loading.remove(active)
        else:
            self.waiting.remove(active)

    def rebuild(self) -> None:
        """Forget all requests without a look at the queues; the caller has taken back what they hold."""
        self.waiting = FairQueue()
        self.running.clear()
        self.loading.clear()
        self._is_blocked = False

    def check(self, unfinished: Collection[ActiveRequest]) -> None:
        """Verify that these requests, and no others, run, load or wait, each in one place; raises `CorruptCacheError`."""
        self.waiting.check()
        places = sorted(map(id, (*self.running, *self.loading, *self.waiting)))
        if places != sorted(map(id, unfinished)):
            raise CorruptCacheError(f"{len(unfinished)} requests are unfinished and {len(places)} run, load or wait")

    def schedule(self) -> ScheduledStep:
        """Choose the rows of the next forward pass; grows streams, preempts and admits on the way."""
        failed: list[tuple[ActiveRequest, Exception]] = []
        self._load(failed)
        streams = self._grow_streams()
        parts = [(active, active.next_rows()) for active in streams]
        budget = self._pace.prefill_flops(len(streams), self._lateness())
        prefill_flops, admission_s = self._add_prefills(parts, budget, failed)
        has_prompts = len(self.waiting) or self.loading or any(active.is_prefilling for active in self.running)
        spare_flops = 0.0 if has_prompts or not streams else budget
        return ScheduledStep(parts, len(streams), prefill_flops, failed, admission_s, spare_flops)

    def _grow_streams(self) -> list[ActiveRequest]:
        """Give every stream the slot of its next token; the request that arrived last is preempted where there are none.

        A stream that needs other RoPE angles from here on is computed again with these, as if it were a prompt.
        """
        for active in [active for active in self.running if active.is_streaming]:
            if active.kv is not None and self._manager.outgrows(active.kv, active.num_tokens):
                self._send_back(active)
            while active in self.running and not self._grow(active):
                self.preempt(self._last_arrived())
        return [active for active in self.running if not active.is_prefilling]

    def _grow(self, active: ActiveRequest) -> bool:
        assert active.kv is not None
        headroom = min(_HEADROOM, active.max_tokens - active.num_tokens)
        try:
            self._manager.grow(active.kv, active.num_tokens, headroom=headroom)
        except CapacityError:
            return False
        return True

    def _load(self, failed: list[tuple[ActiveRequest, Exception]]) -> None:
        """Start prompts that have all K/V from stores, or have waited too long; one that fails waits, holding nothing."""
        for active in list(self.loading):
            kv = active.kv
            assert kv is not None
            try:
                if not self._manager.load(kv):
                    continue
                active.start(kv, self._manager.prefill(kv))
            except Exception as error:  # noqa: BLE001 - one request must not stop the others
                self._manager.space.doubt(error)
                active.wait()
                self._manager.abort(kv)
                self.waiting.push_front(active)
                failed.append((active, error))
            else:
                self.running.append(active)
            self.loading.remove(active)

    def wait_for_stores(self, timeout_s: float) -> None:
        """Wait until a store has brought something, for at most `timeout_s`. For when nothing else is to do."""
        for active in self.loading[:1]:
            if active.kv is not None and active.kv.held.reads is not None:
                active.kv.held.reads.wait(timeout_s)

    def restart_loading(self) -> None:
        """Send prompts back that wait for stores: their donors are gone."""
        for active in list(self.loading):
            self._send_back(active)

    def _last_arrived(self) -> ActiveRequest:
        return max((*self.running, *self.loading), key=lambda active: active.request.arrival)

    def preempt(self, active: ActiveRequest) -> None:
        """Take the K/V of a running request; it waits, and begins again when another has ended."""
        self._send_back(active)
        # No request is admitted until one ends, or the victim would be back at once and be preempted again.
        self._is_blocked = True

    def _send_back(self, active: ActiveRequest) -> None:
        """Make a running request the first of those that wait; it is computed again."""
        kv = active.kv
        assert kv is not None
        self._manager.suspend(kv, active.suspend())
        active.stored_len = kv.stored_len
        (self.loading if active in self.loading else self.running).remove(active)
        self.waiting.push_front(active)
        self.num_preemptions += 1

    def _add_prefills(
        self,
        parts: list[tuple[ActiveRequest, SequenceRows]],
        budget: float,
        failed: list[tuple[ActiveRequest, Exception]],
    ) -> tuple[float, float]:
        """Append rows of prompts, the most urgent first, for at most about `budget` operations.

        Returns:
            Operations of the rows, and seconds that admissions took. Beside streams these count against the budget: a long
            prompt's lookup and copies stall a stream as rows do, and its rows go with a later step.
        """
        num_streams, admission_s = len(parts), 0.0
        room, scored_room = self._max_rows - sum(len(rows.positions) for _, rows in parts), MOST_ROWS
        pending = sorted((a for a in self.running if a.is_prefilling), key=self._urgency)
        spent, num_stalled = 0.0, 0
        while room > 0 and spent < budget:
            if not failed and num_stalled < _MAX_LONG_PREFILLS and self._may_admit(pending):
                admitted, seconds = self._timed_admission(failed)
                admission_s += seconds
                budget -= self._pace.flops_beside(seconds) if num_streams else 0.0
                if admitted in self.loading:
                    continue
                if admitted is not None:
                    pending = sorted([*pending, admitted], key=self._urgency)
            if not pending or spent >= budget:
                break
            active = pending.pop(0)
            costs = np.cumsum(self._manager.flops.by_position(active.remaining))
            count = int(np.searchsorted(costs, budget - spent, side="right"))
            if (spent or (num_streams and admission_s)) and 2 * count < min(_MIN_ROWS, len(costs)):
                break  # the step has a piece or an admission, and would overdraw by more than half of another piece
            # Rows that go together may be more than there is room for: the pace makes up for it, and waiting would not help.
            count = min(max(count, _MIN_ROWS), room, len(costs), scored_room if active.is_scored else room)
            if count <= 0:  # logits of no more rows are kept in this step; prompts that need none go on
                num_stalled += 1
                continue
            count = self._reserve(active, active.piece(count))
            if not count:
                if not parts and not failed:
                    pending = self._give_way(active, failed)
                continue
            rows = active.next_rows(count)
            parts.append((active, rows))
            spent += self._manager.flops.of_positions(rows.positions)
            room -= len(rows.positions)
            scored_room -= rows.num_logits
        return spent, admission_s

    def _reserve(self, active: ActiveRequest, count: int) -> int:
        """Return how many of the next `count` rows have slots; fewer only where window layers have slots of their own."""
        assert active.kv is not None
        return self._manager.reserve(active.kv, active.remaining[:count])

    def _give_way(self, active: ActiveRequest, failed: list[tuple[ActiveRequest, Exception]]) -> list[ActiveRequest]:
        """Preempt the prompt that arrived last: prompts hold one another's window slots and nothing else runs.

        Returns the prompts that are left, the most urgent first.
        """
        if len(self.running) + len(self.loading) == 1:
            failed.append(
                (active, CapacityError("the slots of window layers are too few for one prompt; raise num_slots"))
            )
            return []
        self.preempt(self._last_arrived())
        return sorted((a for a in self.running if a.is_prefilling), key=self._urgency)

    def _may_admit(self, pending: list[ActiveRequest]) -> bool:
        """Return whether the next prompt should join: nothing else is left to compute, or only prompts that take long."""
        num_admitted = len(self.running) + len(self.loading)
        if self._is_blocked and num_admitted:
            return False
        if not len(self.waiting) or num_admitted >= self._max_running:
            return False
        return len(pending) < _MAX_LONG_PREFILLS and all(self._is_long(active) for active in pending)

    def _timed_admission(self, failed: list[tuple[ActiveRequest, Exception]]) -> tuple[ActiveRequest | None, float]:
        started = time.perf_counter()
        return self._admit(failed), time.perf_counter() - started

    def _admit(self, failed: list[tuple[ActiveRequest, Exception]]) -> ActiveRequest | None:
        """Give the next waiting request its slots and its graft; None if it has to wait or cannot run at all."""
        active = self.waiting.peek()
        sequence = active.sequence()
        headroom = min(_HEADROOM, active.max_tokens - len(sequence.token_ids))
        try:
            self._begin(active, sequence, headroom)
        except CapacityError as error:
            if self.running or self.loading:
                self._is_blocked = True
            else:
                failed.append((active, error))
            return None
        except Exception as error:  # noqa: BLE001 - one request must not stop the others
            self._manager.space.doubt(error)
            failed.append((active, error))
            return None
        self.waiting.pop()
        (self.running if active.is_prefilling else self.loading).append(active)
        return active

    def _begin(self, active: ActiveRequest, sequence: Request, headroom: int) -> None:
        """Give a request its slots and its graft; one that fails at it holds nothing."""
        kv = self._manager.begin(sequence, headroom=headroom, stored_len=active.stored_len, goes_on=active.goes_on)
        try:
            self._manager.graft(kv)
            if kv.held.reads is None:
                active.start(kv, self._manager.prefill(kv))
            else:
                active.load(kv)
        except BaseException:
            active.wait()
            self._manager.abort(kv)
            raise

    def _is_long(self, active: ActiveRequest) -> bool:
        flops = self._manager.flops.of_positions(active.remaining)
        return flops > self._pace.prefill_flops_alone

    def _urgency(self, active: ActiveRequest) -> float:
        """Return when the rows could be done alone: short prompts overtake long ones, but not for ever.

        A repair comes after prompts that arrived before its first token.
        """
        alone = self._pace.alone_s(self._manager.flops.of_positions(active.remaining))
        return active.due_since + alone

    def _lateness(self) -> float:
        """Return the wait of the most urgent prompt, in multiples of what `Pace` promises."""
        now = time.perf_counter()
        prompts = [active for active in self.running if active.is_prefilling]
        if len(self.waiting):
            prompts.append(self.waiting.peek())
        return max((self._pace.lateness(now - a.due_since, self._prompt_flops(a)) for a in prompts), default=0.0)

    def _prompt_flops(self, active: ActiveRequest) -> float:
        """Return the operations of the whole prompt; a waiting one counts in full, since it has no plan yet."""
        if active.phase is Phase.REPAIR:
            return self._manager.flops.of_positions(active.remaining)
        if active.kv is not None:
            plan, flops = active.kv.plan, self._manager.flops
            is_healed = active.kv.request.reuse is ReuseMode.VERIFIED and plan.spans
            again = flops.of_range(plan.prefix_len, plan.num_tokens) if is_healed else 0.0
            return flops.of_positions(plan.compute) + again
        return self._manager.flops.of_positions(np.arange(active.num_tokens))
