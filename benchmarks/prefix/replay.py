"""Replay block traces through a prefix cache of limited capacity, and through Belady's optimum. No model, no KV."""

from __future__ import annotations

import time
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from kvgraft.prefix import RadixCache, RadixKey, make_eviction_policy
from kvgraft.prefix.eviction.policies import TLRU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.prefix.block_traces import BlockRequest, BlockTrace

    from kvgraft.prefix import EvictionPolicy

OPTIMUM = "optimum"
"""Name under which Belady's optimum is reported."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Share of a trace that a cache served.

    Attributes:
        trace: Name of the trace.
        policy: Eviction policy, or `optimum`.
        capacity: Tokens that the cache may hold; None for no limit.
        num_tokens: Tokens of all prompts.
        hit_tokens: Tokens that were in the cache when their prompt came.
        us_per_request: Mean microseconds for lookup, insert and eviction of one request.
    """

    trace: str
    policy: str
    capacity: int | None
    num_tokens: int
    hit_tokens: int
    us_per_request: float

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens served."""
        return self.hit_tokens / max(self.num_tokens, 1)


def replay(
    trace: BlockTrace, policy: str, capacity: int | None, *, policy_config: Mapping[str, int] | None = None
) -> ReplayResult:
    """Look up and store every prompt in order; after each, evict down to `capacity`, a block at a time.

    One block is one element of the cache. A partly filled last block counts as far as it is filled.
    """
    cache = RadixCache.create_simulated(
        policy=_in_blocks(make_eviction_policy(policy, policy_config), trace.block_size)
    )
    limit = None if capacity is None else capacity // trace.block_size
    hit_tokens = 0
    started = time.perf_counter()
    for request in trace.requests:
        key = RadixKey(request.block_ids, request.session)
        match = cache.match_prefix(key)
        hit_tokens += min(match.prefix_len * trace.block_size, request.num_tokens)
        cache.insert(key)
        if limit is not None and cache.total_size > limit:
            cache.evict(cache.total_size - limit, trim=True)
    seconds = time.perf_counter() - started
    us_per_request = seconds / max(len(trace.requests), 1) * 1e6
    return ReplayResult(trace.name, policy, capacity, trace.num_tokens, hit_tokens, us_per_request)


def _in_blocks(policy: EvictionPolicy, block_size: int) -> EvictionPolicy:
    """Convert the parameters of a policy that count tokens: here one element of the cache is a block."""
    if not isinstance(policy, TLRU):
        return policy
    return TLRU(max(policy.threshold // block_size, 1), -(-policy.next_prompt_estimate // block_size))


def replay_optimum(trace: BlockTrace, capacity: int | None) -> ReplayResult:
    """Belady's optimum: evict the block with the next use farthest ahead, of equal ones the deepest in its chain.

    Blocks before a block are used whenever it is, so they are never evicted before it: what stays is closed under
    prefixes, as a tree's contents are.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems J. 5(2), 1966.

    Complexity: O(blocks log blocks).
    """
    limit = float("inf") if capacity is None else capacity // trace.block_size
    next_uses = _next_uses(trace)
    held: dict[tuple[str | None, int], int] = {}
    heap: list[tuple[int, int, tuple[str | None, int]]] = []
    hit_tokens = 0
    started = time.perf_counter()
    for request, uses in zip(trace.requests, next_uses, strict=True):
        hit_tokens += min(_leading(request, held) * trace.block_size, request.num_tokens)
        for depth, (block, use) in enumerate(zip(request.block_ids.tolist(), uses, strict=True)):
            name = (request.session, block)
            held[name] = use
            heappush(heap, (-use, -depth, name))
        while len(held) > limit:
            use, _, name = heappop(heap)
            if held.get(name) == -use:
                del held[name]
    us_per_request = (time.perf_counter() - started) / max(len(trace.requests), 1) * 1e6
    return ReplayResult(trace.name, OPTIMUM, capacity, trace.num_tokens, hit_tokens, us_per_request)


def _leading(request: BlockRequest, held: Mapping[tuple[str | None, int], int]) -> int:
    """Blocks at the beginning of a request that are held."""
    count = 0
    for block in request.block_ids.tolist():
        if (request.session, block) not in held:
            break
        count += 1
    return count


def _next_uses(trace: BlockTrace) -> list[list[int]]:
    """For each block of each request the index of the next request that uses it; the number of requests for never."""
    last: dict[tuple[str | None, int], int] = {}
    never = len(trace.requests)
    uses: list[list[int]] = []
    for index in range(never - 1, -1, -1):
        request = trace.requests[index]
        names = [(request.session, block) for block in request.block_ids.tolist()]
        uses.append([last.get(name, never) for name in names])
        last.update(dict.fromkeys(names, index))
    return uses[::-1]
