"""`kvgraft serve --ui` and `kvgraft ui` as processes: requests can be looked at, by those who may, and only where asked."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from kvgraft.bench.server_process import ServerProcess
from kvgraft.cli import main

PATIENCE_S = 60.0
SLOTS = ["--num-slots", "3000"]


def get(url, key=""):
    request = urllib.request.Request(url)
    if key:
        request.add_header("authorization", "Basic " + base64.b64encode(f"me:{key}".encode()).decode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def complete(url, prompt, key=""):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=PATIENCE_S
    ) as answer:
        return json.loads(answer.read())


def listed(url, count, key=""):
    """Requests of the page, when there are as many."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        found = json.loads(get(f"{url}/ui/api/requests", key))["requests"]
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"there are not {count} requests")


def document(first):
    return [3 + (first + 7 * number) % 1500 for number in range(200)]


def test_a_served_request_is_shown_with_where_its_text_came_from():
    with ServerProcess([*SLOTS, "--ui"]) as server:
        url = server.url
        complete(url, document(0))
        complete(url, [9, 8, 7, *document(0), 5])
        newest, first = listed(url, 2)
        assert (first["reuse"], newest["reuse"]) == ("none", "grafted")
        assert sum(width for _, width in newest["bar"]) == 240
        assert newest["counts"]["shifted"] >= 150
        shown = get(f"{url}/ui/requests/{newest['number']}")
        assert newest["id"] in shown
        assert "of donor" in shown
        engine = json.loads(get(f"{url}/ui/api/engine"))
        assert engine["requests"] == []
        assert engine["num_donors"] >= 1
        assert engine["donors"][0]["saved_tokens"] >= 150
        assert sum(tokens for _, tokens, _ in engine["prefixes"]) >= 200
        assert "<title>kvgraft" in get(f"{url}/ui")
        with urllib.request.urlopen(f"{url}/ui/events", timeout=PATIENCE_S) as stream:
            lines = iter(stream.readline, b"")
            told = json.loads(next(line for line in lines if line.startswith(b"data: "))[6:])
            assert [each["number"] for each in told["requests"]] == [newest["number"], first["number"]]
            assert told["state"]["slots"]["cached"] > 0
            os.kill(server.pid, signal.SIGTERM)  # an open stream keeps no server from ending
            assert list(lines) is not None


@pytest.mark.slow
def test_the_page_has_a_key_of_its_own(monkeypatch):
    monkeypatch.setenv("KVGRAFT_API_KEY", "one,two")
    monkeypatch.setenv("KVGRAFT_UI_KEY", "admin")
    with ServerProcess([*SLOTS, "--ui"]) as server:
        url = server.url
        complete(url, document(0), "two")
        assert len(listed(url, 1, "admin")) == 1
        for key in ("", "one", "two"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(f"{url}/ui/api/requests", key)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            complete(url, document(0), "admin")


def test_several_clients_without_a_key_for_the_page_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("KVGRAFT_API_KEY", "one,two")
    assert main(["serve", "--ui", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ui_key" in err


@pytest.mark.slow
def test_reports_of_another_server_are_shown(tmp_path):
    reports = tmp_path / "reports.jsonl"
    with ServerProcess(SLOTS) as server:
        answers = [complete(server.url, [*([9] * number), *document(0)]) for number in (0, 3)]
        reports.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        command = [sys.executable, "-m", "kvgraft", "ui", "--reports", str(reports), "--port", "0"]
        command += ["--metrics", server.url + "/metrics"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            url = line.split(" at ")[1].split("/ui/")[0]
            newest, _ = listed(url, 2)
            assert newest["id"] == answers[1]["id"]
            assert "of donor" in get(f"{url}/ui/requests/{newest['number']}")
            assert json.loads(get(f"{url}/ui/api/engine")) is None
            with urllib.request.urlopen(f"{url}/ui/events", timeout=PATIENCE_S) as stream:
                told = next(line for line in iter(stream.readline, b"") if line.startswith(b"data: "))
            assert json.loads(told[6:])["state"]["donors"] >= 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--reports"),
        (["--reports", "/nonexistent/reports"], "cannot be read"),
        (["--metrics", "file:///etc/passwd"], "must be a URL"),
        (["--metrics", "http://127.0.0.1:1/metrics", "--port", "70000"], "--port must be between"),
    ],
)
def test_mistakes_are_one_line(arguments, told, capsys, monkeypatch):
    monkeypatch.delenv("KVGRAFT_REPORT_FILE", raising=False)
    assert main(["ui", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert told in err
