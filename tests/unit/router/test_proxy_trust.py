"""What the proxy lets through between clients and workers, and what workers that are odd or vanish do to it."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from tests.unit.router.fake_workers import often, routed, run, until

from kvgraft.errors import ConfigError
from kvgraft.router import monitor as monitor_module
from kvgraft.router.gateway import Gateway
from kvgraft.router.load import WorkerLoad
from kvgraft.router.worker import WorkerSpec, parse_worker

COMPLETION = {"model": "model", "prompt": "a b c d", "stream": True}
SECRET = "SECRET_METRIC 1\n"


async def raw(session, head, body=b""):
    """The answer to a request as it is written, without what a client library adds or puts right."""
    reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port)
    writer.write(head.encode() + b"\r\nHost: x\r\nConnection: close\r\n\r\n" + body)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer.decode()


@pytest.mark.parametrize("name", ["../../metrics", "..%2f..%2fmetrics", "%2e%2e/%2e%2e/metrics", "a/../../../metrics"])
def test_names_of_models_lead_nowhere_else(name):
    async def test(one, two):
        one.metrics = two.metrics = SECRET
        async with routed(one, two) as (session, _):
            assert "SECRET" not in await raw(session, f"GET /v1/models/{name} HTTP/1.1")

    run(test)


def test_redirects_of_workers_are_not_followed():
    async def test(one, two):
        async def models(_request):
            raise web.HTTPFound(f"{two.url}/metrics")

        one._models, two.metrics = models, SECRET
        await one.stop()
        await one.start()
        async with routed(one) as (session, _), session.get("/v1/models") as response:
            assert "SECRET" not in await response.text()

    run(test)


def test_cookies_of_one_client_are_not_sent_for_another():
    async def test(one, _two):
        async def answer(_request):
            response = web.json_response({})
            response.set_cookie("session", "of the first")
            return response

        one._whole, one.behaviour = answer, "whole"
        # A name, because cookies are never kept for numbers.
        async with routed(specs=[WorkerSpec(f"http://localhost:{one.port}", name="one")]) as (session, _):
            for _ in range(2):
                async with aiohttp.ClientSession(session._base_url) as client:
                    await (await client.post("/v1/completions", json=COMPLETION)).read()
            assert "cookie" not in one.headers[1]

    run(test)


def test_nothing_is_asked_for_that_the_client_did_not_ask_for():
    async def test(one, _two):
        one.behaviour = "whole"
        head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2"
        async with routed(one) as (session, _):
            await raw(session, head, b"{}")
            assert not {"accept", "accept-encoding", "user-agent"} & {name.lower() for name in one.headers[0]}

    run(test)


def test_headers_of_the_connection_end_here():
    async def test(one, _two):
        async with routed(one) as (session, _):
            headers = {"connection": "keep-alive, X-Mine", "x-mine": "1", "x-other": "2"}
            await (await session.post("/v1/completions", json=COMPLETION, headers=headers)).read()
            assert "x-mine" not in one.headers[0]
            assert one.headers[0]["x-other"] == "2"

    run(test)


def test_scores_say_nothing_of_requests_in_flight():
    """Tokens that wait are prompts less what is held of them, whoever sent them."""

    async def test(one, _two):
        one.behaviour = "hang"
        async with routed(one) as (session, context):
            before = await (await session.post("/v1/score", json={"prompt": [1, 2]})).json()
            waiting = asyncio.create_task(_post(session, {"prompt": list(range(64)), "cache_salt": "another's"}))
            await until(lambda: context.router.loads["one"].num_in_flight)
            assert await (await session.post("/v1/score", json={"prompt": [1, 2]})).json() == before
            one.release.set()
            await waiting

    run(test)


async def _post(session, body):
    async with session.post("/v1/completions", json=body) as response:
        return response.status, response.headers.get("x-kvgraft-worker"), await response.text()


@pytest.mark.parametrize("models", [None, [None], [{"parent": "x"}]])
def test_odd_lists_of_models_do_not_stop_the_monitor(models, monkeypatch):
    often(monkeypatch)

    async def test(one, _two):
        async with routed(one) as (_, context):
            load = context.router.loads["one"]
            one.healthy = False
            await until(lambda: not load.is_up)
            one.models, one.healthy = models, True
            await until(lambda: load.is_up)

    run(test)


def test_odd_metrics_do_not_stop_the_monitor(monkeypatch):
    """Nor does a report that fails for whatever reason: the next one counts, and the end of the worker is noticed."""
    often(monkeypatch)
    report, failed = WorkerLoad.report, []

    def odd(load, exposition, num_own=None):
        if "odd" in exposition:
            failed.append(load.spec.name)
            raise OverflowError("cannot convert float infinity to integer")
        report(load, exposition, num_own)

    monkeypatch.setattr(WorkerLoad, "report", odd)

    async def test(one, _two):
        async with routed(one) as (_, context):
            load = context.router.loads["one"]
            one.metrics = "odd"
            await until(lambda: len(failed) > 2)
            one.metrics = "vllm:num_requests_waiting +Inf\nvllm:num_requests_running 3\n"
            await until(lambda: load.foreign_running == 3)
            one.healthy = False
            await until(lambda: not load.is_up)

    run(test)


def test_a_stream_of_a_worker_that_vanished_ends(monkeypatch):
    often(monkeypatch)
    monkeypatch.setattr(monitor_module, "GONE_S", 0.2)

    async def test(one, _two):
        one.behaviour = "open"
        async with routed(one) as (session, _):
            response = await session.post("/v1/completions", json=COMPLETION)
            await response.content.readuntil(b"\n\n")
            one.healthy = False
            assert "worker_failed" in await response.text()

    run(test)


def test_a_request_that_a_vanished_worker_has_not_answered_goes_to_another(monkeypatch):
    often(monkeypatch)
    monkeypatch.setattr(monitor_module, "GONE_S", 0.2)

    async def test(one, two):
        one.behaviour = "hang"
        async with routed(one, two, policy="round_robin") as (session, _):
            tasks = [asyncio.create_task(_post(session, COMPLETION)) for _ in range(2)]
            await one.arrived.wait()
            one.healthy = False
            assert [(await task)[:2] for task in tasks] == [(200, "two")] * 2

    run(test)


def test_a_stream_goes_on_while_its_worker_is_too_busy_to_say_that_it_is_well(monkeypatch):
    often(monkeypatch)
    monkeypatch.setattr(monitor_module, "GONE_S", 0.3)

    async def test(one, _two):
        async def stream(request):
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(30):
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.02)
            await response.write(b"data: [DONE]\n\n")
            return response

        one._stream = stream
        async with routed(one) as (session, _):
            response = await session.post("/v1/completions", json=COMPLETION)
            one.healthy = False
            assert (await response.text()).endswith("data: [DONE]\n\n")

    run(test)


@pytest.mark.parametrize(
    "text",
    [
        "http://user:secret@127.0.0.1:8001",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://127.0.0.1:8001,label=é€",
        "http://127.0.0.1:8001,events=tcp://nohost",
        "http://127.0.0.1:8001,events=tcp://h:1,replay=tcp://nohost",
        "http://127.0.0.1:8001,events=tcp://h:70000",
        "http://127.0.0.1:8001,name=one,name=two",
    ],
)
def test_workers_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigError) as refused:
        parse_worker(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "header"), [("foo", "x-target"), ("http://h:1", "a b"), ("http://u:p@h:1", "x-target")]
)
def test_gateways_that_cannot_be_are_refused(url, header):
    with pytest.raises(ConfigError):
        Gateway(url, header)
