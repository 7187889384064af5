from __future__ import annotations

import json
import logging
import sys

import pytest

from kvgraft.observability.log_format import JsonFormatter, TextFormatter


def make_record(message="request", fields=None, exc_info=None):
    record = logging.LogRecord("kvgraft.server", logging.INFO, "file", 1, message, (), exc_info)
    record.created = 1_700_000_000.25
    if fields is not None:
        record.fields = fields
    return record


def test_json_line_has_message_and_fields():
    entry = json.loads(JsonFormatter().format(make_record(fields={"status": 200, "error": None, "ttft_ms": 1.5})))
    assert entry == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "kvgraft.server",
        "message": "request",
        "status": 200,
        "ttft_ms": 1.5,
    }


def test_text_line_is_one_line_whatever_comes():
    line = TextFormatter().format(make_record("two\nlines", {"path": "/a b\n", "ms": 1.234, "none": None}))
    assert line == '2023-11-14T22:13:20.250Z INFO kvgraft.server: two\\nlines path="/a b\\n" ms=1.2'


@pytest.fixture
def failure():
    try:
        int("gone")
    except ValueError:
        return sys.exc_info()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_traceback_is_kept(formatter, failure):
    assert "ValueError: invalid literal" in formatter.format(make_record(exc_info=failure))


def test_json_line_with_a_traceback_is_one_line(failure):
    assert "\n" not in JsonFormatter().format(make_record(exc_info=failure))
