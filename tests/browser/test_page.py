"""The inspector's page in a real browser: what is listed, clicked, typed and lost, and names that want to be markup."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="`make test-browser` runs these")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from tests.browser import processes
from tests.browser.processes import PATIENCE_S, PYTHON, Process, document

SCREENSHOTS = os.environ.get("SCREENSHOTS", "")
COUNT = "return document.querySelectorAll('#list li').length"
FARTHEST = (
    "return Math.max(...[...document.querySelectorAll('.u-series')].map((each) => each.getBoundingClientRect().right))"
)
"""Right end of what stands below the curves."""
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
MIXED = "\u202egnirts desrever \U0001f600\U0001f680 \u05e9\u05dc\u05d5\u05dd"


def serve(port=0, *more):
    return processes.serve(port, "--ui", *more)


def reports(file, names, miss=None):
    """Write a report for each name; with a reason of a `miss`, nothing of its prompt was grafted."""
    span = {
        "target_start": 100, "length": 700, "donor_id": 7, "donor_start": 0, "position_delta": 100, "fidelity": "shifted",
        "generation": 0, "tier": "device", "documents": [],
    }  # fmt: skip
    report = {
        "version": 2, "num_tokens": 1000, "exact_tokens": 50, "shifted_tokens": 700, "substituted_tokens": 0,
        "recomputed_tokens": 0, "corrected_tokens": 0, "computed_tokens": 250, "num_donors": 1, "policy": "query_seam",
        "miss": None, "spans": [span], "timings_ms": {"lookup": 1.0}, "risk": {"status": "uncalibrated", "reason": "none"},
    }  # fmt: skip
    if miss:
        report |= {
            "shifted_tokens": 0, "computed_tokens": 950, "num_donors": 0, "spans": [],
            "miss": {"reason": miss, "detail": ""},
        }  # fmt: skip
    with file.open("a") as lines:
        for name in names:
            lines.write(json.dumps({"request_id": name, "outcome": "stop", "attempts": [report]}) + "\n")


def until(browser, condition):
    return WebDriverWait(browser, PATIENCE_S, poll_frequency=0.1).until(lambda _: condition())


def rows(browser):
    return browser.find_elements(By.CSS_SELECTOR, "#list li")


def names(browser):
    return browser.execute_script("return [...document.querySelectorAll('#list .id')].map((each) => each.textContent)")


def keep(browser, name):
    if SCREENSHOTS:
        browser.save_screenshot(str(Path(SCREENSHOTS) / f"{name}.png"))


def test_requests_appear_and_one_is_looked_at(browser):
    with serve() as server:
        browser.get(server.url + "/ui/")
        until(browser, lambda: browser.find_element(By.ID, "link").text == "live")
        server.complete(document(0))
        answer = server.complete([9, 8, 7, *document(0), 5])
        until(browser, lambda: len(rows(browser)) == 2)
        assert answer["id"].startswith(names(browser)[0]) or names(browser)[0].startswith(answer["id"])
        bar = rows(browser)[0].find_element(By.TAG_NAME, "svg")
        assert "shifted" in bar.get_attribute("aria-label")
        rows(browser)[0].find_element(By.TAG_NAME, "a").click()
        browser.switch_to.frame("detail")
        until(browser, lambda: "Request" in browser.find_element(By.TAG_NAME, "h1").text)
        run = browser.find_element(By.CSS_SELECTOR, "rect.shifted title")
        assert "of donor" in run.get_attribute("textContent")
        browser.switch_to.default_content()
        browser.find_element(By.CSS_SELECTOR, "summary").click()
        until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "#donors tr")) > 1)
        assert browser.find_elements(By.CSS_SELECTOR, "#icicle rect")
        until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "canvas")) == 2)
        time.sleep(3)  # some points of the curves
        keep(browser, "inspector-request")
        browser.execute_script("scrollTo(0, 0)")
        keep(browser, "inspector")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", NARROW)  # windows have at least 500 pixels
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        until(browser, lambda: browser.execute_script(FARTHEST) <= 400)
        keep(browser, "inspector-narrow")


NARROW = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
DARK_EXACT, LIGHT_EXACT = "rgb(102, 187, 106)", "rgb(46, 125, 50)"
MARK = "return getComputedStyle(document.querySelectorAll('#tokens .u-marker')[1]).borderTopColor"
LINES = """
const canvas = document.querySelector("#slots canvas");
if (!canvas) return [];
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const colors = new Set();
for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] === 255) colors.add(pixels.slice(at, at + 3).join());
return [...colors];
"""
"""Colours of what is drawn on a curve's canvas without transparency."""
LABELS = """
const drawn = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
  const from = this.getTransform().e + x - (this.textAlign === "right" ? this.measureText(text).width : 0);
  drawn.push([text, from]);
  return write.call(this, text, x, ...rest);
};
window.drawnLabels = drawn;
"""
"""Notes what is written on canvases, with its left end."""


def theme(browser, name):
    """What the system asks for."""
    features = [{"name": "prefers-color-scheme", "value": name}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@contextmanager
def metrics(text):
    """The address of metrics that never change."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()


def test_outcome_and_reason_stand_apart_below_their_headings(browser, tmp_path):
    file = tmp_path / "reports.jsonl"
    reports(file, ["grafted"])
    reports(file, ["missed"], "no_match")
    with Process("ui", "--reports", str(file), "--port", "0") as page:
        browser.get(page.url + "/ui/")
        until(browser, lambda: len(rows(browser)) == 2)
        cells = {
            name: [
                each.find_element(By.CLASS_NAME, name)
                for each in (*rows(browser), browser.find_element(By.ID, "heads"))
            ]
            for name in ("outcome", "why")
        }
        words = "no text that was read before shares a run of tokens with the prompt"
        assert [each.text for each in cells["outcome"]] == ["stop", "stop", "outcome"]
        assert [each.text for each in cells["why"]] == [words, "", "why nothing was grafted"]
        for column in cells.values():
            assert len({round(each.rect["x"]) for each in column}) == 1
        browser.find_element(By.ID, "text").send_keys(words[:20])
        until(browser, lambda: names(browser) == ["missed"])


def test_labels_of_axes_are_short_and_whole(browser):
    slots = 'kvgraft:kv_slots{holder="free"} 160000\nkvgraft:kv_slots{holder="cached"} 1234567\n'
    with metrics(slots) as url, Process("ui", "--metrics", url, "--port", "0") as page:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LABELS})
        browser.get(page.url + "/ui/")
        until(browser, lambda: any("M" in text for text, _ in browser.execute_script("return window.drawnLabels")))
        written = browser.execute_script("return window.drawnLabels")
        assert {"1M", "500K"} <= {text for text, _ in written}
        assert all(left >= 0 for text, left in written if text), written
        keep(browser, "inspector-axes")


def test_curves_follow_the_system_when_it_turns_dark(browser):
    with (
        metrics('kvgraft:kv_slots{holder="cached"} 1000\n') as url,
        Process("ui", "--metrics", url, "--port", "0") as page,
    ):
        theme(browser, "light")
        browser.get(page.url + "/ui/")
        for name, exact in (("light", LIGHT_EXACT), ("dark", DARK_EXACT), ("light", LIGHT_EXACT)):
            theme(browser, name)
            until(
                browser,
                lambda exact=exact: exact.removeprefix("rgb(")[:-1].replace(" ", "") in browser.execute_script(LINES),
            )
            assert browser.execute_script(MARK) == exact


def test_one_request_is_read_in_400_pixels(browser, tmp_path):
    file = tmp_path / "reports.jsonl"
    reports(file, ["r" * 60])
    with Process("ui", "--reports", str(file), "--port", "0") as page:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", NARROW)
        theme(browser, "dark")
        browser.get(page.url + "/ui/")
        until(browser, lambda: len(rows(browser)) == 1)
        browser.get(page.url + "/ui/requests/1")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
        for text in browser.find_elements(By.CSS_SELECTOR, "svg text"):
            assert text.rect["height"] >= 11
            assert text.rect["x"] + text.rect["width"] <= 400
        cells = [each for each in browser.find_elements(By.TAG_NAME, "td") if each.text]
        assert cells
        assert all(cell.rect["x"] + cell.rect["width"] <= 400 for cell in cells)
        heads = "return [...document.querySelectorAll('td')].map((td) => getComputedStyle(td, '::before').content)"
        assert browser.execute_script(heads)[:2] == ['"positions"', '"tokens"']
        fill = "return getComputedStyle(document.querySelector('rect.shifted')).fill"
        assert browser.execute_script(fill) == "rgb(100, 181, 246)"
        keep(browser, "inspector-request-narrow")


def test_the_list_is_reached_by_keys(browser):
    with serve() as server:
        for number in range(3):
            server.complete(document(number))
        browser.get(server.url + "/ui/")
        until(browser, lambda: len(rows(browser)) == 3)
        first = rows(browser)[0].find_element(By.TAG_NAME, "a")
        browser.execute_script("arguments[0].focus()", first)
        first.send_keys(Keys.ARROW_DOWN)
        second = browser.switch_to.active_element
        assert second == rows(browser)[1].find_element(By.TAG_NAME, "a")
        second.send_keys(Keys.ENTER)
        until(browser, lambda: browser.find_element(By.ID, "detail-section").is_displayed())
        browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        until(browser, lambda: not browser.find_element(By.ID, "detail-section").is_displayed())


def first_news(url):
    """What a page is told when it is opened."""
    with urllib.request.urlopen(f"{url}/ui/events", timeout=PATIENCE_S) as stream:
        line = next(line for line in iter(stream.readline, b"") if line.startswith(b"data: "))
    return json.loads(line.removeprefix(b"data: "))


def clock(browser, at):
    """A moment as the browser writes it."""
    return browser.execute_script("return new Date(1000 * arguments[0]).toLocaleTimeString()", at)


def pointed_at(browser, curve):
    """What stands below a curve when the pointer is at its left end: a time and figures, by name."""
    over = browser.find_element(By.CSS_SELECTOR, f"#{curve} .u-over")
    left = 2 - over.size["width"] // 2
    ActionChains(browser).move_to_element(over).move_to_element_with_offset(over, left, 0).perform()
    parts = browser.find_elements(By.CSS_SELECTOR, f"#{curve} .u-series")
    return {each.find_element(By.TAG_NAME, "th").text: each.find_element(By.TAG_NAME, "td").text for each in parts}


def test_who_opens_the_page_later_sees_what_was_before(browser):
    with serve() as server:
        before = first_news(server.url)["timeline"]
        server.complete(document(0))
        server.complete([9, 8, 7, *document(0), 5])
        # The server looks every few seconds.
        until(browser, lambda: len(first_news(server.url)["timeline"]) >= len(before) + 2)
        browser.get(server.url + "/ui/")
        until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "#slots .u-over")) == 1)
        kept = first_news(server.url)["timeline"]
        until(browser, lambda: pointed_at(browser, "slots")["Time"] == clock(browser, kept[0]["at"]))
        assert pointed_at(browser, "slots")["free"] == "4,000"
        # What came about between the first two looks is known at the second.
        until(browser, lambda: pointed_at(browser, "tokens")["Time"] == clock(browser, kept[1]["at"]))
        keep(browser, "inspector-opened-later")


def test_curves_of_another_server_are_kept_by_the_page_over_its_metrics(browser):
    with serve() as server, Process("ui", "--metrics", server.url + "/metrics", "--port", "0") as page:
        server.complete(document(0))
        until(browser, lambda: len(first_news(page.url)["timeline"]) >= 2)
        browser.get(page.url + "/ui/")
        kept = first_news(page.url)["timeline"]
        until(browser, lambda: pointed_at(browser, "slots")["Time"] == clock(browser, kept[0]["at"]))


CALIBRATION = """
import sys
from pathlib import Path
from kvgraft.engine import LLM
from kvgraft.engine.requests.risk import risk_binding
from kvgraft.fidelity.control import AnswerPart, Calibration, NotchResult, PartResult, save_calibration
from kvgraft.fidelity.control.notches import notches_of
from kvgraft.types import RepairTime

llm = LLM("graft-tiny", num_slots=100)
names = tuple(each.name for each in notches_of(llm.policy, RepairTime.AFTER))
parts = (PartResult(AnswerPart.WHOLE, 500, 0.0, 0.006, 1e-5),)
results = tuple(NotchResult(name, parts, name == names[1], 0.1) for name in names[1:])
binding = risk_binding(llm.config, llm.loaded, llm.policy)
made = Calibration(binding, "greedy:2", 0.9, 0.05, names[1], names, 500, results, "2026-11-24", {})
save_calibration(Path(sys.argv[1]), made)
"""


def test_risk_and_audits_are_told(browser, tmp_path):
    calibration = str(tmp_path / "calibration.json")
    subprocess.run([str(PYTHON), "-c", CALIBRATION, calibration], check=True, capture_output=True)
    with serve(0, "--calibration", calibration, "--audit-share", "1") as server:
        server.complete(document(0))
        answer = server.complete([9, 8, 7, *document(0), 5])
        browser.get(server.url + "/ui/")
        until(browser, lambda: "calibrated 1 none yet" in browser.find_element(By.ID, "risk").text)
        browser.find_element(By.CSS_SELECTOR, "summary").click()
        until(browser, lambda: browser.find_element(By.ID, "audits").is_displayed())
        (audit,) = browser.find_elements(By.CSS_SELECTOR, "#audits tr:not(:first-child)")
        assert answer["id"] in audit.text
        assert "(greedy:2)" in audit.text
        keep(browser, "inspector-risk")


def test_what_is_typed_is_looked_for(browser, tmp_path):
    file = tmp_path / "reports.jsonl"
    reports(file, [f"request-{number}" for number in range(300)])
    with Process("ui", "--reports", str(file), "--port", "0") as page:
        browser.get(page.url + "/ui/")
        until(browser, lambda: len(rows(browser)) == 200)
        browser.find_element(By.ID, "text").send_keys("request-29")
        until(browser, lambda: sorted(names(browser)) == sorted(["request-29", *(f"request-29{n}" for n in range(10))]))
        reports(file, ["request-290000", "other"])
        until(browser, lambda: "request-290000" in names(browser))
        assert "other" not in names(browser)


def test_ten_thousand_requests_are_read_on(browser, tmp_path):
    file = tmp_path / "reports.jsonl"
    reports(file, [f"r{number}" for number in range(10_000)])
    with Process("ui", "--reports", str(file), "--port", "0") as page:
        browser.get(page.url + "/ui/")
        older = browser.find_element(By.ID, "older")
        for count in range(200, 10_001, 200):
            until(browser, lambda count=count: browser.execute_script(COUNT) == count)
            browser.execute_script("arguments[0].click()", older)
        assert len(set(names(browser))) == 10_000
        reports(file, ["late"])
        until(browser, lambda: names(browser)[0] == "late")


def test_names_are_never_markup(browser, tmp_path):
    file = tmp_path / "reports.jsonl"
    reports(file, [HOSTILE, MIXED, "x" * (1 << 20)])
    with Process("ui", "--reports", str(file), "--port", "0") as page:
        browser.get(page.url + "/ui/")
        until(browser, lambda: len(rows(browser)) == 3)
        assert set(names(browser)) == {HOSTILE, MIXED, "x" * (1 << 20)}
        for row in rows(browser)[1:]:
            row.find_element(By.TAG_NAME, "a").click()
            time.sleep(0.5)
        browser.set_window_size(500, 900)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        assert "owned" not in browser.title
        assert not browser.find_elements(By.CSS_SELECTOR, "#list img, #list script")


@pytest.mark.parametrize("pause_s", [0.0, 2.0])
def test_a_restarted_server_is_found_again(browser, pause_s):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve(port) as server:
        browser.get(server.url + "/ui/")
        server.complete(document(0))
        server.complete(document(1))
        until(browser, lambda: len(rows(browser)) == 2)
    until(browser, lambda: "lost" in browser.find_element(By.ID, "link").get_attribute("class"))
    time.sleep(pause_s)
    with serve(port) as server:
        threading.Timer(1, lambda: server.complete(document(2))).start()
        until(browser, lambda: browser.find_element(By.ID, "link").text == "live")
        until(browser, lambda: len(rows(browser)) == 1)
