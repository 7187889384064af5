"""Made-up HTTP requests."""

from __future__ import annotations

from kvgraft.observability.otel.exchange import AnswerAsked, Exchange


def make_exchange(choices=(("answer-0", 0),), has_output=True, **changes):
    asked = AnswerAsked("answer", choices, "graft", 16, 0.0, 1.0, stream=False, has_output=has_output)
    values = {
        "request_id": "r-1",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "error": None,
        "started": 99.0,
        "ended": 110.0,
        "asked": asked,
    }
    return Exchange(**values | changes)
