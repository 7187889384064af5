"""What fails on one rank of tensor parallelism alone: all go on alike, and wait for one another in the same places."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import threading

import pytest
from tests.support.failing_calls import drawn, points_at
from tests.support.sglang_drill import KINDS, RankDrill
from tests.unit.integrations.sglang.rank_threads import on_ranks
from tests.unit.integrations.sglang.scheduler import Scheduler, order_of, tree_of
from tests.unit.integrations.sglang.test_any_order import DOCUMENTS, Walk, is_complete

from kvgraft.integrations.sglang.recompute import recomputer
from kvgraft.types import MissReason

SIZE = 2
DOCUMENT, HEAD, OTHER_HEAD = DOCUMENTS[0], list(range(500, 512)), list(range(600, 612))


@contextlib.contextmanager
def failing(owner, name, *, is_done=False):
    """A method fails, without or after what it does; the owner may be frozen."""
    method = getattr(owner, name)

    def fails(*arguments, **names):
        if is_done:
            method(*arguments, **names)
        raise MemoryError("no memory")

    vars(owner)[name] = fails
    yield
    vars(owner).pop(name, None)  # a walk has trouble of its own in the same places


def places(scheduler):
    """What may fail, by name."""
    keeper, reuse = scheduler.keeper, scheduler.reuse
    found = {
        "capture": (scheduler.buffers, "export"),
        "host memory": (keeper._host, "put"),
        "known": (keeper.rules, "is_known"),
        "registration": (keeper.catalogue, "add"),
        "publication": (keeper, "publish"),
        "lookup": (keeper.catalogue, "find"),
        "planning": (reuse.promises.decisions.planner, "plan"),
        "text": (reuse.books.continuations, "text"),
        "naming": (keeper, "on_device"),
        "copy": (scheduler.buffers, "copy"),
        "adoption": (scheduler.tree, "adopt"),
    }
    if reuse.repairs.passes.recomputer is not None:
        found["policy"] = (reuse.repairs.passes.recomputer, "policy_for")
    return found


class Server:
    """One rank of a server that is asked one thing after the other."""

    def __init__(self, ranks, fails_on, **settings):
        self.ranks, self.is_failing = ranks, ranks.rank == fails_on
        self.scheduler = Scheduler(ranks=ranks, **{"selection": "none", **settings})
        self.fresh = iter(range(100_000, 200_000))
        self.seen_of = tree_of

    def trouble(self, place, *, is_done=False):
        """`place` fails, on one rank."""
        if not self.is_failing:
            return contextlib.nullcontext()
        return failing(*places(self.scheduler)[place], is_done=is_done)

    def begin(self, tokens):
        """Send a request, up to its first token; returns how much was copied for it, and why not more."""
        self.scheduler.submit([*tokens, next(self.fresh)], "", "request")
        (entry,) = self.scheduler.waiting
        assert self.scheduler.admit(entry, 1000)
        while not is_complete(entry):
            self.scheduler.go_on(entry, 1000)
        self.scheduler.decode(entry, next(self.fresh))
        miss = self.scheduler.reuse.books.requests[entry.req].miss
        return len(entry.copied), None if miss is None else miss.reason

    def end(self, num_tokens=2):
        """Let it answer, and finish."""
        (entry,) = self.scheduler.running
        for _ in range(num_tokens):
            self.scheduler.decode(entry, next(self.fresh))
        self.scheduler.finish(entry)
        self.check()

    def ask(self, tokens, num_tokens=2):
        found = self.begin(tokens)
        self.end(num_tokens)
        return found

    def check(self):
        self.scheduler.reuse.publishing.settle()
        self.scheduler.check()
        first, *others = self.ranks.gathered(self.seen_of(self.scheduler))
        assert all(each == first for each in others)

    def donors(self):
        """The ids of the donors, if ranks have the same."""
        mine, other = self.ranks.gathered([donor.donor_id for donor in self.scheduler.keeper.catalogue])
        return mine if mine == other else None


def on_servers(fails_on, program, size=SIZE, **settings):
    """Return what `program` says on all ranks, of which `fails_on` has trouble."""
    return on_ranks(size, lambda ranks: program(Server(ranks, fails_on, **settings)))


each_rank = pytest.mark.parametrize("rank", range(SIZE))


@each_rank
@pytest.mark.parametrize("place", ["capture", "host memory", "known"])
def test_text_that_one_rank_could_not_capture(rank, place):
    """Ranks that have other donors forget them with the next request, which is computed; later ones have donors again."""

    def program(server):
        server.ask(DOCUMENT)
        with server.trouble(place):
            server.scheduler.tree.evict(1000)
        assert server.donors() is None
        first, donors = server.ask(HEAD + DOCUMENT), server.donors()
        return first, bool(donors), server.ask(OTHER_HEAD + DOCUMENT), server.scheduler.log.num_errors

    expected = [((0, MissReason.ERROR), True, (70, None), 1 + (each == rank)) for each in range(SIZE)]
    assert on_servers(rank, program) == expected


@each_rank
def test_a_load_keeps_no_slots_that_fails_as_its_donors_are_let_go(rank):
    def program(server):
        server.ask(DOCUMENT)
        with failing(server.scheduler.tree, "unpin", is_done=True) if server.is_failing else contextlib.nullcontext():
            copied, _ = server.begin(HEAD + DOCUMENT)
        server.end()
        server.ask(DOCUMENT)
        return copied, server.ask(OTHER_HEAD + DOCUMENT)

    assert on_servers(rank, program) == [(0, (70, None))] * SIZE


@each_rank
@pytest.mark.parametrize("place", ["known", "registration", "publication"])
def test_text_that_one_rank_could_not_register(rank, place):
    def program(server):
        server.begin(DOCUMENT)
        with server.trouble(place):
            server.end()
        assert server.donors() is None
        first, donors = server.ask(HEAD + DOCUMENT), server.donors()
        return first, bool(donors), server.ask(OTHER_HEAD + DOCUMENT), server.scheduler.log.num_errors

    expected = [((0, MissReason.ERROR), True, (70, None), 1 + (each == rank)) for each in range(SIZE)]
    assert on_servers(rank, program) == expected


def test_ranks_that_each_lack_another_text_of_the_same_length_notice_it():
    """Both texts become donors between two plans, after which ranks have as many."""

    def program(server):
        texts = [list(range(first, first + 70)) for first in (3000, 4000)]
        keeper, scheduler = server.scheduler.keeper, server.scheduler
        add = keeper.catalogue.add
        for text in texts:
            scheduler.submit([*text, next(server.fresh)], "", "request")
        for entry in list(scheduler.waiting):
            assert scheduler.admit(entry, 10)

        def broken(namespace, tokens, *arguments, **names):
            if tokens[0] == texts[server.ranks.rank][0]:
                raise MemoryError("no memory")
            return add(namespace, tokens, *arguments, **names)

        keeper.catalogue.add = broken
        for entry in list(scheduler.running):
            scheduler.go_on(entry, 1000)
            scheduler.decode(entry, next(server.fresh))
            scheduler.finish(entry)
        scheduler.reuse.publishing.settle()
        del keeper.catalogue.add
        assert len(keeper.catalogue) == 1
        return server.ask(HEAD + texts[0])[1], server.ask(OTHER_HEAD + texts[0])

    assert on_servers(None, program) == [(MissReason.ERROR, (70, None))] * SIZE


@each_rank
@pytest.mark.parametrize("place", ["lookup", "planning"])
def test_lookup_that_fails_on_one_rank(rank, place):
    """The first rank's is what counts; the other's fails without consequence, if it found donors as they were."""

    def program(server):
        server.ask(DOCUMENT)
        with server.trouble(place):
            copied, _ = server.begin(HEAD + DOCUMENT)
        server.end()
        assert server.donors()
        return copied, server.ask(OTHER_HEAD + DOCUMENT)[0], server.scheduler.log.num_errors

    expected = [(70 if rank else 0, 70, int(each == rank)) for each in range(SIZE)]
    assert on_servers(rank, program) == expected


@each_rank
def test_lookup_that_fails_on_one_rank_before_it_notices_what_was_evicted(rank):
    def program(server):
        server.ask(DOCUMENT)
        server.scheduler.tree.evict(40)
        with server.trouble("lookup"):
            first = server.begin(HEAD + DOCUMENT)
        server.end()
        return first, server.ask(OTHER_HEAD + DOCUMENT)[0]

    assert on_servers(rank, program, host_bytes=0) == [((0, MissReason.ERROR), 70)] * SIZE


@each_rank
def test_text_after_copies_that_one_rank_could_not_compare_is_in_no_tree(rank):
    def program(server):
        server.ask(DOCUMENT)
        copied, _ = server.begin(HEAD + DOCUMENT)
        num_pages = len(server.scheduler.tree.pages())
        with server.trouble("text"):
            server.end(50)
        return copied, len(server.scheduler.tree.pages()) - num_pages, server.scheduler.log.num_errors

    assert on_servers(rank, program) == [(70, 0, int(each == rank)) for each in range(SIZE)]


@each_rank
@pytest.mark.parametrize(("repair", "num_computed"), [("before", 70), ("after", 71)])
def test_policy_that_one_rank_cannot_ask_makes_all_compute_everything(rank, repair, num_computed):
    def program(server):
        server.ask(DOCUMENT)
        server.scheduler.submit([*HEAD, *DOCUMENT, 7], "", "request", repair)
        (entry,) = server.scheduler.waiting
        server.scheduler.match(entry)
        with server.trouble("policy"):
            assert server.scheduler.admit(entry, 1000)
            server.scheduler.go_on(entry, 1000)
            for token in range(2):
                server.scheduler.decode(entry, token)
        left = len(entry.copied)
        server.end()
        return left, server.scheduler.recomputed_tokens, server.scheduler.log.num_errors

    settings = {"recomputes": True, "selection": "query_seam", "recompute_ratio": 0.3}
    assert on_servers(rank, program, **settings) == [(0, num_computed, 1)] * SIZE


@each_rank
def test_copies_that_one_rank_lacks_are_made_room_for_on_both(rank):
    """A block of host memory is gone on one rank, after all had agreed on a plan."""

    def program(server):
        server.ask(DOCUMENT)
        server.scheduler.tree.evict(1000)
        server.ask(list(range(3000, 3800)))  # what is evicted for the copies
        server.scheduler.submit([*HEAD, *DOCUMENT, 7], "", "request")
        (entry,) = server.scheduler.waiting
        assert server.scheduler.match(entry) == 0
        (span,) = server.scheduler.reuse.books.requests[entry.req].due
        if server.is_failing:
            server.scheduler.keeper._host.remove(span.donor.kv.store_key)
        assert server.scheduler.admit(entry, 12)
        server.scheduler.go_on(entry, 1000)
        (mine, other), copied = server.ranks.gathered(tree_of(server.scheduler)), len(entry.copied)
        assert mine == other
        return copied

    assert on_servers(rank, program) == [0] * SIZE


@each_rank
def test_donor_whose_slots_one_rank_cannot_name_is_made_room_for_on_both(rank):
    def program(server):
        server.ask(DOCUMENT)
        server.ask(list(range(3000, 3780)))  # what is evicted for the copies
        server.scheduler.submit([*HEAD, *DOCUMENT, 7], "", "request")
        (entry,) = server.scheduler.waiting
        assert server.scheduler.admit(entry, 12)
        with server.trouble("naming"):
            server.scheduler.go_on(entry, 12)
        server.check()
        return len(entry.copied), server.scheduler.log.num_errors

    assert on_servers(rank, program) == [(0, 1)] * SIZE


late = pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])


@each_rank
@late
def test_text_after_copies_that_one_tree_could_not_take_leaves_trees_alike(rank, is_done):
    """SGLang's own tree may fail in an insertion, before the slots are its own or when they are."""

    def program(server):
        server.ask(DOCUMENT)
        copied, _ = server.begin(HEAD + DOCUMENT)
        server.seen_of = order_of
        with server.trouble("adoption", is_done=is_done):
            server.end(50)
        assert server.ask(HEAD + DOCUMENT)[0] == 0  # where ranks notice, at the latest, that their donors differ
        return copied, server.ask(OTHER_HEAD + DOCUMENT), server.scheduler.log.num_errors

    assert on_servers(rank, program) == [(70, (70, None), 1 + (each == rank)) for each in range(SIZE)]


@late
def test_text_after_copies_that_the_only_tree_could_not_take_is_freed_once(is_done):
    def program(server):
        server.ask(DOCUMENT)
        server.begin(HEAD + DOCUMENT)
        with server.trouble("adoption", is_done=is_done):
            server.end(50)
        return server.ask(OTHER_HEAD + DOCUMENT), server.scheduler.log.num_errors

    assert on_servers(0, program, size=1) == [((70, None), 1)]


@each_rank
@pytest.mark.parametrize("repair", ["before", "after"])
@pytest.mark.parametrize(("name", "num_errors"), [("GraftSteps", 1), ("PromptKV", 2), ("Recomputation", 1)])
def test_passes_that_one_rank_cannot_prepare_are_made_on_none(rank, repair, name, num_errors, monkeypatch):
    made, broken = getattr(recomputer, name), set()

    def make(*arguments, **names):
        if threading.get_ident() in broken:
            raise MemoryError("no memory")
        return made(*arguments, **names)

    monkeypatch.setattr(recomputer, name, make)

    def program(server):
        server.ask(DOCUMENT)
        broken.update([threading.get_ident()] if server.is_failing else ())
        server.scheduler.submit([*HEAD, *DOCUMENT, 7], "", "request", repair)
        (entry,) = server.scheduler.waiting
        assert server.scheduler.admit(entry, 12)
        server.scheduler.go_on(entry, 1000)
        for token in range(2):
            server.scheduler.decode(entry, token)
        broken.discard(threading.get_ident())
        server.end()
        return server.scheduler.log.num_errors, server.ask(OTHER_HEAD + DOCUMENT)

    settings = {"recomputes": True, "selection": "query_seam", "recompute_ratio": 0.3}
    assert on_servers(rank, program, **settings) == [(num_errors, (70, None))] * SIZE


class Failing(Walk):
    """A walk of one rank; now and then something fails for a step, on one rank alone."""

    def __init__(self, ranks, places, seed, scheduler):
        super().__init__(scheduler, seed)
        self.ranks, self.places, self.luck = ranks, places, random.Random(seed + 1)
        self.failed = collections.Counter()

    def step(self):
        place, rank, is_bad = self.luck.choice(self.places), self.luck.randrange(SIZE), self.luck.random() < 0.1
        before = self.scheduler.log.num_errors
        is_mine = is_bad and rank == self.ranks.rank
        with failing(*places(self.scheduler)[place]) if is_mine else contextlib.nullcontext():
            super().step()
        self.failed[place] += is_mine and self.scheduler.log.num_errors > before
        seen_of = order_of if "adoption" in self.places else tree_of
        mine, other = self.ranks.gathered(seen_of(self.scheduler))
        assert mine == other, f"trees differ; {place} failed on rank {rank}" if is_bad else "trees differ"


def walk(places, num_steps, page_size=1, *, recomputes=False, selection="none"):
    """Return what failed, on all ranks."""

    def program(ranks):
        settings = {"selection": selection, "first_k": 4, "recompute_ratio": 0.3}
        going = Failing(ranks, places, page_size, Scheduler(page_size, recomputes, ranks=ranks, **settings))
        for _ in range(num_steps):
            going.step()
        return going.failed

    return sum(on_ranks(SIZE, program), collections.Counter())


ALL = (
    "capture",
    "host memory",
    "known",
    "registration",
    "publication",
    "lookup",
    "planning",
    "text",
    "naming",
    "copy",
)


@pytest.mark.slow
@pytest.mark.parametrize("place", [*ALL, "adoption"])
def test_long_walk_with_failures_on_one_rank_leaves_trees_alike(place):
    assert walk([place], 600)[place] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["query_seam", "first_k"])
def test_long_walk_with_failures_of_all_kinds(selection):
    assert len(walk([*ALL, "adoption", "policy"], 1200, 4, recomputes=True, selection=selection)) >= 5


ROUND_ABOUT = [
    ("Promises._matched", "reuse/together.py", "before anything of a lookup"),
    ("SGLangRequest.matched", "requests/promises.py", "a request is half matched"),
    ("Books.require_sound", "requests/promises.py", "before anything of a lookup, a load or a release"),
    ("Promises._asked", "requests/promises.py", "before ranks decide"),
    ("LoadDecisions.decide", "requests/promises.py", "before ranks decide"),
    ("Promises._agree", "requests/promises.py", "before ranks decide"),
    ("Repairs.planned_for", "requests/promises.py", "after ranks have decided"),
    ("Loader._allocate", "reuse/together.py", "before room is made for a load"),
    ("Loader._copy", "reuse/together.py", "before a load, when room was made for it"),
    ("SGLangRequest.take_due", "donors/loader.py", "before a load"),
    ("SGLangRequest.loaded", "donors/loader.py", "after a load"),
    ("DonorKeeper.record_hit", "donors/loader.py", "when a load was noted"),
    ("SGLangRequest.goes_on", "requests/loading.py", "between two chunks"),
    ("Repairs._loaded", "reuse/together.py", "between a load and the passes over it"),
    ("SGLangRequest.extent", "requests/passes.py", "between a load and the passes over it"),
    ("Recomputer.agreed_policy", "requests/passes.py", "before passes"),
    ("SGLangRequest.recomputed", "reuse/together.py", "behind passes"),
    ("Repairs._due", "reuse/together.py", "before a step"),
    ("PolicyPasses.after", "requests/repairs.py", "before passes of a repair"),
    ("RequestTexts.pieces", "requests/publishing.py", "before ranks compare what they keep"),
    ("Publishing._adopt", "requests/publishing.py", "before ranks compare what they keep"),
    ("RequestTexts.touch_front", "requests/publishing.py", "between what is kept and what was"),
]
"""Calls between two exchanges of ranks: what is called, from where, and what it is the middle of."""


@pytest.fixture(scope="module")
def drill():
    found = RankDrill("passes", rank=1)
    return found, found.places()


@pytest.mark.parametrize(("callee", "caller", "where"), ROUND_ABOUT, ids=[callee for callee, *_ in ROUND_ABOUT])
def test_a_call_that_fails_on_one_rank_is_a_counted_miss_on_all(drill, callee, caller, where):
    found, places = drill
    folder = "/" if caller.startswith("reuse/") else "/integrations/sglang/"
    place, number = points_at(places, callee, folder + caller)[0]
    assert not found.failures(place, number), (place, number, where)


_FEW = int(os.environ.get("DRILL_POINTS", "25"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("kind", KINDS)
def test_any_call_that_fails_on_one_rank_leaves_ranks_alike(kind, rank):
    found = RankDrill(kind, rank)
    assert not {point: wrong for point in drawn(found.places(), _FEW) if (wrong := found.failures(*point))}
