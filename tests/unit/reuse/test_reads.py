"""What reading from stores costs, how long it is waited for, and why requests go without it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue
from kvgraft.errors import StoreError, StoreMissError
from kvgraft.memory.store.record import DonorRecord
from kvgraft.reuse.reads import PrefillSpeed, ReadState, ReadTerms, StoredReads, StoredSpan, store_miss
from kvgraft.reuse.stored_donors import StoredDonors
from kvgraft.types import DonorId, Match, MissReason, Namespace

NAMESPACE = Namespace("model")
TEXT = np.arange(100, dtype=np.int32)


class FakeRead:
    def __init__(self, error=None, *, is_done=True):
        self.error, self.is_done, self.waited, self.num_cancels = error, is_done, [], 0

    def wait(self, timeout_s):
        self.waited.append(timeout_s)
        return self.is_done

    def cancel(self):
        self.num_cancels += 1

    def block(self):
        if self.error is not None:
            raise self.error
        return "K/V"


def span_of(read):
    return StoredSpan(Match(0, DonorId(1), 0, 100), None, 0, read)


class TestSpeed:
    def test_it_is_the_median_of_the_last_prefills(self):
        speed = PrefillSpeed()
        assert speed.per_s is None
        for seconds in (1.0, 2.0, 4.0):
            speed.observe(100, 800.0, seconds)
        assert speed.per_s == 400.0
        for _ in range(9):
            speed.observe(100, 100.0, 1.0)
        assert speed.per_s == 100.0

    @pytest.mark.parametrize(("num_tokens", "cost", "seconds"), [(63, 63.0, 1.0), (100, 0.0, 1.0), (100, 100.0, 0.0)])
    def test_what_says_nothing_is_ignored(self, num_tokens, cost, seconds):
        speed = PrefillSpeed()
        speed.observe(num_tokens, cost, seconds)
        assert speed.per_s is None


class TestTerms:
    """Two stores: the first takes a second per token, the second is left alone."""

    @pytest.fixture
    def stored(self):
        return StoredDonors(DonorCatalogue(1_000), min_run=16, max_generation=0)

    @pytest.fixture
    def terms(self, stored):
        self.speed = None
        return ReadTerms(
            stored, lambda store, length: math.inf if store else float(length), lambda: self.speed, most_tokens=80
        )

    def match(self, stored, store, length=50):
        donor = stored.join(DonorRecord(NAMESPACE.key, TEXT, 0, 0), store)
        return Match(0, donor.donor_id, 0, length)

    def test_a_read_costs_what_is_computed_meanwhile(self, stored, terms):
        match = self.match(stored, 0)
        assert terms.expected_s(match) == 50.0
        self.speed = 3.0
        assert terms.cost(match) == 150.0

    def test_a_read_is_tried_before_speeds_are_known_and_is_never_free(self, stored, terms):
        match = self.match(stored, 0)
        assert terms.cost(match) == pytest.approx(5.0)
        self.speed = 1e-9
        assert terms.cost(match) == pytest.approx(5.0)

    def test_resident_text_costs_nothing(self, stored, terms):
        donor = stored._catalogue.add(NAMESPACE, TEXT, "resident").donor
        self.speed = 3.0
        assert terms.cost(Match(0, donor.donor_id, 0, 50)) == 0.0

    def test_what_cannot_be_read_has_no_price(self, stored, terms):
        assert terms.cost(self.match(stored, 0, length=81)) == math.inf
        stored.clear()
        assert terms.cost(self.match(stored, 1)) == math.inf, "its store is left alone"

    @pytest.mark.parametrize(
        ("length", "speed", "patience_s"),
        [
            (2, None, 8.0),
            (0.01, None, 0.5),
            (50, None, 30.0),
            (0.01, 12.5, 2.0),
            (0.01, 0.1, 5.0),
            (2, 100.0, 1.0),
            (0.01, 1e3, 0.1),
        ],
    )
    def test_patience(self, stored, terms, length, speed, patience_s):
        """Four times the expected time, half a second at least, or a fourth of computing; never longer than computing."""
        self.speed = speed
        assert terms.patience_s([self.match(stored, 0, length)], 100.0) == pytest.approx(patience_s)

    def test_patience_adds_up_and_leaves_out_what_is_not_read(self, stored, terms):
        match = self.match(stored, 0, 1)
        gone = Match(0, DonorId(99), 0, 7)
        assert terms.patience_s([match, match, gone], 0.0) == 8.0


class TestReads:
    @pytest.mark.parametrize(
        ("read", "state"),
        [
            (None, ReadState.LOST),
            (FakeRead(is_done=False), ReadState.PENDING),
            (FakeRead(StoreMissError("gone")), ReadState.LOST),
            (FakeRead(StoreError("no route")), ReadState.FAILED),
            (FakeRead(), ReadState.THERE),
        ],
    )
    def test_state(self, read, state):
        assert span_of(read).state is state

    def test_what_is_awaited_is_waited_for_and_given_up_once(self):
        now = [5.0]
        done, pending = FakeRead(), FakeRead(is_done=False)
        reads = StoredReads([span_of(done), span_of(pending), span_of(None)], 2.0, lambda: now[0])
        assert (reads.deadline, reads.is_late) == (7.0, False)
        reads.wait(10.0)
        assert (done.waited, pending.waited) == ([], [2.0])
        now[0] = 7.0
        assert reads.is_late
        assert reads.elapsed_ms == 2000.0
        reads.spans[0].is_over = True
        for _ in range(2):
            reads.cancel()
        assert (done.num_cancels, pending.num_cancels) == (0, 1)
        assert reads.pending() == []

    @pytest.mark.parametrize(
        ("states", "word"),
        [
            ([ReadState.THERE, ReadState.PENDING], "in time"),
            ([ReadState.LOST, ReadState.PENDING], "in time"),
            ([ReadState.THERE, ReadState.LOST], "give back"),
            ([ReadState.FAILED], "give back"),
        ],
    )
    def test_every_miss_of_a_store_says_store(self, states, word):
        miss = store_miss(states)
        assert miss.reason is MissReason.STORE
        assert word in miss.detail
