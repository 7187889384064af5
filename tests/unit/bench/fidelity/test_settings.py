"""Policies as they are named on the command line."""

from __future__ import annotations

import pytest

from kvgraft.bench.fidelity.settings import parse_settings
from kvgraft.errors import ConfigError
from kvgraft.graft.select import FirstK, NoRecompute, QuerySeam

DEFAULT = FirstK(7)


def labels(*specs, budgets=()):
    return [setting.label for setting in parse_settings(specs, budgets, DEFAULT)]


def test_policies_times_budgets_others_once_cheapest_first():
    assert labels("query_seam", "none", "first_k", budgets=(0.1, 0.05)) == [
        "none",
        "query_seam:0.05",
        "first_k:16",
        "query_seam:0.1",
    ]


def test_own_numbers_and_defaults():
    assert labels("query_seam:0.3", budgets=(0.1,)) == ["query_seam:0.3"]
    assert labels("query_seam") == [f"query_seam:{QuerySeam().ratio:g}"]
    assert labels("first_k:32") == ["first_k:32"]
    (default,) = parse_settings(["default"], [0.1], DEFAULT)
    assert default.policy is DEFAULT
    assert default.budget is None


def test_the_same_thing_is_compared_once():
    assert labels("query_seam:0.1", "query_seam", "none", "none", budgets=(0.1,)) == ["none", "query_seam:0.1"]


def test_the_oracle_is_named_like_the_others():
    assert labels("oracle", "oracle+drift", budgets=(0.05,)) == ["oracle:0.05", "oracle:0.05+drift"]


def test_what_a_row_says():
    (setting,) = parse_settings(["query_seam:0.25"], [], DEFAULT)
    assert (setting.policy.name, setting.correction, setting.budget) == ("query_seam", "none", 0.25)
    (drift,) = parse_settings(["query_seam:0.25+drift"], [], DEFAULT)
    assert (drift.policy, drift.correction, drift.label) == (setting.policy, "drift", "query_seam:0.25+drift")
    (default,) = parse_settings(["default"], [], DEFAULT, "drift")
    assert (default.policy, default.correction) == (DEFAULT, "drift")
    (none,) = parse_settings(["none+none"], [], DEFAULT)
    assert (none.policy, none.label) == (NoRecompute(), "none")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("query_sea", "unknown policy 'query_sea'; choose default, none, "),
        ("query_seam+magic", "unknown correction 'magic'"),
        ("query_seam:ten", "'ten' in 'query_seam:ten' is no ratio"),
        ("query_seam:1.5", "0 < ratio <= 1"),
        ("none:0.1", "takes no ratio"),
        ("first_k:0.5", "no number of tokens"),
        ("first_k:0", "k >= 1"),
        ("", "unknown policy ''"),
    ],
)
def test_wrong_ones_get_a_line(spec, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_settings([spec], [], DEFAULT)
    assert "\n" not in str(caught.value)
