"""The connector's lookup: what it plans, what it refuses, and how matches cover a range."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.config import VLLMConfig
from kvgraft.donors import DonorCatalogue
from kvgraft.integrations.vllm.lookup import Lookup, covered_head, covering
from kvgraft.types import DonorId, GraftPlan, Match, Miss, MissReason, Namespace

NAMESPACE = Namespace("model")


@pytest.fixture
def text(rng):
    return rng.integers(0, 50_000, 600).astype(np.int32)


@pytest.fixture
def lookup(text):
    catalogue = DonorCatalogue(10_000)
    catalogue.add(NAMESPACE, text, None)
    return Lookup(catalogue, VLLMConfig(), recompute_ratio=0.1, width=512)


def prompt_around(rng, part):
    return np.concatenate([rng.integers(0, 50_000, 70), part, rng.integers(0, 50_000, 30)]).astype(np.int32)


def test_a_moved_text_is_planned(lookup, text, rng):
    found = lookup.find(NAMESPACE, prompt_around(rng, text[100:400]), 0)
    assert isinstance(found.planned, GraftPlan)
    assert found.planned.reused_len == 300
    assert found.lookup_ms > 0


@pytest.mark.parametrize(
    "case",
    [
        (slice(0, 0), 0, MissReason.NO_MATCH),
        (slice(100, 160), 0, MissReason.NOT_WORTH_IT),
        (slice(100, 400), 380, MissReason.COVERED_BY_PREFIX),
    ],
)
def test_what_is_not_worth_a_forward_pass_is_a_miss(lookup, text, rng, case):
    part, exact_len, reason = case
    found = lookup.find(NAMESPACE, prompt_around(rng, text[part]), exact_len)
    assert isinstance(found.planned, Miss)
    assert found.planned.reason is reason


def test_without_donors_nothing_is_looked_up():
    empty = Lookup(DonorCatalogue(100), VLLMConfig(), recompute_ratio=0.0, width=64)
    assert empty.find(NAMESPACE, np.arange(50, dtype=np.int32), 0).planned == Miss(MissReason.NO_DONORS)


def test_one_slow_moment_does_not_stop_lookups_and_a_slow_spell_does_for_a_while(lookup, text, rng):
    prompt = prompt_around(rng, text)
    recent = lookup._recent_ms_per_token
    lookup.find(NAMESPACE, prompt, 0)
    lookup.find(NAMESPACE, prompt, 0)
    recent.append(1e6)
    assert isinstance(lookup.find(NAMESPACE, prompt, 0).planned, GraftPlan)
    recent.extend([1.0] * 9)
    refused = 0
    while isinstance(lookup.find(NAMESPACE, prompt, 0).planned, Miss):
        refused += 1
        assert refused < 60
    assert refused > 3


MATCHES = [Match(0, DonorId(1), 5, 40), Match(40, DonorId(2), 0, 20), Match(70, DonorId(3), 9, 30)]


def test_covering_cuts_matches_to_the_range():
    assert covering(MATCHES, 10, 55) == (Match(10, DonorId(1), 15, 30), Match(40, DonorId(2), 0, 15))
    assert covering(MATCHES, 75, 80) == (Match(75, DonorId(3), 14, 5),)
    assert covering(MATCHES, 50, 75) is None
    assert covering(MATCHES, 90, 120) is None
    assert covering([], 3, 3) == ()


def test_covered_head():
    assert covered_head(MATCHES) == 60
    assert covered_head(MATCHES[1:]) == 0
    assert covered_head([]) == 0
