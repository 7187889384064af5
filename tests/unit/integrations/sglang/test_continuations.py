"""Sessions with a graft in their first call: later turns copy what was there, in its place, and never repair it again."""

from __future__ import annotations

import itertools
import random
from array import array
from types import SimpleNamespace

import pytest
from tests.unit.integrations.sglang import scheduler
from tests.unit.integrations.sglang.conftest import FakeRequest
from tests.unit.integrations.sglang.rank_threads import on_ranks
from tests.unit.integrations.sglang.scheduler import Running, Scheduler
from tests.unit.integrations.sglang.test_any_order import DOCUMENTS, is_complete

from kvgraft.integrations.sglang.donors import continuations
from kvgraft.types import CONTINUATION

DOCUMENT, HEAD = DOCUMENTS[0], list(range(500, 520))
PAGES = pytest.mark.parametrize("page_size", [1, 4, 16])


class Session:
    """One client; every prompt is the one before it, its answer, and what is new."""

    def __init__(self, page_size=1, **settings):
        self.scheduler = Scheduler(page_size, **{"selection": "none", **settings})
        self.fresh = iter(range(100_000, 200_000))

    def new(self, count):
        return [next(self.fresh) for _ in range(count)]

    def ask(self, tokens, *, tenant="", answer=10, **names):
        """Send a prompt and let it answer; returns all tokens, and the report of its last attempt."""
        entry = self.begin(tokens, tenant=tenant, **names)
        return self.end(entry, answer)

    def begin(self, tokens, *, tenant="", mode="graft", repair="after", rid="request", **names):
        sampling = SimpleNamespace(
            custom_params={"kvgraft": mode, "kvgraft_repair": repair}, max_new_tokens=1000, regex=None, ebnf=None
        )
        req = FakeRequest(rid, array("q", tokens), cache_salt=tenant or None, sampling_params=sampling, **names)
        entry = Running(req)
        self.scheduler.waiting.append(entry)
        assert self.scheduler.admit(entry, 1000)
        while not is_complete(entry):
            self.scheduler.go_on(entry, 1000)
        self.scheduler.decode(entry, next(self.fresh))
        return entry

    def end(self, entry, answer=10):
        for _ in range(answer):
            self.scheduler.decode(entry, next(self.fresh))
        taken, self.scheduler.log.take = [], self.scheduler.log.take
        take = self.scheduler.log.take
        self.scheduler.log.take = lambda req: taken.append(take(req)) or taken[-1]
        self.scheduler.finish(entry)
        self.scheduler.log.take = take
        self.scheduler.reuse.publishing.settle()
        self.scheduler.check()
        self.told = taken[0]["attempts"][-1]
        return entry.req.full_untruncated_fill_ids.tolist(), self.told

    def first(self, **options):
        """A document is known; the session's first call has it after another head."""
        self.ask(DOCUMENT, **{**options, "mode": "graft"})
        tokens, told = self.ask(HEAD + DOCUMENT + self.new(20), **options)
        assert told["shifted_tokens"] + told["recomputed_tokens"] > 40
        return tokens, told


@pytest.fixture
def session():
    return Session()


@PAGES
@pytest.mark.parametrize("recomputes", [False, True])
def test_ten_turns_compute_what_is_new_and_no_more(page_size, recomputes):
    selection = "query_seam" if recomputes else "none"
    session = Session(page_size, recomputes=recomputes, selection=selection, recompute_ratio=0.3)
    tokens, told = session.first()
    assert told["continued_tokens"] == 0
    repaired = session.scheduler.recomputed_tokens
    for _ in range(10):
        new = session.new(11)
        known, (tokens, told) = len(tokens), session.ask(tokens + new)
        # The last token of an answer is drawn and has no K/V.
        assert told["computed_tokens"] <= len(new) + 1 + page_size
        assert told["shifted_tokens"] == told["recomputed_tokens"] == 0
        assert told["repair"] is None
        (span,) = told["spans"]
        assert (span["donor_id"], span["fidelity"], span["position_delta"]) == (CONTINUATION, "continued", 0)
        assert span["generation"] == 1
        assert told["exact_tokens"] + told["continued_tokens"] > known - 1 - page_size
    assert session.scheduler.recomputed_tokens == repaired
    assert {donor.generation for donor in session.scheduler.keeper.catalogue} <= {0, 1}


def test_every_turn_adds_to_the_tree_what_is_new(session):
    tokens, _ = session.first()
    held = [sum(len(page.slots) for page in session.scheduler.tree.pages())]
    for _ in range(5):
        tokens, _ = session.ask(tokens + session.new(11))
        held.append(sum(len(page.slots) for page in session.scheduler.tree.pages()))
    assert [after - before for before, after in itertools.pairwise(held)] == [22] * 5
    assert len(session.scheduler.tree.roots) == 2, "the exact one, and one of the session"


@pytest.mark.parametrize("mode", ["exact", "off", "verified"])
def test_requests_that_take_no_copies_never_see_it(session, mode):
    tokens, _ = session.first()
    _, told = session.ask(tokens + session.new(11), mode=mode)
    assert told["continued_tokens"] == told["shifted_tokens"] == 0
    assert told["exact_tokens"] == len(HEAD)
    assert told["computed_tokens"] == len(tokens) + 11 - len(HEAD)


def test_a_front_that_was_computed_exactly_since_is_taken_as_exact(session):
    tokens, _ = session.first()
    session.ask(HEAD + DOCUMENT, mode="exact", answer=0)
    num_roots = len(session.scheduler.tree.roots)
    tokens, told = session.ask(tokens + session.new(11))
    assert told["exact_tokens"] == len(HEAD) + len(DOCUMENT)
    assert told["continued_tokens"] == len(tokens) - 23 - told["exact_tokens"]
    assert len(session.scheduler.tree.roots) == num_roots, "what is new is added to the text that began before it"
    _, told = session.ask(tokens + session.new(11))
    assert told["computed_tokens"] == 12


@pytest.mark.parametrize("end", ["flush", "weights"])
def test_after_a_flush_or_other_weights_it_is_gone(session, end):
    tokens, _ = session.first()
    if end == "weights":
        session.scheduler.change_weights()
        _, told = session.ask(tokens + session.new(11))
        assert told["continued_tokens"] == told["shifted_tokens"] == 0
    names = {name for name, _ in session.scheduler.tree.roots if name}
    session.scheduler.flush()
    assert session.ask(tokens + session.new(11))[1]["computed_tokens"] == len(tokens) + 11
    session.scheduler.flush()
    tokens, _ = session.first()
    assert not names & {name for name, _ in session.scheduler.tree.roots if name}, "no name of before is used again"


def test_forgotten_text_that_is_still_in_the_tree_is_not_found(session):
    """As where ranks had different donors: the tree is not empty."""
    tokens, _ = session.first()
    session.scheduler.reuse.books.begin_anew()
    assert session.ask(tokens + session.new(11))[1]["continued_tokens"] == 0


@pytest.mark.parametrize("names", [{"tenant": "other"}, {"extra_key": "key"}, {"lora_id": "adapter"}])
def test_other_tenants_keys_and_adapters_see_nothing_of_it(names):
    session = Session()
    tokens, _ = session.first()
    entry = session.begin(tokens + session.new(11), **names)
    told = session.scheduler.reuse.books.requests[entry.req].lineage
    assert not told.spans


def test_no_client_can_ask_for_it_by_its_name(session):
    session.first()
    (name,) = {name for name, _ in session.scheduler.tree.roots if name}
    assert session.scheduler.reuse.books.request_texts.is_private(name)
    assert len(name) > 64


def test_an_edited_turn_goes_on_from_the_equal_front_alone(session):
    tokens, _ = session.first()
    first, _ = session.ask(tokens + session.new(30))
    second, _ = session.ask(first + session.new(30))
    edited = first[:-20] + session.new(40)
    _, told = session.ask(edited)
    assert told["exact_tokens"] + told["continued_tokens"] == len(first) - 20
    _, told = session.ask(second + session.new(30))
    assert told["computed_tokens"] == 31, "the branch is kept beside it"


def sources(told):
    return [(span["target_start"], source["request"], source["position"]) for span, source in zip_spans(told)]


def zip_spans(told):
    return zip(told["spans"], told["sources"], strict=True)


def test_a_source_is_a_request_that_had_the_same_tokens_with_the_same_kv(session):
    """The last one on the path: of branches, the requests of both."""
    tokens, _ = session.first(rid="first")
    start = len(HEAD)
    one, told = session.ask(tokens + session.new(30), rid="one")
    assert sources(told) == [(start, "first", start)]
    other, told = session.ask(tokens + session.new(40), rid="other")
    assert sources(told) == [(start, "one", start)], "it has what it went on from"
    seam = len(tokens)
    _, told = session.ask(one + session.new(30), rid="two")
    assert sources(told) == [(start, "other", start), (seam, "one", seam)]
    _, told = session.ask(other + session.new(30), rid="last")
    assert sources(told) == [(start, "two", start), (seam, "other", seam)]
    assert told["continued_tokens"] == len(other) - 1 - start


def test_a_request_that_copied_for_itself_is_no_source_of_what_the_tree_had(session):
    """Two begin a session alike at once, and go on differently: the tree keeps the beginning of the first of them."""
    session.ask(DOCUMENT)
    prompt = HEAD + DOCUMENT + session.new(20)
    both = [session.begin(prompt, rid=rid) for rid in ("one", "other")]
    texts = [session.end(entry)[0] for entry in both]
    for text, expected in zip(texts, ("one", "other"), strict=True):
        _, told = session.ask(text + session.new(11), rid=f"after {expected}")
        known = [source for _, source, _ in sources(told)]
        assert known in (["one"], ["after one", "other"])


def test_a_request_that_went_on_from_another_generation_is_no_source(session):
    """Of one text the tree has a path for each generation, and each may have been computed by another request."""
    session.ask(DOCUMENT)
    said, middle = session.new(30), session.new(20)
    session.ask(session.new(7) + DOCUMENT + said)  # a donor of generation 1
    session.ask(HEAD + DOCUMENT + middle + session.new(9), rid="first")
    find, session.scheduler.reuse.books.continuations.find = (
        session.scheduler.reuse.books.continuations.find,
        lambda *_: None,
    )
    other, _ = session.ask(HEAD + DOCUMENT + middle + said, rid="other")
    session.scheduler.reuse.books.continuations.find = find
    _, told = session.ask(HEAD + DOCUMENT + middle + session.new(9) + said, rid="branch")
    assert next(source for _, source, _ in sources(told)) == "first"
    _, told = session.ask(other + session.new(11))
    assert told["spans"][0]["generation"] == 2
    assert sources(told) == [(len(HEAD), "other", len(HEAD))]


def test_a_request_whose_text_was_evicted_is_no_source_of_what_is_given_in_its_place():
    session = Session(host_bytes=0)
    middle = session.new(20)
    session.ask(DOCUMENT)
    tokens, _ = session.ask(HEAD + DOCUMENT + middle, rid="first")
    branch = session.begin(tokens + session.new(11), rid="branch")
    session.scheduler.tree.evict(session.scheduler.tree.total)
    session.ask(DOCUMENT)
    other, told = session.ask(HEAD + DOCUMENT + middle + session.new(9), rid="other")
    assert told["continued_tokens"] == 0
    branched, _ = session.end(branch)
    _, told = session.ask(other + session.new(11))
    assert [source for _, source, _ in sources(told)] == ["other"]
    _, told = session.ask(branched + session.new(11), rid="last")
    assert told["continued_tokens"] > 90


def test_sources_that_could_not_be_noted_are_unknown(session, monkeypatch):
    tokens, _ = session.first(rid="first")

    def fails(*_):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(session.scheduler.reuse.books.continuations._holders, "forget", fails)
        session.scheduler.tree.evict(15)  # of another text
    tokens, told = session.ask(tokens + session.new(11), rid="one")
    assert [source for _, source, _ in sources(told)] == ["unknown"]
    _, told = session.ask(tokens + session.new(11))
    assert [source for _, source, _ in sources(told)] == ["unknown", "one"], (
        "who had it is not known from then on either"
    )


def test_two_that_continue_one_session_at_once_leave_its_text_once(session):
    tokens, _ = session.first()
    prompt = tokens + session.new(11)
    both = [session.begin(prompt) for _ in range(2)]
    assert all(len(entry.copied) > 40 for entry in both)
    for entry in both:
        del entry.req.output_ids[:]
        entry.req.output_ids.append(7)
    held = sum(len(page.slots) for page in session.scheduler.tree.pages())
    for entry in both:
        session.scheduler.finish(entry)
        session.scheduler.check()
    assert sum(len(page.slots) for page in session.scheduler.tree.pages()) == held + 12
    assert session.ask([*prompt, 7, *session.new(11)])[1]["computed_tokens"] == 12


def test_text_that_is_evicted_in_part_goes_on_from_what_is_left(session):
    tokens, _ = session.first()
    session.scheduler.tree.evict(15)
    session.scheduler.check()
    tokens, told = session.ask(tokens + session.new(11))
    assert told["continued_tokens"] > 0
    assert told["computed_tokens"] < 40
    assert session.ask(tokens + session.new(11))[1]["computed_tokens"] == 12


@PAGES
def test_the_exact_beginning_is_evicted_after_what_goes_on_from_it(page_size):
    """What begins after the exact prefix is not found, and would be copied and repaired once more."""
    session = Session(page_size, host_bytes=0)
    tokens, _ = session.first()
    session.scheduler.tree.evict(len(DOCUMENT) + 2 * page_size)
    session.scheduler.check()
    _, told = session.ask(tokens + session.new(11))
    assert told["exact_tokens"] >= len(HEAD) // page_size * page_size
    assert told["continued_tokens"] > 40
    assert told["shifted_tokens"] == 0


def test_evicted_text_is_continued_from_its_donors_and_not_repaired():
    """Those in host memory stand in their own places after the same text; what was copied is copied again."""
    session = Session(recomputes=True, selection="query_seam", recompute_ratio=0.3, host_bytes=1000 * 16)
    tokens, _ = session.first()
    session.scheduler.tree.evict(session.scheduler.tree.total)
    tokens, told = session.ask(tokens + session.new(11))
    kinds = [(span["fidelity"], span["generation"]) for span in told["spans"]]
    assert kinds == [("shifted", 0), ("continued", 1)]
    shifted, continued = told["spans"]
    stop = shifted["target_start"] + shifted["length"]
    assert all(start + length <= stop for start, length in told["recomputed_runs"])
    assert told["continued_tokens"] == continued["length"]
    assert told["repair"]["from_token"] == 2
    assert session.ask(tokens + session.new(11))[1]["computed_tokens"] == 12


def test_donors_in_an_evicted_text_are_not_taken_for_copies_that_come_after_it():
    """Another request gives the tree the same path again, of which it has copied what was computed before."""
    session = Session(host_bytes=0)
    session.ask(DOCUMENT)
    said = session.new(30)
    session.ask(HEAD + DOCUMENT + said)
    assert any(donor.generation for donor in session.scheduler.keeper.catalogue)
    session.scheduler.tree.evict(session.scheduler.tree.total)
    session.ask(session.new(7) + said)
    session.ask(DOCUMENT)
    session.ask(HEAD, mode="exact", answer=0)
    _, told = session.ask(HEAD + DOCUMENT + said + session.new(5))  # checks that no copy is a donor
    assert told["shifted_tokens"] == len(DOCUMENT) + len(said)


def test_text_that_the_tree_has_copied_becomes_no_donor_of_one_that_computed_it(session):
    session.ask(DOCUMENT)
    said = session.new(30)
    session.ask(HEAD, mode="exact", answer=0)
    computing = session.begin(HEAD + DOCUMENT + said)
    session.ask(session.new(7) + said)
    _, told = session.ask(HEAD + DOCUMENT + said + session.new(5))
    assert told["shifted_tokens"] == len(DOCUMENT) + len(said)
    for donor in list(session.scheduler.keeper.catalogue):  # as if what makes `said` known had been forgotten
        if donor.generation == 0 and said[0] in donor.token_ids:
            session.scheduler.keeper.catalogue.remove(donor.donor_id)
    session.end(computing)  # checks that no copy is a donor


def test_a_retracted_request_goes_on_from_the_session_again(session):
    tokens, _ = session.first()
    entry = session.begin(tokens + session.new(11))
    session.scheduler.retract(entry)
    session.scheduler.check()
    assert session.scheduler.admit(entry, 1000)
    tokens, told = session.end(entry)
    assert told["continued_tokens"] > 40
    assert session.ask(tokens + session.new(11))[1]["computed_tokens"] == 12


def test_an_aborted_request_leaves_what_there_was(session):
    tokens, _ = session.first()
    session.scheduler.abort(session.begin(tokens + session.new(11)))
    session.scheduler.check()
    assert session.ask(tokens + session.new(11))[1]["computed_tokens"] == 12


def test_flush_between_promise_and_load_loads_nothing(session):
    tokens, _ = session.first()
    session.scheduler.submit(tokens + session.new(11), "", "request")
    (entry,) = session.scheduler.waiting
    assert session.scheduler.match(entry) > 40
    session.scheduler.flush()
    assert session.scheduler.reuse.loading.load_first(entry.req, 100) == 0
    assert session.scheduler.match(entry) == 0


def test_a_graft_in_a_later_turn_is_repaired_and_the_rest_is_not():
    session = Session(recomputes=True, selection="query_seam", recompute_ratio=0.3)
    session.ask(DOCUMENTS[1])
    tokens, _ = session.first()
    known = len(tokens) - 1
    tokens, told = session.ask(tokens + session.new(5) + DOCUMENTS[1] + session.new(20))
    assert told["exact_tokens"] + told["continued_tokens"] == known
    assert told["recomputed_tokens"] > 0
    assert all(start >= known for start, _ in told["recomputed_runs"])
    assert [span["generation"] for span in told["spans"]] == [1, 0]
    assert session.ask(tokens + session.new(11))[1]["computed_tokens"] == 12


def test_a_policy_that_fails_leaves_approximate_what_the_session_goes_on_from(monkeypatch):
    session = Session(recomputes=True, selection="query_seam", recompute_ratio=0.3)
    session.ask(DOCUMENTS[1])
    tokens, _ = session.first()
    recomputer, known = session.scheduler.reuse.repairs.passes.recomputer, len(tokens) - 1
    for repair in ("before", "after"):
        monkeypatch.setattr(type(recomputer), "agreed_policy", lambda *_: 1 / 0)
        prompt = tokens + session.new(5) + DOCUMENTS[1] + session.new(20)
        entry = session.begin(prompt, repair=repair)
        session.scheduler.decode(entry, next(session.fresh))
        monkeypatch.undo()
        lineage = session.scheduler.reuse.books.requests[entry.req].lineage
        assert lineage.generation_at(known) == 1
        assert lineage.exact_len(known) == len(HEAD)
        state = session.scheduler.reuse.books.requests[entry.req]
        assert state.passes.repair is None, "nothing is exact"
        session.scheduler.finish(entry)
        session.scheduler.check()


def test_text_shorter_than_a_run_is_not_worth_being_approximate_for(session):
    tokens, _ = session.first()
    _, told = session.ask([*tokens[: len(HEAD) + 8], *session.new(30)])
    assert told["continued_tokens"] == 0


def test_beginnings_that_are_remembered_are_bounded(session, monkeypatch):
    monkeypatch.setattr(continuations, "_REMEMBERED", 4)
    session.ask(DOCUMENT)
    sessions = [session.ask(session.new(20 + each) + DOCUMENT + session.new(20))[0] for each in range(6)]
    assert len(session.scheduler.reuse.books.continuations._begun) == 4
    found = [session.ask(tokens + session.new(5))[1]["continued_tokens"] > 0 for tokens in reversed(sessions)]
    assert found[:4] == [True] * 4


def test_ranks_go_on_alike():
    def program(ranks):
        session = Session(ranks=ranks)
        tokens, _ = session.first()
        found = []
        for _ in range(3):
            tokens, told = session.ask(tokens + session.new(11))
            found.append((told["continued_tokens"], told["computed_tokens"]))
        return found, session.scheduler.log.num_errors

    first, second = on_ranks(2, program)
    assert first == second
    assert [computed for _, computed in first[0]] == [12] * 3
    assert first[1] == 0


def test_a_rank_that_does_not_find_it_lets_none_go_on():
    def program(ranks):
        session = Session(ranks=ranks)
        tokens, _ = session.first()
        if ranks.rank:
            session.scheduler.reuse.books.continuations.find = lambda *_: None
        return session.ask(tokens + session.new(11))[1]["continued_tokens"]

    assert on_ranks(2, program) == [0, 0]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("page_size", [1, 4])
def test_at_no_step_have_sessions_computed_more_than_with_exact_prefixes_alone(page_size, seed, monkeypatch):
    """New sessions, turns and edited turns over common documents, whose text stands in any order."""
    monkeypatch.setattr(scheduler, "SLOTS", 8000)
    rng = random.Random(seed)
    graft, exact = (Session(page_size, donor_tokens=1 << 14) for _ in range(2))
    sessions, computed = [], [0, 0]
    for _ in range(16):
        if sessions and rng.random() < 0.7:
            tokens = sessions.pop(rng.randrange(len(sessions)))
            tokens = tokens[: len(tokens) - rng.choice([0, 0, 0, rng.randrange(60)])]
        else:
            tokens = graft.new(count := rng.randrange(40))
            assert exact.new(count) == tokens
            tokens = [*tokens, *itertools.chain(*rng.sample(DOCUMENTS, rng.randrange(1, 3)))]
        tokens = tokens + rng.choice([[], DOCUMENTS[0][:50]]) + graft.new(count := rng.randrange(1, 30))
        exact.new(count)
        answer = rng.randrange(1, 20)
        after, told = graft.ask(tokens, answer=answer)
        assert exact.ask(tokens, mode="exact", answer=answer)[0] == after
        computed[0] += told["computed_tokens"]
        computed[1] += exact.told["computed_tokens"]
        assert computed[0] <= computed[1] + 64
        sessions.append(after) if len(after) < 400 else None
    assert computed[0] < computed[1]
