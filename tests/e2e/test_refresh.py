"""Without idle time to heal on, approximate text becomes exact once others have reused it, and reuse does not decay."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason

GREEDY = SamplingParams(4, ignore_eos=True)
DOCUMENT, INSTRUCTION, TURN = 240, 20, 40


def make_llm(family="llama", **settings):
    return LLM(adopt_model(family, tiny_model(family), None), **{"num_slots": 4_000, "heal": "off"} | settings)


def new_text(rng, length):
    return rng.integers(3, VOCABULARY, length)


def assert_kept_is_exact(llm, prompt):
    """What prefixes and donors have of a prompt are the K/V of a full prefill, where they are called so."""
    namespace = llm.engine.builder.build(prompt[:2]).namespace
    assert_prefix_is_exact(llm.adapter, llm.space, namespace, prompt)
    assert_donors_are_exact(llm.adapter, llm.space, [prompt])
    llm.check()


@pytest.fixture
def moved(rng):
    """A document that was read, and an instruction that it stands behind from now on."""
    return new_text(rng, DOCUMENT), new_text(rng, INSTRUCTION)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_third_question_about_a_moved_document_makes_it_exact(family, moved, rng):
    llm = make_llm(family, refresh_after=2)
    document, instruction = moved
    llm.generate(document, GREEDY)
    reports = []
    for _ in range(4):
        prompt = np.concatenate([instruction, document, new_text(rng, TURN)])
        output = llm.generate(prompt, GREEDY)[0]
        reports.append(output.report)
    assert [report.shifted_tokens > 0 for report in reports] == [True, True, False, False]
    assert reports[3].exact_tokens == INSTRUCTION + DOCUMENT
    assert reports[2].miss.reason is MissReason.REFRESHED
    assert output.token_ids == llm.generate(prompt, GREEDY, "off")[0].token_ids
    assert_kept_is_exact(llm, prompt)


def test_a_conversation_that_goes_on_is_an_exact_prefix_from_the_third_turn_on(moved, rng):
    llm = make_llm(refresh_after=2)
    document, instruction = moved
    llm.generate(document, GREEDY)
    text, shifted = np.concatenate([instruction, document]), []
    for _ in range(6):
        text = np.concatenate([text, new_text(rng, TURN)])
        output = llm.generate(text, GREEDY)[0]
        shifted.append(output.report.shifted_tokens)
        text = np.concatenate([text, output.token_ids])
    assert shifted[0] > 0
    assert shifted[1] > shifted[0]
    assert shifted[2:] == [0, 0, 0, 0]
    assert output.report.exact_tokens == len(text) - 4 - TURN - 1, "the last generated token has no K/V"
    assert_kept_is_exact(llm, text[: output.report.num_tokens])


def test_by_default_the_fifth_question_makes_it_exact(moved, rng):
    llm = make_llm()
    document, instruction = moved
    llm.generate(document, GREEDY)
    shifted = []
    for _ in range(6):
        output = llm.generate(np.concatenate([instruction, document, new_text(rng, TURN)]), GREEDY)[0]
        shifted.append(output.report.shifted_tokens > 0)
    assert shifted == [True, True, True, True, False, False]


def test_a_score_takes_no_refresh(moved, rng):
    """It leaves no K/V behind, so that requests after it would be grafted once more."""
    llm = make_llm(refresh_after=2)
    document, instruction = moved
    llm.generate(document, GREEDY)

    def asked():
        return np.concatenate([instruction, document, new_text(rng, TURN)])

    for _ in range(2):
        assert llm.generate(asked(), GREEDY)[0].report.shifted_tokens > 0
    assert llm.score(asked(), [3, 4]).report.shifted_tokens > 0
    assert llm.generate(asked(), GREEDY)[0].report.miss.reason is MissReason.REFRESHED


def test_a_reset_forgets_who_reused_what(moved, rng):
    llm = make_llm(refresh_after=1)
    document, instruction = moved
    for _ in range(3):
        llm.generate(document, GREEDY)
        report = llm.generate(np.concatenate([instruction, document, new_text(rng, TURN)]), GREEDY)[0].report
        assert report.shifted_tokens > 0
        llm.reset()


def test_zero_reuses_approximately_for_ever(moved, rng):
    llm = make_llm(refresh_after=0)
    document, instruction = moved
    llm.generate(document, GREEDY)
    for _ in range(6):
        output = llm.generate(np.concatenate([instruction, document, new_text(rng, TURN)]), GREEDY)[0]
        assert output.report.shifted_tokens > 0


def test_verified_requests_keep_their_drafts(moved, rng):
    """Their text is exact whatever is grafted, so that there is nothing to make exact."""
    llm = make_llm(refresh_after=1, num_slots=600)
    document, instruction = moved
    for _ in range(3):
        llm.generate(document, GREEDY)
        for _ in range(8):  # the beginning is no prefix any more
            llm.generate(new_text(rng, 150), GREEDY, "exact")
        prompt = np.concatenate([instruction, document, new_text(rng, TURN)])
        report = llm.generate(prompt, GREEDY, "verified")[0].report
        assert report.miss is None or report.miss.reason is not MissReason.REFRESHED


def test_reuse_does_not_decay_where_a_clock_stands_in_front(rng):
    """Text that was computed behind the last generation was nobody's donor, and each turn computed more of it again."""
    llm = make_llm()
    text, shares = new_text(rng, DOCUMENT), []
    for _ in range(20):
        prompt = np.concatenate([new_text(rng, INSTRUCTION), text])
        output = llm.generate(prompt, GREEDY)[0]
        shares.append(output.report.shifted_tokens / len(prompt))
        text = np.concatenate([text, output.token_ids, new_text(rng, TURN)])
    late = shares[10:]
    assert sum(late) / len(late) > 0.5, "without dropping the last generation it is 0.32"
