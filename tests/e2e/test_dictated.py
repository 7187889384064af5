"""An answer that is dictated is drawn from what a request would draw it from, step by step, and leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.engine import LLM, RepairRules, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import RepairTime, ReuseMode

NUM_TOKENS = 20
SAMPLING = SamplingParams(NUM_TOKENS, ignore_eos=True)
WAYS = {
    "before": RepairRules(),
    "after": RepairRules(RepairTime.AFTER),
    "rows": RepairRules(RepairTime.AFTER, rows_per_step=16),
}
ALL_ROWS = RepairRules(RepairTime.AFTER, rows_per_step=200)


@pytest.fixture(scope="module")
def llm():
    return LLM("graft-tiny", num_slots=4_000, dtype="float32")


@pytest.fixture(scope="module")
def prompt(llm):
    """Forty new tokens, a document of 250 and thirty more."""
    return np.random.default_rng(3).integers(3, llm.loaded.vocab_size, 320)


@pytest.fixture(autouse=True)
def _read(llm, prompt):
    """The document has been read at position 0."""
    llm.reset()
    llm.generate(prompt[40:290], SamplingParams(1), ReuseMode.OFF)
    yield
    llm.check()


def errors(llm, prompt, answer, repair, **options):
    """KL to full prefill by token."""
    full = llm.score(prompt, answer, ReuseMode.OFF).logits.double().log_softmax(-1)
    own = llm.dictate(prompt, answer, SAMPLING, repair=repair, **options).logits.double().log_softmax(-1)
    return (full.exp() * (full - own)).sum(-1)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_is_served(llm, prompt, way):
    """The tokens and log-probabilities that a stream of the same request shows, and the same report."""
    dictated = llm.dictate(prompt, [], SAMPLING, repair=WAYS[way])
    again = llm.dictate(prompt, dictated.token_ids, SAMPLING, repair=WAYS[way])
    sampling = SamplingParams(NUM_TOKENS, ignore_eos=True, logprobs=0)
    parts = list(llm.stream(prompt, sampling, repair=WAYS[way]))
    assert [part.token_id for part in parts] == list(dictated.token_ids) == list(again.token_ids)
    said = dictated.logits.log_softmax(-1)[range(NUM_TOKENS), list(dictated.token_ids)]
    assert said.tolist() == pytest.approx([part.logprobs.logprob for part in parts], abs=1e-4)
    torch.testing.assert_close(again.logits, dictated.logits)
    served = parts[-1].output.report
    assert served.recomputed_tokens > 0
    assert (dictated.report.repair, dictated.report.recomputed_tokens) == (served.repair, served.recomputed_tokens)


@pytest.mark.parametrize("way", ["before", "after"])
def test_a_probe_computes_the_same_at_once(llm, prompt, way):
    answer = np.random.default_rng(4).integers(3, llm.loaded.vocab_size, NUM_TOKENS)
    dictated = llm.dictate(prompt, answer, SAMPLING, repair=WAYS[way])
    with llm.probe(prompt, NUM_TOKENS, repair=WAYS[way]) as probe:
        torch.testing.assert_close(probe.logits(answer), dictated.logits, rtol=1e-3, atol=1e-3)


def test_a_repair_after_the_first_token_shows_from_the_second_on_and_rows_until_all_is_exact(llm, prompt):
    answer = np.random.default_rng(4).integers(3, llm.loaded.vocab_size, NUM_TOKENS)
    before, after, rows = (errors(llm, prompt, answer, WAYS[way]) for way in WAYS)
    none = errors(llm, prompt, answer, RepairRules(), selection="none", correction="none")
    assert after[0] == pytest.approx(none[0].item(), rel=1e-3)
    assert after[0] != pytest.approx(before[0].item(), rel=1e-2)
    torch.testing.assert_close(after[1:], before[1:], rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(rows[:2], after[:2])
    assert rows[2:].mean() < after[2:].mean()
    exact = errors(llm, prompt, answer, ALL_ROWS)
    assert exact[:2].min() > 1e-4
    assert exact[5:].max() < 1e-6


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_that_a_repair_reads_are_there_beside_the_first_token(family, rng):
    llm = LLM(adopt_model(family, tiny_model(family), None), num_slots=1_400, repair_below_margin=0)
    document = rng.integers(3, VOCABULARY, 100)
    llm.generate(document, SamplingParams(1))
    asked = np.concatenate([rng.integers(3, VOCABULARY, 8), document, rng.integers(3, VOCABULARY, 9)])
    dictated = llm.dictate(asked, [], SAMPLING)
    assert (dictated.report.repair.time, dictated.report.repair.from_token) == (RepairTime.AFTER, 2)
    assert llm.generate(asked, SAMPLING)[0].token_ids == dictated.token_ids
    llm.check()


@pytest.mark.parametrize("repair_rows", [0, 3])
def test_an_unsure_first_token_waits_in_scores_as_it_does_for_a_request(repair_rows, rng):
    llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=1_000, repair_below_margin=1.0)
    document = rng.integers(3, VOCABULARY, 150)
    llm.generate(document, SamplingParams(1))
    asked = np.concatenate([rng.integers(3, VOCABULARY, 20), document, rng.integers(3, VOCABULARY, 9)])
    rules = RepairRules(RepairTime.AFTER, 1.0, repair_rows)
    dictated = llm.dictate(asked, [3, 4], SamplingParams(2, ignore_eos=True), repair=rules)
    with llm.probe(asked, 2, repair=rules) as opened:
        report, logits = opened.report, opened.logits(np.array([3, 4]))
    torch.testing.assert_close(logits, dictated.logits)
    assert (report.repair.time, report.repair.from_token) == (RepairTime.BEFORE, 1)
    assert "likelier" in report.repair.reason
    assert report.repair.reason == dictated.report.repair.reason


def test_a_score_on_windows_needs_no_more_room_with_rows_that_only_steps_compute(rng):
    llm = LLM(adopt_model("gemma3_text", tiny_model("gemma3_text"), None), num_slots=500, repair_rows=3)
    document = rng.integers(3, VOCABULARY, 150)
    llm.generate(document, SamplingParams(1))
    asked = np.concatenate([rng.integers(3, VOCABULARY, 20), document, rng.integers(3, VOCABULARY, 9)])
    assert len(llm.score(asked, rng.integers(3, VOCABULARY, 200)).logits) == 200
    assert len(llm.generate(asked, SamplingParams(200, ignore_eos=True))[0].token_ids) == 200
    llm.check()


def test_it_ends_at_a_stop_text_as_a_request_does(llm, prompt):
    (served,) = llm.generate(prompt, SAMPLING)
    sampling = SamplingParams(NUM_TOKENS, ignore_eos=True, stop=(served.text[3:6],))
    (stopped,) = llm.generate(prompt, sampling, cache_salt="b", reuse="off")
    dictated = llm.dictate(prompt, stopped.token_ids, sampling)
    assert dictated.token_ids == stopped.token_ids
    assert len(stopped.token_ids) < NUM_TOKENS


def test_what_is_no_prompt_and_its_answer_is_refused(llm, prompt):
    for sampling, options in (
        (SamplingParams(2, prompt_logprobs=1), {}),
        (SamplingParams(2), {"session_id": "nobody"}),
    ):
        with pytest.raises(ConfigError, match="leave session_id, append and prompt_logprobs out"):
            llm.dictate(prompt, [], sampling, **options)


def test_it_says_when_each_token_came(llm, prompt):
    dictated = llm.dictate(prompt, [5, 6, 7], SAMPLING)
    for times in (dictated.times_s, dictated.cpu_times_s):
        assert len(times) == NUM_TOKENS
        assert times[0] > 0
        assert list(times) == sorted(times)


def test_nothing_is_left_in_the_cache(llm, prompt):
    before = llm.usage()
    llm.dictate(prompt, [5, 6, 7], SAMPLING, repair=WAYS["rows"])
    assert llm.usage() == before


def test_what_does_not_fit_is_refused(llm, prompt):
    with pytest.raises(ConfigError, match="exceed"):
        llm.dictate(prompt, [5], SamplingParams(40_000))
