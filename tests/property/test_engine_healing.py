"""Healing at random points between and in requests: what is kept as exact is exact, and nothing is held between pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.support.drawn_time import DrawnTimeMachine
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.config import EngineConfig
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.idle import healing
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

NUM_SLOTS = 600
LAYERS = {"gemma3_text": {"num_hidden_layers": 6}}


class EngineHealingMachine(DrawnTimeMachine):
    """Requests of a few documents in a pool that is too small for them; steps and pieces in any order."""

    @initialize(
        seed=st.integers(0, 2**31),
        family=st.sampled_from(["llama", "gemma3_text"]),
        page_size=st.sampled_from([1, 16]),
        heal=st.sampled_from(["idle", "always"]),
        most_rows=st.sampled_from([1, 24, 512]),
        host_bytes=st.sampled_from([0, 150_000, 10_000_000]),
    )
    def start(self, seed, family, page_size, heal, most_rows, host_bytes):  # noqa: PLR0917
        self.most_rows, healing.MOST_ROWS = healing.MOST_ROWS, most_rows
        self.rng = np.random.default_rng(seed)
        self.draw_time(seed)
        config = EngineConfig(
            repair_below_margin=0,
            num_slots=NUM_SLOTS,
            host_bytes=host_bytes,
            page_size=page_size,
            heal=heal,
            max_rows=48,
            donor_tokens=1 << 13,
            max_running=4,
            hybrid_kvcache_ratio=0.8,
        )
        self.engine = Engine(adopt_model(family, tiny_model(family, **LAYERS.get(family, {})), None), config)
        self.documents = [self.rng.integers(3, VOCABULARY, int(self.rng.integers(80, 120))) for _ in range(4)]
        self.texts = []
        self.running = {}
        for number in range(len(self.documents)):  # prompts that quote them are grafted from now on
            self.ask([number], 0, 1, "graft", "", 8)
        self.ask([0, 1], 9, 6, "graft", "", 2)

    def teardown(self):
        try:
            super().teardown()
        finally:
            healing.MOST_ROWS = getattr(self, "most_rows", healing.MOST_ROWS)

    chosen = st.lists(st.integers(0, 3), min_size=1, max_size=2)

    @rule(
        chosen=chosen,
        new=st.integers(0, 30),
        count=st.integers(1, 12),
        reuse=st.sampled_from(["graft", "graft", "exact", "off"]),
        salt=st.sampled_from(["", "", "", "x"]),
        steps=st.integers(0, 12),
    )
    def ask(self, chosen, new, count, reuse, salt, steps):  # noqa: PLR0917 - hypothesis passes by keyword
        """Take a request and run some steps: one rule, because hypothesis leaves rules out of whole examples."""
        parts = [self.rng.integers(3, VOCABULARY, new), *(self.documents[i] for i in chosen)]
        prompt = np.concatenate([*parts, self.rng.integers(3, VOCABULARY, 20)])[:280]
        sampling = SamplingParams(count, ignore_eos=True)
        request = self.engine.builder.build(prompt, RequestOptions(sampling, reuse, cache_salt=salt))
        self.submit(request)
        self.running[request.request_id] = request
        self.step(steps)

    @rule(again=st.integers(0, 30))
    def ask_again(self, again):
        """A text that was asked for, with its answer: what is healed is used."""
        if self.texts:
            namespace, text = self.texts[again % len(self.texts)]
            request = self.engine.builder.build(
                text, RequestOptions(SamplingParams(2, ignore_eos=True), cache_salt=namespace.tenant_salt)
            )
            self.submit(request)
            self.running[request.request_id] = request

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            if self.engine.has_work:
                self.take(self.engine.step())
                self.engine.check()

    @rule()
    def run_dry(self):
        for _ in range(2_000):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.running
        assert self.engine.space.usage().request == 0

    @rule(pieces=st.integers(1, 8))
    def heal(self, pieces):
        for _ in range(pieces):
            held = self.engine.space.usage().request
            self.engine.heal_step()
            assert self.engine.space.usage().request == held
            self.engine.check()

    @rule()
    def heal_to_the_end(self):
        if not self.engine.has_work:
            while self.engine.heal_step():
                pass
            assert not self.engine.healer.has_work

    @rule(number=st.integers(0, 10), kind=st.sampled_from(["cancel", "cancel", "forget"]))
    def disturb(self, number, kind):
        """Cancel a request, or forget everything that is cached."""
        if kind == "cancel" and self.running:
            name = sorted(self.running)[number % len(self.running)]
            self.engine.cancel(name)
            del self.running[name]
        elif kind == "forget":
            self.engine.reset()
            assert not self.engine.healer.has_work

    def take(self, events):
        for event in events:
            assert event.error is None
            output = event.part.output
            if output is not None:
                request = self.running.pop(event.request_id)
                text = np.concatenate([output.prompt_token_ids, np.asarray(output.token_ids[:-1], np.int64)])
                self.texts.append((request.namespace, text))

    @invariant()
    def what_is_exact_is_exact(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        assert self.engine.manager.num_errors == 0
        assert not self.engine.healer.dropped["error"]
        for namespace, text in self.texts[-2:]:
            assert_prefix_is_exact(self.engine.adapter, self.engine.space, namespace, text)
        known = [text for _, text in self.texts] + [request.token_ids for request in self.running.values()]
        assert_donors_are_exact(self.engine.adapter, self.engine.space, known, last=2)


EngineHealingMachine.TestCase.settings = settings(max_examples=4, stateful_step_count=20, deadline=None)
TestEngineHealing = EngineHealingMachine.TestCase
