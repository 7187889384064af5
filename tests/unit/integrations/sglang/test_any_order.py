"""Requests in any order that SGLang can think of: nothing approximate is exact, no donor is better than it says."""

from __future__ import annotations

import collections
import contextlib
import random

import pytest
from hypothesis import assume, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.integrations.sglang.scheduler import Scheduler
from tests.unit.integrations.sglang.shelf import Shelf

from kvgraft.integrations.sglang.donors.texts import STORE, HostBlockKV

DOCUMENTS = [[1000 * number + index for index in range(70)] for number in range(1, 4)]
PIECES = strategies.lists(
    strategies.tuples(
        strategies.integers(0, 2), strategies.integers(0, 30), strategies.integers(20, 40), strategies.integers(0, 9)
    ),
    min_size=1,
    max_size=3,
)
CHUNKS = strategies.sampled_from([1000, 40, 17])
WHICH = strategies.integers(0, 7)
REPAIR = strategies.sampled_from(["before", "after"])


class AnyOrder(RuleBasedStateMachine):
    """Up to six requests in the queue or on their way."""

    @initialize(
        page_size=strategies.sampled_from([1, 4]),
        selection=strategies.sampled_from(["none", "first_k", "passes first_k", "passes random", "passes query_seam"]),
        max_generation=strategies.integers(0, 2),
    )
    def start(self, page_size, selection, max_generation):
        *passes, selection = selection.split()
        self.scheduler = Scheduler(
            page_size, bool(passes), selection=selection, first_k=4, max_generation=max_generation, recompute_ratio=0.3
        )
        self.number = 0

    def fresh(self, count):
        self.number += count
        return [100_000 + self.number - index for index in range(count)]

    @precondition(lambda self: len(self.scheduler.waiting) + len(self.scheduler.running) < 6)
    @rule(
        pieces=PIECES,
        head=strategies.integers(0, 12),
        tenant=strategies.sampled_from(["", "", "other"]),
        rid=WHICH,
        repair=REPAIR,
    )
    def submit(self, pieces, head, tenant, rid, repair):
        tokens = self.fresh(head)
        for document, first, length, gap in pieces:
            tokens += DOCUMENTS[document][first : first + length] + self.fresh(gap)
        self.scheduler.submit([*tokens, *self.fresh(1)], tenant, f"request {rid}", repair)

    @precondition(
        lambda self: len(self.scheduler.waiting) + len(self.scheduler.running) < 6 and self.scheduler.finished
    )
    @rule(
        which=WHICH,
        kept=strategies.integers(0, 60),
        count=strategies.integers(0, 30),
        tenant=strategies.sampled_from([None, None, None, "other", ""]),
        repair=REPAIR,
    )
    def next_turn(self, which, kept, count, tenant, repair):
        """The client may have edited the end of what it was answered."""
        tokens, own = self.scheduler.finished[which % len(self.scheduler.finished)]
        assume(kept < len(tokens) < 300)
        tokens = tokens[: len(tokens) - kept] + self.fresh(count + 1)
        self.scheduler.submit(tokens, own if tenant is None else tenant, "turn", repair)

    @precondition(lambda self: self.scheduler.waiting)
    @rule(which=WHICH)
    def match(self, which):
        self.scheduler.match(self.waiting(which))

    @precondition(lambda self: self.scheduler.waiting)
    @rule(which=WHICH, chunk=CHUNKS)
    def admit(self, which, chunk):
        self.scheduler.admit(self.waiting(which), chunk)

    @precondition(lambda self: self.scheduler.running)
    @rule(which=WHICH, chunk=CHUNKS, times=strategies.integers(1, 4))
    def go_on(self, which, chunk, times):
        entry = self.running(which)
        for _ in range(times):
            if entry in self.scheduler.running and not is_complete(entry):
                self.scheduler.go_on(entry, chunk)

    @precondition(lambda self: self.scheduler.running)
    @rule(which=WHICH, count=strategies.integers(1, 20))
    def decode(self, which, count):
        entry = self.running(which)
        assume(is_complete(entry))
        for _ in range(count):
            if self.scheduler.tree.room() > 2 * self.scheduler.page_size:
                self.scheduler.decode(entry, self.fresh(1)[0])

    @precondition(lambda self: self.scheduler.running)
    @rule(which=WHICH)
    def finish(self, which):
        entry = self.running(which)
        assume(is_complete(entry))
        self.scheduler.finish(entry)

    @precondition(lambda self: self.scheduler.running)
    @rule(which=WHICH)
    def retract(self, which):
        self.scheduler.retract(self.running(which))

    @precondition(lambda self: self.scheduler.running or self.scheduler.waiting)
    @rule(which=WHICH)
    def abort(self, which):
        entries = self.scheduler.running + self.scheduler.waiting
        self.scheduler.abort(entries[which % len(entries)])

    @rule(count=strategies.integers(1, 200))
    def evict(self, count):
        self.scheduler.tree.evict(count)

    @rule()
    def flush(self):
        self.scheduler.flush()

    @rule()
    def change_weights(self):
        self.scheduler.change_weights()

    @precondition(lambda self: self.scheduler.waiting)
    @rule(which=WHICH, chunk=CHUNKS, how=strategies.sampled_from(["copy", "room"]))
    def fail_to_load(self, which, chunk, how):
        scheduler = self.scheduler
        if how == "room":
            allocate = scheduler.tree.allocate
            scheduler.tree.allocate = lambda count: setattr(scheduler.tree, "allocate", allocate)
            assume(scheduler.match(self.waiting(which)))
        else:
            scheduler.buffers.rope, rope = None, scheduler.buffers.rope
        try:
            scheduler.admit(self.waiting(which), chunk)
        finally:
            if how == "room":
                scheduler.tree.allocate = allocate
            else:
                scheduler.buffers.rope = rope

    @invariant()
    def everything_holds(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def waiting(self, which):
        return self.scheduler.waiting[which % len(self.scheduler.waiting)]

    def running(self, which):
        return self.scheduler.running[which % len(self.scheduler.running)]


def is_complete(entry):
    return len(entry.row) >= len(entry.req.origin_input_ids)


TestAnyOrder = AnyOrder.TestCase


class Walk:
    """The machine finds short ways; this one goes far, and counts where it has been."""

    def __init__(self, scheduler, seed):
        self.scheduler, self.rng = scheduler, random.Random(seed)
        self.seen, self.fresh = collections.Counter(), iter(range(100_000, 10_000_000))
        self.said = []  # text that was computed behind copies

    def new(self, most):
        return [next(self.fresh) for _ in range(self.rng.randrange(most))]

    def submit(self):
        if self.scheduler.finished and self.rng.random() < 0.3:
            tokens, tenant = self.rng.choice(self.scheduler.finished)
            if len(tokens) < 250:
                kept = len(tokens) - self.rng.choice([0, 0, self.rng.randrange(50)])
                name = f"turn {next(self.fresh)}"
                self.scheduler.submit([*tokens[:kept], *self.new(30), next(self.fresh)], tenant, name, "after")
                return
        tokens = self.new(12) if self.rng.random() < 0.5 else []
        for _ in range(self.rng.randrange(1, 4)):
            document, first = self.rng.choice([*DOCUMENTS, *self.said, *self.said]), self.rng.randrange(30)
            tokens += document[first : first + self.rng.randrange(20, 41)] + self.new(30)
        self.scheduler.submit(
            [*tokens, next(self.fresh)],
            self.rng.choice(["", "", "", "other"]),
            "same id",
            ("before", "after")[len(tokens) % 2],
        )

    def step(self):
        rng, scheduler = self.rng, self.scheduler
        scheduler.now += 1.0
        if len(scheduler.waiting) + len(scheduler.running) < 5:
            self.submit()
        if not scheduler.running or (scheduler.waiting and rng.random() < 0.2):
            self.step_of_waiting(rng.choice(scheduler.waiting))
        else:
            self.step_of_running(rng.choice(scheduler.running))
        if rng.random() < 0.1:
            with self.trouble_with_keeping() if rng.random() < 0.2 else contextlib.nullcontext():
                scheduler.tree.evict(rng.randrange(1, 250))
        if rng.random() < 0.004:
            scheduler.change_weights()
            if rng.random() < 0.7:
                for entry in list(scheduler.running):
                    scheduler.retract(entry)
        scheduler.flush() if scheduler.reuse.books.is_stale or rng.random() < 0.01 else None
        if scheduler.link is not None:
            self.step_of_stores()
        for donor in self.scheduler.keeper.catalogue:
            self.seen["from a store"] += isinstance(donor.kv, HostBlockKV) and donor.kv.origin.request == STORE
            self.seen[f"generation {donor.generation}"] += 1
            self.seen[type(donor.kv).__name__] += 1
        self.scheduler.check()

    @contextlib.contextmanager
    def trouble_with_keeping(self):
        owner, name = self.rng.choice([(self.scheduler.buffers, "export"), (self.scheduler.keeper._host, "put")])
        setattr(owner, name, lambda *_: 1 / 0)
        before = self.scheduler.log.num_errors
        yield
        delattr(owner, name)
        self.seen["not kept"] += self.scheduler.log.num_errors > before

    def step_of_stores(self):
        rng, scheduler = self.rng, self.scheduler
        if rng.random() < 0.1 and scheduler.link.is_open:
            scheduler.rest()
        elif rng.random() < 0.02:
            weights = rng.choice([scheduler.weights, scheduler.weights, scheduler.weights + 1])
            self.seen["restarted"] += 1
            self.scheduler = scheduler.restarted(weights)
        elif rng.random() < 0.03 and scheduler.shelf.objects:
            self.seen["damaged"] += 1
            _, body = scheduler.shelf.objects[rng.choice(sorted(scheduler.shelf.objects))]
            body[rng.randrange(len(body))] ^= 1
        elif rng.random() < 0.03:
            scheduler.shelf.trouble = rng.choice([None, "no route to host"])

    def step_of_waiting(self, entry):
        if self.rng.random() < 0.05:
            self.scheduler.abort(entry)
        elif self.scheduler.admit(entry, self.rng.choice([1000, 40, 17])):
            self.seen["copied at admission"] += bool(entry.copied)

    def step_of_running(self, entry):
        rng, scheduler, before = self.rng, self.scheduler, len(entry.copied)
        if rng.random() < 0.07:
            self.seen["retracted with copies"] += bool(before)
            scheduler.retract(entry)
        elif rng.random() < 0.02:
            scheduler.abort(entry)
        elif not is_complete(entry):
            scheduler.go_on(entry, rng.choice([1000, 40, 17]))
            self.seen["copied between chunks"] += len(entry.copied) > before
        elif rng.random() < 0.4 and scheduler.tree.room() > 60:
            for _ in range(20):
                scheduler.decode(entry, next(self.fresh))
        else:
            self.seen["finished behind copies"] += bool(before)
            self.said = [*self.said[-1:], entry.req.full_untruncated_fill_ids.tolist()[-60:]] if before else self.said
            scheduler.finish(entry)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "recomputes", "selection"),
    [(1, False, "none"), (4, False, "first_k"), (1, True, "query_seam"), (4, True, "first_k")],
)
def test_long_walk_reaches_everything_and_breaks_nothing(page_size, recomputes, selection):
    walk = Walk(Scheduler(page_size, recomputes, selection=selection, first_k=4, recompute_ratio=0.3), page_size)
    for _ in range(600):
        walk.step()
    wanted = [
        "not kept",
        "copied between chunks",
        "retracted with copies",
        "finished behind copies",
        "generation 1",
        "HostBlockKV",
    ]
    wanted += ["copied at admission", "generation 2"] if selection == "none" else []
    assert all(walk.seen[name] >= 3 for name in wanted), walk.seen
    assert walk.scheduler.continued_tokens > 100
    assert walk.scheduler.named_sources
    assert (walk.scheduler.recomputed_tokens > 50) == recomputes
    assert (walk.scheduler.repaired_after >= 3) == recomputes


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "selection"), [(1, "none"), (4, "first_k")])
def test_long_walk_with_a_store_brings_nothing_of_other_weights_or_tenants_back(page_size, selection):
    shelf = Shelf()
    walk = Walk(Scheduler(page_size, shelf=shelf, selection=selection, first_k=4), page_size)
    for _ in range(500):
        walk.step()
    wanted = ["copied between chunks", "generation 1", "HostBlockKV", "from a store", "restarted", "damaged"]
    assert all(walk.seen[name] >= 3 for name in wanted), walk.seen
    assert len(shelf.spaces) > 1
