"""The page's endpoints over made-up requests: what is listed and streamed, who may look, and what browsers are told."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from tests.unit.explain.test_live import answering
from tests.unit.explain.test_requests import report, span
from tests.unit.observability.records import make_continued_report, make_record, make_report, make_step
from tests.unit.server.conftest import FakeEngine, exchange

from kvgraft.config import ServerConfig
from kvgraft.engine.inspection import DonorFacts, Inspection, LiveRequest
from kvgraft.engine.requests.risk import AuditFacts
from kvgraft.errors import ConfigError
from kvgraft.explain import ExplainedRequest, RunKind, read_requests
from kvgraft.explain.hints import REASONS
from kvgraft.explain.page import page
from kvgraft.fidelity.control.controller import RiskEvent
from kvgraft.inspector import FileSource, RequestHistory, create_inspector, inspector_server
from kvgraft.inspector import app as app_module
from kvgraft.inspector.entries import EntryLog, Filter
from kvgraft.inspector.rows import bar, row
from kvgraft.inspector.state import NAMES, read_samples, state_of
from kvgraft.inspector.timeline import Timeline
from kvgraft.observability.prometheus import PrometheusRecorder
from kvgraft.reuse.metrics import token_kinds
from kvgraft.server import create_app
from kvgraft.types import Miss, MissReason

HOSTILE = "<script>alert(1)</script>\u202e\"'&\U0001f600"
HERE = (b"host", b"127.0.0.1:8000")


class Source:
    """Made-up requests, metrics and state."""

    name = "tiny"

    def __init__(self, *records, num_events=1):
        self.history = RequestHistory()
        self.timeline = Timeline()
        self.inspected = None
        for record in records:
            self.history.record_request(record)
        self._events_left = num_events

    @property
    def log(self):
        return self.history.log

    @property
    def is_closing(self):
        self._events_left -= 1
        return self._events_left < 0

    async def refresh(self):
        pass

    async def samples(self):
        recorder = PrometheusRecorder("tiny")
        recorder.set_load(2, 3)
        return list(recorder.samples(NAMES))

    async def inspection(self):
        return self.inspected


def ask(source, path, *, key="", headers=(HERE,)):
    return asyncio.run(exchange(create_inspector(source, key), "GET", path, headers=headers))


@asynccontextmanager
async def running(app):
    """The app between its start and its end, behind its first look at figures."""
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0)
        yield


def news(reply):
    lines = reply.body.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


class TestList:
    @pytest.mark.parametrize("reason", list(MissReason))
    def test_a_miss_is_told_and_found_in_the_words_of_explain(self, reason):
        missed = make_report(spans=(), shifted_tokens=0, computed_tokens=90, miss=Miss(reason, ""))
        source = Source(make_record("missed", report=missed, outcome="length"), make_record("grafted"))
        words = REASONS[reason].words
        rows = {each["id"]: each for each in ask(source, "/api/requests").json["requests"]}
        assert (rows["missed"]["outcome"], rows["missed"]["miss"], rows["missed"]["why"]) == ("length", reason, words)
        assert (rows["grafted"]["outcome"], rows["grafted"]["miss"], rows["grafted"]["why"]) == ("stop", "", "")
        found = source.log.select(Filter(words.lower()), limit=9)
        assert [entry.request_id for entry in found] == ["missed"]

    def test_the_newest_comes_first(self):
        answer = ask(Source(*(make_record(f"r{number}") for number in range(3))), "/api/requests").json
        assert [each["id"] for each in answer["requests"]] == ["r2", "r1", "r0"]
        assert answer["requests"][0]["counts"]["shifted"] == 45
        assert answer["requests"][0]["ttft_ms"] == 5000

    def test_it_is_read_on_in_parts_without_gaps_or_repeats(self):
        source = Source(*(make_record(f"r{number}") for number in range(450)))
        seen, before = [], 0
        while part := ask(source, f"/api/requests?before={before}").json["requests"]:
            seen += [each["number"] for each in part]
            before = seen[-1]
        assert seen == list(range(450, 0, -1))

    def test_what_is_looked_for_is_part_of_a_name_an_outcome_or_a_miss(self):
        missed = make_report(spans=(), shifted_tokens=0, computed_tokens=90, miss=Miss(MissReason.NO_MATCH, ""))
        source = Source(make_record("Alpha"), make_record("beta", outcome="abort"), make_record("gamma", report=missed))

        def found(query):
            return [each["id"] for each in ask(source, f"/api/requests?{query}").json["requests"]]

        assert found("text=ALPH") == ["Alpha"]
        assert found("text=abort") == ["beta"]
        assert found("text=no_match") == ["gamma"]
        assert found("reuse=exact") == ["gamma"]
        assert found("reuse=grafted&text=alpha") == ["Alpha"]
        assert found("reuse=none") == []

    def test_what_goes_on_is_a_choice_of_its_own(self):
        source = Source(make_record("grafted"), make_record("continued", report=make_continued_report()))
        (listed,) = ask(source, "/api/requests?reuse=continued").json["requests"]
        assert (listed["id"], listed["reuse"], listed["counts"]["continued"]) == ("continued", "continued", 50)
        assert sum(count for kind, count in listed["counts"].items() if kind != "recomputed") == 100
        assert [kind for kind, _ in listed["bar"]] == ["exact", "continued", "computed"]
        page_of_it = ask(source, "/").body.decode()
        assert "<option>continued</option>" in page_of_it
        assert 'class="key continued"' in page_of_it

    @pytest.mark.parametrize("file", ["curves.js", "figures.js"])
    def test_curves_and_figures_know_every_kind_of_the_metric(self, file):
        kinds = set(token_kinds(make_report())) - ({"recomputed", "fresh"} if file == "figures.js" else set())
        assert all(f'"{kind}"' in ask(Source(), f"/static/{file}").body.decode() for kind in kinds)

    @pytest.mark.parametrize("before", ["x", "-1", "1e3", "\u0663", "9" * 30])
    def test_a_number_that_is_none_is_refused(self, before):
        assert ask(Source(), f"/api/requests?before={before}").status == 400

    def test_reports_are_those_of_a_report_file(self):
        source = Source(*(make_record(f"r{number}") for number in range(300)), make_record("late", report=None))
        told = ask(source, "/api/reports").json
        assert [each["request_id"] for each in told] == [f"r{number}" for number in range(101, 300)]
        assert told[-1].keys() == {"request_id", "outcome", "output_tokens", "attempts"}
        (explained,) = read_requests(json.dumps(told[-1]), "told")
        assert explained.last.tokens(RunKind.SHIFTED) == 45
        assert [each["request_id"] for each in ask(source, "/api/reports?text=R17").json] == [
            f"r{number}" for number in (17, *range(170, 180))
        ]
        assert ask(source, "/api/reports", key="secret").status == 401

    def test_a_request_without_a_report_is_listed_and_has_no_page(self):
        source = Source(make_record(report=None, outcome="abort", ttft_s=None))
        (listed,) = ask(source, "/api/requests").json["requests"]
        assert (listed["bar"], listed["counts"], listed["ttft_ms"], listed["reuse"]) == ([], {}, None, "none")
        assert ask(source, "/requests/1").status == 404


class TestRequest:
    def test_its_page_holds_its_names_as_text_and_runs_nothing(self):
        reply = ask(Source(make_record(HOSTILE)), "/requests/1")
        assert reply.status == 200
        assert "<script" not in reply.body.decode()
        assert "&lt;script&gt;" in reply.body.decode()
        assert "script-src" not in reply.headers["content-security-policy"]
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")

    @pytest.mark.parametrize("number", ["2", "0", "9" * 40, "9" * 5_000, "\u00b2", "x"])
    def test_one_that_is_not_kept_is_not_found(self, number):
        assert ask(Source(make_record()), f"/requests/{number}").status == 404

    def test_the_oldest_are_forgotten(self):
        log = EntryLog(limit=2)
        history = RequestHistory()
        history.log = log
        for number in range(5):
            history.record_request(make_record(f"r{number}"))
        assert [entry.request_id for entry in log.select(Filter(), limit=9)] == ["r4", "r3"]
        assert (log.newest, log.get(3), log.get(4).request_id) == (5, None, "r3")


class TestEngine:
    def test_where_there_is_none_nothing_is_told(self):
        assert ask(Source(), "/api/engine").json is None

    def test_what_lies_in_it_is_told_under_the_names_that_it_has(self):
        source = Source()
        source.inspected = Inspection(
            (LiveRequest(HOSTILE, "decode", 9, 5, 2, 0.5),),
            1,
            (DonorFacts(7, 300, "host", 1.5, 150, 0),),
            1,
            ((-1, 64, False), (0, 32, True)),
            (AuditFacts(12.5, HOSTILE, "near", "10 %", "later", "greedy:4", 1.0, RiskEvent.TIGHTENED),),
        )
        told = ask(source, "/api/engine").json
        assert told["requests"][0]["request_id"] == told["audits"][0]["request_id"] == HOSTILE
        assert told["donors"][0]["saved_tokens"] == 150
        assert told["prefixes"] == [[-1, 64, False], [0, 32, True]]
        assert (told["audits"][0]["loss"], told["audits"][0]["event"]) == (1.0, "tightened")


class TestStream:
    def test_it_tells_figures_and_requests(self):
        (told,) = news(ask(Source(make_record("r0")), "/events"))
        assert (told["name"], told["newest"], told["requests"][0]["id"]) == ("tiny", 1, "r0")
        assert (told["state"]["running"], told["state"]["waiting"]) == (2, 3)

    def test_the_first_event_alone_has_the_last_hour(self, monkeypatch):
        monkeypatch.setattr(app_module, "_PERIOD_S", 0.0)
        source = Source(num_events=2)
        source.timeline.add(12.5, {"slots": {"free": 3.0}, "running": 1.0})
        first, second = news(ask(source, "/events"))
        assert first["timeline"] == [{"at": 12.5, "tokens": {}, "slots": {"free": 3.0}}]
        assert "timeline" not in second
        assert second["at"] >= first["at"] > 12.5

    def test_a_browser_that_comes_back_gets_what_it_has_not_seen(self):
        source = Source(make_record("r0"), make_record("r1"), num_events=9)
        app = create_inspector(source)

        async def both():
            first = await exchange(app, "GET", "/events", headers=(HERE,), leave_after=2)
            seen = next(line for line in first.body.decode().splitlines() if line.startswith("id: "))
            source.history.record_request(make_record("r2"))
            headers = (HERE, (b"last-event-id", seen.removeprefix("id: ").encode()))
            return await exchange(app, "GET", "/events", headers=headers, leave_after=2)

        assert [each["id"] for each in news(asyncio.run(both()))[0]["requests"]] == ["r2"]

    @pytest.mark.parametrize("seen", [b"other-1", b"-", b"", b"\xff", b"deadbeef-99999999999999999999"])
    def test_who_has_seen_another_server_gets_all(self, seen):
        reply = ask(Source(make_record("r0")), "/events", headers=(HERE, (b"last-event-id", seen)))
        assert [each["id"] for each in news(reply)[0]["requests"]] == ["r0"]

    @pytest.mark.parametrize("number", ["\u00b2", "9" * 5_000])
    def test_a_number_of_the_last_event_that_is_none_is_passed_over(self, number):
        source = Source(make_record("r0"), num_events=9)
        app = create_inspector(source)

        async def both():
            first = await exchange(app, "GET", "/events", headers=(HERE,), leave_after=2)
            seen = next(line for line in first.body.decode().splitlines() if line.startswith("id: "))
            epoch = seen.removeprefix("id: ").partition("-")[0]
            headers = (HERE, (b"last-event-id", f"{epoch}-{number}".encode("latin-1")))
            return await exchange(app, "GET", "/events", headers=headers, leave_after=2)

        assert [each["id"] for each in news(asyncio.run(both()))[0]["requests"]] == ["r0"]

    def test_a_crowd_is_refused(self):
        source = Source(num_events=10_000)
        app = create_inspector(source)

        async def crowd():
            watching = [asyncio.create_task(exchange(app, "GET", "/events", headers=(HERE,))) for _ in range(16)]
            await asyncio.sleep(0.05)
            refused = await exchange(app, "GET", "/events", headers=(HERE,))
            for each in watching:
                each.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            again = await exchange(app, "GET", "/events", headers=(HERE,), leave_after=1)
            return refused.status, again.status

        assert asyncio.run(crowd()) == (503, 200)


class TestAccess:
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"])
    def test_without_a_key_this_machine_may_look(self, host):
        assert ask(Source(), "/", headers=((b"host", host.encode()),)).status == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "127.0.0.1.evil.example:8000", "", "192.168.1.7:8000", "localhost.:1"]
    )
    def test_under_another_name_it_may_not(self, host):
        reply = ask(Source(make_record()), "/api/requests", headers=((b"host", host.encode()),))
        assert (reply.status, b"--ui-key" in reply.body) == (403, True)

    def test_a_key_opens_it_under_any_name(self):
        basic = b"Basic " + base64.b64encode(b"anna:gehe:im")
        for key in (basic, b"bearer gehe:im"):
            headers = ((b"host", b"kv.example"), (b"authorization", key))
            assert ask(Source(), "/", key="gehe:im", headers=headers).status == 200

    @pytest.mark.parametrize(
        "given",
        [None, b"", b"Basic", b"Basic !!!", b"Basic YTpi", b"Bearer nope", b"Digest a", b"Basic " + b"\xff" * 4],
    )
    @pytest.mark.parametrize(
        "path", ["/", "/events", "/api/requests", "/api/engine", "/requests/1", "/static/inspector.js"]
    )
    def test_nothing_else_does_even_here(self, given, path):
        headers = (HERE,) if given is None else (HERE, (b"authorization", given))
        reply = ask(Source(make_record("secret name")), path, key="k", headers=headers)
        assert reply.status == 401
        assert reply.headers["www-authenticate"].startswith("Basic")
        assert b"secret" not in reply.body

    def test_browsers_are_told_to_run_only_what_is_ours(self):
        reply = ask(Source(), "/")
        policy = reply.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "frame-src 'self'" in policy  # the request that was chosen
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert b"<style" not in reply.body
        assert b" style=" not in reply.body
        assert b"onclick" not in reply.body

    @pytest.mark.parametrize(
        "name", ["palette.css", "inspector.css", "inspector.js", "list.js", "uplot.iife.min.js", "uplot.LICENSE.txt"]
    )
    def test_its_files_are_there(self, name):
        assert ask(Source(), f"/static/{name}").status == 200

    def test_colours_stand_once_for_it_and_for_the_page_of_a_request(self):
        colours = ask(Source(), "/static/palette.css").body.decode()
        variables = set(re.findall(r"--([\w-]+):", colours))
        used = set(re.findall(r"var\(--([\w-]+)", ask(Source(), "/static/inspector.css").body.decode()))
        assert used <= variables
        assert set(RunKind) <= used
        assert colours in page([])
        assert not re.search(r"--[\w-]+:", ask(Source(), "/static/inspector.css").body.decode())

    @pytest.mark.parametrize("name", ["app.py", "..%2fapp.py", "../app.py", "", "inspector"])
    def test_other_files_are_not(self, name):
        assert ask(Source(), f"/static/{name}").status == 404


@given(
    st.integers(1, 40_000).flatmap(
        lambda count: st.tuples(st.just(count), st.lists(st.integers(0, count), max_size=8).map(sorted))
    ),
    st.integers(1, 300),
)
def test_bars_are_as_long_as_they_should_be_and_in_order(prompt, cells):
    count, ends = prompt
    spans = [span(start, stop - start) for start, stop in zip(ends[::2], ends[1::2], strict=False) if stop > start]
    explained = ExplainedRequest.of_report(report(count, 0, spans), "r", "stop", 1)
    drawn = bar(explained.last, cells)
    assert sum(width for _, width in drawn) == cells
    assert all(width > 0 for _, width in drawn)
    assert all(a[0] != b[0] for a, b in pairwise(drawn))


def test_state_is_what_the_metrics_say():
    recorder = PrometheusRecorder("tiny")
    recorder.record_request(make_record())
    recorder.record_step(make_step())
    recorder.set_memory((1, 2, 3, 4), 5, 6, 7)
    state = state_of(recorder.samples(NAMES))
    assert state == state_of(read_samples(recorder.exposition().decode()))
    assert state["slots"] == {"free": 1, "request": 2, "cached": 3, "donor": 4}
    assert (state["donors"], state["donor_tokens"], state["host_bytes"]) == (5, 6, 7)
    assert sum(state["tokens"].values()) == 100
    assert state["tokens"]["segment"] == 45
    assert state["requests"] == {"stop": 1}


def test_state_of_other_engines_is_read_and_summed():
    text = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\nsglang:num_queue_reqs 4\n'
    assert state_of(read_samples(text)) == {"running": 5, "waiting": 4}


@pytest.mark.parametrize("text", ["", "<html>", "kvgraft:donors{", "kvgraft:donors x\n", "\x00"])
def test_what_is_no_metrics_page_has_no_state(text):
    assert read_samples(text) == []


class TestReportFile:
    def lines(self, *names):
        return "".join(
            json.dumps({"request_id": name, "attempts": [report()], "outcome": "stop"}) + "\n" for name in names
        )

    def shown(self, source):
        asyncio.run(source.refresh())
        return [entry.request_id for entry in source.log.select(Filter(), limit=99)]

    def test_it_is_followed_as_it_grows(self, tmp_path):
        file = tmp_path / "reports.jsonl"
        file.write_text("")
        source = FileSource(file)
        assert self.shown(source) == []
        text = self.lines("a", "b")
        file.write_text(text[:-20])
        assert self.shown(source) == ["a"]
        file.write_text(text)
        assert self.shown(source) == ["b", "a"]
        assert self.shown(source) == ["b", "a"]
        (listed,) = ask(source, "/api/requests?text=b").json["requests"]
        assert (listed["id"], listed["prompt_tokens"], listed["ttft_ms"]) == ("b", 1000, None)

    def test_one_that_begins_anew_is_read_anew(self, tmp_path):
        file = tmp_path / "reports.jsonl"
        file.write_text(self.lines("a", "b"))
        source = FileSource(file)
        assert self.shown(source) == ["b", "a"]
        file.write_text(self.lines("c"))
        assert self.shown(source) == ["c", "b", "a"]
        file.unlink()
        assert self.shown(source) == ["c", "b", "a"]

    def test_lines_that_are_no_reports_are_passed_over(self, tmp_path):
        file = tmp_path / "reports.jsonl"
        file.write_bytes(b"nonsense\n\xff\xfe\n[1]\n" + self.lines("a").encode() + b"{}\n")
        assert self.shown(FileSource(file)) == ["a"]

    @pytest.mark.parametrize("odd", [{"miss": {"detail": ""}}, {"shifted_tokens": None}, {"shifted_tokens": 1e999}])
    def test_a_report_that_is_not_whole_keeps_no_other_back(self, tmp_path, odd):
        entry = {"request_id": "odd", "attempts": [report() | odd]}
        file = tmp_path / "reports.jsonl"
        file.write_text(self.lines("a") + json.dumps(entry) + "\n" + self.lines("b"))
        assert self.shown(FileSource(file)) == ["b", "a"]

    def test_one_that_is_not_there_is_refused_at_once(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            FileSource(tmp_path / "absent.jsonl")

    def test_its_page_is_followed_from_its_start_on(self, monkeypatch):
        recorder = PrometheusRecorder("other")
        recorder.set_memory((1, 2, 3, 4), 5, 6, 7)

        async def samples():
            return list(recorder.samples(NAMES))

        source = FileSource(None, "http://127.0.0.1:9/metrics")
        monkeypatch.setattr(source, "samples", samples)

        async def first_news():
            async with running(app := inspector_server(source)):
                return await exchange(app, "GET", "/ui/events", headers=(HERE,), leave_after=2)

        (point, *_) = news(asyncio.run(first_news()))[0]["timeline"]
        assert point["slots"] == {"free": 1, "request": 2, "cached": 3, "donor": 4}

    def test_a_server_that_does_not_answer_has_no_figures(self):
        source = FileSource(None, "http://127.0.0.1:9/metrics")
        assert asyncio.run(source.samples()) == []

    @pytest.mark.parametrize(
        "reply", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"]
    )
    def test_nor_has_one_that_gives_no_whole_answer(self, reply):
        source = FileSource(None, answering(reply) + "/metrics")
        assert asyncio.run(source.samples()) == []


def test_rows_are_json():
    history = RequestHistory()
    history.record_request(make_record(HOSTILE, report=make_report(spans=())))
    (entry,) = history.log.select(Filter(), limit=1)
    assert json.loads(json.dumps(row(entry)))["id"] == HOSTILE


class TestInTheServer:
    """The page under `/ui/` of an app over a fake engine."""

    def get(self, path, history=None, **settings):
        app = create_app(FakeEngine(), ServerConfig().updated(settings), PrometheusRecorder("fake"), None, history)
        return asyncio.run(exchange(app, "GET", path, headers=(HERE,)))

    def test_it_is_there_where_requests_are_kept(self):
        history = RequestHistory()
        history.record_request(make_record("r0"))
        assert self.get("/ui", history).headers["location"] == "ui/"
        assert self.get("/ui/", history).status == 200
        assert [each["id"] for each in self.get("/ui/api/requests", history).json["requests"]] == ["r0"]

    @pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/events", "/ui/api/requests"])
    def test_elsewhere_it_is_not(self, path):
        assert self.get(path).status == 404

    def test_its_curves_begin_with_the_server(self):
        app = create_app(FakeEngine(), ServerConfig(), PrometheusRecorder("fake"), None, RequestHistory())

        async def first_news():
            async with running(app):
                return await exchange(app, "GET", "/ui/events", headers=(HERE,), leave_after=2)

        (point, *_) = news(asyncio.run(first_news()))[0]["timeline"]
        assert point["slots"].keys() == {"free", "request", "cached", "donor"}

    def test_it_wants_the_only_key_of_clients(self):
        assert self.get("/ui/", RequestHistory(), api_key=("k",)).status == 401

    def test_several_keys_need_another(self):
        with pytest.raises(ConfigError, match="ui_key"):
            self.get("/ui/", RequestHistory(), api_key=("k", "l"))

    def test_it_does_not_fill_the_log(self, caplog):
        caplog.set_level("INFO", logger="kvgraft.http.access_log")
        self.get("/ui/api/requests", RequestHistory())
        assert caplog.records == []
        self.get("/ui/nothing", RequestHistory())
        assert [record.levelname for record in caplog.records] == ["INFO"]
