"""Stores of exact prefixes beside grafts, in one connector: none ever has what a graft computed."""

from __future__ import annotations

import pytest
import token_store
from vllm.distributed.kv_transfer import get_kv_transfer_group

from engines import BLOCK, TOKEN_STORE, answer_of, beside, engine, multi, parameters, text
from kvgraft.integrations.vllm import GraftConnector
from kvgraft.integrations.vllm.scheduler.decisions import Decided
from kvgraft.types import Miss, MissReason

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 400)
PROMPT = OTHER_HEAD + DOCUMENT + OTHER_QUESTION


def in_order(kind, order):
    return lambda mine: kind(*((mine, TOKEN_STORE) if order == "first" else (TOKEN_STORE, mine)))


def store_of(connector):
    return next(child for child in connector.sub_connectors if type(child).__name__ == "TokenStore")


@pytest.fixture(scope="module", params=["first", "second"])
def served(request, model_folder):
    options = {"selection": "none", "load": {"first": "sync", "second": "async"}[request.param]}
    connector = in_order(beside, request.param)
    with engine(model_folder, "llama", options=options, connector=connector, max_num_batched_tokens=128) as one:
        one.store, one.saving = (store_of(c) for c in (one.vllm_scheduler.connector, get_kv_transfer_group()))
        yield one


@pytest.fixture(autouse=True)
def begins_with_nothing(request):
    token_store.SAVED.clear()
    if "served" in request.fixturenames:
        one = request.getfixturevalue("served")
        one.forget_donors()
        one.vllm_scheduler.connector.reset_cache()
        one.store.calls.clear()
        yield
        one.check()
        assert not one.vllm_scheduler.connector._withheld
        assert not one.vllm_scheduler.connector._known
        assert not one.store.requests
        assert not one.saving.strange_calls, "a store's hooks were called by a pass of a graft"
    else:
        yield


def forget_own_prefixes(one):
    """Empty vLLM's own prefix cache, not what the store has."""
    assert one.llm.reset_prefix_cache()


def cold(one, prompt):
    """A full prefill, whatever the store has; it has the same behind it."""
    saved = dict(token_store.SAVED)
    token_store.SAVED.clear()
    answer = one.cold(prompt)
    token_store.SAVED.clear()
    token_store.SAVED.update(saved)
    return answer


@pytest.mark.parametrize("order", ["first", "second"])
def test_in_vllms_own_multi_connector_a_store_serves_grafted_text_as_exact(model_folder, order, monkeypatch):
    """What the refusal is for: without it an `exact` request is answered from what a graft computed."""
    monkeypatch.setattr(GraftConnector, "register_kv_caches", lambda self, caches: self.worker.register(caches))
    with engine(model_folder, "llama", options={"selection": "none"}, connector=in_order(multi, order)) as one:
        expected = cold(one, PROMPT)
        one.donate(HEAD + DOCUMENT + QUESTION)
        token_store.SAVED.clear()
        assert one.ask(PROMPT).shifted == len(DOCUMENT)
        forget_own_prefixes(one)
        leaked = one.ask(PROMPT, "exact")
        assert leaked.num_cached == len(PROMPT) // BLOCK * BLOCK
        with pytest.raises(AssertionError):
            leaked.assert_like(expected)


def saved_blocks(prompt):
    return [end for end in range(BLOCK, len(prompt) + 1, BLOCK) if (None, tuple(prompt[:end])) in token_store.SAVED]


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_a_store_never_has_what_a_graft_computed(served, mode):
    expected = cold(served, PROMPT)
    served.donate(HEAD + DOCUMENT + QUESTION)
    token_store.SAVED.clear()
    grafted = served.ask(PROMPT, max_tokens=80)
    assert grafted.shifted == len(DOCUMENT)
    conversation = PROMPT + list(grafted.tokens)
    assert not token_store.SAVED, "neither the prompt nor its answer"
    forget_own_prefixes(served)
    after = served.ask(PROMPT, mode)
    assert after.num_cached == 0
    after.assert_like(expected)
    expected = cold(served, conversation)
    forget_own_prefixes(served)
    follow_up = served.ask(conversation, mode)
    assert follow_up.num_cached <= len(PROMPT) // BLOCK * BLOCK, "nothing of the grafted answer"
    follow_up.assert_like(expected)


@pytest.mark.parametrize("mode", ["exact", "off", None])
def test_a_store_keeps_and_serves_exact_prefixes(served, mode):
    expected = served.ask(PROMPT, mode)
    assert expected.num_cached == 0
    assert saved_blocks(PROMPT) == list(range(BLOCK, len(PROMPT) + 1, BLOCK))
    forget_own_prefixes(served)
    again = served.ask(PROMPT, mode)
    assert again.num_cached == len(PROMPT) // BLOCK * BLOCK
    assert again.report["exact_tokens"] == again.num_cached
    assert again.report["shifted_tokens"] == 0
    again.assert_like(expected)


def test_both_at_once(served):
    """Requests of one batch: the one that is grafted is not saved, its neighbours are."""
    exact, other = text(60, 200), text(61, 333)
    served.donate(HEAD + DOCUMENT + QUESTION)
    token_store.SAVED.clear()
    answers = served.ask_many([exact, PROMPT, other], ["exact", None, "off"], max_tokens=40)
    assert [answer.shifted for answer in answers] == [0, len(DOCUMENT), 0]
    assert not saved_blocks(PROMPT)
    for prompt, answer, mode in zip((exact, other), (answers[0], answers[2]), ("exact", "off"), strict=True):
        conversation = prompt + list(answer.tokens)
        assert len(saved_blocks(conversation)) == (len(conversation) - 1) // BLOCK
        forget_own_prefixes(served)
        again = served.ask(prompt, mode, max_tokens=40)
        assert again.num_cached == (len(prompt) - 1) // BLOCK * BLOCK
        again.assert_like(answer)


def test_more_tokens_win_and_exact_ones_if_they_are_about_as_many(served):
    """The store has a head of the prompt, donors have a document in it."""
    served.ask(HEAD + DOCUMENT + QUESTION, "exact", max_tokens=1)
    head = text(70, 128)
    served.ask(head + text(71, 20), "off", max_tokens=1)
    forget_own_prefixes(served)
    grafted = served.ask(head + DOCUMENT + OTHER_QUESTION)
    assert grafted.shifted == len(DOCUMENT)
    assert grafted.report["exact_tokens"] == 0, "the store's head is computed: one of both serves a request"
    forget_own_prefixes(served)
    whole = HEAD + DOCUMENT + QUESTION
    stored = served.ask(whole + OTHER_QUESTION)
    assert stored.shifted == 0
    assert stored.report["exact_tokens"] == len(whole) // BLOCK * BLOCK
    assert "a store has" in stored.report["miss"]["detail"]
    stored.assert_like(cold(served, whole + OTHER_QUESTION))


def run_preempted(one, prompt, mode, preempt_after, max_tokens=40):
    """Answer one prompt; take its blocks away behind some of its steps, as vLLM does where memory is short."""
    llm_engine, scheduler, steps = one.llm.llm_engine, one.vllm_scheduler, 0
    llm_engine.add_request("preempted", {"prompt_token_ids": prompt}, parameters(mode, max_tokens))
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            finished = output
        steps += 1
        if steps in preempt_after and scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
    return answer_of(finished)


@pytest.mark.parametrize("preempt_after", [(3,), (8,), (4, 20)], ids=str)
def test_a_preempted_graft_is_not_saved_when_it_begins_again(served, preempt_after):
    expected = cold(served, PROMPT)
    served.donate(HEAD + DOCUMENT + QUESTION)
    token_store.SAVED.clear()
    answer = run_preempted(served, PROMPT, None, preempt_after)
    assert answer.shifted >= len(DOCUMENT)
    assert not token_store.SAVED
    forget_own_prefixes(served)
    served.ask(PROMPT, "off").assert_like(expected)


@pytest.mark.parametrize("preempt_after", [2, 3, 9])
def test_what_was_saved_of_a_request_stays_when_it_is_grafted_later(served, preempt_after, monkeypatch):
    """It begins exact, is preempted, and is grafted when it begins again: the store keeps what was exact, and no more."""
    expected = cold(served, PROMPT)
    served.donate(HEAD + DOCUMENT + QUESTION)
    token_store.SAVED.clear()
    decide, asked = served.scheduler._decisions.decide, []

    def nothing_at_first(prompt, request, stored, **reasons):
        asked.append(request)
        nothing = Decided(Miss(MissReason.NO_MATCH), stored=stored), ()
        return nothing if len(asked) == 1 else decide(prompt, request, stored, **reasons)

    monkeypatch.setattr(served.scheduler._decisions, "decide", nothing_at_first)
    preempt = served.vllm_scheduler._preempt_request

    def forgetful(request, when):  # else vLLM gives all blocks back
        preempt(request, when)
        served.llm.reset_prefix_cache()
        for key in [key for key in token_store.SAVED if len(key[1]) > 64]:
            del token_store.SAVED[key]

    monkeypatch.setattr(served.vllm_scheduler, "_preempt_request", forgetful)
    answer = run_preempted(served, PROMPT, None, (preempt_after,))
    assert answer.shifted == len(DOCUMENT)
    assert saved_blocks(PROMPT) == [32, 64]
    assert all(len(tokens) <= 64 for _, tokens in token_store.SAVED), "nor of the answer"
    forget_own_prefixes(served)
    monkeypatch.setattr(served.scheduler._decisions, "decide", decide)
    after = served.ask(PROMPT, "off")
    assert after.num_cached == 64
    after.assert_like(expected)


def test_what_a_store_lost_is_computed_and_becomes_no_donor(served, monkeypatch):
    expected = served.ask(PROMPT, "off")
    forget_own_prefixes(served)
    monkeypatch.setattr(token_store.TokenStore, "loses", True)
    answer = served.ask(PROMPT, "exact")
    answer.assert_like(expected)
    assert not len(served.scheduler.registry.catalogue), "a load may turn out to have failed when its text was captured"


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_what_a_store_lost_is_nothing_to_others_either(served, monkeypatch, leaves):
    """The load of one request fails in the step in which another one finds its blocks; its client may leave then."""
    one, other, later = (DOCUMENT + text(90 + number, 40) for number in range(3))
    expected, after = cold(served, other), cold(served, later)
    served.ask(DOCUMENT + QUESTION, "off")
    forget_own_prefixes(served)
    monkeypatch.setattr(token_store.TokenStore, "loses", True)
    for name, prompt in {"one": one, "other": other}.items():
        served.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters("exact", 6))
    served.llm.llm_engine.step()
    if leaves:
        (internal,) = (name for name in served.vllm_scheduler.requests if name.startswith("one"))
        served.llm.llm_engine.abort_request([internal], internal=True)
    monkeypatch.setattr(token_store.TokenStore, "loses", False)
    answers = {}
    while served.llm.llm_engine.has_unfinished_requests():
        answers |= {output.request_id: answer_of(output) for output in served.llm.llm_engine.step() if output.finished}
    answers["other"].assert_like(expected)
    token_store.SAVED.clear()
    forget_own_prefixes(served)
    reused = served.ask(later)
    assert leaves or reused.num_cached >= len(DOCUMENT), "what was computed instead is a donor"
    reused.assert_like(after)


def test_a_store_is_told_of_requests_as_vllm_would(served):
    """A grafted request waits, to a store, and ends without blocks."""
    served.donate(HEAD + DOCUMENT + QUESTION)
    token_store.SAVED.clear()
    served.store.calls.clear()
    served.ask(PROMPT)
    kinds = [call[0] for call in served.store.calls]
    assert kinds == ["new", "finished"]
    assert served.store.calls[-1][2] == ()
    served.store.calls.clear()
    served.ask(PROMPT, "exact")
    assert [call[0] for call in served.store.calls] == ["new", "admitted", "finished"]
    assert len(served.store.calls[-1][2]) > len(PROMPT) // BLOCK


def test_a_store_that_cannot_forget_is_not_used_behind_a_reset(served, monkeypatch):
    served.ask(PROMPT, "exact")
    monkeypatch.setattr(token_store.TokenStore, "resets", False)
    served.llm.reset_prefix_cache(reset_connector=True)
    assert saved_blocks(PROMPT), "of the model as it was"
    assert served.ask(PROMPT, "exact").num_cached == 0
    other = text(80, 200)
    served.ask(other, "exact")
    assert not saved_blocks(other), "it could not be told from what is old"
    monkeypatch.setattr(token_store.TokenStore, "resets", True)
    served.llm.reset_prefix_cache(reset_connector=True)
    served.ask(other, "exact")
    assert saved_blocks(other)


@pytest.mark.parametrize("fails", [False, True])
def test_a_reset_among_requests_is_not_believed(served, monkeypatch, fails):
    """A store keeps what requests on their way have locked, and says that it forgot all: an old model's K/V."""
    served.llm.llm_engine.add_request("waits", {"prompt_token_ids": text(81, 200)}, parameters("exact", 2))
    if fails:
        monkeypatch.setattr(token_store.TokenStore, "reset_cache", lambda self: 1 / 0)
    served.llm.reset_prefix_cache(reset_connector=True)
    monkeypatch.undo()
    while served.llm.llm_engine.has_unfinished_requests():
        served.llm.llm_engine.step()
    assert not saved_blocks(text(81, 200)), "it was on its way"
    other = text(82, 200)
    served.ask(other, "exact")
    assert not saved_blocks(other)
    served.llm.reset_prefix_cache(reset_connector=True)
    served.ask(other, "exact")
    assert saved_blocks(other)


def test_a_store_is_not_used_while_weights_have_changed_under_it(served):
    """Weights changed in place, and nobody said so: until a reset nothing is saved under the new model's name."""
    served.ask(PROMPT, "exact")
    served.scheduler._captures.trusts_prefixes = False
    forget_own_prefixes(served)
    assert served.ask(PROMPT, "exact").num_cached == 0
    served.llm.reset_prefix_cache(reset_connector=True)
    assert not token_store.SAVED
    served.ask(PROMPT, "exact")
    assert saved_blocks(PROMPT)
