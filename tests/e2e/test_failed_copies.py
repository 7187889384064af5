"""K/V that cannot be copied to host memory are dropped: no request fails for it, and nothing is kept that is not there."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason

TWO = SamplingParams(2, ignore_eos=True)


def make(family, **settings):
    return LLM(adopt_model(family, tiny_model(family), None), heal="off", **settings)


def no_memory(*_):
    raise MemoryError("no host memory")


def moved(rng, document):
    return np.concatenate([rng.integers(3, VOCABULARY, 20), document, rng.integers(3, VOCABULARY, 9)])


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_text_of_a_window_model_that_was_not_copied_is_no_donor(family, rng, monkeypatch):
    llm, document = make(family, num_slots=2_000), rng.integers(3, VOCABULARY, 150)
    with monkeypatch.context() as patched:
        patched.setattr(llm.space.pool, "export", no_memory)
        llm.generate(document, TWO)
    llm.check()
    assert (len(llm.space.donors), llm.num_errors) == (0, 1)
    report = llm.generate(moved(rng, document), TWO)[0].report
    assert (report.shifted_tokens, report.miss.reason) == (0, MissReason.NO_DONORS)
    assert llm.generate(moved(rng, document), TWO)[0].report.shifted_tokens > 100, "copies work again"
    llm.reset()
    llm.check()
    assert llm.space.host.used_bytes == 0


def test_a_window_model_whose_copies_fail_now_and_then_serves_on(rng, monkeypatch, tmp_path):
    """Beside a store, which moves donors to the host in steps of the engine, and a host that is full all the time."""
    llm = make("gemma3_text", num_slots=2_000, store=f"file:{tmp_path}", host_bytes=400_000)
    export, calls = llm.space.pool.export, []

    def every_other(*arguments):
        calls.append(len(calls))
        return no_memory() if len(calls) % 2 else export(*arguments)

    monkeypatch.setattr(llm.space.pool, "export", every_other)
    documents = [rng.integers(3, VOCABULARY, 150) for _ in range(4)]
    for number in range(12):
        llm.generate(documents[number % 4] if number < 4 else moved(rng, documents[number % 4]), TWO)
        llm.check()
    assert len(calls) > 4
    llm.reset()
    llm.check()


def test_a_donor_that_cannot_leave_for_the_host_makes_room_all_the_same(rng, monkeypatch):
    llm = make("llama", num_slots=400)
    monkeypatch.setattr(llm.space.pool, "export", no_memory)
    for _ in range(5):
        assert len(llm.generate(rng.integers(3, VOCABULARY, 150), TWO)[0].token_ids) == 2
        llm.check()
    assert llm.num_errors >= llm.space.num_dropped > 0


def test_a_request_whose_recorded_state_cannot_be_copied_is_computed_without_its_prefix(rng, monkeypatch):
    llm, document = make("granitemoehybrid", num_slots=1_000), rng.integers(3, VOCABULARY, 100)
    llm.generate(document, TWO)
    prompt = np.append(document, rng.integers(3, VOCABULARY, 20))
    with monkeypatch.context() as patched:
        patched.setattr(llm.adapter.states, "copy", no_memory)
        output = llm.generate(prompt, TWO)[0]
    llm.check()
    assert (output.report.exact_tokens, llm.num_errors) == (0, 1)
    assert output.token_ids == llm.generate(prompt, TWO, "off")[0].token_ids
    assert llm.generate(prompt, TWO)[0].report.exact_tokens > 0, "copies work again"
    llm.check()


def test_an_answer_whose_state_cannot_be_kept_goes_on(rng, monkeypatch):
    """Where states lie at ends of pages, the last of them is kept while the answer grows."""
    llm, prompt = make("granitemoehybrid", num_slots=1_000, page_size=16), rng.integers(3, VOCABULARY, 60)
    expected = llm.generate(prompt, SamplingParams(30, ignore_eos=True), "off")[0].token_ids
    stream = llm.stream(prompt, SamplingParams(30, ignore_eos=True), "off")
    first = next(stream).token_id
    monkeypatch.setattr(llm.adapter.states, "copy", no_memory)
    assert (first, *(part.token_id for part in stream)) == expected
    assert llm.num_errors > 0
    llm.check()
