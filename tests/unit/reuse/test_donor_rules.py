from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.graft.select import FirstK, KVDeviation, NoRecompute, Observable, QuerySeam
from kvgraft.reuse.donor_rules import DonorRules
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.policy import available_policies, configured_policy
from kvgraft.types import DonorId, Fidelity, Namespace, SpanReport

NAMESPACE = Namespace("model")
TEXT = np.arange(1000, 1200)


@pytest.fixture
def catalogue():
    return DonorCatalogue(4096)


@pytest.fixture
def rules(catalogue):
    return DonorRules(catalogue, min_run=32, max_generation=1)


def test_short_or_far_derived_text_is_not_admitted(rules):
    assert rules.admits(32, 1)
    assert not rules.admits(31, 0)
    assert not rules.admits(100, 2)


def test_runs_between_copies_that_are_long_enough(rules):
    lineage = Lineage(0)
    lineage.copy([SpanReport(40, 10, DonorId(1), 0, 40, Fidelity.SHIFTED, 0)])
    lineage.copy([SpanReport(60, 10, DonorId(1), 0, 60, Fidelity.SHIFTED, 0)])
    assert list(rules.runs(lineage, 0, 200)) == [(0, 40, 0), (70, 200, 1)]


def test_text_is_known_if_donors_have_all_but_less_than_a_run(catalogue, rules):
    catalogue.add(NAMESPACE, TEXT[:100], None)
    catalogue.add(NAMESPACE, TEXT[100:170], None)
    assert rules.is_known(NAMESPACE, TEXT[:190], 0)
    assert not rules.is_known(NAMESPACE, np.arange(1000, 1202), 0)


def test_approximate_donor_does_not_count_as_knowing_an_exact_text(catalogue, rules):
    catalogue.add(NAMESPACE, TEXT, None, generation=1)
    assert not rules.is_known(NAMESPACE, TEXT, 0)
    assert rules.is_known(NAMESPACE, TEXT, 1)


def test_donor_that_a_new_text_begins_with_is_superseded_unless_in_use(catalogue, rules):
    prefix = catalogue.add(NAMESPACE, TEXT[:100], None).donor
    inner = catalogue.add(NAMESPACE, TEXT[120:180], None, start_position=120).donor
    matches = catalogue.find(DonorQuery(NAMESPACE, TEXT))
    assert {match.donor_id for match in matches} == {prefix.donor_id, inner.donor_id}
    assert rules.superseded(matches) == [prefix]
    catalogue.pin(prefix.donor_id)
    assert rules.superseded(matches) == []


@pytest.mark.parametrize(
    ("shown", "names"),
    [
        ((), {"none", "random", "first_k"}),
        ((Observable.QUERY_ATTENTION,), {"none", "random", "first_k", "query_attention", "query_seam"}),
        ((Observable.KEY_DEVIATION,), {"none", "random", "first_k", "kv_deviation"}),
    ],
)
def test_engine_can_run_what_it_can_show(shown, names):
    assert set(available_policies(shown)) == names


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("none", NoRecompute()),
        ("first_k", FirstK(7)),
        ("query_seam", QuerySeam(0.3)),
        ("kv_deviation", KVDeviation(0.3)),
    ],
)
def test_policy_takes_the_settings_that_are_its_own(name, policy):
    assert configured_policy(name, first_k=7, recompute_ratio=0.3) == policy


def test_a_text_replaces_donors_of_higher_generation_inside_it_that_nobody_uses(catalogue, rules):
    inner = catalogue.add(NAMESPACE, TEXT[50:120], None, generation=1).donor
    used = catalogue.add(NAMESPACE, TEXT[120:180], None, generation=1).donor
    catalogue.add(NAMESPACE, TEXT[:50], None)
    catalogue.pin(used.donor_id)
    assert rules.replaced(NAMESPACE, TEXT, 0) == [inner]
    assert rules.replaced(NAMESPACE, TEXT, 1) == []
    assert rules.replaced(Namespace("another"), TEXT, 0) == []
