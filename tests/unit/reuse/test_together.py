"""Work that fails on one rank fails on all, wherever the others are in it; ranks are threads that reduce."""

from __future__ import annotations

import threading

import pytest
from tests.unit.integrations.sglang.rank_threads import on_ranks

from kvgraft.reuse.together import FailedTogetherError, Together


def fails():
    raise MemoryError("no memory")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_one_of_all_ranks_and_of_its_depth(rank):
    def program(ranks):
        def act():
            if ranks.rank == rank:
                fails()
            return "done"

        with pytest.raises(FailedTogetherError) as failed:
            ranks.together(act)
        return type(failed.value.origin), str(failed.value), ranks.together(lambda: "after it")

    here, elsewhere = (
        (MemoryError, "MemoryError: no memory"),
        (FailedTogetherError, "another rank failed; its log says why"),
    )
    assert on_ranks(2, program) == [(*(here if each == rank else elsewhere), "after it") for each in range(2)]


@pytest.mark.parametrize("place", ["work within", "an exchange"])
def test_a_rank_that_fails_further_out_has_others_leave_what_lies_within(place):
    """No handler within goes on alone."""

    def program(ranks):
        handled = []

        def within():
            if place == "work within":
                ranks.together(lambda: None)
            else:
                ranks.gathered("part")

        def act():
            if ranks.rank == 0:
                fails()
            try:
                within()
            except Exception as error:  # noqa: BLE001 - what is tried
                handled.append(error)

        with pytest.raises(FailedTogetherError):
            ranks.together(act)
        return handled, ranks.gathered(f"of rank {ranks.rank}")

    assert on_ranks(2, program) == [([], ["of rank 0", "of rank 1"])] * 2


def test_work_within_that_fails_can_be_handled_by_all():
    def program(ranks):
        def act():
            try:
                ranks.together(fails if ranks.rank else int)
            except FailedTogetherError:
                return ranks.lowest([ranks.rank + 3])

        return ranks.together(act)

    assert on_ranks(2, program) == [[3]] * 2


def test_ranks_in_different_places_fail_together():
    """One of them has forgotten what both would exchange."""
    ranks = [None, None]
    barrier = threading.Barrier(2)

    def of(rank):
        def lowest(numbers):
            ranks[rank] = numbers
            barrier.wait(60)
            found = [min(pair) for pair in zip(*ranks, strict=True)]
            barrier.wait(60)
            return found

        return Together(lowest)

    outcomes = {}

    def run(rank):
        together = of(rank)

        def act():
            if rank:
                together.meet("sum of 3")

        with pytest.raises(FailedTogetherError, match="another rank failed"):
            together(act)
        with pytest.raises(FailedTogetherError, match="another rank is not at"):
            together.meet(f"place {rank}")
        outcomes[rank] = together(lambda: "alike")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {0: "alike", 1: "alike"}


def test_one_rank_alone_keeps_the_cause():
    with pytest.raises(FailedTogetherError, match="MemoryError: no memory") as failed:
        Together(list)(lambda: Together(list)(fails))
    assert isinstance(failed.value.origin, MemoryError)
