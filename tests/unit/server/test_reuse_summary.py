"""The counts for clients that know nothing of `kvgraft`: they add up to the prompt, and what was computed is not cached."""

from __future__ import annotations

from types import SimpleNamespace

from tests.unit.observability.records import make_continued_report, make_report

from kvgraft.server.reuse_summary import report_header, reuse_summary


def test_counts_of_several_prompts_add_up_and_computed_tokens_are_not_among_the_reused():
    reports = (make_continued_report(), make_report())
    told = reuse_summary([SimpleNamespace(report=report) for report in reports])
    assert told["continued_tokens"] == 50
    classes = ("exact", "continued", "shifted", "substituted")
    assert sum(told[f"{name}_tokens"] for name in classes) == told["reused_tokens"] == 115
    assert told["reused_tokens"] + told["computed_tokens"] == 200
    assert report_header(told)["x-kvgraft-report"].startswith("reused=115, exact=20, continued=50, shifted=45")
