"""An engine whose books cannot be trusted ends its requests, begins anew with nothing cached, and serves on."""

from __future__ import annotations

import asyncio

import pytest

from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.schedule.scheduler import Scheduler
from kvgraft.errors import CorruptCacheError, RequestError
from kvgraft.memory import Owner
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

FOUR = SamplingParams(4, ignore_eos=True)


@pytest.fixture
def loaded():
    return adopt_model("llama", tiny_model("llama"), None)


@pytest.fixture
def prompt(rng):
    return rng.integers(3, VOCABULARY, 40)


def break_books(engine):
    """What the prefix cache stores belongs to the allocator again, which gives it away."""
    engine.space.allocator._refs[Owner.CACHE] = 0


def fail_once(monkeypatch, owner, name):
    original, failures = getattr(owner, name), []

    def fails(*arguments, **options):
        if not failures:
            failures.append(1)
            raise MemoryError
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, fails)


def test_after_a_failed_check_the_next_prompt_is_computed(loaded, prompt):
    llm = LLM(loaded, num_slots=200)
    (first,) = llm.generate(prompt, FOUR, "exact")
    break_books(llm.engine)
    with pytest.raises(CorruptCacheError):
        llm.check()
    (again,) = llm.generate(prompt, FOUR, "exact")
    assert (again.token_ids, again.report.exact_tokens) == (first.token_ids, 0)
    llm.check()
    assert llm.engine.num_rebuilds == 1


def test_a_reset_mends_what_cannot_be_read(loaded, prompt):
    llm = LLM(loaded, num_slots=200)
    llm.generate(prompt, FOUR)
    break_books(llm.engine)
    llm.reset()
    llm.check()
    assert llm.usage().free == 200


def test_open_streams_end_with_an_error(loaded, prompt):
    llm = LLM(loaded, num_slots=200)
    stream = llm.stream(prompt, SamplingParams(20, ignore_eos=True))
    next(stream)
    llm.engine.space.allocator._refs[:] = 0
    with pytest.raises(CorruptCacheError):
        llm.check()
    with pytest.raises(RequestError, match="send it again"):
        list(stream)
    llm.generate(prompt, FOUR)
    llm.check()


def test_slots_that_a_probe_holds_are_given_to_no_request(loaded, prompt):
    llm = LLM(loaded, num_slots=200)
    with llm.probe(prompt, 4):
        break_books(llm.engine)
        llm.engine.space.allocator._class_sizes[:] = 0
        with pytest.raises(CorruptCacheError):
            llm.check()
        with pytest.raises(RequestError):
            llm.generate(prompt, FOUR)
        assert llm.engine.num_rebuilds == 0


def test_what_is_open_while_it_is_verified_is_no_fault(loaded, prompt):
    llm = LLM(loaded, num_slots=200)
    stream = llm.stream(prompt, SamplingParams(20, ignore_eos=True))
    next(stream)
    llm.engine.space.distrust()
    assert len(list(stream)) == 19
    assert llm.engine.num_rebuilds == 0


def test_a_session_is_not_open_any_more(loaded, prompt):
    llm = LLM(loaded, num_slots=200)
    llm.open_session("s")
    llm.generate(prompt, FOUR, session_id="s")
    break_books(llm.engine)
    with pytest.raises(CorruptCacheError):
        llm.check()
    llm.generate(prompt, FOUR)
    assert len(llm.engine.sessions) == 0
    llm.open_session("s")


async def answered(llm, prompt):
    request = await llm.prepare(prompt, FOUR, "exact")
    return [part.token_id async for part in llm.stream(request)]


def served(loaded, body, **settings):
    async def run():
        llm = AsyncLLM(loaded, num_slots=200, **settings)
        try:
            return await body(llm)
        finally:
            await llm.close()

    return asyncio.run(run())


def test_the_thread_survives_a_step_that_fails(loaded, prompt, monkeypatch):
    async def body(llm):
        expected = await answered(llm, prompt)
        fail_once(monkeypatch, Scheduler, "schedule")
        with pytest.raises(RequestError, match="out of memory"):
            await answered(llm, prompt)
        assert await answered(llm, prompt) == expected
        await llm.check()

    served(loaded, body)


def test_the_thread_survives_a_failure_between_steps(loaded, prompt, monkeypatch):
    async def body(llm):
        expected = await answered(llm, prompt)
        fail_once(monkeypatch, llm, "_deliver")
        with pytest.raises(RequestError):
            await answered(llm, prompt)
        assert await answered(llm, prompt) == expected
        await llm.check()

    served(loaded, body)


def test_checks_hold_again_after_one_that_failed(loaded, prompt):
    async def body(llm):
        expected = await answered(llm, prompt)
        await llm._call(lambda: break_books(llm._engine))
        with pytest.raises(CorruptCacheError):
            await llm.check()
        await llm.check()
        assert await answered(llm, prompt) == expected
        assert llm.snapshot().num_rebuilds == 1

    served(loaded, body)


def test_it_tries_again_where_there_is_no_memory_to_begin_anew(loaded, prompt, monkeypatch):
    async def body(llm):
        expected = await answered(llm, prompt)
        await llm._call(lambda: break_books(llm._engine))
        fail_once(monkeypatch, llm._engine.manager, "rebuild")
        with pytest.raises(CorruptCacheError):
            await llm.check()
        while not llm.snapshot().num_rebuilds:
            await asyncio.sleep(0.01)
        assert await answered(llm, prompt) == expected

    served(loaded, body)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"prefix_host_bytes": 1 << 20}),
        ("mistral", {}),
        ("granitemoehybrid", {}),
        ("granitemoehybrid", {"prefix_host_bytes": 1 << 22}),
    ],
    ids=["host", "windows", "states", "host states"],
)
def test_every_kind_of_space_begins_anew(family, settings, rng):
    llm = LLM(adopt_model(family, tiny_model(family), None), num_slots=200, host_bytes=1 << 22, **settings)
    prompts = [rng.integers(3, VOCABULARY, 90) for _ in range(5)]
    answers = [llm.generate(prompt, FOUR, "exact")[0].token_ids for prompt in prompts]
    llm.engine.rebuild()
    llm.check()
    assert llm.usage().free == 200
    assert [llm.generate(prompt, FOUR, "exact")[0].token_ids for prompt in prompts] == answers
    llm.check()


def test_what_stores_hold_is_found_again(loaded, rng, tmp_path):
    llm = LLM(loaded, num_slots=400, store=f"file:{tmp_path}")
    llm.generate(rng.integers(3, VOCABULARY, 200), FOUR)
    assert llm.sync_stores()
    llm.engine.rebuild()
    llm.check()
    assert len(llm.space.donors) == 0
    assert llm.sync_stores()
    assert llm.space.donors.num_stored == 1
    llm.check()
    llm.close()
