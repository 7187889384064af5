"""Drift estimators of a request's own that fail in a pass: a counted miss, an exact answer, nothing approximate is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from tests.engine_runs import run_to_end, submit
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.config import EngineConfig
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.idle.dictated import dictate
from kvgraft.engine.idle.scoring import score
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.text import OutputText
from kvgraft.graft.drift import DriftCorrection
from kvgraft.graft.drift_estimate import DriftEstimator
from kvgraft.graft.select import QuerySeam
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason, RepairTime


@dataclass(frozen=True)
class Broken(DriftEstimator):
    """An estimator that does one thing wrong."""

    fault: str

    @property
    def least_sample(self):
        if self.fault == "least_sample":
            raise KeyError("no least sample")
        return None if self.fault == "no number" else 1

    @property
    def pools_runs(self):
        if self.fault == "pools_runs":
            raise KeyError("no pools")
        return False

    def operations(self, num_sampled, num_rest, width):
        if self.fault == "operations":
            raise KeyError("no operations")
        return 0.0

    def for_layer(self, layout, reused):
        if self.fault == "for_layer":
            raise KeyError("no\nlayer")
        return self._shift

    def _shift(self, moved, out):
        if self.fault == "shift":
            raise KeyError("no shift")
        return out.new_zeros(3, 1, 1) if self.fault == "wrong shape" else out.zero_()


def engine_and_prompt(family, repair):
    """An engine, a document it has read, a prompt that grafts it, and full prefill's answer."""
    config = EngineConfig(num_slots=1_500, max_rows=40, repair=repair, repair_below_margin=0)
    engine, rng = Engine(adopt_model(family, tiny_model(family), None), config), np.random.default_rng(6)
    document = rng.integers(3, VOCABULARY, 150)
    prompt = np.concatenate([rng.integers(3, VOCABULARY, 20), document, rng.integers(3, VOCABULARY, 30)])
    submit(engine, prompt, 6, "off")
    (expected,) = run_to_end(engine).values()
    engine.reset()
    submit(engine, document, 1)
    run_to_end(engine)
    return engine, document, prompt, expected.token_ids


def broken_request(engine, prompt, fault, reuse="graft"):
    options = RequestOptions(
        SamplingParams(6, ignore_eos=True),
        reuse,
        selection=QuerySeam(0.2),
        correction=DriftCorrection(estimator=Broken(fault)),
    )
    return engine.builder.build(prompt, options)


def ask(engine, prompt, fault, reuse="graft"):
    request = broken_request(engine, prompt, fault, reuse)
    engine.add(request)
    return request.request_id


def assert_nothing_approximate_is_kept(engine, document, output):
    engine.check()
    assert engine.space.usage().request == 0
    text = np.concatenate([output.prompt_token_ids, output.token_ids[:-1]]).astype(np.int64)
    namespace = engine.builder.build(text[:2]).namespace
    assert assert_prefix_is_exact(engine.adapter, engine.space, namespace, text) == len(text)
    assert_donors_are_exact(engine.adapter, engine.space, [text, document])


@pytest.mark.parametrize("reuse", ["graft", "verified"])
@pytest.mark.parametrize("fault", ["for_layer", "shift", "wrong shape", "least_sample", "no number", "pools_runs"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_failure_before_the_first_token_is_a_miss_and_harms_nobody_beside_it(family, fault, reuse):
    engine, document, prompt, expected = engine_and_prompt(family, "before")
    errors = engine.manager.num_errors
    broken = ask(engine, prompt, fault, reuse)
    other = submit(engine, np.append(document, prompt[-9:]), 6).request.request_id
    outputs = run_to_end(engine)
    output, report = outputs[broken], outputs[broken].report
    assert output.token_ids == expected
    assert report.miss.reason is MissReason.POLICY_ERROR
    assert report.miss.detail.startswith("drift estimator Broken: ")
    assert "\n" not in report.miss.detail
    assert (report.shifted_tokens, report.corrected_tokens, report.spans) == (0, 0, ())
    assert report.computed_tokens + report.exact_tokens == report.num_tokens
    assert engine.manager.num_errors == errors + 1
    assert len(outputs[other].token_ids) == 6
    assert_nothing_approximate_is_kept(engine, document, output)


@pytest.mark.parametrize("fault", ["least_sample", "no number", "pools_runs"])
def test_an_estimator_that_does_not_say_what_it_needs_is_a_miss_before_any_token_is_drawn(fault):
    engine, document, prompt, expected = engine_and_prompt("llama", "after")
    name = ask(engine, prompt, fault)
    output = run_to_end(engine)[name]
    assert output.token_ids == expected
    assert output.report.miss.reason is MissReason.POLICY_ERROR
    assert_nothing_approximate_is_kept(engine, document, output)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_failure_in_the_repair_leaves_exact_kv_from_the_second_token_on(family):
    engine, document, prompt, _ = engine_and_prompt(family, "after")
    name = ask(engine, prompt, "shift")
    output = run_to_end(engine)[name]
    repair = output.report.repair
    assert output.report.shifted_tokens == 150, "the first token was drawn from all of the graft"
    assert (repair.time, repair.from_token, repair.exact_from_token) == (RepairTime.AFTER, 2, 2)
    assert_nothing_approximate_is_kept(engine, document, output)


@pytest.mark.parametrize("fault", ["for_layer", "shift"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_score_is_full_prefills_where_correction_fails_before_the_first_token(family, fault):
    engine, _, prompt, expected = engine_and_prompt(family, "before")
    scored = score(
        engine.adapter, engine.manager, broken_request(engine, prompt, fault), np.asarray(expected), max_rows=40
    )
    assert scored.logits.argmax(-1).tolist() == list(expected)
    assert scored.report.miss.reason is MissReason.POLICY_ERROR
    assert scored.report.spans == ()
    engine.check()
    assert engine.space.usage().request == 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_score_is_exact_from_the_second_token_on_where_correction_fails_after_the_first(family):
    engine, _, prompt, expected = engine_and_prompt(family, "after")
    scored = score(
        engine.adapter, engine.manager, broken_request(engine, prompt, "shift"), np.asarray(expected), max_rows=40
    )
    assert scored.logits.argmax(-1).tolist()[1:] == list(expected)[1:]
    assert (scored.report.repair.from_token, scored.report.repair.exact_from_token) == (2, 2)
    engine.check()


@pytest.mark.parametrize("repair", ["before", "after"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_dictated_answer_is_what_is_served_where_correction_fails(family, repair):
    engine, _, prompt, expected = engine_and_prompt(family, repair)
    request = broken_request(engine, prompt, "shift")
    answer = dictate(
        engine.adapter,
        engine.manager,
        request,
        np.asarray(expected),
        text=OutputText.of(None, request.sampling),
        eos_token_ids=frozenset(),
        max_rows=40,
    )
    engine.check()
    assert engine.space.usage().request == 0
    assert answer.logits.argmax(-1).tolist()[1:] == list(expected)[1:]
    if repair == "before":
        assert answer.report.miss.reason is MissReason.POLICY_ERROR
    else:
        assert (answer.report.repair.from_token, answer.report.repair.exact_from_token) == (2, 2)


def test_an_estimator_that_cannot_say_what_it_costs_corrects_all_the_same():
    engine, _, prompt, _ = engine_and_prompt("llama", "before")
    name = ask(engine, prompt, "operations")
    report = run_to_end(engine)[name].report
    assert report.miss is None
    assert report.corrected_tokens > 0
