"""A thread embeds; questions are answered from what is ready, and never with what is gone."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.unit.semantic.embedders import PATIENCE_S, BagEmbedder

from kvgraft.semantic import Discovery
from kvgraft.semantic.ready import BLOCK_TOKENS

CATS, DOGS, BIRDS = (np.arange(first, first + 10) for first in (1, 20, 40))


@pytest.fixture
def embedder():
    return BagEmbedder()


@pytest.fixture
def discovery(embedder):
    made = Discovery(embedder)
    yield made
    embedder.go.set()
    made.close()
    made.check()


def keys(found):
    return None if found is None else [neighbour.key for neighbour in found]


def stored(discovery, **texts):
    for key, text in texts.items():
        assert discovery.add("n", key, text)
    assert discovery.wait(PATIENCE_S)


def asked(discovery, text, namespace="n", **options):
    """Ask twice: the first time starts what is not ready."""
    discovery.ready(namespace, text, **options)
    assert discovery.wait(PATIENCE_S)
    return discovery.ready(namespace, text, **options)


def test_the_second_question_is_answered(discovery):
    stored(discovery, cats=CATS, dogs=DOGS)
    assert discovery.ready("n", CATS[::-1]) is None
    assert discovery.wait(PATIENCE_S)
    (nearest,) = discovery.ready("n", CATS[::-1], min_similarity=0.5)
    assert (nearest.key, nearest.similarity) == ("cats", pytest.approx(1))
    assert discovery.counters.answered == discovery.counters.not_ready == 1


def test_a_quick_embedder_answers_at_once():
    discovery = Discovery(BagEmbedder(quick=True))
    stored(discovery, cats=CATS)
    assert keys(discovery.ready("n", CATS[::-1], min_similarity=0.5)) == ["cats"]
    discovery.close()


def test_nobody_waits_for_the_embedder(discovery, embedder):
    embedder.go.clear()
    assert discovery.add("n", "cats", CATS)
    assert embedder.begun.acquire(timeout=PATIENCE_S)
    assert discovery.ready("n", DOGS) is None
    discovery.start("n", BIRDS)
    discovery.remove("n", "cats")
    assert not discovery.wait(0)
    embedder.go.set()
    assert discovery.wait(PATIENCE_S)
    assert discovery.ready("n", BIRDS) == []


def test_prompts_go_before_texts(discovery, embedder):
    embedder.go.clear()
    discovery.add("n", "under way", CATS)
    assert embedder.begun.acquire(timeout=PATIENCE_S)
    discovery.add("n", "dogs", DOGS)
    discovery.start("n", BIRDS)
    embedder.go.set()
    assert discovery.wait(PATIENCE_S)
    assert embedder.seen == [CATS.tolist(), BIRDS.tolist(), DOGS.tolist()]


def test_what_was_started_is_embedded_once(discovery, embedder):
    embedder.go.clear()
    for _ in range(3):
        discovery.start("n", CATS)
        assert discovery.ready("n", CATS.copy()) is None
    embedder.go.set()
    stored(discovery, cats=CATS)
    assert keys(discovery.ready("n", CATS)) == ["cats"]
    assert len(embedder.seen) == discovery.counters.embedded == 1


def test_a_conversation_is_answered_by_its_beginning(discovery):
    rng = np.random.default_rng(0)
    turns = [rng.integers(20, 40, 2 * BLOCK_TOKENS + 10), rng.integers(20, 40, 300)]
    first, second = turns[0], np.concatenate(turns)
    stored(discovery, cats=CATS, dogs=DOGS)
    assert discovery.ready("n", first) is None
    assert discovery.wait(PATIENCE_S)
    assert keys(discovery.ready("n", second, min_similarity=0.1)) == ["dogs"]
    assert discovery.wait(PATIENCE_S)
    other = np.concatenate([CATS, second])
    assert discovery.ready("n", other) is None, "this one begins otherwise"


def test_less_than_half_of_a_text_does_not_stand_for_it(discovery):
    beginning = np.random.default_rng(0).integers(20, 40, BLOCK_TOKENS)
    asked(discovery, beginning)
    assert discovery.ready("n", np.concatenate([beginning, np.full(2 * BLOCK_TOKENS, 3)])) is None


def test_namespaces_never_meet(discovery):
    stored(discovery, cats=CATS)
    assert asked(discovery, CATS, "other") == []
    discovery.remove("other", "cats")
    assert keys(asked(discovery, CATS)) == ["cats"]


def test_what_was_removed_is_no_answer_not_even_while_the_thread_is_busy(discovery, embedder):
    stored(discovery, cats=CATS, more_cats=np.append(CATS, 60))
    assert keys(asked(discovery, CATS, min_similarity=0.5)) == ["cats", "more_cats"]
    embedder.go.clear()
    discovery.start("n", BIRDS)
    discovery.remove("n", "cats")
    assert keys(discovery.ready("n", CATS, min_similarity=0.5)) == ["more_cats"]
    assert discovery.text("n", "cats") is None
    assert len(discovery) == 1


def test_what_is_removed_while_it_is_embedded_never_arrives(discovery, embedder):
    embedder.go.clear()
    discovery.add("n", "cats", CATS)
    assert embedder.begun.acquire(timeout=PATIENCE_S)
    discovery.remove("n", "cats")
    embedder.go.set()
    assert asked(discovery, CATS) == []


def test_a_key_that_is_added_again_means_the_newer_text(discovery):
    stored(discovery, pet=CATS)
    stored(discovery, pet=DOGS)
    assert keys(asked(discovery, DOGS, min_similarity=0.5)) == ["pet"]
    assert asked(discovery, CATS, min_similarity=0.5) == []
    np.testing.assert_array_equal(discovery.text("n", "pet"), DOGS)


def test_nothing_of_before_a_reset_comes_back(discovery, embedder):
    stored(discovery, dogs=DOGS)
    embedder.go.clear()
    discovery.add("n", "cats", CATS)
    discovery.start("n", BIRDS)
    assert embedder.begun.acquire(timeout=PATIENCE_S)
    discovery.reset()
    embedder.go.set()
    assert discovery.wait(PATIENCE_S)
    assert len(discovery) == 0
    for text in (CATS, DOGS, BIRDS):
        assert asked(discovery, text, min_similarity=-1) == []
    stored(discovery, dogs=DOGS)
    assert keys(discovery.ready("n", DOGS)) == ["dogs"]


def test_a_full_queue_drops_and_counts(embedder):
    discovery = Discovery(embedder, max_waiting=2)
    embedder.go.clear()
    discovery.add("n", "under way", CATS)
    assert embedder.begun.acquire(timeout=PATIENCE_S)
    assert [discovery.add("n", key, DOGS + key) for key in range(4)] == [True, True, False, False]
    discovery.start("n", BIRDS)
    assert discovery.counters.dropped == 3
    assert len(discovery) == 3
    discovery.remove("n", 0)
    embedder.go.set()
    assert discovery.wait(PATIENCE_S)
    assert keys(asked(discovery, DOGS, k=9, min_similarity=0.1)) == [1]
    discovery.close()


def test_the_oldest_texts_leave(embedder):
    discovery = Discovery(embedder, capacity=2)
    stored(discovery, cats=CATS, dogs=DOGS, birds=BIRDS)
    assert len(discovery) == 2
    assert asked(discovery, CATS, min_similarity=0.5) == []
    assert keys(asked(discovery, DOGS, min_similarity=0.5)) == ["dogs"]
    discovery.close()


def test_texts_without_a_vector_are_forgotten():
    """Nothing would ever evict them, and an owner would take them for known."""
    embedder = BagEmbedder()
    discovery = Discovery(embedder, capacity=2)
    embedder.error = OSError("no such model")
    for number in range(20):
        discovery.add("n", number, CATS + number)
        assert discovery.wait(PATIENCE_S)
    assert len(discovery) == 0
    discovery.close()


@pytest.mark.parametrize("quick", [False, True])
def test_failures_are_counted_and_logged_once_and_never_raised(caplog, quick):
    embedder = BagEmbedder(quick=quick)
    discovery = Discovery(embedder)
    stored(discovery, dogs=DOGS)
    embedder.error = OSError("no such model")
    stored(discovery, cats=CATS)
    assert discovery.ready("n", BIRDS) is None
    assert discovery.wait(PATIENCE_S)
    assert discovery.counters.errors == 2
    assert caplog.text.count("OSError: no such model;") == 1
    embedder.error = None
    assert keys(asked(discovery, DOGS)) == ["dogs"]
    assert asked(discovery, BIRDS, min_similarity=0.5) == []
    discovery.close()


def test_a_text_without_a_vector_is_not_found(discovery):
    stored(discovery, empty=np.empty(0, np.int64), cats=CATS)
    assert keys(asked(discovery, CATS, min_similarity=-1)) == ["cats"]
    assert asked(discovery, np.empty(0, np.int64), min_similarity=0.1) == []


def test_what_was_embedded_before_an_embedder_has_learnt_is_embedded_anew(discovery, embedder):
    embedder.is_learning = True
    stored(discovery, cats=CATS, dogs=DOGS)
    assert keys(asked(discovery, CATS, min_similarity=0.9)) == ["cats"]
    discovery.remove("n", "dogs")
    stored(discovery, birds=BIRDS)
    for text, key in ((CATS, "cats"), (BIRDS, "birds")):
        (found,) = asked(discovery, text, min_similarity=0.9)
        assert (found.key, found.similarity) == (key, pytest.approx(1))
    assert asked(discovery, DOGS, min_similarity=0.9) == []
    assert embedder.learnt == [CATS.tolist(), DOGS.tolist(), BIRDS.tolist()]
    discovery.check()


def test_the_thread_ends_and_another_begins(discovery, embedder, monkeypatch):
    monkeypatch.setattr("kvgraft.semantic.discovery._IDLE_S", 0.0)
    stored(discovery, cats=CATS)
    for thread in threading.enumerate():
        if thread.name == "kvgraft-embedder":
            thread.join(PATIENCE_S)
    stored(discovery, dogs=DOGS)
    assert keys(asked(discovery, DOGS)) == ["dogs", "cats"]


def test_after_close_nothing_is_embedded_and_nothing_fails(discovery, embedder):
    stored(discovery, cats=CATS)
    asked(discovery, CATS)
    discovery.close()
    assert not discovery.add("n", "dogs", DOGS)
    discovery.start("n", DOGS)
    assert discovery.ready("n", DOGS) is None
    assert keys(discovery.ready("n", CATS)) == ["cats"]
    assert len(embedder.seen) == 1
    discovery.close()


def test_many_threads(discovery):
    """Each adds, asks and removes what is its own; the rest stays as it is."""
    texts = {number: np.full(30, number) for number in range(1, 9)}

    def work(number):
        for _ in range(40):
            discovery.add(number, "mine", texts[number])
            for found in (discovery.ready(number, texts[number], min_similarity=0.9) for _ in range(3)):
                assert found is None or set(keys(found)) <= {"mine"}
            discovery.remove(number, "mine")
        discovery.add(number, "mine", texts[number])

    problems = []
    hook, threading.excepthook = threading.excepthook, problems.append
    threads = [threading.Thread(target=work, args=(number,)) for number in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    threading.excepthook = hook
    assert not problems
    assert discovery.wait(PATIENCE_S)
    assert discovery.counters.dropped == 0
    assert [keys(asked(discovery, text, number, min_similarity=0.9)) for number, text in texts.items()] == [
        ["mine"]
    ] * 8
