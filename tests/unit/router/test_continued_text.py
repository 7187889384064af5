"""Text that a session goes on from counts as a prefix at its worker, for requests that accept it and nobody else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue
from kvgraft.donors.front import front_digest
from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.reuse.donor_events import donor_place, scope_of
from kvgraft.router import Prompt, WorkerSpec
from kvgraft.router.directory import Directory
from kvgraft.router.load import WorkerLoad
from kvgraft.router.policy import make_policy
from kvgraft.router.prompts import accepts_copies
from kvgraft.types import Namespace

COMMON, SALTED, ADAPTED = Namespace("model"), Namespace("model", "", "alice"), Namespace("model", "tuned")
HEAD, MOVED, ELSEWHERE = 30, 400, 50


def tokens(seed, count):
    return np.random.default_rng(seed).integers(0, 30_000, count).astype(np.int32)


DOCUMENT = tokens(2, MOVED)


class Worker:
    """An engine's donors, as a router hears of them.

    A document lies there at another place. Then a session reads it after another head, and every turn is registered.
    """

    def __init__(self, names=("one",)):
        self.directory = Directory([WorkerSpec(f"http://{name}", name=name) for name in names], max_tokens=100_000)
        self.catalogue = DonorCatalogue(50_000)
        self.catalogue.watch(DonorAnnouncer(lambda event: self.directory.apply("one", [event]), COMMON))

    def compute(self, text, start=0, generation=0, namespace=COMMON, *, is_read=False):
        front = front_digest(namespace.key, text[:start])
        place = {"generation": generation, "start_position": start, "front": front}
        before = None if is_read else text[:start]
        return self.catalogue.add(namespace, text[start:], None, before=before, **place).donor

    def has_document(self, namespace=COMMON):
        self.compute(np.concatenate([tokens(1, ELSEWHERE), DOCUMENT]), namespace=namespace)

    def turns(self, count=1, namespace=COMMON, **options):
        """The text of a session after some turns, each of 100 tokens."""
        text = np.concatenate([tokens(3, HEAD), DOCUMENT])
        for turn in range(count):
            longer = np.concatenate([text, tokens(10 + turn, 100)])
            self.compute(longer, len(text), 1, namespace, **options)
            text = longer
        return text

    def score(self, prompt, scope=None, **options):
        self.directory.check()
        return self.directory.score(prompt, scope or scope_of(), **options)["one"]


@pytest.fixture
def worker():
    worker = Worker()
    worker.has_document()
    return worker


def next_turn(text):
    return np.concatenate([text, tokens(99, 20)])


def test_the_next_turn_finds_a_prefix_where_the_session_is(worker):
    text = worker.turns(3)
    score = worker.score(next_turn(text))
    assert (score.exact_tokens, score.continued_tokens, score.shifted_tokens) == (0, len(text), 0)
    assert score.tokens_saved == len(text), "as much as an exact prefix"


def test_what_was_moved_only_counts_less(worker):
    score = worker.score(next_turn(np.concatenate([tokens(3, HEAD), DOCUMENT])))
    assert (score.continued_tokens, score.shifted_tokens) == (0, MOVED)
    assert score.tokens_saved < MOVED


@pytest.mark.parametrize("place", [0, HEAD - 1, HEAD, HEAD + MOVED - 1])
def test_one_other_token_in_the_front_makes_it_moved_text(worker, place):
    prompt = next_turn(worker.turns(1))
    prompt[place] += 1
    score = worker.score(prompt)
    assert score.continued_tokens == 0
    assert MOVED < score.shifted_tokens + 64 <= MOVED + 100 + 64


def test_text_at_another_place_is_moved_though_all_before_it_is_equal(worker):
    text = worker.turns(1)
    score = worker.score(next_turn(np.concatenate([tokens(3, HEAD), tokens(55, 1), text[HEAD:]])))
    assert (score.continued_tokens, score.shifted_tokens) == (0, MOVED + 100)


def test_an_edit_branches_there(worker):
    """What stands before turn 3 goes on; what comes after the edit was moved by nobody, and stands after other text."""
    text = worker.turns(4)
    edited = next_turn(text)
    place = HEAD + MOVED + 250
    edited[place] += 1
    score = worker.score(edited)
    assert score.continued_tokens == place
    assert 0 < score.shifted_tokens <= len(text) - place - 1


@pytest.mark.parametrize("asked", [scope_of("", "alice"), scope_of("", "bob"), scope_of("tuned")])
def test_other_salts_and_adapters_find_nothing(worker, asked):
    assert worker.score(next_turn(worker.turns(2)), asked).tokens_saved == 0


@pytest.mark.parametrize("namespace", [SALTED, ADAPTED])
def test_a_tenants_session_goes_on_for_the_tenant_alone(worker, namespace):
    worker.has_document(namespace)
    text = worker.turns(2, namespace)
    own = scope_of(namespace.adapter, namespace.tenant_salt)
    assert worker.score(next_turn(text), own).continued_tokens == len(text)
    score = worker.score(next_turn(text))
    assert (score.continued_tokens, score.shifted_tokens) == (0, MOVED)


def test_requests_that_accept_no_copies_find_nothing_of_it(worker):
    score = worker.score(next_turn(worker.turns(2)), is_grafted=False)
    assert (score.exact_tokens, score.continued_tokens, score.shifted_tokens) == (0, 0, 0)


def test_what_came_back_from_a_store_goes_on_without_what_was_copied(worker):
    """The worker has to copy and repair the document again, which it has elsewhere."""
    text = worker.turns(2, is_read=True)
    score = worker.score(next_turn(text))
    assert (score.continued_tokens, score.shifted_tokens) == (200, MOVED)


def test_what_has_gone_counts_for_nothing(worker):
    text = worker.turns(1)
    (donor,) = [donor for donor in worker.catalogue if donor.generation]
    worker.catalogue.remove(donor.donor_id)
    score = worker.score(next_turn(text))
    assert (score.continued_tokens, score.shifted_tokens) == (0, MOVED)


def test_a_text_that_was_computed_exactly_in_its_place_counts_in_full(worker):
    text = np.concatenate([tokens(5, 200), tokens(6, 100)])
    worker.compute(text, 200)
    score = worker.score(next_turn(text))
    assert (score.continued_tokens, score.shifted_tokens) == (100, 0)


def test_events_of_a_sender_that_names_no_places_count_as_moved():
    """Also where the text of a donor stands at the front of a prompt."""
    worker, events = Worker(), []
    worker.catalogue.watch(DonorAnnouncer(events.append, COMMON))
    worker.has_document()
    text = worker.turns(1)
    older = [replace(event, extra_keys=(event.extra_keys[0][:-1],)) for event in events]
    assert all(donor_place(event) is None for event in older)
    worker.directory.apply("one", older, forget=True)
    score = worker.score(next_turn(text))
    assert (score.continued_tokens, score.shifted_tokens) == (0, MOVED + 100)
    score = worker.score(next_turn(np.concatenate([tokens(1, ELSEWHERE), DOCUMENT])))
    assert (score.continued_tokens, score.shifted_tokens) == (0, ELSEWHERE + MOVED)


def test_the_session_stays_where_it_is_though_another_worker_has_all_its_texts():
    """Both have every text of it; only one can go on from them."""
    worker = Worker(("one", "two"))
    worker.has_document()
    prompt = next_turn(worker.turns(3))
    other = []
    worker.catalogue.watch(DonorAnnouncer(other.append, COMMON))
    for text in (DOCUMENT, prompt[HEAD + MOVED : -20]):
        worker.compute(np.concatenate([tokens(8, 40), text]), 40)
    worker.directory.apply("two", other)
    scores = worker.directory.score(prompt, scope_of())
    loads = [WorkerLoad(WorkerSpec(f"http://{name}", name=name)) for name in ("two", "one")]
    chosen = make_policy("reuse").choose(Prompt(prompt, scope_of(), b""), loads, scores)
    assert chosen.spec.name == "one"
    assert scores["one"].tokens_saved - scores["two"].tokens_saved > 0.15 * (MOVED + 300)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, True),
        ({"kvgraft": {}}, True),
        ({"kvgraft": {"reuse": "graft"}}, True),
        ({"kvgraft": {"reuse": "substitute"}}, True),
        ({"kvgraft": {"reuse": "exact"}}, False),
        ({"kvgraft": {"reuse": "off"}}, False),
        ({"kvgraft": {"reuse": "verified"}}, False),
        ({"kv_transfer_params": {"kvgraft": "exact"}}, False),
        ({"kv_transfer_params": {"kvgraft": "graft"}}, True),
        ({"kv_transfer_params": {"kvgraft": "verified"}}, False),
        ({"custom_params": {"kvgraft": "off"}}, False),
        ({"custom_params": {"other": 1}, "kv_transfer_params": None, "kvgraft": 3}, True),
        ({"kvgraft": {"reuse": ["graft"]}}, False),
    ],
)
def test_what_a_request_accepts_stands_in_its_body(body, expected):
    assert accepts_copies(body) is expected
