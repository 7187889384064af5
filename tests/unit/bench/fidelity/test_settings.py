"""Policies as they are named on the command line."""

from __future__ import annotations

import pytest

from kvgraft.bench.fidelity.settings import Setting, default_setting, parse_settings
from kvgraft.engine import LLM, RepairRules
from kvgraft.errors import ConfigError
from kvgraft.graft.select import FirstK, NoRecompute, QuerySeam
from kvgraft.types import RepairTime

DEFAULT = Setting(FirstK(7), "drift", RepairRules(RepairTime.AFTER))


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
    assert default is DEFAULT
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
    (none,) = parse_settings(["none+none"], [], DEFAULT)
    assert (none.policy, none.label) == (NoRecompute(), "none")


def test_the_time_of_the_repair_stands_after_a_sign_and_before_is_not_written():
    assert labels("query_seam:0.1+drift@after", "query_seam:0.1+drift@before", "query_seam:0.1@after:16") == [
        "query_seam:0.1+drift@after",
        "query_seam:0.1+drift",
        "query_seam:0.1@after:16",
    ]
    assert labels("default", "default@before", "default@after:64") == [
        "first_k:7+drift@after",
        "first_k:7+drift",
        "first_k:7+drift@after:64",
    ]
    assert labels("none@after~0.25", "none@after~0.25:16") == ["none@after~0.25", "none@after~0.25:16"]
    assert labels("query_seam@after", budgets=(0.1, 0.25)) == ["query_seam:0.1@after", "query_seam:0.25@after"]
    (rows,) = parse_settings(["query_seam:0.1+drift@after:16"], [], DEFAULT)
    assert rows.repair == RepairRules(RepairTime.AFTER, rows_per_step=16)
    assert rows.heals
    (none,) = parse_settings(["none"], [], DEFAULT)
    assert none.repair == RepairRules(RepairTime.BEFORE)
    assert not none.heals


def test_the_default_is_what_the_engine_does():
    llm = LLM("graft-tiny", num_slots=500, repair="after", repair_rows=8, repair_below_margin=0.25, correction="none")
    assert default_setting(llm) == Setting(llm.policy, "none", RepairRules(RepairTime.AFTER, 0.25, 8))


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
        ("none@later", "unknown time 'later' in 'none@later'; choose before, after"),
        ("none@", "unknown time ''"),
        ("none@after:", "'' in 'none@after:' is no number of rows"),
        (
            "none@before:16",
            "'none@before:16' names a margin, or rows per decode step: these go with a repair after only",
        ),
        ("none@before~0.2", "these go with a repair after only"),
        ("none@after~sure", "'sure' in 'none@after~sure' is no ratio"),
    ],
)
def test_wrong_ones_get_a_line(spec, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_settings([spec], [], DEFAULT)
    assert "\n" not in str(caught.value)
