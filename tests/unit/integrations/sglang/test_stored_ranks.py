"""Stores under tensor parallelism: every rank has its own part, and all of them use a donor or none does."""

from __future__ import annotations

import threading
from array import array

import pytest
from tests.unit.integrations.sglang.conftest import FakeRequest, World
from tests.unit.integrations.sglang.rank_threads import SOON, on_ranks
from tests.unit.integrations.sglang.shelf import Shelf

from kvgraft.types import MissReason

DOCUMENT = array("q", range(1000, 1300))
QUERY = array("q", range(10)) + DOCUMENT + array("q", range(500, 505))


def on_store_ranks(tmp_path, shelf, program, weights=("a", "b")):
    """Run a program on the ranks of one server; returns what each says."""

    def run(ranks):
        folder = tmp_path / str(ranks.rank)
        folder.mkdir(exist_ok=True)
        world = World(folder, stores=(shelf,), weights=weights[ranks.rank], ranks=ranks)
        ranks.keeper = world.keeper
        return program(world, ranks)

    return on_ranks(len(weights), run)


def look(world, ranks):
    for opened in world.link._used:
        assert opened.feed is None or opened.feed.look(SOON)
    ranks.gathered(None)
    world.reuse.idle()
    world.keeper.check()
    return world.link.num_stored


def store(world, ranks):
    world.publish("donor", DOCUMENT)
    while not world.link._behind.is_idle:
        world.reuse.idle()
    assert world.link._used[0].writer.flush(SOON)
    ranks.gathered(None)
    look(world, ranks)
    return sum(world.keeper.stored.key_of(donor.donor_id) is not None for donor in world.keeper.catalogue)


def ask(world, ranks):
    listed = look(world, ranks)
    req = FakeRequest("query", QUERY, prefix_len=10)
    promised = world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
    while world.reuse.promises.awaits(req, may_nap=True):
        promised = world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
    world.keeper.check()
    loaded = world.reuse.loading.load_first(req, promised) if promised else 0
    return listed, promised, loaded


@pytest.fixture
def shelf(tmp_path):
    shelf = Shelf()
    assert on_store_ranks(tmp_path, shelf, store) == [1, 1]
    assert len(shelf.spaces) == 2
    return shelf


def test_all_ranks_read_their_parts(tmp_path, shelf):
    assert on_store_ranks(tmp_path, shelf, ask) == [(1, 300, 300)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_part_that_one_rank_cannot_read_makes_all_compute(tmp_path, shelf, rank):
    names = list(shelf.objects)

    def ask_for_damaged(world, ranks):
        mine = world.link._space
        if ranks.rank == rank:
            _, body = shelf.objects[next(name for name in names if name[0] == mine)]
            body[1000] ^= 1
        return ask(world, ranks)

    assert on_store_ranks(tmp_path, shelf, ask_for_damaged) == [(1, 0, 0)] * 2
    assert len(shelf.objects) == 1
    assert on_store_ranks(tmp_path, shelf, ask) == [(0, 0, 0)] * 2, "a part alone is no donor"


def test_part_that_goes_between_look_and_read_makes_all_compute(tmp_path, shelf):
    def ask_for_lost(world, ranks):
        look(world, ranks)
        ranks.gathered(None)
        if ranks.rank == 1:
            shelf.remove(world.link._space, next(iter(shelf.objects))[1])
        ranks.gathered(None)
        req = FakeRequest("query", QUERY, prefix_len=10)
        world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        while world.reuse.promises.awaits(req, may_nap=True):
            promised = world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        return promised, world.link.num_stored

    assert on_store_ranks(tmp_path, shelf, ask_for_lost) == [(0, 0)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_which_one_has_nothing_to_write_wait_for_one_another(tmp_path, shelf, rank, monkeypatch):
    def publish_and_fail(world, ranks):
        with monkeypatch.context() as trouble:
            if ranks.rank == rank:
                trouble.setattr(world.keeper, "register", raises)
            world.publish("donor", array("q", range(2000, 2100)))
        written = len(world.keeper.unwritten)
        world.reuse.idle()
        world.publish("next", array("q", range(3000, 3100)))
        assert not world.link.is_open, "all forget their donors"
        world.publish("last", array("q", range(4000, 4100)))
        assert world.link.is_open
        return written, look(world, ranks)

    expected = [(0 if each == rank else 1, 1) for each in range(2)]
    assert on_store_ranks(tmp_path, shelf, publish_and_fail) == expected


def test_rank_of_other_weights_finds_nothing_and_nor_do_the_others(tmp_path, shelf):
    assert on_store_ranks(tmp_path, shelf, ask, weights=("a", "other")) == [(0, 0, 0)] * 2


def test_text_that_had_no_room_is_recalled_on_all_ranks_at_once(tmp_path, shelf):
    """The first rank's clock decides."""

    def ask_with_room(world, ranks):
        stored, catalogue = world.keeper.stored, world.keeper.catalogue
        capacity, catalogue._capacity = catalogue._capacity, 10
        assert look(world, ranks) == 0
        catalogue._capacity = capacity
        stored._recall_at = 1e12 if ranks.rank else 0.0
        ranks.gathered(None)
        assert look(world, ranks) == 0, "it is only asked for"
        ranks.gathered(None)
        return look(world, ranks)

    assert on_store_ranks(tmp_path, shelf, ask_with_room) == [1, 1]


def test_more_ranks_find_nothing(tmp_path, shelf):
    assert on_store_ranks(tmp_path, shelf, ask, weights=("a", "b", "c")) == [(0, 0, 0)] * 3


def test_late_is_what_the_first_rank_calls_late(tmp_path, shelf):
    def ask_in_vain(world, ranks):
        look(world, ranks)
        ranks.gathered(None)
        shelf.gate.clear()
        ranks.gathered(None)
        req = FakeRequest("query", QUERY, prefix_len=10)
        world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        world.now += 100.0 if ranks.rank else 0.1
        world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        waits = world.reuse.promises.awaits(req, may_nap=False)
        world.now += 0.0 if ranks.rank else 100.0
        promised = world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        return waits, promised, world.reuse.promises.awaits(req, may_nap=False), world.link.counts()[0].reads["late"]

    assert on_store_ranks(tmp_path, shelf, ask_in_vain) == [(True, 0, False, 1)] * 2
    shelf.gate.set()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_whose_store_hangs_holds_a_request_up_until_the_deadline(tmp_path, shelf, rank):
    hangs, goes_on, read = [], threading.Event(), shelf.read

    def read_some(space, *more):
        if space in hangs:
            goes_on.wait(SOON)
        read(space, *more)

    shelf.read = read_some

    def ask_in_vain(world, ranks):
        look(world, ranks)
        if ranks.rank == rank:
            hangs.append(world.link._space)
        ranks.gathered(None)
        req = FakeRequest("query", QUERY, prefix_len=10)
        world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        fetch = world.reuse.books.requests[req].reads.spans[0].read
        assert ranks.rank == rank or fetch.wait(SOON)
        ranks.gathered(None)
        waits = []
        for seconds in (0.1, 100.0):
            world.now += seconds
            promised = world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
            waits.append(world.reuse.promises.awaits(req, may_nap=False))
        miss = world.reuse.books.requests[req].miss.reason
        second = FakeRequest("second", QUERY, prefix_len=10)
        world.reuse.promises.promise(second, QUERY, len(QUERY) - 1, 10)
        waits.append(world.reuse.promises.awaits(second, may_nap=False))
        ranks.gathered(None)
        goes_on.set()
        return waits, promised, miss, world.link.counts()[0].reads["late"]

    expected = ([True, False, False], 0, MissReason.STORE, 1)
    assert on_store_ranks(tmp_path, shelf, ask_in_vain) == [expected] * 2


def raises(*_):
    raise MemoryError("no memory")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["digest", "export", "news", "begin", "keep"])
def test_what_fails_on_one_rank_leaves_no_other_in_an_exchange(tmp_path, shelf, rank, place, monkeypatch):
    def ask_and_fail(world, ranks):
        listed = look(world, ranks)
        if place == "digest":
            world.reuse.books.weights_change()
            world.reuse.books.clear()
        parts = {
            "digest": (world.link, "_weights"),
            "export": (world.keeper, "export"),
            "news": (world.link._used[0], "news"),
            "begin": (world.link._used[0].reader, "fetch"),
            "keep": (world.keeper, "keep"),
        }
        if ranks.rank == rank:
            monkeypatch.setattr(*parts[place], raises)
        if place == "export":
            world.publish("donor", array("q", range(2000, 2100)))
        world.reuse.idle()
        req = FakeRequest("query", QUERY, prefix_len=10)
        promised = world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        while world.reuse.promises.awaits(req, may_nap=True):
            promised = world.reuse.promises.promise(req, QUERY, len(QUERY) - 1, 10)
        loaded = world.reuse.loading.load_first(req, promised) if promised else 0
        errors = world.log.num_errors
        world.publish("donor", array("q", range(3000, 3100)))
        world.reuse.idle()
        ranks.gathered(None)
        return listed, loaded, world.link.is_open, errors

    is_asked = place != "news" or rank == 0  # the first rank alone listens
    num_errors = 2 if place == "keep" else 1  # that one rank alone may have kept it is noticed with the next plan
    expected = (1, 0, False, num_errors) if is_asked else (1, 300, True, 0)
    assert on_store_ranks(tmp_path, shelf, ask_and_fail) == [expected] * 2
