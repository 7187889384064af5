"""Continuous batching: what many concurrent requests get is what each would get alone, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.engine_runs import begin_together, run_together

from kvgraft.engine import LLM, AsyncLLM, FinishReason, SamplingParams, async_llm
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError, KVGraftError, OverloadedError, RequestError
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

PATIENCE_S = 120.0
EAGER = 1e6
"""`stream_slowdown` that holds no prompt back: at the default, a slow machine admits them one by one and preempts none."""


def make(family="llama", **settings):
    settings = {"num_slots": 2_000, "selection": "none"} | settings
    return AsyncLLM(adopt_model(family, tiny_model(family), None), **settings)


async def run(llm, prompt, sampling, reuse="off", **options):
    request = await llm.prepare(prompt, sampling, reuse, **options)
    return [part async for part in llm.stream(request)]


def greedy_alone(family, prompts, lengths, num_slots=4_000):
    """Tokens and the margin between the two largest logits at each, one request at a time."""
    llm = LLM(adopt_model(family, tiny_model(family), None), num_slots=num_slots)
    results = []
    for prompt, length in zip(prompts, lengths, strict=True):
        sampling = SamplingParams(length, ignore_eos=True, logprobs=2)
        parts = list(llm.stream(prompt, sampling, "off"))
        margins = [part.logprobs.top[0][1] - part.logprobs.top[1][1] for part in parts]
        results.append(([part.token_id for part in parts], margins))
    return results


def assert_same_up_to_ties(token_ids, alone):
    """A difference is allowed only where the two likeliest tokens were within 1e-4; what follows it is another text."""
    expected, margins = alone
    for got, want, margin in zip(token_ids, expected, margins, strict=True):
        if got != want:
            assert margin < 1e-4
            return


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def single_runs(request):
    """A family, 24 prompts and lengths, and what each gets alone."""
    rng = np.random.default_rng(20261121)
    lengths = rng.integers(20, 70, 24)
    prompts = [rng.integers(3, VOCABULARY, n) for n in rng.integers(5, 120, 24)]
    return request.param, prompts, lengths, greedy_alone(request.param, prompts, lengths)


@pytest.mark.parametrize("reuse", ["off", "exact"])
def test_concurrent_greedy_text_is_that_of_single_runs_though_slots_run_out(single_runs, reuse):
    """24 requests whose slots are eight times what the pool holds: a few at once, however they arrive, outgrow it."""
    family, prompts, lengths, alone = single_runs
    need = sum(len(prompt) + int(length) for prompt, length in zip(prompts, lengths, strict=True))

    async def main():
        llm = make(family, num_slots=need // 8, stream_slowdown=EAGER)
        requests = [
            await llm.prepare(prompt, SamplingParams(int(length), ignore_eos=True), reuse)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        results = await run_together(llm, requests)
        await llm.check()
        snapshot = llm.snapshot()
        await llm.close()
        return results, snapshot

    results, snapshot = asyncio.run(main())
    assert snapshot.num_preemptions > 0
    assert (snapshot.usage.request, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
    for parts, expected, length in zip(results, alone, lengths, strict=True):
        assert len(parts) == length
        assert parts[-1].output.finish_reason is FinishReason.LENGTH
        assert_same_up_to_ties([part.token_id for part in parts], expected)


def test_disconnects_and_cancellations_at_every_stage_leak_nothing(rng):
    document = rng.integers(3, VOCABULARY, 150)

    async def client(llm, number, generator):
        prompt = np.concatenate([generator.integers(3, VOCABULARY, int(generator.integers(1, 60))), document])
        reuse = ("off", "exact", "graft")[number % 3]
        stream = llm.stream(await llm.prepare(prompt, SamplingParams(40, ignore_eos=True), reuse))
        stop_after = int(generator.integers(0, 45))
        if stop_after == 0:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(float(generator.random()) * 0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return None
        count = 0
        async with contextlib.aclosing(stream):
            async for part in stream:
                count += 1
                if count >= stop_after or part.output is not None:
                    break
        return count

    async def main():
        llm = make(num_slots=1_200)
        generator = np.random.default_rng(5)
        counts = await asyncio.gather(*(client(llm, i, generator) for i in range(48)))
        await llm.check()  # the cancellations are obeyed
        async with asyncio.timeout(PATIENCE_S):
            while llm.snapshot().num_heal_candidates:
                await llm.check()
                await asyncio.sleep(0.01)
        await llm.check()
        snapshot = llm.snapshot()  # nothing moves any more: what is read at work may be of neighbouring moments
        await llm.close()
        return counts, snapshot

    counts, snapshot = asyncio.run(main())
    assert snapshot.usage.request == 0
    assert snapshot.num_running == snapshot.num_waiting == snapshot.num_errors == 0
    assert any(count == 40 for count in counts)


def test_prompt_is_reusable_as_soon_as_it_is_computed(rng):
    """A stream that still runs is a donor already."""
    document = rng.integers(3, VOCABULARY, 200)

    async def main():
        llm = make()
        long = llm.stream(await llm.prepare(document, SamplingParams(500, ignore_eos=True), "off"))
        await anext(long)
        shifted = np.concatenate([rng.integers(3, VOCABULARY, 30), document, rng.integers(3, VOCABULARY, 5)])
        grafted = (await run(llm, shifted, SamplingParams(2), "graft"))[-1].output
        exact = (await run(llm, document, SamplingParams(2), "exact"))[-1].output
        assert llm.snapshot().num_running == 1
        await long.aclose()
        await llm.close()
        return grafted.report, exact.report

    grafted, exact = asyncio.run(main())
    assert grafted.shifted_tokens == 200
    assert exact.exact_tokens == 199


def test_preempted_graft_is_computed_again_without_one_and_says_what_was_grafted(rng):
    document = rng.integers(3, VOCABULARY, 120)

    async def main():
        llm = make(num_slots=850, stream_slowdown=EAGER)
        await run(llm, document, SamplingParams(2), "off")
        prompts = [np.concatenate([rng.integers(3, VOCABULARY, 20), document]) for _ in range(4)]
        sampling = SamplingParams(150, ignore_eos=True)
        results = await run_together(llm, [await llm.prepare(prompt, sampling, "graft") for prompt in prompts])
        await llm.check()
        await llm.close()
        return [parts[-1].output for parts in results]

    outputs = asyncio.run(main())
    assert sum(output.num_preemptions for output in outputs) > 0
    assert all(len(output.token_ids) == 150 for output in outputs)
    assert all(output.report.shifted_tokens >= 119 for output in outputs)


def test_engine_failure_ends_one_request_and_no_other(rng, monkeypatch):
    async def main():
        llm = make()
        adapter = llm._engine.adapter
        forward = adapter.forward

        def failing(batch):
            if any(7 in rows.token_ids and 8 in rows.token_ids for rows in batch):
                raise RuntimeError("out of memory")
            return forward(batch)

        monkeypatch.setattr(adapter, "forward", failing)
        good, sampling = rng.integers(10, VOCABULARY, 30), SamplingParams(20, ignore_eos=True)
        prompts = (good, np.array([7, 8, 9]), good[:7])
        requests = [await llm.prepare(prompt, sampling, "off") for prompt in prompts]
        results = await asyncio.gather(*await begin_together(llm, requests), return_exceptions=True)
        await llm.check()
        usage = llm.snapshot().usage
        await llm.close()
        return results, usage

    (first, failed, second), usage = asyncio.run(main())
    assert isinstance(failed, RequestError)
    assert "out of memory" in str(failed)
    assert len(first) == len(second) == 20
    assert usage.request == 0


def test_too_many_waiting_requests_are_refused(rng):
    async def main():
        llm = make(max_running=1, max_waiting=2)
        sampling = SamplingParams(30, ignore_eos=True)
        requests = [await llm.prepare(rng.integers(3, VOCABULARY, 20), sampling, "off") for _ in range(8)]
        results = await asyncio.gather(*await begin_together(llm, requests), return_exceptions=True)
        await llm.close()
        return results

    results = asyncio.run(main())
    refused = [result for result in results if isinstance(result, OverloadedError)]
    assert len(refused) == 8 - 2
    assert all(len(result) == 30 for result in results if not isinstance(result, OverloadedError))


def test_close_lets_streams_finish_within_grace_and_fails_the_rest(rng):
    async def main(grace_s, length):
        llm = make()
        task = asyncio.ensure_future(run(llm, rng.integers(3, VOCABULARY, 20), SamplingParams(length, ignore_eos=True)))
        while not (llm.snapshot().num_running or task.done()):
            await asyncio.sleep(0.005)
        await llm.close(grace_s)
        with pytest.raises(OverloadedError):
            await run(llm, [5], SamplingParams(1))
        snapshot = llm.snapshot()
        assert (snapshot.is_alive, snapshot.usage.request) == (False, 0)
        return await asyncio.gather(task, return_exceptions=True)

    assert len(asyncio.run(main(PATIENCE_S, 40))[0]) == 40
    assert isinstance(asyncio.run(main(0.0, 1_500))[0], OverloadedError)


def test_bad_prompts_are_refused_before_they_reach_the_engine():
    async def main():
        llm = make()
        for prompt in ([], [VOCABULARY], [-1], [[1, 2]], list(range(10)) * 300, ["x"]):
            with pytest.raises(ConfigError):
                await llm.prepare(prompt)
        await llm.close()

    asyncio.run(main())


def test_logprobs_are_those_of_the_model(rng):
    prompt = rng.integers(3, VOCABULARY, 40)

    async def main():
        llm = make()
        parts = await run(llm, prompt, SamplingParams(3, ignore_eos=True, logprobs=3))
        await llm.close()
        return llm, parts

    llm, parts = asyncio.run(main())
    with llm._engine.adapter.stock() as model, torch.inference_mode():
        logits = model(torch.from_numpy(prompt)[None], use_cache=False).logits[0, -1]
    expected = logits.log_softmax(-1)
    first = parts[0].logprobs
    assert [token for token, _ in first.top] == expected.topk(3).indices.tolist()
    assert first.logprob == pytest.approx(float(expected[first.token_id]), abs=1e-4)


def test_fairness_a_tenant_with_many_requests_does_not_starve_another(rng):
    async def main():
        llm = make(max_running=1)
        order, sampling = [], SamplingParams(4, ignore_eos=True)
        tenants = ["greedy"] * 10 + ["modest"]
        requests = [
            await llm.prepare(rng.integers(3, VOCABULARY, 40), sampling, "off", cache_salt=tenant) for tenant in tenants
        ]
        tasks = await begin_together(llm, requests)
        for task, tenant in zip(tasks, tenants, strict=True):
            task.add_done_callback(lambda _, tenant=tenant: order.append(tenant))
        await asyncio.gather(*tasks)
        await llm.close()
        return order

    assert asyncio.run(main()).index("modest") < 8


def with_seed_that_no_generator_takes(request):
    """A request whose sampling went unchecked, as a program that fills in fields by itself can make one."""
    sampling = copy.copy(request.sampling)
    object.__setattr__(sampling, "seed", 2**64)
    return replace(request, sampling=sampling)


async def collect(stream):
    try:
        return [part.token_id async for part in stream]
    except KVGraftError as error:
        return error


def test_request_that_the_engine_cannot_take_fails_alone(rng):
    """Requests that come in the same moment were lost with it, and waited for ever."""
    prompt = rng.integers(3, VOCABULARY, 20)

    async def main():
        llm = make()
        requests = [await llm.prepare(prompt, SamplingParams(5, ignore_eos=True), "off") for _ in range(5)]
        requests[2] = with_seed_that_no_generator_takes(requests[2])
        results = await asyncio.wait_for(asyncio.gather(*(collect(llm.stream(r)) for r in requests)), 30)
        later = await asyncio.wait_for(run(llm, prompt, SamplingParams(5, ignore_eos=True)), 30)
        await llm.close()
        return results, [part.token_id for part in later]

    results, later = asyncio.run(main())
    failed = results.pop(2)
    assert isinstance(failed, RequestError)
    assert "\n" not in str(failed)
    assert all(tokens == later for tokens in results)


def test_dead_engine_fails_every_stream_with_one_error_and_those_that_come_later(rng, monkeypatch):
    """Running, waiting, not yet taken and submitted after its death: nobody waits, all are told the same."""

    async def main():
        llm = make(max_running=1)
        requests = [await llm.prepare(rng.integers(3, VOCABULARY, 20), SamplingParams(400), "off") for _ in range(4)]
        running = llm.stream(requests[0])
        await anext(running)
        waiting = asyncio.ensure_future(collect(llm.stream(requests[1])))
        await asyncio.sleep(0.05)

        def die():
            raise SystemExit("an error is survived, this is none")

        monkeypatch.setattr(llm._engine.scheduler, "schedule", die)
        untaken = asyncio.ensure_future(collect(llm.stream(requests[2])))
        errors = await asyncio.wait_for(asyncio.gather(collect(running), waiting, untaken), 30)
        errors.append(await asyncio.wait_for(collect(llm.stream(requests[3])), 30))
        with pytest.raises(KVGraftError, match="the engine has stopped"):
            await asyncio.wait_for(llm.check(), 30)
        with pytest.raises(KVGraftError, match="the engine has stopped"):
            await asyncio.wait_for(llm.reset(), 30)
        await asyncio.wait_for(llm.close(), 30)
        return errors

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    errors = asyncio.run(main())
    assert {(type(error), str(error)) for error in errors} == {
        (OverloadedError, "the engine has stopped; try another one")
    }


def test_commands_that_race_with_the_death_of_the_engine_are_answered(rng, monkeypatch):
    """The thread ends between a command's check that it lives and its arrival."""

    async def main():
        llm = make()
        requests = [await llm.prepare(rng.integers(3, VOCABULARY, 9), SamplingParams(2), "off") for _ in range(30)]
        streams = [asyncio.ensure_future(collect(llm.stream(request))) for request in requests[:15]]
        closing = asyncio.ensure_future(llm.close())
        streams += [asyncio.ensure_future(collect(llm.stream(request))) for request in requests[15:]]
        results = await asyncio.wait_for(asyncio.gather(*streams), 30)
        await closing
        llm._is_closing = False  # as a task saw it that was interrupted right behind its check
        results.append(await asyncio.wait_for(collect(llm.stream(requests[0])), 30))
        return results

    assert all(isinstance(result, OverloadedError) for result in asyncio.run(main())[15:])


def test_recorder_that_fails_harms_no_request(rng):
    class Broken:
        def record_request(self, record):
            raise ValueError("no disk")

        def record_step(self, record):
            raise ValueError("no disk")

        def record_idle(self, record):
            raise ValueError("no disk")

    async def main():
        llm = AsyncLLM(adopt_model("llama", tiny_model("llama"), None), None, Broken(), num_slots=400)
        parts = await asyncio.wait_for(run(llm, rng.integers(3, VOCABULARY, 9), SamplingParams(3)), 30)
        await llm.close()
        return parts

    assert len(asyncio.run(main())) == 3


def test_a_stream_is_told_once_that_its_request_is_accepted():
    async def serve():
        llm = make(max_waiting=1, max_running=1)
        told, parts = [], []
        try:
            first = await llm.prepare([5] * 40, SamplingParams(4, ignore_eos=True), "off")
            async for part in llm.stream(first, partial(told.append, "accepted")):
                if not parts:
                    told.append("token")
                parts.append(part)
            same = [
                await llm.prepare([5] * 40, SamplingParams(300, ignore_eos=True), request_id="same") for _ in range(2)
            ]
            async with asyncio.timeout(PATIENCE_S):
                results = await asyncio.gather(
                    *(drain(llm.stream(request, partial(told.append, "same"))) for request in same),
                    return_exceptions=True,
                )
            return told, [type(result) for result in results]
        finally:
            await llm.close()

    told, results = asyncio.run(serve())
    assert told[:2] == ["accepted", "token"]
    assert told[2:].count("same") == results.count(list)
    assert ConfigError in results


async def drain(stream):
    return [part async for part in stream]


def test_an_engine_that_does_not_end_its_step_is_given_up(rng, monkeypatch):
    monkeypatch.setattr(async_llm, "_LAST_STEP_S", 0.01)
    hangs, goes_on = threading.Event(), threading.Event()

    async def main():
        llm = make()
        task = asyncio.ensure_future(run(llm, rng.integers(3, VOCABULARY, 20), SamplingParams(40)))
        llm._command(lambda: (hangs.set(), goes_on.wait()), lambda error: None)
        await asyncio.to_thread(hangs.wait)
        await llm.close()
        assert llm.is_stuck
        with pytest.raises(OverloadedError):
            await task
        with pytest.raises(OverloadedError):
            await llm.check()
        goes_on.set()
        await asyncio.to_thread(llm._thread.join)

    asyncio.run(main())
