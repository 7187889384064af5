"""The line that `kvgraft generate` prints below an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.unit.observability.records import GOES_ON, SPAN, make_continued_report, make_report

from kvgraft.cli.generate import summary


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (make_report(), "100 prompt tokens: 10 exact, 45 shifted; 45 computed (5 of them again); 1 spans of 1 donors"),
        (
            make_continued_report(),
            "10 exact, 50 continued, 0 shifted; 40 computed (0 of them again); no graft: no_match",
        ),
        (
            make_report(spans=(GOES_ON, SPAN), continued_tokens=30),
            "30 continued, 45 shifted; 45 computed (5 of them again); 1 spans of 1",
        ),
    ],
    ids=["graft", "continued", "both"],
)
def test_it_says_what_was_reused_by_class(report, told):
    assert told in summary(SimpleNamespace(report=report, ttft_s=0.25))
