"""Blocks of vLLM's pool that hold no K/V yet although its prefix cache offers them.

vLLM publishes a block when it schedules the pass that fills it, so a request may hit blocks that another one computes in
the same step, or that a running prefill reaches with the chunk of this step. That is sound for vLLM's own pass, which
computes all of them layer by layer, and not for a graft, whose pass runs first. Two kinds of blocks are followed here:

- *scheduled*: a forward pass of the step that is being scheduled computes them;
- *owed*: a graft under way computes them, or another connector loads them. If that fails, they are garbage under a public
  hash. Those of a graft are evicted then; vLLM has a failed load computed step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.scheduler.scheduled import num_known

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgraft.integrations.vllm.messages import BlockIds

    Ids = set[tuple[int, int]]  # KV cache group, block


class HitState(Enum):
    """State of the blocks that a request hits: the worst of them."""

    COMPUTED = "computed"
    SCHEDULED = "scheduled"
    OWED = "owed"


@dataclass(slots=True, eq=False)
class _Holder:
    """A request that has blocks.

    Attributes:
        request: vLLM's.
        start: First position that it did not find in vLLM's prefix cache.
        step: Step of its admission.
        loads: Another connector loads K/V for it in that step, and vLLM computes those that do not come.
        computed: Positions that are computed when the last step in which it was scheduled is through.
    """

    request: Request
    start: int
    step: int
    loads: bool
    computed: int


class PendingBlocks:
    """Follows blocks from their allocation to the pass that fills them. Not thread-safe.

    A worker takes steps in the order in which they are scheduled: a later one finds what an earlier one computes.
    """

    def __init__(self, block_sizes: Sequence[int], hash_block_size: int, *, steps_under_way: int) -> None:
        """Begin with an empty pool, of which nothing is known before `bind`.

        Args:
            block_sizes: Tokens of a block, per KV cache group.
            hash_block_size: Tokens of an entry of `Request.block_hashes`.
            steps_under_way: Steps that are scheduled at most before the result of the first is known.
        """
        self._manager: KVCacheManager | None = None
        self._block_sizes = block_sizes
        self._ratios = [size // hash_block_size for size in block_sizes]
        self._steps_under_way = steps_under_way
        self._step = 0
        self._holders: dict[str, _Holder] = {}
        self._owed: dict[str, Ids] = {}
        self._scheduled: Ids | None = None
        self._loaded: Ids = set()

    @property
    def is_bound(self) -> bool:
        """Whether vLLM has shown its manager."""
        return self._manager is not None

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's manager, to read its books of requests and hits."""
        self._manager = manager

    def hit_len(self, request: Request) -> int:
        """Return how many tokens vLLM finds for a request by the hashes that it has now. Complexity: O(blocks found)."""
        return 0 if self._manager is None else int(self._manager.get_computed_blocks(request)[1])

    def hit_of(self, request: Request, unrepaired: Iterable[tuple[str, int]] = ()) -> HitState:
        """Return the state of the blocks that vLLM finds for a request, which it is about to admit.

        Args:
            request: Has hashes.
            unrepaired: Requests, and the positions from which on their K/V are still to be repaired: they are owed.

        Complexity: O(blocks found), and once per step O(requests that hold blocks).
        """
        if self._manager is None:
            return HitState.COMPUTED  # nothing is grafted
        blocks = self._manager.get_computed_blocks(request)[0].blocks
        found = {(group, block.block_id) for group, hit in enumerate(blocks) for block in hit if not block.is_null}
        if any(not found.isdisjoint(owed) for owed in self._owed.values()):
            return HitState.OWED
        if any(not found.isdisjoint(self._blocks_from(*place)) for place in unrepaired):
            return HitState.OWED
        if self._scheduled is None:  # vLLM admits requests after it has scheduled all that run
            scheduled: Ids = set()
            self._loaded = set()
            for holder in self._holders.values():
                self._note(holder, scheduled)
            self._scheduled = scheduled  # only once all are noted: what is missing in it counts as computed
        if not found.isdisjoint(self._loaded):
            return HitState.OWED
        return HitState.COMPUTED if found.isdisjoint(self._scheduled) else HitState.SCHEDULED

    def admit(self, request: Request, start: int, *, loads: bool) -> None:
        """Note that vLLM gave a request blocks in the step that is being scheduled.

        Args:
            request: Has them.
            start: Positions before it were found in vLLM's prefix cache, or were loaded in earlier steps.
            loads: Another connector loads some of the others in this step.
        """
        holder = _Holder(request, start, self._step, loads, start)
        self._holders[request.request_id] = holder
        if self._scheduled is not None:
            self._note(holder, self._scheduled)

    def owe(self, request_id: str, block_ids: BlockIds, start: int, stop: int) -> None:
        """Note that a graft makes the positions `[start, stop)` of a request, which others may find from then on."""
        self._owed[request_id] = {
            (group, block)
            for group, (ids, size) in enumerate(zip(block_ids, self._block_sizes, strict=True))
            for block in ids[start // size : -(-stop // size)]
        }

    def settle(self, request_id: str, *, failed: bool) -> None:
        """Take the outcome of a graft: its blocks hold what they should, or are not found any more."""
        owed = self._owed.get(request_id)
        if failed and owed and self._manager is not None:
            self._manager.evict_blocks({block for _, block in owed})
        self._owed.pop(request_id, None)  # not before: where that fails, no request may have the blocks

    def end(self, request_id: str) -> None:
        """Forget a request that gives its blocks back; those of a load that is not through go. A graft still owes its own."""
        holder = self._holders.get(request_id)
        if holder is not None and holder.loads and self._manager is not None:
            self._manager.evict_blocks({block for _, block in self._uncomputed(holder)})
        self._holders.pop(request_id, None)

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """Note what the step computes that vLLM has just scheduled; the next admission belongs to another step.

        Where that fails, it may be called once more for the same step.
        """
        self._scheduled = None
        for request_id in output.preempted_req_ids or ():
            holder = self._holders.get(request_id)
            if holder is not None and holder.step != self._step:
                self._evict_uncomputed(holder)
                del self._holders[request_id]
        for request_id, computed in _computed_lens(output):
            holder = self._holders.get(request_id)
            if holder is not None:
                holder.computed = computed + num_known(output, request_id)
        self._step += 1

    def _note(self, holder: _Holder, scheduled: Ids) -> None:
        (self._loaded if holder.loads else scheduled).update(self._uncomputed(holder))

    def _uncomputed(self, holder: _Holder) -> Iterator[tuple[int, int]]:
        """Yield the blocks of a request that hold positions which no earlier step has computed."""
        age = self._step - holder.step
        is_loading = holder.loads and age < self._steps_under_way  # whether the load failed is not known before
        start = holder.start if age == 0 or is_loading else holder.request.num_computed_tokens
        yield from self._blocks_from(holder.request.request_id, start)

    def _blocks_from(self, request_id: str, start: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks that a request has from position `start` on."""
        if self._manager is None:
            return
        held = self._manager.get_blocks(request_id).blocks
        for group, (blocks, size) in enumerate(zip(held, self._block_sizes, strict=True)):
            for block in blocks[start // size :]:
                yield group, block.block_id

    def _evict_uncomputed(self, holder: _Holder) -> None:
        """Evict the blocks that a request was to compute in the step that preempted it.

        With priorities vLLM may preempt a request that it has scheduled in the same step: its new blocks go back with their
        hashes, and nothing ever computes them. So do those of a load that has failed. Equal blocks of others go too; they
        look the same.
        """
        self.forget_hashes(holder.request.block_hashes, holder.start if holder.loads else holder.computed)

    def forget_hashes(self, hashes: Sequence[bytes], first: int) -> None:
        """Evict blocks from vLLM's prefix cache that lie under the hashes of a request from position `first` on."""
        if self._manager is None:
            return
        pool: Any = self._manager.block_pool
        for group, (size, ratio) in enumerate(zip(self._block_sizes, self._ratios, strict=True)):
            for index in range(first // size, len(hashes) // ratio):
                while found := pool.get_cached_block(hashes[(index + 1) * ratio - 1], [group]):
                    pool.evict_blocks({found[0].block_id})


def _computed_lens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Yield the requests that a step schedules, with the positions that are computed when it begins."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
