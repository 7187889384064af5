"""Any interleaving of what vLLM does to requests, against books of where the K/V of every position come from."""

from __future__ import annotations

import itertools
import random
from importlib import import_module

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stand_ins import BLOCK, Engine, Request, Shelf, ShelfFeed

from kvgraft.config import VLLMConfig
from kvgraft.integrations.vllm.messages import WorkerReport
from kvgraft.integrations.vllm.scheduler import EngineFacts, GraftScheduler
from kvgraft.integrations.vllm.scheduler.requests import VLLMRequest
from kvgraft.reuse.stored import is_stored

SCHEDULER = "kvgraft.integrations.vllm.scheduler"
DOCUMENTS = [random.Random(seed).choices(range(1000), k=70) for seed in range(3)]
CAPACITY, HOST_TOKENS = 1200, 400


def make_graft(load, shelf=None, host_tokens=None, max_num_batched_tokens=None, **options):
    fixed = {"min_run": 16, "min_saved_tokens": 0, "max_generation": 2, "lookup_deadline_ms": 1e9}
    config = VLLMConfig(load=load, **{"selection": "none", **fixed, **options})
    facts = EngineFacts(
        fingerprint="model",
        block_sizes=(BLOCK,),
        hash_block_size=BLOCK,
        window=0,
        capacity_tokens=CAPACITY,
        hidden_size=64,
        output_chunk=8,
        refusal="",
        host_tokens=host_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{SCHEDULER}.graft_scheduler.configured_stores", lambda _: () if shelf is None else (shelf,))
        return GraftScheduler(config, facts)


@pytest.mark.parametrize("is_known", [True, False])
def test_text_that_ends_with_a_token_that_nobody_knows_becomes_no_donor(is_known):
    """An abort while steps are under way: K/V of its last token are captured, and the token has not come back."""
    engine = Engine(make_graft("sync"))
    request = Request("one", DOCUMENTS[0], {"kvgraft": "exact"}, 100)
    engine.add(request)
    while request.num_tokens < 70 + 3 * 8 - (not is_known):
        engine.step(room=True, chunk=400)
    request.computed = 70 + 3 * 8 - 1
    (capture,) = engine.graft.commands(engine.output_of([request])).captures
    assert capture.stop == 70 + 3 * 8
    engine.end(request)
    assert [donor.num_tokens for donor in engine.graft.registry.catalogue] == [70, 24][: 1 + is_known]
    engine.graft.check()
    assert engine.graft.registry.reserved_tokens == 0


def served(load, **options):
    """An engine that has computed a document."""
    engine = Engine(make_graft(load, **options))
    engine.add(Request("donor", DOCUMENTS[0] + [1, 2], {"kvgraft": "exact"}, 1))
    for _ in range(2):
        engine.step(room=True, chunk=400)
    return engine


def fails_once(function):
    calls = itertools.count()
    return lambda *given, **named: 1 / next(calls) and function(*given, **named)


def assert_nothing_is_left(engine):
    while engine.running or engine.waiting:
        engine.step(room=True, chunk=400)
    for _ in range(2):
        engine.step(room=True, chunk=400)
    engine.graft.check()
    assert engine.graft.registry.reserved_tokens == 0
    assert not engine.workers.texts
    assert not engine.workers.unrepaired
    assert not engine.graft._coming._coming
    assert not engine.graft._coming._waits
    assert {donor.donor_id for donor in engine.graft.registry.catalogue} == engine.workers.donors.keys()


def test_copies_that_failed_are_counted_once_for_all_ranks():
    engine = Engine(make_graft("sync"))
    engine.graft.receive(WorkerReport(num_failed_copies=1).joined(WorkerReport(num_failed_copies=2)))
    assert engine.graft.counts.num_errors == 2


@pytest.mark.parametrize("load", ["sync", "async"])
def test_books_that_fail_cost_donors_and_nothing_else(load, monkeypatch):
    """With the outcome of a graft, whose gaps become donors, and with the last chunk of a prompt."""
    engine = served(load)
    monkeypatch.setattr(engine.graft.registry.rules, "replaced", lambda *_: 1 / 0)
    engine.add(Request("one", [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40, None, 60))
    engine.add(Request("two", [*range(8000, 8070)], {"kvgraft": "exact"}, 60))
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 2
    assert len(engine.graft.registry.catalogue) == 1


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("num_sealed", [0, 1])
def test_a_gap_that_cannot_be_registered_leaves_no_room_reserved(load, num_sealed, monkeypatch):
    engine = served(load)
    seal, calls = engine.graft.registry.seal, itertools.count()
    monkeypatch.setattr(
        engine.graft.registry, "seal", lambda *sealed: 1 / (next(calls) != num_sealed) and seal(*sealed)
    )
    document, gap = DOCUMENTS[0], [*range(2000, 2040)]
    engine.add(Request("one", gap + document[:40] + gap[::-1] + document[40:] + [7000] * 40, None, 1))
    assert_nothing_is_left(engine)
    assert next(calls) > num_sealed
    assert engine.graft.counts.num_errors == 1


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_donor_that_no_store_can_be_told_of_is_none(load, monkeypatch):
    """It is in the catalogue by then, and workers would never hear of it: every prompt with its text would fall back."""
    engine = served(load)
    monkeypatch.setattr(engine.graft.registry.stores, "write_of", lambda _: 1 / 0)
    engine.add(Request("one", [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40, None, 60))
    engine.add(Request("two", [*range(8000, 8070)], {"kvgraft": "exact"}, 60))
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors > 1
    assert len(engine.graft.registry.catalogue) == 1


@pytest.mark.parametrize("failing", ["extend", "register"])
def test_prompt_and_answer_that_are_due_at_once_are_both_captured_or_neither(failing, monkeypatch):
    engine = Engine(make_graft("sync"))
    request = Request("one", DOCUMENTS[0], {"kvgraft": "exact"}, 100)
    engine.add(request)
    engine.step(room=True, chunk=0)
    output = engine.output_of([request])
    output.num_scheduled_tokens["one"] = 70 + 8
    registry = engine.graft.registry
    with monkeypatch.context() as patch:
        patch.setattr(registry, failing, lambda *_: 1 / 0)
        commands = engine.graft.commands(output)
    assert not commands.captures
    assert not len(registry.catalogue), "workers were not told of it"
    assert registry.reserved_tokens == 0
    assert engine.graft.counts.num_errors == 1


def test_blocks_that_are_not_known_make_no_donor(monkeypatch):
    engine = Engine(make_graft("sync"))
    engine.add(Request("one", DOCUMENTS[0], {"kvgraft": "exact"}, 1))
    monkeypatch.setattr(VLLMRequest, "blocks_to", lambda *_: 1 / 0)
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 1


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("claims.Claim", "lying_in"),
        ("requests.VLLMRequest", "blocks_to"),
        ("grafts.Grafts", "_stored_donors"),
        ("no_stores.NoStores", "touch"),
    ],
)
def test_a_graft_that_cannot_be_sent_costs_itself_and_nothing_else(load, owner, name, monkeypatch):
    """vLLM has counted its tokens as computed by then: its load fails at once, unless the command is on its way."""
    engine = served(load, selection="first_k")
    where, _, owner = owner.rpartition(".")
    owner = getattr(import_module(f"{SCHEDULER}.{where}"), owner)
    monkeypatch.setattr(owner, name, fails_once(getattr(owner, name)))
    engine.add(Request("one", [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40, None, 4))
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 1


@pytest.mark.parametrize("load", ["sync", "async"])
def test_books_that_cannot_be_verified_at_an_admission_are_one_failure(load, monkeypatch):
    """vLLM counts on the graft by then: its load fails, and neither it nor its outcome is counted once more."""
    engine = served(load, selection="first_k")
    admit = engine.graft.admit

    def admit_in_doubt(*given):
        with monkeypatch.context() as patch:
            patch.setattr(engine.graft, "_require_sound", lambda: 1 / 0)
            admit(*given)

    engine.graft.admit = admit_in_doubt
    engine.add(Request("one", [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40, None, 4))
    engine.step(room=True, chunk=400)
    engine.graft.admit = admit
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 1


@pytest.mark.parametrize("name", ["news", "receive"])
def test_a_store_that_cannot_be_followed_costs_what_it_has_and_nothing_else(name, monkeypatch):
    """No thread can be started for a feed, say."""
    engine = served("sync")
    monkeypatch.setattr(engine.graft.registry.stores, name, fails_once(getattr(engine.graft.registry.stores, name)))
    engine.add(Request("one", [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40, None, 4))
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 1


def test_a_speed_that_cannot_be_measured_costs_nothing(monkeypatch):
    engine = served("sync")
    speed = engine.graft.registry.stores.speed
    monkeypatch.setattr(type(speed), "step_begins", fails_once(type(speed).step_begins))
    engine.add(Request("one", [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40, None, 4))
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 1


@pytest.mark.parametrize("ends", ["waiting", "half-way", "never"])
def test_a_text_replaces_its_beginning_once_it_is_a_donor(ends):
    """Not when it is looked up: a client may give up before, and others need the beginning until then."""
    engine = served("sync")
    engine.cache.clear()  # or only what follows is captured
    (beginning,) = engine.graft.registry.catalogue
    request = Request("longer", [*beginning.token_ids.tolist(), *range(5000, 5100)], {"kvgraft": "exact"}, 1)
    engine.add(request)
    engine.step(room=ends != "waiting", chunk=100)
    assert [donor.num_tokens for donor in engine.graft.registry.catalogue] == [72]
    if ends != "never":
        engine.end(request)
    assert_nothing_is_left(engine)
    assert [donor.num_tokens for donor in engine.graft.registry.catalogue] == [172 if ends == "never" else 72]


def test_a_beginning_that_is_grafted_when_a_text_is_complete_stays():
    engine = served("sync")
    engine.cache.clear()
    (beginning,) = engine.graft.registry.catalogue
    engine.add(Request("longer", [*beginning.token_ids.tolist(), *range(5000, 5100)], {"kvgraft": "exact"}, 1))
    engine.step(room=True, chunk=100)
    engine.graft.registry.catalogue.pin(beginning.donor_id)
    engine.step(room=True, chunk=100)
    assert [donor.num_tokens for donor in engine.graft.registry.catalogue] == [72, 172]
    engine.graft.registry.catalogue.unpin(beginning.donor_id)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("num_opened", [0, 1, 2])
def test_room_that_cannot_be_made_for_a_gap_leaves_none_reserved(num_opened, monkeypatch):
    engine = served("sync")
    engine.add(Request("other", DOCUMENTS[1] + [1, 2], {"kvgraft": "exact"}, 1))
    for _ in range(2):
        engine.step(room=True, chunk=400)
    registry = engine.graft.registry
    make_room, calls = registry._make_room, itertools.count()
    monkeypatch.setattr(registry, "_make_room", lambda count: 1 / (next(calls) != num_opened) and make_room(count))
    gap, tail = list(range(2000, 2040)), list(range(3000, 3040))
    engine.add(Request("grafted", gap + DOCUMENTS[0] + gap[::-1] + DOCUMENTS[1] + tail, {}, 1))
    for _ in range(2):
        engine.step(room=True, chunk=400)
    assert next(calls) > num_opened
    assert engine.graft.counts.num_errors == 1
    assert_nothing_is_left(engine)


def test_a_lookup_that_fails_when_a_request_begins_again_leaves_nothing(monkeypatch):
    """Its graft waits for a repair, and its answer is being captured."""
    engine = served("sync", selection="first_k")
    request = Request("one", [*range(5000, 5060)] + DOCUMENTS[0] + [7000] * 40, None, 40)
    engine.add(request)
    engine.step(room=True, chunk=400)
    assert engine.workers.unrepaired
    engine.preempt(request)
    engine.step(room=True, chunk=400)
    monkeypatch.setattr(engine.graft._pending, "hit_of", lambda *_: 1 / 0)
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 1


def test_nobody_goes_on_from_what_an_aborted_request_left_unrepaired():
    """Its first token is out and its repair comes with the second one, which it does not live to see."""
    engine = served("sync", selection="first_k")
    prompt = [*range(5000, 5060)] + DOCUMENTS[0] + [7000] * 40
    engine.add(first := Request("one", prompt, None, 40))
    engine.step(room=True, chunk=400)
    assert engine.workers.unrepaired
    assert first.num_tokens == len(prompt) + 1
    engine.end(first)
    engine.add(second := Request("two", prompt + [8000] * 5, None, 3))
    engine.step(room=True, chunk=400)
    assert engine.workers.unrepaired.keys() == {second.request_id}
    assert_nothing_is_left(engine)


def test_an_exact_answer_that_begins_again_goes_on_from_no_copies():
    """Another request has its text approximate by now, answer included; the prompt is a number of whole blocks."""
    engine = Engine(graft := make_graft("sync"))
    request = Request("one", [*range(5000, 5020)] + DOCUMENTS[0] + [7000] * 6, None, 90)
    assert request.num_prompt_tokens == 2 * BLOCK
    engine.add(request)
    while request.num_tokens < 3 * BLOCK + 10:
        engine.step(room=True, chunk=400)
    engine.preempt(request)
    engine.waiting.remove(request)
    engine.cache.clear()
    for donor in list(graft.registry.catalogue):
        graft.registry.forget(donor.donor_id)
    others = [
        Request("donor", DOCUMENTS[0] + [1, 2], {"kvgraft": "exact"}, 1),
        twin := Request("twin", request.all_token_ids[: 3 * BLOCK + 1], None, 1),
        Request("beginning", request.all_token_ids[: 2 * BLOCK + 1], {"kvgraft": "exact"}, 1),
    ]
    for other in others:
        engine.add(other)
        while engine.running or engine.waiting:
            engine.step(room=True, chunk=400)
    assert twin.worst_copied
    engine.add(request)
    while engine.running or engine.waiting:
        engine.step(room=True, chunk=400)
        assert not any(truth.depth for truth in request.kv)
    engine.step(room=True, chunk=400)  # workers hear in it what they have as a donor
    for donor in graft.registry.catalogue:
        assert donor.generation >= max(truth.depth for truth in engine.workers.donors[donor.donor_id])


class Machine(RuleBasedStateMachine):
    load = "sync"
    has_store = False

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("kvgraft.integrations.vllm.scheduler.stores.StoreFeed", ShelfFeed)
        shelf = Shelf() if self.has_store else None
        self.engine = Engine(self.make_graft(shelf), shelf)
        self.names = iter(range(10**6))
        for document in range(len(DOCUMENTS)):
            self.add(head=0, order=[(document, 0, 70)], tail=5, mode="exact", answer=1)
        self.run(steps=2, room=True, chunk=400, fate="")

    def make_graft(self, shelf):
        """A policy that chooses, so that grafts are repaired after the first token."""
        return make_graft(self.load, shelf, HOST_TOKENS if shelf else None, selection="first_k")

    @rule(
        head=st.integers(0, 60),
        order=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(40, 70)), min_size=1, max_size=2),
        tail=st.integers(1, 20),
        mode=st.sampled_from(["graft", "graft", "graft", "exact", "off"]),
        answer=st.integers(1, 60),
    )
    def add(self, head, order, tail, mode, answer):
        """A prompt of shared texts behind heads that a few requests have in common."""
        tokens = [5000 + number for number in range(head)]
        for document, first, last in order:
            tokens += DOCUMENTS[document][first:last] + [6000 + first] * (first % 3)
        tokens += [7000 + tail] * tail
        self.ask(tokens, mode, answer)

    def ask(self, tokens, mode, answer):
        self.engine.add(Request(str(next(self.names)), tokens, {"kvgraft": mode}, answer))

    @precondition(lambda self: self.engine.requests)
    @rule(
        data=st.data(),
        share=st.floats(0.3, 1.5),
        tail=st.integers(1, 40),
        mode=st.sampled_from(["graft", "graft", "graft", "exact", "off"]),
        answer=st.integers(1, 60),
    )
    def go_on(self, data, share, tail, mode, answer):
        """The next turn of a conversation, or another one after an edit; maybe before the last answer is complete."""
        before = self.engine.requests[data.draw(st.sampled_from(sorted(self.engine.requests)))]
        kept = before.all_token_ids[: int(share * before.num_tokens)]
        self.ask(kept + [8000 + tail] * tail, mode, answer)

    @rule(
        steps=st.integers(1, 12),
        room=st.sampled_from([True] * 5 + [False]),
        chunk=st.sampled_from([16, 60, 400]),
        fate=st.sampled_from([""] * 8 + ["slow", "fails", "falls back", "loses text"]),
        defers=st.sampled_from([False, False, True]),
    )
    def run(self, steps, room, chunk, fate, defers=False):
        for _ in range(steps):
            self.engine.fate, self.engine.defers = fate, defers
            self.engine.step(room=room, chunk=chunk)
            self.engine.graft.check()

    @precondition(lambda self: any(not request.waits for request in self.engine.running))
    @rule(data=st.data())
    def preempt(self, data):
        self.engine.preempt(data.draw(st.sampled_from([one for one in self.engine.running if not one.waits])))

    @precondition(lambda self: len(self.engine.running) + len(self.engine.waiting) > 2)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.end(data.draw(st.sampled_from([*self.engine.running, *self.engine.waiting])))

    @precondition(lambda self: len(self.engine.cache) > 20)
    @rule(data=st.data())
    def evict_blocks(self, data):
        for _ in range(10):
            self.engine.cache.pop(data.draw(st.sampled_from(list(self.engine.cache))))

    @precondition(lambda self: len(self.engine.graft.registry.catalogue) > 3)
    @rule(data=st.data())
    def evict_donor(self, data):
        registry = self.engine.graft.registry
        free = [donor.donor_id for donor in registry.catalogue if not registry.catalogue.is_pinned(donor.donor_id)]
        if free:
            registry.forget(data.draw(st.sampled_from(free)))

    @rule(kind=st.sampled_from(["nothing"] * 7 + ["silent", "reset", "reset and preempt"]))
    def change_weights(self, kind):
        """In place; then perhaps `reset_prefix_cache(reset_running_requests=..., reset_connector=True)`."""
        engine = self.engine
        if kind == "nothing":
            return
        engine.epoch += 1
        if kind == "silent":
            return
        if kind == "reset and preempt":
            for request in [one for one in engine.running if not one.waits]:
                engine.preempt(request)
        if not engine.running:
            engine.cache.clear()
        engine.graft.reset(prefixes_are_gone=not engine.running)
        assert len(engine.graft.registry.catalogue) == 0

    @precondition(lambda self: self.engine.shelf.spaces)
    @rule(data=st.data())
    def lose_what_is_stored(self, data):
        space = self.engine.shelf.spaces[data.draw(st.sampled_from(sorted(self.engine.shelf.spaces)))]
        for key in data.draw(st.sets(st.sampled_from(sorted(space)), max_size=3)) if space else ():
            del space[key]

    @invariant()
    def books_agree(self):
        engine, registry = self.engine, self.engine.graft.registry
        engine.graft.check()
        for donor in registry.catalogue:
            held = engine.workers.donors.get(donor.donor_id)
            if is_stored(donor):
                assert self.has_store
            if held is None:
                continue  # it is told to workers with the next step, or they lost it
            assert len(held) == donor.num_tokens
            assert donor.generation >= max(truth.depth for truth in held)
            assert min(truth.epoch for truth in held) == max(truth.epoch for truth in held)
            assert held[0].epoch == engine.workers.epoch, "text of two models became a donor"

    def teardown(self):
        engine = self.engine
        for request in [*engine.running, *engine.waiting]:
            engine.end(request)
        engine.fate, engine.defers = "", False
        engine.step(room=True, chunk=400)
        engine.step(room=True, chunk=400)  # workers report in it what the step before began
        assert engine.graft.num_states == 0
        assert not engine.graft.registry._promoting
        self.patch.undo()
        assert engine.graft.registry.reserved_tokens == 0
        engine.graft.check()
        assert not engine.workers.texts
        assert not engine.workers.unrepaired


class AsynchronousMachine(Machine):
    load = "async"


class StoreMachine(Machine):
    load = "auto"
    has_store = True

    @rule()
    def restart(self):
        """All requests end, and another process begins with the same weights and the same store."""
        old = self.engine
        for request in [*old.running, *old.waiting]:
            old.end(request)
        self.engine = Engine(self.make_graft(old.shelf), old.shelf)
        self.engine.epoch = self.engine.workers.epoch = old.epoch
        self.run(steps=2, room=True, chunk=400, fate="")


TestSynchronous = Machine.TestCase
TestAsynchronous = AsynchronousMachine.TestCase
TestWithStore = StoreMachine.TestCase
TestSynchronous.settings = TestAsynchronous.settings = TestWithStore.settings = settings(
    max_examples=30, stateful_step_count=50, deadline=None
)
