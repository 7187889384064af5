"""Donors and texts against a simple book-keeper: never more tokens than fit, and workers hear of everything."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgraft.donors import DonorQuery
from kvgraft.integrations.vllm.scheduler.donor_registry import DonorRegistry
from kvgraft.types import Namespace

CAPACITY, MIN_RUN, MAX_GENERATION = 400, 32, 1
NAMESPACE = Namespace("model")


class Registry(RuleBasedStateMachine):
    """`kept` is what workers hold: tokens by text, then by donor."""

    def __init__(self):
        super().__init__()
        self.registry = DonorRegistry(CAPACITY, min_run=MIN_RUN, max_generation=MAX_GENERATION)
        self.texts = {}
        self.held_texts = {}
        self.held_donors = {}
        self.copies = {}
        self.seed = 0

    def tokens(self, count):
        self.seed += 1
        return np.random.default_rng(self.seed).integers(0, 1 << 30, count).astype(np.int32)

    @rule(start=st.integers(0, 50), length=st.integers(1, 300), generation=st.integers(0, 3))
    def open(self, start, length, generation):
        text = self.registry.open(start, start + length, generation)
        if length < MIN_RUN or generation > MAX_GENERATION:
            assert text is None
        if text is not None:
            self.texts[text.text_id] = text
            self.held_texts[text.text_id] = 0

    @rule(start=st.integers(0, 50))
    def open_output(self, start):
        text = self.registry.open_output(start, 0)
        self.texts[text.text_id] = text
        self.held_texts[text.text_id] = 0

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 64))
    def capture(self, data, count):
        text = self.texts[data.draw(st.sampled_from(sorted(self.texts)))]
        stop = text.next + count
        if stop > text.stop and not self.registry.extend(text, stop):
            return
        text.next = stop
        self.held_texts[text.text_id] = text.next - text.start

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def seal(self, data):
        text = self.texts.pop(data.draw(st.sampled_from(sorted(self.texts))))
        self.registry.seal(NAMESPACE, self.tokens(text.start + max(0, text.next - text.start)), text)

    @precondition(lambda self: any(donor.generation for donor in self.registry.catalogue))
    @rule(data=st.data(), front=st.integers(0, 20), behind=st.integers(0, 20), is_pinned=st.booleans())
    def heal(self, data, front, behind, is_pinned):
        """The text of a donor, or more, is computed behind nothing copied."""
        old = data.draw(st.sampled_from([donor for donor in self.registry.catalogue if donor.generation]))
        tokens = np.concatenate([self.tokens(front), old.token_ids, self.tokens(behind)])
        text = self.registry.open(0, len(tokens), 0)
        if text is None:
            return
        was_there = self.registry.catalogue.get(old.donor_id) is not None  # room may have been made at its cost
        if was_there and is_pinned:
            self.registry.catalogue.pin(old.donor_id)
        self.held_texts[text.text_id] = text.next = text.stop
        self.registry.seal(NAMESPACE, tokens, text)
        if self.copies.get(old.donor_id, 0) < 2:  # of more donors with a text the two newest are found
            assert (self.registry.catalogue.get(old.donor_id) is not None) == (was_there and is_pinned)
        self.copies[old.donor_id] = self.copies.get(old.donor_id, 0) + 1
        if was_there and is_pinned:
            self.registry.catalogue.unpin(old.donor_id)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def abandon(self, data):
        text = self.texts.pop(data.draw(st.sampled_from(sorted(self.texts))))
        self.registry.abandon(text)
        self.registry.abandon(text)

    @precondition(lambda self: len(self.registry.catalogue) > 0)
    @rule(data=st.data())
    def forget(self, data):
        donors = [donor.donor_id for donor in self.registry.catalogue]
        self.registry.forget(data.draw(st.sampled_from(donors)))

    @rule()
    def tell_workers(self):
        seals, discards, drops = self.registry.news
        self.registry.news_were_sent()
        for seal in seals:
            self.held_donors[seal.donor_id] = self.held_texts.pop(seal.text_id)
        for text_id in discards:
            self.held_texts.pop(text_id, None)
        for donor_id in drops:
            self.held_donors.pop(donor_id, None)
        assert self.held_donors == {donor.donor_id: donor.num_tokens for donor in self.registry.catalogue}
        assert sum(self.held_donors.values()) + sum(self.held_texts.values()) <= CAPACITY

    @invariant()
    def holds(self):
        self.registry.check(set(self.texts))


TestRegistry = Registry.TestCase
TestRegistry.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_text_that_is_further_from_exact_replaces_nothing():
    registry = DonorRegistry(CAPACITY, min_run=MIN_RUN, max_generation=MAX_GENERATION)
    tokens = np.arange(100, dtype=np.int32)
    for generation in (0, 1):
        text = registry.open(0, 100, generation)
        text.next = text.stop
        registry.seal(NAMESPACE, tokens, text)
    assert [donor.generation for donor in registry.catalogue] == [0, 1]
    assert registry.num_replaced == 0
    (match,) = registry.catalogue.find(DonorQuery(NAMESPACE, tokens))
    assert registry.catalogue.get(match.donor_id).generation == 0
