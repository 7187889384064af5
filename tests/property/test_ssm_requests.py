"""Requests of a hybrid model on caches with states, with memory that remembers what was written: nothing else is ever read.

A slot of tokens holds the tokens up to its own, a slot of states the tokens that the state has read. Requests begin from
matches, compute, record where a policy says, are stored, aborted and finished in any order, while tokens and states are
evicted under them; in two tiers what was evicted is loaded back, which makes room by evicting.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvgraft.prefix import (
    BranchingPoints,
    EndOfPrompt,
    EveryTokens,
    HierarchicalStateCache,
    RadixKey,
    RecordingPrompt,
    RequestRow,
    StateRadixCache,
)
from kvgraft.testing.slots import CheckedSlots

POLICIES = (EndOfPrompt(), BranchingPoints(), EveryTokens(5), EveryTokens(3, max_states=2))


class Running:
    """A request with a working state of its own, which has read `row.committed_len` tokens."""

    def __init__(self, row, working, stops):
        self.row, self.working, self.stops = row, working, stops


class HybridEngine:
    """Attention layers read slots of tokens, state-space layers their working state; both are checked at every read."""

    def __init__(self, seed, page_size, chunk_size):
        self.rng = Random(seed)
        self.slots, self.states = CheckedSlots(300 * page_size), CheckedSlots(24)
        self.memory, self.state_memory = {}, {}
        self.cache = self.make_cache(page_size, chunk_size)
        self.running = []
        self.num_begun = self.num_hits = 0

    def make_cache(self, page_size, chunk_size):
        return StateRadixCache(page_size, state_chunk_size=chunk_size)

    def begin(self, tokens):
        row = RequestRow(str(self.num_begun), np.array(tokens), np.empty(0, np.int64), prompt_len=len(tokens))
        match = self.cache.match_prefix(row.key(len(tokens) - 1))
        row.adopt(match, self.cache.inc_lock_ref(match.handle))
        working = self.take_state()
        if match.state is not None:
            assert self.state_memory[match.state] == tokens[: match.prefix_len], "the state of other tokens was matched"
            self.num_hits += 1
        self.state_memory[working] = tokens[: match.prefix_len]
        if match.state is not None and self.rng.random() < 0.5:
            self.cache.dec_state_lock_only(row.handle)
        prompt = RecordingPrompt(
            prompt_len=len(tokens),
            prefix_len=match.prefix_len,
            branching_len=match.branching_len,
            alignment=self.cache.state_alignment,
        )
        self.running.append(Running(row, working, self.rng.choice(POLICIES).positions(prompt)))
        self.num_begun += 1

    def take_state(self):
        while not self.states.available:
            if not self.cache.state_evictable_size:  # all pinned: the last one that began gives way
                self.end(self.running.pop(), is_insert=False)
                continue
            self.take_back(self.cache.evict(0, 1))
        return int(self.states.alloc(1)[0])

    def compute(self, request):
        """Go on to where the next state is recorded, or to the end of the prompt."""
        row = request.row
        if row.committed_len == len(row.token_ids):
            return
        stop = request.stops.pop(0) if request.stops else len(row.token_ids)
        short = stop - row.committed_len - self.slots.available
        if short > 0:
            self.take_back(self.cache.evict(short))
        tokens = tuple(row.token_ids.tolist())
        row.grow(self.slots.alloc(stop - row.committed_len))
        for position in range(stop):
            slot = int(row.kv_indices[position])
            if position >= len(self.state_memory[request.working]):
                self.memory[slot] = tokens[: position + 1]
            assert self.memory[slot] == tokens[: position + 1], "K/V of other tokens were read"
        self.state_memory[request.working] = tokens[:stop]
        if self.rng.random() < 0.9 and (self.states.available or self.cache.state_evictable_size):
            snapshot = self.take_state()
            self.state_memory[snapshot] = tokens[:stop]
            row.record_state(stop, snapshot)

    def store(self, request):
        self.take_back(self.cache.cache_unfinished_req(request.row))
        if request.row.handle.state_locked and self.rng.random() < 0.5:
            self.cache.dec_state_lock_only(request.row.handle)

    def end(self, request, *, is_insert):
        row = request.row
        donate = is_insert and row.committed_len > row.protected_len and row.committed_len not in row.states
        if donate:
            row.record_state(row.committed_len, request.working)
        self.take_back(self.cache.cache_finished_req(row, is_insert=is_insert))
        if not donate:
            self.states.free(np.array([request.working]))

    def take_back(self, result):
        self.slots.free(result.freed)
        self.states.free(result.state_freed)
        for slot in result.freed.tolist():
            self.memory[slot] = None
        for slot in result.state_freed.tolist():
            self.state_memory[slot] = None

    def check(self):
        self.cache.check()
        rows = [request.row for request in self.running]
        own = sum(row.committed_len - row.protected_len for row in rows)
        assert self.slots.available + self.cache.total_size + own == self.slots.size
        own_states = sum(1 + len(row.states) for row in rows)
        assert self.states.available + self.cache.state_total_size + own_states == self.states.size

    def step(self):
        action, request = self.rng.random(), self.rng.choice(self.running) if self.running else None
        if action < 0.25 and len(self.running) < 6:
            pages = self.rng.randrange(1, 14)
            tokens = [self.rng.choice((1,) * 9 + (2,)) for _ in range(pages) for _ in range(self.cache.page_size)]
            self.begin((*tokens, 9))
        elif action < 0.55 and request is not None:
            self.compute(request)
        elif action < 0.75 and request is not None:
            self.store(request)
        elif action < 0.92 and request is not None:
            self.running.remove(request)
            self.end(request, is_insert=self.rng.random() < 0.8)
        else:
            self.take_back(self.cache.evict(self.rng.randrange(8), self.rng.randrange(3)))


class Copies:
    """Transfers of one kind of slots; a load evicts to make room, as an engine's does."""

    def __init__(self, slots, memory, host, make_room):
        self.slots, self.memory, self.host, self.make_room = slots, memory, host, make_room
        self.host_memory = {}

    def backup(self, device_slots):
        return self.moved(device_slots, self.memory, self.host.alloc(len(device_slots)), self.host_memory)

    def load(self, host_slots):
        if len(host_slots) > self.slots.available:
            self.make_room(len(host_slots) - self.slots.available)
        return self.moved(host_slots, self.host_memory, self.slots.alloc(len(host_slots)), self.memory)

    def moved(self, source, memory, target, other):
        if target is not None:
            other.update(zip(target.tolist(), [memory[slot] for slot in source.tolist()], strict=True))
        return target

    def free_host(self, host_slots):
        self.host.free(host_slots)


class TieredEngine(HybridEngine):
    """The same in two tiers."""

    def make_cache(self, page_size, chunk_size):
        self.slots, self.num_loaded = CheckedSlots(100 * page_size), 0
        evict = lambda *sizes: self.take_back(self.cache.evict(*sizes))  # noqa: E731
        self.tokens = Copies(self.slots, self.memory, CheckedSlots(40 * page_size), evict)
        self.recorded = Copies(self.states, self.state_memory, CheckedSlots(9), lambda missing: evict(0, missing))
        return HierarchicalStateCache(
            page_size,
            transfer=self.tokens,
            state_transfer=self.recorded,
            write_policy="write_back",
            state_chunk_size=chunk_size,
        )

    def begin(self, tokens):
        match = self.cache.match_prefix(RadixKey(tokens[:-1]))
        if match.host_hit_len:
            loaded = self.cache.load_back(match)
            self.take_back(loaded)
            self.num_loaded += loaded.prefix_len - match.prefix_len
        super().begin(tokens)

    def step(self):
        if self.rng.random() < 0.1:
            self.take_back(self.cache.evict(self.rng.randrange(60), self.rng.randrange(20)))
        super().step()

    def check(self):
        super().check()
        assert self.tokens.host.available + self.cache.host_size == self.tokens.host.size
        assert self.recorded.host.available + self.cache.host_state_size == self.recorded.host.size


@pytest.mark.parametrize("kind", [HybridEngine, TieredEngine])
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_requests_read_nothing_but_what_was_computed_for_their_tokens(page_size, chunk_size, kind):
    engine = kind(page_size * 10 + chunk_size, page_size, chunk_size)
    for _ in range(600):
        engine.step()
        engine.check()
    assert engine.num_hits > 5
    assert kind is HybridEngine or engine.num_loaded > 5 * page_size
    while engine.running:
        engine.end(engine.running.pop(), is_insert=False)
    engine.take_back(engine.cache.reset_both())
    assert (engine.slots.available, engine.states.available) == (engine.slots.size, engine.states.size)
    assert engine.cache.match_prefix(RadixKey([1, 1, 1, 1])).prefix_len == 0
