"""Any interleaving of what vLLM does to requests, against books of where the K/V of every position come from."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stand_ins import BLOCK, Engine, Request

from kvgraft.config import VLLMConfig
from kvgraft.integrations.vllm.scheduler import EngineFacts, GraftScheduler

DOCUMENTS = [[random.Random(seed).randrange(1000) for _ in range(70)] for seed in range(3)]
CAPACITY = 600


def make_graft(load):
    config = VLLMConfig(
        load=load, selection="none", min_run=16, min_saved_tokens=0, max_generation=2, lookup_deadline_ms=1e9
    )
    facts = EngineFacts(
        fingerprint="model",
        block_sizes=(BLOCK,),
        hash_block_size=BLOCK,
        window=0,
        capacity_tokens=CAPACITY,
        hidden_size=64,
        output_chunk=8,
        reports_failed_loads=True,
        refusal="",
    )
    return GraftScheduler(config, facts)


class Machine(RuleBasedStateMachine):
    load = "sync"

    def __init__(self):
        super().__init__()
        self.engine = Engine(make_graft(self.load))
        self.names = iter(range(10**6))

    @rule(
        head=st.integers(0, 40),
        order=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(40, 70)), min_size=1, max_size=3),
        tail=st.integers(1, 20),
        mode=st.sampled_from(["graft", "graft", "graft", "exact", "off"]),
        answer=st.integers(1, 24),
    )
    def add(self, head, order, tail, mode, answer):
        """A prompt of shared texts behind heads that a few requests have in common."""
        tokens = [5000 + number for number in range(head)]
        for document, first, last in order:
            tokens += DOCUMENTS[document][first:last] + [6000 + first] * (first % 3)
        tokens += [7000 + tail] * tail
        name = str(next(self.names))
        self.engine.add(Request(name, tokens, {"kvgraft": mode}, answer))

    @rule(
        steps=st.integers(1, 6),
        room=st.sampled_from([True, True, True, False]),
        chunk=st.sampled_from([7, 16, 60, 400]),
        fate=st.sampled_from(["", "", "", "", "slow", "fails", "falls back", "loses text"]),
    )
    def run(self, steps, room, chunk, fate):
        for _ in range(steps):
            self.engine.fate = fate
            self.engine.step(room=room, chunk=chunk)
            self.engine.graft.check()

    @precondition(lambda self: any(not request.waits for request in self.engine.running))
    @rule(data=st.data())
    def preempt(self, data):
        self.engine.preempt(data.draw(st.sampled_from([one for one in self.engine.running if not one.waits])))

    @precondition(lambda self: self.engine.running or self.engine.waiting)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.end(data.draw(st.sampled_from([*self.engine.running, *self.engine.waiting])))

    @precondition(lambda self: self.engine.cache)
    @rule(data=st.data())
    def evict_blocks(self, data):
        self.engine.cache.pop(data.draw(st.sampled_from(sorted(self.engine.cache))))

    @precondition(lambda self: len(self.engine.graft.registry.catalogue))
    @rule(data=st.data())
    def evict_donor(self, data):
        registry = self.engine.graft.registry
        free = [donor.donor_id for donor in registry.catalogue if not registry.catalogue.is_pinned(donor.donor_id)]
        if free:
            registry.forget(data.draw(st.sampled_from(free)))

    @rule(preempt=st.booleans())
    def change_weights_and_reset(self, preempt):
        """As `reset_prefix_cache(reset_running_requests=..., reset_connector=True)` behind an update."""
        engine = self.engine
        if preempt:
            for request in [one for one in engine.running if not one.waits]:
                engine.preempt(request)
        engine.epoch += 1
        if not engine.running:
            engine.cache.clear()
        engine.graft.reset(prefixes_are_gone=not engine.running)
        assert len(engine.graft.registry.catalogue) == 0

    @rule()
    def change_weights_silently(self):
        self.engine.epoch += 1

    @invariant()
    def books_agree(self):
        engine, registry = self.engine, self.engine.graft.registry
        engine.graft.check()
        for donor in registry.catalogue:
            held = engine.workers.donors.get(donor.donor_id)
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
        engine.fate = ""
        engine.step(room=True, chunk=400)
        assert engine.graft.num_states == 0
        assert engine.graft.registry.reserved_tokens == 0
        engine.graft.check()
        assert not engine.workers.texts


class AsynchronousMachine(Machine):
    load = "async"


TestSynchronous = Machine.TestCase
TestAsynchronous = AsynchronousMachine.TestCase
for case in (TestSynchronous, TestAsynchronous):
    case.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
