"""Texts that cannot fit are refused without tokenising them, and no short prompt waits for a long one."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.engine.model.loading import load_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.errors import ContextLengthError

PATIENCE_S = 60.0
MEGABYTES = "word " * 800_000
MANY = 64
"""More than asyncio has threads."""


class Watched:
    """A tokenizer that notes the lengths of texts, and holds long ones until it is told to go on."""

    def __init__(self, tokenizer, *, holds=False):
        self.seen = []
        self.may_go_on = threading.Event()
        if not holds:
            self.may_go_on.set()
        self._tokenizer = tokenizer

    def __call__(self, text, **options):
        self.seen.append(len(text))
        if len(text) > 100_000:
            self.may_go_on.wait(PATIENCE_S)
        return self._tokenizer(text, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def loaded():
    return load_model("graft-tiny", dtype="float32", device="cpu")


def watched(loaded, **options):
    """The model with a tokenizer that is watched; the engine has asked it all that it asks at the start."""
    tokenizer = Watched(loaded.tokenizer, **options)
    return tokenizer, type(loaded)(loaded.name, loaded.model, tokenizer, loaded.fingerprint, loaded.max_model_len)


def test_a_text_that_cannot_fit_is_refused_by_its_length(loaded):
    tokenizer, model = watched(loaded)
    llm = LLM(model, num_slots=500, host_bytes=0)
    tokenizer.seen.clear()
    with pytest.raises(
        ContextLengthError, match=r"4,000,000 characters, and 499 tokens have at most 20,459: .*shorten it"
    ) as error:
        llm.generate(MEGABYTES, SamplingParams(1))
    assert (tokenizer.seen, error.value.argument) == ([], "prompt")
    llm.close()


@pytest.mark.parametrize("session", [{}, {"session_id": "s", "append": True}])
def test_neither_is_one_that_goes_on_with_a_session(loaded, session):
    tokenizer, model = watched(loaded)
    llm = LLM(model, num_slots=500, host_bytes=0)
    tokenizer.seen.clear()
    with pytest.raises(ContextLengthError):
        llm._engine.builder.build(MEGABYTES, RequestOptions(**session))
    assert tokenizer.seen == []
    llm.close()


def test_token_ids_that_cannot_fit_are_refused_by_their_number(loaded):
    llm = LLM(loaded, num_slots=500, host_bytes=0)
    unread = SimpleNamespace(__len__=None)
    prompt = [unread] * 500  # reading one of them would say that it is no number
    with pytest.raises(ContextLengthError, match="the prompt has 500 tokens and 499 fit"):
        llm.engine.builder.build(prompt)
    llm.close()


def test_a_text_that_just_may_fit_is_tokenised(loaded):
    llm = LLM(loaded, num_slots=500, host_bytes=0)
    longest = "\n" + " " * 40
    assert llm.engine.builder.build(longest * 498).token_ids.shape == (499,)
    llm.close()


def test_short_prompts_wait_for_no_long_one(loaded):
    """A text that may be cut is tokenised, however long it is."""

    async def run():
        tokenizer, model = watched(loaded, holds=True)
        llm = AsyncLLM(model, num_slots=500, host_bytes=0)
        try:
            long = [asyncio.create_task(llm.tokenize(MEGABYTES[:200_000])) for _ in range(MANY)]
            await asyncio.sleep(0)  # they begin
            async with asyncio.timeout(PATIENCE_S):
                short = await llm.prepare("def area(w, h):", SamplingParams(1))
            assert not any(task.done() for task in long)
            tokenizer.may_go_on.set()
            for task in long[1:]:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            return len(short.token_ids)
        finally:
            tokenizer.may_go_on.set()
            await llm.close()

    assert asyncio.run(run()) > 3
