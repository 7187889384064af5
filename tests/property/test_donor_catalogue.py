"""DonorCatalogue against a list of texts: whatever is done in whatever order, matches are true and runs are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvgraft.donors import GRAM_TOKENS, GUARANTEED_RUN, CostModel, DonorCatalogue, DonorQuery, plan_graft
from kvgraft.errors import CapacityError
from kvgraft.types import GraftPlan, Namespace

CAPACITY = 1_500
NAMESPACES = [Namespace("m"), Namespace("m", tenant_salt="other")]


class CatalogueMachine(RuleBasedStateMachine):
    """Texts are made of a few segments, so that they share runs of all lengths at all offsets."""

    vocabulary = 10_000

    @initialize(seed=st.integers(0, 2**32 - 1))
    def prepare(self, seed):
        self.rng = np.random.default_rng(seed)
        self.catalogue = DonorCatalogue(CAPACITY, secret=self.rng.bytes(32))
        self.model = {}
        self.pins = {}
        self.seen = set()
        self.was_crowded = self.may_miss = False
        """A donor that leaves, or is of too high a generation, may be the one that common passages lead to."""
        self.segments = [
            self.rng.integers(0, self.vocabulary, int(self.rng.integers(1, 120))).astype(np.int64) for _ in range(8)
        ]
        for _ in range(3):
            self.add(self.rng.integers(0, 8, 3).tolist(), NAMESPACES[0], 0)

    def text(self, parts):
        return np.concatenate([self.segments[i] for i in parts])

    parts = st.lists(st.integers(0, 7), min_size=1, max_size=6)
    namespaces = st.sampled_from(NAMESPACES)

    def pick(self, number):
        return sorted(self.model)[number % len(self.model)]

    def forget(self, donors):
        self.may_miss |= bool(donors) and self.was_crowded
        for donor in donors:
            assert not self.pins.pop(donor.donor_id, 0)
            assert self.model.pop(donor.donor_id) is donor

    @rule(parts=parts, namespace=namespaces, generation=st.integers(0, 3))
    def register(self, parts, namespace, generation):
        self.add(parts, namespace, generation)

    def add(self, parts, namespace, generation):
        """Add, unless pinned donors leave no room."""
        text = self.text(parts)
        pinned = sum(self.model[i].num_tokens for i in self.pins)
        if len(text) > CAPACITY - pinned:
            with pytest.raises(CapacityError):
                self.catalogue.add(namespace, text, None)
            return
        order = [donor.donor_id for donor in self.catalogue.victims()]
        donor, evicted = self.catalogue.add(namespace, text, object(), generation=generation)
        if len(text) < GRAM_TOKENS:
            assert donor is None
            assert evicted == ()
            return
        assert [gone.donor_id for gone in evicted] == order[: len(evicted)]
        self.forget(evicted)
        assert donor.donor_id not in self.seen
        assert donor.token_ids.tolist() == text.tolist()
        self.seen.add(donor.donor_id)
        self.model[donor.donor_id] = donor

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def remove(self, number):
        donor_id = self.pick(number)
        self.pins.pop(donor_id, None)
        self.may_miss |= self.was_crowded
        assert self.catalogue.remove(donor_id) is self.model.pop(donor_id)
        assert self.catalogue.get(donor_id) is None

    @rule(num_tokens=st.integers(0, 400))
    def evict(self, num_tokens):
        order = [donor.donor_id for donor in self.catalogue.victims()]
        evicted = self.catalogue.evict(num_tokens)
        freed = sum(donor.num_tokens for donor in evicted)
        assert [donor.donor_id for donor in evicted] == order[: len(evicted)]
        assert freed >= num_tokens or len(evicted) == len(order)
        assert not evicted or freed - evicted[-1].num_tokens < num_tokens
        self.forget(evicted)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def pin(self, number):
        donor_id = self.pick(number)
        self.catalogue.pin(donor_id)
        self.pins[donor_id] = self.pins.get(donor_id, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 99))
    def unpin(self, number):
        donor_id = sorted(self.pins)[number % len(self.pins)]
        self.catalogue.unpin(donor_id)
        self.pins[donor_id] -= 1
        if not self.pins[donor_id]:
            del self.pins[donor_id]

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99), num_tokens=st.integers(1, 500))
    def hit(self, number, num_tokens):
        self.catalogue.record_hit(self.pick(number), num_tokens)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def rebind(self, number):
        donor_id = self.pick(number)
        handle = object()
        self.catalogue.rebind(donor_id, handle)
        self.model[donor_id] = self.catalogue.get(donor_id)
        assert self.model[donor_id].kv is handle

    @precondition(lambda self: len(self.model) > 5)
    @rule()
    def reset(self):
        assert {donor.donor_id for donor in self.catalogue.reset()} == set(self.model)
        self.model.clear()
        self.pins.clear()

    @rule(parts=parts, namespace=namespaces, start=st.integers(0, 80), limit=st.sampled_from([None, 0, 1]))
    def find(self, parts, namespace, start, limit):
        prompt = self.text(parts)
        start = min(start, len(prompt))
        admitted = [
            donor
            for donor in self.model.values()
            if donor.namespace == namespace and (limit is None or donor.generation <= limit)
        ]
        matches = self.catalogue.find(DonorQuery(namespace, prompt, start=start, max_generation=limit))
        self.check_matches(prompt, matches, start, admitted)
        is_hidden = self.was_crowded and limit is not None
        if not self.catalogue.finder.num_displaced and not self.may_miss and not is_hidden:
            covered = {i for match in matches for i in range(match.target_start, match.target_end)}
            assert expected_positions(prompt, start, admitted) <= covered
        self.check_plan(prompt, start, matches)

    def check_matches(self, prompt, matches, start, admitted):
        end = start
        for match in matches:
            assert match.target_start >= end
            assert match.length >= GRAM_TOKENS
            end = match.target_end
            donor = self.model[match.donor_id]
            assert donor in admitted
            copied = donor.token_ids[match.donor_start : match.donor_start + match.length]
            assert np.array_equal(copied, prompt[match.target_start : match.target_end])
        assert end <= len(prompt)

    def check_plan(self, prompt, start, matches):
        plan = plan_graft(len(prompt), start, matches, CostModel())
        if isinstance(plan, GraftPlan):
            reused = {i for span in plan.spans for i in range(span.target_start, span.target_end)}
            assert plan.compute.tolist() == sorted(set(range(start, len(prompt))) - reused)
            assert plan.compute[-1] == len(prompt) - 1

    @invariant()
    def agrees_with_model(self):
        if not hasattr(self, "catalogue"):
            return
        self.catalogue.check()
        self.was_crowded |= len(self.catalogue.finder.passages) > 0
        assert {donor.donor_id: donor for donor in self.catalogue} == self.model
        assert self.catalogue.num_tokens == sum(donor.num_tokens for donor in self.model.values()) <= CAPACITY
        assert {i for i in self.model if self.catalogue.is_pinned(i)} == set(self.pins)


def expected_positions(prompt, start, donors):
    """Positions of all runs of `GUARANTEED_RUN` tokens behind `start` that a donor has."""
    grams = {
        donor.token_ids[i : i + GUARANTEED_RUN].tobytes()
        for donor in donors
        for i in range(donor.num_tokens - GUARANTEED_RUN + 1)
    }
    text = prompt.astype(np.int32)
    return {
        i + j
        for i in range(start, len(prompt) - GUARANTEED_RUN + 1)
        if text[i : i + GUARANTEED_RUN].tobytes() in grams
        for j in range(GUARANTEED_RUN)
    }


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 10_000])
def test_catalogue_agrees_with_a_list_of_texts(vocabulary):
    machine = type(f"Vocabulary{vocabulary}", (CatalogueMachine,), {"vocabulary": vocabulary})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
