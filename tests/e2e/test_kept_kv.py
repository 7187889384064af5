"""What an engine keeps for others is exact where it says so, after preemptions too, and of the present weights."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL, run_to_end, submit
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model
from kvgraft.memory import HybridSlotPool
from kvgraft.prefix import RadixKey
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])


def make_engine(family="llama", **settings):
    config = EngineConfig(**(SMALL | {"num_slots": 1_500, "selection": "none", "max_rows": 40} | settings))
    return Engine(adopt_model(family, tiny_model(family), None), config)


def random_prompt(rng, length):
    return rng.integers(3, VOCABULARY, length)


def run_until(engine, condition):
    for _ in range(500):
        if condition():
            return
        engine.step()
    raise AssertionError("it never came to that")


def text_of(output):
    """Tokens whose K/V exist at the end."""
    return np.concatenate([output.prompt_token_ids, output.token_ids[:-1]]).astype(np.int64)


def assert_kept_is_exact(engine, outputs):
    texts = [text_of(output) for output in outputs]
    for text in texts:
        assert_prefix_is_exact(engine.adapter, engine.space, engine.builder.build(text[:2]).namespace, text)
    engine.space.check()
    assert engine.manager.num_errors == 0
    return assert_donors_are_exact(engine.adapter, engine.space, texts)


@FAMILIES
@pytest.mark.parametrize("moments", [[0], [1], [7], [0, 0, 3], [2, 9]])
def test_preempted_graft_launders_nothing(family, moments, rng):
    """Preempted in its prefill (0) or after so many tokens, perhaps again: the report does not become better for it."""
    engine = make_engine(family)
    document = random_prompt(rng, 150)
    submit(engine, document, 2)
    first = run_to_end(engine)
    active = submit(engine, np.concatenate([random_prompt(rng, 30), document, random_prompt(rng, 60)]), 14)
    reports = []
    for moment in moments:
        run_until(engine, lambda moment=moment: active.kv is not None and len(active.output_ids) >= moment)
        reports.append(active.report)
        engine.scheduler.preempt(active)
    second = run_to_end(engine)
    (output,) = second.values()
    assert output.num_preemptions == len(moments)
    assert output.report.shifted_tokens >= 140
    assert all(report is None or report == output.report for report in reports)
    assert assert_kept_is_exact(engine, [*first.values(), *second.values()]) >= 1


@pytest.mark.parametrize("cut", [1, 5, 10])
def test_windows_of_text_that_goes_on_heal_no_exact_prefix(cut, rng):
    """The exact prefix ends within the last window of what a turn goes on from, and its own windows leave meanwhile."""
    engine = make_engine("gemma2")
    prefix, document = engine.space.prefix, random_prompt(rng, 150)
    submit(engine, document, 2)
    outputs = run_to_end(engine)
    submit(engine, np.concatenate([random_prompt(rng, 30), document, random_prompt(rng, 60)]), 14)
    (first,) = (grafted := run_to_end(engine)).values()
    text = text_of(first)
    submit(engine, text[:-cut], 1, "exact")
    outputs |= grafted | run_to_end(engine)
    active = submit(engine, np.concatenate([text, random_prompt(rng, 90)]), 4)
    run_until(engine, lambda: active.kv is not None)
    exact_len, start = active.kv.lineage.prefix_len, active.kv.windows.start
    assert len(text) > exact_len > start
    submit(engine, np.concatenate([text[:start], random_prompt(rng, 5)]), 1, "exact")  # uses what lies before
    key = RadixKey(text, active.request.namespace.key)
    while prefix.look(key).prefix_len >= exact_len:
        engine.space.release_forgotten(prefix.evict(0, 1))
    last = run_to_end(engine)
    assert last[active.request.request_id].report.continued_tokens
    assert_kept_is_exact(engine, [*outputs.values(), *last.values()])


@FAMILIES
def test_donors_made_behind_a_graft_are_never_of_generation_0(family, rng):
    engine = make_engine(family)
    document, tail = random_prompt(rng, 150), random_prompt(rng, 80)
    submit(engine, document, 1)
    run_to_end(engine)
    prompt = np.concatenate([random_prompt(rng, 30), document, tail])
    active = submit(engine, prompt, 30)
    run_until(engine, lambda: len(active.output_ids) >= 2)
    engine.scheduler.preempt(active)
    engine.cancel(active.request.request_id)
    engine.space.check()
    behind = [d for d in engine.space.donors if np.isin(tail[:40], d.token_ids).all() and d.num_tokens >= 40]
    assert behind
    assert all(donor.generation == 1 for donor in behind)
    assert_prefix_is_exact(engine.adapter, engine.space, active.request.namespace, prompt)


@FAMILIES
@pytest.mark.parametrize("reuse", ["graft", "exact"])
@pytest.mark.parametrize("pause", [0, 2], ids=["at once", "later"])
def test_a_prompt_is_aborted_and_sent_again(family, reuse, pause, rng):
    """vllm#56525, #37152, in the embedded engine: what was announced of an aborted prompt was never written.

    There the same prompt, sent again, is answered with "multilingual word salad". Here what is kept of the first attempt is
    exact, wherever it had come to, and the second answers as a cold engine does.
    """
    engine = make_engine(family)
    document = random_prompt(rng, 150)
    submit(engine, document, 1)
    run_to_end(engine)
    for steps in range(0, 12, 2):
        prompt = np.concatenate([random_prompt(rng, 90), document, random_prompt(rng, 60)])
        first = submit(engine, prompt, 4, reuse)
        for _ in range(steps):
            engine.step()
        engine.cancel(first.request.request_id)
        for _ in range(pause):
            engine.step()
        assert_prefix_is_exact(engine.adapter, engine.space, first.request.namespace, prompt)
        submit(engine, prompt, 4, reuse)
        (again,) = run_to_end(engine).values()
        assert_kept_is_exact(engine, [again])
        if reuse == "exact":
            submit(engine, prompt, 4, "off")
            (full,) = run_to_end(engine).values()
            assert again.token_ids == full.token_ids


def change_weights(model, seed=9):
    """Load other weights into the same tensors, as a training loop does."""
    model.load_state_dict(tiny_model(model.config.model_type, seed=seed).state_dict())


@FAMILIES
def test_reset_forgets_the_old_weights_and_what_runs_keeps_nothing_of_them(family, rng):
    """Requests in their prefill and in the middle of their output straddle the change; a later one must not see them."""
    engine = make_engine(family)
    document = random_prompt(rng, 120)
    submit(engine, document, 1)
    run_to_end(engine)
    decoding = submit(engine, random_prompt(rng, 90), 40)
    run_until(engine, lambda: len(decoding.output_ids) >= 5)
    prefilling = submit(engine, np.concatenate([random_prompt(rng, 20), document, random_prompt(rng, 200)]), 6)
    run_until(engine, lambda: prefilling.is_prefilling)
    waiting = submit(engine, random_prompt(rng, 70), 4)
    change_weights(engine.loaded.model)
    engine.reset()
    assert len(engine.space.donors) == 0
    assert engine.space.usage().cached == 0
    outputs = run_to_end(engine)
    for active in (decoding, prefilling):
        assert (
            assert_prefix_is_exact(engine.adapter, engine.space, active.request.namespace, active.request.token_ids)
            == 0
        )
    kept = [outputs[waiting.request.request_id]]
    assert_kept_is_exact(engine, kept)
    assert {donor.num_tokens for donor in engine.space.donors} <= {len(text_of(kept[0])), 70, 73}
    submit(engine, document, 3)
    assert_kept_is_exact(engine, run_to_end(engine).values())


@FAMILIES
def test_preempted_request_that_straddles_a_reset_starts_afresh(family, rng):
    engine = make_engine(family)
    active = submit(engine, random_prompt(rng, 100), 20)
    run_until(engine, lambda: len(active.output_ids) >= 4)
    change_weights(engine.loaded.model)
    engine.reset()
    engine.scheduler.preempt(active)
    outputs = run_to_end(engine)
    assert_kept_is_exact(engine, outputs.values())


def test_reset_of_llm_and_async_llm_forgets_host_donors_too(rng):
    llm = LLM(adopt_model("gemma3_text", tiny_model("gemma3_text"), None), num_slots=600)
    llm.generate(random_prompt(rng, 100), SamplingParams(2))
    assert llm.space.host.used_bytes > 0
    stream = llm.stream(random_prompt(rng, 100), SamplingParams(50, ignore_eos=True))
    next(stream)
    llm.reset()
    list(stream)
    assert (llm.space.host.used_bytes, len(llm.space.donors), llm.usage().cached) == (0, 0, 0)

    async def main():
        engine = AsyncLLM(adopt_model("llama", tiny_model("llama"), None), num_slots=600)
        request = await engine.prepare(random_prompt(rng, 100), SamplingParams(30, ignore_eos=True))
        parts = engine.stream(request)
        await anext(parts)
        await engine.reset()
        async for _ in parts:
            pass
        snapshot = engine.snapshot()
        await engine.close()
        return snapshot

    snapshot = asyncio.run(main())
    assert (snapshot.num_donors, snapshot.usage.cached) == (0, 0)


@FAMILIES
def test_numbers_left_in_free_slots_change_no_answer(family, rng):
    """A request that overflowed leaves NaN behind; whoever gets its slots must not notice."""
    prompts = [random_prompt(rng, n) for n in (50, 90, 3)]

    def answers(fill):
        engine = make_engine(family, num_slots=700)
        pool = engine.adapter.pool
        for part in (pool.full, pool.window) if isinstance(pool, HybridSlotPool) else (pool,):
            if part is not None:
                slots = np.arange(part.num_slots)
                for layer, shape in enumerate(part.layers):
                    values = torch.full((len(slots), shape.num_kv_heads, shape.head_dim), fill)
                    part.place(slots).write(layer, values, values)
        actives = [
            submit(engine, prompt, 20, reuse) for prompt, reuse in zip(prompts, ("off", "exact", "graft"), strict=True)
        ]
        outputs = run_to_end(engine)
        return [outputs[active.request.request_id].token_ids for active in actives]

    assert answers(float("nan")) == answers(0.0)


def test_an_exact_answer_that_begins_again_goes_on_from_no_copies(rng):
    """Its report calls all of it exact. Another request has the same text approximate when it begins again."""
    engine = make_engine("llama")
    space, document = engine.space, random_prompt(rng, 150)
    prompt = np.concatenate([random_prompt(rng, 30), document, random_prompt(rng, 60)])
    active = submit(engine, prompt, 14)
    run_until(engine, lambda: len(active.output_ids) >= 4)
    engine.scheduler.preempt(active)
    for donor in list(space.donors):
        space.remove_donor(donor.donor_id)
    space.release_forgotten(space.prefix.evict(1_500))
    engine.scheduler.waiting.remove(active)
    submit(engine, document, 1)
    run_to_end(engine)
    submit(engine, np.concatenate([prompt, active.output_ids[:2]]), 1)
    (twin,) = run_to_end(engine).values()
    assert twin.report.shifted_tokens
    engine.scheduler.waiting.push_front(active)
    run_until(engine, lambda: len(active.output_ids) >= 6)
    assert active.report.exact_tokens + active.report.computed_tokens == len(prompt)
    assert not active.kv.lineage.is_approximate
