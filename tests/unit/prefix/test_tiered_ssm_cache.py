"""HierarchicalStateCache by example: what lives on where, what comes back, and that a transfer that fails loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.events import EventLog
from kvgraft.prefix import HierarchicalStateCache, RadixKey, RequestRow, StreamingSession
from kvgraft.testing.slots import CheckedSlots


class Copies:
    """Transfers between two pools of numbers; refuse or fail where they are told to."""

    def __init__(self, device, host):
        self.device, self.host = device, host
        self.error = None

    def backup(self, device_slots):
        return self._moved(device_slots, self.host)

    def load(self, host_slots):
        return self._moved(host_slots, self.device)

    def free_host(self, host_slots):
        self.host.free(host_slots)

    def _moved(self, source, target):
        if self.error is not None:
            raise self.error
        return target.alloc(len(source))


class Owner:
    """The cache with its four pools, which are balanced after every call."""

    def __init__(self, *, slots=64, states=16, host=64, host_states=16, write_policy="write_back", **options):
        self.slots, self.states = CheckedSlots(slots), CheckedSlots(states, first=1_000)
        self.tokens = Copies(self.slots, CheckedSlots(host, first=2_000))
        self.recorded = Copies(self.states, CheckedSlots(host_states, first=3_000))
        self.cache = HierarchicalStateCache(
            transfer=self.tokens, state_transfer=self.recorded, write_policy=write_policy, **options
        )

    def put(self, *token_ids, at=None, **options):
        """Store with states at these positions, at the end unless they are given."""
        positions = [len(token_ids)] if at is None else at
        slots, states = self.slots.alloc(len(token_ids)), self.states.alloc(len(positions))
        offered = dict(zip(positions, states.tolist(), strict=True))
        result = self.cache.insert(RadixKey(token_ids), slots, states=offered, **options)
        self.slots.free(np.concatenate([slots[: result.prefix_len], slots[result.total_len :]]))
        self.states.free(result.state_freed)
        self.check()
        return result

    def match(self, *token_ids):
        result = self.cache.match_prefix(RadixKey(token_ids))
        self.check()
        return result

    def lengths(self, *token_ids):
        match = self.match(*token_ids)
        assert self.cache.look(RadixKey(token_ids)) == (match.prefix_len, match.host_hit_len)
        return match.prefix_len, match.host_hit_len

    def evict(self, num_tokens, num_states=0):
        return self.take_back(self.cache.evict(num_tokens, num_states))

    def load_back(self, *token_ids):
        result = self.cache.load_back(self.match(*token_ids))
        self.slots.free(result.freed)
        self.states.free(result.state_freed)
        self.check()
        return result.prefix_len

    def take_back(self, result):
        self.slots.free(result.freed)
        self.states.free(result.state_freed)
        self.check()
        return len(result.freed), len(result.state_freed)

    def check(self):
        cache = self.cache
        cache.check()
        assert self.slots.available + cache.total_size == self.slots.size
        assert self.states.available + cache.state_total_size == self.states.size
        assert self.tokens.host.available + cache.host_size == self.tokens.host.size
        assert self.recorded.host.available + cache.host_state_size == self.recorded.host.size


def test_a_leaf_leaves_with_its_state_and_comes_back_with_it():
    owner = Owner()
    owner.put(1, 2, 3, 4)
    assert owner.evict(1) == (4, 1)
    assert (owner.cache.host_size, owner.cache.host_state_size) == (4, 1)
    assert owner.lengths(1, 2, 3, 4, 5) == (0, 4)
    assert owner.load_back(1, 2, 3, 4, 5) == 4
    match = owner.match(1, 2, 3, 4, 5)
    assert (match.prefix_len, match.host_hit_len, len(match.kv_indices)) == (4, 0, 4)
    assert match.state is not None


def test_a_state_inside_the_tree_leaves_alone_and_comes_back_alone():
    owner = Owner()
    owner.put(1, 2)
    owner.put(1, 2, 3, 4)
    assert owner.evict(0, 1) == (0, 1)
    assert (owner.cache.host_size, owner.cache.host_state_size) == (0, 1)
    match = owner.match(1, 2, 9)
    assert (match.prefix_len, match.state, match.host_hit_len) == (0, None, 2)
    assert owner.load_back(1, 2, 9) == 2
    assert owner.lengths(1, 2, 9) == (2, 0)
    assert owner.cache.total_size == 4


def test_a_match_goes_on_from_the_device_to_the_deepest_state_of_either_tier():
    owner = Owner()
    owner.put(1, 2, 3, 4, 5, 6, at=[2, 4, 6])
    owner.evict(1)
    assert owner.lengths(1, 2, 3, 4, 5, 6) == (4, 2)
    assert owner.lengths(1, 2, 3, 4, 5, 9) == (4, 0)
    assert owner.match(1, 2, 3, 4, 5, 9).branching_len == 5


def test_tombstones_on_the_device_are_not_loaded_again():
    """The tokens up to a state that is on the host may lie on the device: only the others are asked for."""
    owner = Owner()
    owner.put(1, 2, 3, 4, at=[2, 4])
    owner.put(1, 2, 7, 8)
    owner.match(1, 2, 7, 8)
    owner.evict(1)  # the leaf 3, 4
    owner.evict(0, 1)  # the state of 1, 2
    match = owner.match(1, 2, 3, 4)
    assert (match.prefix_len, match.host_hit_len) == (0, 4)
    ticket = owner.cache.begin_load_back(match)
    assert (ticket.start, len(ticket.host_indices), len(ticket.host_states)) == (2, 2, 1)
    owner.take_back(owner.cache.abort_load_back(ticket))


def test_what_only_a_load_back_kept_on_the_device_leaves_when_it_is_given_up():
    owner = Owner()
    owner.put(1, 2, 3, 4, at=[4])
    owner.put(1, 2, 7, 8)
    owner.evict(1)  # 3, 4: 1, 2 has no state and stays for 7, 8
    ticket = owner.cache.begin_load_back(owner.match(1, 2, 3, 4))
    assert owner.evict(99) == (2, 1)  # 7, 8 alone: 1, 2 is held
    assert owner.take_back(owner.cache.abort_load_back(ticket)) == (2, 0)
    assert owner.lengths(1, 2, 3, 4) == (0, 4)
    with pytest.raises(CorruptCacheError, match="before"):
        owner.cache.abort_load_back(ticket)


def test_an_insert_over_the_host_part_takes_its_slots_and_state():
    owner = Owner()
    owner.put(1, 2)
    owner.put(1, 2, 3, 4)
    owner.evict(4)
    result = owner.put(1, 2, 3, 4, 5, at=[4, 5])
    assert (result.prefix_len, result.total_len) == (0, 5)
    assert owner.lengths(1, 2, 3, 4, 5) == (5, 0)
    assert owner.cache.host_state_size == 2


@pytest.mark.parametrize(("write_policy", "after"), [("write_through", (1, 1)), ("write_through_selective", (0, 2))])
def test_copies_are_made_after_so_many_uses(write_policy, after):
    owner = Owner(write_policy=write_policy)
    sizes = []
    for _ in range(2):
        owner.put(1, 2, 3)
        sizes.append((owner.cache.host_size, owner.cache.host_state_size))
    assert sizes == ([(3, 1), (3, 1)] if after == (1, 1) else [(0, 0), (3, 1)])


def test_a_state_without_room_on_the_host_takes_the_place_of_the_least_valuable():
    owner = Owner(host_states=1)
    owner.put(1, 2)
    owner.put(5, 6, 7)
    owner.evict(1)
    assert owner.lengths(1, 2) == (0, 2)
    owner.evict(1)
    assert owner.lengths(1, 2) == (0, 0)
    assert owner.lengths(5, 6, 7) == (0, 3)
    assert (owner.cache.host_size, owner.cache.host_state_size) == (3, 1)


def test_tokens_without_a_state_after_them_leave_the_host():
    """Of a tombstone chain on the host, too, when the state that it led to has left."""
    owner = Owner(host_states=1)
    owner.put(1, 2, 3, 4, at=[4])
    owner.put(1, 2, 9)
    owner.evict(99)
    assert owner.cache.host_state_size == 1
    assert owner.cache.host_size == 3  # 1, 2 and 9: the younger one
    owner.put(5)
    owner.evict(99)
    assert (owner.cache.host_size, owner.cache.host_state_size) == (1, 1)


def test_a_leaf_that_the_host_has_no_state_for_is_forgotten():
    owner = Owner(host_states=1)
    owner.put(1, 2)
    owner.evict(1)
    ticket = owner.cache.begin_load_back(owner.match(1, 2))
    owner.put(5, 6)
    owner.evict(1)  # the only place is being read
    assert (owner.cache.host_size, owner.cache.host_state_size) == (2, 1)
    owner.take_back(owner.cache.abort_load_back(ticket))
    assert owner.lengths(1, 2) == (0, 2)
    assert owner.lengths(5, 6) == (0, 0)


def test_a_state_outlives_tokens_that_have_no_copy_only_on_the_device():
    owner = Owner(host=2)
    owner.put(1, 2, 3)
    owner.put(1, 2, 3, 4)
    owner.evict(0, 1)
    assert owner.lengths(1, 2, 3) == (0, 3)
    owner.evict(99)  # three tokens never fit
    assert (owner.cache.host_size, owner.cache.host_state_size) == (0, 0)


def test_tokens_that_drive_out_what_needed_them_do_not_stay():
    owner = Owner(host=2)
    owner.put(1, 2, 3, 4, at=[4])
    owner.put(1, 2, 9)
    owner.evict(99)  # 1, 2 without a state takes the place of 9, and is of no use then
    assert (owner.cache.host_size, owner.cache.host_state_size, owner.cache.total_size) == (0, 0, 0)


@pytest.mark.parametrize("tier", ["tokens", "recorded"])
def test_a_load_that_fails_brings_nothing(tier, caplog):
    owner = Owner()
    owner.put(1, 2)
    owner.put(1, 2, 3, 4)
    owner.evict(1)
    getattr(owner, tier).error = OSError("the link is down")
    assert owner.load_back(1, 2, 3, 4) == 2
    assert "the link is down" in caplog.text
    assert owner.cache.num_failed_transfers == 1
    getattr(owner, tier).error = None
    assert owner.load_back(1, 2, 3, 4) == 4


@pytest.mark.parametrize("tier", ["tokens", "recorded"])
def test_a_backup_that_fails_loses_no_slot(tier, caplog):
    owner = Owner()
    owner.put(1, 2)
    getattr(owner, tier).error = OSError("the link is down")
    assert owner.evict(1) == (2, 1)
    assert owner.lengths(1, 2) == (0, 0)
    assert owner.cache.num_failed_transfers == 1
    assert (owner.cache.host_size, owner.cache.host_state_size) == (0, 0)
    assert "the link is down" in caplog.text


@pytest.mark.parametrize(("slots", "states"), [(4, 0), (3, 1)])
def test_without_room_on_the_device_nothing_comes_back(slots, states):
    owner = Owner()
    owner.put(1, 2, 3, 4)
    owner.evict(1)
    taken = owner.slots.alloc(owner.slots.size - slots), owner.states.alloc(owner.states.size - states)
    result = owner.cache.load_back(owner.cache.match_prefix(RadixKey([1, 2, 3, 4])))
    assert result.prefix_len == 0
    owner.slots.free(taken[0])
    owner.states.free(taken[1])
    owner.states.free(result.state_freed)
    owner.check()


def test_the_device_part_is_held_while_the_rest_is_loaded():
    """If the load fails it is all there is, so its state must not make room for what is loaded."""
    owner = Owner()
    owner.put(1, 2)
    owner.put(1, 2, 3, 4)
    owner.evict(1)
    ticket = owner.cache.begin_load_back(owner.match(1, 2, 3, 4))
    assert owner.evict(99, 99) == (0, 0)
    owner.take_back(owner.cache.abort_load_back(ticket))
    assert owner.lengths(1, 2, 3, 4) == (2, 2)


def test_splits_inserts_and_a_state_of_another_request_during_a_load_back():
    owner = Owner()
    owner.put(1, 2, 3, 4)
    owner.evict(1)
    ticket = owner.cache.begin_load_back(owner.match(1, 2, 3, 4))
    owner.put(1, 2, 7)  # splits, and brings the upper half to the device
    owner.put(1, 2, 3, 4)  # the rest, and the state
    slots, states = owner.slots.alloc(4), owner.states.alloc(1)
    result = owner.cache.commit_load_back(ticket, slots, states)
    assert result.freed.tolist() == slots.tolist()
    assert result.state_freed.tolist() == states.tolist()
    owner.slots.free(result.freed)
    owner.states.free(result.state_freed)
    owner.check()


def test_one_slot_for_each_is_asked_for_and_the_load_back_stays_open():
    owner = Owner()
    owner.put(1, 2)
    owner.evict(1)
    ticket = owner.cache.begin_load_back(owner.match(1, 2))
    slots, states = owner.slots.alloc(2), owner.states.alloc(1)
    with pytest.raises(ConfigError, match="0 device slots for 1 host slots"):
        owner.cache.commit_load_back(ticket, slots)
    owner.cache.commit_load_back(ticket, slots, states)
    owner.check()


def test_what_lies_on_the_host_only_is_not_locked():
    owner = Owner()
    result = owner.put(1, 2)
    owner.evict(1)
    match = owner.match(1, 2)
    for handle in (match.host_handle, result.handle):
        with pytest.raises(CorruptCacheError, match="load it back first"):
            owner.cache.inc_lock_ref(handle)
    with pytest.raises(CorruptCacheError, match="load it back first"):
        owner.cache.insert(RadixKey([1, 2, 3]), np.arange(3), after=result.handle)


def test_a_stale_match_is_refused():
    owner = Owner(host_states=1)
    owner.put(1, 2)
    owner.evict(1)
    match = owner.match(1, 2)
    owner.put(5)
    owner.evict(1)
    with pytest.raises(CorruptCacheError, match="match again"):
        owner.cache.begin_load_back(match)


def test_a_reset_ends_load_backs_and_empties_both_tiers():
    owner = Owner()
    owner.put(1, 2)
    owner.evict(1)
    owner.put(5, 6)
    ticket, other = (owner.cache.begin_load_back(owner.match(1, 2)) for _ in range(2))
    owner.take_back(owner.cache.reset_both())
    assert (owner.cache.host_size, owner.cache.host_state_size) == (0, 0)
    with pytest.raises(CorruptCacheError, match="match again"):
        owner.cache.commit_load_back(ticket, np.arange(2), np.arange(1))
    assert not owner.cache.abort_load_back(other).num_tokens


def test_events_tell_of_tokens_in_both_tiers():
    log = EventLog()
    owner = Owner(events=log)
    owner.put(1, 2)
    owner.evict(1)
    owner.load_back(1, 2)
    names = [(type(event).__name__, event.medium) for event in log.take()]
    assert names == [
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU_PINNED"),
        ("BlockRemoved", "GPU"),
        ("BlockStored", "GPU"),
    ]


def test_a_request_goes_on_from_what_was_loaded_back():
    owner = Owner()
    owner.put(*range(8))
    owner.evict(1)
    owner.load_back(*range(9))
    row = RequestRow("r", np.arange(10), np.empty(0, np.int64), prompt_len=10)
    match = owner.cache.match_prefix(row.key(9))
    row.adopt(match, owner.cache.inc_lock_ref(match.handle))
    assert row.protected_len == 8
    row.grow(owner.slots.alloc(2))
    row.record_state(10, int(owner.states.alloc(1)[0]))
    owner.take_back(owner.cache.cache_finished_req(row))
    assert owner.lengths(*range(11)) == (10, 0)


def test_it_keeps_no_sessions_and_takes_no_provider():
    cache = Owner().cache
    with pytest.raises(ConfigError, match="StateRadixCache alone"):
        StreamingSession(cache)
    with pytest.raises(ConfigError, match="no semantic provider"):
        cache.set_semantic_provider(object())
