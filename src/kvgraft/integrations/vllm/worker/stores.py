"""The stores of one rank: donors in and out of them, by threads, in the space of the weights that the rank has."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_tp_group

from kvgraft.errors import StoreError
from kvgraft.integrations.vllm.messages import ReadCost
from kvgraft.integrations.vllm.worker.ranks import gathered
from kvgraft.reuse.metrics import STORE_RESTING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.store import KVStore
    from kvgraft.memory.store.record import DonorRecord
    from kvgraft.memory.store.tier import Fetch, StoreReader, StoreWriter

logger = logging.getLogger(__name__)

_NEVER = ReadCost(math.inf, math.inf)
_COST_TOKENS = 4096
_CLOSE_S = 5.0


class DonorRead:
    """A run of a donor's tokens on its way from the first store that has it.

    Attributes:
        key: Of the donor.
        length: Tokens.
        asked: Number of the store that is asked.
    """

    def __init__(self, readers: Sequence[StoreReader], key: str, start: int, length: int) -> None:
        """Begin; never waits and never raises."""
        self.key = key
        self.start = start
        self.length = length
        self.asked = -1
        self._readers = iter(readers)
        self._fetch: Fetch | None = None
        self._error: StoreError = StoreError("this rank has no store")
        self._ask_next()

    def settle(self) -> bool:
        """Return whether the read has ended, well or not; ask the next store where one has failed."""
        while self._fetch is not None and self._fetch.is_done:
            try:
                self._fetch.block()
            except StoreError as error:
                self._error = error
                self._ask_next()
            else:
                return True
        return self._fetch is None

    def wait(self, timeout_s: float) -> None:
        """Wait a moment for the store that is being asked."""
        if self._fetch is not None:
            self._fetch.wait(timeout_s)

    def block(self) -> KVBlock:
        """Return the K/V, in host memory, once the read has ended.

        Raises:
            StoreError: No store gave it; the error is that of the last one.
        """
        if self._fetch is None:
            raise self._error
        return self._fetch.block()

    def cancel(self) -> None:
        """Cancel the read."""
        if self._fetch is not None:
            self._fetch.cancel()

    def _ask_next(self) -> None:
        reader = next(self._readers, None)
        self.asked += 1
        self._fetch = None if reader is None else reader.fetch(self.key, self.start, self.length)


class RankStores:
    """Reads and writes in the rank's space once `prove` has named it. Used by the worker's thread alone."""

    def __init__(self, stores: Sequence[KVStore], *, max_queued_bytes: int) -> None:
        """Take stores, in the order in which they are asked, and the bytes that may be under way in each direction."""
        self.space = ""
        self._bytes_per_token = 0
        self._stores = tuple(stores)
        self._max_bytes = max_queued_bytes
        self._writers: list[StoreWriter] = []
        self._readers: list[StoreReader] = []
        self._num_late: list[int] = []
        self._reported: dict[str, float] = {}
        self._reported_cost: ReadCost | None = None

    def prove(self, rank: RankModel) -> None:
        """Name the space of the weights that the model has now; all ranks together.

        Raises:
            ImportError: The extra `store` is not installed.
        """
        from kvgraft.integrations.vllm.worker.space import row_layout, space_of, weights_of
        from kvgraft.memory.store.tier import StoreReader, StoreWriter

        self.forget_space()
        layout = row_layout(rank)
        space = space_of(rank, layout, gathered(weights_of(rank)), get_tp_group().rank_in_group)
        self._writers = [StoreWriter(store, space, layout, max_queued_bytes=self._max_bytes) for store in self._stores]
        self._readers = [StoreReader(store, space, layout, max_pending_bytes=self._max_bytes) for store in self._stores]
        self.space, self._bytes_per_token = space, layout.bytes_per_token
        self._num_late = [0] * len(self._stores)

    def forget_space(self) -> None:
        """Read and write nothing until the next `prove`; writes under way name the space of the earlier weights."""
        for writer in self._writers:
            writer.close(0.0)
        for reader in self._readers:
            reader.close()
        self.space, self._writers, self._readers = "", [], []
        self._reported = {name: value for name, value in self._reported.items() if name.startswith(STORE_RESTING.name)}
        self._reported_cost = None

    def write(self, record: DonorRecord, read: Callable[[], KVBlock | None]) -> None:
        """Store a donor in the background; `read` gives it there, and may wait, even if the donor is evicted meanwhile."""
        for writer in self._writers:
            writer.offer(record, read)

    def read(self, key: str, start: int, length: int) -> DonorRead:
        """Begin to read tokens `[start, start + length)` of a donor."""
        return DonorRead(self._readers, key, start, length)

    def late(self, read: DonorRead, seconds: float) -> None:
        """Note that a read was given up: it takes longer than that."""
        if read.asked < len(self._readers):
            self._readers[read.asked].speed.observe(read.length * self._bytes_per_token, seconds)
            self._readers[read.asked].was_late()
            self._num_late[read.asked] += 1

    def take_cost(self) -> ReadCost | None:
        """Return the cost of reads, if it has changed by a tenth since the last call."""
        for writer in self._writers:
            writer.take_written()  # the scheduler sees in the stores themselves what has arrived
        reported, cost = self._reported_cost, self._cost()
        if not self._readers or (reported is not None and _alike(reported, cost)):
            return None
        self._reported_cost = cost
        return cost

    def take_counts(self) -> dict[str, float]:
        """Return the changes of all metrics since the last call, by their keys, gauges too."""
        now: dict[str, float] = {}
        for name, value in self._counted():
            now[name] = now.get(name, 0) + value
        changed = {name: value - self._reported.get(name, 0) for name, value in now.items()}
        self._reported |= now
        return {name: value for name, value in changed.items() if value}

    def close(self) -> None:
        """Write what waits, for a bounded time, and end."""
        for writer in self._writers:
            writer.close(_CLOSE_S)
        self.forget_space()
        for store in self._stores:
            store.close()

    def _cost(self) -> ReadCost:
        """Return the cost of the slowest store that answers: any of them may have the donor."""
        costs = []
        for reader in self._readers:
            short, long = reader.expected_s(0), reader.expected_s(_COST_TOKENS)
            if math.isfinite(long):
                costs.append(ReadCost(short, (long - short) / _COST_TOKENS))
        if not costs:
            return _NEVER
        worst = costs[0]
        for cost in costs[1:]:
            worst = worst.worst(cost)
        return worst

    def _counted(self) -> Iterator[tuple[str, float]]:
        parts = zip(self._stores, self._writers, self._readers, self._num_late, strict=False)
        for store, writer, reader, num_late in parts:
            yield f"store_reads/{store.name}/late", num_late
            yield f"{STORE_RESTING.name}/{store.name}", int(reader.is_failing)
            for direction, counters in (("read", reader.counters), ("write", writer.counters)):
                for what, count in asdict(counters).items():
                    yield _metric(direction, store.name, what), count


def _metric(direction: str, store: str, what: str) -> str:
    """Return the name and labels of a counter, as `Counts` takes them."""
    if what == "num_bytes":
        return f"store_{'read' if direction == 'read' else 'written'}_bytes/{store}"
    return f"store_{direction}s/{store}/{'hit' if what == 'hits' else what}"


def _alike(one: ReadCost, other: ReadCost) -> bool:
    pairs = ((one.per_span_s, other.per_span_s), (one.per_token_s, other.per_token_s))
    return all(math.isclose(mine, theirs, rel_tol=0.1, abs_tol=1e-6) for mine, theirs in pairs)
