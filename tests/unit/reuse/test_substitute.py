"""What a semantic provider is made with, and what is counted of its calls, in every engine."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.config import EngineConfig
from kvgraft.config.sglang import SGLangConfig
from kvgraft.config.vllm import VLLMConfig
from kvgraft.errors import ConfigError
from kvgraft.reuse.substitute import Substitute, Substitutes
from kvgraft.substitution import GuardedProvider, SemanticPrefixProvider, SemanticPrefixResult

PATIENCE_S = 60.0
PROMPT = np.arange(100)
SETTLED = "tests.unit.semantic.embedders:Settled"


@pytest.fixture
def made():
    kept = []
    yield kept.append
    for substitutes in kept:
        substitutes.close()


class Scripted(SemanticPrefixProvider):
    """Answers what it is told to."""

    answer: object = None

    def on_prefix_miss(self, rid, token_ids):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def on_request_cached(self, rid, token_ids):
        pass


@pytest.mark.parametrize("kind", [EngineConfig, VLLMConfig, SGLangConfig])
def test_settings_reach_the_provider_that_takes_them(made, kind):
    config = kind().updated(
        {
            "semantic_provider": SETTLED,
            "semantic_min_similarity": 0.7,
            "semantic_patience_ms": 250,
            "semantic_capacity": 9,
            "semantic_weights": "/weights",
        }
    )
    substitutes = Substitutes.configured(config, None)
    made(substitutes)
    assert substitutes._guard.provider.given == (0.7, 9, 0.25, "/weights")


def test_as_typed_a_prompt_that_nobody_asked_for_before_is_waited_for(made):
    substitutes = Substitutes.configured(EngineConfig(semantic_provider=SETTLED), None)
    made(substitutes)
    threshold, capacity, patience_s, directory = substitutes._guard.provider.given
    assert (threshold, capacity, directory) == (0.6, 4000, "")
    assert patience_s > 0
    assert substitutes._guard._deadline_s > patience_s, "the deadline leaves the patience its time"


def test_a_provider_is_not_told_of_what_its_constructor_does_not_name(made):
    substitutes = Substitutes.configured(EngineConfig(semantic_provider="kvgraft.semantic:SketchProvider"), None)
    made(substitutes)
    assert substitutes._guard._deadline_s == pytest.approx(0.02), "nothing waits"


@pytest.mark.parametrize(
    ("setting", "value", "parameter"),
    [("semantic_patience_ms", 5.0, "patience_s"), ("semantic_weights", "/weights", "directory")],
)
def test_a_setting_that_the_provider_does_not_take_is_refused(setting, value, parameter):
    config = EngineConfig(semantic_provider="kvgraft.semantic:SketchProvider").updated({setting: value})
    with pytest.raises(ConfigError, match=f"{setting} is not taken by .* no {parameter}; leave it out"):
        Substitutes.configured(config, None)


def test_each_call_is_counted_once_by_what_became_of_it():
    provider = Scripted()
    substitutes = Substitutes(GuardedProvider(provider, PATIENCE_S), 16)

    def ask(answer):
        provider.answer = answer
        return substitutes.propose("r", PROMPT, 0, 0)

    other = SemanticPrefixResult(list(range(200, 300)), 0)
    assert ask(None) is None
    assert ask(SemanticPrefixResult([1, 2], 0)) is None, "too short"
    assert ask(RuntimeError("no")) is None
    assert ask(SemanticPrefixResult(["x"], 0)) is None, "makes no sense"
    proposal = ask(other)
    assert isinstance(proposal, Substitute)
    assert substitutes.realised(proposal, 99)
    assert not substitutes.realised(ask(other), 3), "little of it is stored"
    assert substitutes.outcomes() == {"hit": 1, "miss": 3, "error": 2, "timeout": 0}
    assert substitutes.take_outcomes() == {"hit": 1, "miss": 3, "error": 2}
    assert substitutes.take_outcomes() == {}
    substitutes.close()
