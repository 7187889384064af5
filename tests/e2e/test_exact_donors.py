"""A prompt that begins as a donor does gets exact K/V from it: nothing computed again, nothing moved, nothing approximate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from tests.e2e.test_kept_kv import assert_kept_is_exact
from tests.engine_runs import SMALL
from tests.support.kept_kv import assert_prefix_is_exact

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import PolicyError
from kvgraft.graft.select import Adaptive, NoRecompute
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import Fidelity, MissReason

GREEDY = SamplingParams(8, ignore_eos=True)
LENGTH, NEW = 200, 20


def make_llm(family="llama", **settings):
    return LLM(adopt_model(family, tiny_model(family), None), **SMALL | {"num_slots": 2_000, "heal": "off"} | settings)


def new_text(rng, length):
    return rng.integers(3, VOCABULARY, length)


@pytest.fixture
def document(rng):
    return new_text(rng, LENGTH)


def forget_prefixes(llm, rng):
    """Fill the device with other text, so that what was there lives on in host memory alone."""
    for _ in range(8):
        llm.generate(new_text(rng, 150), GREEDY, "exact")


def in_host_memory(document, rng, **settings):
    """An engine whose prefix cache has lost a document that host memory still has."""
    llm = make_llm(num_slots=600, **settings)
    llm.generate(np.concatenate([document, new_text(rng, NEW)]), GREEDY)
    forget_prefixes(llm, rng)
    return llm


def test_a_prefix_that_host_memory_still_has_is_exact(document, rng):
    llm = in_host_memory(document, rng)
    prompt = np.concatenate([document, new_text(rng, NEW)])
    output = llm.generate(prompt, GREEDY)[0]
    report = output.report
    (span,) = report.spans
    assert (span.fidelity, span.tier, span.position_delta, span.generation) == (Fidelity.EXACT, "host", 0, 0)
    assert (report.exact_tokens, report.shifted_tokens, report.computed_tokens) == (LENGTH, 0, NEW)
    assert (report.recomputed_tokens, report.corrected_tokens, report.policy, report.miss) == (0, 0, "none", None)
    assert output.token_ids == llm.generate(prompt, GREEDY, "off")[0].token_ids
    namespace = llm.engine.builder.build(prompt).namespace
    assert assert_prefix_is_exact(llm.adapter, llm.space, namespace, prompt) >= LENGTH
    again = llm.generate(prompt, GREEDY)[0].report
    assert (again.exact_tokens, again.spans) == (LENGTH + NEW - 1, ())
    assert_kept_is_exact(llm.engine, [output])


@pytest.mark.parametrize("selection", ["none", "query_seam", "kv_deviation", "first_k", "adaptive"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_policies_choose_among_what_is_approximate_alone(family, selection, document, rng):
    """The exact front, then text that moved: only that is computed again and corrected."""
    llm = make_llm(family, num_slots=700, selection=selection)
    moved = new_text(rng, 150)
    llm.generate(np.concatenate([document, new_text(rng, NEW)]), GREEDY)
    llm.generate(np.concatenate([new_text(rng, 40), moved]), GREEDY)
    forget_prefixes(llm, rng)
    prompt = np.concatenate([document, new_text(rng, NEW), moved, new_text(rng, 30)])
    report = llm.generate(prompt, GREEDY)[0].report
    front, *others = report.spans
    assert (front.fidelity, front.target_start, front.length) == (Fidelity.EXACT, 0, LENGTH)
    assert report.exact_tokens == LENGTH
    assert all(start >= LENGTH + NEW for start, _ in report.recomputed_runs)
    assert report.num_tokens == report.reused_tokens + report.computed_tokens
    if selection != "adaptive":  # which may compute everything
        assert [span.fidelity for span in others] == [Fidelity.SHIFTED]
    namespace = llm.engine.builder.build(prompt).namespace
    assert assert_prefix_is_exact(llm.adapter, llm.space, namespace, prompt) >= LENGTH
    llm.check()


@pytest.mark.parametrize("repair", ["before", "after"])
def test_exact_text_counts_once_where_a_policy_computes_everything(repair, document, rng):
    """A policy that gives reuse up computes the exact front, too; those tokens are exact, and no shifted ones fewer."""
    llm = make_llm(num_slots=700)
    moved = new_text(rng, 150)
    llm.generate(np.concatenate([document, new_text(rng, NEW)]), GREEDY)
    llm.generate(np.concatenate([new_text(rng, 40), moved]), GREEDY)
    forget_prefixes(llm, rng)
    prompt = np.concatenate([document, new_text(rng, NEW), moved, new_text(rng, 30)])
    never_sure = Adaptive(0.05, 1e-9, 0.2)
    report = llm.generate(prompt, GREEDY, selection=never_sure, repair=repair)[0].report
    assert (report.exact_tokens, report.shifted_tokens, report.computed_tokens) == (LENGTH, 0, len(prompt) - LENGTH)
    assert (report.recomputed_tokens, report.recomputed_runs) == (150, ((LENGTH + NEW, 150),))


def test_a_donor_behind_a_graft_is_never_an_exact_front(document, rng):
    """It begins at position 0 of nothing: what was computed behind a copy has a generation and another start."""
    llm = make_llm(num_slots=600)
    llm.generate(np.concatenate([new_text(rng, 33), document]), GREEDY)
    grafted = np.concatenate([document, new_text(rng, 100)])
    assert llm.generate(grafted, GREEDY)[0].report.shifted_tokens
    forget_prefixes(llm, rng)
    report = llm.generate(np.concatenate([grafted, new_text(rng, NEW)]), GREEDY)[0].report
    assert report.exact_tokens == 0
    assert {span.fidelity for span in report.spans} <= {Fidelity.SHIFTED, Fidelity.CONTINUED}
    assert report.continued_tokens or report.shifted_tokens
    assert all(span.generation or span.fidelity is Fidelity.SHIFTED for span in report.spans)


def test_an_answer_that_is_to_be_verified_needs_no_drafts_behind_exact_text(document, rng):
    llm = in_host_memory(document, rng)
    prompt = np.concatenate([document, new_text(rng, NEW)])
    output = llm.generate(prompt, GREEDY, "verified")[0]
    assert (output.report.healing, output.report.exact_tokens) == (None, LENGTH)
    assert output.token_ids == llm.generate(prompt, GREEDY, "off")[0].token_ids


@dataclass(frozen=True)
class Failing(NoRecompute):
    """Refuses to choose."""

    name: ClassVar[str] = "failing"

    def steps(self, context):
        raise PolicyError("no")


def test_a_failing_policy_is_not_asked_about_exact_text(document, rng):
    llm = in_host_memory(document, rng, selection=f"{__name__}:Failing")
    prompt = np.concatenate([document, new_text(rng, NEW)])
    assert llm.generate(prompt, GREEDY)[0].report.exact_tokens == LENGTH
    assert llm.num_errors == 0
    moved = np.concatenate([new_text(rng, 30), prompt])
    assert llm.generate(moved, GREEDY)[0].report.miss.reason is MissReason.POLICY_ERROR
