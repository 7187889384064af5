"""Turns of a conversation after one graft: they go on from vLLM's own blocks, and no other request ever finds these."""

from __future__ import annotations

import pytest

from engines import BLOCK, answer_of, engine, parameters, text

HEAD, OTHER_HEAD = text(1, 50), text(2, 70)
DOCUMENT = text(5, 300)
QUESTION = text(6, 60)
FIRST = OTHER_HEAD + DOCUMENT + QUESTION
TURN = 75


@pytest.fixture(scope="module", params=["llama-sync", "llama-async", "gemma3-async"])
def served(request, model_folder):
    family, load = request.param.split("-")
    options = {"load": load, "min_saved_tokens": 0, "min_run": 16}
    with engine(model_folder, family, options=options) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.llm.reset_prefix_cache(reset_connector=True)
    yield
    served.check()


def turns(served, count, mode=None, *, first=FIRST, **request):
    """A conversation that appends its answers and further text; its prompts and answers."""
    prompt, asked = list(first), []
    for turn in range(count):
        answer = served.ask(prompt, mode, **request)
        asked.append((prompt, answer))
        prompt = prompt + list(answer.tokens) + text(100 + turn, TURN)
    return asked


def replayed(served, conversation, mode):
    """The same prompts in another mode, on an engine that has read nothing."""
    served.llm.reset_prefix_cache(reset_connector=True)
    return [served.ask(prompt, mode) for prompt, _ in conversation]


def test_a_session_pays_for_its_graft_once(served):
    served.donate(HEAD + DOCUMENT)
    conversation = turns(served, 8)
    first, *later = [answer.report for _, answer in conversation]
    assert first["shifted_tokens"] + first["recomputed_tokens"] >= len(DOCUMENT) - BLOCK
    for (prompt, _), report in zip(conversation[1:], later, strict=True):
        assert report["continued_tokens"] > 0
        assert (report["shifted_tokens"], report["recomputed_tokens"]) == (0, 0)
        assert report["exact_tokens"] <= len(OTHER_HEAD)
        counted = [report[f"{kind}_tokens"] for kind in ("exact", "continued", "shifted", "computed")]
        assert sum(counted) == len(prompt)
        assert {span["generation"] for span in report["spans"]} == {1}
    for ours, exact in zip(later, replayed(served, conversation, "exact")[1:], strict=True):
        assert ours["computed_tokens"] <= exact.report["computed_tokens"] + BLOCK


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_nothing_approximate_reaches_who_accepts_no_copies(served, mode):
    served.donate(HEAD + DOCUMENT)
    conversation = turns(served, 4)
    answers = [served.ask(prompt, mode) for prompt, _ in reversed(conversation)]
    for (prompt, _), answer in zip(reversed(conversation), answers, strict=True):
        assert answer.report["continued_tokens"] == 0
        answer.assert_like(served.cold(prompt))


def test_another_tenant_goes_on_from_nothing(served):
    served.donate(HEAD + DOCUMENT)
    (_, _), (prompt, answer) = turns(served, 2)
    assert answer.report["continued_tokens"] > 0
    other = served.ask(prompt, cache_salt="other")
    assert (other.report["continued_tokens"], other.num_cached) == (0, 0)


def test_nobody_goes_on_from_what_was_before_a_reset(served):
    served.donate(HEAD + DOCUMENT)
    (_, _), (prompt, answer) = turns(served, 2)
    served.llm.reset_prefix_cache(reset_connector=True)
    again = served.ask(prompt)
    assert (again.report["continued_tokens"], again.num_cached) == (0, 0)
    assert answer.report["continued_tokens"] > 0


def test_an_edited_turn_goes_on_from_the_longest_equal_beginning(served):
    served.donate(HEAD + DOCUMENT)
    conversation = turns(served, 5)
    prompt, _ = conversation[2]
    edited = prompt[:-TURN] + text(999, TURN)
    report = served.ask(edited).report
    reused = report["exact_tokens"] + report["continued_tokens"]
    assert len(prompt) - TURN - BLOCK < reused <= len(prompt) - TURN
    assert report["computed_tokens"] == len(edited) - reused


def test_what_waits_for_its_repair_is_waited_for(served):
    """Two requests of one conversation at once: the second answers as if it had come after the first."""
    served.donate(HEAD + DOCUMENT)
    (answer,) = served.ask_many([FIRST], [None])
    longer = FIRST + list(answer.tokens)[:1] + text(7, TURN)
    after = served.ask(longer)
    served.llm.reset_prefix_cache(reset_connector=True)
    served.donate(HEAD + DOCUMENT)
    llm = served.llm.llm_engine
    llm.add_request("first", {"prompt_token_ids": FIRST}, parameters(None, 6))
    while not any(output.outputs[0].token_ids for output in llm.step()):
        pass
    llm.add_request("second", {"prompt_token_ids": longer}, parameters(None, 6))
    ended = {}
    while llm.has_unfinished_requests():
        ended |= {output.request_id: answer_of(output) for output in llm.step() if output.finished}
    assert ended["first"].tokens == answer.tokens
    assert ended["second"].report["continued_tokens"] == after.report["continued_tokens"]
    ended["second"].assert_like(after)


def test_a_preempted_turn_goes_on_from_its_own_blocks(served):
    served.donate(HEAD + DOCUMENT)
    served.ask(FIRST)
    llm, scheduler = served.llm.llm_engine, served.vllm_scheduler
    llm.add_request("preempted", {"prompt_token_ids": FIRST + text(8, TURN)}, parameters(None, 40))
    finished, steps = None, 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            finished = output if output.finished else finished
        steps += 1
        if steps == 12 and scheduler.running:
            scheduler._preempt_request(request := scheduler.running.pop(), 0.0)
            assert request.num_computed_tokens == 0
    report = answer_of(finished).report
    assert report["continued_tokens"] > len(DOCUMENT)
    assert report["computed_tokens"] <= TURN + 2 * BLOCK
