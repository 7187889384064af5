"""Order in a stream of batches: whatever is lost, repeated, late or from another process, nothing stale is believed."""

from __future__ import annotations

import random

import pytest

from kvgraft.events import BlockRemoved, EventBatch
from kvgraft.router.sequence import BatchSequence


def batch(number, time=None):
    return EventBatch(float(number if time is None else time), (BlockRemoved((number,)),))


def numbers(progress):
    return [event.block_hashes[0] for event in progress.events]


def test_batches_in_order_are_taken():
    sequence = BatchSequence(can_replay=False)
    assert [numbers(sequence.received(n, batch(n))) for n in range(3)] == [[0], [1], [2]]


def test_a_late_listener_begins_where_it_is():
    sequence = BatchSequence(can_replay=False)
    sequence.connected()
    progress = sequence.received(7, batch(7))
    assert (numbers(progress), progress.forget) == ([7], False)


def test_a_gap_without_replay_makes_everything_forgotten():
    sequence = BatchSequence(can_replay=False)
    sequence.received(0, batch(0))
    progress = sequence.received(2, batch(2))
    assert (numbers(progress), progress.forget, sequence.num_lost) == ([2], True, 1)
    late = sequence.received(1, batch(1))
    assert not late.events
    assert not late.forget


def test_a_gap_is_replayed():
    sequence = BatchSequence(can_replay=True)
    assert sequence.connected().ask_from == 0
    sequence.replayed(0, batch(0))
    assert numbers(sequence.replay_ended()) == [0]
    assert sequence.received(3, batch(3)).ask_from == 1
    assert not sequence.received(4, batch(4)).events
    for number in (1, 2, 3):
        assert not sequence.replayed(number, batch(number)).events
    progress = sequence.replay_ended()
    assert (numbers(progress), progress.forget) == ([1, 2, 3, 4], False)
    assert (sequence.num_lost, sequence.is_waiting) == (0, False)


def test_late_batches_fill_their_gap_while_a_replay_is_awaited():
    sequence = BatchSequence(can_replay=True)
    sequence.received(0, batch(0))
    assert sequence.received(2, batch(2)).ask_from == 1
    sequence.received(1, batch(1))
    progress = sequence.replay_ended()
    assert (numbers(progress), progress.forget) == ([1, 2], False)


def test_what_a_replay_no_longer_has_is_lost():
    sequence = BatchSequence(can_replay=True)
    sequence.received(0, batch(0))
    assert sequence.received(9, batch(9)).ask_from == 1
    sequence.replayed(5, batch(5))
    sequence.replayed(8, batch(8))
    progress = sequence.replay_ended()
    assert (numbers(progress), progress.forget) == ([8, 9], True), "only what has no gap behind it is believed"


def test_a_second_gap_behind_a_replay_is_asked_for_too():
    sequence = BatchSequence(can_replay=True)
    sequence.connected()
    sequence.received(4, batch(4))
    sequence.replayed(0, batch(0))
    sequence.replayed(1, batch(1))
    progress = sequence.replay_ended()
    assert (numbers(progress), progress.ask_from, progress.forget) == ([0, 1], 2, False)
    assert sequence.replay_ended().forget, "asked for in vain"


def test_an_endpoint_that_says_nothing_is_not_waited_for():
    sequence = BatchSequence(can_replay=True)
    sequence.connected()
    sequence.received(4, batch(4))
    progress = sequence.replay_ended()
    assert (numbers(progress), progress.forget) == ([4], False)
    assert numbers(sequence.received(5, batch(5))) == [5]


def given_up(*numbers_since):
    """A sequence that knew 0 to 4, gave a replay from 5 up at batch 10, and has heard more since."""
    sequence = BatchSequence(can_replay=True)
    for number in range(5):
        sequence.received(number, batch(number))
    assert sequence.received(10, batch(10)).ask_from == 5
    assert sequence.replay_ended().forget
    for number in numbers_since:
        sequence.received(number, batch(number))
    return sequence


@pytest.mark.parametrize(
    ("oldest", "learned"), [(0, range(13)), (3, range(3, 13)), (9, range(9, 13)), (10, [12]), (11, [12])]
)
def test_what_a_replay_brings_that_is_asked_for_again_is_learned_whole(oldest, learned):
    """From the oldest batch on that the publisher has kept; what is known already stays if it has kept less."""
    sequence = given_up(11)
    assert sequence.retried().ask_from == 0
    assert not sequence.received(12, batch(12)).events
    for number in range(oldest, 12):
        assert not sequence.replayed(number, batch(number)).events
    progress = sequence.replay_ended()
    assert (numbers(progress), progress.forget) == (list(learned), oldest < 10)
    assert numbers(sequence.received(13, batch(13))) == [13]


def test_a_replay_with_a_gap_costs_nothing_of_what_is_known():
    sequence = given_up(11)
    sequence.retried()
    for number in (0, 1, 2, 8):
        sequence.replayed(number, batch(number))
    progress = sequence.replay_ended()
    assert (numbers(progress), progress.forget, progress.ask_from) == ([], False, None)
    assert numbers(sequence.received(12, batch(12))) == [12]


def test_nothing_is_asked_for_again_while_a_replay_is_awaited():
    sequence = given_up()
    assert sequence.received(13, batch(13)).ask_from == 11
    assert sequence.retried().ask_from is None


@pytest.mark.parametrize("can_replay", [False, True])
def test_a_restart_is_known_by_number_and_time(can_replay):
    sequence = BatchSequence(can_replay=can_replay)
    for number in range(5):
        sequence.received(number, batch(number))
    repeated = sequence.received(0, batch(0))
    assert not repeated.forget
    assert not repeated.events
    progress = sequence.received(0, batch(0, time=100))
    assert (numbers(progress), progress.forget, sequence.num_restarts) == ([0], True, 1)
    assert numbers(sequence.received(1, batch(1, time=101))) == [1]


def test_a_restart_whose_first_batches_were_missed_is_replayed_from_the_start():
    sequence = BatchSequence(can_replay=True)
    for number in range(5):
        sequence.received(number, batch(number))
    progress = sequence.received(2, batch(2, time=102))
    assert (progress.forget, progress.ask_from, progress.events) == (True, 0, [])
    for number in (0, 1, 2):
        sequence.replayed(number, batch(number, time=100 + number))
    assert numbers(sequence.replay_ended()) == [0, 1, 2]


def test_behind_a_new_connection_without_replay_everything_is_learned_anew():
    sequence = BatchSequence(can_replay=False)
    assert not sequence.connected().forget, "the first one"
    sequence.received(0, batch(0))
    assert sequence.disconnected().forget
    assert not sequence.connected().forget
    assert numbers(sequence.received(1, batch(1))) == [1]


def replay(sequence, ask_from, batches):
    """Answer as a publisher does that keeps `batches`; follow up until nothing more is asked for."""
    events, forgot = [], False
    while ask_from is not None:
        for number, each in sorted(batches.items()):
            if number >= ask_from:
                progress = sequence.replayed(number, each)
                if progress.forget:
                    events, forgot = [], True
                if progress.ask_from is not None:
                    break
        else:
            progress = sequence.replay_ended()
            if progress.forget:
                events, forgot = [], True
        events += numbers(progress)
        ask_from = progress.ask_from
    return events, forgot


def test_the_same_process_behind_a_new_connection_goes_on():
    sequence = BatchSequence(can_replay=True)
    for number in range(3):
        sequence.received(number, batch(number))
    kept = {number: batch(number) for number in range(5)}
    assert replay(sequence, sequence.connected().ask_from, kept) == ([3, 4], False)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 9])
def test_another_process_behind_a_new_connection_is_noticed(length):
    """However far it has come, and though it never says so itself."""
    sequence = BatchSequence(can_replay=True)
    for number in range(3):
        sequence.received(number, batch(number))
    kept = {number: batch(number, time=1000 + number) for number in range(length)}
    assert replay(sequence, sequence.connected().ask_from, kept) == (list(range(length)), True)
    assert sequence.num_restarts == 1
    assert numbers(sequence.received(length, batch(length, time=2000))) == [length]


class Listener:
    """Follows a sequence; its replays lack what the publisher has thrown away, and now and then a batch."""

    def __init__(self, rng):
        self.rng = rng
        self.sequence = BatchSequence(can_replay=rng.random() < 0.7)
        self.learned = []

    def follow(self, progress, published):
        if progress.forget:
            self.learned.clear()
        self.learned.extend(numbers(progress))
        if progress.ask_from is None:
            return
        oldest = self.rng.randrange(0, published + 1)
        for number in range(max(progress.ask_from, oldest), published + 1):
            if self.rng.random() < 0.98:
                self.follow(self.sequence.replayed(number, batch(number)), published)
        if self.sequence.is_waiting:
            self.follow(self.sequence.replay_ended(), published)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_what_is_learned_is_a_suffix_of_the_truth(seed):
    """Batches are lost and swapped, replays are cut: what is believed is what a run of batches without a gap says."""
    rng = random.Random(seed)
    listener = Listener(rng)
    stream = list(range(200))
    for index in range(0, 198, 7):
        stream[index], stream[index + 1] = stream[index + 1], stream[index]
    for number in stream:
        if rng.random() < 0.9:
            listener.follow(listener.sequence.received(number, batch(number)), number)
        learned = listener.learned
        assert learned == list(range(learned[0], learned[-1] + 1)) if learned else True


def test_what_waits_when_a_process_dies_is_not_taken_for_its_successors():
    sequence = BatchSequence(can_replay=True)
    assert sequence.connected().ask_from == 0
    dead = EventBatch(1.0, (BlockRemoved((99,)),))
    assert sequence.received(1, dead).events == []
    sequence.disconnected()
    assert sequence.connected().ask_from == 0
    sequence.replayed(0, batch(0, 2.0))
    sequence.replay_ended()
    assert sequence.received(1, batch(1, 3.0)).events == list(batch(1, 3.0).events)
