"""SlotAllocator against a dict from slot to references by owner; every step ends with a full accounting."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.memory import Owner, SlotAllocator, SlotUsage

NUM_SLOTS = 24

owners = st.sampled_from(Owner)


class SlotAllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(NUM_SLOTS)
        self.held: dict[int, Counter[Owner]] = {}

    # what the oracle knows

    def free(self) -> list[int]:
        return [slot for slot in range(NUM_SLOTS) if slot not in self.held]

    def runs(self) -> list[list[int]]:
        """Free slots as maximal runs."""
        runs: list[list[int]] = []
        for slot in self.free():
            if runs and runs[-1][-1] == slot - 1:
                runs[-1].append(slot)
            else:
                runs.append([slot])
        return runs

    def draw_slots(self, data, candidates):
        """Some of `candidates` in any order, without repetition."""
        slots = data.draw(st.lists(st.sampled_from(sorted(candidates)), unique=True) if candidates else st.just([]))
        return np.array(slots, dtype=np.int64)

    def held_by(self, owner) -> list[int]:
        return [slot for slot, references in self.held.items() if references[owner]]

    def drop(self, slots, owner) -> list[int]:
        """Give back references in the oracle; return the slots that become free, in order."""
        freed = []
        for slot in slots.tolist():
            self.held[slot][owner] -= 1
            if not self.held[slot].total():
                del self.held[slot]
                freed.append(slot)
        return freed

    # rules

    @rule(num_tokens=st.integers(0, 10), data=st.data())
    def allocate(self, num_tokens, data):
        after = data.draw(st.none() | st.integers(0, NUM_SLOTS))
        if num_tokens > len(self.free()):
            with pytest.raises(CapacityError):
                self.allocator.allocate(num_tokens, after=after)
            return
        runs = self.runs()
        slots = self.allocator.allocate(num_tokens, after=after).tolist()
        assert len(slots) == len(set(slots)) == num_tokens
        assert slots == [] or slots[0] in self.free()
        following = next((run for run in runs if after is not None and run[0] == after + 1), [])[:num_tokens]
        assert slots[: len(following)] == following, "does not continue behind `after`"
        self.assert_fits_tightly(slots[len(following) :], self.without(runs, following))
        assert set(slots) <= set(self.free())
        self.held.update((slot, Counter({Owner.REQUEST: 1})) for slot in slots)

    def without(self, runs, taken) -> list[list[int]]:
        left = ([slot for slot in run if slot not in taken] for run in runs)
        return [run for run in left if run]

    def assert_fits_tightly(self, slots, runs):
        """One run if any is long enough, the tightest and first such; else as few runs as can be."""
        assert slots == sorted(slots)
        lengths = sorted((len(run) for run in runs), reverse=True)
        if not slots:
            return
        if lengths[0] >= len(slots):
            tightest = min((run for run in runs if len(run) >= len(slots)), key=len)
            assert slots == tightest[: len(slots)]
            return
        used = sum(any(slot in run for slot in slots) for run in runs)
        fewest = next(count for count in range(1, len(lengths) + 1) if sum(lengths[:count]) >= len(slots))
        assert used == fewest

    @rule(owner=owners, data=st.data())
    def retain(self, owner, data):
        slots = self.draw_slots(data, self.held)
        self.allocator.retain(slots, owner)
        for slot in slots.tolist():
            self.held[slot][owner] += 1

    @rule(owner=owners, data=st.data())
    def release(self, owner, data):
        slots = self.draw_slots(data, self.held_by(owner))
        assert self.allocator.release(slots, owner).tolist() == self.drop(slots, owner)

    @rule(giver=owners, taker=owners, data=st.data())
    def transfer(self, giver, taker, data):
        slots = self.draw_slots(data, self.held_by(giver))
        self.allocator.transfer(slots, giver, taker)
        for slot in slots.tolist():
            self.held[slot][giver] -= 1
            self.held[slot][taker] += 1

    @precondition(lambda self: self.free())
    @rule(owner=owners, data=st.data())
    def retain_a_free_slot(self, owner, data):
        slots = np.append(self.draw_slots(data, self.held), data.draw(st.sampled_from(self.free())))
        with pytest.raises(CorruptCacheError):
            self.allocator.retain(slots, owner)

    @rule(owner=owners, data=st.data())
    def give_up_what_is_not_held(self, owner, data):
        foreign = sorted(set(range(NUM_SLOTS)) - set(self.held_by(owner)))
        if not foreign:
            return
        slots = np.append(self.draw_slots(data, self.held_by(owner)), data.draw(st.sampled_from(foreign)))
        with pytest.raises(CorruptCacheError):
            self.allocator.release(slots, owner)
        with pytest.raises(CorruptCacheError):
            self.allocator.transfer(slots, owner, Owner.CACHE)

    # after each rule

    @invariant()
    def sound(self):
        self.allocator.check()

    @invariant()
    def slots_are_conserved(self):
        """Each slot is counted once: request before cached before donor."""
        classes = Counter(min(+references) for references in self.held.values())
        usage = self.allocator.usage()
        assert usage == SlotUsage(
            free=len(self.free()),
            request=classes[Owner.REQUEST],
            cached=classes[Owner.CACHE],
            donor=classes[Owner.DONOR],
            total=NUM_SLOTS,
        )
        assert usage.free + usage.request + usage.cached + usage.donor == usage.total
        assert self.allocator.free_size == usage.free

    @invariant()
    def runs_are_maximal(self):
        assert all(left[-1] + 1 < right[0] for left, right in pairwise(self.runs()))
        assert self.allocator.num_free_runs == len(self.runs())


SlotAllocatorMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSlotAllocator = SlotAllocatorMachine.TestCase
