"""Selection policies that fail at any of their hooks: a counted miss, an exact answer, and nothing approximate is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL, run_to_end, submit
from tests.support.failing_policies import Failing
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.config import EngineConfig
from kvgraft.engine import RepairRules, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.idle.scoring import score
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.graft.select import Observable, QuerySeam, Recompute, SelectionPolicy
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason, RepairTime


@dataclass(frozen=True)
class Broken(SelectionPolicy):
    """A plug-in that does one thing wrong."""

    name = "broken"
    observes = frozenset(Observable)
    fault: str = ""

    @property
    def recompute_ratio(self):
        if self.fault == "ratio raises":
            raise KeyError("no ratio")
        return 7.0 if self.fault == "ratio out of range" else 0.0

    def steps(self, context):
        if self.fault == "steps raises":
            raise ValueError("no steps\nat all")
        if self.fault == "steps are no generator":
            return [Recompute(context.reused[:0])] * 2
        if self.fault == "no step":
            return iter(())
        return self._steps(context)

    def _steps(self, context):
        reused, first = context.reused, context.reused[:4]
        bad = {
            "first step is a list": [1],
            "out of range": Recompute(np.array([10**6])),
            "negative": Recompute(np.array([-1])),
            "not reused": Recompute(context.live[:1]),
            "wrong dtype": Recompute(first.astype(np.float64)),
            "wrong shape": Recompute(first[None]),
            "duplicates": Recompute(np.repeat(first, 2)),
            "not ascending": Recompute(first[::-1]),
            "sample elsewhere": Recompute(first, sample=reused[8:12]),
            "layer too high": Recompute(reused[:0], observe_key_deviation=True, deviation_layer=99),
            "layer 0": Recompute(reused[:0], observe_key_deviation=True, deviation_layer=0),
        }
        if self.fault == "changes the plan":
            context.live[:] = 0
        if self.fault in bad:
            yield bad[self.fault]
        if self.fault == "look at the end":
            yield Recompute(reused[:0], observe_key_deviation=True)
            return
        observation = yield Recompute(first, observe_query=True, sample=first)
        if self.fault == "changes the logits":
            observation.logits.fill_(-1e9)
            return
        if self.fault == "second step raises":
            raise ValueError("no second step")
        if self.fault == "second step out of range":
            yield Recompute(np.array([10**6]))
        if self.fault == "third step raises":
            yield Recompute(reused[40:44])
            raise ValueError("no third step")
        while self.fault == "never ends":
            yield Recompute(reused[:0])


BEFORE = ["ratio raises", "ratio out of range"]
AT_FIRST = [
    "steps raises",
    "no step",
    "first step is a list",
    "out of range",
    "negative",
    "not reused",
    "wrong dtype",
    "wrong shape",
    "duplicates",
    "not ascending",
    "sample elsewhere",
    "layer too high",
    "layer 0",
    "changes the plan",
]
LATER = [
    "steps are no generator",
    "look at the end",
    "second step raises",
    "second step out of range",
    "third step raises",
    "never ends",
]


def make_engine(family="llama", repair="before"):
    config = EngineConfig(num_slots=1_500, max_rows=40, repair=repair, repair_below_margin=0, **SMALL)
    return Engine(adopt_model(family, tiny_model(family), None), config)


def text_of(output):
    return np.concatenate([output.prompt_token_ids, output.token_ids[:-1]]).astype(np.int64)


def assert_exact(engine, output, expected):
    """The answer is that of a full prefill, the report says why, and all of it may be an exact hit of others."""
    assert output.token_ids == expected
    assert output.report.miss.reason is MissReason.POLICY_ERROR
    assert output.report.miss.detail.startswith("selection policy broken: ")
    assert "\n" not in output.report.miss.detail
    assert (output.report.shifted_tokens, output.report.recomputed_tokens, output.report.spans) == (0, 0, ())
    assert output.report.computed_tokens + output.report.exact_tokens == output.report.num_tokens
    text = text_of(output)
    namespace = engine.builder.build(text[:2]).namespace
    assert assert_prefix_is_exact(engine.adapter, engine.space, namespace, text) == len(text)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def world(request):
    """An engine with a donor, a prompt that grafts it behind an exact prefix, and the answers of full prefills."""
    engine = make_engine(request.param)
    rng = np.random.default_rng(5)
    document = rng.integers(3, VOCABULARY, 150)
    prompts = [
        np.concatenate([document[:40], rng.integers(3, VOCABULARY, 20), document, rng.integers(3, VOCABULARY, 30)])
        for _ in range(3)
    ]
    expected = []
    for prompt in prompts:
        submit(engine, prompt, 6, "off")
        expected.append(next(iter(run_to_end(engine).values())).token_ids)
    return engine, document, prompts, expected


def learn(engine, document):
    engine.reset()
    submit(engine, document, 1)
    run_to_end(engine)


@pytest.mark.parametrize("fault", [*BEFORE, *AT_FIRST, *LATER])
def test_a_failure_is_a_counted_miss_and_the_request_is_computed_in_full(world, fault):
    engine, document, prompts, expected = world
    learn(engine, document)
    errors = engine.manager.num_errors
    submit(engine, prompts[0], 6, selection=Broken(fault))
    (output,) = run_to_end(engine).values()
    assert_exact(engine, output, expected[0])
    assert engine.manager.num_errors == errors + 1
    engine.check()
    assert engine.space.usage().request == 0
    assert assert_donors_are_exact(engine.adapter, engine.space, [text_of(output), document]) >= 1


@pytest.mark.parametrize("fault", ["wrong dtype", "second step raises", "third step raises", "look at the end"])
def test_beside_others_in_a_batch_it_harms_nobody(world, fault):
    engine, document, prompts, expected = world
    learn(engine, document)
    policies = [Broken(fault), QuerySeam(0.2), Broken(fault)]
    actives = [submit(engine, *each, 6, "graft", policy) for *each, policy in zip(prompts, policies, strict=True)]
    outputs = run_to_end(engine)
    found = [outputs[active.request.request_id] for active in actives]
    assert found[1].report.shifted_tokens > 0
    for number in (0, 2):
        assert_exact(engine, found[number], expected[number])
    engine.check()
    assert_donors_are_exact(engine.adapter, engine.space, [*map(text_of, found), document])


@pytest.mark.parametrize("fault", ["wrong dtype", "second step raises", "third step raises"])
@pytest.mark.parametrize("steps", [1, 5, 8])
def test_preempted_at_any_moment_it_is_exact_all_the_same(world, fault, steps):
    engine, document, prompts, expected = world
    learn(engine, document)
    active = submit(engine, prompts[0], 6, selection=Broken(fault))
    for _ in range(steps):
        engine.step()
        engine.check()
    engine.scheduler.preempt(active)
    (output,) = run_to_end(engine).values()
    assert output.num_preemptions == 1
    assert_exact(engine, output, expected[0])


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def answering_first(request):
    """An engine that repairs after the first token, a document, and a prompt that grafts it."""
    engine, rng = make_engine(request.param, "after"), np.random.default_rng(6)
    document = rng.integers(3, VOCABULARY, 150)
    return (
        engine,
        document,
        np.concatenate([rng.integers(3, VOCABULARY, 20), document, rng.integers(3, VOCABULARY, 30)]),
    )


@pytest.mark.parametrize("fault", LATER)
def test_a_policy_that_fails_after_the_first_token_leaves_exact_kv_from_the_second_on(answering_first, fault):
    engine, document, prompt = answering_first
    learn(engine, document)
    errors = engine.manager.num_errors
    submit(engine, prompt, 6, selection=Broken(fault))
    (output,) = run_to_end(engine).values()
    report = output.report
    if report.miss is not None:  # it failed at once
        assert report.miss.reason is MissReason.POLICY_ERROR
        return
    assert report.shifted_tokens == 150, "the first token was drawn from all of the graft"
    assert (report.repair.time, report.repair.from_token, report.repair.exact_from_token) == (RepairTime.AFTER, 2, 2)
    assert report.repair.healed_tokens == len(prompt) - report.exact_tokens
    assert report.computed_flops > report.full_flops, "it was answered from copies first"
    assert engine.manager.num_errors == errors + 1
    text = text_of(output)
    namespace = engine.builder.build(text[:2]).namespace
    assert assert_prefix_is_exact(engine.adapter, engine.space, namespace, text) == len(text)
    assert_donors_are_exact(engine.adapter, engine.space, [text, document])
    engine.check()


@pytest.mark.parametrize("count", [2, 6])
def test_a_choice_that_fails_before_a_token_is_drawn_is_a_miss_and_no_token_rests_on_the_graft(answering_first, count):
    """The first token may be the last: nothing of the graft may be published with it as what a full prefill gives."""
    engine, document, prompt = answering_first
    engine.reset()
    submit(engine, prompt, count, "off")
    expected = next(iter(run_to_end(engine).values())).token_ids
    learn(engine, document)
    sampling = SamplingParams(count, stop_token_ids=(int(expected[0]),) if count == 2 else (), ignore_eos=True)
    engine.add(engine.builder.build(prompt, RequestOptions(sampling, selection=Failing(0))))
    (output,) = run_to_end(engine).values()
    assert_exact(engine, output, expected[:1] if count == 2 else expected)
    engine.check()
    assert_donors_are_exact(engine.adapter, engine.space, [text_of(output), document])


def test_a_choice_that_fails_while_an_unsure_first_token_waits_is_a_miss(answering_first):
    """All is computed before anything is drawn, so that nothing of the answer rests on the graft."""
    engine, document, prompt = answering_first
    learn(engine, document)
    rules = RepairRules(RepairTime.AFTER, below_margin=1.0)
    sampling = SamplingParams(4, ignore_eos=True)
    engine.add(engine.builder.build(prompt, RequestOptions(sampling, selection=Failing(1), repair=rules)))
    (output,) = run_to_end(engine).values()
    report = output.report
    assert (report.shifted_tokens, report.computed_tokens, report.repair) == (0, report.num_tokens, None)
    assert report.miss.reason is MissReason.POLICY_ERROR


def test_a_score_says_from_which_token_on_a_failed_repair_has_left_exact_kv(answering_first):
    engine, document, prompt = answering_first
    learn(engine, document)
    found = {}
    for name, reuse, policy in (("exact", "off", None), ("broken", "graft", Failing(1))):
        request = engine.builder.build(
            prompt, RequestOptions(SamplingParams(4, ignore_eos=True), reuse, selection=policy)
        )
        found[name] = score(engine.adapter, engine.manager, request, np.array([5, 6, 7, 8]), max_rows=40)
    repair = found["broken"].report.repair
    assert (repair.time, repair.from_token, repair.exact_from_token) == (RepairTime.AFTER, 2, 2)
    assert torch.allclose(found["broken"].logits[1:], found["exact"].logits[1:], atol=1e-4)
    assert not torch.allclose(found["broken"].logits[0], found["exact"].logits[0], atol=1e-4)


@pytest.mark.parametrize("steps", [2, 6])
def test_cancelled_on_its_way_it_leaves_nothing(world, steps):
    engine, document, prompts, _ = world
    learn(engine, document)
    held = len(engine.space.donors)
    active = submit(engine, prompts[0], 6, selection=Broken("second step raises"))
    for _ in range(steps):
        engine.step()
    engine.cancel(active.request.request_id)
    engine.check()
    assert engine.space.usage().request == 0
    assert len(engine.space.donors) <= held + 1
    namespace = active.request.namespace
    assert_prefix_is_exact(engine.adapter, engine.space, namespace, prompts[0])


@pytest.mark.parametrize("fault", ["wrong dtype", "second step raises"])
def test_a_verified_answer_drafts_nothing_then(world, fault):
    engine, document, prompts, expected = world
    learn(engine, document)
    submit(engine, prompts[0], 6, "verified", Broken(fault))
    (output,) = run_to_end(engine).values()
    assert_exact(engine, output, expected[0])
    assert output.report.healing is None


def test_logits_that_a_policy_changes_are_its_own(world):
    engine, document, prompts, _ = world
    found = []
    for fault in ("", "changes the logits"):
        learn(engine, document)
        submit(engine, prompts[0], 6, selection=Broken(fault))
        (output,) = run_to_end(engine).values()
        assert output.report.shifted_tokens > 0
        found.append(output.token_ids)
    assert found[0] == found[1]
