"""Two tiers: what is copied when, what comes back, and that no slot of either tier is lost when a transfer fails."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.events import EventLog
from kvgraft.prefix import HierarchicalRadixCache, RadixKey
from kvgraft.testing.slots import CheckedSlots

HOST = 10_000


class Owner:
    """Both pools; each slot carries a value, so that a wrong copy is noticed. Transfers fail where `fail` says so."""

    def __init__(self, device_size=64, host_size=64, **options):
        self.device, self.host = CheckedSlots(device_size), CheckedSlots(host_size, first=HOST)
        self.values = {}
        self.fail = lambda: False
        self.num_backups = 0
        self.cache = HierarchicalRadixCache(transfer=self, **options)

    def backup(self, kv_indices):
        self.num_backups += 1
        return self._copy(kv_indices, self.host)

    def load(self, host_indices):
        return self._copy(host_indices, self.device)

    def free_host(self, host_indices):
        self.host.free(host_indices)

    def _copy(self, source, pool):
        if self.fail():
            raise OSError("the link is down")
        slots = pool.alloc(len(source))
        if slots is not None:
            self.values.update(zip(slots.tolist(), [self.values[slot] for slot in source.tolist()], strict=True))
        return slots

    def put(self, *token_ids, **options):
        """Compute all of a prompt and store it."""
        slots = self.device.alloc(len(token_ids))
        self.values.update(zip(slots.tolist(), prefix_values(token_ids), strict=True))
        result = self.cache.insert(RadixKey(token_ids), slots, **options)
        self.device.free(np.concatenate([slots[: result.prefix_len], slots[result.total_len :]]))
        self.check()
        return result

    def match(self, *token_ids):
        match = self.cache.match_prefix(RadixKey(token_ids))
        assert [self.values[slot] for slot in match.kv_indices.tolist()] == prefix_values(token_ids)[: match.prefix_len]
        self.check()
        return match

    def load_back(self, match):
        result = self.cache.load_back(match)
        self.device.free(result.freed)
        self.check()
        return result

    def evict(self, num_tokens):
        freed = self.cache.evict(num_tokens).freed
        self.device.free(freed)
        self.check()
        return len(freed)

    def check(self):
        self.cache.check()
        assert self.device.available + self.cache.total_size == self.device.size
        assert self.host.available + self.cache.host_size == self.host.size


def prefix_values(token_ids):
    """A value per position that depends on all tokens up to it, as KV does."""
    return [hash(tuple(token_ids[: end + 1])) for end in range(len(token_ids))]


def lengths(match):
    return match.prefix_len, match.host_hit_len


def test_write_through_copies_at_once_and_eviction_leaves_the_copy():
    owner = Owner()
    owner.put(1, 2, 3, 4)
    assert owner.cache.host_size == 4
    assert owner.evict(4) == 4
    match = owner.match(1, 2, 3, 4, 5)
    assert lengths(match) == (0, 4)
    result = owner.load_back(match)
    assert result.prefix_len == 4
    assert lengths(owner.match(1, 2, 3, 4)) == (4, 0)
    assert owner.num_backups == 1


def test_write_back_copies_when_the_device_is_left():
    owner = Owner(write_policy="write_back")
    owner.put(1, 2, 3, 4)
    assert owner.cache.host_size == 0
    owner.evict(4)
    assert lengths(owner.match(1, 2, 3, 4)) == (0, 4)


def test_selective_write_through_waits_for_a_second_use():
    owner = Owner(write_policy="write_through_selective")
    owner.put(1, 2, 3)
    assert owner.cache.host_size == 0
    owner.put(1, 2, 3)
    assert owner.cache.host_size == 3


def test_a_match_is_a_device_part_and_a_host_part():
    owner = Owner()
    owner.put(1, 2)
    owner.put(1, 2, 3, 4)
    owner.evict(1)
    match = owner.match(1, 2, 3, 9)
    assert lengths(match) == (2, 1)
    lock = owner.cache.inc_lock_ref(match.handle)
    assert owner.cache.protected_size == 2
    owner.cache.dec_lock_ref(lock)
    with pytest.raises(CorruptCacheError, match="load it back first"):
        owner.cache.inc_lock_ref(match.host_handle)
    with pytest.raises(CorruptCacheError, match="load it back first"):
        owner.cache.insert(RadixKey([1, 2, 3]), np.arange(3), after=match.host_handle)


def test_an_insert_over_the_host_part_takes_device_slots():
    owner = Owner()
    owner.put(1, 2)
    owner.put(1, 2, 3, 4)
    owner.evict(1)
    result = owner.put(1, 2, 3, 4, 5)
    assert (result.prefix_len, result.total_len) == (2, 5)
    assert lengths(owner.match(1, 2, 3, 4, 5)) == (5, 0)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_full_host_drops_its_least_recent_and_then_forgets(write_policy):
    owner = Owner(host_size=4, write_policy=write_policy)
    for first in (10, 20, 30):
        owner.put(first, first, first)
        owner.evict(3)
    assert owner.cache.host_size == 3
    assert lengths(owner.match(30, 30, 30)) == (0, 3)
    assert lengths(owner.match(10, 10, 10)) == (0, 0)


def test_what_vanishes_takes_its_host_children_with_it():
    owner = Owner(host_size=2, write_policy="write_back")
    owner.put(1, 2, 3)
    owner.put(1, 2, 3, 4, 5)
    owner.evict(1)
    assert (owner.cache.host_size, owner.cache.total_size) == (2, 3)
    owner.evict(1)  # three tokens never fit into two host slots
    assert (owner.cache.host_size, owner.cache.total_size) == (0, 0)
    assert owner.host.available == 2


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_failed_backup_loses_no_slot(write_policy, caplog):
    owner = Owner(write_policy=write_policy)
    owner.fail = lambda: True
    owner.put(1, 2, 3)
    owner.evict(3)
    assert owner.cache.total_size == owner.cache.host_size == 0
    assert owner.cache.num_failed_transfers >= 1
    assert "the link is down" in caplog.text


def test_a_failed_load_back_leaves_the_host_part(caplog):
    owner = Owner()
    owner.put(1, 2, 3)
    owner.evict(3)
    owner.fail = lambda: True
    result = owner.load_back(owner.match(1, 2, 3))
    assert result.prefix_len == 0
    owner.fail = lambda: False
    assert owner.load_back(owner.match(1, 2, 3)).prefix_len == 3
    assert "they are computed instead" in caplog.text


def test_no_room_on_the_device_leaves_the_host_part():
    owner = Owner(device_size=3)
    owner.put(1, 2, 3)
    owner.evict(3)
    taken = owner.device.alloc(2)
    result = owner.cache.load_back(owner.cache.match_prefix(RadixKey([1, 2, 3])))
    assert result.prefix_len == 0
    owner.device.free(taken)
    owner.check()


def begin(owner, *token_ids):
    return owner.cache.begin_load_back(owner.match(*token_ids))


def test_an_aborted_load_back_unpins_everything():
    owner = Owner(host_size=3)
    owner.put(1, 2, 3)
    owner.evict(3)
    ticket = begin(owner, 1, 2, 3)
    owner.put(7, 8, 9)  # the host is full of what is being read: no copy
    assert owner.cache.host_size == 3
    owner.cache.abort_load_back(ticket)
    owner.check()
    assert lengths(owner.match(1, 2, 3)) == (0, 3)
    with pytest.raises(CorruptCacheError, match="before"):
        owner.cache.abort_load_back(ticket)


def test_splits_and_other_inserts_during_a_load_back():
    owner = Owner()
    owner.put(1, 2, 3, 4)
    owner.evict(4)
    ticket = begin(owner, 1, 2, 3, 4)
    owner.match(1, 2, 9)  # splits
    owner.put(1, 2)  # brings the upper half to the device
    slots = owner.load(ticket.host_indices)
    result = owner.cache.commit_load_back(ticket, slots)
    assert result.freed.tolist() == slots[:2].tolist()
    owner.device.free(result.freed)
    owner.check()
    assert lengths(owner.match(1, 2, 3, 4)) == (4, 0)


def test_a_wrong_number_of_slots_is_refused_and_the_load_back_stays_open():
    owner = Owner()
    owner.put(1, 2, 3)
    owner.evict(3)
    ticket = begin(owner, 1, 2, 3)
    with pytest.raises(ConfigError, match="2 device slots for 3 host slots"):
        owner.cache.commit_load_back(ticket, np.arange(2))
    owner.cache.abort_load_back(ticket)
    owner.check()


def test_a_reset_during_a_load_back():
    owner = Owner()
    owner.put(1, 2, 3)
    owner.evict(3)
    ticket, other = begin(owner, 1, 2, 3), begin(owner, 1, 2, 3)
    owner.device.free(owner.cache.reset())
    owner.check()
    with pytest.raises(CorruptCacheError, match="match again"):
        owner.cache.commit_load_back(ticket, np.arange(3))
    owner.cache.abort_load_back(other)
    owner.check()


def test_a_stale_match_cannot_be_loaded_back():
    owner = Owner(host_size=3)
    owner.put(1, 2, 3)
    owner.evict(3)
    match = owner.match(1, 2, 3)
    owner.put(4, 5, 6)
    with pytest.raises(CorruptCacheError, match="match again"):
        owner.cache.begin_load_back(match)


def test_events_name_the_medium():
    log = EventLog()
    owner = Owner(events=log)
    owner.put(1, 2)
    owner.evict(2)
    owner.load_back(owner.match(1, 2))
    names = [(type(event).__name__, event.medium) for event in log.take()]
    assert names == [
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU_PINNED"),
        ("BlockRemoved", "GPU"),
        ("BlockStored", "GPU"),
    ]


def test_unknown_write_policy_is_told_what_there_is():
    with pytest.raises(ConfigError, match="there are write_back, write_through, write_through_selective"):
        Owner(write_policy="write_never")


class RandomUse:
    """Random calls on an owner, with load-backs that stay open over other calls."""

    def __init__(self, rng, owner, page_size):
        self.rng, self.owner, self.page_size = rng, owner, page_size
        self.locks, self.tickets = [], []

    def tokens(self):
        return np.repeat(self.rng.integers(0, 3, int(self.rng.integers(1, 12))), self.page_size)[:30].tolist()

    def put(self):
        if self.owner.device.available < 60:
            self.owner.evict(60)
        token_ids = self.tokens()
        if self.owner.device.available >= len(token_ids):
            self.owner.put(*token_ids)

    def evict(self):
        self.owner.evict(int(self.rng.integers(20)))

    def load_back(self):
        self.owner.load_back(self.owner.match(*self.tokens()))

    def lock(self):
        if len(self.locks) < 3:
            self.locks.append(self.owner.cache.inc_lock_ref(self.owner.match(*self.tokens()).handle))

    def unlock(self):
        if self.locks:
            self.owner.cache.dec_lock_ref(self.locks.pop())

    def begin(self):
        if len(self.tickets) < 2:
            self.tickets.append(begin(self.owner, *self.tokens()))

    def end(self):
        if not self.tickets:
            return
        owner, ticket = self.owner, self.tickets.pop(0)
        slots = None if self.rng.integers(2) else owner.device.alloc(len(ticket.host_indices))
        if slots is None:
            owner.cache.abort_load_back(ticket)
            return
        source = [owner.values[slot] for slot in ticket.host_indices.tolist()]
        owner.values.update(zip(slots.tolist(), source, strict=True))
        owner.device.free(owner.cache.commit_load_back(ticket, slots).freed)

    def close(self):
        while self.locks:
            self.unlock()
        while self.tickets:
            self.end()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("failure_rate", [0, 0.3])
def test_random_operations_lose_no_slot_and_mix_no_values(write_policy, page_size, failure_rate, caplog):
    caplog.set_level("CRITICAL")
    rng = np.random.default_rng(page_size)
    owner = Owner(200, 100, write_policy=write_policy, page_size=page_size)
    owner.fail = lambda: rng.random() < failure_rate
    use = RandomUse(rng, owner, page_size)
    calls = (use.put, use.put, use.put, use.evict, use.load_back, use.lock, use.unlock, use.begin, use.end)
    for _ in range(700):
        calls[int(rng.integers(len(calls)))]()
        owner.check()
    use.close()
    owner.check()
    owner.device.free(owner.cache.reset())
    owner.check()
    assert owner.host.available == 100
