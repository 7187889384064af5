"""Documents have names: reports say which was reused, nothing is computed by names, and no tenant sees another's."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.engine_runs import SMALL

from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.document_names import DocumentLabel, document_reuse
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.errors import ConfigError
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

SAMPLING = SamplingParams(4, ignore_eos=True)
RNG = np.random.default_rng(16)
ONE, OTHER, HEAD, QUESTION = (RNG.integers(3, VOCABULARY, n) for n in (80, 60, 25, 12))
FIRST = np.concatenate([HEAD, ONE, OTHER])
SECOND = np.concatenate([QUESTION, OTHER, ONE, HEAD])
IN_FIRST = (DocumentLabel("one", 25, 105), DocumentLabel("other", 105, 165))


def make(family="llama", **settings):
    settings = SMALL | {"num_slots": 2_000, "selection": "none", "correction": "none", "heal": "off"} | settings
    return AsyncLLM(adopt_model(family, tiny_model(family), None), **settings)


def run(llm, *asked):
    """Outputs of requests one behind the other."""

    async def ask():
        outputs = []
        for prompt, options in asked:
            request = await llm.prepare(prompt, SAMPLING, **({"reuse": "graft"} | options))
            outputs.append([part async for part in llm.stream(request)][-1].output)
        await llm.close()
        return outputs

    return asyncio.run(ask())


def parts(report):
    return {(part.document_id, part.start, part.length) for span in report.spans for part in span.documents}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_spans_name_what_they_are_of_and_where_it_lies_in_this_prompt(family):
    _, second = run(make(family), (FIRST, {"documents": IN_FIRST}), (SECOND, {}))
    assert second.report.shifted_tokens >= 100
    found = parts(second.report)
    assert {name for name, _, _ in found} == {"one", "other"}
    places = {"other": (12, 72), "one": (72, 152)}
    for name, start, length in found:
        assert places[name][0] <= start < start + length <= places[name][1]
        text = {"one": ONE, "other": OTHER}[name]
        offset = start - places[name][0]
        assert np.array_equal(SECOND[start : start + length], text[offset : offset + length])


def test_nothing_is_computed_by_names():
    named = run(make(), (FIRST, {"documents": IN_FIRST}), (SECOND, {"documents": [DocumentLabel("x", 12, 72)]}))
    plain = run(make(), (FIRST, {}), (SECOND, {}))
    for one, other in zip(named, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert [(s.target_start, s.length, s.donor_start) for s in one.report.spans] == [
            (s.target_start, s.length, s.donor_start) for s in other.report.spans
        ]
        assert one.report.computed_flops == other.report.computed_flops
    assert plain[1].report.spans
    assert parts(plain[1].report) == set()


def test_names_of_one_tenant_are_not_told_to_another():
    llm = make()
    outputs = run(
        llm,
        (FIRST, {"documents": [DocumentLabel("secret", 25, 105)], "cache_salt": "a"}),
        (FIRST, {"documents": IN_FIRST, "cache_salt": "b"}),
        (SECOND, {"cache_salt": "b"}),
        (SECOND, {"cache_salt": "c"}),
        (SECOND, {"cache_salt": "a"}),
    )
    names = [{name for name, _, _ in parts(output.report)} for output in outputs]
    assert names[2:] == [{"one", "other"}, set(), {"secret"}]


def test_a_request_is_told_what_became_of_its_own_documents():
    labels = [DocumentLabel("other", 12, 72), DocumentLabel("head", 152, 177)]

    async def ask(llm):
        async def finished(prompt, documents):
            request = await llm.prepare(prompt, SAMPLING, documents=documents)
            return request, [part async for part in llm.stream(request)][-1].output

        await finished(FIRST, ())
        request, output = await finished(SECOND, labels)
        again, same = await finished(SECOND, labels)
        await llm.close()
        return document_reuse(request.documents, output.report), document_reuse(again.documents, same.report)

    grafted, _ = asyncio.run(ask(make()))
    other, head = grafted
    assert (other["id"], other["start"], other["length"], other["exact_tokens"]) == ("other", 12, 60, 0)
    assert 40 <= other["copied_tokens"] <= 60
    assert head["copied_tokens"] <= 25


def test_offline_prompts_have_names_too():
    llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=2_000, selection="none", correction="none")
    with pytest.raises(ConfigError, match="parts of one prompt, and there are 2"):
        llm.generate([FIRST, SECOND], SAMPLING, documents=IN_FIRST)
    llm.generate(FIRST[:105], SAMPLING, documents=IN_FIRST[:1])
    *_, last = llm.stream(np.concatenate([HEAD[::-1], OTHER]), SAMPLING, documents=[DocumentLabel("other", 25, 85)])
    assert last.output.finish_reason == "length"
    (second,) = llm.generate(SECOND, SAMPLING)
    assert {name for name, _, _ in parts(second.report)} == {"one", "other"}


def test_names_leave_with_their_donors():
    llm = make(num_slots=600, host_bytes=0)
    names = llm._engine.manager._grafting.names
    fillers = [(RNG.integers(3, VOCABULARY, 200), {}) for _ in range(6)]

    async def ask():
        for prompt, options in [(FIRST, {"documents": IN_FIRST}), *fillers]:
            request = await llm.prepare(prompt, SAMPLING, **options)
            async for _ in llm.stream(request):
                pass
            counts.append(len(names))
        request = await llm.prepare(FIRST[:100], SAMPLING, documents=[DocumentLabel("x", 0, 50)])
        async for _ in llm.stream(request):
            pass
        counts.append(len(names))
        await llm.reset()
        counts.append(len(names))
        await llm.close()

    counts = []
    asyncio.run(ask())
    assert counts[0] == 1
    assert counts[len(fillers)] == 0
    assert counts[-2:] == [1, 0]


def test_verified_answers_name_what_the_drafts_rested_on():
    _, second = run(make(), (FIRST, {"documents": IN_FIRST}), (SECOND, {"reuse": "verified"}))
    assert second.report.spans == ()
    assert {p.document_id for span in second.report.healing.spans for p in span.documents} == {"one", "other"}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([DocumentLabel("", 0, 5)], "1 to 256 characters"),
        ([DocumentLabel("x" * 257, 0, 5)], "1 to 256 characters"),
        ([DocumentLabel("a", 5, 5)], "not empty"),
        ([DocumentLabel("a", -1, 5)], "range of the prompt"),
        ([DocumentLabel("a", 0, 166)], "of 165 tokens"),
        ([DocumentLabel("a", 0, 1)] * 1025, "at most 1024 document labels, not 1025"),
    ],
)
def test_labels_that_are_wrong_are_refused(labels, message):
    llm = make()

    async def ask():
        try:
            with pytest.raises(ConfigError, match=message):
                await llm.prepare(FIRST, SAMPLING, documents=labels)
        finally:
            await llm.close()

    asyncio.run(ask())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_heals_keeps_its_name_or_loses_it(family):
    llm = LLM(adopt_model(family, tiny_model(family), None), num_slots=2_000, selection="none", heal="idle")
    engine, new = llm.engine, RNG.integers(3, VOCABULARY, 70)

    def ask(*texts, documents=()):
        engine.add(engine.builder.build(np.concatenate(texts), RequestOptions(SAMPLING, "graft", documents=documents)))
        told = [event.part for _ in range(200) if engine.has_work for event in engine.step()]
        return told[-1].output

    ask(FIRST)
    before = ask(QUESTION, ONE, new, documents=[DocumentLabel("new", 92, 162)])
    assert before.report.shifted_tokens
    llm.heal()
    assert engine.healer.num_requests == 1
    after = ask(HEAD[::-1], new, QUESTION)
    assert {span.generation for span in after.report.spans} == {0}
    assert parts(after.report) <= {("new", span.target_start, span.length) for span in after.report.spans}
    if family == "llama":
        assert parts(after.report)
