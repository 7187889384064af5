"""Which texts a healer knows of, from the events that an announcer writes, and which of them it names first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgraft.donors import DonorCatalogue
from kvgraft.donors.front import front_digest
from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvgraft.heal import Texts
from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.types import Namespace

MODEL = Namespace("model")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class World:
    """A catalogue of an engine, its announcer and a listener."""

    def __init__(self, max_tokens=4_000):
        self.clock = Clock()
        self.catalogue = DonorCatalogue(4_000)
        self.texts = Texts(max_tokens=max_tokens, clock=self.clock)
        self.events = []
        self.catalogue.watch(DonorAnnouncer(self.hear, MODEL, sends_fronts=True))

    def hear(self, event):
        self.events.append(event)
        self.texts.apply("engine", [event])

    def add(self, tokens, generation=1, namespace=MODEL):
        self.clock.now += 1
        return self.catalogue.add(namespace, tokens, None, generation=generation).donor

    def compute(self, text, start, generation=1, namespace=MODEL):
        """A text that a request computed from `start` on."""
        self.clock.now += 1
        front = front_digest(namespace.key, text[:start])
        place = {"generation": generation, "start_position": start, "front": front, "before": text[:start]}
        return self.catalogue.add(namespace, text[start:], None, **place).donor

    def session(self, seed, turns=1, copied=300):
        """A session's whole text, of which a document was copied and each turn adds 100 tokens."""
        text = tokens(seed, copied)
        for turn in range(turns):
            longer = np.concatenate([text, tokens(1_000 * seed + turn, 100)])
            self.compute(longer, len(text))
            text = longer
        return text


def tokens(seed, length=100):
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


@pytest.fixture
def world():
    world = World()
    yield world
    world.texts.check()


def hottest(world):
    text = world.texts.hottest()
    return None if text is None else text.prompt.tolist()


def test_text_of_generation_0_needs_nothing(world):
    assert world.texts.hottest() is None
    world.add(tokens(1), generation=0)
    assert world.texts.hottest() is None
    assert world.texts.counts() == (0, 0, 1, 0)


def test_a_text_is_named_until_it_is_done_or_gone(world):
    donor = world.add(tokens(1))
    assert hottest(world) == tokens(1).tolist()
    assert hottest(world) == tokens(1).tolist()
    world.catalogue.remove(donor.donor_id)
    assert world.texts.hottest() is None
    world.add(tokens(2))
    world.texts.done(world.texts.hottest())
    assert world.texts.hottest() is None
    assert world.texts.counts().open == 0


def test_high_generations_and_what_was_seen_often_come_first_and_then_the_latest(world):
    first, second, third = tokens(1), tokens(2), tokens(3)
    world.add(first)
    world.add(second)
    assert hottest(world) == second.tolist()
    world.catalogue.remove(world.add(first).donor_id)  # once more, while its first donor stays
    assert hottest(world) == second.tolist(), "what is counted is counted for the next announcement"
    again = world.add(first)
    assert hottest(world) == first.tolist()
    world.catalogue.remove(again.donor_id)
    world.add(third, generation=2)
    world.add(tokens(4))
    assert hottest(world) == third.tolist()


def test_text_that_is_exact_elsewhere_is_passed_over(world):
    world.add(tokens(1))
    world.add(np.concatenate([tokens(5, 30), tokens(1), tokens(6, 30)]), generation=0)
    assert world.texts.hottest() is None
    world.add(tokens(2))
    world.add(tokens(2)[:60], generation=0)
    assert hottest(world) == tokens(2).tolist(), "half of it is not all of it"


def test_a_text_that_rests_stays_open_while_the_next_is_named(world):
    world.add(tokens(1))
    world.add(tokens(2))
    resting = world.texts.hottest()
    text = world.texts.hottest(lambda text: text.name == resting.name)
    assert text.token_ids.tolist() == tokens(1).tolist()
    assert world.texts.hottest(lambda _: True) is None
    assert world.texts.counts().open == 2


def test_text_of_tenants_and_adapters_is_counted_and_never_named(world):
    salted = world.add(tokens(1), namespace=Namespace("model", "", "salt"))
    world.add(tokens(2), namespace=Namespace("model", "adapter"))
    world.add(tokens(3), generation=0, namespace=Namespace("model", "", "salt"))
    assert world.texts.hottest() is None
    assert world.texts.counts().private == 2
    world.catalogue.remove(salted.donor_id)
    assert world.texts.counts().private == 1


def test_a_salted_text_does_not_make_that_of_everyone_exact(world):
    world.add(tokens(1), generation=0, namespace=Namespace("model", "", "salt"))
    world.add(tokens(1))
    assert hottest(world) == tokens(1).tolist()


def test_pages_are_no_texts(world):
    world.texts.apply("engine", [BlockStored((1, 2), None, tuple(range(32)), 16), BlockRemoved((1,))])
    assert world.texts.counts() == (0, 0, 0, 2)


def test_everything_is_forgotten_where_the_engine_forgets_or_events_are_lost(world):
    for forget in (
        lambda: world.texts.apply("engine", [AllBlocksCleared()]),
        lambda: world.texts.apply("engine", [], forget=True),
        world.catalogue.reset,
    ):
        world.add(tokens(1))
        world.add(tokens(2), namespace=Namespace("model", "", "salt"))
        forget()
        assert world.texts.hottest() is None
        assert world.texts.counts()[:2] == (0, 0)
        world.texts.check()


def test_an_event_that_cannot_be_applied_costs_what_is_known_and_no_more(world, caplog):
    world.add(tokens(1))
    world.texts.apply("engine", [object()])
    assert "what is known of it is forgotten" in caplog.text
    assert world.texts.hottest() is None
    world.add(tokens(2))
    assert hottest(world) == tokens(2).tolist()


def test_a_text_that_was_exact_is_named_when_the_exact_one_has_gone(world):
    world.add(tokens(1), generation=0)
    world.add(tokens(1))
    assert world.texts.hottest() is None
    world.catalogue.remove(next(donor.donor_id for donor in world.catalogue if not donor.generation))
    assert hottest(world) == tokens(1).tolist()


def test_what_does_not_fit_is_forgotten():
    world = World(max_tokens=256)
    for seed in range(4):
        world.add(tokens(seed))
        world.texts.check()
    assert world.texts.counts().open == 2
    world.add(tokens(9, 300))
    world.texts.check()
    for donor in list(world.catalogue):
        world.catalogue.remove(donor.donor_id)
    assert world.texts.counts().open == 0
    world.texts.check()


def test_a_session_is_computed_in_its_place_from_its_beginning_on(world):
    text = world.session(1)
    named = world.texts.hottest()
    assert named.prompt.tolist() == text.tolist()
    assert named.token_ids.tolist() == text[300:].tolist()
    assert named.is_in_place


def test_the_end_of_a_session_stands_for_all_of_it(world):
    text = world.session(1, turns=4)
    assert hottest(world) == text.tolist()
    world.compute(text, 300, generation=0)
    assert world.texts.hottest() is None, "what lies in it is exact in its place by now"


def test_the_session_that_was_answered_last_comes_first_and_sessions_before_other_texts(world):
    for _ in range(3):
        world.catalogue.remove(world.add(tokens(90), generation=2).donor_id)
    world.add(tokens(90), generation=2)
    first, second = world.session(1), world.session(2)
    assert hottest(world) == second.tolist()
    longer = np.concatenate([first, tokens(91)])
    world.compute(longer, len(first))
    named = []
    while (text := world.texts.hottest()) is not None:
        named.append(text.prompt.tolist())
        world.texts.done(text)
    assert named == [longer.tolist(), second.tolist(), first.tolist(), tokens(90).tolist()]


def test_what_was_computed_with_the_end_of_a_session_is_not_named_though_the_engine_has_not_said_so_yet(world):
    world.session(1, turns=3)
    other = world.session(2)
    world.texts.healed(world.texts.hottest())
    assert hottest(world) != other.tolist()
    world.texts.healed(world.texts.hottest())
    assert world.texts.hottest() is None


def test_while_the_end_of_a_session_rests_what_is_before_it_is_named(world):
    """A long prompt that is interrupted each time becomes shorter by what its beginning has left."""
    text = world.session(1, turns=3)
    tip = world.texts.hottest()
    before = world.texts.hottest(lambda each: each.name == tip.name)
    assert before.prompt.tolist() == text[:-100].tolist()


def test_a_session_that_was_edited_has_two_ends(world):
    text = world.session(1, turns=3)
    edited = np.concatenate([text[:350], tokens(7, 200)])
    world.compute(edited, 350)
    named = world.texts.hottest()
    assert named.prompt.tolist() == edited.tolist()
    world.texts.done(named)
    assert hottest(world) == text.tolist()


def test_a_text_that_is_exact_elsewhere_is_not_exact_in_its_place(world):
    """The next turn needs what stands at its own front."""
    text = world.session(1)
    world.add(text[300:], generation=0)
    assert hottest(world) == text.tolist()


def test_of_a_text_whose_beginning_is_not_known_the_text_alone_is_named(world):
    text = world.session(1, copied=600)
    late = Texts(clock=world.clock)
    longer = np.concatenate([text, tokens(5, 100)])
    world.events.clear()
    world.compute(longer, len(text))
    late.apply("engine", world.events)
    named = late.hottest()
    assert (named.prompt.tolist(), named.is_in_place) == (longer[len(text) :].tolist(), False)
    late.check()


def test_of_a_session_of_a_tenant_nothing_is_sent(world):
    text = np.concatenate([tokens(1, 300), tokens(2)])
    world.compute(text, 300, namespace=Namespace("model", "", "salt"))
    assert world.texts.hottest() is None
    assert world.texts.counts().private == 1
    assert not any(str(key).startswith("before:") for event in world.events for key in event.extra_keys[0])


def test_beginnings_that_do_not_fit_are_forgotten():
    """The text alone is computed then, as without them."""
    world = World(max_tokens=1_024)
    world.session(1, copied=1_500)
    named = world.texts.hottest()
    assert (len(named.prompt), named.is_in_place) == (100, False)
    world.texts.check()


class Machine(RuleBasedStateMachine):
    """What is named is held, approximate and of nobody in particular; what is left over is exact or done."""

    def __init__(self):
        super().__init__()
        self.world = World()
        self.done = []

    @rule(seed=st.integers(0, 4), generation=st.integers(0, 2), salt=st.sampled_from(["", "", "salt"]))
    def add(self, seed, generation, salt):
        """Engines hold no text twice that is equal in all of this."""
        namespace = Namespace("model", "", salt)
        held = [d for d in self.world.catalogue if (d.namespace, d.generation) == (namespace, generation)]
        if not any(np.array_equal(donor.token_ids, tokens(seed)) for donor in held):
            self.world.add(tokens(seed), generation, namespace)

    @rule(seed=st.integers(0, 2), turns=st.integers(1, 3), generation=st.integers(0, 2))
    def go_on(self, seed, turns, generation):
        text = np.concatenate([tokens(50 + seed, 300 if seed else 30), *(tokens(60 + turn) for turn in range(turns))])
        held = [d for d in self.world.catalogue if (d.namespace, d.generation) == (MODEL, generation)]
        if not any(np.array_equal(donor.token_ids, text[-100:]) for donor in held):
            self.world.compute(text, len(text) - 100, generation)

    @precondition(lambda self: len(self.world.catalogue) > 0)
    @rule(data=st.data())
    def remove(self, data):
        self.world.catalogue.remove(data.draw(st.sampled_from([donor.donor_id for donor in self.world.catalogue])))

    @rule()
    def lose(self):
        """The healer forgets; it does not know what is not announced again."""
        self.world.texts.apply("engine", [], forget=True)
        self.world.catalogue.reset()

    @rule()
    def heal(self):
        text = self.world.texts.hottest()
        mine = [donor for donor in self.world.catalogue if not donor.namespace.tenant_salt]
        exact = {donor.token_ids.tobytes() for donor in mine if not donor.generation}
        if text is None:
            left = {donor.token_ids.tobytes() for donor in mine if donor.generation}
            assert left <= exact | set(self.done)
            return
        raw = text.token_ids.tobytes()
        if text.is_in_place:  # what is exact elsewhere is no prefix of the session
            front = front_digest(MODEL.key, text.prompt[: -len(text.token_ids)])
            exact = {d.token_ids.tobytes() for d in mine if not d.generation and d.front == front}
        assert raw not in exact
        assert raw in {donor.token_ids.tobytes() for donor in mine if donor.generation == text.generation}
        self.done.append(raw)
        self.world.texts.done(text)

    @invariant()
    def holds(self):
        self.world.texts.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
