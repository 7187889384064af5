from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from tests.unit.observability.records import (
    GOES_ON,
    SPAN,
    make_continued_report,
    make_record,
    make_report,
    make_step,
    make_times,
)

from kvgraft.errors import ConfigError
from kvgraft.observability import IdleRecord
from kvgraft.observability.chrome_trace import ChromeTrace
from kvgraft.types import NamedPart


@pytest.fixture
def traced(tmp_path):
    """Write records, and return the events."""

    def write(*records):
        file = tmp_path / "trace.json"
        with ChromeTrace(file) as trace:
            for record in records:
                kind = type(record).__name__.removesuffix("Record").lower()
                getattr(trace, f"record_{kind}")(record)
        return json.loads(file.read_text())

    return write


def spans(events, name=None):
    return [event for event in events if event["ph"] == "X" and (name is None or event["name"] == name)]


def track_names(events):
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_stages_nest_in_their_request_on_a_track_of_its_own(traced):
    events = traced(make_record("a"), make_record("b"))
    tracks = {name: tid for tid, name in track_names(events).items()}
    for name in ("a", "b"):
        whole, *stages = [event for event in spans(events) if event["tid"] == tracks[name]]
        assert whole["name"] == "stop"
        assert whole["args"]["request_id"] == name
        assert [stage["name"] for stage in stages] == ["queue", "lookup", "graft", "prefill", "decode"]
        ends = [round(event["ts"] + event["dur"], 3) for event in stages]
        assert ends[:-1] == [stage["ts"] for stage in stages[1:]]
        assert stages[0]["ts"] == whole["ts"]
        assert ends[-1] == round(whole["ts"] + whole["dur"], 3)
    assert len({(event["pid"], event["tid"]) for event in spans(events)}) == 2


def test_request_tells_its_report(traced):
    events = traced(make_record())
    (whole,) = spans(events, "stop")
    told = {"exact_tokens": 10, "shifted_tokens": 45, "computed_tokens": 45, "output_tokens": 4, "policy": "query_seam"}
    assert told.items() <= whole["args"].items()
    (graft,) = spans(events, "graft")
    assert graft["args"]["num_spans"] == 1
    assert {"target_start": 10, "length": 50, "tier": "device"}.items() <= graft["args"]["spans"][0].items()


def test_what_a_prompt_goes_on_from_is_counted_and_is_no_graft(traced):
    events = traced(make_record(report=make_continued_report()))
    (whole,) = spans(events, "stop")
    assert (whole["args"]["continued_tokens"], whole["args"]["donors"]) == (50, 0)
    assert not spans(events, "graft")
    (graft,) = spans(traced(make_record(report=make_report(spans=(GOES_ON, SPAN)))), "graft")
    assert [span["fidelity"] for span in graft["args"]["spans"]] == ["shifted"]


def test_step_is_named_by_its_rows(traced):
    events = traced(
        make_step(), make_step(decode_rows=2, heal_rows=7), make_step(prefill_rows=0), IdleRecord("heal", 104.0, 0.25)
    )
    assert [event["name"] for event in spans(events)] == ["prefill", "prefill + decode + heal", "no rows", "heal"]
    assert spans(events)[1]["args"]["heal_rows"] == 7
    assert [event["dur"] for event in spans(events)] == [500_000, 500_000, 500_000, 250_000]
    assert {track_names(events)[event["tid"]] for event in spans(events)} == {"steps"}


def test_request_without_a_report_or_times(traced):
    failed = make_record(
        "failed", outcome="error", report=None, times=make_times(graft=None, prefill=None, first_token=None)
    )
    events = traced(failed, make_record("untimed", times=None))
    assert [event["name"] for event in spans(events)] == ["error", "queue", "lookup"]


def test_names_of_documents_are_not_written(traced, tmp_path):
    named = replace(SPAN, documents=(NamedPart("my diary", 10, 5),))
    traced(make_record(report=make_report(spans=(named,))))
    assert "diary" not in (tmp_path / "trace.json").read_text()


def test_long_graft_lists_some_of_its_spans_and_counts_all(traced):
    (graft,) = spans(traced(make_record(report=make_report(spans=(SPAN,) * 500))), "graft")
    assert graft["args"]["num_spans"] == 500
    assert len(graft["args"]["spans"]) == 64


def test_file_of_a_killed_process_lacks_the_bracket_alone(tmp_path):
    file = tmp_path / "trace.json"
    with ChromeTrace(file) as trace:
        trace.record_request(make_record())
        deadline = time.monotonic() + 60
        while '"decode"' not in file.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(spans(json.loads(file.read_text() + "]"))) == 6


@pytest.mark.parametrize("name", ["missing/trace.json", "."])
def test_file_that_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"^trace_out .* cannot be written: .*; give a file"):
        ChromeTrace(tmp_path / name)
