"""Compute the approximate K/V of finished requests exactly, in pieces, in idle time.

A piece is an exact request for a longer beginning of the text: the prefix cache gives what is exact already, up to
the *frontier*; one forward pass computes the next rows; the prefix cache takes them, and everything is given back. Nothing is
held between two pieces, so that healing can be cut anywhere and loses nothing: where pressure evicts what it computed, the
frontier is further back. Where it passes the end of an approximate donor, an exact one of the same text takes its place; on
models with window layers donors are made piece by piece and joined at the end. Answers that were sent do not change
(docs/adr/0009).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.idle.heal_queue import Candidate, HealQueue
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.errors import CapacityError, CorruptCacheError, one_line
from kvgraft.graft.model import PassAbandonedError, SequenceRows
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.engine.kv.cache_manager import CacheManager
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.requests.request import Request
    from kvgraft.graft.model import ModelAdapter, SequenceOutput
    from kvgraft.types import DonorId, Namespace, TokenArray

DROPPED = ("too_many", "no_room", "evicted", "error", "reset")
"""Why texts are not healed: hotter ones wait, they do not fit, they are evicted as fast as they heal, a failure, a reset."""

logger = logging.getLogger(__name__)

MOST_ROWS = 512
"""Rows of a piece: longer ones are hardly faster per row, and cannot be interrupted."""
LEAST_ROWS = 32
"""Rows of a piece, however slow the machine; the pace makes up for it."""
_MOST_WORK = 3
"""Times the text that may be computed for it: where it is evicted as fast as it heals, there is no room for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Rows that are being computed: positions `[start, stop)` of a candidate's text."""

    candidate: Candidate
    kv: RequestKV
    start: int
    stop: int


class IdleHealer:
    """Heals one piece at a time. Not thread-safe.

    Attributes:
        num_tokens: Rows that were computed and are exact.
        num_requests: Texts that were healed to their end.
        num_abandoned: Pieces that ended before their end because the machine was wanted.
        dropped: Texts that were not, by reason (`DROPPED`).
    """

    def __init__(self, adapter: ModelAdapter, manager: CacheManager) -> None:
        self.num_tokens = 0
        self.num_requests = 0
        self.num_abandoned = 0
        self.dropped = dict.fromkeys(DROPPED, 0)
        self._adapter = adapter
        self._manager = manager
        self._space = manager.space
        self._queue = HealQueue(manager.space.donors, manager.flops)
        self._chosen: Candidate | None = None
        self._rests = False
        self._piece: _Piece | None = None

    @property
    def has_work(self) -> bool:
        """Whether texts wait to be healed that may be worth it now."""
        return bool(len(self._queue)) and not self._rests

    @property
    def num_candidates(self) -> int:
        """Texts that wait to be healed, or are being healed."""
        return len(self._queue)

    def add(self, request: Request, namespace: Namespace, token_ids: TokenArray, made: Sequence[DonorId]) -> None:
        """Have a finished request healed.

        Args:
            request: As it was answered.
            namespace: Of the K/V that it left.
            token_ids: int64, prompt and answer, as far as there were K/V of them.
            made: Donors that were made of it.
        """
        exact = replace(
            request,
            request_id=f"healing of {request.request_id}",
            token_ids=token_ids,
            sampling=SamplingParams(),  # nothing is drawn: what may be large need not wait with it
            structure=None,
            reuse=ReuseMode.EXACT,
            session=None,
            priority=0,
            provisional=False,
        )
        left_out = self._queue.add(Candidate(exact, namespace, self._approximate(made)))
        self.dropped["too_many"] += len(left_out)
        self._chosen = None
        self._rests = False

    def step(
        self, max_rows: int, max_flops: float, room: int, *, is_alone: bool, is_wanted: Callable[[], bool] | None = None
    ) -> float:
        """Heal a piece in a forward pass of its own; see `begin`.

        Args:
            max_rows: Of the piece.
            max_flops: Of the piece.
            room: Slots that unfinished requests will not come to need.
            is_alone: No request is unfinished.
            is_wanted: Whether the machine is wanted for a request, asked at every layer: the piece is abandoned then, and
                begins again later. None to finish it in any case.

        Returns:
            Its operations, 0 if there is nothing to do or it was abandoned.
        """
        rows = self.begin(max_rows, max_flops, room, is_alone=is_alone)
        if rows is None:
            return 0.0
        rows = replace(rows, is_abandoned=is_wanted)
        flops = self._manager.flops.of_positions(rows.positions)
        try:
            output: SequenceOutput | Exception = self._adapter.forward([rows])[0]
        except PassAbandonedError:
            self.abandon()
            return 0.0
        except Exception as error:  # noqa: BLE001 - its candidate is dropped
            output = error
        except BaseException:  # its user's Ctrl-C
            self.abandon()
            raise
        self.receive(output)
        return flops

    def begin(self, max_rows: int, max_flops: float, room: int, *, is_alone: bool) -> SequenceRows | None:
        """Choose the next piece and take its slots; None if there is none now. `receive` must follow in the same step.

        Args:
            max_rows: Of the piece; whole pages of the prefix cache are computed even if they are longer.
            max_flops: Of the piece, which has at least `LEAST_ROWS` rows if `max_rows` allows.
            room: Slots that unfinished requests will not come to need.
            is_alone: No request is unfinished: what does not fit now never will, and is dropped.
        """
        if self._chosen is not None and not self._is_worth_room(self._chosen):
            self._chosen = None
        # Every turn ends this, drops a candidate or takes donors from one, so that it ends whatever `look` returns.
        while (candidate := self._chosen or self._queue.best(self._is_worth_room)) is not None:
            if candidate.num_tokens > room and not is_alone:
                return None
            try:
                if not self._is_chosen(candidate):
                    continue
                self._piece = self._begun(candidate, max_rows, max_flops)
            except CapacityError as error:
                if not is_alone:
                    return None
                self._drop(candidate, "no_room", error)
            except Exception as error:
                self._space.doubt(error)
                logger.exception("%s failed", candidate.request.request_id)
                self._drop(candidate, "error", error)
            else:
                return self._rows(self._piece)
        self._rests = True
        return None

    def receive(self, output: SequenceOutput | Exception) -> None:
        """Take the end of the piece that was begun; a failed one drops its candidate."""
        piece, self._piece = self._piece, None
        assert piece is not None, "a piece was begun"
        candidate = piece.candidate
        if isinstance(output, Exception):
            logger.error("%s failed", candidate.request.request_id, exc_info=output)
            self._manager.abort(piece.kv)
            self._drop(candidate, "error", output)
            return
        try:
            self._keep(piece)
        except Exception as error:
            self._space.doubt(error)
            logger.exception("%s failed", candidate.request.request_id)
            self._manager.abort(piece.kv)
            self._drop(candidate, "error", error)
            return
        self.num_tokens += piece.stop - piece.start
        candidate.num_computed += piece.stop - piece.start
        candidate.frontier = piece.stop
        if piece.stop == candidate.num_tokens:
            self.num_requests += 1
            self._forget(candidate)
        elif candidate.num_computed >= _MOST_WORK * candidate.num_tokens:
            self._drop(candidate, "evicted")

    def abandon(self) -> None:
        """Give the slots of the piece that was begun back, which no prefix and no donor has; harmless without one."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self.num_abandoned += 1
            self._manager.abort(piece.kv)

    def wake(self) -> None:
        """Look again at texts that were not worth the room they need: a request has ended."""
        self._rests = False

    def clear(self) -> None:
        """Forget all candidates: their K/V may be of weights that have changed, or the engine ends."""
        self.dropped["reset"] += len(self._queue)
        self._queue.clear()
        self._chosen = None

    def rebuild(self) -> None:
        """Forget all candidates and the piece that was begun: its slots were taken back with all others."""
        self._piece = None
        self._rests = False
        self.clear()

    def check(self) -> None:
        """Verify that nothing is held between pieces, and that frontiers lie in their texts; raises `CorruptCacheError`."""
        if self._piece is not None:
            raise CorruptCacheError(f"a piece of the {self._piece.candidate.request.request_id} holds slots")
        for candidate in self._queue:
            if not 0 <= candidate.frontier <= candidate.num_tokens:
                raise CorruptCacheError(f"{candidate.request.request_id}: {candidate.frontier} positions are exact")

    def _is_chosen(self, best: Candidate) -> bool:
        """Choose the hottest candidate, unless exact donors have the text of its donors by now: it is colder then."""
        if self._chosen is None:
            live, before = best.donors, len(self._ends(best))
            best.donors = self._manager.retire(live)
            best.frontier = self._manager.look(best.request).total
            if len(best.donors) == before:
                self._chosen = best
        return self._chosen is best

    def _is_worth_room(self, candidate: Candidate) -> bool:
        """Return whether other K/V may be evicted for it: text that nothing reused or went on from gets free slots alone."""
        free_size = self._space.allocator.free_size
        if candidate.num_tokens <= free_size or self._is_hot(candidate):
            return True
        stored = self._manager.look(candidate.request)
        candidate.frontier = stored.total
        return candidate.num_tokens - stored.prefix_len <= free_size  # what lies on the host needs slots, too

    def _is_hot(self, candidate: Candidate) -> bool:
        return candidate.num_turns > 1 or any(map(self._space.donors.saved_tokens, candidate.donors))

    def _begun(self, candidate: Candidate, max_rows: int, max_flops: float) -> _Piece:
        seen = self._manager.look(candidate.request).total
        kv = self._manager.begin(candidate.request, stop=self._stop(candidate, seen, max_rows, max_flops))
        try:
            # What was seen on the host may not have come; so many rows would take too long then.
            stop = min(kv.plan.num_tokens, self._stop(candidate, kv.plan.prefix_len, max_rows, max_flops))
            return _Piece(candidate, kv, kv.plan.prefix_len, self._reserved(kv, stop))
        except BaseException:
            self._manager.abort(kv)
            raise

    def _stop(self, candidate: Candidate, start: int, max_rows: int, max_flops: float) -> int:
        """Return the end of a piece that begins at `start`."""
        positions = np.arange(start, min(start + min(max_rows, MOST_ROWS), candidate.num_tokens))
        costs = np.cumsum(self._manager.flops.by_position(positions))
        count = max(int(np.searchsorted(costs, max_flops, side="right")), min(LEAST_ROWS, max_rows))
        if candidate.num_tokens - (start + count) < LEAST_ROWS:
            count = candidate.num_tokens - start  # no crumbs, of which hybrid models could make no donors
        return self._whole_pages(start, start + count, candidate.num_tokens)

    def _reserved(self, kv: RequestKV, stop: int) -> int:
        """Return up to where the rows before `stop` can be computed now, and found again.

        Raises:
            CapacityError: None of them.
        """
        start = kv.plan.prefix_len
        reserved = start + self._manager.reserve(kv, np.arange(start, stop))
        if reserved < stop:
            reserved -= reserved % self._space.prefix.page_size
        if reserved <= start:
            raise CapacityError("running requests hold the slots of window layers")
        return reserved

    def _whole_pages(self, prefix_len: int, stop: int, num_tokens: int) -> int:
        """Return the end of a piece that can be found again: a page's end, unless it is the text's."""
        page = self._space.prefix.page_size
        return min(max(stop - stop % page, prefix_len + page) if stop < num_tokens else stop, num_tokens)

    def _rows(self, piece: _Piece) -> SequenceRows:
        positions, token_ids = np.arange(piece.start, piece.stop), piece.candidate.token_ids
        return SequenceRows(
            token_ids[positions],
            positions,
            piece.kv.kv_indices,
            num_logits=0,
            swa_indices=piece.kv.swa_indices,
            seq_len=len(token_ids),
        )

    def _keep(self, piece: _Piece) -> None:
        """Publish what is exact now and give the slots back; where a donor's end is passed, exact donors take its place."""
        candidate, kv = piece.candidate, piece.kv
        token_ids = candidate.token_ids[: piece.stop]
        if self._manager.longest_piece is None:
            candidate.donors = self._manager.heal(kv, token_ids, candidate.donors)
            return
        if piece.stop == candidate.num_tokens:
            self._manager.publish(kv, token_ids)
            self._manager.join(kv, candidate.made)
            self._manager.abort(kv)  # offers stores what was published
            candidate.donors = self._manager.retire(candidate.donors)
            return
        is_passed = any(piece.start < end <= piece.stop for end in self._ends(candidate))
        self._manager.publish(kv, token_ids)
        candidate.made += kv.made
        self._manager.suspend(kv, token_ids)
        if is_passed:
            candidate.donors = self._manager.retire(candidate.donors)

    def _ends(self, candidate: Candidate) -> list[int]:
        """Return the ends of the texts of its approximate donors."""
        donors = (self._space.donors.get(donor_id) for donor_id in candidate.donors)
        return [donor.start_position + donor.num_tokens for donor in donors if donor is not None]

    def _approximate(self, made: Sequence[DonorId]) -> list[DonorId]:
        donors = (self._space.donors.get(donor_id) for donor_id in made)
        return [donor.donor_id for donor in donors if donor is not None and donor.generation]

    def _drop(self, candidate: Candidate, reason: str, error: Exception | None = None) -> None:
        self.dropped[reason] += 1
        cause = "" if error is None else f": {one_line(error)}"
        name, frontier = candidate.request.request_id, candidate.frontier
        logger.info("%s ends at %d of %d tokens (%s)%s", name, frontier, candidate.num_tokens, reason, cause)
        self._forget(candidate)

    def _forget(self, candidate: Candidate) -> None:
        self._queue.remove(candidate)
        self._chosen = None
