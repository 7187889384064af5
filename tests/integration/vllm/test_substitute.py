"""A semantic provider in vLLM: another text stands in where a request asks for it, is told, and is never kept."""

from __future__ import annotations

import pytest
from scripted_provider import FOLDER, Script

from engines import engine, text

OPTIONS = {"semantic_provider": "scripted_provider:Scripted", "semantic_deadline_ms": 60_000, "min_saved_tokens": 16}
STORED = text(1, 700)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("script")
        patch.setenv(FOLDER, str(folder))
        yield Script(folder)


@pytest.fixture(scope="module", params=["sync", "async"])
def served(request, model_folder, script):
    # The defaults choose and correct tokens of a graft: of other text nothing may be.
    with engine(model_folder, "qwen3", options={**OPTIONS, "load": request.param}) as one:
        assert [call["has_config"] for call in script.calls("init")] == [True]
        yield one
    # The engine's process is this one: whoever ends it tells the provider.
    assert len(script.calls("shutdown")) == 1


@pytest.fixture(autouse=True)
def known(served, script):
    """The text is a donor, and vLLM has nothing cached; at the end nothing is left behind."""
    served.forget_donors()
    script.calls()
    served.donate(STORED)
    script.stored(STORED)  # the provider hears behind the answer
    script.answer(STORED)
    yield
    script.answer(None)
    served.check()


def as_if(served, prompt, length):
    """The answer behind the K/V of the other text, whose last tokens are the prompt's."""
    return served.cold(STORED[:length] + prompt[length:])


@pytest.mark.parametrize("length", [500, 900])
def test_the_named_text_stands_in_and_the_report_says_so(served, script, length):
    script.answer(STORED, source_id="doc-7", metadata={"similarity": 0.83})
    prompt = text(2, length)
    num_copied = min(length - 1, 700)
    answer = served.ask(prompt, "substitute")
    assert (answer.report["substituted_tokens"], answer.shifted) == (num_copied, 0)
    assert answer.report["substitution"] == {"source_id": "doc-7", "metadata": {"similarity": 0.83}}
    assert (answer.report["policy"], answer.report["recomputed_tokens"]) == ("none", 0)
    assert answer.report["corrected_tokens"] == 0
    assert "another text" in answer.report["risk"]["reason"]
    answer.assert_like(as_if(served, prompt, num_copied))


def test_nothing_of_it_is_kept(served):
    prompt = text(3, 500)
    cold = served.cold(prompt)
    served.forget_donors()
    served.donate(STORED)
    assert served.ask(prompt, "substitute").report["substituted_tokens"] == 499
    assert len(served.scheduler.registry.catalogue) == 1
    again = served.ask(prompt, "exact")
    assert again.num_cached == 0
    again.assert_like(cold)


def test_only_requests_that_ask_for_it_reach_the_provider(served, script):
    for seed, mode in enumerate(("off", "exact", "graft", None)):
        served.ask(text(10 + seed, 300), mode)
    assert not script.calls("miss")


@pytest.mark.parametrize("shared", [32, 160])
def test_a_stored_beginning_does_not_silence_it(served, script, shared):
    prompt = STORED[:shared] + text(20, 400)
    served.ask(STORED[:shared] + text(21, 40), "exact")  # vLLM has whole blocks of the system prompt
    answer = served.ask(prompt, "substitute")
    assert len(script.calls("miss")) == 1
    assert (answer.report["exact_tokens"], answer.report["substituted_tokens"]) == (shared, len(prompt) - 1 - shared)
    answer.assert_like(as_if(served, prompt, len(prompt) - 1))


def test_a_single_shared_token_does_not_silence_it(served):
    prompt = STORED[:1] + text(22, 400)
    assert served.ask(prompt, "substitute").report["substituted_tokens"] == 400


def test_equal_text_is_preferred_to_other_text(served, script):
    script.answer(text(33, 500) + STORED)
    served.donate(text(33, 500) + STORED)
    prompt = text(23, 300) + STORED[100:400] + text(24, 30)
    assert served.ask(prompt, "substitute").shifted > 0
    assert not script.calls("miss")


def test_another_tenants_text_is_not_there(served):
    answer = served.ask(text(25, 300), "substitute", cache_salt="another")
    assert answer.report["substituted_tokens"] == 0


def test_a_failing_provider_is_a_miss(served, script):
    script.answer(STORED, fails=True)
    prompt = text(26, 300)
    answer = served.ask(prompt, "substitute")
    assert answer.report["reused_tokens"] == 0
    answer.assert_like(served.cold(prompt))


def test_it_hears_of_what_is_stored_exactly(served, script):
    prompt = text(27, 300)
    answer = served.ask(prompt, "graft", max_tokens=4)
    assert [call["token_ids"] for call in script.stored()] == [prompt + list(answer.tokens[:-1])]
    served.ask(text(28, 300), "substitute")
    served.ask(text(29, 30), "graft")  # too short to gain anything, as warm-ups are
    served.ask(text(30, 100), "graft", max_tokens=1)
    assert [len(call["token_ids"]) for call in script.stored()] == [100]


def test_a_wrong_mode_names_what_there_is(served):
    report = served.ask(text(31, 40), "words").report
    assert "must be off, exact, graft, substitute" in report["miss"]["detail"]
