"""A conversation goes on from what its last answer was drawn from, in place, and nobody takes that for a full prefill's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.e2e.test_kept_kv import text_of
from tests.engine_runs import GEMMA3, SMALL, run_to_end
from tests.standins.scripted_provider import FOLDER, Script
from tests.support.failing_policies import Failing
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.engine import LLM, RepairRules, SamplingParams
from kvgraft.engine.idle import healing
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.prefix import RadixKey
from kvgraft.reuse.continuation import continuation_key
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import CONTINUATION, Fidelity, MissReason, Namespace, RepairTime

ANSWER = SamplingParams(5, ignore_eos=True)
LAYERS = {"gemma3_text": GEMMA3}
FRONT, DOCUMENT, TURNS, NEW = 30, 150, 10, 12

FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3_text"])
PAGES = pytest.mark.parametrize("page_size", [1, 16])
pytestmark = pytest.mark.usefixtures("looks_are_free")


def make_llm(family="llama", **settings):
    model = tiny_model(family, **LAYERS.get(family, {}))
    return LLM(adopt_model(family, model, None), **(SMALL | {"num_slots": 3_000, "heal": "off"} | settings))


@pytest.fixture
def words(rng):
    return lambda count: rng.integers(3, VOCABULARY, count)


class Talk:
    """A conversation whose first call grafts a document; what is kept is looked at after every turn.

    Attributes:
        document: Was read by another request, at another place.
        prompt: Of the next turn.
        texts: All that was asked and answered.
        outputs: Of its turns.
    """

    def __init__(self, llm, words, **options):
        self.llm, self.words, self.options = llm, words, options
        self.document = words(DOCUMENT)
        self.texts, self.outputs = [], []
        self.ask(np.concatenate([words(7), self.document]))
        self.outputs.clear()
        self.prompt = np.concatenate([words(FRONT), self.document, words(NEW)])

    def ask(self, prompt, reuse="graft", **options):
        """The output of one request, of this tenant."""
        output = self.llm.generate(prompt, ANSWER, reuse, **(self.options | options))[0]
        self.heard(output)
        return output

    def heard(self, output):
        """Take note of an output of this tenant, and look at what is kept."""
        self.texts.append(text_of(output))
        self.outputs.append(output)
        report = output.report
        assert report.num_tokens == report.reused_tokens + report.computed_tokens
        self.check()

    def check(self):
        self.llm.check()
        namespace = self.llm.engine.builder.build(self.prompt_of(0), RequestOptions(cache_salt=self.salt)).namespace
        assert_prefix_is_exact(self.llm.adapter, self.llm.space, namespace, self.texts[-1])
        assert_donors_are_exact(self.llm.adapter, self.llm.space, self.texts, last=1)
        assert self.llm.usage().request == 0

    def prompt_of(self, number):
        return np.asarray(self.texts[number][:40])

    @property
    def salt(self):
        return self.options.get("cache_salt", "")

    def turn(self, length=NEW, **options):
        """The report of the next turn; the one after it goes on from its answer."""
        output = self.ask(self.prompt, **options)
        self.prompt = np.concatenate([self.prompt, output.token_ids, self.words(length)])
        return output.report

    def turns(self, count):
        return [self.turn() for _ in range(count)]

    @property
    def known(self):
        """Positions of the next prompt that the last answer has left K/V of, in whole pages."""
        page_size = self.llm.config.page_size
        return len(self.texts[-1]) // page_size * page_size


def held(llm):
    usage = llm.usage()
    return usage.total - usage.free


def assert_goes_on(report, known):
    """All of the first `known` positions is there, the approximate part of it in place, and nothing is repaired."""
    assert (report.exact_tokens + report.continued_tokens, report.computed_tokens) == (known, report.num_tokens - known)
    assert (report.shifted_tokens, report.recomputed_tokens, report.policy) == (0, 0, "none")
    (span,) = report.spans
    assert (span.fidelity, span.generation, span.donor_id) == (Fidelity.CONTINUED, 1, CONTINUATION)
    assert (span.target_start, span.position_delta) == (report.exact_tokens, 0)
    assert (report.repair, report.corrected_tokens) == (None, 0)


@FAMILIES
@PAGES
def test_ten_turns_after_a_graft_compute_what_is_new(family, page_size, words):
    """Of one copy in its first call; what exact prefixes alone compute is never less, and the slots are shared."""
    llm, exact = make_llm(family, page_size=page_size), make_llm(family, page_size=page_size)
    talk = Talk(llm, words)
    first = talk.turn()
    assert first.shifted_tokens > 0
    assert first.continued_tokens == 0
    exact.generate(talk.outputs[-1].prompt_token_ids, ANSWER, "exact")
    for _ in range(TURNS - 1):
        known, before, donors = talk.known, held(llm), len(llm.space.donors)
        report = talk.turn()
        assert_goes_on(report, known)
        alone = exact.generate(talk.outputs[-1].prompt_token_ids, ANSWER, "exact")[0].report
        assert report.computed_tokens <= alone.computed_tokens + page_size
        assert held(llm) - before <= len(talk.texts[-1]) - known
        assert len(llm.space.donors) <= donors + 1
    assert llm.num_errors == 0


@pytest.mark.parametrize("selection", ["none", "first_k", "query_seam"])
@pytest.mark.parametrize("repair", ["before", "after"])
def test_what_repairs_the_first_call_repairs_no_later_one(selection, repair, words):
    talk = Talk(make_llm(selection=selection, repair=repair), words)
    assert bool(talk.turn().recomputed_tokens) == (selection != "none")
    for _ in range(3):
        known = talk.known
        assert_goes_on(talk.turn(), known)


@FAMILIES
def test_a_later_document_is_grafted_behind_what_goes_on(family, words):
    talk = Talk(make_llm(family), words)
    talk.turns(2)
    other = words(DOCUMENT)
    talk.ask(np.concatenate([words(9), other]))
    known = len(talk.texts[-2])
    talk.prompt = np.concatenate([talk.prompt, other, words(NEW)])
    report = talk.turn()
    assert report.exact_tokens + report.continued_tokens == known
    assert report.shifted_tokens > 0
    assert all(start >= known for start, _ in report.recomputed_runs)
    known = talk.known
    assert_goes_on(talk.turn(), known)


@FAMILIES
@PAGES
@pytest.mark.parametrize("reuse", ["off", "exact", "verified"])
def test_other_modes_never_see_it(family, page_size, reuse, words):
    llm, cold = make_llm(family, page_size=page_size), make_llm(family, page_size=page_size)
    talk = Talk(llm, words)
    for _ in range(3):
        talk.turn()
        prompt = talk.outputs[-1].prompt_token_ids
        output = talk.ask(np.concatenate([prompt, words(9)]), reuse)
        expected = cold.generate(output.prompt_token_ids, ANSWER, "off")[0]
        assert output.token_ids == expected.token_ids
        assert output.report.continued_tokens == 0
        assert not [span for span in output.report.spans if span.fidelity is not Fidelity.EXACT]
        llm.engine.cancel_all()


def test_names_are_of_one_tenant_one_adapter_one_model_and_one_generation():
    namespaces = [
        Namespace("m"),
        Namespace("n"),
        Namespace("m", "a"),
        Namespace("m", "", "a"),
        Namespace("m", "a", "a"),
    ]
    names = [continuation_key(namespace, number) for namespace in namespaces for number in (1, 2, 300)]
    names += [namespace.key for namespace in namespaces]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {16}


@FAMILIES
def test_another_salt_has_nothing_of_it(family, words):
    llm = make_llm(family)
    talk = Talk(llm, words, cache_salt="x")
    talk.turns(2)
    for salt in ("", "y"):
        report = llm.generate(talk.prompt, ANSWER, cache_salt=salt)[0].report
        assert (report.exact_tokens, report.reused_tokens) == (0, 0)
        llm.check()
    known = len(talk.texts[-1])
    assert_goes_on(talk.turn(), known)


@FAMILIES
@PAGES
def test_a_reset_forgets_it(family, page_size, words):
    llm = make_llm(family, page_size=page_size)
    talk = Talk(llm, words)
    talk.turns(2)
    llm.reset()
    llm.check()
    assert llm.usage().free == llm.usage().total
    report = talk.turn()
    assert (report.reused_tokens, report.computed_tokens) == (0, report.num_tokens)


def test_a_reset_while_it_goes_on_keeps_nothing(words):
    llm = make_llm()
    talk = Talk(llm, words)
    talk.turns(2)
    stream = llm.stream(talk.prompt, ANSWER)
    next(stream)
    llm.reset()
    llm.check()
    list(stream)
    llm.check()
    assert llm.usage().free == llm.usage().total
    assert llm.generate(talk.prompt, ANSWER)[0].report.reused_tokens == 0


@FAMILIES
@PAGES
def test_an_edited_turn_goes_on_from_the_longest_equal_front(family, page_size, words):
    talk = Talk(make_llm(family, page_size=page_size), words)
    talk.turns(5)
    common = len(talk.outputs[2].prompt_token_ids)
    edited = np.concatenate([talk.prompt[:common], words(40)])
    edited[common] = (talk.prompt[common] - 3 + 1) % (VOCABULARY - 3) + 3
    assert_goes_on(talk.ask(edited).report, common // page_size * page_size)
    known = talk.known
    onwards = np.concatenate([edited, talk.outputs[-1].token_ids, words(NEW)])
    assert_goes_on(talk.ask(onwards).report, known)
    longest = len(talk.texts[-3]) // page_size * page_size  # the other way is still there
    assert_goes_on(talk.turn(), longest)


@FAMILIES
def test_two_requests_go_on_from_it_at_once(family, words):
    llm = make_llm(family)
    talk = Talk(llm, words)
    talk.turns(2)
    known, engine = talk.known, llm.engine
    for _ in range(2):
        prompt = np.concatenate([talk.prompt, words(20)])
        engine.add(engine.builder.build(prompt, RequestOptions(ANSWER)))
    while engine.has_work:
        for event in engine.step():
            if event.part.output is not None:
                talk.texts.append(text_of(event.part.output))
                assert_goes_on(event.part.output.report, known)
        engine.check()
    talk.check()
    for text in list(talk.texts[-2:]):
        assert_goes_on(talk.ask(np.concatenate([text, words(NEW)])).report, len(text))


@FAMILIES
@pytest.mark.parametrize("moments", [[0], [1], [4], [0, 3]])
def test_a_preempted_one_goes_on_from_its_own(family, moments, words):
    """Taken away in its prefill (0) or after so many tokens: it begins again from what it had, as it was."""
    llm = make_llm(family, max_rows=16)
    talk = Talk(llm, words)
    talk.turns(2)
    known, engine = talk.known, llm.engine
    prompt = np.concatenate([talk.prompt, words(30)])
    request = engine.builder.build(prompt, RequestOptions(ANSWER))
    engine.add(request)
    active = engine._active[request.request_id]
    rows = itertools.count()
    for moment in moments:
        while active.kv is None or len(active.output_ids) < moment or active.num_tokens == known:
            engine.step()
            assert next(rows) < 100
        engine.scheduler.preempt(active)
        engine.check()
    (output,) = run_to_end(engine).values()
    assert output.num_preemptions == len(moments)
    assert output.report.continued_tokens + output.report.exact_tokens == known
    assert output.report.computed_tokens == len(prompt) - known
    assert output.report.shifted_tokens == 0
    talk.heard(output)
    known = talk.known
    assert_goes_on(talk.ask(np.concatenate([talk.texts[-1], words(NEW)])).report, known)


def test_a_pool_that_is_too_small_takes_turns_and_forgets_the_others(words):
    llm = make_llm(num_slots=900, host_bytes=0)
    talks = [Talk(llm, words) for _ in range(5)]
    for _ in range(4):
        for talk in talks:
            report = talk.turn()
            assert report.num_tokens == report.reused_tokens + report.computed_tokens
    assert llm.num_errors == 0


def test_sessions_that_grow_at_once_in_a_small_pool_are_preempted_and_come_out_whole(words):
    llm = make_llm(num_slots=900, max_running=4, host_bytes=0)
    talks = [Talk(llm, words) for _ in range(3)]
    for talk in talks:
        talk.turn()
    engine, sampling = llm.engine, SamplingParams(120, ignore_eos=True)
    for talk in talks:
        engine.add(engine.builder.build(talk.prompt, RequestOptions(sampling)))
    outputs = []
    while engine.has_work:
        outputs += [event.part.output for event in engine.step() if event.part.output is not None]
        engine.check()
    assert len(outputs) == 3
    assert llm.num_errors == 0
    for output in outputs:
        talk = next(talk for talk in talks if np.array_equal(talk.prompt, output.prompt_token_ids))
        talk.heard(output)


def test_rows_that_repair_beside_the_answer_leave_alone_what_others_go_on_from(words):
    """They are written into copies of their own, and when all of them are there the text is an exact prefix."""
    talk = Talk(make_llm(), words)
    talk.turns(2)
    known = talk.known
    rules, sampling = RepairRules(RepairTime.AFTER, rows_per_step=16), SamplingParams(60, ignore_eos=True)
    output = talk.llm.generate(talk.prompt, sampling, repair=rules, cache_salt="")[0]
    assert CONTINUATION not in {span.donor_id for span in output.report.spans}
    assert output.report.repair.exact_from_token is not None
    talk.heard(output)
    assert talk.ask(np.concatenate([talk.prompt[:known], words(NEW)])).report.exact_tokens == known


@pytest.mark.parametrize("fault", [0, 1, 2])
@pytest.mark.parametrize("repair", ["before", "after"])
@FAMILIES
def test_a_policy_that_fails_behind_it_makes_nothing_exact(family, repair, fault, words):
    llm = make_llm(family, repair=repair)
    talk = Talk(llm, words)
    talk.turns(2)
    other, exact = words(DOCUMENT), talk.outputs[-1].report.exact_tokens
    talk.ask(np.concatenate([words(9), other]))
    talk.prompt = np.concatenate([talk.prompt, other, words(NEW)])
    known, policy = len(talk.texts[-2]), Failing(fault)
    report = talk.turn(selection=policy)
    assert policy.num_failures == 1
    assert (report.exact_tokens, report.continued_tokens) == (exact, known - exact)
    if report.miss is not None:
        assert report.miss.reason is MissReason.POLICY_ERROR
        assert report.shifted_tokens == 0
    assert talk.ask(talk.texts[-1], "exact").report.exact_tokens == exact
    assert llm.generate(talk.texts[-1], ANSWER, "off")[0].token_ids


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("tests/standins")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return Script(tmp_path)


@pytest.mark.parametrize("reuse", ["graft", "substitute", "exact", "verified"])
def test_nobody_goes_on_from_another_text(script, words, reuse):
    llm = make_llm(semantic_provider="scripted_provider:Scripted", semantic_deadline_ms=60_000)
    stored, prompt = words(200), words(150)
    llm.generate(stored, ANSWER, "off")
    script.answer(stored.tolist())
    output = llm.generate(prompt, ANSWER, "substitute")[0]
    assert output.report.substituted_tokens
    llm.check()
    script.answer(None)
    report = llm.generate(np.concatenate([text_of(output), words(NEW)]), ANSWER, reuse)[0].report
    assert (report.continued_tokens, report.reused_tokens) == (0, report.exact_tokens)
    llm.check()


def test_a_request_that_may_be_given_another_text_goes_on_from_its_own(script, words):
    llm = make_llm(semantic_provider="scripted_provider:Scripted", semantic_deadline_ms=60_000)
    script.answer(None)
    talk = Talk(llm, words)
    talk.turns(2)
    known = talk.known
    assert_goes_on(talk.turn(reuse="substitute"), known)


@FAMILIES
@PAGES
def test_sessions_keep_it_with_the_tokens_that_fill_no_page(family, page_size, words):
    llm = make_llm(family, page_size=page_size)
    talk = Talk(llm, words)
    session = llm.open_session()
    output = talk.ask(talk.prompt, session_id=session)
    keeps_tails = family == "llama"
    for _ in range(4):
        known = len(talk.texts[-1]) if keeps_tails else talk.known
        output = talk.ask(words(NEW), session_id=session, append=True)
        assert_goes_on(output.report, known)
    llm.close_session(session)
    talk.check()


def evict_everything(llm, words):
    """Fill the device with other text."""
    for _ in range(8):
        llm.generate(words(110), ANSWER, "exact", cache_salt="filler")
    llm.check()


def test_it_lives_on_in_host_memory_and_comes_back(words):
    llm = make_llm(num_slots=700, prefix_host_bytes=4_000_000, host_bytes=0)
    talk = Talk(llm, words)
    talk.turns(2)
    for _ in range(3):
        known = talk.known
        evict_everything(llm, words)
        namespace = llm.engine.builder.build(talk.prompt).namespace
        key = continuation_key(namespace, 1)
        stored = llm.space.prefix.look(RadixKey(talk.prompt, key))
        assert stored.prefix_len < known <= stored.total
        assert_goes_on(talk.turn(), known)
    assert llm.num_errors == 0


@FAMILIES
@PAGES
def test_healing_makes_it_exact_piece_by_piece(family, page_size, words, monkeypatch):
    """What goes on shrinks from its front; in the end it is an ordinary exact prefix."""
    monkeypatch.setattr(healing, "MOST_ROWS", 40)
    llm = make_llm(family, page_size=page_size, heal="idle")
    talk = Talk(llm, words)
    talk.turns(2)
    exact = [talk.outputs[-1].report.exact_tokens]
    while llm.engine.heal_step():
        llm.check()
        known = talk.known
        report = llm.generate(talk.prompt, SamplingParams(1), "graft")[0].report
        assert report.exact_tokens + report.continued_tokens >= known
        exact.append(report.exact_tokens)
        assert len(exact) < 100
    assert exact == sorted(exact)
    assert len(set(exact)) > 3
    talk.check()
    llm.heal()
    known = talk.known
    report = talk.ask(talk.prompt).report
    assert (report.continued_tokens, report.spans) == (0, ())
    assert report.exact_tokens >= known
