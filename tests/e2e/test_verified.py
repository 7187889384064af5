"""`reuse="verified"`: drafts from a graft, and an answer that is a full prefill's, whatever happens on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL
from tests.support.families import families
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

PIECE = 40
NEW = 12


def make_engine(family="llama", **settings):
    """Steps carry few rows, so that a prompt is healed in many pieces."""
    config = EngineConfig(**SMALL | {"num_slots": 2_000, "max_rows": PIECE, "host_bytes": 10_000_000, **settings})
    return Engine(adopt_model(family, tiny_model(family), None), config)


def words(count, seed):
    return np.random.default_rng(seed).integers(3, VOCABULARY, count)


DOCUMENT = words(150, 0)


def asked(seed=2):
    """A prompt that has the document behind another head than anybody else's."""
    return np.concatenate([words(23, seed), DOCUMENT, words(9, seed + 100)])


def submit(engine, prompt, reuse="verified", *, provisional=False, **sampling):
    params = SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, **sampling})
    request = replace(engine.builder.build(prompt, RequestOptions(params, reuse)), provisional=provisional)
    engine.add(request)
    return request.request_id


def step(engine, parts):
    for event in engine.step():
        assert event.error is None, event.error
        parts.setdefault(event.request_id, []).append(event.part)


def run(engine):
    """All parts until nothing is left to do, by request."""
    parts = {}
    while engine.has_work:
        step(engine, parts)
    engine.check()
    return parts


def answer(engine, prompt, reuse="verified", **options):
    name = submit(engine, prompt, reuse, **options)
    return run(engine)[name][-1].output


def with_document(engine):
    answer(engine, np.concatenate([words(7, 1), DOCUMENT]), "graft", max_new_tokens=1)
    return engine


def drafting(engine):
    return [active for active in engine.scheduler.running if active.drafts is not None]


@families(["llama", "gemma3_text", "llama4_text", "gpt_oss"], quick=["llama", "gpt_oss"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_the_answer_is_that_of_a_full_prefill(family, sampling):
    engine, fresh = with_document(make_engine(family)), make_engine(family)
    for seed in range(2, 6):
        output = answer(engine, asked(seed), **sampling)
        assert output.token_ids == answer(fresh, asked(seed), "off", **sampling).token_ids
        healing = output.report.healing
        assert healing.drafted_tokens > 2
        assert sum(span.length for span in healing.spans) >= 140
        assert output.report.spans == ()
        assert output.report.reused_tokens == output.report.exact_tokens
        assert 0 < healing.first_provisional_s < healing.first_verified_s <= healing.healed_at_s
        assert output.ttft_s == pytest.approx(healing.first_verified_s, abs=0.01)


def test_drafts_that_are_wrong_are_retracted():
    """The graft is made worthless: drafts come from garbage, and the answer is right all the same."""
    engine, fresh = with_document(make_engine()), make_engine()
    right = answer(fresh, asked(), "off").token_ids
    name = submit(engine, asked(), provisional=True)
    parts = {}
    while not drafting(engine):
        step(engine, parts)
    (active,) = drafting(engine)
    behind = active.kv.kv_indices[active.drafts.frontier : active.drafts.prompt_len]
    for layer in range(engine.adapter.num_layers):
        keys, values = engine.adapter.pool.read(layer, engine.adapter.pool.index(behind))
        engine.adapter.pool.write(layer, engine.adapter.pool.index(behind), noise(keys), noise(values))
    while engine.has_work:
        step(engine, parts)
    output = parts[name][-1].output
    assert output.token_ids == right
    assert output.report.healing.retracted_tokens > 0
    assert outstanding(parts[name]) == list(right)


def noise(like):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)) * 3


def outstanding(parts):
    """What a client that follows the protocol holds for the answer, checked part by part."""
    verified, drafted = [], []
    for part in parts:
        if part.num_retracted:
            assert part.num_retracted <= len(drafted)
            del drafted[-part.num_retracted :]
        if part.is_provisional:
            drafted.append(part.token_id)
        else:
            drafted = drafted[1:] if drafted[:1] == [part.token_id] else []
            verified.append(part.token_id)
    return verified


def test_provisional_tokens_come_only_to_who_asks():
    engine = with_document(make_engine())
    for provisional in (False, True):
        name = submit(engine, asked(), provisional=provisional)
        parts = run(engine)[name]
        assert any(part.is_provisional for part in parts) is provisional
        assert outstanding(parts) == list(parts[-1].output.token_ids)
        engine.reset()
        with_document(engine)


def test_a_prompt_without_a_graft_is_computed_once():
    engine = make_engine()
    output = answer(engine, asked())
    assert output.report.healing is None
    assert output.report.computed_tokens == len(asked())


def test_what_was_healed_is_a_prefix_and_a_donor_of_generation_0():
    engine = with_document(make_engine())
    output = answer(engine, asked())
    text = np.concatenate([asked(), output.token_ids[:-1]])
    namespace = engine.builder.build(text[:1]).namespace
    assert assert_prefix_is_exact(engine.adapter, engine.space, namespace, text) == len(text)
    assert_donors_are_exact(engine.adapter, engine.space, [text, np.concatenate([words(7, 1), DOCUMENT])])
    assert {donor.generation for donor in engine.space.donors} == {0}


def test_nothing_is_kept_of_what_is_not_healed():
    engine = with_document(make_engine())
    num_donors, stored = len(engine.space.donors), engine.space.prefix.total_size
    name, parts = submit(engine, asked()), {}
    while not drafting(engine) or drafting(engine)[0].drafts.frontier < 100:
        step(engine, parts)
    assert engine.cancel(name)
    engine.check()
    assert (len(engine.space.donors), engine.space.prefix.total_size) == (num_donors, stored)
    assert engine.space.usage().request == 0


@pytest.mark.parametrize(
    ("family", "page_size", "provisional"),
    [
        pytest.param("llama", 1, True, marks=pytest.mark.slow),
        pytest.param("llama", 16, False, marks=pytest.mark.slow),
        ("gemma3_text", 16, True),
    ],
)
def test_preempted_at_every_stage(family, page_size, provisional):
    """What is in front of the frontier is found again, and what the client was shown is taken back or confirmed."""
    engine, fresh = with_document(make_engine(family, page_size=page_size)), make_engine(family)
    right = answer(fresh, asked(), "off").token_ids
    stage = 0
    while True:
        name, parts = submit(engine, asked(), provisional=provisional), {}
        for _ in range(stage):
            step(engine, parts)
        if not engine.has_work:
            break
        if engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])
            engine.check()
        while engine.has_work:
            step(engine, parts)
        assert parts[name][-1].output.token_ids == right, stage
        assert outstanding(parts[name]) == list(right)
        engine.reset()
        with_document(engine)
        stage += 1
    assert stage > len(asked()) // PIECE


def test_a_healed_beginning_survives_a_preemption():
    engine = with_document(make_engine())
    name, parts = submit(engine, asked()), {}
    while not drafting(engine) or drafting(engine)[0].drafts.frontier < 110:
        step(engine, parts)
    frontier = drafting(engine)[0].drafts.frontier
    engine.scheduler.preempt(engine.scheduler.running[0])
    while engine.has_work:
        step(engine, parts)
    assert parts[name][-1].output.report.exact_tokens == frontier


def test_drafts_are_told_of_though_the_next_attempt_finds_nothing_to_graft():
    engine = with_document(make_engine())
    name, parts = submit(engine, asked(), provisional=True), {}
    while not parts:
        step(engine, parts)
    for donor in list(engine.space.donors):
        engine.space.remove_donor(donor.donor_id)
    engine.scheduler.preempt(engine.scheduler.running[0])
    while engine.has_work:
        step(engine, parts)
    output = parts[name][-1].output
    assert output.report.healing.drafted_tokens == output.report.healing.retracted_tokens == 1
    assert [part.num_retracted for part in parts[name]][:2] == [0, 1]
    assert output.token_ids == answer(make_engine(), asked(), "off").token_ids


def test_the_end_of_the_text_ends_drafts_and_answer():
    engine, fresh = with_document(make_engine()), make_engine()
    right = answer(fresh, asked(), "off").token_ids
    for each in (engine, fresh):
        each.eos_token_ids = frozenset({right[4]})
    expected = answer(fresh, asked(), "off", ignore_eos=False)
    output = answer(engine, asked(), ignore_eos=False, provisional=True)
    assert output.token_ids == expected.token_ids == right[: right.index(right[4]) + 1]
    assert output.finish_reason == expected.finish_reason


@pytest.mark.parametrize("count", [1, 2, 3])
def test_answers_of_a_few_tokens(count):
    """There is no room behind the prompt for the draft of an answer of one token."""
    engine, fresh = with_document(make_engine()), make_engine()
    output = answer(engine, asked(), max_new_tokens=count)
    assert output.token_ids == answer(fresh, asked(), "off", max_new_tokens=count).token_ids
    assert len(output.token_ids) == count


def test_requests_beside_one_another_do_not_meet():
    engine, fresh = with_document(make_engine(num_slots=900)), make_engine()
    names = {submit(engine, asked(seed), mode): (seed, mode) for seed in range(2, 8) for mode in ("verified", "off")}
    parts = run(engine)
    for name, (seed, _) in names.items():
        assert parts[name][-1].output.token_ids == answer(fresh, asked(seed), "off").token_ids


def test_scores_and_probes_of_verified_prompts_are_a_full_prefills():
    llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=2_000)
    llm.generate(np.concatenate([words(7, 1), DOCUMENT]), SamplingParams(1))
    continuation = words(6, 50)
    scores = {mode: llm.score(asked(), continuation, mode).logits for mode in ("verified", "off", "graft")}
    assert torch.allclose(scores["verified"], scores["off"], atol=1e-4)
    assert not torch.allclose(scores["graft"], scores["off"], atol=1e-4)
    with llm.probe(asked(), 6, "verified") as probe:
        assert torch.allclose(probe.logits(continuation), scores["off"], atol=1e-4)


def test_a_verified_prompt_is_as_late_as_one_that_is_computed_in_full():
    """What is promised counts what is computed again, not the gaps of the graft alone: lateness is what slows streams."""
    engine = with_document(make_engine())
    promised = {}
    for mode in ("verified", "off"):
        submit(engine, asked(5), mode)
        engine.step()
        (active,) = engine.scheduler.running
        promised[mode] = engine.scheduler._prompt_flops(active)
        engine.cancel_all()
    assert 1 <= promised["verified"] / promised["off"] < 1.3


def test_a_verified_answer_states_no_risk_and_is_not_audited():
    engine = with_document(make_engine())
    report = answer(engine, asked()).report
    assert "verified" in report.risk.reason
    assert not engine.auditor.has_work
