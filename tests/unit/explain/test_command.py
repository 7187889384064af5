"""`kvgraft explain` as a command: what it refuses, each in one line, and what it prints elsewhere than on a terminal."""

from __future__ import annotations

import json

import pytest
from tests.unit.explain.test_requests import GRAFTED, MISS, report

from kvgraft.cli import main


@pytest.fixture
def file(tmp_path):
    """Reports of three requests."""
    path = tmp_path / "reports.jsonl"
    covered = MISS | {"miss": {"reason": "covered_by_prefix", "detail": ""}}
    reports = {"cold": MISS, "warm": GRAFTED, "c" * 60: covered}
    entries = [{"request_id": name, "attempts": [told]} for name, told in reports.items()]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def refusal(capsys, *arguments):
    assert main(["explain", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "Error" not in told.err
    return told.err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b'{"kvgraft": {"num_tokens": 3', "has no JSON object"),
        (b"not a report", "has no JSON object"),
        (b"[1, 2]", "has no JSON object"),
        (b'{"id": "a"}', "has no report of kvgraft"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (json.dumps(report() | {"version": 99}).encode(), "written by a later kvgraft"),
    ],
)
def test_a_file_without_reports_is_refused(capsys, tmp_path, content, told):
    path = tmp_path / "reports.jsonl"
    path.write_bytes(content)
    assert told in refusal(capsys, "--file", str(path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--text"], "--text needs --tokenizer"),
        (["--prompt", "x"], "--prompt needs --tokenizer"),
        (["--request-id", "warm", "--diff", "cold", "warm"], "leave --request-id out"),
        (["--diff", "cold", "warm", "--json"], "leave --diff out"),
        (["--request-id", "warm", "--json", "--html", "x.html"], "leave --html out"),
        (["--json"], "3 requests; --json is for one"),
        (["--html", "x.html"], "3 requests; --html is for one"),
        (["--request-id", "warm", "--html", "/nonexistent/x.html"], "cannot be written: No such file"),
        (["--request-id", "warm", "--tokenizer", "/nonexistent"], "cannot be read as a tokenizer"),
    ],
)
def test_what_cannot_be_done_is_refused_rather_than_left_out(capsys, file, arguments, told):
    assert told in refusal(capsys, "--file", file, *arguments)


def test_a_file_that_is_not_there_and_none_at_all_are_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("KVGRAFT_REPORT_FILE", raising=False)
    assert "cannot be read: No such file" in refusal(capsys, "--file", str(tmp_path / "absent"))
    assert "--file or --server" in refusal(capsys)


def test_elsewhere_than_on_a_terminal_lines_are_plain_and_short(capsys, file):
    for arguments in ([], ["--request-id", "warm"], ["--request-id", "cold"], ["--diff", "cold", "warm"]):
        assert main(["explain", "--file", file, *arguments]) == 0
        told = capsys.readouterr().out
        assert "\x1b" not in told
        assert max(map(len, told.splitlines())) <= 80


def test_json_of_a_request_that_is_not_there_is_nothing(capsys, file):
    assert main(["explain", "--file", file, "--request-id", "hot", "--json"]) == 1
    assert capsys.readouterr() == ("", f"no request hot in {file}\n")


def test_a_request_that_is_not_there_is_named(capsys, file):
    assert main(["explain", "--file", file, "--request-id", "hot"]) == 1
    assert capsys.readouterr().out == f"no request hot in {file}\n"
