"""Rows of a table from records, by hand; intervals by seed."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.bench.fidelity.rows import control_rows, failed_controls, resamples, summary_rows, worst_tenth
from kvgraft.bench.fidelity.settings import Setting, parse_settings
from kvgraft.graft.select import NoRecompute

pytestmark = pytest.mark.slow

SETTINGS = parse_settings(["none", "query_seam:0.1"], [], Setting(NoRecompute()))


def outcome(kl, *, grafted=True, distance="own position", **others):
    figures = {"mean_kl": kl, "mean_js": kl / 4, "first_kl": 2 * kl, "first_flip": float(kl > 0.5), "top1": 1 - kl}
    figures |= {"greedy_equal": float(kl < 0.1), "first_divergence": 32.0, "recomputed_share": 0.1, "flops_share": 0.5}
    figures |= {"is_grafted": grafted, "prompt_tokens": 100, "exact_tokens": 10, "shifted_tokens": 50 if grafted else 0}
    return figures | {"distance": distance} | others


def record(index, kl, *, suite="rag", group=None, off=None, **others):
    settings = {"none": outcome(kl, **others), "query_seam:0.1": outcome(kl / 2, **others)}
    return {"suite": suite, "index": index, "group": group or str(index), "off": off or {}, "settings": settings}


def rows_of(records, seed=0):
    return {(row["suite"], row["setting"]): row for row in summary_rows(records, SETTINGS, seed)}


def test_means_medians_and_the_worst_tenth():
    row = rows_of([record(n, kl) for n, kl in enumerate([0.0, 0.1, 0.2, 0.9])])["rag", "none"]
    assert row["mean_kl"] == pytest.approx(0.3)
    assert row["median_kl"] == pytest.approx(0.15)
    assert row["worst_tenth_kl"] == pytest.approx(0.9)
    assert row["first_kl"] == pytest.approx(0.6)
    assert row["median_first_kl"] == pytest.approx(0.3)
    assert (row["first_flip"], row["greedy_equal"]) == (0.25, 0.25)
    assert (row["n"], row["requests"], row["reused_share"]) == (4, 4, 0.6)
    assert (row["policy"], row["correction"], row["budget"]) == ("none", "none", None)
    assert row["gold_nll_delta"] is None
    assert worst_tenth(np.arange(1.0, 21.0)) == 19.5


def test_requests_without_a_graft_count_for_the_share_only():
    ungrafted = record(1, 0.0, grafted=False)
    del ungrafted["settings"]["query_seam:0.1"]
    found = rows_of([record(0, 0.4), ungrafted, record(2, 0.2)])
    for label, kl in (("none", 0.3), ("query_seam:0.1", 0.15)):
        row = found["rag", label]
        assert (row["n"], row["requests"], row["grafted_requests"]) == (2, 3, 2)
        assert row["mean_kl"] == pytest.approx(kl)
        assert row["reused_share"] == pytest.approx((60 + 10 + 60) / 300)


def test_answers_stand_beside_those_of_full_prefill():
    off = {"task": 1.0, "contains": 1.0, "gold_nll": 0.5, "stale": 0.0}
    worse = {"task": 0.5, "contains": 0.0, "gold_nll": 0.75, "stale": 1.0}
    row = rows_of([record(0, 0.1, off=off, **worse), record(1, 0.1)])["rag", "none"]
    assert (row["task_off"], row["task_on"]) == (1.0, 0.5)
    assert (row["contains_off"], row["contains_on"]) == (1.0, 0.0)
    assert (row["stale_off"], row["stale_on"]) == (0.0, 1.0)
    assert row["gold_nll_delta"] == pytest.approx(0.25)


def test_suites_are_told_apart_and_together():
    found = rows_of([record(0, 0.2), record(0, 0.6, suite="lines")])
    assert [found[suite, "none"]["mean_kl"] for suite in ("rag", "lines", "all")] == pytest.approx([0.2, 0.6, 0.4])


def test_distances():
    records = [record(0, 0.2), record(1, 0.4, distance="reordered"), record(2, 0.6, distance="reordered")]
    classes = rows_of(records)["rag", "none"]["by_distance"]
    assert list(classes) == ["own position", "reordered"]
    assert classes["reordered"]["n"] == 2
    assert classes["reordered"]["mean_kl"] == pytest.approx(0.5)


class TestIntervals:
    RECORDS = tuple(record(n, kl) for n, kl in enumerate(np.random.default_rng(0).random(40).tolist()))

    def test_same_seed_same_interval(self):
        first, again, other = (rows_of(self.RECORDS, seed)["rag", "none"]["ci"]["mean_kl"] for seed in (1, 1, 2))
        assert first == again
        assert first != other

    def test_holds_the_mean_and_is_about_as_wide_as_theory_says(self):
        row = rows_of(self.RECORDS)["rag", "none"]
        low, high = row["ci"]["mean_kl"]
        assert low < row["mean_kl"] < high
        values = [one["settings"]["none"]["mean_kl"] for one in self.RECORDS]
        assert high - low == pytest.approx(2 * 1.96 * np.std(values) / np.sqrt(40), rel=0.15)

    def test_settings_are_drawn_together(self):
        """Half the error in every request is half the interval."""
        found = rows_of(self.RECORDS)
        halves = np.array(found["rag", "none"]["ci"]["mean_kl"]) / 2
        assert found["rag", "query_seam:0.1"]["ci"]["mean_kl"] == pytest.approx(halves.tolist())

    def test_groups_are_drawn_whole_where_there_are_enough(self):
        clusters = [n // 4 for n in range(60)]
        for indices in resamples(clusters, 0)[:20]:
            counts = np.bincount(indices, minlength=60).reshape(15, 4)
            assert (counts == counts[:, :1]).all()
            assert len(indices) == 60

    def test_few_groups_are_not_drawn(self):
        drawn = resamples([n % 2 for n in range(40)], 0)
        assert any(len(set(np.bincount(indices, minlength=40).tolist())) > 2 for indices in drawn)

    def test_one_request_has_none(self):
        assert rows_of([record(0, 0.5)])["rag", "none"]["ci"] == {}


def test_controls():
    base = record(0, 0.5)
    rows = control_rows(
        [base | {"controls": {"exact": outcome(0.0)}}, base | {"controls": {"exact": outcome(0.2)}}, base]
    )
    assert [(row["suite"], row["control"], row["n"], row["mean_kl"]) for row in rows] == [("rag", "exact", 2, 0.1)]


@pytest.mark.parametrize(
    ("exact", "unseen", "is_grafted", "failed"),
    [(1e-9, 1e-9, False, 0), (0.2, 1e-9, False, 1), (1e-9, 0.2, False, 1), (1e-9, 0.2, True, 0)],
)
def test_controls_above_the_noise_floor_fail(exact, unseen, is_grafted, failed):
    controls = {"noise": outcome(0.01, grafted=False), "exact": outcome(exact, grafted=False)}
    controls["negative"] = outcome(unseen, grafted=is_grafted)
    assert len(failed_controls(control_rows([record(0, 0.5) | {"controls": controls}]))) == failed
