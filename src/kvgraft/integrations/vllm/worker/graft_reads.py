"""K/V of stored donors on their way to grafts of one rank, span by span, and into host memory; all ranks in step."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.errors import StoreError, StoreMissError, one_line
from kvgraft.integrations.vllm.worker.ranks import lowest
from kvgraft.memory.block import KVBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvgraft.integrations.vllm.messages import Graft
    from kvgraft.integrations.vllm.worker.donor_store import DonorStore
    from kvgraft.integrations.vllm.worker.stores import DonorRead, RankStores
    from kvgraft.memory.store.tier import TaskThreads
    from kvgraft.types import DonorId

logger = logging.getLogger(__name__)

_GIVEN_UP = -1
_IDLE_WAIT_S = 0.005


@dataclass(slots=True, eq=False)
class _Order:
    """The reads of a graft: per stored span its number, the read that it is part of, and its offset there."""

    command: Graft
    parts: list[tuple[int, DonorRead, int]]
    whole: dict[DonorId, DonorRead]
    started: float
    num_arrived: int = 0
    problem: str = ""


@dataclass(slots=True, eq=False)
class _Promotion:
    """A donor that was read; `blocks` has its K/V once they are copied, or None if that failed."""

    blocks: deque[KVBlock | None] = field(default_factory=deque)


class GraftReads:
    """Follows reads from their beginning until every rank has them or one has not. Used by the worker's thread alone.

    Ranks keep the same orders and promotions: these follow from commands and from what `poll` finds jointly.
    """

    def __init__(self, stores: RankStores, donors: DonorStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._promoted: set[DonorId] = set()
        self._unpromoted: set[DonorId] = set()
        self._unreadable: set[str] = set()
        self._stores = stores
        self._donors = donors
        self._clock = clock
        self._orders: dict[str, _Order] = {}
        self._waited_ms: dict[str, float] = {}
        self._promotions: dict[DonorId, _Promotion] = {}
        self._copies: TaskThreads | None = None

    def begin(self, command: Graft) -> None:
        """Begin to read what a graft needs; never waits and never raises: what cannot begin shows in `poll`, to all ranks."""
        if not command.stored:
            return
        order = self._orders[command.request_id] = _Order(command, [], {}, self._clock())
        try:
            self._read_parts(order)
        except Exception as error:
            logger.exception("reads of request %s cannot begin", command.request_id)
            order.problem = one_line(error)

    def _read_parts(self, order: _Order) -> None:
        command, whole = order.command, order.whole
        for index, span in enumerate(command.spans):
            stored = command.stored.get(span.donor_id)
            if stored is None:
                continue
            if not stored.is_promoted:
                order.parts.append((index, self._stores.read(stored.key, span.donor_start, span.length), 0))
                continue
            if span.donor_id not in whole:
                whole[span.donor_id] = self._stores.read(stored.key, 0, stored.num_tokens)
            order.parts.append((index, whole[span.donor_id], span.donor_start))

    def give_up(self, request_id: str) -> None:
        """Read nothing more for a graft; one that reads nothing is ignored."""
        self._waited_ms.pop(request_id, None)
        order = self._orders.pop(request_id, None)
        if order is not None:
            for _, read, _ in order.parts:
                read.cancel()
            self._unpromoted |= {name for name, stored in order.command.stored.items() if stored.is_promoted}

    def drop(self, donor_id: DonorId) -> None:
        """Do not keep a donor that is on its way into host memory."""
        if self._promotions.pop(donor_id, None) is not None:
            self._unpromoted.add(donor_id)

    def clear(self) -> None:
        """Give everything up."""
        for request_id in list(self._orders):
            self.give_up(request_id)
        self._unpromoted |= self._promotions.keys()
        self._promotions.clear()

    def wait(self) -> None:
        """Wait a moment for the next read, where the engine has nothing else to do."""
        for order in self._orders.values():
            for _, read, _ in order.parts[order.num_arrived :]:
                if not read.settle():
                    read.wait(_IDLE_WAIT_S)
                    return

    def poll(self) -> tuple[dict[str, list[tuple[int, KVBlock]]], dict[str, str]]:
        """Return the spans that all ranks have now, and grafts with reads that failed or are late on one of them.

        Returns:
            By request the numbers and K/V of spans that have arrived, and by request what is wrong.

        Every rank must ask in the same step, if it has orders or promotions.
        """
        if not self._orders and not self._promotions:
            return {}, {}
        orders, promotions = list(self._orders.items()), list(self._promotions.items())
        mine = [self._progress(order) for _, order in orders]
        mine += [_state(promotion) for _, promotion in promotions]
        joint = lowest(mine)
        arrived: dict[str, list[tuple[int, KVBlock]]] = {}
        failed: dict[str, str] = {}
        for (request_id, order), count in zip(orders, joint, strict=False):
            if count == _GIVEN_UP:
                failed[request_id] = order.problem or "another rank could not read its donors from a store"
                self.give_up(request_id)
            elif count > order.num_arrived:
                arrived[request_id] = list(self._arrivals(request_id, order, count))
        for (donor_id, promotion), state in zip(promotions, joint[len(orders) :], strict=True):
            if state:
                self._settle(donor_id, promotion, is_kept=state > 0)
        return arrived, failed

    def take_waited_ms(self, request_id: str) -> float:
        """Return the milliseconds until all reads of a graft had arrived; 0 if it read nothing."""
        return self._waited_ms.pop(request_id, 0.0)

    def take_news(self) -> tuple[frozenset[DonorId], frozenset[DonorId], frozenset[str]]:
        """Return the news since the last call: donors now in host memory, those that will not be, keys that no store has."""
        news = frozenset(self._promoted), frozenset(self._unpromoted), frozenset(self._unreadable)
        self._promoted, self._unpromoted, self._unreadable = set(), set(), set()
        return news

    def close(self) -> None:
        """End the thread."""
        if self._copies is not None:
            self._copies.close()

    def _progress(self, order: _Order) -> int:
        """Return how many first spans have arrived here; `_GIVEN_UP` if one will not."""
        if order.problem:
            return _GIVEN_UP
        count = 0
        for _, read, _ in order.parts:
            if not read.settle():
                break
            try:
                read.block()
            except StoreError as error:
                if isinstance(error, StoreMissError):
                    self._unreadable.add(read.key)
                order.problem = f"{error}"
                return _GIVEN_UP
            count += 1
        waited_s = self._clock() - order.started
        if count < len(order.parts) and waited_s > order.command.deadline_s:
            order.problem = f"a store has not given {len(order.parts) - count} spans within {waited_s:.2f} s"
            self._stores.late(order.parts[count][1], waited_s)
            return _GIVEN_UP
        return count

    def _arrivals(self, request_id: str, order: _Order, count: int) -> Iterator[tuple[int, KVBlock]]:
        spans = order.command.spans
        for index, read, start in order.parts[order.num_arrived : count]:
            yield index, read.block().span(start, spans[index].length)
        order.num_arrived = count
        if count == len(order.parts):
            del self._orders[request_id]
            self._waited_ms[request_id] = (self._clock() - order.started) * 1e3
            for donor_id, read in order.whole.items():
                self._promote(donor_id, read.block())

    def _promote(self, donor_id: DonorId, block: KVBlock) -> None:
        """Copy a donor out of the rows in which it was read: its tokens are a row's length apart."""
        self._promotions[donor_id] = promotion = _Promotion()
        blocks = promotion.blocks

        def copy() -> None:
            try:
                blocks.append(KVBlock(*(tuple(t.contiguous() for t in side) for side in (block.keys, block.values))))
            except Exception:
                logger.exception("donor %d is not kept in host memory", donor_id)
                blocks.append(None)

        try:
            self._copies = self._copies or _promotions()
            self._copies.submit(copy)
        except Exception:
            logger.exception("donor %d is not kept in host memory", donor_id)
            blocks.append(None)

    def _settle(self, donor_id: DonorId, promotion: _Promotion, *, is_kept: bool) -> None:
        del self._promotions[donor_id]
        block = promotion.blocks[0] if promotion.blocks else None
        try:
            if is_kept and block is not None:
                self._donors.keep(donor_id, block)
        except Exception:
            # Books of the scheduler make this impossible; others drop what this rank lacks.
            logger.exception("donor %d is not kept in host memory", donor_id)
            is_kept = False
        (self._promoted if is_kept else self._unpromoted).add(donor_id)


def _state(promotion: _Promotion) -> int:
    if not promotion.blocks:
        return 0
    return 1 if promotion.blocks[0] is not None else _GIVEN_UP


def _promotions() -> TaskThreads:
    from kvgraft.memory.store.tier import TaskThreads

    return TaskThreads("kvgraft-promotion")
