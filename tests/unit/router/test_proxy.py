"""The proxy in front of workers that answer, die, break off, hang and refuse."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.router.fake_workers import WAIT_S, Worker, often, routed, run, until

from kvgraft.reuse.donor_events import scope_of
from kvgraft.router.gateway import Gateway
from kvgraft.router.worker import WorkerSpec

CHAT = {"model": "model", "messages": [{"role": "user", "content": "what is this"}], "stream": True}
COMPLETION = {"model": "model", "prompt": "a b c d", "stream": True}


async def events(response):
    text = (await response.read()).decode()
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


async def asked(session, body=COMPLETION):
    """Status and worker of a request whose answer is read to its end."""
    async with session.post("/v1/completions", json=body) as response:
        await response.read()
        return response.status, response.headers.get("x-kvgraft-worker")


async def status(answer):
    """Status of an answer, read to its end."""
    async with answer as response:
        await response.read()
        return response.status


def metric(text, name):
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def metrics(session):
    return await (await session.get("/metrics")).text()


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_streams_are_passed_on(path, body):
    async def test(one, two):
        async with routed(one, two) as (session, context):
            response = await session.post(
                path, json=body, headers={"authorization": "Bearer key", "connection": "x-drop"}
            )
            assert response.content_type == "text/event-stream"
            told = await events(response)
            name = response.headers["x-kvgraft-worker"]
            assert [json.loads(event) for event in told[:-1]] == [{"from": name, "n": 0}, {"from": name, "n": 1}]
            assert told[-1] == "[DONE]"
            worker = one if name == "one" else two
            assert json.loads(worker.seen[0]) == body
            assert worker.headers[0]["authorization"] == "Bearer key"
            assert worker.headers[0]["x-request-id"] == response.headers["x-request-id"]
            assert not any(load.num_in_flight for load in context.router.loads.values())

    run(test)


@pytest.mark.parametrize("path", ["/v1/responses", "/tokenize"])
def test_paths_that_engines_alone_render_are_passed_on_and_counted(path):
    async def test(one, two):
        async with routed(one, two) as (session, _):
            assert await status(session.post(path, json={"input": "hello"})) == 200
            assert [json.loads(body) for body in one.seen + two.seen] == [{"input": "hello"}]
            assert metric(await metrics(session), 'kvgraft_router:unread_prompts_total{reason="path"}') == 1
            assert await status(session.post("/reset_prefix_cache")) == 404, "an operator's alone"

    run(test)


def test_prompts_that_are_not_read_are_counted_by_reason(caplog):
    async def test(one, two):
        async with routed(one, two) as (session, _):
            image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
            for _ in range(2):
                assert await status(session.post("/v1/chat/completions", json={"messages": image})) == 200
            broken = session.post("/v1/completions", data=b"{", headers={"content-type": "application/json"})
            assert await status(broken) == 200
            text = await metrics(session)
            assert metric(text, 'kvgraft_router:unread_prompts_total{reason="unsupported"}') == 2
            assert metric(text, 'kvgraft_router:unread_prompts_total{reason="invalid"}') == 1

    run(test)
    assert caplog.text.count("least loaded") == 2, "once for each reason"


def test_events_arrive_before_the_stream_ends():
    async def test(one, two):
        one.behaviour = two.behaviour = "open"
        async with routed(one, two) as (session, context):
            response = await session.post("/v1/completions", json=COMPLETION)
            assert await response.content.readuntil(b"\n\n")
            assert sum(load.num_in_flight for load in context.router.loads.values()) == 1
            one.release.set(), two.release.set()
            assert (await events(response))[-1] == "[DONE]"

    run(test)


def test_whole_answers_keep_status_and_headers():
    async def test(one, two):
        one.behaviour = two.behaviour = "whole"
        async with routed(one, two) as (session, _):
            response = await session.post("/v1/completions", json=COMPLETION | {"stream": False})
            assert (response.status, response.headers["x-own"]) == (200, "1")
            assert await response.json() == {"from": response.headers["x-kvgraft-worker"]}

    run(test)


@pytest.mark.parametrize("behaviour", ["die", "busy"])
def test_who_fails_before_the_first_byte_is_replaced_once(behaviour):
    async def test(one, two):
        one.behaviour = behaviour
        async with routed(one, two, policy="round_robin") as (session, context):
            for _ in range(4):
                response = await session.post("/v1/completions", json=COMPLETION)
                assert (response.status, response.headers["x-kvgraft-worker"]) == (200, "two")
                assert (await events(response))[-1] == "[DONE]"
            assert len(one.seen) >= 1
            assert metric(await metrics(session), 'kvgraft_router:retries_total{worker="one"}') == len(one.seen)
            assert not any(load.num_in_flight for load in context.router.loads.values())

    run(test)


def test_if_the_second_fails_too_the_client_is_told():
    async def test(one, two):
        one.behaviour = two.behaviour = "die"
        async with routed(one, two) as (session, _):
            response = await session.post("/v1/completions", json=COMPLETION)
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "worker_failed"
            assert len(one.seen) == len(two.seen) == 1

    run(test)


def test_the_refusal_of_the_last_worker_is_passed_on():
    async def test(one, two):
        one.behaviour = two.behaviour = "busy"
        async with routed(one, two) as (session, _):
            response = await session.post("/v1/completions", json=COMPLETION)
            assert response.status == 503
            assert (await response.json())["error"]["message"] in ("one", "two")

    run(test)


def test_a_worker_that_is_gone_gets_nothing_until_it_is_back(monkeypatch):
    often(monkeypatch)

    async def test(one, two):
        async with routed(one, two, policy="round_robin") as (session, context):
            await one.stop()
            for _ in range(3):
                assert await asked(session) == (200, "two")
            await until(lambda: not context.router.loads["one"].is_up)
            await one.start()
            await until(lambda: context.router.loads["one"].is_up)
            names = {(await asked(session))[1] for _ in range(2)}
            assert names == {"one", "two"}

    run(test)


def test_a_worker_that_dies_in_the_middle_fails_its_own_streams_only():
    async def test(one, two):
        one.behaviour, two.behaviour = "cut", "open"
        async with routed(one, two, policy="round_robin") as (session, context):
            responses = [await session.post("/v1/completions", json=COMPLETION) for _ in range(2)]
            one.release.set(), two.release.set()
            told = {response.headers["x-kvgraft-worker"]: await events(response) for response in responses}
            assert told["two"][-1] == "[DONE]"
            assert json.loads(told["one"][-1])["error"]["code"] == "worker_failed"
            assert [json.loads(event)["n"] for event in told["one"][:-1]] == [0, 1], "whole events only"
            text = await metrics(session)
            assert metric(text, 'kvgraft_router:requests_total{outcome="broken",worker="one"}') == 1
            assert metric(text, 'kvgraft_router:requests_total{outcome="ok",worker="two"}') == 1
            assert not any(load.num_in_flight for load in context.router.loads.values())

    run(test)


@pytest.mark.parametrize("behaviour", ["hang", "open"])
def test_a_client_that_leaves_ends_its_request_at_the_worker(behaviour):
    """Before the first byte and behind it."""

    async def test(one, two):
        one.behaviour = two.behaviour = behaviour
        async with routed(one, two, policy="round_robin") as (session, context):
            going = asyncio.create_task(session.post("/v1/completions", json=COMPLETION))
            await one.arrived.wait()
            if behaviour == "open":
                (await going).close()
            going.cancel()
            await asyncio.wait_for(one.left.wait(), WAIT_S)
            await until(lambda: not any(load.num_in_flight for load in context.router.loads.values()))
            assert metric(await metrics(session), 'kvgraft_router:requests_total{outcome="left",worker="one"}') == 1
            assert not two.seen

    run(test)


def test_a_slow_worker_is_waited_for_and_gets_no_more():
    async def test(one, two):
        one.behaviour, two.behaviour = "hang", "stream"
        async with routed(one, two, policy="least_loaded") as (session, _):
            first = asyncio.create_task(session.post("/v1/completions", json=COMPLETION))
            await one.arrived.wait()
            for _ in range(3):
                assert await asked(session) == (200, "two")
            one.release.set()
            response = await first
            await response.read()
            assert response.headers["x-kvgraft-worker"] == "one"

    run(test)


def test_full_queues_are_refused_with_503():
    async def test(one, two):
        one.behaviour = two.behaviour = "hang"
        async with routed(one, two, max_in_flight=1) as (session, _):
            running = [asyncio.create_task(session.post("/v1/completions", json=COMPLETION)) for _ in range(2)]
            await one.arrived.wait()
            await two.arrived.wait()
            response = await session.post("/v1/completions", json=COMPLETION)
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert "all workers have 1 requests" in (await response.json())["error"]["message"]
            one.release.set(), two.release.set()
            for task in running:
                assert await (await task).json() in ({"from": "one"}, {"from": "two"})
            assert metric(await metrics(session), 'kvgraft_router:refused_requests_total{reason="full"}') == 1

    run(test)


def test_without_a_worker_there_is_503_and_no_health():
    async def test(one, two):
        one.healthy = two.healthy = False
        async with routed(one, two) as (session, _):
            response = await session.post("/v1/completions", json=COMPLETION)
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            await response.read()
            health = await session.get("/health")
            assert (health.status, (await health.json())["status"]) == (503, "no_worker")
            assert await status(session.get("/v1/models")) == 503

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"prompt": 3}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"prompt": []}',
    ],
)
def test_what_cannot_be_tokenised_goes_to_the_least_loaded(body):
    async def test(one, two):
        one.behaviour = "hang"
        async with routed(one, two) as (session, _):
            first = asyncio.create_task(session.post("/v1/completions", json=COMPLETION))
            await one.arrived.wait()
            response = await session.post(
                "/v1/chat/completions", data=body, headers={"content-type": "application/json"}
            )
            assert response.headers["x-kvgraft-worker"] == "two"
            await response.read()
            assert two.seen == [body], "the worker says what is wrong with it"
            one.release.set()
            await (await first).read()

    run(test)


def test_load_that_others_cause_is_seen(monkeypatch):
    often(monkeypatch)

    async def test(one, two):
        one.metrics = 'vllm:num_requests_waiting{engine="0"} 7.0\nvllm:num_requests_running{engine="0"} 3.0\n'
        async with routed(one, two) as (session, context):
            await until(lambda: context.router.loads["one"].foreign_waiting == 7)
            for _ in range(3):
                assert await asked(session) == (200, "two")

    run(test)


def test_a_gateway_is_told_whom_to_ask():
    async def test(one, two):
        gateway = Worker("gateway")
        await gateway.start()
        specs = [WorkerSpec(one.url, name="one", label="pod-1"), WorkerSpec(two.url, name="two", label="pod-2")]
        told = Gateway(gateway.url, "X-SMG-Target-Worker")
        async with routed(gateway=told, specs=specs, policy="round_robin") as (session, _):
            for _ in range(2):
                response = await session.post(
                    "/v1/completions", json=COMPLETION, headers={"x-smg-target-worker": "mine"}
                )
                assert (await events(response))[-1] == "[DONE]"
        assert [headers.getall("x-smg-target-worker") for headers in gateway.headers] == [["pod-1"], ["pod-2"]]
        assert not one.seen + two.seen
        await gateway.stop()

    run(test)


def test_adapters_are_scopes_of_their_own():
    async def test(one, two):
        one.models = [{"id": "model"}, {"id": "tuned", "parent": "model"}]
        async with routed(one, two) as (_, context):
            assert context.router.scope_of("tuned", "salt") == scope_of("tuned", "salt")
            assert context.router.scope_of("model", "salt") == scope_of("", "salt")

    run(test)


def test_scores_are_told():
    async def test(one, two):
        async with routed(one, two) as (session, _):
            response = await session.post("/v1/score", json={"messages": CHAT["messages"]})
            assert response.status == 200
            told = await response.json()
            assert told["num_tokens"] == len(["User:", "what", "is", "this", "Assistant:"])
            assert told["workers"]["one"] == {
                "url": one.url,
                "up": True,
                "exact_tokens": 0,
                "continued_tokens": 0,
                "shifted_tokens": 0,
                "seconds_saved": None,
            }
            refused = await session.post("/v1/score", json={"prompt": {}})
            assert refused.status == 400
            assert "give prompt or messages" in (await refused.json())["error"]["message"]

    run(test)


def test_other_paths_and_sizes_are_refused_here():
    async def test(one, two):
        async with routed(one, two) as (session, _):
            assert await status(session.post("/v1/embeddings", json={})) == 404
            assert await status(session.get("/v1/completions")) == 405
            assert await status(session.post("/v1/completions", data=b"x")) == 415
            models = await session.get("/v1/models")
            assert (await models.json())["data"] == [{"id": "model"}]
            assert await status(session.get("/")) == 200
            assert (await (await session.get("/health")).json())["workers"]["one"]["up"] is True

    run(test)


def test_while_it_shuts_down_running_requests_end_and_no_more_are_taken():
    async def test(one, two):
        one.behaviour = two.behaviour = "hang"
        async with routed(one, two) as (session, context):
            running = asyncio.create_task(session.post("/v1/completions", json=COMPLETION))
            await until(lambda: one.seen or two.seen)
            closing = asyncio.create_task(context.close(WAIT_S))
            await until(lambda: context.draining)
            assert await status(session.post("/v1/completions", json=COMPLETION)) == 503
            one.release.set(), two.release.set()
            assert await (await running).json() == {"from": "one" if one.seen else "two"}
            await closing

    run(test)
